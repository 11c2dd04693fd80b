"""What an objective does, found by evaluating it at generic points, on the host and once.

For questions that its jaxpr does not answer: a gradient may read a field and yet not move with it.
Points lie on both sides of every usual bound, at ratios from 1 ± 2e-4 to e^±1.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.objectives.adaptive import AdaptiveObjective, objective_at
from grpo_jax.objectives.compose import Objective, as_mean, batch_loss, map_samples, neutralise
from grpo_jax.objectives.tracing import full_batch, reads_in_loss, state_of
from grpo_jax.types import Array, Sample

OLD_LOGP = ("auto", "sampler", "first_epoch")
# |log π − log π_old| of the points, one scale a prompt: within GSPO's clip, PPO's, and beyond both.
SCALES = np.array([2e-4, 1e-2, 0.1, 0.3, 1.0])
G = 4
T = 5


def _wave(shape: tuple[int, ...], seed: float) -> np.ndarray:
    """Numbers in [−1, 1] without a pattern that a loss could cancel."""
    return np.sin(seed + 1.7 * np.arange(np.prod(shape))).reshape(shape)


def generic_batch(P: int = len(SCALES), G: int = G, T: int = T) -> tuple[Array, Sample]:
    """log π and samples of all fields, every token trained; π_old, the sampler and π are one."""
    logp_PGT, shapes = full_batch(P, G, T)
    fields = {
        name: _wave(shape.shape, 1.0 + place)
        for place, (name, shape) in enumerate(shapes._asdict().items())
    }
    logp_PGT = -1.2 + _wave(logp_PGT.shape, 0.3)
    fields |= {
        "mask_T": np.ones((P, G, T), bool),
        "old_logp_T": logp_PGT,
        "sampler_logp_T": logp_PGT,
        "weight_T": 1.5 + 0.5 * fields["weight_T"],
        "entropy_T": 1.5 + fields["entropy_T"],
        "stopped": np.ones((P, G), bool),
        "age": np.arange(P * G).reshape(P, G) % 9,
        "group_tokens": np.full((P, G), G * T),
    }
    cast = {name: jnp.asarray(x, getattr(shapes, name).dtype) for name, x in fields.items()}
    return jnp.asarray(logp_PGT, jnp.float32), Sample(**cast)


def _gradient(objective: Objective | AdaptiveObjective) -> Callable[[Array, Sample], np.ndarray]:
    """The gradient of the loss's total in log π; the state is an argument, as it is compiled."""

    @jax.jit
    def gradient(state, logp, samples):
        bound = objective_at(objective, state)
        return jax.grad(lambda x: batch_loss(bound, x, samples).total)(logp)

    return lambda logp, samples: np.asarray(gradient(state_of(objective), logp, samples))


def _scaled(P: int) -> np.ndarray:
    return SCALES[:P, None, None]


@functools.cache
def corrects_for_sampler(objective: Objective | AdaptiveObjective, old_logp: str = "auto") -> bool:
    """Whether the gradient moves with the sampler's log-probabilities, and so corrects for its age.

    `old_logp` says what π_old is, as `Update.old_logp` does. "sampler": the sampler's
    log-probabilities, so that only a ratio π/π_old can correct. "first_epoch": the policy itself,
    so that only π_old/π_sampler can. "auto": the policy itself where the loss reads
    `sampler_logp_T`, else the sampler's.
    """
    if old_logp not in OLD_LOGP:
        raise ValueError(f"old_logp must be one of {OLD_LOGP}, got {old_logp!r}.")
    own = old_logp == "first_epoch"
    own |= old_logp == "auto" and "sampler_logp_T" in reads_in_loss(objective)
    gradient = _gradient(objective)
    logp, samples = generic_batch()
    sampler = logp + _scaled(len(logp)) * _wave(logp.shape, 2.3)
    moved = samples._replace(sampler_logp_T=sampler, old_logp_T=logp if own else sampler)
    before = gradient(logp, samples)
    return not np.allclose(gradient(logp, moved), before, rtol=1e-5, atol=1e-7, equal_nan=True)


@functools.cache
def has_ratio_to_old(objective: Objective | AdaptiveObjective) -> bool:
    """Whether the gradient moves smoothly with π_old, as it does with a ratio π/π_old.

    The sampler moves along, so that a fixed weight π_old/π_sampler is no ratio; and a token that is
    dropped beyond a distance to π_old has none within it.
    """
    gradient = _gradient(objective)
    logp, samples = generic_batch()
    scale = _scaled(len(logp))
    step = np.minimum(0.05 * scale, 1e-3)
    old = logp - scale * _wave(logp.shape, 4.1)
    sampler = old + 0.3 * scale * _wave(logp.shape, 5.9)
    at = lambda move: gradient(
        logp, samples._replace(old_logp_T=old + move, sampler_logp_T=sampler + move)
    )
    before = at(0.0)
    relative = np.abs(at(step) - before) / np.where(before == 0, np.inf, np.abs(before))
    return bool(np.any((relative > 0.05 * step) & (relative < 50 * step)))


def loss_weights(objective: Objective, logp_PGT: Array, samples_PG: Sample) -> Array:
    """The weight of every sequence in the loss's `Mean`, [P, G]."""

    def weight(logp_T: Array, sample: Sample) -> Array:
        mean = as_mean(objective.loss(*neutralise(logp_T, sample)), objective.loss)
        return jnp.asarray(mean.weight, logp_T.dtype)

    return map_samples(weight, logp_PGT, samples_PG)


def weights_by_length(objective: Objective) -> tuple[list[float], list[float] | None]:
    """Lengths, and the weights of completions of these; None where an option has no value yet."""
    logp, samples = generic_batch(1)
    lengths = [1, 2, 4, T]
    mask = jnp.arange(T) < jnp.array(lengths)[:, None]
    with jax.ensure_compile_time_eval():
        weights = jax.jit(functools.partial(loss_weights, objective))(
            logp, samples._replace(mask_T=mask[None])
        )
    return lengths, None if isinstance(weights, jax.core.Tracer) else weights[0].tolist()


def tells_steps_from_zeros(objective: Objective) -> bool:
    """Whether `prepare` credits a step whose reward is 0 otherwise than no step at all.

    False where an option has no value yet.
    """
    _, samples = generic_batch()
    ends_T = np.arange(T) % 2 == 0

    @jax.jit
    def advantages(elsewhere: Array) -> Array:
        reward_T = jnp.where(ends_T, samples.reward_T, elsewhere)
        return objective.prepare(samples._replace(reward_T=reward_T)).adv

    with jax.ensure_compile_time_eval():
        none = advantages(jnp.nan)
        zero = advantages(0.0)
    if isinstance(none, jax.core.Tracer):
        return False
    return not np.allclose(none, zero, rtol=1e-3, atol=1e-4, equal_nan=True)
