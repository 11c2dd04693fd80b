"""From what was sampled to what an update takes: trimming, the host's view, scores, the batch.

Only tokens, masks and rewards cross to the host. Of several processes each decodes and scores its
own prompts; what all must know (lengths, rewards) is exchanged and small.

Left out on purpose: which prompts (see `stages`), and the update (see `train_step`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.inference.logprobs import completion_scores
from grpo_jax.inference.text import completion_texts, prompt_texts, reward_columns, with_messages
from grpo_jax.inference.tokenizer import Tokenizer
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.objectives import Objective, batch_advantages, objective_at
from grpo_jax.options import Sampling, Scoring
from grpo_jax.parallel.processes import run_and_gather
from grpo_jax.rewards import Scores, reward_functions, score
from grpo_jax.tasks import Task
from grpo_jax.types import Array, Batch, Params, Prompts, Rollout, Sample


class HostRollout(NamedTuple):
    """What the host sees of a sampled batch.

    `rows` and `tokens_PGT` are those of this process: rows of the prompts that it owns, tokens of
    the prompts that lie on its devices (`local_rows`, of which `owned_rows` are a part).
    `mask_PGT` and `stopped_PG` are those of all prompts.
    """

    rows: list[Mapping[str, Any]]
    tokens_PGT: np.ndarray
    mask_PGT: np.ndarray
    stopped_PG: np.ndarray
    local_rows: np.ndarray
    owned_rows: np.ndarray

    def owned(self) -> Rollout:
        """The completions of the prompts that this process owns: tokens, masks and stops."""
        mine = np.isin(self.local_rows, self.owned_rows)
        masks = self.mask_PGT[self.owned_rows]
        stops = self.stopped_PG[self.owned_rows]
        return Rollout(None, self.tokens_PGT[mine], masks, None, stops)

    def local(self) -> Rollout:
        """The completions of the prompts that lie on this process's devices."""
        masks = self.mask_PGT[self.local_rows]
        return Rollout(None, self.tokens_PGT, masks, None, self.stopped_PG[self.local_rows])


class GatheredScores(NamedTuple):
    """The rewards of all prompts, and the texts of those that this process owns.

    `reward_PG` is the weighted sum of `reward_PGN`, one for each of N reward functions; NaN is
    "cannot be scored". `steps_PGN` holds the steps of process rewards (see `rewards.Scores`).
    `questions` and `texts` are as long; None stands for prompts that another process owns. `names`
    and `weights` are those of the reward functions.
    """

    reward_PG: np.ndarray
    reward_PGN: np.ndarray
    steps_PGN: list
    questions: list[str | None]
    texts: list[list[str] | None]
    names: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()


def rollout_shapes(P: int, G: int, S: int, T: int) -> Rollout:
    """What `generate` returns for P prompts of S tokens with G completions of T, as shapes."""
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
    sizes = lengths(rollout.mask_PGT.shape[-1], buckets)
    return cut(rollout, next(size for size in sizes if size >= longest))


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


@partial(jax.jit, static_argnames=("model", "sampling", "with_entropy", "logit_chunk"))
def infer_logp(
    model: LanguageModel,
    params: Params,
    rollout: Rollout,
    *,
    sampling: Sampling = Sampling(),
    with_entropy: bool = False,
    logit_chunk: int | None = None,
) -> tuple[Array, Array | None]:
    """Log-probabilities (and entropies) of a rollout, without gradient: π_ref, or a fixed π_old."""
    return completion_scores(
        model,
        params,
        rollout.prompts,
        rollout.tokens_PGT,
        rollout.mask_PGT,
        token_index_PN=rollout.token_index_PN,
        sampling=sampling,
        with_entropy=with_entropy,
        chunk=logit_chunk,
    )


