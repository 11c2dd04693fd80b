"""Rewards made of other rewards: by length, by efficiency within a group, rounded.

Each takes a reward function of single completions first and returns one that takes the same
columns, and those that it adds.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any

from grpo_jax.rewards.calling import Batched, Reward, call_reward, grouped, is_async, reward_name

LENGTH = "completion_length"


def rounded(reward: Reward, *, digits: int = 2) -> Reward:
    """A graded reward, rounded to `digits` decimals (halves to even).

    Advantages divide by a group's spread: differences that mean nothing would count as much as
    those that do.
    """
    if digits < 0:
        raise ValueError(f"digits must be at least 0, got {digits}")
    step = Decimal(1).scaleb(-digits)

    def near(value: Any) -> Any:
        if value is None or not math.isfinite(value):
            return value
        return float(Decimal(repr(float(value))).quantize(step, ROUND_HALF_EVEN))

    def shaped(value: Any, _columns: dict) -> Any:
        if isinstance(value, list | tuple):  # steps
            return [(end, near(part)) for end, part in value]
        return near(value)

    return _shaped(reward, shaped)


def cosine_length(
    correct: Reward,
    *,
    max_length: int,
    right: tuple[float, float] = (2.0, 1.0),
    wrong: tuple[float, float] = (-10.0, 0.0),
    exceeded: float = -10.0,
    threshold: float = 0.5,
) -> Reward:
    """Short where it is right, long where it is wrong, along a cosine of the length.

    `R = r_L + (r_0 − r_L)(1 + cos(π |o|/Lmax))/2`, with `(r_0, r_L)` for the length 0 and `Lmax`
    those of `right` where `correct` gives at least `threshold`, else of `wrong`; `exceeded` from
    `Lmax` on (arXiv 2502.03373, §4.1, eq. 1, with its defaults). `None` where `correct` is.
    """
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")

    def shaped(value: Any, columns: dict) -> float | None:
        if value is None:
            return None
        length = columns[LENGTH]
        if length >= max_length:
            return exceeded
        at_0, at_end = right if value >= threshold else wrong
        return at_end + (at_0 - at_end) * (1 + math.cos(math.pi * length / max_length)) / 2

    return _shaped(correct, shaped, LENGTH)


def efficiency(correct: Reward, *, threshold: float = 0.5) -> Batched:
    """Shorter than the others of its group is better, and a wrong answer never gains by it.

    `λ = 1/2 − (|o| − min)/(max − min)` over the lengths of the group, and 0 where they are equal; a
    right completion gets `λ`, a wrong one `min(0, λ)` (Kimi k1.5, arXiv 2501.12599, §2.3.3). Right
    is what `correct` gives at least `threshold`; `None` where it gives none. Add it to `correct`
    itself with a weight.
    """
    _single(correct)

    def shaped(**columns: Sequence) -> list[float | None]:
        lengths = [int(length) for length in columns[LENGTH]]
        entries = zip(*columns.values(), strict=True)
        rows = [dict(zip(columns, entry, strict=True)) for entry in entries]
        values = [_value(correct, row) for row in rows]
        least, spread = min(lengths), max(lengths) - min(lengths)
        shares = [0.5 - (length - least) / spread if spread else 0.0 for length in lengths]
        return [
            None if value is None else share if value >= threshold else min(0.0, share)
            for value, share in zip(values, shares, strict=True)
        ]

    return grouped(_named(shaped, correct, (LENGTH,), "efficiency"))


def _shaped(reward: Reward, shape: Callable[[Any, dict], Any], *added: str) -> Reward:
    """A reward that changes what another returns, knowing the columns."""
    _single(reward)

    def shaped(**columns: Any) -> Any:
        return shape(_value(reward, columns), columns)

    return _named(shaped, reward, added, reward_name(reward))


def _single(reward: Reward) -> None:
    if not callable(reward) or isinstance(reward, Batched) or is_async(reward):
        raise TypeError(
            f"a reward of single completions that is not asynchronous can be shaped, got {reward!r}"
        )


def _value(reward: Reward, columns: dict) -> Any:
    return call_reward(reward, columns, columns.get("prompt", ""), columns.get("completion", ""))


def _named(shaped: Reward, reward: Reward, added: Sequence[str], name: str) -> Reward:
    """`shaped` with a signature: the columns of another, by name, and those that are added."""
    kinds = inspect.Parameter
    taken = dict(inspect.signature(reward).parameters)
    for column in ("prompt", "completion"):
        taken.pop(column, None)
    for bound in getattr(reward, "keywords", {}):
        taken.pop(bound, None)
    columns = [
        parameter.replace(kind=kinds.KEYWORD_ONLY)
        for parameter in taken.values()
        if parameter.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
    ]
    own = ["prompt", "completion", *(column for column in added if column not in taken)]
    columns += [kinds(column, kinds.KEYWORD_ONLY) for column in own]
    columns += [parameter for parameter in taken.values() if parameter.kind is kinds.VAR_KEYWORD]
    shaped.__signature__ = inspect.Signature(columns)  # type: ignore[attr-defined]
    shaped.__name__ = name
    return shaped
