"""A paper is a binding of parts."""

import functools
import math

from grpo_jax.objectives.advantages import center, standardize
from grpo_jax.objectives.aggregates import fixed_length, sequence_mean, token_mean
from grpo_jax.objectives.compose import Objective, compose
from grpo_jax.objectives.divergences import k3
from grpo_jax.objectives.ratios import per_sequence, per_token
from grpo_jax.objectives.surrogates import clipped


def _not_negative(**options: float) -> None:
    for name, value in options.items():
        if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number that is not negative, got {value}.")


def _clip(low: float, high: float):
    _not_negative(low=low, high=high)
    return functools.partial(clipped, low=low, high=high)


def grpo(*, low: float = 0.2, high: float = 0.2, beta: float = 0.04) -> Objective:
    """1/B Σ_i 1/|o_i| Σ_t [−min(rA, clip(r)A) + β k3], A standardized. Shao et al. 2024 (2402.03300), eq. 3."""
    return Objective(standardize, compose(per_token, _clip(low, high), sequence_mean, divergence=k3, beta=beta))


def dr_grpo(*, max_length: int, low: float = 0.2, high: float = 0.2) -> Objective:
    """1/(B·max_length) Σ_i Σ_t −min(rA, clip(r)A), A = R − mean. Liu et al. 2025 (2503.20783)."""
    aggregate = functools.partial(fixed_length, max_length=max_length)
    return Objective(center, compose(per_token, _clip(low, high), aggregate))


def dapo(*, low: float = 0.2, high: float = 0.28) -> Objective:
    """1/Σ|o_i| Σ_i Σ_t −min(rA, clip(r)A) with a wider upper clip, no KL. Yu et al. 2025 (2503.14476), eq. 8."""
    return Objective(standardize, compose(per_token, _clip(low, high), token_mean))


def gspo(*, low: float = 3e-4, high: float = 4e-4) -> Objective:
    """1/B Σ_i −min(sA, clip(s)A), s the geometric mean of r. Zheng et al. 2025 (2507.18071), eq. 5."""
    return Objective(standardize, compose(per_sequence, _clip(low, high), sequence_mean))