@partial(jax.jit, static_argnames=("objective",))
def assemble(
    objective: Objective, rollout: Rollout, reward_PG: Array, state: Any = None, **fields: Any
) -> Batch:
    """The batch that the train step takes: advantages of every group, π_old as it was sampled.

    The objective's `prepare` sees the whole batch once.

    Args:
      objective: what is optimised.
      rollout: prompts and completions.
      reward_PG: rewards, or `[P, N, G]` for an objective of N rewards; NaN cannot be scored.
      state: the objective's own state, where it has one.
      **fields: further fields of `Sample` that the objective reads (`ref_logp_T`, `reward_T`,
        `entropy_T`, `old_logp_T`, `old_value_T`, `age`, …), with their leading axes P, G.
    """
    objective = objective_at(objective, state)
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


def lengths_and_stops(mine: Rollout, owned_rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`mask_PGT` and `stopped_PG` of all prompts, from those of each process's own."""
    told = [mine.mask_PGT.sum(-1), mine.stopped_PG]
    length_PG, stopped_PG = map(np.stack, of_all(owned_rows, lambda: told))
    return np.arange(mine.mask_PGT.shape[-1]) < length_PG[..., None], stopped_PG


def of_all(owned_rows: np.ndarray, found: Callable[[], Sequence]) -> list[tuple]:
    """What processes `found` of their own prompts, each a list of them: of all, in their order.

    Where it raises on one process, it raises on all, before any of them has begun the update.
    """

    def numbered() -> list[tuple]:
        return list(zip(owned_rows, *found(), strict=True)) if len(owned_rows) else []

    _, *columns = zip(*sorted(chain(*run_and_gather(numbered)), key=itemgetter(0)), strict=True)
    return columns


def score_and_gather(
    task: Task, tokenizer: Tokenizer, scoring: Scoring, host: HostRollout
) -> GatheredScores:
    """`Stages.reward`: each process scores its own completions, and hears of all others."""
    owned = host.owned()
    texts = completion_texts(tokenizer, owned)
    questions = prompt_texts(task, host.rows)

    def scored() -> tuple:
        scores = score_rollout(task, scoring, host.rows, questions, texts, owned)
        return scores.reward_PG, scores.reward_PGN, scores.steps_PGN

    reward_PG, reward_PGN, steps_PGN = of_all(host.owned_rows, scored)
    known: list = [[None] * len(reward_PG), [None] * len(reward_PG)]
    for place, question, group in zip(host.owned_rows, questions, texts, strict=True):
        known[0][place], known[1][place] = question, group
    names = tuple(reward_functions(task.reward))
    weights = tuple(scoring.weights or (1.0,) * len(names))
    rewards = np.stack(reward_PG), np.stack(reward_PGN), list(steps_PGN)
    return GatheredScores(*rewards, *known, names, weights)


def take_prompts(rollouts: Sequence[Rollout], index: Sequence[int] | np.ndarray) -> Rollout:
    """The prompts at `index` of several sampled batches, one after another, as one batch.

    For batches as they were sampled, before they are trimmed: those have the same shapes.
    """
    index = np.asarray(index)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts)[index], *rollouts)


def take_scores(
    scores: Sequence[GatheredScores], index: Sequence[int] | np.ndarray
) -> GatheredScores:
    """The scores of those prompts of several batches, one after another."""
    joined = [list(chain(*parts)) for parts in list(zip(*scores, strict=True))[:5]]
    reward_PG, reward_PGN, *lists = ([part[i] for i in index] for part in joined)
    told = scores[0].names, scores[0].weights
    return GatheredScores(np.stack(reward_PG), np.stack(reward_PGN), *lists, *told)


def score_rollout(
    task: Task,
    scoring: Scoring,
    rows: Sequence[dict],
    questions: Sequence[str],
    texts: Sequence[Sequence[str]],
    rollout: Rollout,
) -> Scores:
    """The task's rewards of some completions, for training and evaluation alike."""
    return score(
        task.reward,
        with_messages(task, rows),
        questions,
        texts,
        weights=scoring.weights,
        on_error=scoring.on_error,
        workers=scoring.workers,
        timeout=scoring.timeout,
        columns_PG=reward_columns(rollout),
    )
