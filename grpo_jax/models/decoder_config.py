"""The architecture of a decoder, and what the axes of its parameters are."""

import dataclasses

# A path below the parameters, and the names of that array's axes. They say what an axis is and not
# where it lies: which of them are spread over which devices is for `parallel.sharding` to choose.
AXES = (
    ("embed", "vocab embed"),
    ("head", "embed vocab"),
    ("norm", "norm"),
    ("layers/input_norm", "layers norm"),
    ("layers/post_norm", "layers norm"),
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
)


DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The architecture, under Hugging Face's names.

    `rope_scaling` is None or `("llama3", factor, low_freq_factor, high_freq_factor,
    original_max_position_embeddings)`. `dtype` is that of activations and of the matrices they are
    multiplied with, `param_dtype` that of the parameters (None: the same); norms, softmax, logits
    and rotary angles are float32.
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

    def __post_init__(self):
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} must be a positive integer, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.rope_scaling is not None and (
            len(self.rope_scaling) != 5 or self.rope_scaling[0] != "llama3"
        ):
            raise ValueError(
                f"rope_scaling must be None or ('llama3', 4 numbers), got {self.rope_scaling!r}"
            )
        if self.stored_dtype not in DTYPES:
            raise ValueError(f"param_dtype must be one of {DTYPES}, got {self.param_dtype!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {DTYPES}, got {self.dtype!r}")

    @property
    def stored_dtype(self) -> str:
        """The type of the parameters."""
        return self.dtype if self.param_dtype is None else self.param_dtype
