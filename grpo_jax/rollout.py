"""Prompts → completions → rewards → advantages → Batch: where device and host meet.

Only tokens, masks and rewards cross to the host. Left out on purpose: deciding which prompts (see `loop`), and the
update (see `train_step`).
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.devices import SINGLE, Devices
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.objectives import Objective, batch_advantages, batch_loss, diagnostics
from grpo_jax.policy import Sampling, completion_scores
from grpo_jax.processes import together
from grpo_jax.rewards import Scores
from grpo_jax.tasks import Task
from grpo_jax.tokenizer import Tokenizer, pad_prompts
from grpo_jax.types import Array, Batch, Mean, Params, Prompts, Rollout, Sample


def rollout_shapes(prompts: int, group_size: int, prompt_length: int, max_new_tokens: int) -> Rollout:
    """What `sampler.generate` returns, as shapes."""
    P, G, S, T, array = prompts, group_size, prompt_length, max_new_tokens, jax.ShapeDtypeStruct
    return Rollout(
        Prompts(array((P, S), jnp.int32), array((P, S), bool)),
        array((P, G, T), jnp.int32), array((P, G, T), bool), array((P, G, T), jnp.float32), array((P, G), bool),
    )  # fmt: skip


def encode(tokenizer: Tokenizer, prompt: Callable, rows: Sequence[dict], *, length: int | None = None) -> Prompts:
    """The rows' prompts as left-padded ids; a prompt longer than `length` is an error that names the row."""
    return pad_prompts([tokenizer.render(prompt(row)) for row in rows], tokenizer.pad_id, length=length)


def prompt_texts(task: Task, rows: Sequence[dict]) -> list[str]:
    """What a reward receives as `prompt`: the contents of the messages, one a line."""
    return ["\n".join(message["content"] for message in task.prompt(row)) for row in rows]


def completion_texts(tokenizer: Tokenizer, rollout: Rollout) -> list[list[str]]:
    """The completions as text, `[P][G]`, without the stop token that ended them."""
    tokens, mask, stopped = (np.asarray(x) for x in (rollout.tokens_PGT, rollout.mask_PGT, rollout.stopped_PG))
    length = mask.sum(-1) - stopped
    return [
        [tokenizer.decode(ids[:n]) for ids, n in zip(*group, strict=True)] for group in zip(tokens, length, strict=True)
    ]


def trim(rollout: Rollout, buckets: int) -> Rollout:
    """Cuts T to the smallest of `buckets` equal fractions of it that holds every completion.

    What is cut off is padding, so nothing changes but the cost; at most `buckets` shapes are ever compiled.
    """
    longest = int(jnp.max(rollout.mask_PGT.sum(-1)))
    return cut(rollout, next(s for s in lengths(rollout.mask_PGT.shape[-1], buckets) if s >= longest))


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


FRACTIONS = (0.5, 0.625, 0.75)  # of a group's padded tokens, that an update is compiled for


def pack(rollout: Rollout, fractions: Sequence[float] = FRACTIONS) -> Rollout:
    """Lists the trained tokens of each prompt, so that an update computes them and not the padding between them.

    The smallest of `fractions` of G·T that holds every prompt's tokens is taken; if none does, all are computed. Values
    and gradients stay the same; at most `len(fractions) + 1` shapes are compiled.
    """
    mask = np.asarray(rollout.mask_PGT)
    P, places = len(mask), mask[0].size
    flat = mask.reshape(P, places)
    size = _packed_size(places, flat.sum(1).max(), fractions)
    if size is None:
        return rollout
    places_PN = np.full((P, size), places, np.int32)
    for row, own in zip(places_PN, flat, strict=True):
        found = np.flatnonzero(own)
        row[: len(found)] = found
    return rollout._replace(places_PN=places_PN)


def packings(rollout: Rollout) -> list[Rollout]:
    """All that `pack` may make of a rollout of shapes, in shapes."""
    P, *group = rollout.mask_PGT.shape
    sizes = packed_sizes(math.prod(group))
    return [rollout] + [rollout._replace(places_PN=jax.ShapeDtypeStruct((P, size), jnp.int32)) for size in sizes]


