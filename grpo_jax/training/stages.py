"""One iteration as a tuple of functions.

    prompts → publish → generate → shrink → infer, reward → assemble → update

`make_stages` makes the usual ones. A stage is replaced with `stages._replace(generate=…)`, and
called by itself to measure it or to use it elsewhere. Where one runs on devices its programs are
compiled for the shapes that it meets; `programs` lists them before anything runs.

A stage that returns what depends on the values (a batch that is trimmed, say) has an attribute
`on_shapes`, which takes shapes and returns every result that the stage may have, in shapes.

Left out on purpose: the order of stages (see `loop`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import optax

from grpo_jax.inference.critic import Critic, policy_of
from grpo_jax.inference.logprobs import tokens_at_once, with_vocabulary
from grpo_jax.inference.tokenizer import Tokenizer
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.objectives import (
    AdaptiveObjective,
    Objective,
)
from grpo_jax.options import Batching, Generation, Scoring, Update, check_cuts
from grpo_jax.parallel.backends import SINGLE, Devices
from grpo_jax.tasks import Task
from grpo_jax.training.batch import (
    GatheredScores,
    HostRollout,
    score_and_gather,
)
from grpo_jax.training.checks import (
    check_epochs,
    check_float16,
    check_model,
    check_task,
    warn_group_of_one,
)
from grpo_jax.training.collecting import (
    inference_stage,
    publishing_stage,
    sampling_stage,
    shrinking_stage,
)
from grpo_jax.training.rows import next_prompts, prompt_width
from grpo_jax.training.start import start
from grpo_jax.training.updating import (
    assembly_stage,
    takes_several,
    update_stage,
    with_reward_weights,
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


def logit_chunk_of(model: LanguageModel, devices: Devices) -> int:
    """Tokens projected on the vocabulary at a time.

    A program of pmap sees its own prompts, one over a mesh those of all devices.
    """
    return tokens_at_once(model, devices.parts if devices.axis_name is None else 1)
