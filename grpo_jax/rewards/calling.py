"""One call of a reward function: by its signature, by its kind, and what it raised.

Runs in the trainer's process and in a worker's (see `pool`) alike. Left out on purpose: what the
values mean (see `scoring`).
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

Row = Mapping[str, Any]
Reward = Callable[..., Any]

MESSAGES = "_messages"  # the column that holds the messages a prompt was asked with
CONCURRENCY = 64  # calls of an asynchronous function that are awaited at once


class RewardError(RuntimeError):
    """A reward function failed or returned what is no reward; the message says which and where."""


class CountError(RewardError):
    """A function of whole batches returned values that cannot be matched to completions."""


class Asked(NamedTuple):
    """What is scored, one entry a completion; those of a prompt, `group` of them, lie together."""

    rows: list[dict[str, Any]]
    prompts: list[str]
    completions: list[str]
    group: int = 1

    def some(self, part: Sequence[int]) -> "Asked":
        """Those entries alone."""
        return Asked(
            [self.rows[i] for i in part],
            [self.prompts[i] for i in part],
            [self.completions[i] for i in part],
            self.group,
        )


@dataclass(frozen=True)
class Batched:
    """A reward function of whole batches, or of whole groups; made by `batched`, `grouped` and
    `trl_style`.
    """

    fn: Reward
    plural: bool = False
    conversational: bool = False
    by_group: bool = False

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Row]
    ) -> list:
        """One value for each completion. Raises RewardError where the function returns another
        number of them.
        """
        return self.counted(self.fn(**self.columns(prompts, completions, rows)), len(completions))

    async def awaited(
        self, prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Row]
    ) -> list:
        """As a call, of an asynchronous function."""
        values = await self.fn(**self.columns(prompts, completions, rows))
        return self.counted(values, len(completions))

    def columns(
        self, prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Row]
    ) -> dict[str, Any]:
        """The arguments that the function is called with."""
        names = [name for name in rows[0] if name != MESSAGES]
        shared = [name for name in names if all(name in row for row in rows)]
        columns = {name: [row[name] for row in rows] for name in shared}
        questions: list = list(prompts)
        texts: list = list(completions)
        if self.conversational:
            asked = zip(rows, prompts, strict=True)
            questions = [row.get(MESSAGES) or [user_message(text)] for row, text in asked]
            texts = [[{"role": "assistant", "content": text}] for text in completions]
        own = ("prompts", "completions") if self.plural else ("prompt", "completion")
        return arguments(self.fn, columns | dict(zip(own, (questions, texts), strict=True)))

    def counted(self, values: Any, expected: int) -> list:
        """The values as a list. Raises CountError where there is not one for each completion."""
        several = isinstance(values, list | tuple | np.ndarray) and np.ndim(values) != 0
        if several and len(values) == expected:
            return list(values)
        what = f"{len(values)} values" if several else f"a single {type(values).__name__}"
        raise CountError(
            f"batched reward {reward_name(self.fn)!r} returned {what} for "
            f"{expected} completions; expected a list with one value for each"
        )


def user_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def batched(fn: Reward) -> Batched:
    """Adapts `fn(prompt, completion, column, ...) -> list`, where each argument is a list, one
    entry a completion.
    """
    return Batched(fn)


def grouped(fn: Reward) -> Batched:
    """As `batched`, but each call gets the completions of one prompt."""
    return Batched(fn, by_group=True)


def trl_style(fn: Reward, *, conversational: bool = False) -> Batched:
    """Adapts a reward written for TRL: `fn(prompts, completions, **columns) -> list`.

    With `conversational`, prompts are passed as the messages they were asked with, and completions
    as lists of one message of the assistant.
    """
    return Batched(fn, plural=True, conversational=conversational)


def reward_name(fn: Reward) -> str:
    """The name to show for a reward function, through `partial` and adapters."""
    while isinstance(fn, partial | Batched):
        fn = fn.func if isinstance(fn, partial) else fn.fn
    return getattr(fn, "__name__", type(fn).__name__)


def arguments(fn: Reward, values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `values` that the signature of `fn` takes; all of them where it has
    `**kwargs`.

    What a `partial` has bound stays bound, and a default is used where there is no such column.
    Raises ValueError, naming the column and those there are, where an argument has neither.
    """
    bound = fn.keywords if isinstance(fn, partial) else {}
    taken = {}
    for name, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            return taken | {key: value for key, value in values.items() if key not in bound}
        if parameter.kind is parameter.VAR_POSITIONAL or name in bound:
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(
                f"reward {reward_name(fn)!r} takes {name!r} by position only; it is called by names"
            )
        if name in values:
            taken[name] = values[name]
        elif parameter.default is parameter.empty:
            raise ValueError(
                f"reward {reward_name(fn)!r} takes an argument {name!r}, but there is no such "
                f"column; available: {', '.join(name for name in values if name != MESSAGES)}"
            )
    return taken


