"""The model of a plan: its shape, and what the programs need of a tokenizer that is not there.

Left out on purpose: weights, which no program is compiled from.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from grpo_jax import components
from grpo_jax.inference.tokenizer import Message, Tokenizer, load_tokenizer
from grpo_jax.models import DecoderConfig, LanguageModel, decoder
from grpo_jax.models.hub import CONFIG, config_from_hf, find_folder
from grpo_jax.options import OptionError, Precision
from grpo_jax.plan.config import PlanConfig

# vocabulary, hidden, intermediate, layers, heads, key/value heads, head size, tied embeddings, bias
# on q, k, v
SHAPES = {
    "smollm2-135m": (49_152, 576, 1536, 30, 9, 3, 64, True, False),
    "qwen2.5-0.5b": (151_936, 896, 4864, 24, 14, 2, 64, True, True),
    "qwen2.5-1.5b": (151_936, 1536, 8960, 28, 12, 2, 128, True, True),
    "qwen2.5-7b": (152_064, 3584, 18_944, 28, 28, 4, 128, False, True),
    "qwen2.5-32b": (152_064, 5120, 27_648, 64, 40, 8, 128, False, True),
}
TOKENS = {"qwen2.5": 151_665}  # of tokenizers that have fewer than the vocabulary has
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json")
PROMPT_LENGTH = 512  # of prompts whose tokens nobody can count


class ShapeTokenizer(NamedTuple):
    """Stands for a tokenizer of so many tokens where only shapes are asked for.

    A prompt has a single token, which is padded to the width that is given; a text has as many as
    it has bytes, which is as many as any tokenizer needs.
    """

    vocab_size: int
    pad_id: int = 0
    stop_ids: tuple[int, ...] = (0,)

    def encode(self, text: str) -> list[int]:
        return [self.pad_id] * len(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        raise NotImplementedError("this tokenizer has no texts")

    def render(self, messages: Sequence[Message]) -> list[int]:
        return [self.pad_id]


def model_of(config: PlanConfig) -> tuple[LanguageModel, Tokenizer]:
    """The model of a run, and its own tokenizer if that is here, else one that stands for it."""
    name = config.model
    if name in components.MODELS:
        tokenizer = components.tokenizer_of(config)
        return components.MODELS[name](config, tokenizer), tokenizer
    model = decoder(model_config(name, config.precision))
    folder = Path(name).parent if Path(name).is_file() else Path(name)
    if any((folder / file).is_file() for file in TOKENIZER):
        return model, load_tokenizer(folder, **config.template_options())
    family = name.lower().rpartition("-")[0]
    return model, ShapeTokenizer(TOKENS.get(family, model.config.vocab_size))


def model_config(name: str, precision: Precision = Precision()) -> DecoderConfig:
    """The decoder's shape: of a built-in name, a config.json, its folder, or a Hub id."""
    if name.lower() in SHAPES:
        *sizes, tied, bias = SHAPES[name.lower()]
        return DecoderConfig(
            *sizes,
            rope_theta=1e6,
            tie_word_embeddings=tied,
            attention_bias=bias,
            max_position_embeddings=32_768,
            dtype=precision.computed,
            param_dtype=precision.params,
        )
    path = Path(name)
    if not path.exists() and "/" not in name:
        known = ", ".join((*components.MODELS, *SHAPES))
        raise OptionError(
            "model",
            f"{name!r} is no file, no folder and no known shape: expected a Hugging Face "
            f"config.json or its folder, a Hub id, or one of {known}",
        )
    path = path if path.is_file() else find_folder(name, (CONFIG,)) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {CONFIG}")
    return config_from_hf(json.loads(path.read_text()), precision)
