"""One token: (logp, ref_logp) → kl. Estimators of KL(π‖π_ref) from a token drawn from π, with d =
log π_ref − log π.

Equal in expectation as values, not as losses: the expected gradient of k1 is 0, of k2 it is
∇KL(π‖π_ref), of k3 it is ∇KL(π_ref‖π), of r·k3 it is ∇KL(π‖π_ref), off-policy too. Schulman 2020,
"Approximating KL divergence"; Tang & Munos 2025 (2506.09477). A divergence with a parameter
`log_ratio` is given the ratio's logarithm.
"""

import jax.numpy as jnp

from grpo_jax.objectives.exponentials import LOG_RATIO_BOUND, bounded_exp
from grpo_jax.types import Array


def _gap(logp: Array, ref_logp: Array, bound: float | Array | None) -> Array:
    gap = ref_logp - logp
    return jnp.minimum(gap, LOG_RATIO_BOUND) if bound is None else jnp.clip(gap, -bound, bound)


def k1(logp: Array, ref_logp: Array) -> Array:
    """−d. For the reward (`kl_in_reward`); as a loss it teaches nothing, and `compose` refuses
    it.
    """
    return logp - ref_logp


def k2(logp: Array, ref_logp: Array) -> Array:
    """d²/2."""
    return 0.5 * (ref_logp - logp) ** 2


def k3(logp: Array, ref_logp: Array, *, bound: float | Array | None = None) -> Array:
    """e^d − d − 1, never negative. Shao et al. 2024 (GRPO, 2402.03300), eq. 4.

    `expm1(d) − d` keeps the digits that `exp(d) − d − 1` loses for small d. `bound` clips d to
    ±bound first; without one, d is held at 80, since e^100 overflows.
    """
    gap = _gap(logp, ref_logp, bound)
    return jnp.expm1(gap) - gap


def weighted_k3(
    logp: Array, ref_logp: Array, log_ratio: Array, *, bound: float | Array | None = None
) -> Array:
    """r·k3 with r differentiable: an unbiased gradient of KL(π‖π_ref). DeepSeek-AI 2025 (V3.2,
    2512.02556), eq. 7.
    """
    return bounded_exp(log_ratio) * k3(logp, ref_logp, bound=bound)
