"""A program of a run by what it does and what tells it from others of its kind."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.parallel.programs import Program
from grpo_jax.types import Prompts, Rollout

SAMPLE = ("sampler", "evaluation")  # the kinds of programs that sample


class Listed(NamedTuple):
    """A program of a run.

    `kind` is what it does, `options` are what it was bound with, and `sizes` are what tells
    programs of one kind apart. `resident_bytes` are what others keep on a device while it runs, and
    `bound_bytes`, of one that samples, what a device must at least read from its memory.
    """

    kind: str
    name: str
    options: dict[str, Any]
    sizes: dict[str, int]
    resident_bytes: int = 0
    bound_bytes: float | None = None
    program: Program | None = None

    @property
    def extent(self) -> tuple[int, ...]:
        """What programs of one kind are ordered by: the tokens that they compute."""
        size = self.sizes.get
        prompts = size("kept_prompts", size("prompts", 1))
        group = size("group_size", 1) * size("completion_length", 1)
        tokens = size("kept_tokens", size("packed_tokens", group))
        return prompts * tokens, prompts, group


def described(kind: str, program: Program, resident: int) -> Listed:
    """A program with its sizes."""
    return Listed(
        kind=kind,
        name=program.name,
        options=program.options,
        sizes=sizes_of(program),
        resident_bytes=resident,
        program=program,
    )


def sizes_of(program: Program) -> dict[str, int]:
    """What tells it from programs of its kind: prompts, their length, completions, tokens.

    Of a program that drops groups also what it keeps.
    """
    given = instances(Rollout, program.args)
    made = instances(Rollout, program.out)
    if not given and not made:
        return sizes_of_arrays(program.args)
    sizes = sizes_of_rollout((given or made)[0])
    if made and made[0].mask_PGT.shape[0] < sizes["prompts"]:
        kept = sizes_of_rollout(made[0])
        sizes["kept_prompts"] = kept["prompts"]
        if "packed_tokens" in kept:
            sizes["kept_tokens"] = kept["packed_tokens"]
    return sizes


def sizes_of_rollout(rollout: Rollout) -> dict[str, int]:
    P, G, T = rollout.mask_PGT.shape
    S = rollout.prompts.tokens_PS.shape[1]
    sizes = {"prompts": P, "prompt_length": S, "group_size": G, "completion_length": T}
    packed = rollout.token_index_PN
    return sizes if packed is None else sizes | {"packed_tokens": packed.shape[1]}


def sizes_of_arrays(args: Any) -> dict[str, int]:
    """Those of the first array of all completions' tokens or masks, where there is one."""
    whole = [x for x in jax.tree.leaves(args) if x.dtype in (jnp.int32, jnp.bool_)]
    of_tokens = [x.shape for x in whole if x.ndim == 3]
    names = ("prompts", "group_size", "completion_length")
    sizes = dict(zip(names, of_tokens[0], strict=True)) if of_tokens else {}
    prompts = instances(Prompts, args)
    return sizes | ({"prompt_length": prompts[0].tokens_PS.shape[1]} if prompts else {})


def instances(kind: type, tree: Any) -> list[Any]:
    """All values of a type in a tree, in order."""
    found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in found if isinstance(x, kind)]
