"""Training as a generator of (state, metrics): logging and saving stand in the caller's `for` loop.

Everything random is a function of the root key and the iteration, and the rows of an iteration are
a function of the seed and of `RunState.data`: what continues from a state equals what was never
interrupted.

Left out on purpose: callbacks, a trainer class, files.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.inference.critic import Critic
from grpo_jax.inference.tokenizer import Tokenizer
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.objectives import AdaptiveObjective, Objective
from grpo_jax.options import Batching, Generation, Scoring, Update, whole
from grpo_jax.parallel.backends import SINGLE, Devices
from grpo_jax.parallel.programs import Program
from grpo_jax.tasks import Task
from grpo_jax.training.batch import GatheredScores, HostRollout
from grpo_jax.training.checks import check_staleness, check_state, check_steps
from grpo_jax.training.finite import check_finite
from grpo_jax.training.metrics import (
    completion_rows,
    group_statistics,
    learning_rate,
    reward_statistics,
    timed,
)
from grpo_jax.training.optimizers import Optimizer, optimizer_for
from grpo_jax.training.programs import programs_of
from grpo_jax.training.stages import Stages, make_stages
from grpo_jax.types import Params, Rollout, RunState, Weights


class Collected(NamedTuple):
    """A batch of completions, scored: what `assemble` makes an update's batch of."""

    rollout: Rollout
    host: HostRollout
    scores: GatheredScores
    fields: dict[str, Any]


More = Callable[[Any], tuple[Rollout, Any]]


def weights_of(state: RunState) -> Weights:
    """The parameters that the stages of an iteration read."""
    return Weights(state.train.params, state.train.step, state.reference)


def collect(
    stages: Stages,
    weights: Weights,
    rollout: Rollout,
    more: More,
    data: Any,
    *,
    scores: GatheredScores | None = None,
) -> tuple[Collected, Any]:
    """A sampled batch, trimmed and scored, while devices compute what needs no reward.

    Wrap it to change which completions an update sees: dynamic sampling calls `more` for other
    prompts, a replay buffer keeps groups in `data`.

    Args:
      stages: the stages of an iteration.
      weights: the parameters of this iteration.
      rollout: the batch as it was sampled.
      more: `more(data) -> (rollout, data)` samples another batch by the present policy.
      data: `RunState.data`.
      scores: those of this batch, where they are known already.
    """
    rollout, host = stages.shrink(rollout)
    fields = stages.infer(weights, rollout)
    scores = stages.reward(host) if scores is None else scores
    if stages.teach is not None:
        fields = fields | stages.teach(weights, rollout, host, scores)
    return Collected(rollout, host, scores, fields), stages.observe(data, host, scores)


def iterate(
    stages: Stages,
    state: RunState,
    *,
    steps: int,
    collect: Callable[..., tuple[Collected, Any]] = collect,
    max_staleness: int = 0,
    update_reference: Callable[[int, Params, Params], Params] | None = None,
) -> Iterator[tuple[RunState, dict]]:
    """One yield of `(state, metrics)` an iteration, from `state` to iteration number `steps`.

    With `max_staleness` k, the policy before iteration i − k samples iteration i: devices sample
    while the host decodes and scores, and the objective's ratio corrects for the policy's age.

    Args:
      stages: one iteration, see `Stages`.
      state: what `stages.start` gave, what an earlier call yielded, or a checkpoint. Its arrays are
        consumed by the next iteration, so copy what must outlive it.
      steps: iterations, counted from the very beginning.
      collect: from a sampled batch to a scored one; see `collect`.
      max_staleness: iterations that sampling may run ahead of the update.
      update_reference: `(iteration, params, reference) -> reference`, called after each iteration.

    Raises:
      NonFiniteError: see `finite.check_finite`; nothing is yielded then.
    """
    check_steps(steps, state)
    check_staleness(max_staleness, stages.objective, stages.old_logp)
    return _iterations(*timed(stages), state, steps, collect, max_staleness, update_reference)


def _iterations(stages, seconds, state, steps, collect, max_staleness, update_reference):
    skipped = 0
    while state.iteration < steps:
        iteration = state.iteration + 1
        state = sample_ahead(stages, state, min(max_staleness + 1, steps - state.iteration))
        weights = weights_of(state)
        more = sampler_of_more(stages, weights, iteration_key(state, iteration))
        found, data = collect(stages, weights, state.queue[0], more, state.data)
        batch = stages.assemble(*found, state.objective)
        train, objective, metrics = stages.update(state.train, weights, batch, state.objective)
        skipped = check_finite(metrics, skipped)
        policy = stages.policy(train.params)
        state = state._replace(
            iteration=iteration,
            train=train,
            queue=state.queue[1:],
            data=data,
            objective=objective,
            reference=moved_reference(update_reference, iteration, policy, state.reference),
        )
        statistics = group_statistics(found.host, found.scores.reward_PG)
        statistics |= reward_statistics(found.scores)
        completions = completion_rows(found.host, found.scores)
        del weights, more, batch  # what lies in them has been consumed
        yield (
            state,
            (
                {"iteration": iteration}
                | statistics
                | metrics
                | learning_rate(train)
                | seconds()
                | {"completions": completions}
            ),
        )


def iteration_key(state: RunState, iteration: int) -> jax.Array:
    """The root of an iteration's noise; iterations are counted from 1."""
    return jax.random.fold_in(state.key, iteration - 1)


