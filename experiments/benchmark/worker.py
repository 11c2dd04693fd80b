"""One contestant on one workload, in its own process: `python -m experiments.benchmark.worker
SPEC.json`.

Tells on stdout what it does, one JSON object a line, and writes the result beside the spec. Imports
nothing heavy before it knows which contestant it is. A contestant is a module with `build(spec,
inputs)`; what that returns has

    first(clock) -> dict   every stage once, the update on the given batch: loss, grad_norm,
                           reference_PGT, gradient
    step(clock) -> array   a whole step of its own: sample, score, reference, train; returns the
                           lengths `[P, G]`
    reference(clock)       the reference log-probabilities of the given batch alone
    temp_bytes() -> int    XLA's temporaries of the compiled update, None without XLA
    platform() -> str      where it runs: "cpu", "gpu" or "tpu"
    device_peak_bytes() -> int   the most of an accelerator's memory in use so far, None without one
"""

import importlib
import json
import resource
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from experiments.benchmark.workloads import Workload, family

MODULES = {
    "grpo_jax": "with_grpo_jax",
    "trl": "with_trl",
    "transformers": "with_transformers",
    "tunix": "with_tunix",
}
STAGES = ("sample", "reference", "train", "step")


class Clock:
    """Seconds of each stage since the last `take`; every stage is told on stdout when it ends."""

    def __init__(self):
        self.laps: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str):
        began = time.perf_counter()
        yield
        self.laps[stage] = self.laps.get(stage, 0.0) + time.perf_counter() - began
        print(
            json.dumps({"stage": stage, "seconds": self.laps[stage], "peak_rss_bytes": peak_rss()}),
            flush=True,
        )

    def take(self) -> dict[str, float]:
        laps = self.laps
        self.laps = {}
        return laps


def peak_rss() -> int:
    """The largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def spec_of(settings: dict) -> SimpleNamespace:
    """The spec as attributes, its workload as a `Workload`."""
    return SimpleNamespace(**settings | {"workload": Workload(**settings["workload"])})


def measure(
    contestant, spec: SimpleNamespace, inputs: dict[str, np.ndarray]
) -> tuple[dict, dict[str, np.ndarray]]:
    """The result as JSON, and the arrays that the agreement of contestants is judged on.

    Raises RuntimeError where sampling has not produced the lengths that the workload asks for.
    """
    clock = Clock()
    first = contestant.first(clock)
    firsts = clock.take()
    laps = []
    for _ in range(spec.repeats):
        with clock("step"):
            length_PG = contestant.step(clock)
        if not np.array_equal(length_PG, inputs["length_PG"]):
            raise RuntimeError(
                f"sampled lengths {length_PG.tolist()}, expected {inputs['length_PG'].tolist()}"
            )
        if not spec.workload.beta:
            contestant.reference(clock)
        laps.append(clock.take())
    stages = {stage: [lap[stage] for lap in laps] for stage in STAGES}
    usual = {stage: float(np.median(seconds)) for stage, seconds in stages.items()}
    result = {
        "stages": stages,
        "compile_s": sum(
            max(0.0, firsts[stage] - usual[stage]) for stage in STAGES if stage in firsts
        ),
        "temp_bytes": contestant.temp_bytes(),
        "peak_rss_bytes": peak_rss(),
        "device_peak_bytes": contestant.device_peak_bytes(),
        "attention": getattr(contestant, "attention", None),
        "loss": first["loss"],
        "grad_norm": first["grad_norm"],
    }
    return result, {name: first[name] for name in ("reference_PGT", "gradient")}


def main() -> None:
    path = Path(sys.argv[1])
    spec = spec_of(json.loads(path.read_text()))
    if spec.contestant.startswith("machine"):
        result = importlib.import_module("experiments.benchmark.machine").measure(spec)
    else:
        with np.load(spec.inputs) as file:
            inputs = dict(file)
        module = importlib.import_module(
            f"experiments.benchmark.{MODULES[family(spec.contestant)]}"
        )
        contestant = module.build(spec, inputs)
        if (there := contestant.platform()) != spec.platform:
            needed = (
                "jax[cuda13]"
                if family(spec.contestant) in ("grpo_jax", "tunix")
                else "PyTorch with CUDA"
            )
            sys.exit(
                f"it finds a {there} on a machine with a {spec.platform}: install {needed} for "
                f"{sys.executable}"
            )
        result, arrays = measure(contestant, spec, inputs)
        np.savez(path.with_suffix(".npz"), **arrays)
    Path(spec.result).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
