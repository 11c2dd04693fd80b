"""config.json of every family: transformers' defaults, both forms of rotary settings, and what is refused."""

import json
from dataclasses import replace

import pytest
from grpo_jax.models import DecoderConfig
from grpo_jax.models.decoder_config import ROPE_SCALINGS
from grpo_jax.models.families import FAMILIES
from grpo_jax.models.hf_config import config_from_hf, config_to_hf
from transformers import LlamaConfig, Qwen2Config

from conftest import SETTINGS

LLAMA3 = ("llama3", 8.0, 1.0, 4.0, 16)
SCALING = dict(zip(ROPE_SCALINGS["llama3"], LLAMA3[1:], strict=True))


def test_absent_keys_have_the_defaults_of_transformers():
    for kind, peer in {"llama": LlamaConfig, "qwen2": Qwen2Config}.items():
        ours = config_from_hf(SETTINGS | {"model_type": kind, "num_key_value_heads": None})
        theirs = peer(**SETTINGS | {"num_key_value_heads": None})
        for name in ("rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "num_key_value_heads"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.head_dim == 8
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        assert ours.attention_bias == (kind == "qwen2")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_theta": 5e5}, (5e5, None)),
        ({"rope_theta": 5e5, "rope_scaling": None}, (5e5, None)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALING}}, (5e5, LLAMA3)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALING}}, (5e5, LLAMA3)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, (5e5, None)),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALING}}, (5e5, LLAMA3)),
    ],
)
def test_both_forms_of_rotary_settings(keys, expected):
    config = config_from_hf(SETTINGS | keys)
    assert (config.rope_theta, config.rope_scaling) == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "gpt_oss"}, "model_type 'gpt_oss' is not supported: expected one of llama, qwen2, .*README"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"model_type": ["llama"]}, "model_type .* is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported: expected one of"),
        ({"model_type": "olmo3", "rope_parameters": {"full_attention": [1]}}, "full_attention must be an object"),
        (
            {"model_type": "olmo3", "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor 0.5 is not supported",
        ),
        ({"rope_scaling": {"type": ["yarn"]}}, "rope type .* is not supported"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object, got 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "'llama3' lacks low_freq_factor, high_freq"),
        (
            {"rope_scaling": {"type": "yarn"}, "max_position_embeddings": "9"},
            "original_max_position_embeddings must be",
        ),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor must be a finite number, got nan"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be above 0, got 0"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor must be a finite number, got True"),
        ({"rope_scaling": {"type": "linear", "factor": "8"}}, "factor must be a finite number, got '8'"),
        (
            {"rope_scaling": {"type": "llama3", **SCALING, "high_freq_factor": 1.0}},
            r"low_freq_factor \(1\.0\) must be below",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2}},
            "beta_slow .* must be below",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": 1}}, "truncate must be true or false, got 1"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "must be 4 numbers"),
        ({"rope_theta": -1}, "rope_theta must be above 0, got -1"),
        ({"rope_theta": None}, "rope_theta must be a finite number, got None"),
        ({"rope_theta": float("inf")}, "rope_theta must be a finite number, got inf"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta must be a finite number, got nan"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a finite number, got None"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be above 0, got 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"model_type": "glm4", "head_dim": 8, "partial_rotary_factor": 2.0}, "rotary_share must give an even number"),
        (
            {"model_type": "glm4", "head_dim": 8, "partial_rotary_factor": None},
            "partial_rotary_factor must be a finite",
        ),
        ({"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not supported: expected one of 'silu'"),
        ({"hidden_act": ["silu"]}, "hidden_act .* is not supported"),
        ({"mlp_bias": "yes"}, "mlp_bias must be true or false, got 'yes'"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings must be true or false, got None"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config \{'bits': 4\} is not supported"),
        ({"num_key_value_heads": 3}, "must be a multiple of"),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer, got '32'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer, got 0"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers must be a positive integer, got 2.0"),
        ({"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": 0}, "sliding_window must be a positive"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types must have one entry for each of 2"),
        ({"model_type": "gemma2", "layer_types": ["chunked_attention"] * 2}, "'chunked_attention'.* are not supported"),
        (
            {"model_type": "gemma2", "sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            "no sliding_window",
        ),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention True is not"),
        ({"model_type": "gemma2", "attn_logit_softcapping": -1.0}, "attn_logit_softcapping must be above 0"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers must have one entry"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling must be above 0"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(SETTINGS | keys)


def test_missing_sizes_are_listed():
    with pytest.raises(ValueError, match="lacks vocab_size, hidden_size"):
        config_from_hf({name: SETTINGS[name] for name in SETTINGS if name not in ("vocab_size", "hidden_size")})


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_configuration_is_written_and_read_without_a_change(kind):
    """With what transformers takes where config.json says nothing, windows and rotations of a family among it."""
    config = config_from_hf(SETTINGS | {"model_type": kind, "num_key_value_heads": 2, "head_dim": 8})
    settings = config_to_hf(config, "float32")
    assert settings["model_type"] == kind
    assert config_from_hf(json.loads(json.dumps(settings))) == config


def test_a_configuration_is_saved_as_a_family_that_has_its_features():
    plain = DecoderConfig(61, 32, 48, 3, 4, 4, 8)
    for changes, kind in (({"qk_norm": "head"}, "qwen3"), ({"attention_bias": True}, "qwen2"), ({}, "llama")):
        assert config_to_hf(replace(plain, **changes), "float32")["model_type"] == kind
