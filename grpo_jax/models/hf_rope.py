"""Rotary settings of a config.json, to and from the decoder's.

transformers 5 has `rope_parameters`, for all layers or by layer type; before, it had `rope_theta`
and `rope_scaling`. Both are read; both are written where both can say it. Left out on purpose:
scalings that change with the length of a text ("dynamic") or that are of images ("mrope").
"""

import math
from typing import Any

from grpo_jax.models.decoder_config import ROPE_SCALINGS, Rope, check_number, check_positive
from grpo_jax.models.families import Family

# Names of longrope in old folders of Phi-3.
OLD_LONGROPE = ("su", "yarn")
LAYER_TYPES = ("full_attention", "sliding_attention")


def ropes_from_hf(family: Family, settings: dict[str, Any]) -> dict[str, Rope]:
    """The rotation of each of `LAYER_TYPES`; `settings` has the family's defaults."""
    given = settings.get("rope_parameters")
    scaling = settings.get("rope_scaling")
    for name, value in (("rope_parameters", given), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{name} must be an object, got {value!r}")
    theta = settings["rope_theta"]
    if family.ropes == "one":
        rope = _rope_from_hf(family, settings, scaling or given or {}, theta)
        return dict.fromkeys(LAYER_TYPES, rope)
    given = given or {}
    for name in LAYER_TYPES:
        if not isinstance(given.get(name) or {}, dict):
            raise ValueError(f"rope_parameters: {name} must be an object, got {given[name]!r}")
    if not set(given) & set(LAYER_TYPES):
        # Before transformers 5, a scaling was that of full layers alone.
        local_theta = settings.get("rope_local_base_freq", theta)
        given = {
            "full_attention": given | (scaling or {}),
            "sliding_attention": {"rope_theta": local_theta},
        }
    thetas = (theta, settings.get("rope_local_base_freq", theta))
    return {
        name: _rope_from_hf(family, settings, given.get(name) or {}, default)
        for name, default in zip(LAYER_TYPES, thetas, strict=True)
    }


def rotary_share_from_hf(settings: dict[str, Any]) -> float:
    """The share of a head that is rotated, wherever config.json says so."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = settings.get(name)
        if isinstance(rope, dict) and "partial_rotary_factor" in rope:
            return rope["partial_rotary_factor"]
    return settings["partial_rotary_factor"]


def _rope_from_hf(
    family: Family, settings: dict[str, Any], rope: dict[str, Any], theta: Any
) -> Rope:
    theta = rope.get("rope_theta", theta)
    check_positive("rope_theta", theta)
    share = rope.get("partial_rotary_factor", 1.0)
    if "rotary_share" not in family.fields and share != 1.0:
        raise ValueError(f"partial_rotary_factor {share} is not supported: expected 1.0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if family.architecture == "Phi3ForCausalLM" and kind in OLD_LONGROPE:
        kind = "longrope"
    if kind == "default":
        return Rope(float(theta))
    if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
        known = ", ".join(repr(name) for name in ("default", *ROPE_SCALINGS))
        raise ValueError(f"rope type {kind!r} is not supported: expected one of {known}")
    numbers = _complete(kind, settings, rope)
    names = ROPE_SCALINGS[kind]
    if missing := [name for name in names if name not in numbers]:
        raise ValueError(f"rope type {kind!r} lacks {', '.join(missing)}")
    values = (numbers[name] for name in names)
    return Rope(float(theta), (kind, *(tuple(v) if isinstance(v, list) else v for v in values)))


def _complete(kind: str, settings: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """The settings of a scaling, with what transformers takes where one is not stated."""
    longest = settings["max_position_embeddings"]
    original = "original_max_position_embeddings"
    # What stands beside the rotary settings goes first, as Phi-3 has it.
    stated = {original: longest} | rope | {k: settings[k] for k in (original,) if k in settings}
    if kind not in ("yarn", "longrope"):
        return stated
    check_positive(f"rope_scaling: {original}", stated[original])
    factor = stated.get("factor")
    if factor is None:
        factor = longest / stated[original]
    check_positive("rope_scaling: factor", factor)
    if stated.get("attention_factor") is None:
        compute = _yarn_attention if kind == "yarn" else _longrope_attention
        stated["attention_factor"] = compute(factor, stated)
    betas = {"beta_fast": stated.get("beta_fast") or 32, "beta_slow": stated.get("beta_slow") or 1}
    return stated | {"factor": factor, "truncate": rope.get("truncate", True)} | betas


def _yarn_attention(factor: float, stated: dict[str, Any]) -> float:
    """YaRN's `0.1 ln(factor) + 1` (2309.00071, eq. 22), or DeepSeek's ratio of two such numbers."""

    def of(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    above = stated.get("mscale")
    below = stated.get("mscale_all_dim")
    if not (above and below):
        return of(1.0)
    check_number("rope_scaling: mscale", above)
    check_number("rope_scaling: mscale_all_dim", below)
    return of(above) / of(below)


def _longrope_attention(factor: float, stated: dict[str, Any]) -> float:
    """`√(1 + ln factor / ln original)` (LongRoPE, 2402.13753)."""
    original = stated["original_max_position_embeddings"]
    if factor <= 1 or original <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original))


def ropes_to_hf(
    family: Family, ropes: dict[str, Rope], longest: int, extra: dict[str, Any]
) -> dict[str, Any]:
    """The fields of config.json that say the rotation of each of `LAYER_TYPES`.

    `extra` are settings that families have beside those of a rotation.
    """
    parameters = {name: _rope_to_hf(rope, longest) | extra for name, rope in ropes.items()}
    full, sliding = (parameters[name] for name in LAYER_TYPES)
    if family.ropes == "by_layer_type":
        theta = {"rope_theta": full["rope_theta"]}
        if "rope_local_base_freq" in family.defaults:
            theta["rope_local_base_freq"] = sliding["rope_theta"]
        return theta | {"rope_parameters": parameters}
    # What transformers 4 reads stands beside what transformers 5 reads.
    scaling = {k: v for k, v in full.items() if k not in ("rope_theta", "partial_rotary_factor")}
    old = {
        "rope_theta": full["rope_theta"],
        "rope_scaling": None if full["rope_type"] == "default" else scaling,
    }
    old |= {k: full[k] for k in ("partial_rotary_factor",) if k in full}
    if "original_max_position_embeddings" in family.defaults:
        original = full.get("original_max_position_embeddings", longest)
        old["original_max_position_embeddings"] = original
    return old | {"rope_parameters": full}


def _rope_to_hf(rope: Rope, longest: int) -> dict[str, Any]:
    if rope.scaling is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    kind, *values = rope.scaling
    numbers: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in zip(ROPE_SCALINGS[kind], values, strict=True)
    }
    if kind == "longrope":
        numbers["factor"] = longest / numbers["original_max_position_embeddings"]
    return {"rope_type": kind, "rope_theta": rope.theta} | numbers
