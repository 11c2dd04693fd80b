"""Which reference, and how hard it holds: pure functions of a step.

A reference update is `(step, params, reference) → reference`, called after update `step` (1, 2, …).
"""

import jax
import jax.numpy as jnp

from grpo_jax.types import Array, Params


def never(step: Array, params: Params, reference: Params) -> Params:
    """π_ref stays what it was."""
    del step, params
    return reference


def every(step: Array, params: Params, reference: Params, *, interval: int) -> Params:
    """π_ref ← π_θ after each `interval` updates. Shao et al. 2024 (2402.03300), algorithm 1,
    iterative GRPO.
    """
    return jax.tree.map(
        lambda new, old: jnp.where(step % interval == 0, new, old), params, reference
    )


def ema(step: Array, params: Params, reference: Params, *, decay: float) -> Params:
    """π_ref ← π_ref + (1 − decay)·(π_θ − π_ref), in the space of parameters, in float32.

    Gorbatovski et al. 2024 (2404.09656). As a sum of two products it would leave the policy in
    narrow types: .99 and .01 add up to .9983 in bfloat16.
    """
    del step

    def moved(new: Array, old: Array) -> Array:
        start = old.astype(jnp.float32)
        return (start + (1 - decay) * (new.astype(jnp.float32) - start)).astype(old.dtype)

    return jax.tree.map(moved, params, reference)


def adaptive_beta(
    beta: Array, kl: Array, *, target: float, rate: float = 0.1, limit: float = 0.2
) -> Array:
    """β ← β·(1 + rate·clip(KL/target − 1, ±limit)). Ziegler et al. 2019 (1909.08593), §2.2.

    `kl` is that of the last batch, in the unit of `target` (nats a sequence, or nats a token).
    """
    return beta * (1.0 + rate * jnp.clip(kl / target - 1.0, -limit, limit))
