"""The benchmark's programs compiled for an NVIDIA GPU that is not there: do they compile, and what
memory do they take?

    python -m experiments.gpu_programs [--workloads W1,W2] [--json FILE]

XLA's compiler for CUDA needs no GPU where it is told what one is like. It does need CUDA's
libraries, so this runs in an environment with `pip install "jax[cuda13]"`. Nothing runs, and
nothing is tuned by trying, as it would be on a GPU: whatever depends on time is not told. Each
train step is compiled twice, with cuDNN's attention and with einsums.
"""

import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# JAX's plugin asks the driver for its version and gives up without one.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import tyro
from rich.console import Console
from rich.table import Table

from experiments.benchmark.with_grpo_jax import (
    Ids,
    batching_of,
    generation_of,
    given_rewards,
    update_of,
)
from experiments.benchmark.workloads import SHAPES, WORKLOADS, Workload, make_inputs, named
from grpo_jax.components import Components
from grpo_jax.models import DecoderConfig, LanguageModel, decoder
from grpo_jax.models.kernels import fused_cuda
from grpo_jax.objectives import grpo
from grpo_jax.parallel.backends import sharded
from grpo_jax.parallel.programs import Program
from grpo_jax.parallel.sharding import make_mesh
from grpo_jax.plan.programs import on_shapes, state_shapes
from grpo_jax.training.batch import rollout_shapes
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.programs import programs
from grpo_jax.training.stages import make_stages

# NVIDIA's data sheet of the H200 and CUDA's limits of compute capability 9.0, as XLA's
# `GpuTargetConfigProto`.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800
  memory_bandwidth: 4800000000000 device_memory_size: 141000000000
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
runtime_version { major: 13 }
dnn_version_info { major: %d minor: %d }
"""
# Without tuning, XLA's default tiles of its own products fit not every shape; cuBLAS takes all.
OPTIONS = {"xla_gpu_enable_triton_gemm": False}


class Compiled(NamedTuple):
    """One compiled program; `attention` counts cuDNN's calls in it, forward and backward."""

    workload: str
    name: str
    argument_bytes: int
    temp_bytes: int
    attention: tuple[int, int]
    compile_seconds: float


def cudnn_version() -> int:
    """Of the installed library, as 92801. Raises RuntimeError where there is none."""
    from jax._src.cudnn.fused_attention_stablehlo import check_cudnn_version

    return check_cudnn_version()


