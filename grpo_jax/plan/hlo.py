"""What a compiled program does, counted from its HLO text: the body of a loop as often as it runs.

XLA's own cost analysis counts a loop's body once, and so does a reader of the text. Here the
computations are walked from the entry, each loop multiplies what is inside it by its trip count,
and three things are added up: FLOPs of matrix products (`2 · multiplications`; element-wise work is
left out), bytes that instructions read from and write to the device's memory (a fusion is one
instruction; arrays in on-chip memory are free), and collectives with their bytes.

Left out on purpose: anything that knows a chip or a mesh (see `topology`).
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from grpo_jax.plan.hlo_text import Computation, Instruction, Module, arrays, dims, parse, size

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
# Instructions that move nothing themselves: names, views, and calls whose contents are counted on
# their own.
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "while",
    "conditional",
    "call",
    "opt-barrier",
    "optimization-barrier",
    "partition-id",
    "replica-id",
    "copy-done",
    "async-done",
    "async-update",
    "async-start",
    "add-dependency",
    "domain",
    "send-done",
    "recv-done",
}
SLICES = {"dynamic-slice", "slice", "gather"}
# A fused attention computes so many products over its blocks of scores; the FLOPs of one are in its
# scope's name.
KERNELS = {"fwd": 2, "dq": 3, "dkv": 4}
PRODUCTS = re.compile(r'op_name="[^"]*product_flops_(\d+)[^"]*splash_mha_([a-z]+)_')


class Work(NamedTuple):
    """One instruction that runs `times` times; FLOPs and bytes are of one run, on one device."""

    times: int
    flops: float
    bytes: float


class Collective(NamedTuple):
    """One collective that runs `times` times.

    `bytes` is the whole array that one run is about, on one device: the result of an all-gather,
    the operand of a reduce-scatter or an all-reduce. `group` holds the devices (partition numbers)
    of one group; empty stands for all.
    """

    kind: str
    times: int
    bytes: float
    group: tuple[int, ...]


class Counts(NamedTuple):
    """`loops` maps a loop's name to its trip count; None could not be found, the body is then
    counted once.
    """

    work: list[Work]
    collectives: list[Collective]
    loops: dict[str, int | None]

    @property
    def flops(self) -> float:
        return sum(w.times * w.flops for w in self.work)

    @property
    def bytes(self) -> float:
        return sum(w.times * w.bytes for w in self.work)


def count(text: str) -> Counts:
    """FLOPs, bytes and collectives of a program, by the text of its optimised HLO
    (`compiled.as_text()`).

    A loop that may end early (`while_loop`) is counted with the bound of its counter. Of a
    conditional every branch is counted.
    """
    module = parse(text)
    counts = Counts([], [], {})
    for computation, times in _running(module, module.computations[module.entry], 1, counts.loops):
        seen = set()  # TPUs split an asynchronous collective into several fusions: each names it, with its channel
        for instruction in computation.instructions.values():
            for kind, payload, group, channel in _collectives(module, computation, instruction):
                if channel is None or (kind, payload, channel) not in seen:
                    counts.collectives.append(Collective(kind, times, payload, group))
                seen.add((kind, payload, channel))
            flops = _flops(module, computation, instruction)
            moved = _moved(module, computation, instruction)
            if flops or moved:
                counts.work.append(Work(times, flops, moved))
    return counts


def _running(
    module: Module, computation: Computation, times: int, loops: dict[str, int | None]
) -> Iterator[tuple[Computation, int]]:
    """Every computation that the program steps through, with the number of times it does."""
    yield computation, times
    for instruction in computation.instructions.values():
        if instruction.op == "while":
            trips = trip_count(module, computation, instruction)
            loops[instruction.name] = trips
            inside = instruction.called("body") + instruction.called("condition")
            inner = times * (1 if trips is None else trips)
        elif instruction.op in ("call", "conditional", "async-start"):
            kinds = (
                "calls",
                "to_apply",
                "true_computation",
                "false_computation",
                "branch_computations",
            )
            inside = instruction.called(*kinds)
            inner = times
        else:
            continue
        for name in inside:
            yield from _running(module, module.computations[name], inner, loops)


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a loop's body runs: what XLA noted, else the bound of a counter that grows by one,
    else None.
    """
    if found := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(found[1])
    condition = module.computations[loop.called("condition")[0]]
    bounds = []
    for left, right, direction in _comparisons(module, condition, {}):
        if direction == "GT":
            left, right = right, left
        if left[0] == "element" and right[0] == "constant" and direction in ("LT", "GT"):
            bounds.append(right[1] - _initial(computation, loop, left[1]))
    return max(0, min(bounds)) if bounds else None