def packed_sizes(places: int, fractions: Sequence[float] = FRACTIONS) -> list[int]:
    """The numbers of tokens of a group of `places` that `pack` may list."""
    return sorted({s for f in fractions if (s := math.ceil(places * f)) < places})


def _packed_size(places: int, needed: int, fractions: Sequence[float]) -> int | None:
    return next((s for s in packed_sizes(places, fractions) if needed <= s), None)


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
    """Log-probabilities (and entropies) of a rollout under `params`, without gradient: π_ref, or a fixed π_old."""
    return completion_scores(
        model, params, rollout.prompts, rollout.tokens_PGT, rollout.mask_PGT,
        places_PN=rollout.places_PN, sampling=sampling, with_entropy=with_entropy, chunk=chunk,
    )  # fmt: skip


@partial(jax.jit, static_argnames=("objective",))
def assemble(objective: Objective, rollout: Rollout, reward_PG: Array, **fields: Any) -> Batch:
    """The batch that the train step takes: advantages of every group, the sampler's log-probabilities as π_old.

    `reward_PG` holds NaN where a completion cannot be scored. `fields` are further fields of `Sample` that the
    objective reads (`ref_logp_T`, `reward_T`, `entropy_T`, `old_value_T`, `age`, ...), with their leading axes P, G.
    The objective's `prepare` then sees the whole batch once.
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


@cache
def idle_is_inert(objective: Objective) -> bool:
    """Whether a completion of advantage 0 has no gradient: true without a KL term, an entropy bonus or a value loss.

    Found by differentiating the loss of such a completion in everything that depends on the parameters.
    """
    x = lambda seed: jnp.sin(jnp.arange(6.0) + seed)[None, None]
    mask = jnp.ones((1, 1, 6), bool)
    fixed = {name: x(i) for i, name in enumerate(Sample._fields) if name not in ("adv", "stopped", "age", "mask_T")}
    fixed |= {"stopped": jnp.ones((1, 1), bool), "age": jnp.zeros((1, 1), jnp.int32)}
    fixed["group_tokens"] = jnp.full((1, 1), 6, jnp.int32)

    def total(logp, entropy, value):
        samples = Sample(mask_T=mask, adv=jnp.zeros((1, 1)), **fixed)._replace(entropy_T=entropy, value_T=value)
        return batch_loss(objective, logp, samples).total

    gradients = jax.grad(total, argnums=(0, 1, 2))(x(0.3) - 2, x(0.7) + 2, x(0.9))
    return not any(np.any(np.asarray(g) != 0) for g in gradients)


def _group_means(objective: Objective, samples_PG: Sample) -> dict[str, Mean]:
    """The loss and the diagnostics of every group at π_old."""

    def one(samples_G):
        samples = jax.tree.map(lambda x: x[None], samples_G)
        logp = samples.old_logp_T
        return {"loss": batch_loss(objective, logp, samples)} | diagnostics(objective, logp, samples)

    return jax.vmap(one)(samples_PG)


def leave_out_idle(objective: Objective, batch: Batch, sizes: Sequence[int], devices: Devices = SINGLE) -> Batch:
    """The batch without groups whose advantages are all 0, where that changes no gradient (see `idle_is_inert`).

    As many prompts stay as the smallest of `sizes` that holds all others and is spread evenly over `devices`; the
    weight that the left-out groups have in the loss's normaliser stays, in `Batch.rest`, so that the gradient is that
    of the whole batch. Their diagnostics are those at π_old. A packed batch is packed anew. Returns the batch as it is
    where nothing can be left out.
    """
    if not idle_is_inert(objective):
        return batch
    busy, tokens = map(np.asarray, _count(devices)(batch.samples.adv, batch.samples.mask_T))
    fits = [s for s in _smaller(batch, sizes, devices) if s >= max(busy.sum(), 1)]
    if not fits:
        return batch
    size = min(fits)
    order = np.argsort(~busy, kind="stable")
    kept, left = np.sort(order[:size]), np.sort(order[size:])
    places = batch.rollout.places_PN
    packed = None if places is None else _packed_size(batch.samples.mask_T[0].size, tokens[kept].max(), FRACTIONS)
    return _part(objective, batch, kept, left, packed, devices)


def without_idle(objective: Objective, batch: Batch, sizes: Sequence[int], devices: Devices) -> list[Batch]:
    """All that `leave_out_idle` may make of a batch of shapes, itself included, in shapes (see `devices.listed`)."""
    if not idle_is_inert(objective):
        return [batch]
    _count(devices)(batch.samples.adv, batch.samples.mask_T)
    (P, *_), places = (mask := batch.samples.mask_T).shape, batch.rollout.places_PN
    return [batch] + [
        _part(objective, batch, np.arange(size), np.arange(P - size), packed, devices)
        for size in _smaller(batch, sizes, devices)
        for packed in ([None] if places is None else packed_sizes(math.prod(mask.shape[1:])))
        if packed is None or packed <= places.shape[1]
    ]


def _smaller(batch: Batch, sizes: Sequence[int], devices: Devices) -> list[int]:
    return [s for s in sizes if s < batch.samples.mask_T.shape[0] and s % devices.parts == 0]


def _count(devices: Devices) -> Callable:
    # As a partial it is one program for all calls, see `Devices`.
    return devices.whole_batch(partial(_busy_and_tokens), ("rows", "rows"), ("whole", "whole"))


def _part(objective: Objective, batch: Batch, kept, left, packed: int | None, devices: Devices) -> Batch:
    program = partial(_part_and_rest, objective, packed)
    part, rest = devices.whole_batch(program, ("rows", "whole", "whole"), ("rows", "whole"))(batch, kept, left)
    return part._replace(rest=rest)


@jax.jit
def _busy_and_tokens(adv: Array, mask_PGT: Array) -> tuple[Array, Array]:
    """Of each prompt, whether any advantage is not 0, and the number of its completions' tokens."""
    return (adv.reshape(len(adv), -1) != 0).any(1), mask_PGT.sum((1, 2))


