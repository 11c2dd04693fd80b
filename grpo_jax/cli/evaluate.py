"""grpo-jax eval: a run on held-out rows."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from grpo_jax.config import OWN_DATA, Flat, TrainConfig, load_config
from grpo_jax.named_options import flag, option
from grpo_jax.options import Data, OptionError, Sampling, whole

ALL_ROWS = Data(eval_share=1.0)  # a file that is evaluated on, and not trained on
# What an evaluation on other rows takes from the run where it is not said.
AS_IN_RUN = ("reward", "prompt_column", "prompt_template", "system_prompt", "target_column")


@dataclasses.dataclass(frozen=True)
class Eval:
    """Evaluate a run, or a model, on held-out rows (greedy), with pass@k, and list its failures."""

    run: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[RUN]")] = None
    """The run folder; without it, a --model on --data or a --task."""
    model: str | None = None
    """A Hugging Face folder or Hub id to evaluate, instead of a run."""
    task: str | None = None
    """Another task than the run's: a name, reasoning_gym:NAME, or FILE.py:FUNCTION."""
    task_args: tuple[str, ...] = ()
    """Options of that task as NAME=VALUE."""
    source: Annotated[Data, Flat] = ALL_ROWS
    template_args: tuple[str, ...] = ()
    """Options of the --model's chat template as NAME=VALUE."""
    compute_dtype: str | None = None
    """The type that the --model is computed in: float32 or bfloat16; None: float32."""
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
    failures: str | None = None
    """The file of the failures; None: failures.jsonl in the run folder, or none of a --model."""
    json: bool = False
    """Print the figures as one JSON object."""


def evaluate(command: Eval) -> None:
    from grpo_jax.runs import run
    from grpo_jax.runs.folder import json_text, write_rows
    from grpo_jax.training.evaluate import failures

    check_eval(command)
    opened = opened_by(command)
    usual = opened.config.generation
    length = command.max_new_tokens or usual.max_new_tokens
    own_rows = command.source.data is None and command.task is None
    config = dataclasses.replace(
        opened.config,
        eval_rows=command.rows or (opened.config.eval_rows if own_rows else None),
        generation=usual._replace(max_new_tokens=length),
    )
    rows, greedy = run.held_out(config, opened.components, opened.params)
    wrong = failures(opened.components.task, rows, greedy)
    path = command.failures or (command.run and str(Path(command.run) / "failures.jsonl"))
    if path is not None:
        write_rows(path, wrong)
    figures = {
        "held_out": greedy.mean_reward,
        "accuracy": greedy.accuracy,
        "rows": len(rows),
        "unscorable": greedy.unscorable,
        "length": greedy.length,
        "truncated": greedy.truncated,
        "checkpoint": None if command.run is None else opened.iteration,
        "failures": len(wrong),
        "failures_file": path,
    }
    figures |= pass_at_k_figures(command, config, opened) if command.k else {}
    if command.json:
        print(json_text(figures))
    else:
        show_figures(figures, wrong)


def opened_by(command: Eval) -> Any:
    """The run, or the model, that a command names, with the rows that it names."""
    from grpo_jax.runs import run

    if command.run is not None:
        changes = changes_of(command, load_config(command.run))
        return run.open_run(command.run, command.checkpoint, mesh=command.mesh, changes=changes)
    names = ("template_args", "compute_dtype")
    options = {name: getattr(command, name) for name in names}
    if command.max_new_tokens is not None:
        options["max_new_tokens"] = command.max_new_tokens
    config = TrainConfig.suited(str(command.model), **options)
    config = dataclasses.replace(config, **changes_of(command, config)).resolved()
    return run.open_model(config, mesh=command.mesh)


def changes_of(command: Eval, config: TrainConfig) -> dict[str, Any]:
    """The options of a run that other rows, or another reward, replace."""
    source = command.source
    if source.data is not None:
        # What is not said here is as in the run: rows are asked and scored in the same way.
        kept = {name: getattr(config.source, name) for name in AS_IN_RUN}
        given = {name: getattr(source, name) for name in AS_IN_RUN}
        source = source._replace(**{name: given[name] or kept[name] for name in AS_IN_RUN})
        return {"task": OWN_DATA, "task_args": (), "source": source}
    source = Data(reward=source.reward)
    if command.task is not None:
        return {"task": command.task, "task_args": command.task_args, "source": source}
    return {"source": config.source._replace(reward=source.reward)} if source.reward else {}


def check_eval(command: Eval) -> None:
    """Raises an `OptionError` for options of an evaluation that do not fit."""
    check_place(command)
    for name in ("rows", "max_new_tokens", "samples"):
        whole(name, getattr(command, name), 1, or_none=True)
    for k in command.k:
        whole("k", k, 1)
    command.sampling.check()
    usual = Eval()
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


def check_place(command: Eval) -> None:
    """Raises an `OptionError` where it is not clear what is evaluated, and on which rows."""
    if (command.run is None) == (command.model is None):
        raise OptionError("model", "or a run folder must be given, and not both")
    for name in ("checkpoint",) if command.run is None else ("template_args", "compute_dtype"):
        if getattr(command, name) != getattr(Eval(), name):
            other = "a run" if command.run is None else "a --model"
            raise OptionError(name, f"is for {other}; leave it out")
    if command.source.data is not None and command.task is not None:
        raise OptionError("task", "and data are two places of rows; give one of them")
    if command.source.data is None:
        if command.run is None and command.task is None:
            raise OptionError("data", "or a task must be given: a model has no rows of its own")
        for name, value in command.source._asdict().items():
            if name != "reward" and value != getattr(ALL_ROWS, name):
                raise OptionError(name, "is for rows of your own: give data, or leave it out")
    if command.task_args and command.task is None:
        raise OptionError("task_args", "are options of a task: give one, or leave them out")


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
