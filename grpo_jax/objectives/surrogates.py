"""One token: (log_ratio, adv) → cost, to be minimised. x is the log-ratio and r = e^x.

`w·A·exp(x − sg[x])` has the value w·A and the gradient w·A·∇log π: this is how a detached weight w
multiplies a score function without the surrogate ever seeing log π.

x may be as large as a sum over a sequence: a surrogate exponentiates it with `bounded_exp`. Options
may be arrays, traced ones too.
"""

import math

import jax
import jax.numpy as jnp

from grpo_jax.objectives.exponentials import bounded_exp, bounded_expm1
from grpo_jax.objectives.values import number
from grpo_jax.types import Array

sg = jax.lax.stop_gradient


def _score(log_ratio: Array) -> Array:
    """1, with the gradient of the log-ratio."""
    return jnp.exp(log_ratio - sg(log_ratio))


def _bounds(low: float | Array, high: float | Array) -> tuple[float | Array, float | Array]:
    """The clip range [1 − low, 1 + high] as logarithms; low ≥ 1 means no lower bound."""
    below = number("low", low)
    above = number("high", high)
    if below is None or above is None:
        return jnp.log1p(-jnp.minimum(low, 1.0)), jnp.log1p(high)
    return (math.log1p(-below) if below < 1 else -math.inf), math.log1p(above)


def unclipped(log_ratio: Array, adv: Array) -> Array:
    """−r·A. Schulman et al. 2017 (1707.06347), eq. 6; with the ratio `on_policy`, REINFORCE."""
    return -adv * bounded_exp(log_ratio)


def truncated(log_ratio: Array, adv: Array, *, bound: float | Array) -> Array:
    """−sg[min(r, bound)]·A·log π, as its gradient: that of −r·A, with a weight that is bounded.

    Truncated importance sampling, Ionides 2008. No token loses its gradient; inf: no bound.
    """
    known = number("bound", bound)
    upper = jnp.log(bound) if known is None else math.log(known)
    return -bounded_exp(jnp.minimum(sg(log_ratio), upper)) * adv * _score(log_ratio)


def clipped(log_ratio: Array, adv: Array, *, low: float | Array, high: float | Array) -> Array:
    """−min(r·A, clip(r, 1−low, 1+high)·A). Schulman et al. 2017 (1707.06347), eq. 7; low ≠ high:
    DAPO, 2503.14476.
    """
    lower, upper = _bounds(low, high)
    # The minimum picks r below 1+high for A ≥ 0 and r above 1−low for A < 0. Bounding x, not r,
    # keeps what the minimum discards from overflowing; a token beyond the bound has no gradient.
    above = (adv >= 0) & (log_ratio > upper)
    below = (adv < 0) & (log_ratio < lower)
    return -adv * bounded_exp(jnp.where(above, upper, jnp.where(below, lower, log_ratio)))


def weighted(log_ratio: Array, adv: Array, *, low: float | Array, high: float | Array) -> Array:
    """−sg[clip(r, 1−low, 1+high)]·A·log π, as its gradient. MiniMax 2025 (CISPO, 2506.13585), eqs.
    4 and 5.

    No token loses its gradient; its weight is bounded. low ≥ 1 means no lower bound, as the paper
    trains.
    """
    weight = bounded_exp(jnp.clip(sg(log_ratio), *_bounds(low, high)))
    return -weight * adv * _score(log_ratio)


def soft_gated(
    log_ratio: Array, adv: Array, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> Array:
    """−A·σ(τ(r − 1))·4/τ, τ = tau_pos for A > 0, else tau_neg. Gao et al. 2025 (SAPO,
    2511.20347).
    """
    tau = jnp.where(adv > 0, tau_pos, tau_neg)
    return -adv * jax.nn.sigmoid(tau * bounded_expm1(log_ratio)) * 4.0 / tau


def gamma_weighted(
    log_ratio: Array,
    adv: Array,
    *,
    k_pos: float = 2.0,
    lam_pos: float = 3.0,
    k_neg: float = 3.0,
    lam_neg: float = 2.0,
) -> Array:
    """−sg[W^k·e^{λ(1−W)}]·A·log π, as its gradient; (k, λ) by the sign of A. VESPO, 2602.10693.

    W is meant to be the ratio of the sequence: use it with the ratio `product_token`.
    """
    # e^20 already sends the weight to 0 and 1e-8 is as good as no ratio; the paper's code has the
    # same bounds.
    x = jnp.clip(sg(log_ratio), math.log(1e-8), 20.0)
    k = jnp.where(adv >= 0, k_pos, k_neg)
    lam = jnp.where(adv >= 0, lam_pos, lam_neg)
    return -jnp.exp(k * x - lam * jnp.expm1(x)) * adv * _score(log_ratio)


def tapered(log_ratio: Array, adv: Array) -> Array:
    """−A·log π for A ≥ 0, −sg[min(r, 1)]·A·log π for A < 0, as gradients. Roux et al. 2025 (TOPR,
    2503.14286).
    """
    weight = jnp.where(adv >= 0, 1.0, jnp.exp(jnp.minimum(sg(log_ratio), 0.0)))
    return -weight * adv * _score(log_ratio)


def mirror(log_ratio: Array, adv: Array, *, tau: float) -> Array:
    """−A·x + τ/2·x², whose gradient is −(A − τx)·∇x. Kimi k1.5 2025 (2501.12599), eq. 3: relative
    entropy, squared.
    """
    return -adv * log_ratio + 0.5 * tau * log_ratio**2


def floored(log_ratio: Array, adv: Array, *, surrogate, c: float) -> Array:
    """min(cost, −c·A) for A < 0: a surrogate whose loss on a bad token is bounded. Ye et al. 2020
    (1912.09729).
    """
    cost = surrogate(log_ratio, adv)
    ceiling = -c * adv
    return jnp.where((adv < 0) & (cost > ceiling), ceiling, cost)
