"""Calls reward functions by their signature and gathers what they return.

A reward is `reward(prompt, completion, **any column it names)` and returns a number, a bool, `None`
for "cannot be scored", or, as a process reward, a list of `(end, reward)` steps: `end` is how many
characters of the completion have been written when the step is complete. Functions of whole batches
are wrapped by `batched` or `trl_style`. Left out on purpose: guessing. A function that takes what
the rows do not have, or returns what is no reward, is an error; "cannot be scored" is never a zero.
"""

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.rewards.calling import (
    MESSAGES,
    Asked,
    Batched,
    Reward,
    RewardError,
    Row,
    arguments,
    batched,
    call_reward,
    grouped,
    outcomes,
    reward_name,
    trl_style,
)
from grpo_jax.rewards.pool import outcomes_of_workers
from grpo_jax.rewards.waiting import waiting

__all__ = [
    "MESSAGES",
    "RewardError",
    "Scores",
    "batched",
    "call_reward",
    "check_reward",
    "combine",
    "grouped",
    "reward_functions",
    "reward_name",
    "score",
    "trl_style",
]

Rewards = Reward | Sequence[Reward] | Mapping[str, Reward]
Steps = tuple[tuple[int, float], ...]

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
    workers: int = 0,
    timeout: float | None = None,
) -> Scores:
    """Every completion under every reward function.

    `rows[p]` are the columns of prompt p; `columns_PG` adds columns that differ between
    completions, such as their length in tokens. An exception inside a reward, or a value that is no
    reward, raises RewardError with its place, or, with `on_error="skip"`, becomes NaN and is
    counted. Mistakes that would repeat for every row raise either way: a missing column, a wrong
    number of prompts, completions or values.

    With `workers`, functions run in as many processes (see `pool`), where a call that takes longer
    than `timeout` seconds is ended with its process. A call that hangs, exits or is killed counts
    as one that raised. An asynchronous function is awaited, its calls together.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f'on_error must be "raise" or "skip", got {on_error!r}')
    named = reward_functions(rewards)
    functions = list(named.values())
    check_timeout(workers, timeout)
    group = _group_size(rows, prompts, completions_PG, columns_PG or {})
    asked = Asked(
        rows=[
            {**row, **{name: column[p][g] for name, column in (columns_PG or {}).items()}}
            for p, row in enumerate(rows)
            for g in range(group)
        ],
        prompts=[prompt for prompt in prompts for _ in range(group)],
        completions=[text for texts in completions_PG for text in texts],
        group=group,
    )
    shape = (len(rows), group, len(functions))
    reward_PGN = np.full(shape, np.nan)
    failed_N = np.zeros(len(functions), int)
    steps_PGN: list = [[[None] * len(functions) for _ in range(group)] for _ in rows]
    for n, (name, fn) in enumerate(named.items()):
        for row in asked.rows[::group]:
            check_reward(fn, row)
        for i, outcome in enumerate(_outcomes(name, fn, asked, workers, timeout)):
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


def check_timeout(workers: int, timeout: float | None) -> None:
    """Raises ValueError where a call could not be ended in time."""
    if timeout is not None and workers < 1:
        raise ValueError(
            "timeout needs workers of at least 1: a call in the trainer's own process cannot be "
            "ended"
        )


def _outcomes(
    name: str, fn: Reward, asked: Asked, workers: int, timeout: float | None
) -> Sequence[Any]:
    """What the function returned for each completion, or the exception that it raised."""
    with waiting(name):
        if workers:
            return outcomes_of_workers(fn, asked, workers, timeout)
        return outcomes(fn, asked)


def _failure(fn: Reward, error: Exception, p: int, g: int, asked: Asked, i: int) -> RewardError:
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
