"""What lies in a device's memory besides what a program is given, and what it must read of it.

Left out on purpose: what a program itself needs; its compiler tells (see `plan`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from grpo_jax.models import LanguageModel
from grpo_jax.parallel.programs import Program, listed
from grpo_jax.plan.listed import Listed
from grpo_jax.training.stages import Stages
from grpo_jax.types import Params, RunState, Weights

# Kinds of programs whose first argument is a part of what lives on the devices all the time.
TAKES_STATE = ("step", "cast", "logp", "entropy", "values")


def bytes_per_device(shapes: Any) -> int:
    """Bytes that one device holds of a tree of shapes with shardings."""

    def held(x: jax.ShapeDtypeStruct) -> int:
        part = jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)
        return part.size * part.dtype.itemsize

    return sum(map(held, jax.tree.leaves(shapes)))


class Held(NamedTuple):
    """Bytes on a device of what lasts longer than a program.

    `state` is the train state with a critic's part, `reference` the reference, moving or not, and
    `queue` what was sampled ahead. `shared` are, for each kind of program that samples, those of
    its weights that are the very arrays of the state; copies are there only while it samples.
    """

    state: int
    reference: int
    queue: int
    shared: dict[str, int]

    @property
    def everything(self) -> int:
        return self.state + self.reference + self.queue

    def beside(self, kind: str, program: Program) -> int:
        """Bytes that stay on a device besides the arguments of a program of that kind."""
        if kind == "supervised":  # before the run has a state
            return 0
        if kind in TAKES_STATE:
            _, first, *_ = program.args[0]
            return self.everything - bytes_per_device(first)
        return self.everything - self.shared.get(kind, 0)


class Publication(NamedTuple):
    """The policy on its way to the sampler, as shapes with shardings.

    `source` lies as in training, in the type that the sampler computes in; it is a copy (`cast`)
    where that is not the type of the parameters. `served` lies as the sampler reads it.
    """

    source: Params
    served: Params
    cast: bool

    @property
    def shared(self) -> int:
        """Bytes on a device of what the sampler reads out of the state itself."""
        return 0 if self.cast else shared_bytes(self.source, self.served)


def publication(stages: Stages, state: RunState, policy: Params) -> Publication:
    """What the stage `publish` makes of a policy."""
    with listed() as found:
        served = stages.publish(Weights(state.train.params, state.train.step, state.reference))
    cast = next((program.out for program in found.values()), None)
    return Publication(policy if cast is None else laid_as(policy, cast), served, cast is not None)


def laid_as(layout: Params, shapes: Params) -> Params:
    """Shapes, in the layout of other ones."""
    return jax.tree.map(lambda x, like: x.update(sharding=like.sharding), shapes, layout)


def shared_bytes(before: Params, after: Params) -> int:
    """Bytes on a device of the arrays that need not change their layout."""
    return bytes_per_device([new for old, new in pairs(before, after) if lies_as(old, new)])


def pairs(before: Params, after: Params) -> Sequence[tuple]:
    """Each array in two layouts."""
    return list(zip(*map(jax.tree.leaves, (before, after)), strict=True))


def lies_as(before: jax.ShapeDtypeStruct, after: jax.ShapeDtypeStruct) -> bool:
    return before.sharding.is_equivalent_to(after.sharding, before.ndim)


def layout_of_largest(published: Publication) -> tuple[Program, int] | None:
    """The change of layout that needs most, of one array, and what lies beside it and the state.

    Arrays change one after another: copies of all others, in the sampler's layout, lie beside the
    one, and all of a cast policy. None where no array moves.
    """
    moved = [pair for pair in pairs(published.source, published.served) if not lies_as(*pair)]
    if not moved:
        return None
    before, after = max(moved, key=lambda pair: bytes_per_device(pair[1]))
    copies = bytes_per_device([new for _, new in moved]) - bytes_per_device(after)
    whole = bytes_per_device(published.source) if published.cast else 0
    jitted = jax.jit(lambda x: x, out_shardings=after.sharding)

    def lower(platforms: tuple[str, ...] = ()) -> jax.stages.Lowered:
        return jitted.trace(before).lower(lowering_platforms=platforms or None)

    described = ("layout", {}, (({}, before), {}), after)
    program = Program(*described, lambda: lower().compile(), lower)
    return program, copies + whole - bytes_per_device(before)


def held_in_training(params: Params, parts: int) -> int:
    """Bytes of a device that `parallel.memory.memory_for_training` sets aside, of shapes."""
    sizes = [(x.size, x.size * x.dtype.itemsize) for x in jax.tree.leaves(params)]
    return sum(4 * size + 4 * entries for entries, size in sizes) // parts


def sampling_bound(
    model: LanguageModel,
    served: Params,
    devices: int,
    own_bytes: int,
    sampler: Listed,
) -> float:
    """Bytes that a device must at least read from its memory to sample to the length limit.

        steps · max(0, weights + caches − own)

    Every token step reads all matrices and all caches, and no more than the memory on the chip
    holds can still be there from the step before. Caches are spread over all devices at best.

    Args:
      model: the policy.
      served: the parameters as the sampler reads them, as shapes with shardings.
      devices: the number of devices.
      own_bytes: memory on the chip itself, of a device.
      sampler: the program, with its `generation` among its options.
    """
    generation = sampler.options["generation"]
    T = generation.max_new_tokens
    array = partial(jax.ShapeDtypeStruct, (sampler.sizes["prompt_length"],))
    own = jax.eval_shape(lambda: model.empty(T))
    _, cache = jax.eval_shape(model.prefill, served, array("int32"), array("bool"))
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    of_prompt = generation.slots * size(own) + size(cache)
    caches = sampler.sizes["prompts"] * of_prompt / devices
    # Of a table of embeddings that is not the head too, a step reads a few rows.
    read = {k: v for k, v in served.items() if k != "embed" or "head" not in served}
    rounds = -(-generation.group_size // generation.slots)
    return rounds * (T - 1) * max(0.0, bytes_per_device(read) + caches - own_bytes)