def described_gpu(cudnn_version: Callable[[], int] = cudnn_version) -> jax.Device:
    """The device that programs are compiled for. Raises ModuleNotFoundError without JAX's plugin
    for CUDA.
    """
    from jax.experimental import topologies

    try:
        version = cudnn_version()
    except RuntimeError as error:
        message = 'JAX\'s plugin for CUDA with cuDNN is not installed: pip install "jax[cuda13]"'
        raise ModuleNotFoundError(message) from error
    described = H200 % (version // 10_000, version // 100 % 100)
    return topologies.get_topology_desc(
        platform="cuda", target_config=described, topology="1x1x1"
    ).devices[0]


STOP_ID = 0


def components_of(model: LanguageModel, work: Workload, device: jax.Device) -> Components:
    """What a workload is trained with on one device, which may not be there."""
    devices = on_shapes(sharded(make_mesh(devices=[device])))
    size = model.config.vocab_size
    tokenizer = Ids(size, (STOP_ID,) if work.ragged else ())
    return Components(
        model=model,
        params=jax.eval_shape(model.init, jax.random.key(0)),
        tokenizer=tokenizer,
        task=given_rewards(tokenizer, make_inputs(work, size, STOP_ID)),
        objective=grpo(low=0.2, high=0.2, beta=work.beta),
        optimizer=adamw(1e-6, moments=model.config.param_dtype),
        critic=None,
        update_reference=None,
        prompt_length=work.prompt_length,
        # Which attention trains is the caller's choice, and not that of the device.
        devices=devices._replace(for_training=lambda model: model),
    )


def workload_programs(
    model: LanguageModel, work: Workload, device: jax.Device
) -> tuple[Program, Program]:
    """The sampler and the update of a workload, on shapes: of completions of full length, and of
    the groups that have a gradient.
    """
    parts = components_of(model, work, device)
    generation = generation_of(work)
    stages = make_stages(
        parts.model,
        parts.task,
        parts.tokenizer,
        parts.objective,
        parts.optimizer,
        generation=generation,
        update=update_of(work),
        batching=batching_of(work)._replace(length_buckets=1, pack_tokens=False),
        devices=parts.devices,
    )
    sizes = work.prompts, work.group_size, work.prompt_length, work.max_new_tokens
    prompts = parts.devices.put("rows", rollout_shapes(*sizes).prompts)
    found = programs(stages, state_shapes(stages, parts), prompts, functions=1)
    (sampler,) = (one for one in found if one.name == "generate")
    trained = round(work.prompts * (1 - work.equal))
    (update,) = (one for one in found if one.name == "step" and prompts_in(one) == trained)
    return sampler, update


def prompts_in(update: Program) -> int:
    """How many prompts an update takes."""
    (_, _, batch, _), _ = update.args
    return batch.samples.mask_T.shape[0]


def compile_for_cuda(workload: str, name: str, program: Program) -> Compiled:
    began = time.perf_counter()
    compiled = program.lower(platforms=("cuda",)).compile(compiler_options=OPTIONS)
    seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    ways = re.findall(r'custom_call_target="__cudnn\$fmhaSoftmax(Backward)?"', compiled.as_text())
    return Compiled(
        workload,
        name,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        (ways.count(""), ways.count("Backward")),
        seconds,
    )


@dataclasses.dataclass(frozen=True)
class Options:
    workloads: str = "W1,W2,W3,W4"
    """Which of the benchmark's, by commas."""
    shape: str = "qwen2.5-0.5b"
    """The model's, one of the benchmark's; in bfloat16."""
    remat: str = "dots"
    """What a layer keeps for its backward pass."""
    json: Path | None = None
    """File for the figures."""


def main(options: Options) -> list[Compiled]:
    if options.shape not in SHAPES:
        raise ValueError(f"--shape must be one of {', '.join(SHAPES)}, got {options.shape}")
    gpu = described_gpu()
    console = Console(width=120)
    plain = decoder(DecoderConfig(**SHAPES[options.shape], dtype="bfloat16"), remat=options.remat)
    fused = plain.with_attention(fused_cuda.attend_together)
    found = []
    for workload in named(options.workloads, tuple(WORKLOADS), "--workloads"):
        work = WORKLOADS[workload]
        _, update = workload_programs(fused, work, gpu)
        sampler, with_einsums = workload_programs(plain, work, gpu)
        for name, program in {
            "train step": update,
            "train step, einsums": with_einsums,
            "sampler": sampler,
        }.items():
            with console.status(f"{workload}: {name}"):
                found.append(compile_for_cuda(workload, name, program))
    table = Table(
        "workload", "program", "arguments GB", "temporaries GB", "calls of cuDNN", "compiled in"
    )
    for one in found:
        calls = "{} + {}".format(*one.attention)
        sizes = f"{one.argument_bytes / 1e9:.2f}", f"{one.temp_bytes / 1e9:.2f}"
        table.add_row(one.workload, one.name, *sizes, calls, f"{one.compile_seconds:.0f} s")
    told = f"{options.shape}, bfloat16, --remat {options.remat}, for {gpu.device_kind}"
    console.print(f"{told}, jax {jax.__version__}")
    console.print(table)
    if options.json is not None:
        options.json.write_text(json.dumps([one._asdict() for one in found], indent=2) + "\n")
    return found


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except (ModuleNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")
