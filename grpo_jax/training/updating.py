"""The stages of an update: what it takes, and the update itself. See `stages.Stages`."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.inference.critic import Critic
from grpo_jax.inference.text import step_rewards
from grpo_jax.inference.tokenizer import Tokenizer
from grpo_jax.objectives import (
    AdaptiveObjective,
    Objective,
    objective_at,
    reads,
)
from grpo_jax.objectives.tracing import takes_several_rewards
from grpo_jax.options import Batching, OptionError, Update
from grpo_jax.parallel.backends import Devices
from grpo_jax.training.batch import (
    GatheredScores,
    HostRollout,
    assemble,
    take_scores,
)
from grpo_jax.training.checks import (
    check_sampler,
    warn_beyond_clip,
)
from grpo_jax.training.train_step import (
    make_train_step,
)
from grpo_jax.training.zero_variance import (
    drop_zero_variance_groups,
    fewer_prompts,
    smaller_shapes,
)
from grpo_jax.types import Batch, TrainState, Weights


def assembly_stage(
    objective,
    tokenizer: Tokenizer,
    update: Update,
    batching: Batching,
    weights,
    several: bool,
    devices: Devices,
) -> Callable:
    """`Stages.assemble`: advantages of every group; groups without a gradient may be dropped."""
    program = devices.whole_batch(partial(assemble, objective), ("rows", "rows", "whole"), "rows")
    sizes = fewer_prompts(batching.prompts_per_step, update.microbatches, devices.parts)
    with_steps = "reward_T" in reads(objective)

    def assembled(rollout, host: HostRollout, scores: GatheredScores, fields, state=None) -> Batch:
        reward = np.moveaxis(scores.reward_PGN, -1, 1) if several else scores.reward_PG
        if with_steps:
            local = take_scores([scores], host.local_rows)
            steps_PGT = step_rewards(tokenizer, host.local(), local, weights)
            fields = fields | {"reward_T": devices.put_rows(steps_PGT)}
        reward = devices.put("rows", reward.astype(np.float32))
        batch = program(rollout, reward, state, **fields)
        if batching.drop_zero_variance:
            batch = drop_zero_variance_groups(objective, batch, sizes, devices, state)
        return batch

    def on_shapes(rollout, functions: int, fields, state=None) -> list[Batch]:
        P, G, T = rollout.mask_PGT.shape
        array = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        if with_steps:
            fields = fields | {"reward_T": array((P, G, T))}
        reward = array((P, functions, G) if several else (P, G))
        batch = program(rollout, reward, state, **fields)
        if not batching.drop_zero_variance:
            return [batch]
        return smaller_shapes(objective, batch, sizes, devices, state)

    assembled.on_shapes = on_shapes
    return assembled


def update_stage(
    model,
    objective,
    optimizer,
    sampling,
    update: Update,
    batching: Batching,
    critic: Critic | None,
    devices: Devices,
) -> Callable:
    """`Stages.update`: of a whole batch or a smaller one, in micro-batches of one size."""

    @cache
    def program(microbatches: int) -> Callable:
        step = make_train_step(
            model,
            objective,
            optimizer,
            update=update._replace(microbatches=microbatches),
            sampling=sampling,
            critic=critic,
            axis_name=devices.axis_name,
        )
        return devices.per_prompt(step, ("state", "rows", "whole"), ("state", "whole"), donate=(0,))

    def of_any_size(train: TrainState, weights: Weights, batch: Batch, state: Any = None):
        P = batch.samples.mask_T.shape[0]
        microbatches = -(-P * update.microbatches // batching.prompts_per_step)
        return program(microbatches)(train, batch, state)

    def updated(train: TrainState, weights: Weights, batch: Batch, state: Any = None):
        train, values = of_any_size(train, weights, batch, state)
        metrics = {name: float(value) for name, value in jax.device_get(values).items()}
        check_sampler(metrics, model.config)
        if update.old_logp == "sampler" and (found := metrics.get("sampler_logp_diff")) is not None:
            warn_beyond_clip(found, objective)
        if isinstance(objective, AdaptiveObjective):
            state = objective.step(state, metrics)
        return train, state, metrics

    updated.on_shapes = of_any_size
    return updated


def with_reward_weights(
    objective: Objective | AdaptiveObjective, weights: Sequence[float] | None
) -> Objective | AdaptiveObjective:
    """The objective, whose advantage weighs several rewards itself where it takes them apart."""
    if weights is None or not takes_several(objective):
        return objective
    advantage: Any = getattr(objective, "advantage", None)
    own = getattr(advantage, "keywords", {}).get("weights")
    if own is not None or "weights" not in inspect.signature(advantage or len).parameters:
        raise OptionError(
            "weights",
            "cannot be given to an objective that takes several rewards apart and weighs them "
            "itself: give them to the objective, as gdpo(weights=…)",
        )
    return objective._replace(advantage=partial(advantage, weights=tuple(weights)))


@cache
def takes_several(objective: Objective | AdaptiveObjective) -> bool:
    """Whether the objective's advantage takes several rewards apart (reward_NG), not their sum."""
    return takes_several_rewards(objective_at(objective).advantage)
