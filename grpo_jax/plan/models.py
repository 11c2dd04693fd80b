"""The model of a plan: its shape, and what the programs need of a tokenizer that is not there.

Left out on purpose: weights, which no program is compiled from.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from grpo_jax import components
from grpo_jax.inference.tokenizer import Message, Tokenizer, load_tokenizer
from grpo_jax.models import DecoderConfig, LanguageModel, decoder
from grpo_jax.models.hf_config import config_from_hf
from grpo_jax.models.hub import CONFIG, find_folder, read_config
from grpo_jax.options import OptionError, Precision
from grpo_jax.plan.config import PlanConfig

# model_type, vocabulary, hidden, intermediate, layers, heads, key/value heads, head size, tied
# embeddings; the rest is what the family has.
SHAPES = {
    "smollm2-135m": ("llama", 49_152, 576, 1536, 30, 9, 3, 64, True),
    "smollm3-3b": ("smollm3", 128_256, 2048, 11_008, 36, 16, 4, 128, True),
    "llama-3.2-1b": ("llama", 128_256, 2048, 8192, 16, 32, 8, 64, True),
    "qwen2.5-0.5b": ("qwen2", 151_936, 896, 4864, 24, 14, 2, 64, True),
    "qwen2.5-1.5b": ("qwen2", 151_936, 1536, 8960, 28, 12, 2, 128, True),
    "qwen2.5-7b": ("qwen2", 152_064, 3584, 18_944, 28, 28, 4, 128, False),
    "qwen2.5-32b": ("qwen2", 152_064, 5120, 27_648, 64, 40, 8, 128, False),
    "qwen3-0.6b": ("qwen3", 151_936, 1024, 3072, 28, 16, 8, 128, True),
    "qwen3-1.7b": ("qwen3", 151_936, 2048, 6144, 28, 16, 8, 128, True),
    "qwen3-4b": ("qwen3", 151_936, 2560, 9728, 36, 32, 8, 128, True),
    "qwen3-8b": ("qwen3", 151_936, 4096, 12_288, 36, 32, 8, 128, False),
    "gemma-2-2b": ("gemma2", 256_000, 2304, 9216, 26, 8, 4, 256, True),
}
SHAPE_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
TOKENS = {"qwen2.5": 151_665}  # of tokenizers that have fewer than the vocabulary has
LONGEST = 32_768  # positions of the shapes above
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
        stated = dict(zip(SHAPE_FIELDS, SHAPES[name.lower()], strict=True))
        longest = {"max_position_embeddings": LONGEST}
        return config_from_hf(stated | longest, precision)
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
    return read_config(path, precision)
