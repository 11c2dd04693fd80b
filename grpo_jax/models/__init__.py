"""Decoders as pure functions, and their weights on disk."""

from grpo_jax.models.adapters import from_apply, from_nnx
from grpo_jax.models.decoder import DecoderConfig, decoder, remat_that_fits
from grpo_jax.models.hub import load_pretrained, save_pretrained
from grpo_jax.models.language_model import LanguageModel

__all__ = [
    "DecoderConfig",
    "LanguageModel",
    "decoder",
    "from_apply",
    "from_nnx",
    "load_pretrained",
    "remat_that_fits",
    "save_pretrained",
]
