"""One iteration as a tuple of functions.

    prompts → publish → generate → shrink → infer, reward → assemble → update

`make_stages` makes the usual ones. A stage is replaced with `stages._replace(generate=…)`, and
called by itself to measure it or to use it elsewhere. Where one runs on devices its programs are
compiled for the shapes that it meets; `programs` lists them before anything runs.

A stage that returns what depends on the values (a batch that is trimmed, say) has an attribute
`on_shapes`, which takes shapes and returns every result that the stage may have, in shapes.

Left out on purpose: the order of stages (see `loop`).
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.inference.critic import Critic, policy_of
from grpo_jax.inference.generate import generate
from grpo_jax.inference.logprobs import tokens_at_once, with_vocabulary
from grpo_jax.inference.text import step_rewards
from grpo_jax.inference.tokenizer import Tokenizer
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.objectives import (
    AdaptiveObjective,
    Objective,
    objective_at,
    reads,
    reads_in_prepare,
)
from grpo_jax.objectives.tracing import takes_several_rewards
from grpo_jax.options import Batching, Generation, OptionError, Scoring, Update, check_cuts
from grpo_jax.parallel.backends import SINGLE, Devices
from grpo_jax.tasks import Task
from grpo_jax.training.batch import (
    GatheredScores,
    HostRollout,
    assemble,
    cut,
    infer_logp,
    lengths,
    lengths_and_stops,
    score_and_gather,
    take_scores,
    trim,
)
from grpo_jax.training.checks import (
    check_epochs,
    check_float16,
    check_model,
    check_sampler,
    check_task,
    warn_beyond_clip,
    warn_group_of_one,
)
from grpo_jax.training.packing import pack, packed_shapes
from grpo_jax.training.rows import next_prompts, prompt_width
from grpo_jax.training.start import start
from grpo_jax.training.train_step import (
    by_prompt,
    fresh_prompts,
    make_train_step,
    own_old_logp,
)
from grpo_jax.training.zero_variance import (
    drop_zero_variance_groups,
    fewer_prompts,
    smaller_shapes,
)
from grpo_jax.types import Batch, Params, Prompts, Rollout, RunState, TrainState, Weights


class Stages(NamedTuple):
    """One iteration, in order. Replace one to change the algorithm, call one to measure it.

    ```
    start(params, reference=None) -> RunState                   before the first iteration
    prompts(data) -> (Prompts, row_P, data)                     host; each row is rendered once
    publish(weights) -> served                                  the layout the sampler reads
    generate(served, prompts, key) -> Rollout                   devices, asynchronous
    shrink(rollout) -> (Rollout, HostRollout)                   waits; trims and packs
    infer(weights, rollout) -> fields                           devices, while the host scores
    reward(host) -> GatheredScores                              host
    teach(weights, rollout, host, scores) -> fields             None, or what needs scores first
    assemble(rollout, host, scores, fields, state) -> Batch     devices; may drop groups
    observe(data, host, scores) -> data                         what to remember of a batch
    update(train, weights, batch, state) -> (TrainState, state, metrics)
    ```

    `fields` are fields of `Sample`, `state` is that of an objective that has one (else None), and
    `data` is `RunState.data`. Three fields are no stages: `policy(params)` is the policy's part of
    the trained parameters, `objective` is what the stages were made for, and `old_logp` says what
    π_old is (see `options.Update`).
    """

    start: Callable[..., RunState]
    prompts: Callable[[Any], tuple[Prompts, jax.Array, Any]]
    publish: Callable[[Weights], Any]
    generate: Callable[[Any, Prompts, jax.Array], Rollout]
    shrink: Callable[[Rollout], tuple[Rollout, HostRollout]]
    infer: Callable[[Weights, Rollout], dict[str, Any]]
    reward: Callable[[HostRollout], GatheredScores]
    teach: Callable[..., dict[str, Any]] | None
    assemble: Callable[..., Batch]
    observe: Callable[[Any, HostRollout, GatheredScores], Any]
    update: Callable[..., tuple[TrainState, Any, dict[str, float]]]
    policy: Callable[[Params], Params]
    objective: Objective | AdaptiveObjective
    old_logp: str = "auto"


def make_stages(
    model: LanguageModel,
    task: Task,
    tokenizer: Tokenizer,
    objective: Objective | AdaptiveObjective,
    optimizer: optax.GradientTransformation,
    *,
    seed: int = 0,
    generation: Generation = Generation(),
    update: Update = Update(),
    batching: Batching = Batching(),
    scoring: Scoring = Scoring(),
    critic: Critic | None = None,
    devices: Devices = SINGLE,
) -> Stages:
    """The stages of GRPO: sample a group for each prompt, score it, update.

    Args:
      model: pure functions of one sequence.
      task: rows, a prompt for each, and the reward.
      tokenizer: between messages, ids and text.
      objective: advantage and loss; what it reads is found by tracing, and only that is computed.
      optimizer: an Optax transformation.
      seed: of everything random.
      generation: how many completions of which length, from which distribution.
      update: how a batch changes the parameters.
      batching: which prompts an iteration takes, and how arrays are cut.
      scoring: how rewards are called and weighed.
      critic: for an objective that reads values; parameters are then `{"policy": …, "critic": …}`.
      devices: where programs run; the numbers do not depend on it.

    Raises:
      OptionError: an option is out of its range, or two do not fit together.
      ValueError: the task has no rows, or the objective reads values and there is no critic.
    """
    generation.check().sampling.check_training()
    warn_group_of_one(generation)
    check_cuts(generation, update.check(), batching.check(), devices.parts)
    check_task(task, objective, scoring, critic)
    check_epochs(update, objective)
    width = batching.prompt_length or prompt_width(task, tokenizer)
    batching = batching._replace(prompt_length=width)
    check_model(model, tokenizer, width, generation.max_new_tokens)
    objective = with_reward_weights(objective, scoring.weights)
    check_float16(model)
    model = with_vocabulary(devices.for_training(model), tokenizer.vocab_size)
    if update.logit_chunk is None:
        update = update._replace(logit_chunk=logit_chunk_of(model, devices))
    if update.group_microbatches > 1:
        batching = batching._replace(pack_tokens=False)  # packed lists are of whole groups
    several = takes_several(objective)
    return Stages(
        start=partial(start, objective, optimizer, seed, critic, devices),
        prompts=partial(
            next_prompts, task, tokenizer, model.config.vocab_size, batching, seed, devices
        ),
        publish=publishing_stage(model, critic, devices),
        generate=sampling_stage(model, tokenizer, generation, devices),
        shrink=shrinking_stage(task, batching, devices),
        infer=inference_stage(model, objective, critic, generation.sampling, update, devices),
        reward=partial(score_and_gather, task, tokenizer, scoring),
        teach=None,
        assemble=assembly_stage(
            objective, tokenizer, update, batching, scoring.weights, several, devices
        ),
        observe=lambda data, host, scores: data,
        update=update_stage(
            model, objective, optimizer, generation.sampling, update, batching, critic, devices
        ),
        policy=partial(policy_of, critic),
        objective=objective,
        old_logp=update.old_logp,
    )


# What is sampled, and what the host sees of it.


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


# What an update takes, and the update.


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


def logit_chunk_of(model: LanguageModel, devices: Devices) -> int:
    """Tokens projected on the vocabulary at a time.

    A program of pmap sees its own prompts, one over a mesh those of all devices.
    """
    return tokens_at_once(model, devices.parts if devices.axis_name is None else 1)
