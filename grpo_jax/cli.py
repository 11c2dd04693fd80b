"""grpo-jax train | eval | sample | plan: the command line.

Flags are the options of the library's own tuples, by their names. Left out on purpose: anything a
program could not do with the library; every command is a few calls of it.
"""

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from grpo_jax.config import (
    TINY,
    Flat,
    TrainConfig,
    flag,
    load_config,
    option,
    option_paths,
)
from grpo_jax.options import OptionError, Sampling, whole
from grpo_jax.parallel.processes import ProcessError
from grpo_jax.plan.config import PlanConfig

RUNS = "runs"
# Options that change no number of a run that is resumed.
ELSEWHERE = ("mesh", "pmap", "decode_weights", "compile_ahead")
# What TRL calls an option, and what it is called here.
TRL_NAMES = {
    "num_generations": "--group-size",
    "max_completion_length": "--max-new-tokens",
    "max_prompt_length": "--prompt-length",
    "per_device_train_batch_size": "--prompts-per-step (prompts, not completions)",
    "generation_batch_size": "--prompts-per-step (prompts, not completions)",
    "gradient_accumulation_steps": "--microbatches",
    "num_iterations": "--epochs",
    "beta": "--objective-args beta=…",
    "epsilon": "--objective-args low=… high=…",
    "epsilon_high": "--objective-args high=…",
    "loss_type": "--objective",
    "scale_rewards": "--objective (dr_grpo, lite_ppo and others scale otherwise)",
    "importance_sampling_level": "--objective (gspo has a ratio of the whole sequence)",
    "reward_weights": "--weights",
    "max_steps": "--steps",
    "num_train_epochs": "--steps (iterations)",
    "save_steps": "--save-every",
    "eval_steps": "--eval-every",
    "save_total_limit": "--keep-checkpoints",
    "per_device_eval_batch_size": "--eval-batch-size",
    "warmup_steps": "--lr-warmup",
    "lr_scheduler_type": "--schedule",
    "max_grad_norm": "--clip-norm",
    "output_dir": "--out",
    "resume_from_checkpoint": "--resume",
    "model_name_or_path": "--model",
    "dataset_name": "--task",
    "sync_ref_model": "--ref-every or --ref-ema",
    "ref_model_sync_steps": "--ref-every",
    "ref_model_mixup_alpha": "--ref-ema",
    "gradient_checkpointing": "--remat",
    "bf16": "--compute-dtype bfloat16",
    "torch_dtype": "--param-dtype and --compute-dtype",
    "num_completions_to_print": "--log-completions",
    "steps_per_generation": "--epochs or --max-staleness",
}


@dataclasses.dataclass(frozen=True)
class Train(TrainConfig):
    __doc__ = TrainConfig.__doc__

    resume: str | None = None
    """A run folder to continue behind its newest checkpoint; only its devices may be changed."""
    distributed: str | None = None
    """Several processes: "auto" (TPU pods, Slurm), or HOST:PORT,PROCESSES,INDEX of process 0."""

    def __post_init__(self):
        """Nothing is checked here but in `narrowed`: an error then is told in the flags' words."""


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


