"""What a run is: one configuration of small tuples, checked when it is made, saved as config.json.

A tiny model from scratch and a pretrained one want other numbers: `TrainConfig.of(model=…)` starts
from those that suit the model. Left out on purpose: everything an objective or a task already takes
by itself; those options are passed through by name (`--objective-args`, `--task-args`) and checked
against the function's own signature.
"""

import dataclasses
import datetime
import difflib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro

from grpo_jax.models import DecoderConfig
from grpo_jax.models.decoder import REMAT
from grpo_jax.named_options import (
    choose,
    from_json,
    keyword_arguments,
    missing_options,
    named_value,
    option_paths,
    with_options,
    written,
)
from grpo_jax.objectives import PRESETS
from grpo_jax.options import (
    AdamW,
    Batching,
    Data,
    Generation,
    OptionError,
    Precision,
    Scoring,
    Update,
    check_cuts,
    number,
    whole,
)
from grpo_jax.parallel.sharding import DECODE_RULES, mesh_sizes
from grpo_jax.tasks import TASKS, task_function

TINY = "tiny"
TASK = "pricing"
OWN_DATA = "data"  # the task of a run on the caller's own rows

# What suits the model: True for the tiny one, False for a pretrained one.
BY_MODEL: dict[bool, dict[str, Any]] = {
    True: {
        "steps": 300,
        "prompts_per_step": 32,
        "group_size": 32,
        "max_new_tokens": 10,
        "learning_rate": 1.2e-3,
        "schedule": "cosine",
        "lr_warmup": 5,
        "sft_steps": 200,
        "sft_target_loss": 0.31,
        "eval_every": 40,
        "eval_batch_size": 256,
        "length_buckets": 1,
        "remat": "none",
    },
    False: {
        "steps": 100,
        "prompts_per_step": 8,
        "group_size": 8,
        "max_new_tokens": 64,
        "learning_rate": 3e-6,
        "schedule": "constant",
        "lr_warmup": 5,
        "sft_steps": 0,
        "sft_target_loss": 0.0,
        "eval_every": 20,
        "eval_batch_size": 64,
        "length_buckets": 2,
        "pack_tokens": True,
        "drop_zero_variance": True,
        "compactions": 3,
        "remat": "auto",
    },
}
# Options of tasks and objectives, where they take them and are not told otherwise.
ARGUMENTS: dict[bool, dict[str, dict[str, Any]]] = {
    True: {"task_args": {"wording": "terse"}, "objective_args": {"beta": 0.08}},
    False: {"task_args": {"wording": "natural"}, "objective_args": {"beta": 0.0}},
}

