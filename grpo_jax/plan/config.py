"""What a plan is: the options of a run, and the slice that it would run on."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from grpo_jax.config import TINY, TrainConfig
from grpo_jax.options import OptionError
from grpo_jax.parallel.sharding import AXES, mesh_sizes
from grpo_jax.plan.topology import Topology, parse_topology


@dataclasses.dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """Compile a run's programs for a TPU slice, without the hardware: memory, FLOPs, best time.

    Its options are those of the run. Without --mesh parameters are spread over all chips (fsdp);
    without --prompts-per-step there is one prompt for each part of the mesh and each micro-batch.
    --model may also be a config.json, or a shape: smollm2-135m, qwen2.5-0.5b, -1.5b, -7b or -32b.
    """

    topology: str = ""
    """The slice: v5e:4x4 (chips), or by size: v5e-16 (chips), v5p-64 (TensorCores, two a chip)."""

    @classmethod
    def suited(cls, model: str = TINY, **options: Any) -> "PlanConfig":
        """The defaults for a model and for the slice that is given, with some options changed."""
        return super().suited(model, **defaults_for_slice(options) | options)

    def __post_init__(self):
        if self.pmap is not None:
            raise OptionError("pmap", "is for the devices of this machine; a plan takes a mesh")
        if not self.topology:  # the command line has an instance of the defaults
            super().__post_init__()
            return
        topology = parse_topology(self.topology)
        if self.mesh is None:
            object.__setattr__(self, "mesh", mesh_over(topology))
        super().__post_init__()
        check_mesh(self.mesh_sizes, topology)

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Every axis of the mesh with its size."""
        return dict.fromkeys(AXES, 1) | ({} if self.mesh is None else mesh_sizes(self.mesh))


def mesh_over(topology: Topology) -> str:
    """The mesh where none is given: parameters are spread over all chips."""
    return f"fsdp={topology.chips}"


def defaults_for_slice(options: Mapping[str, Any]) -> dict[str, Any]:
    """`prompts_per_step` for the mesh and micro-batches among some options, if it is not there.

    Empty where the slice is not given, or the mesh is none: those are refused elsewhere.
    """
    if not options.get("topology") or {"prompts_per_step", "batching"} & set(options):
        return {}
    try:
        sizes = mesh_sizes(options.get("mesh") or mesh_over(parse_topology(options["topology"])))
    except ValueError:
        return {}
    microbatches = options.get("microbatches", 1)
    if "update" in options:
        microbatches = options["update"].microbatches
    if not isinstance(microbatches, int) or microbatches < 1:
        return {}
    return {"prompts_per_step": sizes.get("data", 1) * sizes.get("fsdp", 1) * microbatches}


def check_mesh(sizes: Mapping[str, int], topology: Topology) -> None:
    """Raises an `OptionError` where a mesh does not take up a slice."""
    devices = math.prod(sizes.values())
    if devices != topology.chips:
        shown = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
        has = f"{topology.name} has {topology.chips} chips"
        raise OptionError("mesh", f"of {shown} is {devices} devices, {has}")
