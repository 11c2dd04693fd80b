"""What a caller chooses, as small tuples that check themselves and travel whole.

A function takes the tuple that holds its options and hands it on; nothing copies them one by one.
Every tuple has a `check()`, which returns the tuple or raises an `OptionError` that begins with the
option's name. The command line turns that name into its flag and adds nothing.

Left out on purpose: what an objective, a task or an optimiser takes; those are functions, and their
options are bound with `functools.partial`.
"""

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

ON_ERROR = ("raise", "skip")
OLD_LOGP = ("auto", "sampler", "first_epoch")
DTYPES = ("float32", "bfloat16", "float16")
SCHEDULES = ("constant", "linear", "cosine")
ON_BAD_ROW = ("raise", "skip")


class OptionError(ValueError):
    """An option has an impossible value: `name` is the option, `text` says what is wrong."""

    def __init__(self, name: str, text: str):
        super().__init__(f"{name} {text}")
        self.name = name
        self.text = text


class Sampling(NamedTuple):
    """The distribution that tokens are drawn from.

    Sampler and trainer take the same tuple, so that they cannot differ. Logits are divided by
    `temperature`, then `top_k`, `top_p` and `min_p` remove tokens one after another (the order of
    Hugging Face's logits processors), and the rest is normalised again. `temperature` 0 is greedy:
    the most likely token, with its log-probability under the unscaled, unfiltered distribution.
    """

    temperature: float = 1.0
    """The logits are divided by this number, in sampling and in training."""
    top_k: int | None = None
    """Only this many of the most likely tokens are kept; None keeps all."""
    top_p: float | None = None
    """Only the most likely tokens up to this probability are kept; None keeps all."""
    min_p: float | None = None
    """Only tokens with at least this share of the largest probability are kept; None keeps all."""

    def check(self) -> "Sampling":
        """Returns itself, or raises an `OptionError` for the first value out of its range."""
        number("temperature", self.temperature, 0)
        whole("top_k", self.top_k, 1, or_none=True)
        if self.top_p is not None and not (is_number(self.top_p) and 0 < self.top_p <= 1):
            raise OptionError("top_p", f"must be in (0, 1] or None, got {self.top_p!r}")
        if self.min_p is not None and not (is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise OptionError("min_p", f"must be in [0, 1] or None, got {self.min_p!r}")
        return self

    def check_training(self) -> "Sampling":
        """As `check`, for completions that a policy is trained on."""
        if self.check().temperature == 0:
            problem = "must be above 0 in training: a greedy group has no spread to learn from"
            raise OptionError("temperature", problem)
        return self


class Generation(NamedTuple):
    """How completions are sampled."""

    group_size: int = 8
    """Completions that are sampled for each prompt (G)."""
    max_new_tokens: int = 64
    """The length limit of a completion, in tokens."""
    sampling: Sampling = Sampling()
    decode_slots: int | None = None
    """Completions of a prompt that are computed at once; the others wait for a slot; None: all."""
    compactions: int = 0
    """In how many equal steps the sampled batch may shrink as completions stop."""

    def check(self) -> "Generation":
        """Returns itself, or raises an `OptionError` for the first value out of its range."""
        whole("group_size", self.group_size, 1)
        whole("max_new_tokens", self.max_new_tokens, 1)
        instance("sampling", self.sampling, Sampling).check()
        whole("compactions", self.compactions, 0)
        whole("decode_slots", self.decode_slots, 1, or_none=True)
        if self.decode_slots is not None and self.decode_slots > self.group_size:
            most = f"must be at most group_size ({self.group_size})"
            raise OptionError("decode_slots", f"{most}, got {self.decode_slots}")
        return self

    @property
    def slots(self) -> int:
        """Completions of a prompt that are computed at once."""
        return self.decode_slots or self.group_size


class Update(NamedTuple):
    """How a batch changes the parameters."""

    epochs: int = 1
    """Updates that are made on each batch (μ)."""
    microbatches: int = 1
    """Parts that the prompts of an update are cut into, to save memory."""
    group_microbatches: int = 1
    """Parts that each group is cut into, to save memory."""
    old_logp: str = "auto"
    """The log-probabilities that are π_old: "sampler", "first_epoch", or "auto", the exact one."""
    logit_chunk: int | None = None
    """Tokens that are projected on the vocabulary at a time; None: what memory allows."""

    def check(self) -> "Update":
        """Returns itself, or raises an `OptionError` for the first value out of its range."""
        whole("epochs", self.epochs, 1)
        whole("microbatches", self.microbatches, 1)
        whole("group_microbatches", self.group_microbatches, 1)
        whole("logit_chunk", self.logit_chunk, 1, or_none=True)
        if self.old_logp not in OLD_LOGP:
            raise OptionError("old_logp", f"must be one of {OLD_LOGP}, got {self.old_logp!r}")
        return self


class Batching(NamedTuple):
    """Which prompts an iteration takes, and how its arrays are cut. All but the first is exact."""

    prompts_per_step: int = 8
    """Prompts of an iteration."""
    prompt_length: int | None = None
    """Tokens that prompts are padded to; None: as many as the task's longest prompt has."""
    length_buckets: int = 4
    """Completion lengths that an update is compiled for; a batch takes the smallest that fits."""
    pack_tokens: bool = False
    """An update computes the real tokens of each group and not the padding between them."""
    drop_zero_variance: bool = False
    """Groups whose rewards are all equal are left out of an update where they have no gradient."""

    def check(self) -> "Batching":
        """Returns itself, or raises an `OptionError` for the first value out of its range."""
        whole("prompts_per_step", self.prompts_per_step, 1)
        whole("prompt_length", self.prompt_length, 1, or_none=True)
        whole("length_buckets", self.length_buckets, 1)
        flag("pack_tokens", self.pack_tokens)
        flag("drop_zero_variance", self.drop_zero_variance)
        return self


class Scoring(NamedTuple):
    """How reward functions are called and combined."""

    weights: Sequence[float] | None = None
    """One weight for each reward function; None weighs all of them 1."""
    on_error: str = "raise"
    """A reward that raises ends the run ("raise"), or its completion is not scored ("skip")."""
    workers: int = 0
    """Processes that reward functions run in; 0: the trainer's own."""
    timeout: float | None = None
    """Seconds after which a call of a reward in a worker is ended, as one that raised; None: never.
    """

    def check(self, functions: int | None = None) -> "Scoring":
        """Returns itself, or raises an `OptionError`; `functions` is the number of rewards."""
        if self.on_error not in ON_ERROR:
            raise OptionError("on_error", f"must be one of {ON_ERROR}, got {self.on_error!r}")
        whole("workers", self.workers, 0)
        self._check_timeout()
        if self.weights is None:
            return self
        count = len(self.weights) if functions is None else functions
        finite = all(isinstance(w, int | float) and math.isfinite(w) for w in self.weights)
        if len(self.weights) != count or not finite:
            expected = f"{count} finite weights, one for each reward function"
            raise OptionError("weights", f"must be {expected}, got {self.weights!r}")
        return self

    def _check_timeout(self) -> None:
        if self.timeout is None:
            return
        number("timeout", self.timeout, 0)
        if self.timeout == 0:
            raise OptionError("timeout", "must be above 0, or None for no limit, got 0")
        if self.workers == 0:
            problem = "needs workers of at least 1: a call in the trainer's process cannot be ended"
            raise OptionError("timeout", f"{problem}; got {self.timeout!r}")


class Data(NamedTuple):
    """Rows of the caller's own, and the reward that scores them (see `tasks.load_task`)."""

    data: str | None = None
    """Rows to train on: JSONL, JSON, CSV, Parquet, a folder of `datasets` or a Hub id."""
    reward: tuple[str, ...] = ()
    """FILE.py:FUNCTION, module:FUNCTION or a name of the library's; several may be given."""
    split: str | None = None
    """The split of the data; None: "train", or the only one."""
    subset: str | None = None
    """The configuration of a Hub dataset that has several."""
    eval_data: str | None = None
    """Where the held-out rows are; None: a share of the data, or a split of it."""
    eval_split: str | None = None
    """The split of the held-out rows."""
    eval_share: float = 0.05
    """The share of the rows that is held out, by a hash of each, where nothing else says which."""
    prompt_column: str | None = None
    """The column that is asked, as text or chat messages; None: the first of the usual names."""
    prompt_template: str | None = None
    """What the user says, as a jinja2 template of the columns: "{{ question }} Think first."."""
    system_prompt: str | None = None
    """What the system says before the prompt."""
    target_column: str | None = None
    """The column of a right completion, for --sft-steps; None: solution or answer."""
    on_bad_row: str = "raise"
    """A row that cannot be used ends the run ("raise"), or is left out and counted ("skip")."""

    def check(self) -> "Data":
        """Returns itself, or raises an `OptionError` for the first value out of its range."""
        if self.on_bad_row not in ON_BAD_ROW:
            raise OptionError("on_bad_row", f"must be one of {ON_BAD_ROW}, got {self.on_bad_row!r}")
        if not (is_number(self.eval_share) and 0 < self.eval_share <= 1):
            raise OptionError("eval_share", f"must be in (0, 1], got {self.eval_share!r}")
        for name, value in self._asdict().items():
            text = name not in ("reward", "eval_share", "on_bad_row")
            if text and not isinstance(value, str | None):
                raise OptionError(name, f"must be text or None, got {value!r}")
        if isinstance(self.reward, str) or not all(isinstance(one, str) for one in self.reward):
            problem = "must be names of functions, such as ('rewards.py:near',)"
            raise OptionError("reward", f"{problem}, got {self.reward!r}")
        if self.data is None:
            usual = Data()._replace(reward=self.reward)
            for name, value in self._asdict().items():
                if value != getattr(usual, name):
                    raise OptionError(name, "is for rows of your own: give data, or leave it out")
        if self.prompt_column is not None and self.prompt_template is not None:
            problem = "and prompt_template are two ways to ask; give one of them"
            raise OptionError("prompt_column", problem)
        return self


class Precision(NamedTuple):
    """The types that a model is kept and computed in.

    Parameters stay in float32 while matrices are computed in bfloat16: at the learning rates of
    reinforcement learning a bfloat16 parameter hardly moves (at 3e-6 it gets a twentieth of its
    updates, the rest is rounded away), and neither does a bfloat16 second moment.
    """

    params: str = "float32"
    """The type of the parameters that are trained, and of a moving reference."""
    compute: str | None = None
    """The type of activations and of what they are multiplied with; None: that of params."""
    moments: str = "float32"
    """The type of the optimiser's first moment; the second is float32."""

    def check(self) -> "Precision":
        """Returns itself, or raises an `OptionError` for a type that is not known."""
        for name, value in zip(self._fields, self, strict=True):
            if value not in DTYPES and not (name == "compute" and value is None):
                raise OptionError(name, f"must be one of {DTYPES}, got {value!r}")
        return self

    def check_training(self) -> "Precision":
        """As `check`, for parameters that are trained."""
        for name, value in zip(self.check()._fields, self, strict=True):
            if value == "float16":
                raise OptionError(
                    name,
                    "must not be float16 in training: its range ends at 65504, and an update "
                    "divides by numbers that it rounds to 0; use bfloat16",
                )
        return self

    @property
    def computed(self) -> str:
        """The type of activations."""
        return self.params if self.compute is None else self.compute


class AdamW(NamedTuple):
    """The optimiser: AdamW with a schedule, behind a clip of the global norm."""

    learning_rate: float = 1e-6
    """The peak of the learning rate."""
    schedule: str = "constant"
    """How the rate goes on after its warm-up: constant, linear or cosine (down to 0)."""
    lr_warmup: int = 0
    """Updates over which the learning rate grows to its peak."""
    weight_decay: float = 0.0
    """Weight decay, applied to matrices only."""
    clip_norm: float = 1.0
    """The largest global norm of a gradient; inf switches clipping off."""

    def check(self) -> "AdamW":
        """Returns itself, or raises an `OptionError` for the first value out of its range."""
        number("learning_rate", self.learning_rate, 0)
        if self.schedule not in SCHEDULES:
            raise OptionError("schedule", f"must be one of {SCHEDULES}, got {self.schedule!r}")
        whole("lr_warmup", self.lr_warmup, 0)
        number("weight_decay", self.weight_decay, 0)
        if not (is_number(self.clip_norm) and self.clip_norm > 0):
            problem = f"must be above 0, or inf for no clipping, got {self.clip_norm!r}"
            raise OptionError("clip_norm", problem)
        return self


def check_cuts(generation: Generation, update: Update, batching: Batching, parts: int = 1) -> None:
    """Raises an `OptionError` where a batch cannot be cut as asked.

    Prompts are spread evenly over `parts` (of devices) and cut into micro-batches, groups likewise.
    """
    prompts, cuts = batching.prompts_per_step, parts * update.microbatches
    if prompts % cuts:
        spread = f"{parts} devices × {update.microbatches} micro-batches (microbatches)"
        raise OptionError(
            "prompts_per_step",
            f"must be a multiple of {cuts}, the parts that prompts are spread over and cut into: "
            f"{spread}; got {prompts}",
        )
    if generation.group_size % update.group_microbatches:
        whole_group = f"group_size ({generation.group_size})"
        raise OptionError(
            "group_microbatches", f"must divide {whole_group}, got {update.group_microbatches}"
        )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'NEAREST'?"`, or nothing where no known name is near."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def whole(name: str, value: Any, least: int, *, or_none: bool = False) -> None:
    """Raises an `OptionError` unless the value is an integer of at least `least` (or None)."""
    if value is None and or_none:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        none = ", or None" if or_none else ""
        raise OptionError(name, f"must be an integer of at least {least}{none}, got {value!r}")


def number(name: str, value: Any, least: float, *, infinite: bool = False) -> None:
    """Raises an `OptionError` unless the value is a number of at least `least`."""
    if not is_number(value) or not value >= least or (math.isinf(value) and not infinite):
        finite = "" if infinite else "finite "
        raise OptionError(name, f"must be a {finite}number of at least {least}, got {value!r}")


def is_number(value: Any) -> bool:
    """Whether a value is a number and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def flag(name: str, value: Any) -> None:
    """Raises an `OptionError` unless the value is True or False."""
    if not isinstance(value, bool):
        raise OptionError(name, f"must be True or False, got {value!r}")


def instance(name: str, value: Any, kind: type) -> Any:
    """The value, or an `OptionError` where it is not one of that type (a dict for a tuple, say)."""
    if not isinstance(value, kind):
        raise OptionError(name, f"must be a {kind.__name__}(…), got {value!r}")
    return value
