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
from functools import partial
from typing import NamedTuple

import numpy as np

from grpo_jax.plan.hlo_collectives import collectives
from grpo_jax.plan.hlo_memory import moved_bytes
from grpo_jax.plan.hlo_text import Computation, Instruction, Module, arrays, dims, parse

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

    A loop that may end early (`while_loop`) is counted with the bound of its counter, and one that
    counts on where an earlier loop stopped has the steps that are left. Of a conditional the branch
    that moves the most bytes is counted.
    """
    module = parse(text)
    counts = Counts([], [], {})
    for computation, times in _running(module, module.computations[module.entry], 1, counts.loops):
        # TPUs split an asynchronous collective into several fusions: each names it, with its
        # channel.
        seen = set()
        for instruction in computation.instructions.values():
            for kind, payload, group, channel in collectives(module, computation, instruction):
                if channel is None or (kind, payload, channel) not in seen:
                    counts.collectives.append(Collective(kind, times, payload, group))
                seen.add((kind, payload, channel))
            flops = _flops(module, computation, instruction)
            moved = moved_bytes(module, computation, instruction)
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
        elif instruction.op == "conditional":
            branches = instruction.called(
                "true_computation", "false_computation", "branch_computations"
            )
            inside = [max(branches, key=partial(_bytes_of, module))]
            inner = times
        elif instruction.op in ("call", "call-start", "async-start"):
            inside = instruction.called("calls", "to_apply")
            inner = times
        else:
            continue
        for name in inside:
            yield from _running(module, module.computations[name], inner, loops)


def _bytes_of(module: Module, name: str) -> float:
    """What a computation moves, with all that it calls."""
    return sum(
        times * moved_bytes(module, computation, instruction)
        for computation, times in _running(module, module.computations[name], 1, {})
        for instruction in computation.instructions.values()
    )


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a loop's body runs: what XLA noted, else the bound of a counter that grows by one,
    else None.
    """
    if found := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(found[1])
    steps = [
        bound - _initial(module, computation, loop, index)
        for index, bound in _bounds(module, computation, loop)
    ]
    return max(0, min(steps)) if steps else None


def _bounds(
    module: Module, computation: Computation, loop: Instruction
) -> Iterator[tuple[int, int]]:
    """(index of the loop's state, constant) of every comparison that ends a loop at a constant."""
    condition = module.computations[loop.called("condition")[0]]
    for left, right, direction in _comparisons(module, condition, {}):
        if direction == "GT":
            left, right = right, left
        if left[0] == "element" and right[0] == "constant" and direction in ("LT", "GT"):
            yield left[1], right[1]


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


def _initial(module: Module, computation: Computation, loop: Instruction, index: int) -> int:
    """What an element of a loop's state starts from: a constant, or the end of an earlier loop.

    Where it is neither, 0, which gives an upper bound of the loop's steps.
    """
    state = computation.instructions[loop.operands[0]]
    if state.op == "while":  # its result is this loop's state
        return _end(module, computation, state, index)
    if state.op != "tuple":
        return 0
    element = computation.instructions[state.operands[index]]
    while element.op in ("copy", "bitcast", "convert") and element.operands:
        element = computation.instructions[element.operands[0]]
    if element.op == "constant" and re.fullmatch(r"-?\d+", element.value):
        return int(element.value)
    if element.op == "get-tuple-element":
        source = computation.instructions[element.operands[0]]
        place = int(re.search(r"index=(\d+)", element.attributes)[1])
        return _end(module, computation, source, place) if source.op == "while" else 0
    return 0


def _end(module: Module, computation: Computation, loop: Instruction, index: int) -> int:
    """The value of a loop's counter after all steps that are counted; 0 for another element."""
    if index not in dict(_bounds(module, computation, loop)):
        return 0
    trips = trip_count(module, computation, loop)
    return _initial(module, computation, loop, index) + (trips or 0)


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