@dataclasses.dataclass(frozen=True)
class Sample:
    """Answer a question of yours with a run's policy."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    text: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TEXT")]
    """The question."""
    checkpoint: int | None = None
    """The iteration of the checkpoint; None takes the newest."""
    number: int = 1
    """How many answers to give."""
    sampling: Annotated[Sampling, Flat] = Sampling(temperature=0.0)
    max_new_tokens: int | None = None
    """The length limit of an answer, in tokens; None takes that of the run."""
    seed: int = 0
    """The seed of the sampling."""
    json: bool = False
    """Print the answers as one JSON object."""


@dataclasses.dataclass(frozen=True)
class Plan(PlanConfig):
    __doc__ = PlanConfig.__doc__

    all: bool = False
    """Compile every program that is listed, and not the largest of each kind alone."""
    json: bool = False
    """Print the figures as one JSON object."""

    def __post_init__(self):
        """As that of `Train`."""


def train(command: Train) -> None:
    from grpo_jax.parallel import processes
    from grpo_jax.runs import run

    check_run(command)
    if command.distributed is not None:
        processes.join(command.distributed)
    try:
        run.train(run_config(command), resume=command.resume is not None)
    except processes.ProcessError:
        raise
    except Exception as error:
        if command.distributed is None:
            raise
        processes.abort_process(error)


def check_run(command: Train) -> None:
    """Raises ValueError for options that do not fit; before processes are joined."""
    if command.resume is None:
        narrowed(command, TrainConfig)
    elif given := changed(command, ELSEWHERE):
        raise ValueError(
            f"--resume takes every option from the run's config.json; leave out {given}"
        )
    else:
        run_config(command)


def run_config(command: Train) -> TrainConfig:
    """The run that a command asks for: a new one, in the next free folder, or one to continue."""
    from grpo_jax.parallel import processes
    from grpo_jax.runs import run

    if command.resume is not None:
        return elsewhere(load_config(command.resume), command, command.resume)
    config = narrowed(command, TrainConfig)
    free = partial(run.next_folder, RUNS, f"{config.task}-{Path(config.model).name}")
    out = config.out or str(processes.run_and_gather(free)[0])
    return dataclasses.replace(config, out=out).resolved()


def narrowed(command: Any, cls: type) -> Any:
    """The part of a command that is a configuration, checked."""
    return cls(**{field.name: getattr(command, field.name) for field in dataclasses.fields(cls)})


def changed(command: TrainConfig, spared: tuple[str, ...] = ()) -> str:
    """The flags of a run that were given a value of their own, for a message."""
    usual = TrainConfig.suited(command.model)
    names = [name for name in option_paths(TrainConfig) if name not in spared]
    given = [name for name in names if option(command, name) != option(usual, name)]
    if command.model != TINY:
        given.append("model")
    return ", ".join(map(flag, given))


def elsewhere(config: TrainConfig, given: TrainConfig, out: str) -> TrainConfig:
    """The configuration of a run, on the devices that are given now if any are."""
    moved: dict[str, Any] = {"out": out}
    if given.mesh or given.pmap:
        moved |= {name: getattr(given, name) for name in ("mesh", "pmap", "decode_weights")}
    if given.compile_ahead:
        moved["compile_ahead"] = True
    return dataclasses.replace(config, **moved)


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


def sample(command: Sample) -> None:
    import jax

    from grpo_jax.inference.generate import generate
    from grpo_jax.inference.logprobs import with_vocabulary
    from grpo_jax.inference.text import completion_texts
    from grpo_jax.inference.tokenizer import pad_prompts
    from grpo_jax.options import Generation
    from grpo_jax.runs import run
    from grpo_jax.runs.folder import json_text

    whole("number", command.number, 1)
    whole("max_new_tokens", command.max_new_tokens, 1, or_none=True)
    if command.sampling.check().temperature == 0 and command.number > 1:
        raise OptionError("number", "above 1 needs a temperature above 0: greedy answers are equal")
    opened = run.open_run(command.run, command.checkpoint)
    tokenizer = opened.components.tokenizer
    ids = tokenizer.render([{"role": "user", "content": command.text}])
    length = command.max_new_tokens or opened.config.generation.max_new_tokens
    rollout = generate(
        with_vocabulary(opened.components.model, tokenizer.vocab_size),
        opened.params,
        pad_prompts([ids], tokenizer.pad_id),
        jax.random.key(command.seed),
        generation=Generation(command.number, length, command.sampling),
        stop_ids=tokenizer.stop_ids,
        pad_id=tokenizer.pad_id,
    )
    texts = completion_texts(tokenizer, rollout)[0]
    answers = {"question": command.text, "answers": texts}
    print(json_text(answers) if command.json else "\n".join(texts))


def plan(command: Plan) -> None:
    import jax

    from grpo_jax.plan.plan import make_plan
    from grpo_jax.plan.report import figures, show
    from grpo_jax.runs.folder import json_text

    # Nothing is run: a TPU of this machine is left to others.
    jax.config.update("jax_platforms", "cpu")
    progress = Console(stderr=True)

    def compiling(name: str) -> None:
        progress.print(f"compiling: {name}", style="dim", markup=False)

    try:
        config = narrowed(command, PlanConfig)
        made = make_plan(config, everything=command.all, on_program=compiling)
    except ModuleNotFoundError as error:
        if error.name != "libtpu":
            raise
        raise ValueError(str(error)) from None
    if command.json:
        print(json_text(figures(made)))
    else:
        show(made, Console())


def given_model(arguments: list[str], usual: str) -> str:
    """The --model among the arguments: what the other options' defaults depend on."""
    return given_value(arguments, "model", usual)


def given_slice(arguments: list[str]) -> dict[str, Any]:
    """What the defaults of a plan depend on besides the model, where it is among the arguments."""
    if arguments[:1] != ["plan"]:
        return {}
    names = ("topology", "mesh", "microbatches")
    found = {name: given_value(arguments, name, None) for name in names}
    if (cuts := found.pop("microbatches")) and cuts.isdecimal():
        found["microbatches"] = int(cuts)
    return {name: value for name, value in found.items() if value}


def given_value(arguments: list[str], option: str, usual: str | None) -> str | None:
    """The text that is given for an option, before the arguments are parsed."""
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag(option):
            return value if equals else next(iter(arguments[place + 1 :]), usual)
    return usual


def check_trl_names(arguments: list[str]) -> None:
    """Raises ValueError for an option by TRL's name, with the name that it has here."""
    known = {name for cls in (Train, Plan) for name in option_paths(cls)}
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        if argument.startswith("--") and name in TRL_NAMES and name not in known:
            raise ValueError(
                f"{flag(name)} is TRL's name of an option; did you mean {TRL_NAMES[name]}?"
            )


def parsed(arguments: list[str]) -> Any:
    """The command that the arguments say."""
    model = given_model(arguments, TINY)
    plan_defaults = Plan.suited(model, **given_slice(arguments))
    commands = (
        Annotated[Train, tyro.conf.subcommand("train", default=Train.suited(model))]
        | Annotated[Eval, tyro.conf.subcommand("eval")]
        | Annotated[Sample, tyro.conf.subcommand("sample")]
        | Annotated[Plan, tyro.conf.subcommand("plan", default=plan_defaults)]
    )
    return tyro.cli(
        commands,
        prog="grpo-jax",
        description=__doc__.splitlines()[0],
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    actions = {Train: train, Eval: evaluate, Sample: sample, Plan: plan}
    try:
        check_trl_names(arguments)
        command = parsed(arguments)
        actions[type(command)](command)
    except OptionError as error:
        return failed(f"{flag(error.name)} {error.text}")
    except (ValueError, OSError, ProcessError) as error:
        return failed(str(error))
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; continue with: grpo-jax train --resume RUN")
        return 130
    return 0


def failed(message: str) -> int:
    """Tells an error; it is no markup, for it may hold brackets."""
    text = Text.assemble(("error: ", "bold red"), message)
    Console(stderr=True).print(text, soft_wrap=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
