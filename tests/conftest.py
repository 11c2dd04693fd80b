"""Tiny models and batches that many tests share; built once."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # PyTorch, which results are compared with, then computes there too
# Tests compile hundreds of small programs and run each a few times: let XLA spend less on each of them. Its older code
# generator compiles a train step in a third of the time. Programs that tests start as processes have it too.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.models import DecoderConfig, decoder
from grpo_jax.types import Prompts

from fault_table import fault, pytest_terminal_summary  # noqa: F401  as if they stood here

jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_enable_compilation_cache", False)  # a run would keep its programs in the user's folder

TINY = DecoderConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SETTINGS = {"model_type": "llama"} | {name: getattr(TINY, name) for name in SIZES}  # the least that a config.json holds


@pytest.fixture(scope="session")
def tiny_model():
    return decoder(TINY)


@pytest.fixture(scope="session")
def tiny_params(tiny_model):
    params = jax.jit(tiny_model.init)(jax.random.key(0))
    # Sharper logits than a fresh model's: probabilities that differ make mistakes visible.
    return params | {"embed": params["embed"] * 3.0}


@pytest.fixture
def optimized():
    """For tests that assert what the compiled program costs."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session")
def prompts():
    """Four prompts of 12, 9, 5 and 1 tokens, left-padded."""
    mask = jnp.arange(12)[None] >= jnp.array([0, 3, 7, 11])[:, None]
    return Prompts(jax.random.randint(jax.random.key(1), (4, 12), 0, TINY.vocab_size, jnp.int32), mask)


def ragged(rng: np.random.Generator, P: int, G: int, T: int) -> np.ndarray:
    """A completion mask with lengths from 1 to T."""
    return np.arange(T) < rng.integers(1, T + 1, (P, G))[..., None]
