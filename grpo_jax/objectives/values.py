"""Options of parts, corrections and presets: Python or NumPy numbers, arrays, or traced arrays.

What has a value is checked where it is given. A traced array has none yet: it passes, so that an
option may be the state of an `AdaptiveObjective`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def number(name: str, value: Any) -> float | None:
    """The value of a single number; None for one that is only traced, or for several numbers."""
    if isinstance(value, jax.core.Tracer) or np.ndim(value) > 0:
        return None
    if isinstance(value, int | float | np.generic | np.ndarray | jax.Array):
        return float(value)
    raise TypeError(f"{name} must be a number or an array, got {value!r}.")


def is_off(value: Any) -> bool:
    """Whether an option is 0 for good; a JAX array that holds 0 may hold another value later."""
    return not isinstance(value, jax.Array) and number("the option", value) == 0


def check(fits: Callable[..., bool], needs: str, **options: Any) -> None:
    """Raises a ValueError unless the options, in their order, fit; where all have a value."""
    values = {name: number(name, value) for name, value in options.items()}
    if None not in values.values() and not fits(*values.values()):
        given = ", ".join(f"{name}={value}" for name, value in options.items())
        raise ValueError(f"{needs}, got {given}.")


def _check_each(fits: Callable[[float], bool], kind: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        known = number(name, value)
        if known is not None and not fits(known):
            raise ValueError(f"{name} must be {kind}, got {value}.")


def not_negative(**options: Any) -> None:
    _check_each(
        lambda x: math.isfinite(x) and x >= 0, "a finite number that is not negative", options
    )


def positive(**options: Any) -> None:
    _check_each(lambda x: math.isfinite(x) and x > 0, "a finite positive number", options)


def share(**options: Any) -> None:
    _check_each(lambda x: 0 <= x <= 1, "between 0 and 1", options)


def whole(**options: Any) -> None:
    _check_each(lambda x: x >= 1 and x.is_integer(), "a whole number of at least 1", options)
