"""Bytes that an instruction of optimised HLO moves between main memory and the cores.

Every array that lies in main memory is read and written as far as it is needed: a slice reads the
slice, an update in place writes the update, and what a fusion needs of its operands is followed
backward from its results. Arrays in on-chip memory are free.

Left out on purpose: how often an instruction runs (see `hlo`).
"""

import re
from collections.abc import Iterator

import numpy as np

from grpo_jax.plan.hlo_collectives import COLLECTIVES
from grpo_jax.plan.hlo_text import (
    Computation,
    Instruction,
    Module,
    array_bytes,
    arrays,
    size,
    written_out,
)

# Instructions that move nothing themselves: names, views, and calls whose contents are counted on
# their own.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "while",
    "conditional", "call", "async", "async-update", "opt-barrier", "optimization-barrier",
    "partition-id", "replica-id", "add-dependency", "domain",
}  # fmt: skip
# Functions of the compiler that only name memory.
FREE_CALLS = {"AllocateBuffer", "ConcatBitcast", "PrepareAsyncCallStart", "PrepareAsyncCallDone"}
SLICES = {"dynamic-slice", "slice", "gather"}
UPDATES = {"dynamic-update-slice", "scatter"}  # write into their first operand where it lies
# Each element of the result needs one element of each operand: for a part of it a part is read.
EACH_ALONE = {
    "bitcast", "bitcast-convert", "reshape", "transpose", "copy", "convert", "reverse", "reduce",
    "concatenate", "abs", "add", "and", "ceil", "compare", "divide", "exponential", "floor", "log",
    "logistic", "maximum", "minimum", "multiply", "negate", "not", "or", "power", "rsqrt", "select",
    "sqrt", "subtract", "tanh", "xor",
}  # fmt: skip


def moved_bytes(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Bytes between the device's main memory and its cores for one run of an instruction.

    Of an asynchronous instruction its start counts, its end does not.
    """
    op = instruction.op.removesuffix("-start")
    if op in FREE or op.endswith("-done") or _is_free_call(instruction):
        return 0.0
    if op == "fusion":
        return _fusion_moved(module, computation, instruction)
    operands = [computation.instructions[name].shape for name in instruction.operands]
    result = _own_result(instruction, operands)
    written = sum(map(_main_bytes, result))
    if op in SLICES:  # read from where the whole lies, written to where the result lies
        taken = array_bytes(result[0]) if _main_size(operands[0]) else 0.0
        return taken + written + sum(map(_main_size, operands[1:]))
    if op in UPDATES:
        updates = _new_values(instruction, operands)
        places = [_main_size(shape) > 0 for shape in operands[: len(updates)]]
        written = sum(size(new) for new, main in zip(updates, places, strict=True) if main)
        return written + sum(map(_main_size, operands[len(updates) :]))
    return written + sum(map(_main_size, operands))


def _main_size(shape: str) -> float:
    return size(shape, main_memory=True)


def _main_bytes(array: tuple) -> float:
    """Bytes of one of a shape's arrays if it lies in main memory, else 0."""
    return array_bytes(array) if array[2] else 0.0


def _is_free_call(instruction: Instruction) -> bool:
    """Whether it calls a function of the compiler that names memory and moves nothing."""
    found = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    return instruction.op == "custom-call" and found is not None and found[1] in FREE_CALLS


def _own_result(instruction: Instruction, operands: list[str]) -> list[tuple]:
    """The arrays of a result; without the operands, which the shape of a start names once more."""
    found = arrays(instruction.shape)
    if instruction.op == "copy-start":  # (result, operand, flag)
        return found[:1]
    known = sum(len(arrays(shape)) for shape in operands)
    if instruction.op.endswith("-start") and len(found) > known:  # (operands, result, flags)
        return found[known:]
    return found


def _new_values(update: Instruction, operands: list[str]) -> list[str]:
    """Of the operands of an update in place those that hold the new values, one for each array."""
    if update.op.removesuffix("-start") == "dynamic-update-slice":
        return operands[1:2]
    return operands[len(operands) // 2 + 1 :]  # a scatter's are: arrays, indices, new values


def _fusion_moved(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Bytes that a fusion reads and writes.

    From its results backward it is told what part of each value is needed; of an operand in main
    memory that part is read. Of an array that is updated in place only the update is written, and
    the rest is not read for it.
    """
    fused = written_out(module, module.computations[instruction.called("calls")[0]])
    operands = [computation.instructions[name].shape for name in instruction.operands]
    result = _own_result(instruction, operands)
    needed = dict.fromkeys(fused.instructions, 0.0)
    moved = 0.0
    for name, whole, aliased in _results(fused, instruction, result):
        one = fused.instructions[name]
        updates = _updates_in_place(fused, name)
        # Handed on as it is. A collective that several fusions carry on counts at its start.
        if aliased and (updates == [] or one.op in COLLECTIVES or one.op == "custom-call"):
            continue
        if not updates:
            moved += whole
            needed[name] = 1.0
            continue
        for update in updates:
            new = _new_values(update, list(update.operands))
            moved += min(whole, sum(size(fused.instructions[n].shape) for n in new))
            needed.update(dict.fromkeys(update.operands[len(new) :], 1.0))
    for one in reversed(fused.instructions.values()):
        part = min(1.0, needed[one.name])
        if one.op == "parameter":
            moved += part * _main_size(operands[int(one.value)])
        elif part:
            for place, operand in enumerate(one.operands):
                needed[operand] += _part_of_operand(fused, one, place, part)
    return moved


def _results(fused: Computation, fusion: Instruction, result: list[tuple]) -> Iterator[tuple]:
    """(name of the value, bytes in main memory, if it takes an operand's place) of each result."""
    root = fused.instructions[fused.root]
    apart = root.op == "tuple" and len(root.operands) == len(result)
    names = root.operands if apart else (root.name,) * len(result)
    text = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", fusion.attributes)
    aliased = set(re.findall(r"\{(\d*)\}: \(", text[1])) if text else set()
    for number, (name, array) in enumerate(zip(names, result, strict=True)):
        place = str(number) if fusion.shape.startswith("(") else ""
        yield name, _main_bytes(array), place in aliased


def _updates_in_place(fused: Computation, name: str) -> list[Instruction] | None:
    """The updates that turn an operand into a value: none if it is the operand, None if it is new.

    A scatter of several arrays has a tuple for its result and is taken to write them whole.
    """
    updates = []
    while (one := fused.instructions[name]).op != "parameter":
        if one.op not in UPDATES | {"bitcast"} or (one.op == "scatter" and len(one.operands) > 3):
            return None
        if one.op in UPDATES:
            updates.append(one)
        name = one.operands[0]
    return updates


def _part_of_operand(fused: Computation, user: Instruction, place: int, part: float) -> float:
    """The part of an operand that is needed for a part of an instruction's result."""
    if user.op in SLICES and place == 0:
        return part * _elements(user) / max(1.0, _elements(fused.instructions[user.operands[0]]))
    return part if user.op in EACH_ALONE else 1.0


def _elements(instruction: Instruction) -> float:
    return float(np.prod(arrays(instruction.shape)[0][1]))
