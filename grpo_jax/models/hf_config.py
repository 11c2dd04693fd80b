"""A folder's config.json to the decoder's configuration and back, by the rows of `families`.

Anything that would change the numbers and that the decoder does not compute is refused.
"""

import dataclasses
from typing import Any

from grpo_jax.models.decoder_config import SIZES, DecoderConfig, Rope, check_number, check_positive
from grpo_jax.models.families import DEFAULTS, FAMILIES, Family, Field, family_of
from grpo_jax.models.hf_rope import (
    LAYER_TYPES,
    ropes_from_hf,
    ropes_to_hf,
    rotary_share_from_hf,
)
from grpo_jax.options import Precision

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
PLAIN = (*SIZES, "rms_norm_eps", "tie_word_embeddings")
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
ACTIVATIONS_TO_HF = {"gelu_tanh": "gelu_pytorch_tanh"}
ROTARY = ("rotary_share", "query_scale")  # read and written with the rotary settings
FULL, SLIDING = LAYER_TYPES


def config_from_hf(settings: Any, precision: Precision = Precision()) -> DecoderConfig:
    """The decoder's configuration from a parsed config.json.

    Raises:
      ValueError: for a model that the decoder does not compute, and for settings that are
        impossible; it names the field.
    """
    if not isinstance(settings, dict):
        raise ValueError(f"expected an object of settings, got {type(settings).__name__}")
    kind = settings.get("model_type")
    family = family_of(kind)
    if missing := [name for name in REQUIRED if name not in settings]:
        raise ValueError(f"lacks {', '.join(missing)}")
    settings = {**DEFAULTS, **family.defaults, **settings}
    _refuse(family, settings)
    plain = _sizes_from_hf(settings)
    windows = _windows_from_hf(family, settings)
    ropes = _layer_ropes_from_hf(family, settings, windows)
    return DecoderConfig(
        **plain,
        **family.features,
        **_features_from_hf(family, settings),
        **_rotary_from_hf(family, settings),
        **_shared_rope(ropes, ropes_from_hf(family, settings)[FULL]),
        layer_windows=windows if any(windows) else None,
        dtype=precision.computed,
        param_dtype=precision.params,
        model_type=str(kind),
    )


def _refuse(family: Family, settings: dict[str, Any]) -> None:
    for name, only in {"quantization_config": None, **family.required}.items():
        if settings.get(name) not in (None, only):
            raise ValueError(f"{name} {settings[name]!r} is not supported: expected {only!r}")
    share = rotary_share_from_hf(settings)
    if "rotary_share" not in family.fields and share != 1.0:
        raise ValueError(f"partial_rotary_factor {share} is not supported: expected 1.0")


def _sizes_from_hf(settings: dict[str, Any]) -> dict[str, Any]:
    heads = settings["num_attention_heads"]
    settings = dict(settings)
    if settings["num_key_value_heads"] is None:
        settings["num_key_value_heads"] = heads
    for name in ("hidden_size", "num_attention_heads"):
        if not isinstance(settings[name], int) or settings[name] < 1:
            raise ValueError(f"{name} must be a positive integer, got {settings[name]!r}")
    if settings["head_dim"] is None:
        settings["head_dim"] = settings["hidden_size"] // heads
    check_bool("tie_word_embeddings", settings["tie_word_embeddings"])
    return {name: settings[name] for name in PLAIN}


