"""Does it fit, before the pod is booked: compiles a run's programs for a slice that is not there.

`libtpu` compiles for a named topology without hardware. The programs are those that a run with the
same options would run, for every size of a batch that it may meet; all are listed, and the largest
of each kind is compiled and asked for its memory. FLOPs, bytes and collectives are counted in the
HLO text (see `hlo`), because XLA's own count takes the body of a loop once.

Left out on purpose: searching for the best mesh (`suggestions` names the next thing to try), and
printing (see `report`).
"""

import importlib.util
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from grpo_jax.options import OptionError
from grpo_jax.parallel.sharding import make_mesh
from grpo_jax.plan import hlo
from grpo_jax.plan.config import PlanConfig
from grpo_jax.plan.listed import Listed
from grpo_jax.plan.memory import bytes_per_device
from grpo_jax.plan.programs import list_programs
from grpo_jax.plan.topology import Roofline, Topology, parse_topology, roofline

__all__ = ["CompiledProgram", "Plan", "PlanConfig", "Planned", "devices_of", "make_plan"]

# libtpu looks for hardware and for other processes that use it; neither is there.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "none",
}
UNITS = {"B": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


class CompiledProgram(NamedTuple):
    """A compiled program, on one chip. Bytes: `resident` are what others keep while it runs.

    `counts` and `roofline` are None where XLA gave up because the program does not fit;
    `needed_bytes` is then XLA's own figure.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    resident_bytes: int
    compile_seconds: float
    counts: hlo.Counts | None = None
    roofline: Roofline | None = None
    overflow_bytes: int | None = None

    @property
    def needed_bytes(self) -> int:
        new = self.output_bytes - self.alias_bytes
        own = self.argument_bytes + new + self.temp_bytes + self.code_bytes
        return self.resident_bytes + (own if self.overflow_bytes is None else self.overflow_bytes)


class Planned(NamedTuple):
    """A program of the run; `compiled` is None where a larger one of its kind stands for it."""

    listed: Listed
    compiled: CompiledProgram | None = None


class Plan(NamedTuple):
    """The options of a run with every one of them said, its slice, and its programs."""

    config: PlanConfig
    topology: Topology
    parameters: int
    programs: list[Planned]

    @property
    def compiled(self) -> list[tuple[Listed, CompiledProgram]]:
        """The programs that were compiled."""
        return [(listed, found) for listed, found in self.programs if found is not None]

    def largest(self, kind: str) -> CompiledProgram | None:
        """The largest compiled program of a kind; None where there is none."""
        found = [pair for pair in self.compiled if pair[0].kind == kind]
        return max(found, key=lambda pair: pair[0].extent)[1] if found else None

    @property
    def fits(self) -> bool:
        return all(one.needed_bytes <= self.topology.usable_bytes for _, one in self.compiled)


def make_plan(
    config: PlanConfig,
    *,
    everything: bool = False,
    only: Sequence[str] | None = None,
    on_program: Callable[[str], None] = lambda kind: None,
) -> Plan:
    """Lists the programs of a run and compiles the largest of each kind.

    Args:
      config: the options of the run, and the slice.
      everything: compile all programs.
      only: the kinds to compile; None: all of them.
      on_program: is called with the kind of a program before it is compiled.

    Raises:
      OptionError: there is no slice, or options do not fit together.
      ModuleNotFoundError: libtpu is not installed.
      ValueError: libtpu does not know the topology.
    """
    if not config.topology:
        raise OptionError("topology", "is missing: the slice to plan for, such as v5e-16")
    topology = parse_topology(config.topology)
    mesh = make_mesh(**config.mesh_sizes, devices=devices_of(topology))
    listing = list_programs(config, mesh)
    known = {one.kind for one in listing.programs}
    if only is not None and (unknown := sorted(set(only) - known)):
        raise ValueError(f"the run has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    chosen = listing.programs if everything else largest_of_each_kind(listing.programs)
    planned = []
    for listed in listing.programs:
        compiled = None
        if any(listed is one for one in chosen) and (only is None or listed.kind in only):
            on_program(listed.kind)
            compiled = compile_program(listed, topology, mesh)
        planned.append(Planned(listed, compiled))
    return Plan(listing.config, topology, listing.parameters, planned)


def largest_of_each_kind(programs: Sequence[Listed]) -> list[Listed]:
    """Of each kind the program that computes the most tokens."""
    kinds = dict.fromkeys(one.kind for one in programs)
    return [max((p for p in programs if p.kind == k), key=lambda p: p.extent) for k in kinds]


def devices_of(topology: Topology) -> list:
    """Descriptions of the slice's devices, from libtpu.

    It reads the environment once, when it is loaded; values that are set already are left alone.
    """
    if importlib.util.find_spec("libtpu") is None:
        message = "libtpu, which compiles for TPUs without the hardware, is not installed"
        raise ModuleNotFoundError(f"{message}: pip install -r requirements-tpu.txt", name="libtpu")
    from jax.experimental import topologies

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        found = topologies.get_topology_desc(topology.name, "tpu", **topology.options)
    except jax.errors.JaxRuntimeError as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"libtpu knows no topology {topology.name}: {first}") from error
    return found.devices


def compile_program(listed: Listed, topology: Topology, mesh: Mesh) -> CompiledProgram:
    """Compiles one program and counts what it does.

    Where XLA gives up for lack of memory, its figure is kept.
    """
    started = time.perf_counter()
    arguments = bytes_per_device(listed.program.args)
    resident = listed.resident_bytes
    try:
        compiled = listed.program.lower(platforms=("tpu",)).compile()
    except jax.errors.JaxRuntimeError as error:
        if (needed := overflow(str(error), arguments)) is None:
            raise
        temporaries = max(0, needed - arguments)
        seconds = time.perf_counter() - started
        sizes = (arguments, 0, 0, temporaries, 0, resident)
        return CompiledProgram(*sizes, seconds, overflow_bytes=needed)
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    counts = hlo.count(compiled.as_text())
    coords = [tuple(device.coords) for device in mesh.devices.flat]
    return CompiledProgram(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        resident,
        seconds,
        counts,
        roofline(counts, topology, coords),
    )


def overflow(message: str, arguments: int) -> int | None:
    """Bytes that a program needs of the chip's memory, from XLA's message that it ran out of it.

    One form of the message tells all of them, another those of temporaries, without the arguments.
    None for another message.
    """
    if found := re.search(r"Used ([\d.]+)([BKMGT]?) of [\d.]+[BKMGT]? hbm", message):
        return int(float(found[1]) * UNITS[found[2] or "B"])
    temporaries = r"required for HLO temporaries \(([\d.]+)([BKMGT]?)\) exceeds available HBM"
    found = re.search(temporaries, message)
    return arguments + int(float(found[1]) * UNITS[found[2] or "B"]) if found else None
