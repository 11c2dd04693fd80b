"""Meshes and sharding rules: where each array of a run lives. The only file that names a mesh axis.

A model names the axes of its parameters ("layers embed heads"); one table maps those names to axes
of the mesh. The same rule gives the sharding of a parameter, of its optimiser moments and of a
reference copy, because it looks at the end of an array's path in its tree and at its shape, and at
nothing else.

Sharding is stated where a program begins and ends, and inside a model for each layer's weights
(`gather`); XLA carries it through. Left out on purpose: pipelines and sequence parallelism.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grpo_jax.types import Array, Params, TrainState

AXES = ("data", "fsdp", "tensor")

# Logical axis -> axis of the mesh. Prompts are spread over data and fsdp; parameters over fsdp and
# tensor.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "vocab": "tensor",
    "heads": "tensor",
    "kv": "tensor",
    "mlp": "tensor",
    "embed": "fsdp",
    "layers": None,
    "norm": None,
    "whole": None,
    "unknown": "fsdp",  # the largest axis of an array whose axes have no names
}
# How the sampler holds the parameters. It reads all of them for every token, so none should cross
# devices then.
DECODE_RULES: dict[str, dict[str, str | tuple[str, ...] | None]] = {
    # Gathered over fsdp: every device decodes its own prompts. For models whose tensor part fits
    # one device.
    "gather": RULES | {"embed": None, "unknown": None},
    # Split over fsdp and tensor at once: the devices of an fsdp group decode the same prompts, each
    # a part of a layer.
    "split": RULES
    | {"batch": "data", "embed": None}
    | dict.fromkeys(
        ("vocab", "heads", "kv", "mlp"), ("tensor", "fsdp")
    )  # within the part that tensor gave before
    | {"unknown": ("fsdp", "tensor")},
}
# Entries up to which an array without named axes is replicated: splitting it would save nothing.
SMALL = 1024


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence | None = None
) -> Mesh:
    """A mesh with the axes data, fsdp and tensor over `devices` (by default the first of all that
    are needed).

    With several processes the mesh must hold every device. Raises ValueError where the numbers do
    not fit.
    """
    sizes = (data, fsdp, tensor)
    for name, size in zip(AXES, sizes, strict=True):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh axis {name} must be a positive integer, got {size!r}")
    needed = math.prod(sizes)
    shown = " × ".join(f"{name} {size}" for name, size in zip(AXES, sizes, strict=True))
    known = list(jax.devices() if devices is None else devices)
    if needed > len(known):
        raise ValueError(f"a mesh of {shown} needs {needed} devices, there are {len(known)}")
    if needed < len(known) and (devices is not None or jax.process_count() > 1):
        raise ValueError(
            f"a mesh of {shown} uses {needed} of {len(known)} devices; it must use all of them"
        )
    return jax.make_mesh(
        sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=known[:needed]
    )


def mesh_sizes(text: str) -> dict[str, int]:
    """`"data=4,fsdp=2"` as the arguments of `make_mesh`."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in AXES or name in sizes or not number.isdecimal() or int(number) < 1:
            raise ValueError(
                f"a mesh is written like data=4,fsdp=2,tensor=1 with axes of {AXES}, got {text!r}"
            )
        sizes[name] = int(number)
    return sizes


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def prompt_parts(mesh: Mesh) -> int:
    """The number of parts that the prompts of a batch are spread over."""
    return _ways(mesh, RULES["batch"])


