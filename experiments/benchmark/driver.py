"""Starts each contestant in its own process, in turn, keeps what it measured, and compares first
steps.

Results lie in `out/WORKLOAD/CONTESTANT.ROUND.json`; what is there is not run again. Knows neither
JAX nor PyTorch.
"""

import dataclasses
import glob
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from experiments.benchmark import agreement
from experiments.benchmark.workloads import WORKLOADS, Workload, family, make_inputs

ROOT = Path(__file__).resolve().parents[2]
# The distributions whose versions are told, the first of which a contestant cannot do without.
NEEDS = {
    "grpo_jax": ("jax", "jaxlib", "flax", "optax"),
    "transformers": ("torch", "transformers"),
    "trl": ("trl", "torch", "transformers"),
    "tunix": ("google-tunix", "jax", "flax"),
}
PROBE = """
import importlib.metadata as m, json, sys
versions = {}
for name in sys.argv[1:]:
    try: versions[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(versions))
"""


class WorkerError(RuntimeError):
    """A contestant's process failed for another reason than memory."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run of the benchmark, every default filled in."""

    workloads: tuple[str, ...]
    contestants: tuple[str, ...]  # with their second rows
    pythons: dict[str, str]  # of each contestant's family
    folder: str  # the weights
    out: Path
    shape: str
    dtype: str
    rounds: int
    repeats: int
    memory_limit: int  # bytes
    seed: int = 0
    # Of each family's packages.
    versions: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    learning_rate: float = 1e-6
    clip_norm: float = 1.0
    platform: str = "cpu"  # "gpu" or "tpu" where there is one
    sizes: Mapping[str, Workload] = dataclasses.field(default_factory=lambda: WORKLOADS)

    def fixed(self) -> dict:
        """What must not change between two runs that share a folder."""
        names = ("folder", "shape", "dtype", "repeats", "seed", "learning_rate", "clip_norm")
        return {name: getattr(self, name) for name in names}


def accelerator() -> str:
    """ "gpu", "tpu" or "cpu", by the device files, without a library."""
    if glob.glob("/dev/nvidia[0-9]*"):
        return "gpu"
    return "tpu" if glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*") else "cpu"


def has_fast_bf16() -> bool:
    """Whether the processor multiplies bfloat16 matrices in hardware (AVX-512 BF16 or AMX)."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return bool({"avx512_bf16", "amx_bf16"} & set(flags))


def versions(python: str, names: tuple[str, ...]) -> dict[str, str] | None:
    """The versions in that interpreter's environment; None where the first package is missing or
    there is none.
    """
    try:
        done = subprocess.run(
            [python, "-c", PROBE, *names], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    found = json.loads(done.stdout)
    return found if names[0] in found else None


def environment() -> dict[str, str]:
    """That of the workers: this repository importable, no compiled program from an earlier run."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {
        "PYTHONPATH": path,
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "HF_HUB_OFFLINE": "1",
    }


