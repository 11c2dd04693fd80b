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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# JAX's plugin asks the driver for its version and gives up without one.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from experiments.benchmark.with_grpo_jax import COMPACT
from experiments.benchmark.workloads import SHAPES, WORKLOADS, Workload, named
from grpo_jax.inference.generate import generate
from grpo_jax.models import DecoderConfig, LanguageModel, decoder
from grpo_jax.models.kernels import fused_cuda
from grpo_jax.objectives import grpo
from grpo_jax.training.batch import assemble, rollout_shapes
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.train_step import init_state, make_train_step

# NVIDIA's data sheet of the H200 and CUDA's limits of compute capability 9.0, as XLA's
# `GpuTargetConfigProto`.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
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


class Program(NamedTuple):
    """One compiled program; `attention` counts cuDNN's calls in it, forward and backward."""

    workload: str
    name: str
    argument_bytes: int
    temp_bytes: int
    attention: tuple[int, int]
    compile_seconds: float


def described_gpu() -> jax.Device:
    """The device that programs are compiled for. Raises ModuleNotFoundError without JAX's plugin
    for CUDA.
    """
    from jax._src.cudnn.fused_attention_stablehlo import check_cudnn_version
    from jax.experimental import topologies

    try:
        version = check_cudnn_version()  # of the installed library, as 92801
    except RuntimeError as error:
        message = 'JAX\'s plugin for CUDA with cuDNN is not installed: pip install "jax[cuda13]"'
        raise ModuleNotFoundError(message) from error
    described = H200 % (version // 10_000, version // 100 % 100)
    return topologies.get_topology_desc(
        platform="cuda", target_config=described, topology="1x1x1"
    ).devices[0]


def train_step(model: LanguageModel, work: Workload) -> tuple[Any, tuple]:
    """The jitted update of a workload and the shapes of its arguments; groups without a gradient
    are left out.
    """
    objective = grpo(low=0.2, high=0.2, beta=work.beta)
    optimizer = adamw(1e-6, total_updates=10**6)
    P = round(work.prompts * (1 - work.equal))
    G = work.group_size
    T = work.max_new_tokens
    state = jax.eval_shape(lambda: init_state(model.init(jax.random.key(0)), optimizer))
    fields = {"ref_logp_T": jax.ShapeDtypeStruct((P, G, T), jnp.float32)} if work.beta else {}
    reward = jax.ShapeDtypeStruct((P, G), jnp.float32)
    batch = jax.eval_shape(
        partial(assemble, objective), rollout_shapes(P, G, work.prompt_length, T), reward, **fields
    )
    step = make_train_step(model, objective, optimizer, microbatches=work.microbatches)
    return jax.jit(step, donate_argnums=0), (state, batch)


def sampler(model: LanguageModel, work: Workload) -> tuple[Any, tuple]:
    """The jitted sampler of a workload and the shapes of its arguments."""
    sample = partial(
        generate,
        model,
        group_size=work.group_size,
        max_new_tokens=work.max_new_tokens,
        stop_ids=(0,) if work.ragged else (),
        compact=COMPACT if work.ragged else 0,
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    prompts = rollout_shapes(
        work.prompts, work.group_size, work.prompt_length, work.max_new_tokens
    ).prompts
    return jax.jit(sample), (jax.eval_shape(model.init, key), prompts, key)


def compile_for(gpu: jax.Device, workload: str, name: str, function: Any, shapes: tuple) -> Program:
    there = jax.sharding.SingleDeviceSharding(gpu)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), shapes)
    began = time.perf_counter()
    compiled = (
        function.trace(*args).lower(lowering_platforms=("cuda",)).compile(compiler_options=OPTIONS)
    )
    seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    ways = re.findall(r'custom_call_target="__cudnn\$fmhaSoftmax(Backward)?"', compiled.as_text())
    return Program(
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


def main(options: Options) -> list[Program]:
    if options.shape not in SHAPES:
        raise ValueError(f"--shape must be one of {', '.join(SHAPES)}, got {options.shape}")
    gpu = described_gpu()
    console = Console(width=120)
    plain = decoder(DecoderConfig(**SHAPES[options.shape], dtype="bfloat16"), remat=options.remat)
    fused = plain.with_attention(fused_cuda.attend_together)
    found = []
    for workload in named(options.workloads, tuple(WORKLOADS), "--workloads"):
        work = WORKLOADS[workload]
        for name, (function, shapes) in {
            "train step": train_step(fused, work),
            "train step, einsums": train_step(plain, work),
            "sampler": sampler(plain, work),
        }.items():
            with console.status(f"{workload}: {name}"):
                found.append(compile_for(gpu, workload, name, function, shapes))
    table = Table(
        "workload", "program", "arguments GB", "temporaries GB", "calls of cuDNN", "compiled in"
    )
    for one in found:
        calls = "{} + {}".format(*one.attention)
        sizes = f"{one.argument_bytes / 1e9:.2f}", f"{one.temp_bytes / 1e9:.2f}"
        table.add_row(one.workload, one.name, *sizes, calls, f"{one.compile_seconds:.0f} s")
    console.print(
        f"{options.shape}, bfloat16, --remat {options.remat}, for {gpu.device_kind}, jax {jax.__version__}"
    )
    console.print(table)
    if options.json is not None:
        options.json.write_text(json.dumps([one._asdict() for one in found], indent=2) + "\n")
    return found


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except (ModuleNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")
