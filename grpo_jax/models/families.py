"""The families of models that load and save, as data: a family is a row of `FAMILIES`.

A row says under which names a family's config.json and tensors hold what `DecoderConfig` has
features for; `hf_config` and `hf_tensors` read it in both directions. README.md says how to add
one. Left out on purpose: attention sinks, convolutions and recurrences, models of images.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Field(NamedTuple):
    """A field of config.json, and the power of it that the decoder's feature is."""

    name: str
    power: float = 1


class Family(NamedTuple):
    """What a family calls things, and in what its models differ from Llama.

    Args:
      architecture: transformers' class.
      defaults: what transformers takes where config.json says nothing, besides `DEFAULTS`.
      features: fields of `DecoderConfig` that all models of the family share.
      fields: fields of `DecoderConfig`, and where config.json has them.
      required: fields of config.json that must have this value, or none.
      slides: which layers have the window: "never", "always", as "pattern" (all but every n-th),
        "late" (from max_window_layers on) or "unrotated" (those without rotation); `layer_types`,
        where a family has it, says so layer by layer.
      window_flag: the field that must be true for any window.
      ropes: "one" for all layers, or "by_layer_type": of full layers and of sliding ones.
      unrotated: which layers are not rotated: None, those that "no_rope_layers" names, or "full":
        those without window, in models that have one.
      tensors: names of a layer's tensors, besides `TENSORS`.
      fused: a tensor of the file, and which parameters its rows are, in order.
    """

    architecture: str
    defaults: Mapping[str, Any] = NOTHING
    features: Mapping[str, Any] = NOTHING
    fields: Mapping[str, str | Field] = NOTHING
    required: Mapping[str, Any] = NOTHING
    slides: str = "never"
    window_flag: str | None = None
    ropes: str = "one"
    unrotated: str | None = None
    tensors: Mapping[str, str] = NOTHING
    fused: Mapping[str, tuple[str, ...]] = NOTHING


# What transformers takes in most families where config.json says nothing. Of sizes that are null,
# num_key_value_heads is num_attention_heads and head_dim is hidden_size / num_attention_heads.
DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "layer_types": None,
    "use_sliding_window": False,
}
TENSORS = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}
LAYER = "model.layers.{}."
LAYER_TENSORS = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
# Norms on what attention and feed-forward part add to the stream.
NORMS_AFTER = {
    "attention_out_norm": "post_attention_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
}
GATE_AND_UP = {"mlp.gate_up_proj.weight": ("gate", "up")}
BIASES = {"attention_bias": "attention_bias", "output_bias": "attention_bias"}
ALL_BIASES = BIASES | {"mlp_bias": "mlp_bias"}
GEMMA = {"norm_places": "both", "norm_plus_one": True}
GEMMA_FIELDS = BIASES | {
    "activation": "hidden_activation",
    "embed_scale": Field("hidden_size", 0.5),
    "attention_scale": Field("query_pre_attn_scalar", -0.5),
    "logit_cap": "final_logit_softcapping",
}
GEMMA_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA_TENSORS = NORMS_AFTER | {"post_norm": "pre_feedforward_layernorm.weight"}
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

FAMILIES = {
    # Llama 2 and 3, SmolLM 2, Falcon 3, R1-Distill-Llama.
    "llama": Family("LlamaForCausalLM", fields=ALL_BIASES),
    # Qwen 2 and 2.5, QwQ, R1-Distill-Qwen.
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        features={"attention_bias": True},
        slides="late",
        window_flag="use_sliding_window",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        features={"qk_norm": "head"},
        fields=BIASES,
        slides="late",
        window_flag="use_sliding_window",
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        slides="always",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        fields=ALL_BIASES,
        slides="unrotated",
        window_flag="use_sliding_window",
        unrotated="no_rope_layers",
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        GEMMA_DEFAULTS
        | {
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        features=GEMMA,
        fields=GEMMA_FIELDS | {"attention_cap": "attn_logit_softcapping"},
        required={"use_bidirectional_attention": False},
        slides="pattern",
        tensors=GEMMA_TENSORS,
    ),
    # Its attention has no cap: transformers ignores attn_logit_softcapping, and so does this row.
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        GEMMA_DEFAULTS
        | {
            "max_position_embeddings": 131072,
            "sliding_window_pattern": 6,
            "final_logit_softcapping": None,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        features=GEMMA | {"qk_norm": "head"},
        fields=GEMMA_FIELDS,
        required={"use_bidirectional_attention": False},
        slides="pattern",
        ropes="by_layer_type",
        tensors=GEMMA_TENSORS,
    ),
    # Phi-3, 3.5 and Phi-4-mini.
    "phi3": Family(
        "Phi3ForCausalLM",
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
        fields={"rotary_share": "partial_rotary_factor"},
        slides="always",
        fused={"self_attn.qkv_proj.weight": ("q", "k", "v")} | GATE_AND_UP,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"rms_norm_eps": 1e-5},
        features={"norm_places": "post", "qk_norm": "all"},
        fields=BIASES,
        tensors=NORMS_AFTER,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        features={"norm_places": "post", "qk_norm": "all"},
        fields=BIASES,
        slides="pattern",
        ropes="by_layer_type",
        tensors=NORMS_AFTER,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        fields=ALL_BIASES
        | {
            "embed_scale": "embedding_multiplier",
            "attention_scale": "attention_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_divisor": "logits_scaling",
        },
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1.5625e-7,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
        },
        features={"norm_places": "both", "rope_interleaved": True},
        fields={"attention_bias": "attention_bias", "rotary_share": "partial_rotary_factor"},
        tensors={
            "attention_out_norm": "post_self_attn_layernorm.weight",
            "mlp_out_norm": "post_mlp_layernorm.weight",
        },
        fused=GATE_AND_UP,
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        {
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        features={"norm_places": "post", "qk_norm": "head"},
        slides="pattern",
        unrotated="full",
        tensors=NORMS_AFTER,
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "attention_out_bias": False,
        },
        fields=ALL_BIASES | {"output_bias": "attention_out_bias"},
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": MINISTRAL_ROPE,
        },
        fields={"query_scale": "llama_4_scaling_beta"},
        slides="always",
    ),
}


def family_of(model_type: Any) -> Family:
    """The row of a model_type; ValueError names those that there are."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not supported: expected one of {', '.join(FAMILIES)}. "
            "grpo_jax/models/README.md says how to add a family"
        )
    return FAMILIES[model_type]