def check_bool(name: str, value: Any) -> None:
    """Raises ValueError where a value is neither true nor false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def _fields_of(family: Family) -> dict[str, Field]:
    """Where config.json has the features of a family, but for the rotary ones."""
    named = {"activation": "hidden_act", **family.fields}
    return {
        feature: Field(at) if isinstance(at, str) else at
        for feature, at in named.items()
        if feature not in ROTARY
    }


def _features_from_hf(family: Family, settings: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for feature, (name, power) in _fields_of(family).items():
        value: Any = settings[name]
        if feature.endswith("bias"):
            check_bool(name, value)
        elif feature == "activation":
            if not isinstance(value, str) or value not in ACTIVATIONS:
                known = ", ".join(repr(one) for one in ACTIVATIONS)
                raise ValueError(f"{name} {value!r} is not supported: expected one of {known}")
            value = ACTIVATIONS[value]
        elif value is not None or not feature.endswith("cap"):
            value = check_positive(name, value) ** power
        found[feature] = value
    return found


def _rotary_from_hf(family: Family, settings: dict[str, Any]) -> dict[str, Any]:
    found = {}
    if "rotary_share" in family.fields:
        found["rotary_share"] = rotary_share_from_hf(settings)
        check_positive("partial_rotary_factor", found["rotary_share"])
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    beta = rope.get(family.fields.get("query_scale", ""))
    if beta is not None:
        original = rope.get("original_max_position_embeddings")
        found["query_scale"] = (beta, original or settings["max_position_embeddings"])
    return found


def _rotated_from_hf(family: Family, settings: dict[str, Any]) -> list[bool]:
    """Which layers are rotated, so far as that does not depend on their windows."""
    L = settings["num_hidden_layers"]
    if family.unrotated != "no_rope_layers":
        return [True] * L
    flags = settings["no_rope_layers"]
    if flags is None:
        every = settings["no_rope_layer_interval"]
        _check_count("no_rope_layer_interval", every)
        return [bool((i + 1) % every) for i in range(L)]
    _check_each_layer("no_rope_layers", flags, L)
    return [bool(flag) for flag in flags]  # 1: rotated


def _windows_from_hf(family: Family, settings: dict[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer."""
    L = settings["num_hidden_layers"]
    _check_count("num_hidden_layers", L)
    window = settings["sliding_window"]
    if family.window_flag is not None and not settings[family.window_flag]:
        window = None
    if window is not None:
        _check_count("sliding_window", window)
    slides = _sliding_layers(family, settings, window)
    return tuple(window if slide else None for slide in slides)


def _sliding_layers(family: Family, settings: dict[str, Any], window: int | None) -> list[bool]:
    L = settings["num_hidden_layers"]
    types = settings["layer_types"]
    by_type = family.slides in ("pattern", "late", "unrotated")
    if by_type and types is not None:
        _check_each_layer("layer_types", types, L)
        if unknown := sorted({str(one) for one in types} - set(LAYER_TYPES)):
            raise ValueError(f"layer_types {unknown} are not supported: expected {LAYER_TYPES}")
        if SLIDING in types and window is None:
            raise ValueError(f"layer_types has {SLIDING!r}, and there is no sliding_window")
        return [one == SLIDING for one in types]
    if family.slides == "always":
        return [True] * L
    if window is None or family.slides == "never":
        return [False] * L
    if family.slides == "pattern":
        every = settings["sliding_window_pattern"]
        _check_count("sliding_window_pattern", every)
        return [bool((i + 1) % every) for i in range(L)]
    if family.slides == "late":
        first = settings["max_window_layers"]
        check_number("max_window_layers", first)
        return [i >= first for i in range(L)]
    return [not rotated for rotated in _rotated_from_hf(family, settings)]


def _layer_ropes_from_hf(
    family: Family, settings: dict[str, Any], windows: tuple[int | None, ...]
) -> tuple[Rope | None, ...]:
    ropes = ropes_from_hf(family, settings)
    rotated = _rotated_from_hf(family, settings)
    if family.unrotated == "full" and settings["sliding_window"] is not None:
        rotated = [window is not None for window in windows]
    return tuple(
        ropes[SLIDING if window else FULL] if turns else None
        for window, turns in zip(windows, rotated, strict=True)
    )


def _shared_rope(ropes: tuple[Rope | None, ...], full: Rope) -> dict[str, Any]:
    """The rotation of all layers, or of full ones and then layer by layer."""
    first = ropes[0]
    if first is not None and len(set(ropes)) == 1:
        return {"rope_theta": first.theta, "rope_scaling": first.scaling}
    return {"rope_theta": full.theta, "rope_scaling": full.scaling, "layer_ropes": ropes}


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _check_each_layer(name: str, values: Any, layers: int) -> None:
    if not isinstance(values, list) or len(values) != layers:
        raise ValueError(f"{name} must have one entry for each of {layers} layers, got {values!r}")


