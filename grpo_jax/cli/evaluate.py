"""grpo-jax eval: a run on held-out rows."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from grpo_jax.config import Flat, TrainConfig
from grpo_jax.named_options import flag, option
from grpo_jax.options import OptionError, Sampling, whole


@dataclasses.dataclass(frozen=True)
class Eval:
    """Evaluate a run on held-out rows (greedy), with pass@k if asked for, and list its failures."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    checkpoint: int | None = None
    """The iteration of the checkpoint; None takes the newest."""
    rows: int | None = None
    """Held-out rows to evaluate on; None takes what the run used."""
    k: tuple[int, ...] = ()
    """The k of pass@k, for example 1 4 8; completions are sampled beside the greedy one."""
    samples: int | None = None
    """Completions that are sampled for each row for pass@k; None takes the largest k."""
    sampling: Annotated[Sampling, Flat] = Sampling()
    max_new_tokens: int | None = None
    """The length limit of a completion, in tokens; None takes that of the run."""
    seed: int = 0
    """The seed of the samples for pass@k."""
    mesh: str | None = None
    """Devices to evaluate on, for example data=4; None: one."""
    json: bool = False
    """Print the figures as one JSON object."""


def evaluate(command: Eval) -> None:
    from grpo_jax.runs import run
    from grpo_jax.runs.folder import json_text, write_rows
    from grpo_jax.training.evaluate import failures

    check_eval(command)
    opened = run.open_run(command.run, command.checkpoint, mesh=command.mesh)
    usual = opened.config.generation
    length = command.max_new_tokens or usual.max_new_tokens
    config = dataclasses.replace(
        opened.config,
        eval_rows=command.rows or opened.config.eval_rows,
        generation=usual._replace(max_new_tokens=length),
    )
    rows, greedy = run.held_out(config, opened.components, opened.params)
    wrong = failures(opened.components.task, rows, greedy)
    path = Path(command.run) / "failures.jsonl"
    write_rows(path, wrong)
    figures = {
        "held_out": greedy.mean_reward,
        "accuracy": greedy.accuracy,
        "rows": len(rows),
        "unscorable": greedy.unscorable,
        "length": greedy.length,
        "truncated": greedy.truncated,
        "checkpoint": opened.iteration,
        "failures": len(wrong),
        "failures_file": str(path),
    }
    figures |= pass_at_k_figures(command, config, opened) if command.k else {}
    if command.json:
        print(json_text(figures))
    else:
        show_figures(figures, wrong)


def check_eval(command: Eval) -> None:
    """Raises an `OptionError` for options of an evaluation that do not fit."""
    for name in ("rows", "max_new_tokens", "samples"):
        whole(name, getattr(command, name), 1, or_none=True)
    for k in command.k:
        whole("k", k, 1)
    command.sampling.check()
    usual = Eval("")
    sampled = ("samples", "seed", *Sampling._fields)
    given = [name for name in sampled if option(command, name) != option(usual, name)]
    if given and not command.k:
        without = f"leave out {', '.join(map(flag, given))}"
        raise OptionError("k", f"is missing: without it nothing is sampled; add it, or {without}")
    if command.k and command.samples is not None and command.samples < max(command.k):
        raise OptionError("samples", f"({command.samples}) must be at least k ({max(command.k)})")
    if command.k and command.sampling.temperature == 0:
        raise OptionError(
            "temperature", "must be above 0 for pass@k: greedy samples are all the same"
        )


def pass_at_k_figures(command: Eval, config: TrainConfig, opened: Any) -> dict[str, float]:
    """pass@k of completions that are sampled for every row."""
    import jax

    from grpo_jax.runs import run
    from grpo_jax.training.evaluate import pass_at_k

    samples = command.samples or max(command.k)
    generation = config.generation._replace(
        group_size=samples, sampling=command.sampling, decode_slots=None, compactions=0
    )
    _, drawn = run.held_out(
        config,
        opened.components,
        opened.params,
        generation=generation,
        key=jax.random.key(command.seed),
        batch_size=max(1, config.eval_batch_size // samples),
    )
    return {f"pass@{k}": pass_at_k(drawn.reward_PN, k) for k in command.k}


def show_figures(figures: dict, wrong: list[dict]) -> None:
    from rich.table import Table

    console = Console()
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in figures.items():
        if value is None:
            continue
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        table.add_row(name.replace("_", " "), Text(shown))
    console.print(table)
    for row in wrong[:3]:
        console.rule("a failure", style="dim")
        text = f"{row['prompt']}\n→ {row['completion']}\n(answer: {row.get('answer')})"
        console.print(text, markup=False, emoji=False)
