"""Exponentials of log-ratios that stay finite.

A logarithm is bounded where it is exponentiated and nowhere else: a sum of two thousand log-ratios
may well be −82, and what multiplies it, or only takes its gradient, needs it as it is.
"""

import jax.numpy as jnp

from grpo_jax.types import Array

# e^80 is finite in float32, and so are its products with advantages and weights.
LOG_RATIO_BOUND = 80.0


def bounded_exp(x: Array) -> Array:
    """e^x, and e^80 without a gradient above x = 80."""
    return jnp.exp(jnp.minimum(x, LOG_RATIO_BOUND))


def bounded_expm1(x: Array) -> Array:
    """e^x − 1, and e^80 − 1 without a gradient above x = 80."""
    return jnp.expm1(jnp.minimum(x, LOG_RATIO_BOUND))
