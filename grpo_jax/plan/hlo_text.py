"""The text of optimised HLO (`compiled.as_text()`), read: computations, their instructions, the
shapes of arrays.

Left out on purpose: what the instructions do (see `hlo`).
"""

import re
from typing import NamedTuple

import numpy as np

DTYPE_BYTES = {
    "pred": 1,
    "token": 0,
    "opaque": 0,
    "s2": 0.25,
    "u2": 0.25,
    "s4": 0.5,
    "u4": 0.5,
    "f4e2m1fn": 0.5,
}
ARRAY = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([\d,<=\s]*)\](\{[^}]*\})?")
NAME = re.compile(r"%([\w.\-]+)")
HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|branch_computations)=(\{[^}]*\}|%[\w.\-]+)"
)


class Instruction(NamedTuple):
    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    value: str  # the text between the parentheses: a constant's value, a parameter's number
    attributes: str

    def called(self, *kinds: str) -> list[str]:
        """Names of the computations that it refers to, as `calls=`, `body=`, …"""
        return [
            name
            for kind, text in CALLED.findall(self.attributes)
            if kind in kinds
            for name in NAME.findall(text)
        ]


class Computation(NamedTuple):
    instructions: dict[str, Instruction]
    root: str

    def parameter(self, number: int) -> str:
        return next(
            i.name
            for i in self.instructions.values()
            if i.op == "parameter" and int(i.value) == number
        )


class Module(NamedTuple):
    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """The computations of a module. Raises ValueError where the text has no entry computation."""
    computations = {}
    entry = None
    name = None
    instructions: dict[str, Instruction] = {}
    root = ""
    for line in re.sub(r"kernel_metadata=\{\n.*\n\}", "kernel_metadata={}", text).splitlines():
        if name is None:
            if found := HEADER.match(line):
                name = found[2]
                instructions = {}
                root = ""
                entry = name if found[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(instructions, root)
            name = None
        elif " = " in line:
            instruction = _instruction(line)
            instructions[instruction.name] = instruction
            root = instruction.name if line.lstrip().startswith("ROOT ") else root
    if entry is None:
        raise ValueError("this is no HLO text: it has no ENTRY computation")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction:
    left, _, right = line.partition(" = ")
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    shape = right[:end]
    rest = right[end:].lstrip()
    start = rest.index("(")
    stop = _closing(rest, start)
    inside = rest[start + 1 : stop]
    return Instruction(
        left.replace("ROOT", "").strip().lstrip("%"),
        shape,
        rest[:start].strip(),
        tuple(NAME.findall(inside)),
        inside,
        rest[stop + 1 :],
    )


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"parentheses do not match in {text[:200]!r}")


def written_out(module: Module, computation: Computation) -> Computation:
    """A computation with the contents of the fusions inside it in their place."""
    instructions: dict[str, Instruction] = {}
    for instruction in computation.instructions.values():
        if instruction.op != "fusion":
            instructions[instruction.name] = instruction
            continue
        inner = written_out(module, module.computations[instruction.called("calls")[0]])
        names = {name: f"{instruction.name}/{name}" for name in inner.instructions}
        names[inner.root] = instruction.name
        for one in inner.instructions.values():
            name = names[one.name]
            operands = tuple(names[operand] for operand in one.operands)
            if one.op == "parameter":
                one = one._replace(op="bitcast")
                operands = (instruction.operands[int(one.value)],)
            instructions[name] = one._replace(name=name, operands=operands)
    return Computation(instructions, computation.root)


def arrays(shape: str) -> list[tuple[str, tuple[int, ...], bool]]:
    """The arrays of a shape's text: (dtype, dimensions, whether it lives in the device's main
    memory).
    """
    dimensions = lambda text: tuple(
        int(n.strip().lstrip("<=")) for n in text.split(",") if n.strip()
    )
    return [
        (dtype, dimensions(dims), "S(" not in layout)
        for dtype, dims, layout in ARRAY.findall(shape)
    ]


def size(shape: str, *, main_memory: bool = False) -> float:
    """Bytes of a shape; with `main_memory` only of arrays that live there, not in on-chip
    memory.
    """
    return sum(array_bytes(array) for array in arrays(shape) if array[2] or not main_memory)


def array_bytes(array: tuple[str, tuple[int, ...], bool]) -> float:
    """Bytes of one of a shape's `arrays`."""
    dtype, dimensions, _ = array
    return _width(dtype) * float(np.prod(dimensions))


def _width(dtype: str) -> float:
    if dtype in DTYPE_BYTES:
        return DTYPE_BYTES[dtype]
    bits = int(re.search(r"\d+", dtype)[0])  # f32, bf16, s8, c64, f8e4m3fn
    return bits / 8


def dims(computation: Computation, name: str) -> tuple[int, ...]:
    """The dimensions of an instruction's first array."""
    return arrays(computation.instructions[name].shape)[0][1]