@partial(jax.jit, static_argnames=("objective", "packed"))
def _part_and_rest(objective: Objective, packed: int | None, batch: Batch, kept: Array, left: Array):
    rest = jax.tree.map(lambda x: x[left].sum(), _group_means(objective, batch.samples))
    part = jax.tree.map(lambda x: x[kept], batch)
    if packed is not None:  # the listed places stand before the padding
        part = part._replace(rollout=part.rollout._replace(places_PN=part.rollout.places_PN[:, :packed]))
    return part, rest


def step_rewards(
    tokenizer: Tokenizer, rollout: Rollout, scores: Scores, weights: Sequence[float] | None = None
) -> np.ndarray:
    """`reward_PGT`: the weighted reward at each token where a step ends, NaN where none does.

    A step that ends after `end` characters is placed on the token that completes them (the last one of a character that
    takes several tokens); a reward without steps on the last token. A completion that cannot be scored has no step.
    """
    tokens, length = np.asarray(rollout.tokens_PGT), np.asarray(rollout.mask_PGT).sum(-1)
    reward_PGT = np.full(tokens.shape, np.nan, np.float32)
    count = scores.reward_PGN.shape[-1]
    weight_N = np.ones(count) if weights is None else np.asarray(weights, float)
    for p, g, n in np.ndindex(scores.reward_PGN.shape):
        if np.isnan(scores.reward_PGN[p, g, n]):
            continue
        last, steps = length[p, g] - 1, scores.steps_PGN[p][g][n]
        if steps is None:
            placed = [(last, scores.reward_PGN[p, g, n])]
        else:
            ends, values = zip(*steps, strict=True)
            placed = zip(_places(tokenizer, tokens[p, g, : last + 1], ends), values, strict=True)
        for t, reward in placed:
            reward_PGT[p, g, t] = np.nan_to_num(reward_PGT[p, g, t]) + weight_N[n] * reward
    return reward_PGT


def _places(tokenizer: Tokenizer, ids: np.ndarray, ends: Sequence[int]) -> list[int]:
    """For each `end`, the first token after which the completion's first `end` characters are written for good.

    A prefix of the tokens may decode to as many characters and still not to those: a cut character reads as U+FFFD.
    """
    written = [tokenizer.decode(ids[: t + 1]) for t in range(len(ids))]
    whole, last = written[-1], len(ids) - 1
    return [next((t for t, text in enumerate(written) if text[:end] == whole[:end]), last) for end in ends]