Flat = tyro.conf.arg(name="")  # the command line has the tuple's fields among its own


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Train a policy with GRPO: sample completions, score them, update, evaluate on held-out rows.

    Defaults that depend on the model are those of the --model that is given.
    """

    task: str = TASK
    """Prompts and rewards: pricing, reasoning_gym:NAME, or FILE.py:FUNCTION that makes a Task."""
    task_args: tuple[str, ...] = ()
    """Options of the task as NAME=VALUE, for example level=2 held_out_size=1000."""
    source: Annotated[Data, Flat] = Data()
    model: str = TINY
    """The model: "tiny", a byte-level one from scratch, or a Hugging Face folder or Hub id."""
    template_args: tuple[str, ...] = ()
    """Options of the chat template as NAME=VALUE, for example enable_thinking=false."""
    template_date: str | None = None
    """The day that the chat template is told, as YYYY-MM-DD; None: that of the run's start."""
    param_dtype: str = "float32"
    """The type of the parameters: float32, or bfloat16, in which they hardly move."""
    compute_dtype: str | None = None
    """The type of activations and products: float32 or bfloat16; None: that of the parameters."""
    moment_dtype: str = "float32"
    """The type of the optimiser's first moment: float32 or bfloat16; the second is float32."""
    objective: Annotated[str, tyro.conf.arg(help=f"The loss: {', '.join(PRESETS)}.")] = "grpo"
    objective_args: tuple[str, ...] = ()
    """Options of the objective as NAME=VALUE, for example beta=0.02 high=0.28."""
    steps: int = 100
    """Iterations: each samples, scores and updates."""
    generation: Annotated[Generation, Flat] = Generation()
    update: Annotated[Update, Flat] = Update()
    batching: Annotated[Batching, Flat] = Batching()
    scoring: Annotated[Scoring, Flat] = Scoring()
    optimizer: Annotated[AdamW, Flat] = AdamW()
    max_staleness: int = 0
    """Iterations that sampling may run ahead of the update, while the host scores; 0: none."""
    compile_ahead: bool = False
    """Compile every program that the iterations may need before the first one."""
    remat: str = "auto"
    """What a layer keeps for its backward pass: layer, attention, dots, none (all), or auto."""
    ref_every: int | None = None
    """The reference becomes the policy after this many iterations (iterative GRPO); None: never."""
    ref_ema: float | None = None
    """The share of the old reference in a moving average with the policy, for example 0.99."""
    sft_steps: int = 0
    """Supervised updates on the task's own training rows before GRPO, at most."""
    sft_target_loss: float = 0.0
    """Supervised updates end at this cross-entropy (nats a token, mean of 8); 0: never early."""
    eval_every: int = 20
    """Iterations between evaluations on held-out rows; also before the first and after the last."""
    eval_rows: int | None = None
    """Held-out rows to evaluate on; None takes all of them."""
    eval_batch_size: int = 64
    """Rows that are evaluated at a time."""
    save_every: int = 20
    """Iterations between checkpoints; the last iteration is saved too."""
    keep_checkpoints: int = 2
    """Checkpoints to keep, besides the first."""
    keep_minutes: int | None = None
    """One checkpoint is kept for each so many minutes, whatever comes later; None: none."""
    keep_best: int = 0
    """Checkpoints to keep for the best held-out reward; those at which the run is evaluated."""
    log_completions: int = 4
    """Completions of an iteration that are written to completions.jsonl."""
    mesh: str | None = None
    """Devices to train on, as a mesh of data, fsdp and tensor: data=4,fsdp=2; None: one device."""
    pmap: int | None = None
    """Devices to train on with pmap, the whole model on each; instead of --mesh."""
    decode_weights: str = "gather"
    """How sampling holds a mesh's weights: "gather"ed over fsdp, or "split" over fsdp too."""
    seed: int = 0
    """The seed of everything random: initial weights, order of rows, sampling."""
    out: str | None = None
    """The run folder; None makes runs/TASK-MODEL-NUMBER."""

    @classmethod
    def of(cls, model: str = TINY, **options: Any) -> "TrainConfig":
        """The configuration of a model, with options by the names of their flags.

        `TrainConfig.of(group_size=4, beta…)` raises an `OptionError` for a name that is not known.
        """
        known = option_paths(cls)
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f": did you mean {near[0]}?" if near else ""
                raise OptionError(name, f"is no option of a run{hint}")
        return cls.suited(model, **options).resolved()

    @classmethod
    def suited(cls, model: str, **options: Any) -> "TrainConfig":
        """The defaults for a model, with some options changed; for the command line."""
        values = BY_MODEL[model == TINY] | {"model": model} | options
        return with_options(cls, values)

    def __post_init__(self):
        for field in ("task_args", "objective_args", "template_args"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        if isinstance(self.scoring.weights, list):  # as the command line gives them
            scoring = self.scoring._replace(weights=tuple(self.scoring.weights))
            object.__setattr__(self, "scoring", scoring)
        if self.source.data is not None and self.task == TASK:
            object.__setattr__(self, "task", OWN_DATA)
        self.source.check()
        check_names(self)
        check_numbers(self)
        self.generation.check().sampling.check_training()
        self.update.check()
        self.batching.check()
        self.scoring.check()
        self.optimizer.check()
        check_cuts(self.generation, self.update, self.batching, device_parts(self))

    @property
    def precision(self) -> Precision:
        return Precision(self.param_dtype, self.compute_dtype, self.moment_dtype)

    def resolved(self) -> "TrainConfig":
        """The same run with every option of its task and objective said, as config.json has it."""
        changes = {}
        functions: dict[str, Callable] = {"objective_args": PRESETS[self.objective]}
        if self.source.data is None:
            functions["task_args"] = task_function(self.task)
        for field, function in functions.items():
            known = inspect.signature(function).parameters
            suited = ARGUMENTS[self.model == TINY][field]
            values = {name: value for name, value in suited.items() if name in known}
            values |= keyword_arguments(function, getattr(self, field), field)
            if "max_length" in known:  # of Dr. GRPO and others: the length limit, in tokens
                values.setdefault("max_length", self.generation.max_new_tokens)
            changes[field] = tuple(f"{name}={written(value)}" for name, value in values.items())
        if self.template_date is None and self.model != TINY:
            # A template may write the day into every prompt: a resumed run asks as it did before.
            changes["template_date"] = datetime.date.today().isoformat()
        return dataclasses.replace(self, **changes)

    def task_options(self) -> dict[str, Any]:
        return keyword_arguments(task_function(self.task), self.task_args, "task_args")

    @property
    def task_name(self) -> str:
        """The task in a word, for a folder's name."""
        if self.source.data is not None:
            return Path(self.source.data).stem
        return self.task.rpartition(":")[2]

    def template_options(self) -> dict[str, Any]:
        """What `load_tokenizer` takes."""
        date = self.template_date and datetime.date.fromisoformat(self.template_date)
        values = (named_value("template_args", pair) for pair in self.template_args)
        return {"template_args": dict(values), "date": date}

    def objective_options(self) -> dict[str, Any]:
        return keyword_arguments(PRESETS[self.objective], self.objective_args, "objective_args")


def check_names(config: TrainConfig) -> None:
    """Raises an `OptionError` for a name that nothing has."""
    check_task(config)
    choose("objective", config.objective, PRESETS)
    check_precision(config)
    choose("remat", config.remat, ("auto", *REMAT))
    choose("decode_weights", config.decode_weights, DECODE_RULES)
    keyword_arguments(PRESETS[config.objective], config.objective_args, "objective_args")


def check_task(config: TrainConfig) -> None:
    """Raises an `OptionError` for a task that is not there, or for two of them."""
    if config.source.data is not None:
        if config.task != OWN_DATA:
            raise OptionError("task", "and data are two places of rows; give one of them")
        if config.task_args:
            raise OptionError("task_args", "are options of a task, and data has none")
        return
    if ":" not in config.task:
        choose("task", config.task, TASKS)
    try:
        function = task_function(config.task)
    except (ValueError, OSError) as error:
        raise OptionError("task", f"cannot be made: {error}") from error
    keyword_arguments(function, config.task_args, "task_args")


def check_precision(config: TrainConfig) -> None:
    """Raises an `OptionError`, by the name of the flag, for a type that cannot be trained in."""
    flags = {"params": "param_dtype", "compute": "compute_dtype", "moments": "moment_dtype"}
    try:
        config.precision.check_training()
    except OptionError as error:
        raise OptionError(flags[error.name], error.text) from None


def check_numbers(config: TrainConfig) -> None:
    """Raises an `OptionError` for a number out of its range."""
    for name in ("steps", "eval_every", "eval_batch_size", "save_every", "keep_checkpoints"):
        whole(name, getattr(config, name), 1)
    for name in ("eval_rows", "ref_every", "pmap", "keep_minutes"):
        whole(name, getattr(config, name), 1, or_none=True)
    for name in ("max_staleness", "sft_steps", "log_completions", "seed", "keep_best"):
        whole(name, getattr(config, name), 0)
    number("sft_target_loss", config.sft_target_loss, 0)
    for pair in config.template_args:
        named_value("template_args", pair)
    try:
        datetime.date.fromisoformat(config.template_date or "2000-01-01")
    except (TypeError, ValueError):
        problem = f"must be a day as YYYY-MM-DD, got {config.template_date!r}"
        raise OptionError("template_date", problem) from None
    if config.ref_ema is not None and not 0 <= config.ref_ema <= 1:
        raise OptionError("ref_ema", f"must be between 0 and 1, got {config.ref_ema}")
    if config.ref_every is not None and config.ref_ema is not None:
        raise OptionError("ref_every", "and ref_ema are two ways to move the reference; give one")


def device_parts(config: TrainConfig) -> int:
    """The number of parts that prompts are spread over; raises an `OptionError` for a misfit."""
    try:
        sizes = {} if config.mesh is None else mesh_sizes(config.mesh)
    except ValueError as error:
        raise OptionError("mesh", f"is not one: {error}") from None
    if config.mesh is not None and config.pmap is not None:
        raise OptionError("mesh", "and pmap are two ways to use several devices; give one of them")
    if config.mesh is None and config.decode_weights != "gather":
        raise OptionError("decode_weights", "says how a mesh holds weights, and there is no mesh")
    return config.pmap or sizes.get("data", 1) * sizes.get("fsdp", 1)


def load_config(run: str | Path) -> TrainConfig:
    """The configuration of a run folder.

    Raises FileNotFoundError if it is none, ValueError with file and field if it does not fit.
    """
    path = Path(run) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{run} is no run folder: it has no config.json")
    return read_config(path)


def read_config(path: str | Path) -> TrainConfig:
    """The configuration that a config.json holds, every option of it.

    Raises FileNotFoundError if it is not there, ValueError with file and field if it does not fit.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        values = json.loads(path.read_bytes())
        config = from_json(TrainConfig, values, str(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}") from None
    except OptionError as error:
        raise ValueError(f"{path}: {error}") from None
    if missing := missing_options(TrainConfig, values):
        raise ValueError(
            f"{path} lacks {', '.join(missing)}: it must say every option, for a default may be "
            "another one than that of the run"
        )
    return config


def tiny_config(vocab_size: int, precision: Precision = Precision()) -> DecoderConfig:
    """The built-in model: two layers, about 0.15 million parameters, for a vocabulary of bytes."""
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=512,
        dtype=precision.computed,
        param_dtype=precision.params,
    )
