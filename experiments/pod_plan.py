"""Plans for pods, compiled and not run: which mesh fits three sizes of Qwen, what more chips cost.

python -m experiments.pod_plan --out FOLDER [--only NAME …]

Every plan is kept as FOLDER/NAME.json; what is there is not compiled again, so a study that was
stopped goes on. `tables.md` in the same folder holds the tables of experiments/README.md. Needs
libtpu: requirements-tpu.txt.
"""

import dataclasses
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console

from grpo_jax.plan.config import PlanConfig
from grpo_jax.plan.plan import make_plan
from grpo_jax.plan.report import figures, show

GIB = 1024**3
# Group 8, prompts of 512 tokens, completions of 1024, and one program of each kind: its largest.
COMMON = {
    "group_size": 8,
    "prompt_length": 512,
    "max_new_tokens": 1024,
    "length_buckets": 1,
    "pack_tokens": False,
    "drop_zero_variance": False,
    "compactions": 0,
    "remat": "layer",
}
NARROW = {"param_dtype": "bfloat16", "moment_dtype": "bfloat16"}
KINDS = ("layout", "sampler", "step")  # that are compiled


def plan_of(size: str, topology: str, **options: Any) -> PlanConfig:
    """The plan of a size of Qwen 2.5 on a slice."""
    return PlanConfig.of(model=f"qwen2.5-{size}", topology=topology, **COMMON | options)


FITTING = {
    "1.5b-v5e-16": plan_of("1.5b", "v5e-16"),
    "1.5b-v5e-64": plan_of("1.5b", "v5e-64"),
    "1.5b-v5p-64": plan_of("1.5b", "v5p-64"),
    "7b-v5e-16": plan_of("7b", "v5e-16", mesh="fsdp=4,tensor=4", **NARROW),
    "7b-v5e-64": plan_of("7b", "v5e-64", mesh="fsdp=16,tensor=4"),
    "7b-v5p-64": plan_of("7b", "v5p-64"),
    "32b-v5e-16": plan_of("32b", "v5e-16", mesh="fsdp=2,tensor=8", **NARROW),
    "32b-v5e-64": plan_of(
        "32b", "v5e-64", mesh="fsdp=8,tensor=8", decode_weights="split", **NARROW
    ),
    "32b-v5p-64": plan_of("32b", "v5p-64", mesh="fsdp=8,tensor=4"),
}
# One prompt a chip, parameters over all chips: the train step alone.
SCALING = {f"scaling-{n}": plan_of("1.5b", f"v5e-{n}", **NARROW) for n in (8, 16, 32, 64, 128, 256)}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Compile the plans that are not there yet, and write the tables."""

    out: Path
    """Folder of the plans."""
    only: tuple[str, ...] = ()
    """Names of the plans to compile; none: all of them."""


def run(arguments: Arguments) -> None:
    plans = FITTING | SCALING
    if unknown := sorted(set(arguments.only) - set(plans)):
        raise SystemExit(f"unknown plans {', '.join(unknown)}; there are {', '.join(plans)}")
    jax.config.update("jax_platforms", "cpu")
    console = Console()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, config in plans.items():
        path = arguments.out / f"{name}.json"
        if path.exists() or (arguments.only and name not in arguments.only):
            continue
        console.rule(name)
        kinds = ("step",) if name in SCALING else KINDS
        made = make_plan(config, only=kinds, on_program=console.print)
        show(made, console)
        path.write_text(json.dumps(figures(made), indent=1) + "\n")
    known = {
        name: json.loads(path.read_text())
        for name in plans
        if (path := arguments.out / f"{name}.json").exists()
    }
    (arguments.out / "tables.md").write_text(tables(known))
    console.print(f"{arguments.out / 'tables.md'}: {len(known)} of {len(plans)} plans")


def tables(known: dict[str, dict]) -> str:
    """Both tables as Markdown, of the plans that are known."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "libtpu"))
    fitting = [fitting_row(known[name]) for name in FITTING if name in known]
    scaling = [scaling_row(known[name]) for name in SCALING if name in known]
    return (
        "\n\n".join(
            [
                f"{versions}, Python {platform.python_version()}",
                table(
                    "model, dtype|slice|mesh|prompts|micro-batches|step: state + temporaries"
                    "|sampler: weights + temporaries"
                    "|largest of|fits|step, at best|its collectives|sampling, at best|compiled in",
                    fitting,
                ),
                table(
                    "chips|memory a chip: state|temporaries|TFLOP a chip|GB a chip by collectives"
                    "|busy|collectives|share of collectives|compiled in",
                    scaling,
                ),
            ]
        )
        + "\n"
    )


def table(head: str, rows: list[str]) -> str:
    rule = "|".join(["---"] * (head.count("|") + 1))
    return "\n".join(f"| {' | '.join(cells.split('|'))} |" for cells in (head, rule, *rows))


def compiled_kinds(plan: dict) -> dict[str, dict]:
    """The figures of the compiled programs, by their kind."""
    return {one["kind"]: one["compiled"] for one in plan["programs"] if one["compiled"]}


def fitting_row(plan: dict) -> str:
    compiled = compiled_kinds(plan)
    step = compiled["step"]
    sampler = compiled["sampler"]
    gib = lambda *sizes: " + ".join(f"{size / GIB:.1f}" for size in sizes)
    seconds = lambda program, key: "–" if program[key] is None else f"{program[key]:.2f} s"
    most = max(program["needed_bytes"] for program in compiled.values())
    return "|".join(
        [
            f"{plan['model'].removeprefix('qwen2.5-').upper()}, {plan['param_dtype']}",
            f"{plan['topology']}, {plan['chips']} chips",
            " × ".join(f"{axis} {size}" for axis, size in plan["mesh"].items() if size > 1),
            str(plan["prompts"]),
            f"{plan['microbatches']} × {plan['group_microbatches']}",
            f"{gib(step['argument_bytes'], step['temp_bytes'])} GiB",
            f"{gib(sampler['argument_bytes'], sampler['temp_bytes'])} GiB",
            f"{gib(most)} of {gib(plan['usable_bytes'])} GiB",
            "yes" if plan["fits"] else "no",
            seconds(step, "busy_seconds"),
            seconds(step, "collective_seconds"),
            seconds(sampler, "roofline_seconds"),
            f"{plan['compile_seconds']:.0f} s",
        ]
    )


def scaling_row(plan: dict) -> str:
    step = compiled_kinds(plan)["step"]
    moved = sum(one["bytes"] for one in step["collectives"])
    return "|".join(
        [
            f"{plan['chips']} ({plan['topology'].partition(':')[2]})",
            f"{step['argument_bytes'] / GIB:.2f} GiB",
            f"{step['temp_bytes'] / GIB:.2f} GiB",
            f"{step['flops'] / 1e12:.1f}",
            f"{moved / 1e9:.1f}",
            f"{step['busy_seconds']:.2f} s",
            f"{step['collective_seconds']:.2f} s",
            f"{100 * step['collective_share']:.0f} %",
            f"{step['compile_seconds']:.0f} s",
        ]
    )


if __name__ == "__main__":
    run(tyro.cli(Arguments, description=__doc__))
