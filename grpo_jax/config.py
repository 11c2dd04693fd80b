"""What a run is: one flat dataclass, checked when it is made, saved as config.json.

`None` stands for "by the model": a tiny model from scratch and a pretrained one want other numbers;
`resolved` fills them in. Left out on purpose: everything an objective or a task already takes by
itself; those are passed through by name (`--objective-args`, `--task-args`) and checked against the
function's own signature.
"""

import dataclasses
import difflib
import inspect
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro

from grpo_jax.inference.logprobs import Sampling
from grpo_jax.models import DecoderConfig
from grpo_jax.models.decoder import REMAT
from grpo_jax.objectives import PRESETS
from grpo_jax.parallel.sharding import DECODE_RULES, mesh_sizes
from grpo_jax.tasks import TASKS
from grpo_jax.training.loop import ON_ERROR
from grpo_jax.training.optimizers import SCHEDULES
from grpo_jax.training.train_step import OLD_LOGP

TINY = "tiny"

BY_MODEL: dict[bool, dict[str, Any]] = {
    True: {  # the tiny model
        "task_args": {"wording": "terse"},
        "objective_args": {"beta": 0.08},
        "steps": 300,
        "prompts": 32,
        "group_size": 32,
        "max_new_tokens": 10,
        "learning_rate": 1.2e-3,
        "schedule": "cosine",
        "warm_up": 200,
        "warm_up_loss": 0.31,
        "eval_every": 40,
        "eval_batch": 256,
        "length_buckets": 1,
        "pack_tokens": False,
        "drop_zero_variance": False,
        "compact": 0,
        "remat": "none",
        "microbatches": 1,
    },
    False: {  # a pretrained model
        "task_args": {"wording": "natural"},
        "objective_args": {"beta": 0.0},
        "steps": 100,
        "prompts": 8,
        "group_size": 8,
        "max_new_tokens": 64,
        "learning_rate": 3e-6,
        "schedule": "constant",
        "warm_up": 0,
        "warm_up_loss": 0.0,
        "eval_every": 20,
        "eval_batch": 64,
        "length_buckets": 2,
        "pack_tokens": True,
        "drop_zero_variance": True,
        "compact": 3,
        "remat": "auto",
        "microbatches": 1,
    },
}