def _comparisons(
    module: Module, computation: Computation, given: dict[str, tuple]
) -> Iterator[tuple]:
    """(left, right, direction) of every comparison in a loop's condition, its fusions included.

    A side is ("element", index of the loop's state), ("constant", value) or ("unknown",).
    """

    def source(name: str) -> tuple:
        if name in given:
            return given[name]
        instruction = computation.instructions[name]
        if instruction.op == "get-tuple-element":
            return "element", int(re.search(r"index=(\d+)", instruction.attributes)[1])
        if instruction.op == "constant" and re.fullmatch(r"-?\d+", instruction.value):
            return "constant", int(instruction.value)
        if instruction.op in ("bitcast", "copy", "convert", "reshape") and instruction.operands:
            return source(instruction.operands[0])
        return ("unknown",)

    for instruction in computation.instructions.values():
        if instruction.op == "compare":
            left, right = map(source, instruction.operands)
            yield left, right, re.search(r"direction=(\w+)", instruction.attributes)[1]
        for name in instruction.called("calls"):
            inner = module.computations[name]
            passed = {
                inner.parameter(i): source(operand)
                for i, operand in enumerate(instruction.operands)
            }
            yield from _comparisons(module, inner, passed)


def _initial(computation: Computation, loop: Instruction, index: int) -> int:
    """The constant that an element of a loop's state starts from; 0 where it is not one, which
    gives an upper bound.
    """
    state = computation.instructions[loop.operands[0]]
    if state.op != "tuple":
        return 0
    element = computation.instructions[state.operands[index]]
    while element.op in ("copy", "bitcast", "convert") and element.operands:
        element = computation.instructions[element.operands[0]]
    return (
        int(element.value)
        if element.op == "constant" and re.fullmatch(r"-?\d+", element.value)
        else 0
    )


def _collectives(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[str, float, tuple[int, ...], str | None]]:
    """(kind, bytes, group, channel) of an instruction and of what is fused into it.

    TPUs fuse an all-reduce with the slice that each device keeps of it: a reduce-scatter under
    another name.
    """
    kind = instruction.op.removesuffix("-start")
    if kind in COLLECTIVES:
        channel = re.search(r"channel_id=(\d+)", instruction.attributes)
        group = _group(instruction.attributes)
        yield kind, _payload(computation, instruction, kind), group, channel and channel[1]
    for name in instruction.called("calls") if instruction.op == "fusion" else ():
        inner = module.computations[name]
        for fused in inner.instructions.values():
            for kind, *rest in _collectives(module, inner, fused):
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


def _group(attributes: str) -> tuple[int, ...]:
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
    mesh = r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?)\))? \{([^}]*)\}"
    if found := re.search(mesh, attributes):
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


def _flops(module: Module, computation: Computation, instruction: Instruction) -> float:
    """FLOPs of the matrix products in an instruction and in what is fused into it."""
    if instruction.op == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        lhs = dims(computation, instruction.operands[0])
        summed = (
            [lhs[int(axis)] for axis in contracted[1].split(",")]
            if contracted and contracted[1]
            else []
        )
        return 2.0 * float(np.prod(arrays(instruction.shape)[0][1])) * float(np.prod(summed))
    if instruction.op == "custom-call" and (found := PRODUCTS.search(instruction.attributes)):
        return KERNELS.get(found[2], 0) * float(found[1])
    if instruction.op == "convolution":
        return _convolution_flops(computation, instruction)
    inner = (
        module.computations[name]
        for name in instruction.called("calls")
        if instruction.op == "fusion"
    )
    return sum(_flops(module, fused, one) for fused in inner for one in fused.instructions.values())


