"""Decoders as pure functions, and their weights on disk."""

from grpo_jax.models.adapters import from_apply, from_nnx
from grpo_jax.models.decoder import decoder
from grpo_jax.models.decoder_config import DecoderConfig
from grpo_jax.models.hub import load_pretrained, save_pretrained
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.models.training_pass import remat_that_fits

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