def by_model(field: str, text: str) -> Any:
    """The help of an option whose default depends on the model."""
    tiny = BY_MODEL[True][field]
    pretrained = BY_MODEL[False][field]
    return tyro.conf.arg(
        help=f"{text} None: {tiny}"
        + ("." if tiny == pretrained else f"; {pretrained} if pretrained.")
    )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Train a policy with GRPO: sample completions, score them, update, evaluate on held-out rows.

    Options left at None take a value that suits the model, shown below; config.json holds what was
    taken.
    """

    task: str = "pricing"
    """Where prompts and rewards come from."""
    task_args: tuple[str, ...] = ()
    """Options of the task as NAME=VALUE, e.g. level=2 held_out_size=1000."""
    model: str = TINY
    """"tiny": a small byte-level model, trained from scratch; or a Hugging Face folder or Hub id
    (Llama, Qwen 2).
    """
    dtype: str = "float32"
    """Type of parameters and activations: float32, bfloat16 or float16."""
    objective: Annotated[str, tyro.conf.arg(help=f"The loss: {', '.join(PRESETS)}.")] = "grpo"
    objective_args: tuple[str, ...] = ()
    """Options of the objective as NAME=VALUE, e.g. beta=0.02 high=0.28."""
    steps: Annotated[
        int | None, by_model("steps", "Iterations: each samples, scores and updates.")
    ] = None
    prompts: Annotated[int | None, by_model("prompts", "Prompts in an iteration.")] = None
    group_size: Annotated[
        int | None, by_model("group_size", "Completions sampled for each prompt (G).")
    ] = None
    max_new_tokens: Annotated[
        int | None, by_model("max_new_tokens", "Length limit of a completion, in tokens.")
    ] = None
    length_buckets: Annotated[
        int | None,
        by_model(
            "length_buckets",
            "Lengths an update is compiled for: a batch is cut to the smallest that fits.",
        ),
    ] = None
    pack_tokens: Annotated[
        bool | None,
        by_model("pack_tokens", "Compute an update's real tokens alone, not the padding."),
    ] = None
    drop_zero_variance: Annotated[
        bool | None,
        by_model("drop_zero_variance", "Leave out groups that have no gradient, exactly."),
    ] = None
    compact: Annotated[
        int | None,
        by_model("compact", "In how many steps sampling may shrink its batch as completions stop."),
    ] = None
    decode_slots: int | None = None
    """Completions of a prompt that are sampled at once; the others wait for the seat of one that
    ends; None: all.
    """
    stale: int = 0
    """Iterations that sampling runs ahead, while the host scores: data that old, corrected by the
    ratio; 0: none.
    """
    compile_ahead: bool = False
    """Compile every program that the iterations may need before the first one, so that none waits
    for the compiler.
    """
    remat: Annotated[
        str | None,
        by_model(
            "remat",
            "What a layer keeps for the backward pass: layer (least), attention, dots or none (all); auto: dots where "
            "memory allows it, else layer.",
        ),
    ] = None
    temperature: float = 1.0
    """Divides the logits, in sampling and in training."""
    top_k: int | None = None
    """Keep the k most likely tokens; None keeps all. Applies to sampling and training, as do the
    next two.
    """
    top_p: float | None = None
    """Keep the most likely tokens up to this probability; None keeps all."""
    min_p: float | None = None
    """Keep tokens of at least this share of the largest probability; None keeps all."""
    epochs: int = 1
    """Updates on each batch (μ)."""
    old_logp: str = "sampler"
    """π_old: the sampler's log-probabilities ("sampler"), or those of the first epoch
    ("first_epoch").
    """
    microbatches: Annotated[
        int | None,
        by_model(
            "microbatches",
            "Components that the prompts of an update are cut into, to save memory; must divide --prompts.",
        ),
    ] = None
    group_microbatches: int = 1
    """Components that each group is cut into; must divide --group-size."""
    learning_rate: Annotated[float | None, by_model("learning_rate", "Peak rate of AdamW.")] = None
    schedule: Annotated[
        str | None,
        by_model(
            "schedule",
            "Of the learning rate after its warm-up: constant, linear or cosine (down to 0 at the last update).",
        ),
    ] = None
    lr_warmup: int = 5
    """Updates over which the learning rate grows to its peak."""
    weight_decay: float = 0.0
    """Of matrices, not of norms and biases."""
    clip_norm: float = 1.0
    """Largest global norm of a gradient; inf switches clipping off."""
    ref_every: int | None = None
    """Iterations after which the reference becomes the policy (iterative GRPO); None leaves it
    where it started.
    """
    ref_ema: float | None = None
    """Share of the old reference in a moving average with the policy, after each iteration, e.g.
    0.99.
    """
    warm_up: Annotated[
        int | None,
        by_model(
            "warm_up", "Supervised updates on the task's own training rows before GRPO, at most."
        ),
    ] = None
    warm_up_loss: Annotated[
        float | None,
        by_model(
            "warm_up_loss",
            "Cross-entropy (nats a token, mean of 8 updates) at which the warm-up ends; 0: never before its last.",
        ),
    ] = None
    on_error: str = "raise"
    """A reward that raises: "raise" ends the run, "none" counts the completion as unscorable."""
    eval_every: Annotated[
        int | None,
        by_model(
            "eval_every",
            "Iterations between evaluations on held-out rows (greedy); also before the first and after the last.",
        ),
    ] = None
    eval_rows: int | None = None
    """Held-out rows to evaluate on; None takes all of them."""
    eval_batch: Annotated[int | None, by_model("eval_batch", "Rows evaluated at a time.")] = None
    save_every: int = 20
    """Iterations between checkpoints; also after the last."""
    keep: int = 2
    """Checkpoints to keep, besides the first."""
    log_completions: int = 4
    """Completions of an iteration that are written to completions.jsonl."""
    mesh: str | None = None
    """Devices to train on, as a mesh with axes data, fsdp and tensor, e.g. data=4,fsdp=2; None: one
    device.
    """
    pmap: int | None = None
    """Devices to train on with pmap, the whole model on each; instead of --mesh."""
    decode_weights: str = "gather"
    """How sampling holds weights of a mesh: whole on each device but for tensor ("gather"), or
    split over fsdp too.
    """
    seed: int = 0
    """Of everything random: initial weights, order of rows, sampling."""
    out: str | None = None
    """The run folder; None makes runs/TASK-MODEL-NUMBER."""

    def __post_init__(self):
        for field in ("task_args", "objective_args"):
            value = getattr(self, field)
            object.__setattr__(self, field, tuple(value))
        choose("task", self.task, TASKS)
        choose("objective", self.objective, PRESETS)
        choose("dtype", self.dtype, ("float32", "bfloat16", "float16"))
        choose("schedule", self.schedule or "constant", SCHEDULES)
        choose("remat", self.remat or "auto", ("auto", *REMAT))
        choose("old-logp", self.old_logp, OLD_LOGP)
        choose("on-error", self.on_error, ON_ERROR)
        keyword_arguments(TASKS[self.task], self.task_args, "task-args")
        keyword_arguments(PRESETS[self.objective], self.objective_args, "objective-args")
        positive = (
            "steps",
            "prompts",
            "group_size",
            "max_new_tokens",
            "epochs",
            "microbatches",
            "group_microbatches",
        )
        for field in (
            *positive,
            "eval_every",
            "eval_rows",
            "eval_batch",
            "save_every",
            "keep",
            "ref_every",
            "length_buckets",
            "decode_slots",
        ):
            at_least(field, getattr(self, field), 1)
        for field in (
            *("lr_warmup", "warm_up", "warm_up_loss", "compact", "stale", "log_completions"),
            *("weight_decay", "learning_rate", "seed"),
        ):
            at_least(field, getattr(self, field), 0)
        if self.ref_ema is not None and not 0 <= self.ref_ema <= 1:
            raise ValueError(f"--ref-ema must be between 0 and 1, got {self.ref_ema}")
        if self.ref_every is not None and self.ref_ema is not None:
            raise ValueError(
                "--ref-every and --ref-ema are two ways to move the reference; give one of them"
            )
        if not self.clip_norm > 0:
            raise ValueError(
                f"--clip-norm must be above 0 (inf for no clipping), got {self.clip_norm}"
            )
        try:
            self.sampling.checked()
        except ValueError as error:  # its message begins with the field's name
            name, _, rest = str(error).partition(" ")
            raise ValueError(f"{flag(name)} {rest}") from None
        if self.temperature == 0:
            raise ValueError(
                "--temperature must be above 0: a greedy group has no spread to learn from"
            )
        for whole, parts in (("prompts", "microbatches"), ("group_size", "group_microbatches")):
            size = getattr(self, whole)
            count = getattr(self, parts)
            if size is not None and count is not None and size % count:
                raise ValueError(f"{flag(parts)} ({count}) must divide {flag(whole)} ({size})")
        if (
            self.decode_slots is not None
            and self.group_size is not None
            and self.decode_slots > self.group_size
        ):
            raise ValueError(
                f"--decode_slots ({self.decode_slots}) must be at most --group-size ({self.group_size})"
            )
        self._check_devices()

    def _check_devices(self) -> None:
        choose("decode-weights", self.decode_weights, DECODE_RULES)
        at_least("pmap", self.pmap, 1)
        try:
            sizes = {} if self.mesh is None else mesh_sizes(self.mesh)
        except ValueError as error:
            raise ValueError(f"--mesh: {error}") from None
        if self.mesh is not None and self.pmap is not None:
            raise ValueError(
                "--mesh and --pmap are two ways to use several devices; give one of them"
            )
        if self.mesh is None and self.decode_weights != "gather":
            raise ValueError("--decode-weights says how a --mesh holds weights, and there is none")
        parts = self.pmap or sizes.get("data", 1) * sizes.get("fsdp", 1)
        cuts = self.microbatches or 1
        if self.prompts is not None and self.prompts % (parts * cuts):
            raise ValueError(
                f"--prompts ({self.prompts}) must be a multiple of {parts} × {cuts}: of the devices that they are "
                "spread over, by the --microbatches that they are cut into"
            )

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def resolved(self) -> "TrainConfig":
        """The same run with every "by the model" value filled in (and checked once more)."""
        defaults = dict(BY_MODEL[self.model == TINY])
        changes = {}
        for field, function in (
            ("task_args", TASKS[self.task]),
            ("objective_args", PRESETS[self.objective]),
        ):
            given = keyword_arguments(function, getattr(self, field), field)
            known = inspect.signature(function).parameters
            values = {
                name: value for name, value in defaults.pop(field).items() if name in known
            } | given
            if "max_length" in known:  # of Dr. GRPO and others: the length limit, in tokens
                values.setdefault("max_length", self.max_new_tokens or defaults["max_new_tokens"])
            changes[field] = tuple(f"{name}={value}" for name, value in values.items())
        changes |= {
            field: value for field, value in defaults.items() if getattr(self, field) is None
        }
        return dataclasses.replace(self, **changes)

    def task_options(self) -> dict[str, Any]:
        return keyword_arguments(TASKS[self.task], self.task_args, "task-args")

    def objective_options(self) -> dict[str, Any]:
        return keyword_arguments(PRESETS[self.objective], self.objective_args, "objective-args")


def load_config(run: str | Path) -> TrainConfig:
    """The configuration of a run folder. Raises FileNotFoundError if it is none, ValueError if it
    does not fit.
    """
    path = Path(run) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{run} is no run folder: it has no config.json")
    values = json.loads(path.read_text())
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    if unknown := sorted(set(values) - known):
        raise ValueError(
            f"{path} holds options that this version does not know: {', '.join(unknown)}"
        )
    if values.get("clip_norm", 0) is None:  # infinity, which JSON does not have
        values["clip_norm"] = math.inf
    return TrainConfig(**values)


def tiny_config(vocab_size: int, dtype: str) -> DecoderConfig:
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
        dtype=dtype,
    )


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def at_least(field: str, value: float | None, least: int) -> None:
    if value is not None and not value >= least:
        raise ValueError(f"{flag(field)} must be at least {least}, got {value}")


def choose(name: str, value: str, known: Mapping | tuple) -> None:
    """Raises ValueError with the nearest known name, and all of them."""
    if value not in known:
        near = difflib.get_close_matches(str(value), list(known), 1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"--{name} {value!r} is not known{hint} Known: {', '.join(known)}")


def keyword_arguments(function: Callable, pairs: tuple[str, ...], option: str) -> dict[str, Any]:
    """`("beta=0.02", …)` as keyword arguments of `function`; values are JSON where they parse, else
    text.

    Raises ValueError for a name that the function does not take, and for text where its default is
    a number.
    """
    known = inspect.signature(function).parameters
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"{flag(option)} takes NAME=VALUE, got {pair!r}")
        if name not in known:
            near = difflib.get_close_matches(name, list(known), 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(
                f"{flag(option)}: {function.__name__} takes no {name!r}{hint} It takes: {', '.join(known)}"
            )
        try:
            values[name] = {"True": True, "False": False, "None": None}.get(text, text)
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            pass
        if isinstance(values[name], str) and isinstance(known[name].default, int | float):
            raise ValueError(
                f"{flag(option)}: {name} takes a number, as {known[name].default}, got {text!r}"
            )
    return values
