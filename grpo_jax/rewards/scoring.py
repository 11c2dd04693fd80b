"""Calls reward functions by their signature and gathers what they return.

A reward is `reward(prompt, completion, **any column it names)` and returns a number, a bool, `None`
for "cannot be scored", or, as a process reward, a list of `(end, reward)` steps: `end` is how many
characters of the completion have been written when the step is complete. Functions of whole batches
are wrapped by `batched` or `trl_style`. Left out on purpose: guessing. A function that takes what
the rows do not have, or returns what is no reward, is an error; "cannot be scored" is never a zero.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import numpy as np

Row = Mapping[str, Any]
Reward = Callable[..., Any]
Rewards = Reward | Sequence[Reward] | Mapping[str, Reward]
Steps = tuple[tuple[int, float], ...]


MESSAGES = "_messages"  # the column that holds the messages a prompt was asked with
LARGEST = float(np.finfo(np.float32).max)


class Scores(NamedTuple):
    """Rewards of P prompts, G completions each, under N functions. NaN is "cannot be scored".

    `reward_PG` is `combine(reward_PGN, weights)`. `steps_PGN[p][g][n]` holds the steps of a process
    reward as `(end in characters, reward)`, else `None`; its entry in `reward_PGN` is their sum.
    `failed_N` counts the NaNs that stand for an exception or an invalid value.
    """

    reward_PG: np.ndarray
    reward_PGN: np.ndarray
    steps_PGN: list[list[list[Steps | None]]]
    failed_N: np.ndarray


class RewardError(RuntimeError):
    """A reward function failed or returned what is no reward; the message says which and where."""


@dataclass(frozen=True)
class Batched:
    """A reward function of whole batches; made by `batched` and `trl_style`."""

    fn: Reward
    plural: bool = False
    conversational: bool = False

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Row]
    ) -> list:
        """One value for each completion. Raises RewardError where the function returns another
        number of them.
        """
        names = [name for name in rows[0] if name != MESSAGES]
        shared = [name for name in names if all(name in row for row in rows)]
        columns = {name: [row[name] for row in rows] for name in shared}
        if self.conversational:
            asked = zip(rows, prompts, strict=True)
            prompts = [row.get(MESSAGES) or [user_message(text)] for row, text in asked]
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        own = ("prompts", "completions") if self.plural else ("prompt", "completion")
        columns = columns | dict(zip(own, (list(prompts), list(completions)), strict=True))
        values = self.fn(**arguments(self.fn, columns))
        got = (
            len(values)
            if isinstance(values, list | tuple | np.ndarray) and np.ndim(values) != 0
            else None
        )
        if got != len(completions):
            what = f"a single {type(values).__name__}" if got is None else f"{got} values"
            raise RewardError(
                f"batched reward {reward_name(self.fn)!r} returned {what} for "
                f"{len(completions)} completions; expected a list with one value for each"
            )
        return list(values)


def user_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def batched(fn: Reward) -> Batched:
    """Adapts `fn(prompt, completion, column, ...) -> list`, where each argument is a list, one
    entry a completion.
    """
    return Batched(fn)


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


def reward_functions(rewards: Rewards) -> dict[str, Reward]:
    """Reward functions by name: one function, several, or a mapping of names to functions.

    Functions of the same name are told apart by their number: `score`, `score_2`.
    """
    if callable(rewards):
        rewards = [rewards]
    if isinstance(rewards, Mapping):
        named = dict(rewards)
    else:
        named = {}
        for fn in rewards:
            name = reward_name(fn)
            taken = sum(known.partition("~")[0] == name for known in named)
            named[f"{name}~{taken + 1}" if taken else name] = fn
        named = {name.replace("~", "_"): fn for name, fn in named.items()}
    if not named:
        raise ValueError("no reward function given")
    for name, fn in named.items():
        if not callable(fn):
            raise TypeError(f"reward {name!r} must be a function, got {fn!r}")
    return named


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
    columns = {name: value for name, value in row.items() if name != MESSAGES}
    return fn(**arguments(fn, {**columns, "prompt": prompt, "completion": completion}))


def check_reward(fn: Reward, row: Row) -> None:
    """Raises ValueError if `fn` takes an argument that neither a completion nor `row` gives; calls
    nothing.
    """
    plural = isinstance(fn, Batched) and fn.plural
    own = ("prompts", "completions") if plural else ("prompt", "completion")
    arguments(fn.fn if isinstance(fn, Batched) else fn, {**row, **dict.fromkeys(own)})


def score(
    rewards: Rewards,
    rows: Sequence[Row],
    prompts: Sequence[str],
    completions_PG: Sequence[Sequence[str]],
    *,
    on_error: str = "raise",
    weights: Sequence[float] | None = None,
    columns_PG: Mapping[str, Sequence[Sequence[Any]]] | None = None,
) -> Scores:
    """Every completion under every reward function.

    `rows[p]` are the columns of prompt p; `columns_PG` adds columns that differ between
    completions, such as their length in tokens. An exception inside a reward, or a value that is no
    reward, raises RewardError with its place, or, with `on_error="skip"`, becomes NaN and is
    counted. Mistakes that would repeat for every row raise either way: a missing column, a wrong
    number of prompts, completions or values.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f'on_error must be "raise" or "skip", got {on_error!r}')
    functions = list(reward_functions(rewards).values())
    group = _group_size(rows, prompts, completions_PG, columns_PG or {})
    asked = _Asked(
        rows=[
            {**row, **{name: column[p][g] for name, column in (columns_PG or {}).items()}}
            for p, row in enumerate(rows)
            for g in range(group)
        ],
        prompts=[prompt for prompt in prompts for _ in range(group)],
        completions=[text for texts in completions_PG for text in texts],
    )
    shape = (len(rows), group, len(functions))
    reward_PGN = np.full(shape, np.nan)
    failed_N = np.zeros(len(functions), int)
    steps_PGN: list = [[[None] * len(functions) for _ in range(group)] for _ in rows]
    for n, fn in enumerate(functions):
        for row in asked.rows[::group]:
            check_reward(fn, row)
        for i, outcome in enumerate(_outcomes(fn, asked)):
            p, g = divmod(i, group)
            try:
                if isinstance(outcome, Exception):
                    raise outcome
                scored = _checked(outcome, asked.completions[i])
                reward_PGN[p, g, n], steps_PGN[p][g][n] = scored
            except Exception as error:
                if on_error == "raise":
                    raise _failure(fn, error, p, g, asked, i) from error
                failed_N[n] += 1
    return Scores(combine(reward_PGN, weights), reward_PGN, steps_PGN, failed_N)