def _tuple(rule: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (rule,) if isinstance(rule, str) else rule or ()


def _ways(mesh: Mesh, rule: str | tuple[str, ...] | None) -> int:
    return math.prod(mesh.shape[axis] for axis in _tuple(rule))


def array_sharding(
    mesh: Mesh, shape: tuple[int, ...], names: str | None = None, rules: dict = RULES
) -> NamedSharding:
    """The sharding of one array: by the names of its axes, or by the fallback rule where they are
    unknown.

    `names` holds one logical name an axis ("layers embed heads"). An axis whose size the mesh does
    not divide stays whole, and no mesh axis is used twice. Without names the largest axis that
    divides is spread by the rule "unknown" (the first of equals); arrays of at most `SMALL` entries
    are replicated.
    """
    spec: list = [None] * len(shape)
    if names is None:
        rule = rules["unknown"]
        axes = [axis for axis, length in enumerate(shape) if length % _ways(mesh, rule) == 0]
        if rule and axes and math.prod(shape) > SMALL:
            spec[max(axes, key=lambda axis: (shape[axis], -axis))] = rule
        return NamedSharding(mesh, PartitionSpec(*spec))
    logical = names.split()
    if len(logical) != len(shape):
        raise ValueError(f"axes {names!r} name {len(logical)} axes, the array has shape {shape}")
    if unknown := [name for name in logical if name not in rules]:
        raise ValueError(
            f"axes {names!r}: {', '.join(unknown)} not in the table of rules ({', '.join(rules)})"
        )
    for axis, (name, length) in enumerate(zip(logical, shape, strict=True)):
        rule = rules[name]
        used = {one for entry in spec for one in _tuple(entry)}
        if rule and not used & set(_tuple(rule)) and length % _ways(mesh, rule) == 0:
            spec[axis] = rule
    return NamedSharding(mesh, PartitionSpec(*spec))


def param_shardings(mesh: Mesh, model_or_axes: Any, params: Params, rules: dict = RULES) -> Any:
    """The sharding of every array of a tree: parameters, or anything that holds arrays of their
    names and shapes.

    `model_or_axes` is a `LanguageModel`, or its `axes`: pairs of a path ("layers/q") and the names
    of the axes there ("layers embed heads"); None where they are unknown. An array takes the names
    of the path that its own ends with, if the number of axes agrees, so optimiser moments and a
    critic's copy of the policy follow the policy; any other array takes the fallback rule. Arrays
    may be `jax.ShapeDtypeStruct`s.
    """
    axes = model_or_axes.axes if hasattr(model_or_axes, "axes") else model_or_axes
    named = {tuple(path.split("/")): names for path, names in axes or ()}

    def one(path: tuple, x: Any) -> NamedSharding:
        keys = _keys(path)
        shape = np.shape(x)
        ends = (named.get(keys[start:]) for start in range(len(keys)))
        names = next((n for n in ends if n is not None and len(n.split()) == len(shape)), None)
        return array_sharding(mesh, shape, names, rules)

    return jax.tree_util.tree_map_with_path(one, params)


def _keys(path: tuple) -> tuple[str, ...]:
    return tuple(
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path
    )


def state_shardings(
    mesh: Mesh, model_or_axes: Any, optimizer: optax.GradientTransformation, params: Params
) -> TrainState:
    """The sharding of a whole train state; an optimiser's moments lie where their parameters do."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), params)
    step = jax.ShapeDtypeStruct((), np.int32)
    return param_shardings(
        mesh, model_or_axes, TrainState(step, shapes, jax.eval_shape(optimizer.init, shapes))
    )


@lru_cache(maxsize=16)
def gather(mesh: Mesh) -> Callable[[str, Array], Array]:
    """`gather(names, x)` for `LanguageModel.with_gather`: one layer's parameter, whole over fsdp,
    split over tensor.

    Without it XLA may split activations by the columns of the weights and sum products over fsdp,
    which moves more bytes and keeps every activation of a batch on every device. The gradient comes
    back by a reduce-scatter.
    """
    rules = DECODE_RULES["gather"]

    def whole(names: str, x: Array) -> Array:
        return jax.lax.with_sharding_constraint(x, array_sharding(mesh, x.shape, names, rules))

    return whole


@lru_cache(maxsize=16)
def spread(mesh: Mesh, function: Callable, names: tuple[str, ...]) -> Callable:
    """`function` on each device's part of its arguments, whose axes have these names; its result
    lies as the first.

    For kernels, which XLA cannot split. Components must not depend on one another.
    """

    def run(*args: Array, **options: Any) -> Array:
        specs = tuple(
            array_sharding(mesh, x.shape, axes).spec for axes, x in zip(names, args, strict=True)
        )
        local = partial(function, **options)
        # A kernel does not say over which axes its results vary, which the check asks for.
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)(
            *args
        )

    return run


def divides(mesh: Mesh, name: str, length: int) -> bool:
    """Whether an axis of that name and length is spread evenly."""
    return length % _ways(mesh, RULES[name]) == 0


def batch_shardings(mesh: Mesh, batch: Any, rules: dict = RULES) -> Any:
    """Prompts, the first axis of every array, over data and fsdp; scalars on every device.

    Raises ValueError where the prompts do not divide.
    """
    rule = rules["batch"]

    def one(x: Any) -> NamedSharding:
        shape = np.shape(x)
        if shape and shape[0] % _ways(mesh, rule):
            spread = " × ".join(f"{axis} {mesh.shape[axis]}" for axis in _tuple(rule))
            raise ValueError(
                f"{shape[0]} prompts cannot be spread evenly over {spread}: their number must be a "
                f"multiple of {_ways(mesh, rule)}"
            )
        return NamedSharding(mesh, PartitionSpec(rule)) if shape else replicated(mesh)

    return jax.tree.map(one, batch)


def moved_bytes(mesh: Mesh, model_or_axes: Any, params: Params, decode: str = "gather") -> int:
    """Bytes that the busiest device receives when parameters go from the layout of training to that
    of decoding.
    """
    before, after = (
        param_shardings(mesh, model_or_axes, params, rules)
        for rules in (RULES, DECODE_RULES[decode])
    )
    received = dict.fromkeys(mesh.devices.flat, 0)
    for x, old, new in zip(*map(jax.tree.leaves, (params, before, after)), strict=True):
        had = old.devices_indices_map(x.shape)
        needed = new.devices_indices_map(x.shape)
        for device in received:
            ranges = [
                (range(*a.indices(n)), range(*b.indices(n)))
                for a, b, n in zip(had[device], needed[device], x.shape, strict=True)
            ]
            kept = math.prod(max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a, b in ranges)
            received[device] += x.dtype.itemsize * (math.prod(len(b) for _, b in ranges) - kept)
    return max(received.values())
