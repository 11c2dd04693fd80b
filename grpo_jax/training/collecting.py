"""The stages before the update: publish, generate, shrink, infer.

What is sampled, what the host sees of it, and what models compute of it. See `stages.Stages`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.inference.critic import Critic, policy_of
from grpo_jax.inference.generate import generate
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.objectives import (
    reads,
    reads_in_prepare,
)
from grpo_jax.options import Batching, Generation, Update
from grpo_jax.parallel.backends import Devices
from grpo_jax.tasks import Task
from grpo_jax.training.batch import (
    HostRollout,
    cut,
    infer_logp,
    lengths,
    lengths_and_stops,
    trim,
)
from grpo_jax.training.packing import pack, packed_shapes
from grpo_jax.training.train_step import (
    by_prompt,
    fresh_prompts,
    own_old_logp,
)
from grpo_jax.types import Params, Rollout, Weights


def publishing_stage(model: LanguageModel, critic: Critic | None, devices: Devices) -> Callable:
    """`Stages.publish`: the policy in the sampler's layout, in the type that it is computed in."""
    cast = None if model.cast is None else devices.whole_batch(model.cast, ("state",), "state")

    def publish(weights: Weights) -> Params:
        policy = policy_of(critic, weights.params)
        # Cast before it is moved: half as many bytes then cross between devices.
        return devices.for_decoding(policy if cast is None else cast(policy))

    return publish


def sampling_stage(model, tokenizer, generation: Generation, devices: Devices) -> Callable:
    """`Stages.generate`."""
    sample = partial(
        generate,
        model,
        generation=generation,
        stop_ids=tokenizer.stop_ids,
        pad_id=tokenizer.pad_id,
    )
    program = devices.per_prompt(sample, ("decode", "prompts", "whole", "first"), "rows")
    return lambda served, prompts, key: program(served, prompts, key, 0)


def shrinking_stage(task: Task, batching: Batching, devices: Devices) -> Callable:
    """`Stages.shrink`: padding is cut off, real tokens are listed, the host gets its copy."""

    def shrink(rollout: Rollout) -> tuple[Rollout, HostRollout]:
        rollout = trim(jax.block_until_ready(rollout), batching.length_buckets)
        P = rollout.mask_PGT.shape[0]
        local_rows = devices.local_rows(P)
        owned_rows = devices.owned_rows(P)
        seen = devices.fetch(rollout._replace(prompts=None, logp_PGT=None))
        mine = jax.tree.map(lambda x: x[np.isin(local_rows, owned_rows)], seen)
        mask_PGT, stopped_PG = lengths_and_stops(mine, owned_rows)
        rows = [task.train[i] for i in mine.row_P]
        host = HostRollout(rows, seen.tokens_PGT, mask_PGT, stopped_PG, local_rows, owned_rows)
        # By what every process knows, so that all of them list as many tokens.
        if batching.pack_tokens and (index_PN := pack(mask_PGT)) is not None:
            rollout = rollout._replace(token_index_PN=devices.put("rows", index_PN))
        return rollout, host

    def on_shapes(drawn: Rollout) -> list[Rollout]:
        found = []
        for size in lengths(drawn.mask_PGT.shape[-1], batching.length_buckets):
            trimmed = jax.eval_shape(partial(cut, size=size), drawn)
            found += packed_shapes(trimmed) if batching.pack_tokens else [trimmed]
        return found

    shrink.on_shapes = on_shapes
    return shrink


def inference_stage(
    model, objective, critic: Critic | None, sampling, update: Update, devices: Devices
) -> Callable:
    """`Stages.infer`: the fields of `Sample` that models compute and the objective reads."""
    fields, before = reads(objective), reads_in_prepare(objective)
    logp_of = partial(infer_logp, model, sampling=sampling, logit_chunk=update.logit_chunk)
    rows = ("rows", "rows")
    logp = devices.per_prompt(logp_of, ("state", "rows"), rows)
    entropies = devices.per_prompt(partial(logp_of, with_entropy=True), ("state", "rows"), rows)
    ages = devices.whole_batch(partial(ages_of), ("whole", "rows"), "rows")
    acted = partial(own_where_fresh, own_old_logp(update.old_logp, objective))
    olds = devices.whole_batch(acted, ("whole", "rows", "rows"), "rows")
    if critic is not None:
        values = devices.per_prompt(critic.values, ("state", "rows", "rows"), "rows")

    def infer(weights: Weights, rollout: Rollout) -> dict[str, Any]:
        policy, samples = policy_of(critic, weights.params), {}
        if "ref_logp_T" in fields:
            samples["ref_logp_T"], _ = logp(weights.reference, rollout)
        if "entropy_T" in before:
            _, samples["entropy_T"] = entropies(policy, rollout)
        if "old_logp_T" in before and update.old_logp != "sampler":
            # What looks at π_old before the first epoch needs a pass of its own.
            samples["old_logp_T"] = olds(weights.step, rollout, logp(policy, rollout)[0])
        if "old_value_T" in fields:
            critic_params = weights.params["critic"]
            samples["old_value_T"] = values(critic_params, rollout.prompts, rollout.tokens_PGT)
        if "age" in fields:
            samples["age"] = ages(weights.step, rollout)
        return samples

    return infer


@jax.jit
def ages_of(step: jax.Array, rollout: Rollout) -> jax.Array:
    """How many updates the policy has had since each completion was sampled."""
    assert rollout.update_P is not None  # the loop marks every batch
    age_P1 = (step - rollout.update_P)[:, None]
    return jnp.broadcast_to(age_P1, rollout.stopped_PG.shape).astype(jnp.int32)


@partial(jax.jit, static_argnums=0)
def own_where_fresh(always: bool, step: jax.Array, rollout: Rollout, logp_PGT) -> jax.Array:
    """log π_old of a batch before its first epoch, as `make_train_step` has it in that epoch."""
    if always:
        return logp_PGT
    fresh_P = fresh_prompts(rollout, step)
    assert fresh_P is not None  # the loop marks every batch
    return by_prompt(fresh_P, logp_PGT, rollout.logp_PGT)