def call_reward(fn: Reward, row: Row, prompt: str, completion: str) -> Any:
    """What `fn` returns for one completion, called with just the arguments it takes, unchecked.

    `prompt` and `completion` are the texts; a column of that name does not replace them.
    """
    if isinstance(fn, Batched):
        raise TypeError(
            f"reward {reward_name(fn)!r} is a function of whole batches; one of single completions "
            "is expected here"
        )
    columns = {name: value for name, value in row.items() if name != MESSAGES}
    return fn(**arguments(fn, {**columns, "prompt": prompt, "completion": completion}))


def outcomes(fn: Reward, asked: Asked) -> list:
    """What the function returned for each completion, or the exception that it raised."""
    jobs = calls(fn, asked)
    return spread(fn, jobs, made(fn, jobs))


def made(fn: Reward, jobs: Sequence[Asked], timeout: float | None = None) -> list:
    """What each call returned or raised.

    Calls of an asynchronous function are awaited together, at most `CONCURRENCY` at once and each
    for at most `timeout` seconds. Other calls can be ended only from outside their process.
    """
    if is_async(fn):
        return _without_loop(lambda: asyncio.run(_awaited(fn, jobs, timeout)))
    return [_caught(partial(_call, fn, job)) for job in jobs]


def _call(fn: Reward, job: Asked) -> Any:
    if isinstance(fn, Batched):
        return fn(job.prompts, job.completions, job.rows)
    return call_reward(fn, job.rows[0], job.prompts[0], job.completions[0])


def calls(fn: Reward, asked: Asked) -> list[Asked]:
    """What each call of a function is about: one completion, one group, or all."""
    count = len(asked.completions)
    size = 1
    if isinstance(fn, Batched):
        size = asked.group if fn.by_group else count
    return [asked.some(range(first, first + size)) for first in range(0, count, size)]


def spread(fn: Reward, jobs: Sequence[Asked], values: Sequence[Any]) -> list:
    """One value for each completion, from what each call returned or raised."""
    if not isinstance(fn, Batched):
        return list(values)
    found: list = []
    for job, value in zip(jobs, values, strict=True):
        found += [value] * len(job.completions) if isinstance(value, Exception) else value
    return found


def is_async(fn: Reward) -> bool:
    """Whether what a call returns must be awaited."""
    while isinstance(fn, partial | Batched):
        fn = fn.func if isinstance(fn, partial) else fn.fn
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
        getattr(fn, "__call__", None)  # noqa: B004
    )


def _caught(call: Callable[[], Any]) -> Any:
    """What the call returns or raises; `sys.exit` in a reward does not end the trainer.

    A wrong number of values cannot be matched to completions: that raises.
    """
    try:
        return call()
    except CountError:
        raise
    except Exception as error:
        return error
    except SystemExit as error:
        return _exited(error)


def _exited(error: SystemExit) -> Exception:
    return RuntimeError(f"the function called sys.exit({error.code!r})")


async def _awaited(fn: Reward, jobs: Sequence[Asked], timeout: float | None) -> list:
    """What each call came to, in order."""
    free = asyncio.Semaphore(CONCURRENCY)

    async def one(job: Asked) -> Any:
        async with free:
            try:
                return await asyncio.wait_for(_await(fn, job), timeout)
            except CountError:
                raise
            except TimeoutError as error:
                late = f"no value within {timeout} seconds (timeout)"
                return error if str(error) else TimeoutError(late)
            except Exception as error:
                return error
            except SystemExit as error:
                return _exited(error)

    return await asyncio.gather(*map(one, jobs))


async def _await(fn: Reward, job: Asked) -> Any:
    if isinstance(fn, Batched):
        return await fn.awaited(job.prompts, job.completions, job.rows)
    return await _call(fn, job)


def _without_loop(call: Callable[[], list]) -> list:
    """The call, in a thread of its own where this one runs an event loop, as a notebook does."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()
