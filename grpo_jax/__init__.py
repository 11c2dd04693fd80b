"""Functional GRPO for language models in JAX and Flax: the public names, nothing else."""

from grpo_jax.inference.critic import value_network
from grpo_jax.inference.generate import generate
from grpo_jax.inference.logprobs import completion_logp
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
    AdaptiveObjective,
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
from grpo_jax.options import (
    Batching,
    Generation,
    OptionError,
    Precision,
    Sampling,
    Scoring,
    Update,
)
from grpo_jax.parallel.backends import SINGLE, pmapped, sharded
from grpo_jax.parallel.sharding import make_mesh
from grpo_jax.runs.cache import keep_programs
from grpo_jax.runs.folder import run_folder
from grpo_jax.tasks import Task, load_task, pricing
from grpo_jax.training.batch import assemble
from grpo_jax.training.evaluate import evaluate
from grpo_jax.training.loop import collect, iterate, train
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.programs import programs
from grpo_jax.training.sft import sft
from grpo_jax.training.stages import Stages, make_stages
from grpo_jax.training.train_step import init_state, make_train_step
from grpo_jax.types import Batch, Mean, Prompts, Rollout, RunState, Sample, TrainState, Weights

__all__ = [
    "PRESETS",
    "SINGLE",
    "AdaptiveObjective",
    "Batch",
    "Batching",
    "ByteTokenizer",
    "DecoderConfig",
    "Generation",
    "LanguageModel",
    "Mean",
    "Objective",
    "OptionError",
    "Precision",
    "Prompts",
    "Rollout",
    "RunState",
    "Sample",
    "Sampling",
    "Scoring",
    "Stages",
    "Task",
    "TrainState",
    "Update",
    "Weights",
    "adamw",
    "assemble",
    "batch_advantages",
    "batch_loss",
    "clipped",
    "collect",
    "completion_logp",
    "compose",
    "dapo",
    "decoder",
    "diagnostics",
    "dr_grpo",
    "evaluate",
    "from_apply",
    "from_nnx",
    "generate",
    "grpo",
    "gspo",
    "init_state",
    "iterate",
    "k3",
    "keep_programs",
    "load_pretrained",
    "load_task",
    "load_tokenizer",
    "make_mesh",
    "make_stages",
    "make_train_step",
    "pad_prompts",
    "per_sequence",
    "per_token",
    "pmapped",
    "pricing",
    "programs",
    "reads",
    "run_folder",
    "save_pretrained",
    "sequence_mean",
    "sft",
    "sharded",
    "standardize",
    "token_mean",
    "train",
    "value_network",
]
