"""Rollouts and rewards as one batch, and what processes tell one another of it."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.inference.logprobs import Sampling, completion_scores
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.objectives import Objective, batch_advantages
from grpo_jax.parallel.processes import run_and_gather
from grpo_jax.rewards import Scores
from grpo_jax.types import Array, Batch, Params, Prompts, Rollout, Sample


def rollout_shapes(
    prompts: int, group_size: int, prompt_length: int, max_new_tokens: int
) -> Rollout:
    """What `sampler.generate` returns, as shapes."""
    P = prompts
    G = group_size
    S = prompt_length
    T = max_new_tokens
    array = jax.ShapeDtypeStruct
    return Rollout(
        Prompts(array((P, S), jnp.int32), array((P, S), bool)),
        array((P, G, T), jnp.int32),
        array((P, G, T), bool),
        array((P, G, T), jnp.float32),
        array((P, G), bool),
    )


def trim(rollout: Rollout, buckets: int) -> Rollout:
    """Cuts T to the smallest of `buckets` equal fractions of it that holds every completion.

    What is cut off is padding, so nothing changes but the cost; at most `buckets` shapes are ever
    compiled.
    """
    longest = int(jnp.max(rollout.mask_PGT.sum(-1)))
    return cut(
        rollout, next(s for s in lengths(rollout.mask_PGT.shape[-1], buckets) if s >= longest)
    )


def lengths(T: int, buckets: int) -> list[int]:
    """The completion lengths that `trim` cuts to."""
    return sorted({-(-T * (i + 1) // buckets) for i in range(buckets)})


def cut(rollout: Rollout, size: int) -> Rollout:
    """The first `size` tokens of every completion."""
    return rollout._replace(
        tokens_PGT=rollout.tokens_PGT[..., :size],
        mask_PGT=rollout.mask_PGT[..., :size],
        logp_PGT=rollout.logp_PGT[..., :size],
    )


@partial(jax.jit, static_argnames=("model", "sampling", "with_entropy", "chunk"))
def score(
    model: LanguageModel,
    params: Params,
    rollout: Rollout,
    *,
    sampling: Sampling = Sampling(),
    with_entropy: bool = False,
    chunk: int | None = None,
) -> tuple[Array, Array | None]:
    """Log-probabilities (and entropies) of a rollout under `params`, without gradient: π_ref, or a
    fixed π_old.
    """
    return completion_scores(
        model,
        params,
        rollout.prompts,
        rollout.tokens_PGT,
        rollout.mask_PGT,
        token_index_PN=rollout.token_index_PN,
        sampling=sampling,
        with_entropy=with_entropy,
        chunk=chunk,
    )


@partial(jax.jit, static_argnames=("objective",))
def assemble(objective: Objective, rollout: Rollout, reward_PG: Array, **fields: Any) -> Batch:
    """The batch that the train step takes: advantages of every group, the sampler's
    log-probabilities as π_old.

    `reward_PG` holds NaN where a completion cannot be scored. `fields` are further fields of
    `Sample` that the objective reads (`ref_logp_T`, `reward_T`, `entropy_T`, `old_value_T`, `age`,
    ...), with their leading axes P, G. The objective's `prepare` then sees the whole batch once.
    """
    samples = Sample(
        mask_T=rollout.mask_PGT,
        old_logp_T=rollout.logp_PGT,
        sampler_logp_T=rollout.logp_PGT,
        stopped=rollout.stopped_PG,
        adv=batch_advantages(objective, reward_PG),
    )._replace(**fields)
    if objective.prepare is not None:
        samples = objective.prepare(samples)
    return Batch(rollout, samples)


class GatheredScores(NamedTuple):
    """What every process knows of all completions: their scores, their lengths (as masks), which
    were stopped.
    """

    reward_PG: np.ndarray
    reward_PGN: np.ndarray
    steps_PGN: list
    stopped_PG: np.ndarray
    mask_PGT: np.ndarray

    def at(self, rows: np.ndarray) -> "GatheredScores":
        """Of some of the prompts."""
        return GatheredScores(
            *([part[i] for i in rows] if isinstance(part, list) else part[rows] for part in self)
        )


def untold(rollout: Rollout, functions: int, held: np.ndarray) -> tuple[Rollout, GatheredScores]:
    """What the host holds of a rollout of shapes and is told by so many rewards: nothing drawn,
    nothing scorable.
    """
    drawn = jax.tree.map(lambda x: np.zeros((len(held), *x.shape[1:]), x.dtype), rollout)
    P, G, T = rollout.mask_PGT.shape
    steps = [None] * functions
    reward_PGN = np.full((P, G, functions), np.nan)
    mask_PGT = np.zeros((P, G, T), bool)
    return drawn, GatheredScores(
        reward_PGN[..., 0], reward_PGN, [[steps] * G] * P, mask_PGT.any(-1), mask_PGT
    )


def masks_together(mine: Rollout, own: np.ndarray) -> np.ndarray:
    """The masks of all prompts' completions, `[P, G, T]`, from those of each process, `mine` of the
    prompts `own`.
    """
    (length_PG,) = _of_all(own, lambda: [mine.mask_PGT.sum(-1)])
    return np.arange(mine.mask_PGT.shape[-1]) < np.stack(length_PG)[..., None]


def _of_all(own: np.ndarray, found: Callable[[], Sequence]) -> list[tuple]:
    """What processes `found` of their `own` prompts, each a list of them: of all prompts, in their
    order.
    """
    rows = chain(*run_and_gather(lambda: list(zip(own, *found(), strict=True)) if len(own) else []))
    _, *columns = zip(*sorted(rows, key=itemgetter(0)), strict=True)
    return columns


def score_and_gather(
    judge: Callable[[], Scores], mine: Rollout, own: np.ndarray, mask_PGT: np.ndarray
) -> GatheredScores:
    """Each process scores its own completions, `mine` of the prompts `own`, and hears of all
    others.

    A reward that raises on one process raises on all, before any of them has begun the update.
    """

    def scored() -> tuple:
        scores = judge()
        return scores.reward_PG, scores.reward_PGN, scores.steps_PGN, mine.stopped_PG

    reward_PG, reward_PGN, steps_PGN, stopped_PG = _of_all(own, scored)
    return GatheredScores(
        np.stack(reward_PG), np.stack(reward_PGN), list(steps_PGN), np.stack(stopped_PG), mask_PGT
    )
