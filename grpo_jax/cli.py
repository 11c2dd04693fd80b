"""grpo-jax train | eval | sample | plan: the command line.

Left out on purpose: anything a program could not do with the library; every command is a few calls
of it.
"""

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from grpo_jax.config import TrainConfig, at_least, flag, load_config
from grpo_jax.parallel.processes import ProcessError
from grpo_jax.plan.plan import PlanConfig

RUNS = "runs"
WHERE = (
    "mesh",
    "pmap",
    "decode_weights",
)  # options that change no number, and neither does compile_ahead


@dataclasses.dataclass(frozen=True)
class Train(TrainConfig):
    __doc__ = TrainConfig.__doc__

    resume: str | None = None
    """A run folder to continue behind its newest checkpoint, with the options it was started with,
    but for devices.
    """
    distributed: str | None = None
    """Several processes: "auto" on TPU pods and under Slurm, or HOST:PORT,PROCESSES,INDEX,
    HOST:PORT of process 0.
    """


@dataclasses.dataclass(frozen=True)
class Eval:
    """Held-out accuracy of a run (greedy), pass@k if asked for, and its failures written out to
    read.
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    checkpoint: int | None = None
    """Iteration of the checkpoint; None takes the newest."""
    rows: int | None = None
    """Held-out rows to evaluate on; None takes what the run used."""
    k: tuple[int, ...] = ()
    """The k of pass@k, e.g. 1 4 8; samples beside the greedy completion."""
    samples: int | None = None
    """Completions sampled for each row for pass@k; None takes the largest k."""
    temperature: float = 1.0
    """Of the samples for pass@k; a setting of its own, whatever training used."""
    top_p: float | None = None
    """Of the samples for pass@k: keep the most likely tokens up to this probability."""
    top_k: int | None = None
    """Of the samples for pass@k: keep this many most likely tokens."""
    max_new_tokens: int | None = None
    """Length limit in tokens; None takes that of the run."""
    seed: int = 0
    """Of the samples for pass@k."""
    mesh: str | None = None
    """Devices to evaluate on, e.g. data=4; None: one."""
    json: bool = False
    """Print the figures as one JSON object."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A run's answer to a question of yours."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    text: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TEXT")]
    """The question."""
    checkpoint: int | None = None
    """Iteration of the checkpoint; None takes the newest."""
    number: int = 1
    """How many answers."""
    temperature: float = 0.0
    """0 takes the most likely token each time; above 0 it samples."""
    max_new_tokens: int | None = None
    """Length limit in tokens; None takes that of the run."""
    seed: int = 0
    """Of the sampling."""
    json: bool = False
    """Print the answers as one JSON object."""


@dataclasses.dataclass(frozen=True)
class Plan(PlanConfig):
    __doc__ = PlanConfig.__doc__

    json: bool = False
    """Print the figures as one JSON object."""


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Eval, tyro.conf.subcommand("eval")]
    | Annotated[Sample, tyro.conf.subcommand("sample")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
)


def changed(command: Any, *fields: str) -> str:
    """The flags among `fields` that were given a value of their own, for a message."""
    defaults = {f.name: f.default for f in dataclasses.fields(command)}
    return ", ".join(flag(name) for name in fields if getattr(command, name) != defaults[name])


def train(command: Train) -> None:
    from grpo_jax.parallel import processes
    from grpo_jax.runs import run

    config = TrainConfig(
        **{f.name: getattr(command, f.name) for f in dataclasses.fields(TrainConfig)}
    )
    fixed = [
        f.name for f in dataclasses.fields(TrainConfig) if f.name not in (*WHERE, "compile_ahead")
    ]
    if command.resume is not None and (given := changed(config, *fixed)):
        raise ValueError(
            f"--resume takes every option from the run's config.json; leave out {given}"
        )
    if command.distributed is not None:
        processes.join(command.distributed)
    try:
        if command.resume is not None:
            run.train(_elsewhere(load_config(command.resume), config, command.resume), resume=True)
            return
        free = partial(run.next_folder, RUNS, f"{config.task}-{Path(config.model).name}")
        out = config.out or str(processes.together(free)[0])
        run.train(dataclasses.replace(config, out=out).resolved())
    except processes.ProcessError:
        raise
    except Exception as error:
        if command.distributed is None:
            raise
        processes.abort_process(error)


def _elsewhere(config: TrainConfig, given: TrainConfig, out: str) -> TrainConfig:
    """The configuration of a run, on the devices that are given now if any are."""
    moved = {name: getattr(given, name) for name in WHERE} if given.mesh or given.pmap else {}
    moved |= {"compile_ahead": True} if given.compile_ahead else {}
    return dataclasses.replace(
        config, out=out, **moved
    ).resolved()  # a run of an older version lacks some options