def group_statistics(rollout: Rollout, reward_PG: np.ndarray) -> dict[str, float]:
    """What a person watches, from the host's copies: rewards, lengths, and groups that teach nothing.

    `reward` and `reward_std` are over the scorable completions, NaN if there is none; `no_signal` is the share of
    groups in which all rewards are equal or at most one is known; `truncated` the share cut off by the length limit.
    """
    known = ~np.isnan(reward_PG)
    length = np.asarray(rollout.mask_PGT).sum(-1)
    top, low = np.where(known, reward_PG, -np.inf).max(1), np.where(known, reward_PG, np.inf).min(1)
    spread = np.where(known.any(1), top - low, 0.0)
    mean = np.abs(np.where(known, reward_PG, 0).sum(1) / np.maximum(known.sum(1), 1))
    return {
        "reward": float(reward_PG[known].mean()) if known.any() else float("nan"),
        "reward_std": float(reward_PG[known].std()) if known.any() else float("nan"),
        "no_signal": float((spread <= 1e-6 * np.maximum(1, mean)).mean()),
        "unscorable": float((~known).mean()),
        "length": float(length.mean()),
        "truncated": float(1 - np.asarray(rollout.stopped_PG).mean()),
        "tokens": int(length.sum()),
    }


class Told(NamedTuple):
    """What every process knows of all completions: their scores, their lengths (as masks), which were stopped."""

    reward_PG: np.ndarray
    reward_PGN: np.ndarray
    steps_PGN: list
    stopped_PG: np.ndarray
    mask_PGT: np.ndarray

    def at(self, rows: np.ndarray) -> "Told":
        """Of some of the prompts."""
        return Told(*([part[i] for i in rows] if isinstance(part, list) else part[rows] for part in self))


def untold(rollout: Rollout, functions: int, held: np.ndarray) -> tuple[Rollout, Told]:
    """What the host holds of a rollout of shapes and is told by so many rewards: nothing drawn, nothing scorable."""
    drawn = jax.tree.map(lambda x: np.zeros((len(held), *x.shape[1:]), x.dtype), rollout)
    (P, G, T), steps = rollout.mask_PGT.shape, [None] * functions
    reward_PGN, mask_PGT = np.full((P, G, functions), np.nan), np.zeros((P, G, T), bool)
    return drawn, Told(reward_PGN[..., 0], reward_PGN, [[steps] * G] * P, mask_PGT.any(-1), mask_PGT)


def masks_together(mine: Rollout, own: np.ndarray) -> np.ndarray:
    """The masks of all prompts' completions, `[P, G, T]`, from those of each process, `mine` of the prompts `own`."""
    (length_PG,) = _of_all(own, lambda: [mine.mask_PGT.sum(-1)])
    return np.arange(mine.mask_PGT.shape[-1]) < np.stack(length_PG)[..., None]


def _of_all(own: np.ndarray, found: Callable[[], Sequence]) -> list[tuple]:
    """What processes `found` of their `own` prompts, each a list of them: of all prompts, in their order."""
    rows = chain(*together(lambda: list(zip(own, *found(), strict=True)) if len(own) else []))
    _, *columns = zip(*sorted(rows, key=itemgetter(0)), strict=True)
    return columns


def scored_together(judge: Callable[[], Scores], mine: Rollout, own: np.ndarray, mask_PGT: np.ndarray) -> Told:
    """Each process scores its own completions, `mine` of the prompts `own`, and hears of all others.

    A reward that raises on one process raises on all, before any of them has begun the update.
    """

    def scored() -> tuple:
        scores = judge()
        return scores.reward_PG, scores.reward_PGN, scores.steps_PGN, mine.stopped_PG

    reward_PG, reward_PGN, steps_PGN, stopped_PG = _of_all(own, scored)
    return Told(np.stack(reward_PG), np.stack(reward_PGN), list(steps_PGN), np.stack(stopped_PG), mask_PGT)
