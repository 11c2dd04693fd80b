"""The architecture of a decoder, and what the axes of its parameters are."""

import dataclasses
import math
from typing import Any, NamedTuple

# A path below the parameters, and the names of that array's axes. They say what an axis is and not
# where it lies: which of them are spread over which devices is for `parallel.sharding` to choose.
AXES = (
    ("embed", "vocab embed"),
    ("head", "embed vocab"),
    ("norm", "norm"),
    ("layers/input_norm", "layers norm"),
    ("layers/post_norm", "layers norm"),
    ("layers/attention_out_norm", "layers norm"),
    ("layers/mlp_out_norm", "layers norm"),
    ("layers/q_norm", "layers norm"),
    ("layers/k_norm", "layers norm"),
    ("layers/q", "layers embed heads"),
    ("layers/k", "layers embed kv"),
    ("layers/v", "layers embed kv"),
    ("layers/o", "layers heads embed"),
    ("layers/gate", "layers embed mlp"),
    ("layers/up", "layers embed mlp"),
    ("layers/down", "layers mlp embed"),
    ("layers/q_bias", "layers heads"),
    ("layers/k_bias", "layers kv"),
    ("layers/v_bias", "layers kv"),
    ("layers/o_bias", "layers norm"),
    ("layers/gate_bias", "layers mlp"),
    ("layers/up_bias", "layers mlp"),
    ("layers/down_bias", "layers norm"),
)

DTYPES = ("float32", "bfloat16", "float16")
QK_NORMS = ("none", "head", "all")
NORM_PLACES = ("pre", "both", "post")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
# What a scaling of rotary angles is made of, behind its kind.
ROPE_SCALINGS = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "truncate",
    ),
    "longrope": (
        "short_factor",
        "long_factor",
        "original_max_position_embeddings",
        "attention_factor",
    ),
}
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


class Rope(NamedTuple):
    """How a layer's heads are rotated: see `DecoderConfig.rope_theta` and `rope_scaling`."""

    theta: float
    scaling: tuple | None = None


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The architecture, under Hugging Face's names where it has one name for a thing.

    Args:
      rope_scaling: None, or a kind and the numbers that `ROPE_SCALINGS` names for it, e.g.
        `("llama3", factor, low_freq_factor, high_freq_factor, original_max_position_embeddings)`.
      attention_bias: a bias on queries, keys and values.
      dtype: the type of activations and of the matrices they are multiplied with; norms, softmax,
        logits and rotary angles are float32.
      param_dtype: the type of the parameters. None: `dtype`.
      model_type: the row of `families` under whose name the model is saved, if that row can say all
        of its features.
      output_bias: a bias on attention's output.
      mlp_bias: a bias on the three matrices of the feed-forward part.
      qk_norm: RMSNorm of queries and keys before they are rotated: over each "head", over "all" of
        them together, or "none".
      norm_places: norms stand before attention and feed-forward part ("pre"), on what they add to
        the stream ("post"), or on "both" sides.
      norm_plus_one: norms multiply by 1 + their scale.
      activation: that of the gate.
      embed_scale: embeddings are multiplied by it.
      attention_scale: scores are. None: head_dim^(−1/2).
      residual_scale: what a part adds to the stream is.
      logit_divisor: logits are divided by it.
      attention_cap: scores z become cap · tanh(z / cap), before the mask. None: they stay.
      logit_cap: the same for logits, after `logit_divisor`.
      rope_interleaved: a head's pairs are (x_2i, x_2i+1) and not (x_i, x_i+f).
      rotary_share: the share of a head, from its beginning, that is rotated.
      query_scale: (β, n): the query at position t is multiplied by 1 + β ln(1 + ⌊t / n⌋).
      layer_windows: of each layer, how many tokens a token sees, itself among them; None: all.
      layer_ropes: the rotation of each layer, a `Rope` or None; None: the one above in all layers.
    """

    # Frozen, and a tuple where Hugging Face has a dict: a configuration is part of a static
    # argument of compiled programs, so it must be hashable and compare by value.
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: tuple | None = None
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    max_position_embeddings: int = 2048
    dtype: str = "float32"
    param_dtype: str | None = None
    model_type: str = "llama"
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = "none"
    norm_places: str = "pre"
    norm_plus_one: bool = False
    activation: str = "silu"
    embed_scale: float = 1.0
    attention_scale: float | None = None
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    attention_cap: float | None = None
    logit_cap: float | None = None
    rope_interleaved: bool = False
    rotary_share: float = 1.0
    query_scale: tuple[float, int] | None = None
    layer_windows: tuple[int | None, ...] | None = None
    layer_ropes: tuple[Rope | None, ...] | None = None

    def __post_init__(self):
        self._check_sizes()
        self._check_choices()
        self._check_scalars()
        self._check_layers()
        for rope in self.ropes:
            if rope is not None:
                check_rope(rope, self.rotary_dim)

    def _check_sizes(self) -> None:
        for field in SIZES:
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field} must be a positive integer, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2 and self.rotary_share == 1.0:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")

    def _check_choices(self) -> None:
        choices = {
            "param_dtype": (self.stored_dtype, DTYPES),
            "dtype": (self.dtype, DTYPES),
            "qk_norm": (self.qk_norm, QK_NORMS),
            "norm_places": (self.norm_places, NORM_PLACES),
            "activation": (self.activation, ACTIVATIONS),
        }
        for field, (value, known) in choices.items():
            if value not in known:
                raise ValueError(f"{field} must be one of {known}, got {getattr(self, field)!r}")

    def _check_scalars(self) -> None:
        for field in ("rms_norm_eps", "embed_scale", "residual_scale", "logit_divisor"):
            check_positive(field, getattr(self, field))
        for field in ("attention_scale", "attention_cap", "logit_cap"):
            if getattr(self, field) is not None:
                check_positive(field, getattr(self, field))
        check_positive("rotary_share", self.rotary_share)
        if self.rotary_share > 1 or not self.rotary_dim or self.rotary_dim % 2:
            raise ValueError(
                f"rotary_share must give an even number of at most head_dim ({self.head_dim}) "
                f"rotated components, got {self.rotary_share!r}"
            )
        if self.query_scale is not None:
            beta, original = self.query_scale
            check_number("query_scale", beta)
            check_positive("query_scale", original)

    def _check_layers(self) -> None:
        for field in ("layer_windows", "layer_ropes"):
            values = getattr(self, field)
            if values is None:
                continue
            if not isinstance(values, tuple) or len(values) != self.num_hidden_layers:
                raise ValueError(
                    f"{field} must be a tuple with one entry for each of {self.num_hidden_layers} "
                    f"layers, got {values!r}"
                )
        for window in self.layer_windows or ():
            if window is not None and (not isinstance(window, int) or window < 1):
                raise ValueError(f"layer_windows must be positive integers, got {window!r}")

    @property
    def stored_dtype(self) -> str:
        """The type of the parameters."""
        return self.dtype if self.param_dtype is None else self.param_dtype

    @property
    def rotary_dim(self) -> int:
        """How many components of a head are rotated."""
        return int(self.head_dim * self.rotary_share)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """The different rotations of the layers."""
        if self.layer_ropes is None:
            return (Rope(self.rope_theta, self.rope_scaling),)
        return tuple(dict.fromkeys(self.layer_ropes))

    @property
    def rope_ids(self) -> tuple[int, ...]:
        """Which of `ropes` each layer has."""
        if self.layer_ropes is None:
            return (0,) * self.num_hidden_layers
        return tuple(self.ropes.index(rope) for rope in self.layer_ropes)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How many tokens a token of each layer sees; None: all."""
        return self.layer_windows or (None,) * self.num_hidden_layers


