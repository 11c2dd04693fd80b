"""One sequence: (reward_T, mask_T) → what each token is credited with.

`reward_T` holds a reward where a step ends and NaN elsewhere; an outcome is one step that ends at
the last trained token. A sequence with no step at all could not be scored. Masked tokens are not
actions: time passes over them.
"""

import jax
import jax.numpy as jnp

from grpo_jax.types import Array


def at_last_token(reward: Array, mask_T: Array) -> Array:
    """An outcome as `reward_T`: the reward at the last trained token, NaN elsewhere."""
    positions_T = jnp.arange(mask_T.shape[-1])
    last = jnp.max(jnp.where(mask_T, positions_T, -1))
    return jnp.where(positions_T == last, reward, jnp.nan)


def _steps(reward_T: Array, mask_T: Array) -> Array:
    return jnp.where(mask_T & ~jnp.isnan(reward_T), reward_T, 0.0)


def is_scored(reward_T: Array, mask_T: Array) -> Array:
    """Whether any step of the sequence has a reward."""
    return jnp.any(mask_T & ~jnp.isnan(reward_T))


def outcome(reward_T: Array, mask_T: Array) -> Array:
    """R = Σ_t r_t; NaN where no step could be scored."""
    return jnp.where(is_scored(reward_T, mask_T), jnp.sum(_steps(reward_T, mask_T)), jnp.nan)


def penalised(
    reward_T: Array, mask_T: Array, old_logp_T: Array, ref_logp_T: Array, *, beta: float | Array
) -> Array:
    """r_t − β(log π_old,t − log π_ref,t): the KL inside the reward, which needs no gradient. Every
    token is a step.

    Ouyang et al. 2022 (2203.02155), eq. 2; Shao et al. 2024 (2402.03300), eq. 2. Unscored sequences
    stay so.
    """
    k1_T = old_logp_T - ref_logp_T
    penalised_T = _steps(reward_T, mask_T) - beta * k1_T
    return jnp.where(is_scored(reward_T, mask_T) & mask_T, penalised_T, jnp.nan)


def returns_to_go(reward_T: Array, mask_T: Array, *, gamma: float = 1.0) -> Array:
    """G_t = r_t + γ·G_{t+1}. Sutton & Barto 2018, eq. 3.9."""

    def step(later, now):
        reward, is_action = now
        return (jnp.where(is_action, reward + gamma * later, later),) * 2

    _, return_T = jax.lax.scan(
        step, jnp.zeros((), reward_T.dtype), (_steps(reward_T, mask_T), mask_T), reverse=True
    )
    return jnp.where(mask_T, return_T, 0.0)


def gae(reward_T: Array, value_T: Array, mask_T: Array, *, gamma: float, lam: float) -> Array:
    """A_t = δ_t + γλ·A_{t+1}, δ_t = r_t + γ·V_{t+1} − V_t, with V = 0 after the end. Schulman et
    al. 2015 (1506.02438).

    Eq. 16 of the paper. λ = 1 gives G_t − V_t; the return a critic learns is A_t + V_t.
    """

    def step(carry, now):
        later_adv, later_value = carry
        reward, value, is_action = now
        adv = reward + gamma * later_value - value + gamma * lam * later_adv
        return (jnp.where(is_action, adv, later_adv), jnp.where(is_action, value, later_value)), adv

    zero = jnp.zeros((), value_T.dtype)
    _, adv_T = jax.lax.scan(
        step, (zero, zero), (_steps(reward_T, mask_T), value_T, mask_T), reverse=True
    )
    return jnp.where(mask_T, adv_T, 0.0)


def value_cost(value_T: Array, old_value_T: Array, return_T: Array, *, clip: float | None) -> Array:
    """½·max((V − R)², (clip(V, V_old ± ε) − R)²), or ½(V − R)² without a clip. Schulman et al.
    2017's code; 2005.12729.

    The clip keeps the critic within ε of the one that made the advantages.
    """
    cost_T = (value_T - return_T) ** 2
    if clip is not None:
        near_T = old_value_T + jnp.clip(value_T - old_value_T, -clip, clip)
        cost_T = jnp.maximum(cost_T, (near_T - return_T) ** 2)
    return 0.5 * cost_T
