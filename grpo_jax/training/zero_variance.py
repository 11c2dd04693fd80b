"""Groups whose advantages are all 0 are left out of an update where that changes no gradient."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.objectives import Objective, batch_loss, diagnostics
from grpo_jax.parallel.backends import SINGLE, Devices
from grpo_jax.training.packing import FRACTIONS, _packed_size, packed_sizes
from grpo_jax.types import Array, Batch, Mean, Sample


@cache
def zero_advantage_is_inert(objective: Objective) -> bool:
    """Whether a completion of advantage 0 has no gradient: true without a KL term, an entropy bonus
    or a value loss.

    Found by differentiating the loss of such a completion in everything that depends on the
    parameters.
    """
    x = lambda seed: jnp.sin(jnp.arange(6.0) + seed)[None, None]
    mask = jnp.ones((1, 1, 6), bool)
    fixed = {
        name: x(i)
        for i, name in enumerate(Sample._fields)
        if name not in ("adv", "stopped", "age", "mask_T")
    }
    fixed |= {"stopped": jnp.ones((1, 1), bool), "age": jnp.zeros((1, 1), jnp.int32)}
    fixed["group_tokens"] = jnp.full((1, 1), 6, jnp.int32)

    def total(logp, entropy, value):
        samples = Sample(mask_T=mask, adv=jnp.zeros((1, 1)), **fixed)._replace(
            entropy_T=entropy, value_T=value
        )
        return batch_loss(objective, logp, samples).total

    gradients = jax.grad(total, argnums=(0, 1, 2))(x(0.3) - 2, x(0.7) + 2, x(0.9))
    return not any(np.any(np.asarray(g) != 0) for g in gradients)


def _group_means(objective: Objective, samples_PG: Sample) -> dict[str, Mean]:
    """The loss and the diagnostics of every group at π_old."""

    def one(samples_G):
        samples = jax.tree.map(lambda x: x[None], samples_G)
        logp = samples.old_logp_T
        return {"loss": batch_loss(objective, logp, samples)} | diagnostics(
            objective, logp, samples
        )

    return jax.vmap(one)(samples_PG)


def drop_zero_variance_groups(
    objective: Objective, batch: Batch, sizes: Sequence[int], devices: Devices = SINGLE
) -> Batch:
    """The batch without groups whose advantages are all 0, where that changes no gradient (see
    `zero_advantage_is_inert`).

    As many prompts stay as the smallest of `sizes` that holds all others and is spread evenly over
    `devices`; the weight that the left-out groups have in the loss's normaliser stays, in
    `Batch.rest`, so that the gradient is that of the whole batch. Their diagnostics are those at
    π_old. A packed batch is packed anew. Returns the batch as it is where nothing can be left out.
    """
    if not zero_advantage_is_inert(objective):
        return batch
    busy, tokens = map(np.asarray, _count(devices)(batch.samples.adv, batch.samples.mask_T))
    fits = [s for s in _smaller(batch, sizes, devices) if s >= max(busy.sum(), 1)]
    if not fits:
        return batch
    size = min(fits)
    order = np.argsort(~busy, kind="stable")
    kept = np.sort(order[:size])
    left = np.sort(order[size:])
    places = batch.rollout.token_index_PN
    packed = (
        None
        if places is None
        else _packed_size(batch.samples.mask_T[0].size, tokens[kept].max(), FRACTIONS)
    )
    return _part(objective, batch, kept, left, packed, devices)


def without_idle(
    objective: Objective, batch: Batch, sizes: Sequence[int], devices: Devices
) -> list[Batch]:
    """All that `drop_zero_variance_groups` may make of a batch of shapes, itself included, in
    shapes (see `devices.listed`).
    """
    if not zero_advantage_is_inert(objective):
        return [batch]
    _count(devices)(batch.samples.adv, batch.samples.mask_T)
    P, *_ = (mask := batch.samples.mask_T).shape
    places = batch.rollout.token_index_PN
    return [batch] + [
        _part(objective, batch, np.arange(size), np.arange(P - size), packed, devices)
        for size in _smaller(batch, sizes, devices)
        for packed in ([None] if places is None else packed_sizes(math.prod(mask.shape[1:])))
        if packed is None or packed <= places.shape[1]
    ]


def _smaller(batch: Batch, sizes: Sequence[int], devices: Devices) -> list[int]:
    return [s for s in sizes if s < batch.samples.mask_T.shape[0] and s % devices.parts == 0]


def _count(devices: Devices) -> Callable:
    # As a partial it is one program for all calls, see `Devices`.
    return devices.whole_batch(partial(_busy_and_tokens), ("rows", "rows"), ("whole", "whole"))


def _part(
    objective: Objective, batch: Batch, kept, left, packed: int | None, devices: Devices
) -> Batch:
    program = partial(_part_and_rest, objective, packed)
    part, rest = devices.whole_batch(program, ("rows", "whole", "whole"), ("rows", "whole"))(
        batch, kept, left
    )
    return part._replace(rest=rest)


@jax.jit
def _busy_and_tokens(adv: Array, mask_PGT: Array) -> tuple[Array, Array]:
    """Of each prompt, whether any advantage is not 0, and the number of its completions' tokens."""
    return (adv.reshape(len(adv), -1) != 0).any(1), mask_PGT.sum((1, 2))


@partial(jax.jit, static_argnames=("objective", "packed"))
def _part_and_rest(
    objective: Objective, packed: int | None, batch: Batch, kept: Array, left: Array
):
    rest = jax.tree.map(lambda x: x[left].sum(), _group_means(objective, batch.samples))
    part = jax.tree.map(lambda x: x[kept], batch)
    if packed is not None:  # the listed places stand before the padding
        part = part._replace(
            rollout=part.rollout._replace(token_index_PN=part.rollout.token_index_PN[:, :packed])
        )
    return part, rest
