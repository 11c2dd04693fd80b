"""grpo_jax against TRL, Tunix and a plain PyTorch loop: same weights, prompts and lengths, in turn,
in one run.

    python -m experiments.benchmark [--workloads W1,W2] [--peers trl,tunix,transformers] [--json
    FILE] ...

Every contestant runs in a process of its own. What has been measured stays in `--out`; the same
command again goes on from there. No table is printed unless grpo_jax and each peer agree on the
loss and the gradient of the first step.
"""

import dataclasses
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console

from experiments.benchmark import driver
from experiments.benchmark.agreement import DisagreementError
from experiments.benchmark.driver import Plan, WorkerError
from experiments.benchmark.report import Report, machine_rates
from experiments.benchmark.workloads import SHAPES, WORKLOADS, named
from grpo_jax.models.hub import config_from_hf
from grpo_jax.options import Precision
from grpo_jax.runs.terminal import Screen

PEERS = ("transformers", "trl", "tunix")


@dataclasses.dataclass(frozen=True)
class Options:
    workloads: str = "W1,W2,W3,W4"
    """Which of W1 to W4, by commas. T1, T3 and T4 are small ones to try the program with."""
    peers: str = "trl,tunix,transformers"
    """Whom to compare with, by commas; a peer that is not installed is left out and said so."""
    rounds: int | None = None
    """How often each contestant's process is started; they alternate. By default 3 on CPUs, else
    1.
    """
    repeats: int | None = None
    """Timed steps of a process, after one to compile and warm up. By default 1 on CPUs, else 5."""
    json: str | None = None
    """File for the figures."""
    markdown: str | None = None
    """File for the tables as Markdown."""
    figure: str | None = None
    """File for the picture."""
    out: str = "runs/benchmark"
    """Folder of all measurements; what is there is not measured again."""
    shape: str | None = None
    """tiny, smollm2 or qwen2.5-0.5b; by default smollm2 on CPUs, else qwen2.5-0.5b."""
    dtype: str | None = None
    """float32 or bfloat16; by default float32 on CPUs, else bfloat16."""
    weights: str | None = None
    """A Hugging Face folder of that shape; by default the cached SmolLM2, else seeded random
    weights.
    """
    torch_python: str = sys.executable
    """The interpreter that has torch, transformers and TRL."""
    tunix_python: str = os.environ.get("TUNIX_PYTHON", "~/tunix-venv/bin/python")
    """The interpreter that has Tunix (default: $TUNIX_PYTHON, else ~/tunix-venv/bin/python)."""
    memory_limit_gb: float = 20.0
    """A process that holds more memory than this is ended and reported as out of memory."""


