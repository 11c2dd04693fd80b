"""Packing: an update computes the real tokens of each group and not the padding between them."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.types import Rollout

FRACTIONS = (0.5, 0.625, 0.75)  # of a group's padded tokens, that an update is compiled for


def pack(rollout: Rollout, fractions: Sequence[float] = FRACTIONS) -> Rollout:
    """Lists the trained tokens of each prompt, so that an update computes them and not the padding
    between them.

    The smallest of `fractions` of G·T that holds every prompt's tokens is taken; if none does, all
    are computed. Values and gradients stay the same; at most `len(fractions) + 1` shapes are
    compiled.
    """
    mask = np.asarray(rollout.mask_PGT)
    P = len(mask)
    places = mask[0].size
    flat = mask.reshape(P, places)
    size = _packed_size(places, flat.sum(1).max(), fractions)
    if size is None:
        return rollout
    token_index_PN = np.full((P, size), places, np.int32)
    for row, own in zip(token_index_PN, flat, strict=True):
        found = np.flatnonzero(own)
        row[: len(found)] = found
    return rollout._replace(token_index_PN=token_index_PN)


def packings(rollout: Rollout) -> list[Rollout]:
    """All that `pack` may make of a rollout of shapes, in shapes."""
    P, *group = rollout.mask_PGT.shape
    sizes = packed_sizes(math.prod(group))
    return [rollout] + [
        rollout._replace(token_index_PN=jax.ShapeDtypeStruct((P, size), jnp.int32))
        for size in sizes
    ]


def packed_sizes(places: int, fractions: Sequence[float] = FRACTIONS) -> list[int]:
    """The numbers of tokens of a group of `places` that `pack` may list."""
    return sorted({s for f in fractions if (s := math.ceil(places * f)) < places})


def _packed_size(places: int, needed: int, fractions: Sequence[float]) -> int | None:
    return next((s for s in packed_sizes(places, fractions) if needed <= s), None)