def sample_ahead(stages: Stages, state: RunState, count: int) -> RunState:
    """Samples until the batches of `count` iterations, this one's first, are in the queue.

    What the sampler reads lives no longer than this function: it is not kept during the update.
    """
    if len(state.queue) >= count:
        return state
    weights = weights_of(state)
    served = stages.publish(weights)
    while len(state.queue) < count:
        key = iteration_key(state, state.iteration + len(state.queue) + 1)
        rollout, data = sampled(stages, served, weights, key, state.data)
        state = state._replace(queue=(*state.queue, rollout), data=data)
    return state


def sampled(stages: Stages, served: Any, weights: Weights, key: Any, data: Any):
    """One batch, marked with its rows and with the updates its policy had behind it."""
    prompts, row_P, data = stages.prompts(data)
    rollout = stages.generate(served, prompts, key)
    update_P = row_P * 0 + int(weights.step)  # lies where the rows lie, on every process
    return rollout._replace(row_P=row_P, update_P=update_P), data


def sampler_of_more(stages: Stages, weights: Weights, key: jax.Array) -> More:
    """`more` of `collect`: batches beyond an iteration's own, with noise of their own."""
    served: list = []
    rounds: list[int] = []

    def more(data: Any) -> tuple[Rollout, Any]:
        if not served:  # laid out for the sampler when it is needed, which is seldom
            served.append(stages.publish(weights))
        rounds.append(len(rounds))
        # Prompts fold in small numbers: these lie far behind them.
        own_key = jax.random.fold_in(jax.random.fold_in(key, 0x7FFFFFFF), len(rounds))
        return sampled(stages, served[0], weights, own_key, data)

    return more


def moved_reference(
    update_reference: Callable | None, iteration: int, policy: Params, reference: Params | None
) -> Params | None:
    """The reference after an iteration."""
    if update_reference is None or reference is None:
        return reference
    moved = update_reference(iteration, policy, reference)
    # The next update consumes the parameters: a reference that is them needs its own buffers.
    return jax.tree.map(lambda new, own: jnp.copy(new) if new is own else new, moved, policy)


def train(
    model: LanguageModel,
    params: Params,
    task: Task,
    tokenizer: Tokenizer,
    objective: Objective | AdaptiveObjective,
    optimizer: Optimizer,
    *,
    steps: int,
    seed: int = 0,
    generation: Generation = Generation(),
    update: Update = Update(),
    batching: Batching = Batching(),
    scoring: Scoring = Scoring(),
    max_staleness: int = 0,
    critic: Critic | None = None,
    reference: Params | None = None,
    update_reference: Callable[[int, Params, Params], Params] | None = None,
    collect: Callable[..., tuple[Collected, Any]] = collect,
    state: RunState | None = None,
    compile_ahead: Callable[[list[Program]], None] | None = None,
    devices: Devices = SINGLE,
) -> Iterator[tuple[RunState, dict]]:
    """GRPO, one yield of `(state, metrics)` an iteration: sample, score, update.

    Metrics: those of `make_train_step` and of `group_statistics`, `iteration` (from 1),
    `learning_rate`, `seconds/…` of sampling, scoring and updating, and `completions`: prompt,
    completion and reward of each completion of this process, as rows.

    Args:
      model: pure functions of one sequence, such as `decoder` or `load_pretrained` gives.
      params: the policy that training starts from.
      task: rows, a prompt for each, and the reward.
      tokenizer: between messages, ids and text.
      objective: advantage and loss, such as `grpo(beta=0.04)`.
      optimizer: an Optax transformation, such as `adamw(1e-6)`, or a function of the run's total
        updates (iterations × epochs) that gives one.
      steps: iterations, counted from the very beginning.
      seed: of everything random.
      generation: how completions are sampled.
      update: how a batch changes the parameters.
      batching: which prompts an iteration takes, and how arrays are cut.
      scoring: how reward functions are called and weighed.
      max_staleness: iterations that sampling may run ahead of the update; see `iterate`.
      critic: `value_network(model)`, for an objective that reads values.
      reference: the reference policy; None: `params`.
      update_reference: moves the reference after each iteration, as `every` and `ema` do.
      collect: from a sampled batch to a scored one, for dynamic sampling or replay.
      state: what an earlier call yielded, or a checkpoint, to continue behind it.
      compile_ahead: is given, before anything runs, every program that the iterations may run
        (not the small ones that cut and move arrays); it may `compile()` them.
      devices: where programs run; the numbers do not depend on it.

    Raises:
      OptionError: an option is out of its range, or two do not fit together.
      ValueError: task, objective and state do not fit together.
    """
    whole("steps", steps, 0)
    update.check()
    stages = make_stages(
        model,
        task,
        tokenizer,
        objective,
        optimizer_for(optimizer, steps * update.epochs),
        seed=seed,
        generation=generation,
        update=update,
        batching=batching,
        scoring=scoring,
        critic=critic,
        devices=devices,
    )
    check_state(state, objective)
    state = stages.start(params, reference) if state is None else state
    options = {"max_staleness": max_staleness, "update_reference": update_reference}
    iterations = iterate(stages, state, steps=steps, collect=collect, **options)
    if compile_ahead is not None and state.iteration < steps:
        compile_ahead(programs_of(stages, state, task))
    return iterations