def axes_of(config: DecoderConfig) -> tuple[tuple[str, str], ...]:
    """`AXES` of the parameters that a configuration has."""
    before = config.norm_places in ("pre", "both")
    after = config.norm_places in ("post", "both")
    has = {
        "head": not config.tie_word_embeddings,
        "layers/input_norm": before,
        "layers/post_norm": before,
        "layers/attention_out_norm": after,
        "layers/mlp_out_norm": after,
        "layers/o_bias": config.output_bias,
    }
    has |= {f"layers/{name}_norm": config.qk_norm != "none" for name in "qk"}
    has |= {f"layers/{name}_bias": config.attention_bias for name in "qkv"}
    has |= {f"layers/{name}_bias": config.mlp_bias for name in ("gate", "up", "down")}
    return tuple((path, names) for path, names in AXES if has.get(path, True))


def check_number(field: str, value: object) -> None:
    """Raises ValueError where a value is no finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{field} must be a finite number, got {value!r}")


def check_positive(field: str, value: Any) -> float:
    """The value; raises ValueError where it is no finite number above 0."""
    check_number(field, value)
    if value <= 0:
        raise ValueError(f"{field} must be above 0, got {value!r}")
    return float(value)


def check_rope(rope: Rope, rotary_dim: int) -> None:
    """Raises ValueError where a rotation cannot be computed, naming the setting."""
    check_positive("rope_theta", rope.theta)
    scaling = rope.scaling
    if scaling is None:
        return
    kind = scaling[0] if scaling else None
    if kind not in ROPE_SCALINGS or len(scaling) != len(ROPE_SCALINGS[kind]) + 1:
        forms = ", ".join(f"({', '.join((name, *of))})" for name, of in ROPE_SCALINGS.items())
        raise ValueError(f"rope_scaling must be None or one of {forms}, got {scaling!r}")
    numbers = dict(zip(ROPE_SCALINGS[kind], scaling[1:], strict=True))
    for name, value in numbers.items():
        if name in ("short_factor", "long_factor"):
            _check_factors(name, value, rotary_dim // 2)
        elif name == "truncate":
            if not isinstance(value, bool):
                raise ValueError(f"rope_scaling: truncate must be true or false, got {value!r}")
        else:
            check_positive(f"rope_scaling: {name}", value)
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if low in numbers and numbers[low] >= numbers[high]:
            raise ValueError(
                f"rope_scaling: {low} ({numbers[low]}) must be below {high} ({numbers[high]})"
            )
    if kind == "yarn" and rope.theta <= 1:
        raise ValueError(f"rope_theta must be above 1 for yarn, got {rope.theta!r}")


def _check_factors(name: str, values: object, length: int) -> None:
    if not isinstance(values, tuple) or len(values) != length:
        raise ValueError(f"rope_scaling: {name} must be {length} numbers, got {values!r}")
    for value in values:
        check_positive(f"rope_scaling: {name}", value)