class _Asked(NamedTuple):
    """What is scored, one entry a completion."""

    rows: list[dict[str, Any]]
    prompts: list[str]
    completions: list[str]


def _failure(fn: Reward, error: Exception, p: int, g: int, asked: _Asked, i: int) -> RewardError:
    return RewardError(
        f"reward {reward_name(fn)!r} failed on prompt {p}, completion {g}: "
        f"{type(error).__name__}: {error}\n  prompt: {_short(asked.prompts[i])}\n"
        f"  completion: {_short(asked.completions[i])}"
    )


def combine(reward_PGN: np.ndarray, weights: Sequence[float] | None = None) -> np.ndarray:
    """`Σ_n w_n R_n` over the rewards that are not NaN; NaN where all are. Weights are 1 by
    default.
    """
    reward_PGN = np.asarray(reward_PGN, float)
    count = reward_PGN.shape[-1]
    weight_N = np.ones(count) if weights is None else np.asarray(weights, float)
    if weight_N.shape != (count,) or not np.isfinite(weight_N).all():
        raise ValueError(
            f"expected {count} finite weights, one for each reward function, got {weights!r}"
        )
    missing = np.isnan(reward_PGN)
    total = np.where(missing, 0.0, reward_PGN) @ weight_N
    return np.where(missing.all(-1), np.nan, total)


def _group_size(rows, prompts, completions_PG, columns_PG) -> int:
    if not rows or not len(rows) == len(prompts) == len(completions_PG):
        raise ValueError(
            f"expected as many rows as prompts and groups of completions, at least one: "
            f"got {len(rows)} rows, {len(prompts)} prompts, {len(completions_PG)} groups"
        )
    sizes = {len(completions) for completions in completions_PG}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            "every group must have the same number of completions, at least one; "
            f"got {sorted(sizes)}"
        )
    for name, column in columns_PG.items():
        if len(column) != len(rows) or {len(values) for values in column} != sizes:
            raise ValueError(
                f"column {name!r} must have one value for each of {len(rows)} × {min(sizes)} "
                "completions"
            )
    return sizes.pop()


def _outcomes(fn: Reward, asked: _Asked) -> list:
    """What the function returned for each completion, or the exception that it raised."""
    if isinstance(fn, Batched):
        try:
            return fn(asked.prompts, asked.completions, asked.rows)
        except RewardError:  # a wrong number of values cannot be matched to completions
            raise
        except Exception as error:
            return [error] * len(asked.completions)
    outcomes: list = []
    for row, prompt, completion in zip(asked.rows, asked.prompts, asked.completions, strict=True):
        try:
            outcomes.append(call_reward(fn, row, prompt, completion))
        except Exception as error:
            outcomes.append(error)
    return outcomes


def _checked(outcome: Any, completion: str) -> tuple[float, Steps | None]:
    """The reward as a float with its steps; NaN for `None` and for a process reward without any
    step.
    """
    if outcome is None:
        return math.nan, None
    if not isinstance(outcome, list | tuple):
        return _number(outcome), None
    steps = []
    previous = 0
    for step in outcome:
        if (
            not isinstance(step, list | tuple)
            or len(step) != 2
            or not isinstance(step[0], int | np.integer)
        ):
            raise TypeError(
                f"a process reward is a list of (end position, reward), got the entry {step!r}"
            )
        if not previous < step[0] <= len(completion):
            raise ValueError(
                f"step ends must grow within 1 … {len(completion)} characters, got {step[0]} "
                f"after {previous}"
            )
        previous = int(step[0])
        steps.append((previous, _number(step[1])))
    return (math.fsum(reward for _, reward in steps), tuple(steps)) if steps else (math.nan, None)


def _number(value: Any) -> float:
    """A reward as a float: Python's and NumPy's numbers, decimals, fractions, scalar arrays."""
    if isinstance(value, Mapping):
        raise TypeError(
            f"a reward is a number, a bool or None, got a mapping {value!r}; for several rewards "
            "give the task several functions, or a mapping of names to functions"
        )
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # of JAX, PyTorch or NumPy
        value = value.item()
    if not isinstance(value, int | float | np.bool_ | np.number | Decimal | Fraction):
        raise TypeError(
            f"a reward is a number, a bool or None, got {type(value).__name__} {value!r}"
        )
    if not abs(value) <= LARGEST:
        raise ValueError(
            f'a reward is finite in float32, got {value!r}; return None for "cannot be scored"'
        )
    return float(value)


def _short(text: str, limit: int = 200) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "…")
