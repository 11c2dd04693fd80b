"""Functional GRPO for language models in JAX and Flax: the public names, nothing else."""

from grpo_jax.inference.critic import value_network
from grpo_jax.inference.generate import generate
from grpo_jax.inference.logprobs import Sampling, completion_logp
from grpo_jax.inference.tokenizer import ByteTokenizer, load_tokenizer, pad_prompts
from grpo_jax.models import (
    DecoderConfig,
    LanguageModel,
    decoder,
    from_apply,
    from_nnx,
    load_pretrained,
    save_pretrained,
)
from grpo_jax.objectives import (
    PRESETS,
    Objective,
    batch_advantages,
    batch_loss,
    clipped,
    compose,
    dapo,
    diagnostics,
    dr_grpo,
    grpo,
    gspo,
    k3,
    per_sequence,
    per_token,
    reads,
    sequence_mean,
    standardize,
    token_mean,
)
from grpo_jax.parallel.backends import SINGLE, pmapped, sharded
from grpo_jax.parallel.sharding import make_mesh
from grpo_jax.tasks import Task, pricing
from grpo_jax.training.batch import assemble
from grpo_jax.training.loop import train
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.sft import warm_up
from grpo_jax.training.train_step import init_state, make_train_step
from grpo_jax.types import Batch, Mean, Prompts, Rollout, Sample, TrainState

__all__ = [
    "PRESETS",
    "SINGLE",
    "Batch",
    "ByteTokenizer",
    "DecoderConfig",
    "LanguageModel",
    "Mean",
    "Objective",
    "Prompts",
    "Rollout",
    "Sample",
    "Sampling",
    "Task",
    "TrainState",
    "adamw",
    "assemble",
    "batch_advantages",
    "batch_loss",
    "clipped",
    "completion_logp",
    "compose",
    "dapo",
    "decoder",
    "diagnostics",
    "dr_grpo",
    "from_apply",
    "from_nnx",
    "generate",
    "grpo",
    "gspo",
    "init_state",
    "k3",
    "load_pretrained",
    "load_tokenizer",
    "make_mesh",
    "make_train_step",
    "pad_prompts",
    "per_sequence",
    "per_token",
    "pmapped",
    "pricing",
    "reads",
    "save_pretrained",
    "sequence_mean",
    "sharded",
    "standardize",
    "token_mean",
    "train",
    "value_network",
    "warm_up",
]
