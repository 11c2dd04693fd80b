"""One sequence: (x_T, mask_T) → Mean. What is a token worth beside the other tokens of the batch?

Means are added over the batch and divided once, so that every normaliser is the batch's own,
however it is cut up. A sequence without trained tokens weighs nothing; `count_empty=True` keeps it
in the denominator, as PyTorch trainers do with truncated completions that they mask.
"""

import jax.numpy as jnp

from grpo_jax.types import Array, Mean


def _sum(x_T: Array, mask_T: Array) -> Array:
    return jnp.sum(jnp.where(mask_T, x_T, 0.0))


def _present(x_T: Array, mask_T: Array, count_empty: bool) -> Array:
    return (jnp.any(mask_T) | count_empty).astype(x_T.dtype)


def token_mean(x_T: Array, mask_T: Array) -> Mean:
    """Σ_i Σ_t x / Σ_i |o_i|: every token of the batch counts the same. Yu et al. 2025 (DAPO,
    2503.14476), eq. 8.
    """
    return Mean(_sum(x_T, mask_T), jnp.sum(mask_T).astype(x_T.dtype))


def sequence_mean(x_T: Array, mask_T: Array, *, count_empty: bool = False) -> Mean:
    """1/B Σ_i 1/|o_i| Σ_t x: every sequence counts the same. Shao et al. 2024 (GRPO, 2402.03300),
    eq. 3.
    """
    mean = _sum(x_T, mask_T) / jnp.maximum(jnp.sum(mask_T), 1)
    return Mean(mean, _present(x_T, mask_T, count_empty))


def sequence_sum(x_T: Array, mask_T: Array, *, count_empty: bool = False) -> Mean:
    """1/B Σ_i Σ_t x: the log-probability of a whole sequence. Williams 1992; Ahmadian et al. 2024
    (2402.14740).
    """
    return Mean(_sum(x_T, mask_T), _present(x_T, mask_T, count_empty))


def fixed_length(x_T: Array, mask_T: Array, *, max_length: int, count_empty: bool = False) -> Mean:
    """1/(B·max_length) Σ_i Σ_t x: no token's weight depends on a length. Liu et al. 2025 (Dr. GRPO,
    2503.20783).
    """
    return Mean(_sum(x_T, mask_T), max_length * _present(x_T, mask_T, count_empty))
