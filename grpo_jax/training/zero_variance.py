"""Groups whose advantages are all 0 are left out of an update where that changes no gradient.

They cost as much as others and teach nothing. What they add to the loss's normaliser and to the
diagnostics is kept as `Mean`s, so that the numbers are those of the whole batch.

Left out on purpose: drawing other prompts in their place, which changes the data (that is dynamic
sampling, a `collect` of one's own).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from grpo_jax.objectives import (
    Objective,
    batch_loss,
    diagnostics,
    gradient_at_zero_advantage,
    objective_at,
)
from grpo_jax.parallel.backends import SINGLE, Devices
from grpo_jax.training.packing import packed_size, packed_sizes
from grpo_jax.types import Array, Batch, Mean, Sample


def drop_zero_variance_groups(
    objective: Objective,
    batch: Batch,
    sizes: Sequence[int],
    devices: Devices = SINGLE,
    state: Any = None,
) -> Batch:
    """The batch without groups whose advantages are all 0, where that changes no gradient.

    As many prompts stay as the smallest of `sizes` that holds all others and is spread evenly over
    `devices`; the weight that the dropped groups have in the loss's normaliser stays, in
    `Batch.rest`, so that the gradient is that of the whole batch. Their diagnostics are those at
    π_old. A packed batch is packed anew. Returns the batch as it is where nothing can be dropped
    (see `objectives.gradient_at_zero_advantage`). `state` is that of an objective that has one.
    """
    if gradient_at_zero_advantage(objective):
        return batch
    counted = _count(devices)(batch.samples.adv, batch.samples.mask_T)
    busy_P, tokens_P = map(np.asarray, counted)
    least = max(busy_P.sum(), 1)
    size = next((s for s in _smaller(batch, sizes, devices) if s >= least), None)
    if size is None:
        return batch
    order = np.argsort(~busy_P, kind="stable")
    kept = np.sort(order[:size])
    dropped = np.sort(order[size:])
    packed = None
    if batch.rollout.token_index_PN is not None:
        packed = packed_size(math.prod(batch.samples.mask_T.shape[1:]), tokens_P[kept].max())
    return _part(objective, batch, kept, dropped, packed, devices, state)


def smaller_shapes(
    objective: Objective,
    batch: Batch,
    sizes: Sequence[int],
    devices: Devices = SINGLE,
    state: Any = None,
) -> list[Batch]:
    """All that `drop_zero_variance_groups` may make of a batch of shapes, itself included."""
    if gradient_at_zero_advantage(objective):
        return [batch]
    _count(devices)(batch.samples.adv, batch.samples.mask_T)
    P, *group = batch.samples.mask_T.shape
    packings: list[int | None] = [None]
    if (index_PN := batch.rollout.token_index_PN) is not None:
        packings = [n for n in packed_sizes(math.prod(group)) if n <= index_PN.shape[1]]
    found = [batch]
    for size in _smaller(batch, sizes, devices):
        for packed in packings:
            index = np.arange(size), np.arange(P - size)
            found.append(_part(objective, batch, *index, packed, devices, state))
    return found


def fewer_prompts(prompts: int, microbatches: int, parts: int) -> list[int]:
    """The numbers of prompts that an update is compiled for once groups are dropped.

    Whole micro-batches, or quarters, up to what is spread evenly over `parts` devices.
    """
    cuts = microbatches if microbatches > 1 else 4
    sizes = {-(-prompts * k // cuts // parts) * parts for k in range(1, cuts)}
    return sorted(sizes - {0, prompts})


def _smaller(batch: Batch, sizes: Sequence[int], devices: Devices) -> list[int]:
    P = batch.samples.mask_T.shape[0]
    return sorted(s for s in sizes if s < P and s % devices.parts == 0)


def _count(devices: Devices) -> Callable:
    # As a partial it is one program for all calls, see `Devices`.
    return devices.whole_batch(partial(busy_and_tokens), ("rows", "rows"), ("whole", "whole"))


def _part(objective, batch: Batch, kept, dropped, packed: int | None, devices, state) -> Batch:
    program = partial(part_and_rest, objective, packed)
    inputs = ("rows", "whole", "whole", "whole")
    part_of = devices.whole_batch(program, inputs, ("rows", "whole"))
    part, rest = part_of(batch, kept, dropped, state)
    return part._replace(rest=rest)


@jax.jit
def busy_and_tokens(adv: Array, mask_PGT: Array) -> tuple[Array, Array]:
    """Of each prompt, whether any advantage is not 0, and the number of its completions' tokens."""
    return (adv.reshape(len(adv), -1) != 0).any(1), mask_PGT.sum((1, 2))


@partial(jax.jit, static_argnames=("objective", "packed"))
def part_and_rest(
    objective: Objective, packed: int | None, batch: Batch, kept: Array, dropped: Array, state: Any
) -> tuple[Batch, dict[str, Mean]]:
    """The prompts that are kept, and what the dropped ones add to the sums."""
    means = _group_means(objective_at(objective, state), batch.samples)
    rest = jax.tree.map(lambda x: x[dropped].sum(), means)
    part = jax.tree.map(lambda x: x[kept], batch)
    if packed is not None:  # the listed indices stand before the padding
        index_PN = part.rollout.token_index_PN[:, :packed]
        part = part._replace(rollout=part.rollout._replace(token_index_PN=index_PN))
    return part, rest


def _group_means(objective: Objective, samples_PG: Sample) -> dict[str, Mean]:
    """The loss and the diagnostics of every group at π_old."""

    def one(samples_G):
        samples = jax.tree.map(lambda x: x[None], samples_G)
        logp = samples.old_logp_T
        seen = diagnostics(objective, logp, samples)
        # Nothing was computed anew for these groups: they know no difference to the sampler.
        seen.pop("sampler_logp_diff", None)
        return {"loss": batch_loss(objective, logp, samples)} | seen

    return jax.vmap(one)(samples_PG)