def config_to_hf(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a configuration, under the model_type that `saved_type` gives, with all
    features stated, in the form that transformers 4 and 5 both read.
    """
    kind = saved_type(config)
    return _settings_of(kind, config) | {"torch_dtype": dtype}


def saved_type(config: DecoderConfig) -> str:
    """The family that a configuration is saved as: its own, or the first that can say all of it.

    Raises ValueError where none can.
    """
    for kind in dict.fromkeys((config.model_type, *FAMILIES)):
        if kind in FAMILIES and _says_all(kind, config):
            return kind
    raise ValueError(
        f"no family of models has all features of {config}: it cannot be written in Hugging Face's "
        f"layout. Families: {', '.join(FAMILIES)}"
    )


def _says_all(kind: str, config: DecoderConfig) -> bool:
    """Whether config.json, written for that family and read again, is the same configuration."""
    try:
        again = config_from_hf(_settings_of(kind, config))
    except ValueError:
        return False
    types = {name: getattr(config, name) for name in ("dtype", "param_dtype", "model_type")}
    return dataclasses.replace(again, **types) == config


def _settings_of(kind: str, config: DecoderConfig) -> dict[str, Any]:
    family = FAMILIES[kind]
    settings = {"architectures": [family.architecture], "model_type": kind}
    settings |= {name: getattr(config, name) for name in PLAIN}
    return (
        settings
        | _windows_to_hf(family, config)
        | _rotary_to_hf(family, config)
        | _features_to_hf(family, config)
    )


def _features_to_hf(family: Family, config: DecoderConfig) -> dict[str, Any]:
    found = {}
    for feature, (name, power) in _fields_of(family).items():
        if name in SIZES:
            continue
        value: Any = getattr(config, feature)
        if feature == "activation":
            value = ACTIVATIONS_TO_HF.get(value, value)
        elif feature == "attention_scale" and value is None:
            value = config.head_dim**-0.5
        if power != 1:
            value = value ** (1 / power)
            # transformers takes integers here; 144 is 144.00000000000003 after two powers.
            value = round(value) if abs(value - round(value)) < 1e-6 * value else value
        found[name] = value
    return found


def _windows_to_hf(family: Family, config: DecoderConfig) -> dict[str, Any]:
    if family.slides == "never":
        return {}
    window = next((one for one in config.windows if one is not None), None)
    found: dict[str, Any] = {}
    if family.window_flag is not None:
        found[family.window_flag] = window is not None
    if window is None and family.unrotated == "full" and None in config.ropes:
        window = config.max_position_embeddings  # of no layer: it says that full ones do not turn
    found["sliding_window"] = window
    if family.slides != "always":
        found["layer_types"] = [SLIDING if one else FULL for one in config.windows]
    return found


def _rotary_to_hf(family: Family, config: DecoderConfig) -> dict[str, Any]:
    ropes = config.layer_ropes or (Rope(config.rope_theta, config.rope_scaling),) * len(
        config.windows
    )
    base = Rope(config.rope_theta, config.rope_scaling)
    by_type: dict[str, Rope] = dict.fromkeys(LAYER_TYPES, base)
    for window, rope in zip(config.windows, ropes, strict=True):
        if rope is not None:
            by_type[SLIDING if window else FULL] = rope
    extra = {}
    if "rotary_share" in family.fields:
        extra["partial_rotary_factor"] = config.rotary_share
    if config.query_scale is not None and "query_scale" in family.fields:
        extra["llama_4_scaling_beta"] = config.query_scale[0]
        extra["original_max_position_embeddings"] = config.query_scale[1]
    found = ropes_to_hf(family, by_type, config.max_position_embeddings, extra)
    if family.unrotated == "no_rope_layers":
        found["no_rope_layers"] = [int(rope is not None) for rope in ropes]
    return found