def _convolution_flops(computation: Computation, instruction: Instruction) -> float:
    """`2 · batch · out features · in features of a group · Π valid (output, kernel) pairs` of each
    spatial axis.

    TPUs write a batched matrix product as a convolution over a dilated axis; pairs that meet
    padding or a hole between dilated entries are not computed and are not counted.
    """
    text = instruction.attributes
    lhs_labels, rhs_labels, out_labels = re.split(
        r"_|->", re.search(r"dim_labels=([\w?>-]+)", text)[1]
    )
    lhs, rhs = (dims(computation, name) for name in instruction.operands[:2])
    out = arrays(instruction.shape)[0][1]
    groups = int((re.search(r"batch_group_count=(\d+)", text) or (0, 1))[1])
    total = (
        2.0
        * lhs[lhs_labels.index("b")]
        / groups
        * rhs[rhs_labels.index("i")]
        * out[out_labels.index("f")]
    )
    found = re.search(r"window=\{([^}]*)\}", text)
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", found[1])) if found else {}
    for axis in range(len(lhs_labels) - 2):
        take = lambda key, default, axis=axis: (
            window[key].split("x")[axis] if key in window else default
        )
        width, stride, dilate, holes = (
            int(take(key, "1")) for key in ("size", "stride", "rhs_dilate", "lhs_dilate")
        )
        before = int(take("pad", "0_0").split("_")[0])
        outputs = out[out_labels.index(str(axis))]
        inputs = lhs[lhs_labels.index(str(axis))]
        place = np.arange(outputs)[:, None] * stride + np.arange(width)[None] * dilate - before
        total *= float(np.sum((place >= 0) & (place % holes == 0) & (place // holes < inputs)))
    return total


def _moved(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Bytes between the device's main memory and its cores for one run of an instruction."""
    op = instruction.op
    if op in FREE or op.endswith("-done"):
        return 0.0
    memory = lambda name: size(computation.instructions[name].shape, main_memory=True)
    result = size(instruction.shape, main_memory=True)
    if op == "fusion":
        inner = module.computations[instruction.called("calls")[0]]
        read = sum(
            _read(module, inner, inner.parameter(i), memory(n))
            for i, n in enumerate(instruction.operands)
        )
        return read + _written(inner, inner.root, result)
    if op in SLICES:
        return 2 * result
    if op == "dynamic-update-slice":
        return 2 * memory(instruction.operands[1])
    if op == "scatter":
        return 2 * memory(instruction.operands[-1])
    if op.endswith("-start"):  # its shape names the operands once more
        return max(result, sum(map(memory, instruction.operands)))
    return result + sum(map(memory, instruction.operands))


def _read(module: Module, fused: Computation, parameter: str, whole: float) -> float:
    """Bytes that a fusion reads of one operand: the slices it takes, nothing of what it only
    updates, or all of it.
    """
    if not whole:
        return 0.0
    total = 0.0
    names = [parameter]
    while names:
        name = names.pop()
        for user in fused.instructions.values():
            if name not in user.operands:
                continue
            if user.op == "bitcast":
                names.append(user.name)
            elif user.op in SLICES and user.operands[0] == name:
                total += size(user.shape)
            elif user.op == "dynamic-update-slice" and user.operands[0] == name:
                continue
            elif user.op == "fusion":
                inner = module.computations[user.called("calls")[0]]
                places = [i for i, operand in enumerate(user.operands) if operand == name]
                total += sum(_read(module, inner, inner.parameter(i), whole) for i in places)
            else:
                return whole
    return min(total, whole)


def _written(fused: Computation, name: str, whole: float) -> float:
    """Bytes that a fusion writes: the update alone where its result is an array updated in
    place.
    """
    root = fused.instructions[name]
    if root.op == "bitcast":
        return _written(fused, root.operands[0], whole)
    if root.op == "dynamic-update-slice":
        return min(whole, size(fused.instructions[root.operands[1]].shape))
    if root.op == "tuple":
        return min(
            whole, sum(_written(fused, n, size(fused.instructions[n].shape)) for n in root.operands)
        )
    return whole
