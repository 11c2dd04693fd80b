"""What an objective must be to be trained, checked before anything is computed with it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.objectives.adaptive import AdaptiveObjective, objective_at
from grpo_jax.objectives.compose import Objective, batch_advantages, batch_loss, recipe
from grpo_jax.objectives.effects import generic_batch, loss_weights
from grpo_jax.objectives.tracing import (
    full_batch,
    takes_several_rewards,
    weight_depends_on_policy,
)
from grpo_jax.types import Array, Sample


def check_objective(objective: Objective | AdaptiveObjective) -> None:
    """Raises where an objective is not one that can be trained, and says what was expected.

    Raises:
      TypeError: it is not an `Objective` (a preset that was not called), or one of its functions
        returns something else than advantages of a group, a batch of samples, a `Mean` of scalars.
      ValueError: the weight of its loss depends on the policy's parameters, or is negative.
    """
    bound = _bound(objective)
    for name, function in zip(bound._fields, bound, strict=True):
        if not callable(function) and (name != "prepare" or function is not None):
            raise TypeError(f"{name} must be a function, got {recipe(function)}.")
    _check_functions(objective)


@functools.cache  # what was right once is not evaluated again
def _check_functions(objective: Objective | AdaptiveObjective) -> None:
    bound = _bound(objective)
    _check_advantage(bound)
    samples_PG = _check_prepare(bound)
    logp_PGT, _ = full_batch()
    jax.eval_shape(lambda logp, samples: batch_loss(bound, logp, samples), logp_PGT, samples_PG)
    if weight_depends_on_policy(objective):
        raise ValueError(
            f"loss={recipe(bound.loss)} has a weight that depends on the policy's parameters. The "
            "gradient of a batch is Σ ∇total / Σ weight, so the weight must be a constant of the "
            "batch: put a stop_gradient around it if it is meant as one."
        )
    _check_weights(bound)


def _bound(objective: Any) -> Objective:
    """The objective in its first state."""
    bound = objective
    if isinstance(objective, AdaptiveObjective):
        bound = objective_at(objective)
    if isinstance(bound, Objective):
        return bound
    what = "bind(state)" if bound is not objective else "objective"
    call = f": call it, {recipe(bound)}(…)" if callable(bound) else ""
    raise TypeError(f"{what} must be an Objective, such as grpo(), got {recipe(bound)}{call}.")


def _check_advantage(objective: Objective) -> None:
    """One value for each completion of a group, from one reward for each or from several."""
    try:
        reward_PG = jax.ShapeDtypeStruct((2, 4), jnp.float32)
        jax.eval_shape(lambda reward: batch_advantages(objective, reward), reward_PG)
    except Exception as error:
        if takes_several_rewards(objective.advantage):
            return
        raise TypeError(
            f"advantage={recipe(objective.advantage)} must map the rewards of a group, reward_G "
            f"(or reward_NG for N rewards), to adv_G: {error}"
        ) from error


def _check_prepare(objective: Objective) -> Sample:
    """Shapes of the samples that the loss sees."""
    _, samples_PG = full_batch()
    if objective.prepare is None:
        return samples_PG
    found = jax.eval_shape(objective.prepare, samples_PG)
    if not isinstance(found, Sample):
        raise TypeError(
            f"prepare={recipe(objective.prepare)} must return the samples of the batch, a Sample, "
            f"got {type(found).__name__}."
        )
    P, G, T = samples_PG.mask_T.shape
    shape = getattr(found.adv, "shape", None)
    if shape not in ((P, G), (P, G, T)) or found.mask_T.shape != (P, G, T):
        raise TypeError(
            f"prepare={recipe(objective.prepare)} must keep the shapes of the batch: adv [P, G] or "
            f"[P, G, T] and mask_T [P, G, T] with {P, G, T}, got {shape} and {found.mask_T.shape}."
        )
    return found


def _check_weights(objective: Objective) -> None:
    """Weights are what a sum is divided by: a negative one would turn the gradient around."""

    @jax.jit
    def weights(stopped_PG: Array) -> Array:
        logp_PGT, samples_PG = generic_batch()
        if objective.prepare is not None:
            samples_PG = objective.prepare(samples_PG)
        _, G, T = samples_PG.mask_T.shape
        shorter_GT = jnp.arange(T) <= jnp.arange(G)[:, None]
        mask_PGT = samples_PG.mask_T & shorter_GT
        seen = samples_PG._replace(mask_T=mask_PGT, stopped=stopped_PG)
        return loss_weights(objective, logp_PGT, seen)

    _, samples_PG = generic_batch()
    for stopped in (True, False):
        found = np.asarray(weights(jnp.full_like(samples_PG.stopped, stopped)))
        if not np.all(found >= 0):
            raise ValueError(
                f"loss={recipe(objective.loss)} has a weight of {np.min(found):g}: the weights of "
                "a Mean are what a sum is divided by, and must not be negative."
            )