def resident_bytes(pid: int) -> int:
    """The resident size of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def run_worker(python: str, spec: dict, memory_limit: int, tell: Callable[[dict], None]) -> dict:
    """The worker's result, or `{"failed": why}` if it took more memory than `memory_limit` or was
    killed.
    """
    path = Path(spec["result"]).with_suffix(".spec")
    Path(spec["result"]).unlink(
        missing_ok=True
    )  # of another spec: it must not be taken for this one's
    path.write_text(json.dumps(spec, indent=2) + "\n")
    surroundings = environment()
    if spec["dtype"] == "float32" and spec["platform"] != "cpu":
        surroundings["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"  # PyTorch's own default
    command = [python, "-m", "experiments.benchmark.worker", str(path)]
    too_large = threading.Event()
    with path.with_suffix(".log").open("w") as log:
        worker = subprocess.Popen(
            command, env=surroundings, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True
        )

        def guard():
            while worker.poll() is None:
                if resident_bytes(worker.pid) > memory_limit:
                    too_large.set()
                    worker.kill()
                time.sleep(0.2)

        threading.Thread(target=guard, daemon=True).start()
        try:
            for line in worker.stdout:
                if line.startswith("{"):
                    tell(json.loads(line))
                else:
                    log.write(line)
            worker.wait()
        finally:
            worker.kill()
            worker.stdout.close()
    if too_large.is_set() or worker.returncode == -9:
        why = (
            f"out of memory, above {memory_limit / 2**30:.0f} GiB resident"
            if too_large.is_set()
            else "was killed"
        )
        result = {"failed": f"{spec['contestant']}: {why}"}
        Path(spec["result"]).write_text(json.dumps(result) + "\n")
        return result
    if worker.returncode:
        tail = path.with_suffix(".log").read_text().strip().splitlines()[-3:]
        raise WorkerError(
            f"{spec['contestant']} ended with code {worker.returncode}: {' | '.join(tail)}"
        )
    return json.loads(Path(spec["result"]).read_text())


def open_folder(plan: Plan) -> None:
    """Makes the folder; raises ValueError if it holds results of other settings."""
    plan.out.mkdir(parents=True, exist_ok=True)
    path = plan.out / "settings.json"
    if path.exists():
        before = json.loads(path.read_text())
        changed = [
            f"{k} {before.get(k)!r}, now {v!r}"
            for k, v in plan.fixed().items()
            if before.get(k) != v
        ]
        if changed:
            raise ValueError(
                f"{plan.out} holds results with {'; '.join(changed)}: choose another --out"
            )
    path.write_text(json.dumps(plan.fixed(), indent=2) + "\n")


def specs(plan: Plan) -> Iterator[tuple[str, str, int]]:
    """(workload, contestant, round) in the order they run: contestants alternate within a round.

    The machine itself is measured in the rounds of the first workload.
    """
    for workload in plan.workloads:
        for number in range(plan.rounds):
            for contestant in plan.contestants:
                if workload == plan.workloads[0] or not contestant.startswith("machine"):
                    yield workload, contestant, number


def measure(
    plan: Plan, tell: Callable[..., None], run: Callable[..., dict] = run_worker
) -> tuple[dict, dict, list[str]]:
    """Runs what has not been run; returns `results[workload][contestant]`, the machine's rates, and
    notes.

    `tell(contestant, workload, number, event)` hears of every stage that ends (a dict) and of every
    result (None); `run` is how a worker is run. Raises DisagreementError as soon as first steps are
    seen to differ.
    """
    open_folder(plan)
    config = json.loads((Path(plan.folder) / "config.json").read_text())
    results: dict[str, dict[str, list[dict]]] = {workload: {} for workload in plan.workloads}
    rates: dict[str, list[dict]] = {}
    notes: list[str] = []
    for workload, contestant, number in specs(plan):
        machine = contestant.startswith("machine")
        own = (rates if machine else results[workload]).setdefault(contestant, [])
        if machine or not own or "failed" not in own[-1]:
            spec = _spec(plan, config, workload, contestant, number)
            hear = lambda event, at=(contestant, workload, number): tell(*at, event)
            try:
                python = plan.pythons[family(contestant)]
                found = _known(spec) or run(python, spec, plan.memory_limit, hear)
            except WorkerError as error:
                if family(contestant) == "grpo_jax":
                    raise
                found = {"failed": str(error)}
            own.append(found)
            if "failed" in found:
                notes.append(f"{workload}: {found['failed']}")
            elif number == 0 and not machine:
                if found.get("attention") and plan.platform != "cpu":
                    notes.append(
                        f"{workload}: {contestant} attends by {found['attention']} in training"
                    )
                _agree(plan, workload, results[workload], notes)
        tell(contestant, workload, number, None)
    return results, rates, notes


def _spec(plan: Plan, config: dict, workload: str, contestant: str, number: int) -> dict:
    """What a worker is told; writes the workload's arrays."""
    folder = plan.out / workload
    stop_id = config.get("eos_token_id") or 2
    stop_id = stop_id[0] if isinstance(stop_id, list) else stop_id
    folder.mkdir(exist_ok=True)
    inputs = folder / "inputs.npz"
    work = plan.sizes[workload]
    np.savez(inputs, **make_inputs(work, config["vocab_size"], stop_id, plan.seed))
    return {
        "contestant": contestant,
        "folder": plan.folder,
        "inputs": str(inputs.absolute()),
        "result": str((folder / f"{contestant}.{number}.json").absolute()),
        "workload": dataclasses.asdict(work),
        "dtype": plan.dtype,
        "repeats": plan.repeats,
        "stop_id": stop_id,
        "vocab_size": config["vocab_size"],
        "learning_rate": plan.learning_rate,
        "clip_norm": plan.clip_norm,
        "matrix": 256 if plan.shape == "tiny" else 2048 if plan.platform == "cpu" else 8192,
        "copy_bytes": 2**20 if plan.shape == "tiny" else 2**28,
        "platform": plan.platform,
        "memory_limit": plan.memory_limit,
        "versions": plan.versions.get(family(contestant), {}),
    }


def _known(spec: dict) -> dict | None:
    """What was measured before, if the worker was told the same then."""
    path = Path(spec["result"])
    before = path.with_suffix(".spec")
    if path.exists() and before.exists() and json.loads(before.read_text()) == spec:
        return json.loads(path.read_text())
    return None


def _agree(plan: Plan, workload: str, results: dict, notes: list[str]) -> None:
    """Compares the newest contestant's first step with grpo_jax's, if both have one in the same
    dtype.
    """
    newest = next(reversed(results))
    known = [
        name
        for name in ("grpo_jax", newest)
        if results.get(name) and "failed" not in results[name][0]
    ]
    if newest == "grpo_jax" or newest.endswith("_bf16") or len(known) < 2:
        return
    ours, theirs = (
        _first_step(plan.out / workload / f"{name}.0", results[name][0]) for name in known
    )
    if newest == "tunix" and plan.sizes[workload].peer_microbatches > 1:
        ours, theirs = (x | {"grad_norm": 0.0, "gradient": np.zeros(1)} for x in (ours, theirs))
    found = agreement.check(workload, newest, ours, theirs, dtype=plan.dtype)
    told = ", ".join(f"{name.removesuffix('_PGT')} {value:.1e}" for name, value in found.items())
    notes.append(f"{workload}: first step of grpo_jax and {newest} differ by {told}")


def _first_step(path: Path, result: dict) -> dict:
    with np.load(f"{path}.npz") as arrays:
        return {name: result[name] for name in ("loss", "grad_norm")} | dict(arrays)


def python_of(name: str, torch_python: str, tunix_python: str) -> str:
    """The interpreter whose environment holds a contestant's packages."""
    if name in ("trl", "transformers", "machine_torch"):
        return torch_python
    return tunix_python if name == "tunix" else sys.executable


def weights_folder(shape: str, out: Path, given: str | None) -> str:
    """The given folder, or the one that `weights` finds or makes."""
    if given is not None:
        if not (Path(given) / "config.json").is_file():
            raise FileNotFoundError(
                f"{given} holds no config.json: --weights takes a Hugging Face folder"
            )
        return str(Path(given).absolute())
    command = [
        sys.executable,
        "-m",
        "experiments.benchmark.weights",
        shape,
        str(out.absolute() / f"weights-{shape}"),
    ]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise WorkerError(f"the weights could not be made: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout.strip().splitlines()[-1]
