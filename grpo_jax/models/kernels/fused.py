"""The attention of training without an array of scores: which platform has it, and what it
computes.

A prompt's S rows and its group's, [G, T], are one sequence of R = S + G·T rows. Row i sees row j ≤
i if both are of one part (the prompt, or one completion) or if j is the prompt's:

    out_i = Σ_j softmax_j(q_i · k_j / √d) v_j
        over j ≤ i with (part_j = part_i or j < S) and real_j = real_i

which is what `attend_causal` gives for the prompt alone and for completions after it. `real` is
false for the prompt's padding, which is never read. TPUs do it in one Pallas kernel (`fused_tpu`),
NVIDIA's GPUs by cuDNN (`fused_cuda`).

Left out on purpose: encoding a prompt to sample from it, decoding, AMD's GPUs, windows and capped
scores: einsums compute those.
"""

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax

from grpo_jax.models.language_model import LanguageModel

# What the arguments' axes are, by which `parallel.spread` cuts them: key heads and prompts are
# independent.
AXES = ("kv batch whole whole whole", "kv batch whole whole", "kv batch whole whole", "batch whole")


def not_fused(config: Any) -> str | None:
    """What of a model's attention no kernel computes, in words; None: they compute all of it."""
    found = {
        "a window": any(getattr(config, "layer_windows", None) or ()),
        "capped scores": getattr(config, "attention_cap", None) is not None,
    }
    return " and ".join(name for name, has in found.items() if has) or None


@lru_cache(maxsize=64)
def _say_not_fused(reason: str, model_type: str) -> None:
    """Once for each kind of model."""
    warnings.warn(
        f"a {model_type} model with {reason} trains by einsums: the fused attention of this device "
        "computes neither windows nor capped scores",
        stacklevel=3,
    )


def with_fused_attention(
    model: LanguageModel,
    device: jax.Device,
    over: Callable[[Callable], Callable] = lambda attention: attention,
) -> LanguageModel:
    """The model that trains by the fused attention of such a device; as it is where there is none
    that takes it.

    `over` may spread the attention over devices.
    """
    if not model.with_attention:
        return model
    if reason := not_fused(model.config):
        if device.platform != "cpu":
            _say_not_fused(reason, getattr(model.config, "model_type", "language"))
        return model
    if device.platform == "tpu":
        from grpo_jax.models.kernels.fused_tpu import attend_together

        return model.with_attention(over(attend_together))
    if device.platform == "gpu" and "cuda" in device.client.platform_version:
        from grpo_jax.models.kernels.fused_cuda import attend_together, available, takes

        if takes(model.config) and available(device):
            return model.with_attention(over(attend_together))
    return model
