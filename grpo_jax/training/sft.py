"""Supervised fine-tuning as a start for GRPO: the same train step, with cross-entropy as its loss.

Left out on purpose: supervised training for its own sake, with held-out losses and checkpoints.
"""

import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.inference.logprobs import with_vocabulary
from grpo_jax.inference.text import encode
from grpo_jax.inference.tokenizer import Tokenizer
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.objectives import Objective
from grpo_jax.options import OptionError, Update, whole
from grpo_jax.parallel.backends import SINGLE, Devices
from grpo_jax.parallel.programs import has_shapes
from grpo_jax.tasks import Task
from grpo_jax.training.checks import check_model, check_rows
from grpo_jax.training.finite import INFINITE, SKIPPED, check_finite
from grpo_jax.training.rows import is_endless, measured, prompt_width, row_indices
from grpo_jax.training.stages import logit_chunk_of
from grpo_jax.training.start import start
from grpo_jax.training.train_step import make_train_step
from grpo_jax.types import Batch, Mean, Params, Rollout, Sample, TrainState


def nll(logp_T: jax.Array, sample: Sample) -> Mean:
    """−Σ_t log π_t over a completion's tokens, to be divided by the tokens of the batch."""
    total = -jnp.where(sample.mask_T, logp_T, 0.0).sum()
    return Mean(total, sample.mask_T.sum().astype(jnp.float32))


TOLD = ("loss", "grad_norm", SKIPPED, INFINITE)
SUPERVISED = Objective(advantage=jnp.zeros_like, loss=nll)


def sft(
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
    logit_chunk: int | None = None,
    devices: Devices = SINGLE,
) -> Iterator[tuple[TrainState, dict]]:
    """Supervised updates on the targets of `task.train`, one yield of `(state, metrics)` each.

    A target is a group of one whose advantage is not needed.

    Args:
      model: pure functions of one sequence.
      params: where training starts.
      task: rows, a prompt and a target for each.
      tokenizer: between messages, ids and text.
      optimizer: an Optax transformation.
      steps: updates.
      batch_size: rows of an update.
      seed: of the order of rows.
      prompt_length: tokens that prompts are padded to; None: as many as the longest has.
      logit_chunk: tokens that are projected on the vocabulary at a time.
      devices: where the program runs.

    Raises:
      OptionError: an option is out of its range.
      ValueError: the task has no rows.
    """
    whole("steps", steps, 0)
    whole("batch_size", batch_size, 1)
    check_rows(task)
    if batch_size % devices.parts:
        spread = f"{devices.parts}, the parts that rows are spread over"
        raise OptionError("batch_size", f"must be a multiple of {spread}; got {batch_size}")
    model = with_vocabulary(devices.for_training(model), tokenizer.vocab_size)
    chunk = logit_chunk_of(model, devices) if logit_chunk is None else logit_chunk
    update = Update(logit_chunk=chunk, old_logp="sampler")
    step = make_train_step(model, SUPERVISED, optimizer, update=update, axis_name=devices.axis_name)
    step = devices.per_prompt(step, ("state", "rows"), ("state", "whole"), donate=(0,))
    width = prompt_width(task, tokenizer) if prompt_length is None else prompt_length
    some, margin = measured(task.train)
    longest = margin * max(len(target_ids(task, tokenizer, row)) for row in some)
    longest = -(-math.ceil(longest) // 8) * 8
    check_model(model, tokenizer, width, longest)
    state = start(SUPERVISED, optimizer, seed, None, devices, params).train
    local_rows = devices.local_rows(batch_size)
    skipped = 0
    for number in range(steps):
        place = (number * batch_size, batch_size, len(task.train), seed)
        index = row_indices(*place, endless=is_endless(task.train))[local_rows]
        rows = [task.train[i] for i in index]
        targets = [target_ids(task, tokenizer, row) for row in rows]
        prompts = encode(tokenizer, task.prompt, rows, length=width)
        batch = supervised_batch(prompts, targets, longest, tokenizer.pad_id)
        state, found = step(state, devices.put_rows(batch))
        shown = {name: found[name] for name in ("loss", "grad_norm")}
        if not has_shapes(found):
            skipped = check_finite({name: float(found[name]) for name in TOLD}, skipped)
        yield state, {"iteration": number + 1} | shown


def target_ids(task: Task, tokenizer: Tokenizer, row: dict) -> list[int]:
    """A right completion as ids, with the stop token that ends it."""
    end_id = getattr(tokenizer, "end_id", tokenizer.stop_ids[0])
    return [*tokenizer.encode(task.target(row)), end_id]


def supervised_batch(prompts, targets: Sequence[Sequence[int]], longest: int, pad_id: int) -> Batch:
    """Targets as groups of one, `[P, 1, longest]`."""
    tokens = np.full((len(targets), 1, longest), pad_id, np.int32)
    for row, target in zip(tokens[:, 0], targets, strict=True):
        if len(target) > longest:
            few = "more than those of the rows that were measured before"
            raise ValueError(f"a target has {len(target)} tokens, {few} ({longest} at most)")
        row[: len(target)] = target
    length = np.array([len(target) for target in targets])
    mask = np.arange(longest) < length[:, None, None]
    zeros = np.zeros(mask.shape, np.float32)
    rollout = Rollout(prompts, tokens, mask, zeros, np.ones((len(targets), 1), bool))
    return Batch(rollout, Sample(mask_T=mask, old_logp_T=zeros, adv=zeros[..., 0]))
