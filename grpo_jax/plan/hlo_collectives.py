"""The collectives of optimised HLO: which devices exchange how many bytes.

Left out on purpose: how often one runs (see `hlo`), and how long it takes (see `topology`).
"""

import re
from collections.abc import Iterator

import numpy as np

from grpo_jax.plan.hlo_text import Computation, Instruction, Module, size

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?)\))? \{([^}]*)\}"
)


def collectives(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[str, float, tuple[int, ...], str | None]]:
    """(kind, bytes, group, channel) of an instruction and of what is fused into it.

    TPUs fuse an all-reduce with the slice that each device keeps of it: a reduce-scatter under
    another name.
    """
    kind = instruction.op.removesuffix("-start")
    if kind in COLLECTIVES:
        channel = re.search(r"channel_id=(\d+)", instruction.attributes)
        group = group_of(instruction.attributes)
        yield kind, _payload(computation, instruction, kind), group, channel and channel[1]
    for name in instruction.called("calls") if instruction.op == "fusion" else ():
        inner = module.computations[name]
        for fused in inner.instructions.values():
            for kind, *rest in collectives(module, inner, fused):
                scattered = kind == "all-reduce" and "reduce-scatter" in name
                yield "reduce-scatter" if scattered else kind, *rest


def _payload(computation: Computation, instruction: Instruction, kind: str) -> float:
    operands = sum(size(computation.instructions[name].shape) for name in instruction.operands)
    if kind != "all-gather":
        return operands
    result = size(instruction.shape)
    return (
        result - operands if instruction.op.endswith("-start") else result
    )  # a start's shape holds its operands too


def group_of(attributes: str) -> tuple[int, ...]:
    """The first group of devices, from any of the forms in which XLA writes groups; empty if it
    names none.

    A list, `{{0,1},{2,3}}`; reshaped and transposed numbers, `[groups,size]<=[shape]T(order)`; or
    axes of a mesh, `mesh['a'=2,'b'=4], device_ids=([shape]T(order)) {'b'}`, where `'b':(1)2` is a
    part of an axis: 2 after 1.
    """
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return tuple(map(int, found[1].split(",")))
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        return tuple(map(int, _iota(found[2]).reshape(_integers(found[1])[0], -1)[0]))
    if found := MESH_GROUPS.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        total = int(np.prod(list(sizes.values())))
        places = (_iota(found[2]) if found[2] else np.arange(total)).reshape(list(sizes.values()))
        used = {
            name: (int(before or 1), int(size or sizes[name]))
            for name, before, size in _AXIS.findall(found[3])
        }
        cut = []
        index = []
        for name, size in sizes.items():
            before, own = used.get(name, (1, 1))
            cut += [before, own, size // (before * own)]
            index += [0, slice(None) if name in used else 0, 0]
        return tuple(map(int, places.reshape(cut)[tuple(index)].flat))
    if found := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        pairs = re.findall(r"\{(\d+),(\d+)", found[1])
        return next(((int(a), int(b)) for a, b in pairs if a != b), ())
    return ()


_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def _iota(text: str) -> np.ndarray:
    """The numbers from 0 of `[shape]T(order)`: in that shape, then transposed."""
    shape, _, order = text.partition("T")
    numbers = np.arange(np.prod(_integers(shape))).reshape(_integers(shape))
    return numbers.transpose(_integers(order)) if order else numbers


def _integers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
