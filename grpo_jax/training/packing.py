"""Packing: an update computes the real tokens of each group and not the padding between them.

Left out on purpose: packing across prompts, which would need other attention masks.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.types import Rollout

FRACTIONS = (0.5, 0.625, 0.75)  # of a group's padded tokens, that an update is compiled for


def pack(mask_PGT: np.ndarray, fractions: Sequence[float] = FRACTIONS) -> np.ndarray | None:
    """`Rollout.token_index_PN` for these masks: the trained tokens of each prompt, and no others.

    The smallest of `fractions` of G·T that holds every prompt's tokens is taken; if none does, the
    result is None and all tokens are computed. Values and gradients stay the same; at most
    `len(fractions) + 1` shapes are compiled.
    """
    P = len(mask_PGT)
    flat = np.asarray(mask_PGT).reshape(P, -1)
    total = flat.shape[1]
    size = packed_size(total, flat.sum(1).max(), fractions)
    if size is None:
        return None
    token_index_PN = np.full((P, size), total, np.int32)
    for row, real in zip(token_index_PN, flat, strict=True):
        found = np.flatnonzero(real)
        row[: len(found)] = found
    return token_index_PN


def packed_shapes(rollout: Rollout) -> list[Rollout]:
    """All that packing may make of a rollout of shapes, in shapes."""
    P, *group = rollout.mask_PGT.shape
    indices = [jax.ShapeDtypeStruct((P, n), jnp.int32) for n in packed_sizes(math.prod(group))]
    return [rollout] + [rollout._replace(token_index_PN=index) for index in indices]


def packed_sizes(total: int, fractions: Sequence[float] = FRACTIONS) -> list[int]:
    """The numbers of tokens of a group of `total` that may be listed."""
    sizes = {math.ceil(total * fraction) for fraction in fractions}
    return sorted(size for size in sizes if size < total)


def packed_size(total: int, needed: int, fractions: Sequence[float] = FRACTIONS) -> int | None:
    """The smallest of `packed_sizes` that holds `needed` tokens; None if none does."""
    return next((size for size in packed_sizes(total, fractions) if needed <= size), None)
