"""Every program that a run may run, found by going through an iteration on shapes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.parallel.programs import Program, listed, shapes_of
from grpo_jax.rewards import reward_functions
from grpo_jax.tasks import Task
from grpo_jax.training.stages import Stages
from grpo_jax.types import Prompts, RunState, Weights


def programs(stages: Stages, state: RunState, prompts: Prompts, functions: int) -> list[Program]:
    """Every program that an iteration may run, for every size of a batch that it may have.

    Not the small ones that cut and move arrays. Found by going through an iteration on shapes.

    Args:
      stages: those of the run; one that was replaced by a function without `on_shapes` is called
        with shapes itself.
      state: the run's state, as shapes (`backends.shapes_of`).
      prompts: the prompts of an iteration, as shapes.
      functions: the number of reward functions.
    """
    with listed() as found:
        weights = Weights(state.train.params, state.train.step, state.reference)
        served = _on_shapes(stages.publish)(weights)
        drawn = _on_shapes(stages.generate)(served, prompts, state.key)
        P = prompts.tokens_PS.shape[0]
        number_P = jax.ShapeDtypeStruct((P,), jnp.int32)
        drawn = drawn._replace(row_P=number_P, update_P=number_P)
        for rollout in _on_shapes(stages.shrink)(drawn):
            fields = _on_shapes(stages.infer)(weights, rollout)
            for batch in _on_shapes(stages.assemble)(rollout, functions, fields, state.objective):
                _on_shapes(stages.update)(state.train, weights, batch, state.objective)
    return list(found.values())


def _on_shapes(stage: Callable) -> Callable:
    return getattr(stage, "on_shapes", stage)


def programs_of(stages: Stages, state: RunState, task: Task) -> list[Program]:
    """`stages.programs` of a run that is about to begin."""
    prompts, *_ = stages.prompts(state.data)
    functions = len(reward_functions(task.reward))
    arrays = state._replace(iteration=None, queue=(), data=None)  # of these no program takes any
    return programs(stages, shapes_of(arrays), shapes_of(prompts), functions)
