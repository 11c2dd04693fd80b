"""One sequence: (logp_T, old_logp_T, mask_T) → log_ratio_T. How far has the policy moved from the
one that acted?

A ratio is returned as its logarithm, one a token, so that weights, clips and score functions are
all surrogates of the same number. A ratio that has a parameter `adv` is given the advantage too
(`geometric` needs its sign).
"""

import jax
import jax.numpy as jnp

from grpo_jax.types import Array

sg = jax.lax.stop_gradient


def _sum(x_T: Array, mask_T: Array) -> Array:
    return jnp.sum(jnp.where(mask_T, x_T, 0.0))


def _mean(x_T: Array, mask_T: Array) -> Array:
    return _sum(x_T, mask_T) / jnp.maximum(jnp.sum(mask_T), 1)


def per_token(logp_T: Array, old_logp_T: Array, mask_T: Array) -> Array:
    """log r_t = log π_t − log π_old,t. Schulman et al. 2017 (PPO, 1707.06347), §3."""
    del mask_T
    return logp_T - old_logp_T


def on_policy(logp_T: Array, old_logp_T: Array, mask_T: Array) -> Array:
    """log r_t = log π_t − sg[log π_t]: the ratio is 1, its gradient the score ∇log π. Williams 1992
    (REINFORCE).

    π_old is not read, so that no second forward pass is needed.
    """
    del old_logp_T, mask_T
    return logp_T - sg(logp_T)


def per_sequence(logp_T: Array, old_logp_T: Array, mask_T: Array) -> Array:
    """log s = mean_t log r_t, the same for every token. Zheng et al. 2025 (GSPO, 2507.18071), eq.
    7.
    """
    return jnp.broadcast_to(_mean(logp_T - old_logp_T, mask_T), logp_T.shape)


def per_sequence_token(logp_T: Array, old_logp_T: Array, mask_T: Array) -> Array:
    """log s_t = sg[log s] + log π_t − sg[log π_t]. Zheng et al. 2025 (GSPO-token, 2507.18071), eq.
    14.
    """
    return sg(_mean(logp_T - old_logp_T, mask_T)) + logp_T - sg(logp_T)


def product(logp_T: Array, old_logp_T: Array, mask_T: Array) -> Array:
    """log W = Σ_t log r_t, the exact ratio of the sequence: unbiased, but it drifts with length."""
    return jnp.broadcast_to(_sum(logp_T - old_logp_T, mask_T), logp_T.shape)


def product_token(logp_T: Array, old_logp_T: Array, mask_T: Array) -> Array:
    """log W_t = sg[log W] + log π_t − sg[log π_t]: the weight of the sequence, the gradient of the
    token.
    """
    return sg(_sum(logp_T - old_logp_T, mask_T)) + logp_T - sg(logp_T)


def geometric(
    logp_T: Array, old_logp_T: Array, mask_T: Array, adv: Array, *, low: float, high: float
) -> Array:
    """log s = mean_t c(log r_t), c = min(·, high) for A > 0 and max(·, −low) for A ≤ 0.

    Zhao et al. 2025 (GMPO, 2507.20673): the clip acts on each token, before the geometric mean.
    """
    log_ratio_T = logp_T - old_logp_T
    above = (adv > 0) & (log_ratio_T > high)
    below = (adv <= 0) & (log_ratio_T < -low)
    clipped_T = jnp.where(above, high, jnp.where(below, -low, log_ratio_T))
    return jnp.broadcast_to(_mean(clipped_T, mask_T), logp_T.shape)
