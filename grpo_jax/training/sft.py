"""A supervised start for GRPO, as a generator of (state, metrics): the same train step with
cross-entropy as its loss.

Left out on purpose: supervised training for its own sake, with held-out losses and checkpoints.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.inference.text import encode
from grpo_jax.inference.tokenizer import Tokenizer
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.objectives import Objective
from grpo_jax.parallel.backends import SINGLE, Devices
from grpo_jax.tasks import Task
from grpo_jax.training.checks import check_parts, check_rows
from grpo_jax.training.loop import begin, chunk_of, prompt_width, rows_of
from grpo_jax.training.train_step import make_train_step
from grpo_jax.types import Batch, Mean, Params, Rollout, Sample, TrainState


def nll(logp_T: jax.Array, sample: Sample) -> Mean:
    """The supervised loss of one completion, −Σ_t log π_t over its tokens, to be divided by the
    tokens of the batch.
    """
    return Mean(
        -jnp.where(sample.mask_T, logp_T, 0.0).sum(), sample.mask_T.sum().astype(jnp.float32)
    )


SUPERVISED = Objective(advantage=jnp.zeros_like, loss=nll)


def warm_up(
    model: LanguageModel,
    params: Params,
    task: Task,
    tokenizer: Tokenizer,
    optimizer: optax.GradientTransformation,
    *,
    steps: int,
    batch_size: int = 64,
    seed: int = 0,
    prompt_length: int | None = None,
    chunk: int | None = None,
    devices: Devices = SINGLE,
) -> Iterator[tuple[TrainState, dict]]:
    """Supervised updates on the targets of `task.train`, one yield of `(state, metrics)` each: a
    start for GRPO.

    A target is a group of one whose advantage is not needed: the same train step, with
    cross-entropy as its loss.
    """
    if steps < 0 or batch_size < 1:
        raise ValueError(
            f"steps must be at least 0 and batch_size at least 1, got {steps} and {batch_size}"
        )
    check_rows(task)
    check_parts("batch_size", batch_size, 1, devices)
    model, chunk = devices.for_training(model), chunk_of(model, devices) if chunk is None else chunk
    step = make_train_step(model, SUPERVISED, optimizer, chunk=chunk, axis_name=devices.axis_name)
    step = devices.per_prompt(step, ("state", "rows"), ("state", "whole"), donate=(0,))
    width = prompt_width(task, tokenizer) if prompt_length is None else prompt_length
    targets = [[*tokenizer.encode(task.target(row)), tokenizer.stop_ids[0]] for row in task.train]
    longest = -(-max(map(len, targets)) // 8) * 8
    tagged = [dict(row) | {"_target": ids} for row, ids in zip(task.train, targets, strict=True)]
    state = begin(params, optimizer, seed, devices=devices).state
    held = devices.held(batch_size)
    for iteration in range(steps):
        rows = rows_of(iteration, tagged, batch_size, seed)
        rows = [rows[i] for i in held]
        ids = [row.pop("_target") for row in map(dict, rows)]
        tokens = np.full((len(rows), 1, longest), tokenizer.pad_id, np.int32)
        for row, target in zip(tokens[:, 0], ids, strict=True):
            row[: len(target)] = target
        mask = np.arange(longest) < np.array([len(target) for target in ids])[:, None, None]
        prompts = encode(tokenizer, task.prompt, rows, length=width)
        zeros = np.zeros(mask.shape, np.float32)
        rollout = Rollout(prompts, tokens, mask, zeros, np.ones((len(rows), 1), bool))
        batch = Batch(rollout, Sample(mask_T=mask, old_logp_T=zeros, adv=zeros[..., 0]))
        state, metrics = step(state, devices.put_rows(batch))
        yield (
            state,
            {
                "iteration": iteration + 1,
                "loss": metrics["loss"],
                "grad_norm": metrics["grad_norm"],
            },
        )