def evaluate(command: Eval) -> None:
    import jax

    from grpo_jax.inference.logprobs import Sampling
    from grpo_jax.runs import run
    from grpo_jax.runs.folder import json_text, write_rows
    from grpo_jax.training.evaluate import failures, pass_at_k

    for field in ("rows", "max_new_tokens"):
        at_least(field, getattr(command, field), 1)
    for k in command.k:
        at_least("k", k, 1)
    if not command.k and (
        given := changed(command, "samples", "temperature", "top_p", "top_k", "seed")
    ):
        raise ValueError(
            f"without --k nothing is sampled, the evaluation is greedy; add --k or leave out {given}"
        )
    samples = max(command.k, default=1) if command.samples is None else command.samples
    if command.k and samples < max(command.k):
        raise ValueError(
            f"--samples ({samples}) must be at least the largest --k ({max(command.k)})"
        )
    sampling = Sampling(command.temperature, command.top_k, command.top_p).checked()
    if command.k and sampling.temperature == 0:
        raise ValueError(
            "--temperature must be above 0 for pass@k: greedy samples are all the same"
        )
    opened = run.open_run(command.run, command.checkpoint, mesh=command.mesh)
    config = dataclasses.replace(
        opened.config,
        eval_rows=command.rows or opened.config.eval_rows,
        max_new_tokens=command.max_new_tokens or opened.config.max_new_tokens,
    )
    rows, greedy = run.held_out(config, opened.parts, opened.params)
    wrong = failures(opened.parts.task, rows, greedy)
    path = Path(command.run) / "failures.jsonl"
    write_rows(path, wrong)
    figures = {
        "held_out": greedy.accuracy,
        "rows": len(rows),
        "unscorable": greedy.unscorable,
        "length": greedy.length,
        "truncated": greedy.truncated,
        "checkpoint": opened.iteration,
        "failures": len(wrong),
        "failures_file": str(path),
    }
    if command.k:
        _, drawn = run.held_out(
            config,
            opened.parts,
            opened.params,
            samples=samples,
            sampling=sampling,
            key=jax.random.key(command.seed),
            batch_size=max(1, config.eval_batch // samples),
        )
        figures |= {f"pass@{k}": pass_at_k(drawn.reward_PN >= 1, k) for k in command.k}
    if command.json:
        print(json_text(figures))
    else:
        _show_figures(figures, wrong)


def _show_figures(figures: dict, wrong: list[dict]) -> None:
    from rich.table import Table

    console = Console()
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in figures.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        table.add_row(name.replace("_", " "), shown)
    console.print(table)
    for row in wrong[:3]:
        console.rule("a failure", style="dim")
        console.print(
            f"{row['prompt']}\n→ {row['completion']}\n(answer: {row.get('answer')})", markup=False
        )


def sample(command: Sample) -> None:
    import jax

    from grpo_jax.inference.generate import generate
    from grpo_jax.inference.text import completion_texts
    from grpo_jax.inference.tokenizer import pad_prompts
    from grpo_jax.runs import run
    from grpo_jax.runs.folder import json_text

    at_least("number", command.number, 1)
    at_least("max_new_tokens", command.max_new_tokens, 1)
    if command.number > 1 and command.temperature == 0:
        raise ValueError(
            "--number above 1 needs a --temperature above 0: greedy answers are all the same"
        )
    opened = run.open_run(command.run, command.checkpoint)
    tokenizer = opened.parts.tokenizer
    prompts = pad_prompts(
        [tokenizer.render([{"role": "user", "content": command.text}])], tokenizer.pad_id
    )
    rollout = generate(
        opened.parts.model,
        opened.params,
        prompts,
        jax.random.key(command.seed),
        group_size=command.number,
        max_new_tokens=command.max_new_tokens or opened.config.max_new_tokens,
        temperature=command.temperature,
        stop_ids=tokenizer.stop_ids,
        pad_id=tokenizer.pad_id,
    )
    texts = completion_texts(tokenizer, rollout)[0]
    print(
        json_text({"question": command.text, "answers": texts})
        if command.json
        else "\n".join(texts)
    )


def plan(command: Plan) -> None:
    import jax

    from grpo_jax.plan.plan import make_plan
    from grpo_jax.plan.report import figures, show
    from grpo_jax.runs.folder import json_text

    jax.config.update(
        "jax_platforms", "cpu"
    )  # nothing is run: a TPU of this machine is left to others
    config = PlanConfig(
        **{f.name: getattr(command, f.name) for f in dataclasses.fields(PlanConfig)}
    )
    progress = Console(stderr=True)
    try:
        made = make_plan(
            config, on_program=lambda name: progress.print(f"compiling: {name}", style="dim")
        )
    except ModuleNotFoundError as error:
        if error.name != "libtpu":
            raise
        raise ValueError(str(error)) from None
    if command.json:
        print(json_text(figures(made)))
    else:
        show(made, Console())


def main(arguments: list[str] | None = None) -> int:
    command = tyro.cli(
        Command, prog="grpo-jax", description=__doc__.splitlines()[0], args=arguments
    )
    actions = {Train: train, Eval: evaluate, Sample: sample, Plan: plan}
    try:
        actions[type(command)](command)
    except (ValueError, OSError, ProcessError) as error:
        message = Text.assemble(
            ("error: ", "bold red"), str(error)
        )  # not markup: a message may hold brackets
        Console(stderr=True).print(message, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; continue with: grpo-jax train --resume RUN")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