def make_plan(options: Options, kind: str) -> tuple[Plan, dict[str, str], list[str]]:
    """The plan for a kind of machine ("cpu", "gpu" or "tpu"), the versions of all packages that
    take part, and notes on who does not.
    """
    workloads = named(options.workloads, tuple(WORKLOADS), "--workloads")
    peers = named(options.peers, PEERS, "--peers")
    if not workloads:
        raise ValueError(f"--workloads names none: expected some of {', '.join(WORKLOADS)}")
    rounds = options.rounds if options.rounds is not None else 3 if kind == "cpu" else 1
    repeats = options.repeats if options.repeats is not None else 1 if kind == "cpu" else 5
    if min(rounds, repeats) < 1:
        raise ValueError(f"--rounds and --repeats must be at least 1, got {rounds} and {repeats}")
    shape = options.shape or ("smollm2" if kind == "cpu" else "qwen2.5-0.5b")
    dtype = options.dtype or ("float32" if kind == "cpu" else "bfloat16")
    if shape not in SHAPES or dtype not in ("float32", "bfloat16"):
        raise ValueError(
            f"--shape must be one of {', '.join(SHAPES)} and --dtype float32 or bfloat16, got "
            f"{shape} and {dtype}"
        )
    torch_python, tunix_python = (
        str(Path(p).expanduser()) for p in (options.torch_python, options.tunix_python)
    )
    pythons = {}
    found = {}
    notes = []
    out = Path(options.out)
    folder = driver.weights_folder(shape, out, options.weights)
    bias = json.loads((Path(folder) / "config.json").read_text()).get("model_type") == "qwen2"
    known = {}
    for name in ("grpo_jax", *(p for p in PEERS if p in peers)):
        python = driver.python_of(name, torch_python, tunix_python)
        has = driver.versions(python, driver.NEEDS[name])
        if has is None or (kind == "tpu" and name != "grpo_jax"):
            needed = driver.NEEDS[name][0]
            notes.append(
                f"{name} is left out: {needed} is not installed for {python}, or not on TPUs"
            )
            continue
        if name == "tunix" and bias:
            notes.append("tunix is left out: its Llama has no biases, which Qwen 2 has")
            continue
        pythons[name] = python
        known[name] = has
        found |= {package: version for package, version in has.items() if package not in found}
    # The row of least memory is for where memory is short; it would compile everything once more.
    ours = ["grpo_jax", "grpo_jax_layer"] if kind == "cpu" else ["grpo_jax"]
    contestants = [*ours, *(name for name in pythons if name != "grpo_jax")]
    if dtype == "float32" and kind == "cpu" and {"trl", "transformers"} & set(pythons):
        if driver.has_fast_bf16():
            contestants += [f"{name}_bf16" for name in ("transformers", "trl") if name in pythons]
        else:
            notes.append("no bf16 rows of PyTorch: this processor has neither AVX-512 BF16 nor AMX")
    if "trl" not in pythons:
        notes.append("TRL is not there: agreement with it has not been checked")
    machines = [
        "machine_jax",
        *(["machine_torch"] if {"trl", "transformers"} & set(pythons) else []),
    ]
    pythons |= {name: driver.python_of(name, torch_python, tunix_python) for name in machines}
    limit = int(options.memory_limit_gb * 2**30)
    plan = Plan(
        workloads,
        (*machines, *contestants),
        pythons,
        folder,
        out,
        shape,
        dtype,
        rounds,
        repeats,
        limit,
        versions=known,
        platform=kind,
    )
    return plan, found, notes


def machine(plan: Plan, versions: dict[str, str], rates: dict) -> dict:
    """What the figures were measured on."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "shape": plan.shape,
        "dtype": plan.dtype,
        "weights": "random, seeded"
        if Path(plan.folder).name.startswith("weights-")
        else Path(plan.folder).name,
        "rounds": plan.rounds,
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version()} | versions,
    } | machine_rates(rates)


def processor() -> str:
    """The GPU's name, else the processor's."""
    if driver.accelerator() == "gpu":
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(
            query, capture_output=True, text=True, check=True
        ).stdout.splitlines()[0]
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def measure(
    plan: Plan, console: Console, run: Callable[..., dict] = driver.run_worker
) -> tuple[dict, dict, list[str]]:
    """`driver.measure` behind a progress display that says who does what; without a terminal, a
    line now and then.
    """
    done = 0
    with Screen(console, interval=30).phase(
        "benchmark", sum(1 for _ in driver.specs(plan))
    ) as show:

        def tell(contestant, workload, number, event):
            nonlocal done
            if event is None:
                done += 1
                show(done)
                return
            peak = f"peak {event['peak_rss_bytes'] / 1e9:.1f} GB"
            told = f"{event['stage']} {event['seconds']:.3g} s, {peak}"
            show(done, note=f"{workload} round {number + 1} {contestant}: {told}")

        return driver.measure(plan, tell, run)


def main(options: Options) -> Report:
    console = Console(width=None if sys.stdout.isatty() else 180)
    plan, versions, notes = make_plan(options, driver.accelerator())
    results, rates, found = measure(plan, console)
    settings = json.loads((Path(plan.folder) / "config.json").read_text())
    config = dataclasses.asdict(config_from_hf(settings, Precision(plan.dtype)))
    inputs = {
        workload: dict(np.load(plan.out / workload / "inputs.npz")) for workload in plan.workloads
    }
    report = Report(
        results, machine(plan, versions, rates), config, inputs, notes + found, plan.dtype
    )
    report.print(console)
    for path, text in ((options.json, report.json), (options.markdown, report.markdown)):
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text())
    if options.figure is not None:
        report.figure(Path(options.figure))
    return report


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # as an exception, so that no worker is left behind
    try:
        main(tyro.cli(Options, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
    except (DisagreementError, WorkerError, ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
