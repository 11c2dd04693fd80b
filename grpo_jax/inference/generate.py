"""Completions of prompts: each prompt is encoded once, its group decodes against that cache. Token
ids only.

One `while_loop` that stops when every completion has stopped. The noise of a token depends on the
key, the prompt's index, the sample's index and the token's index alone, so it is the same on any
number of devices.

Left out on purpose: text, rewards, beams, and penalties that would make the sampler's distribution
another one than the trainer's.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from grpo_jax.inference.logprobs import filter_logits, token_logp
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.options import Generation
from grpo_jax.types import Array, Params, Prompts, Rollout


def draw(key: Array, logits_V: Array) -> Array:
    """A token from `softmax(logits)` by inverting its distribution function, in two levels of about
    √V entries.

    Two uniform numbers a token instead of V: one picks a block of tokens by the blocks' sums, one
    picks inside it.
    """
    V = logits_V.shape[0]
    block = 1 << max(1, (V - 1).bit_length() // 2)
    p_V = jnp.exp(logits_V - logits_V.max())
    p_NB = jnp.pad(p_V, (0, -V % block)).reshape(-1, block)

    def pick(u, p):
        # First entry whose cumulative sum passes u · total; rounding never selects an impossible
        # one.
        cumulative = jnp.cumsum(p)
        target = jnp.minimum(u, 1 - 1e-6) * cumulative[-1]
        return jnp.argmax((cumulative > target) & (p > 0))

    u, v = jax.random.uniform(key, (2,))
    row = pick(u, p_NB.sum(1))
    return (row * block + pick(v, p_NB[row])).astype(jnp.int32)


def generate(
    model: LanguageModel,
    params: Params,
    prompts: Prompts,
    key: Array,
    first_prompt: Array | int = 0,
    *,
    generation: Generation = Generation(),
    stop_ids: tuple[int, ...] = (),
    pad_id: int = 0,
) -> Rollout:
    """Samples `generation.group_size` completions of each prompt, at most `max_new_tokens` long.

    A completion ends with the first token in `stop_ids`, which belongs to it: `mask_PGT` covers it,
    and `stopped_PG` is true. Positions after it hold `pad_id` (which may equal a stop id).
    `logp_PGT` is each token's log-probability under the distribution it was drawn from, see
    `options.Sampling`; temperature 0 is greedy.

    Two options of `generation` change what is computed and no token. With `compactions` 3, a group
    of 8 is computed as 8, 6, 4 and 2 completions, each once no prompt has more going; the decoder
    is compiled once more for each. With `decode_slots` n, n completions of a prompt are computed at
    once, and the others wait for the slot of one that has ended (continuous batching): the cache
    holds n completions, and a long one keeps fewer stopped ones in the batch.

    Compiled by itself, or as a part of what the caller compiles.

    Args:
      model: pure functions of one sequence.
      params: the policy's parameters, in the layout of training or as `model.for_decoding` gives.
      prompts: left-padded ids, one row a prompt.
      key: the root of all noise; a token's depends on it and on the indices of prompt, completion
        and token alone.
      first_prompt: the index of the first prompt in the whole batch.
      generation: how many completions of which length, from which distribution.
      stop_ids: the ids that end a completion.
      pad_id: the id that fills what follows.

    Raises:
      OptionError: an option is out of its range.
    """
    options = {"generation": generation.check(), "stop_ids": tuple(stop_ids), "pad_id": pad_id}
    inputs = (params, prompts, key, first_prompt)
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(inputs))
    return (_generate if traced else _compiled())(model, *inputs, **options)


def trace(
    model: LanguageModel,
    params: Params,
    prompts: Prompts,
    key: Array,
    first_prompt: Array | int = 0,
    *,
    generation: Generation = Generation(),
    stop_ids: tuple[int, ...] = (),
    pad_id: int = 0,
) -> jax.stages.Traced:
    """`generate.trace(...)`: the program of a call, not lowered yet, as of any jitted function."""
    options = {"generation": generation.check(), "stop_ids": tuple(stop_ids), "pad_id": pad_id}
    return _compiled().trace(model, params, prompts, key, first_prompt, **options)


def lower(*args, **options) -> jax.stages.Lowered:
    """`generate.lower(...)`: the program of a call, not compiled yet, as of any jitted function."""
    return trace(*args, **options).lower()


generate.trace = trace
generate.lower = lower


@cache
def _compiled() -> Callable:
    static = ("model", "generation", "stop_ids", "pad_id")
    return jax.jit(_generate, static_argnames=static, compiler_options=_compiler_options())


def _compiler_options() -> dict[str, str | bool]:
    """Options for CPUs: products of few rows by Eigen, the small ones of attention by code made for
    their shape.

    Measured with jax 0.10: [16, 576] x [576, 1536] takes 0.32 ms with Eigen and 0.48 ms with XLA's
    own choice of library; attention of 32 completions to their own 128 keys takes 0.75 ms a layer
    compiled and 1.4 ms in one call of Eigen after another. Large products use all threads with the
    second option, too.
    """
    options = {"xla_cpu_experimental_ynn_fusion_type": "", "xla_cpu_multi_thread_eigen": False}
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda x: x, compiler_options=options)(0.0)
    except jax.errors.JaxRuntimeError:  # a version of XLA without this option
        return {}
    return options


class Drawn(NamedTuple):
    """What has been drawn of every completion so far."""

    tokens_PGT: Array
    logp_PGT: Array
    length_PG: Array
    stopped_PG: Array


class Slots(NamedTuple):
    """Where decoding stands. Each prompt has a few slots (axis g), each holds a completion."""

    steps: Array | int  # token steps made so far
    index_Pg: Array | None  # the token that each slot decodes next; None: all decode the same one
    drawn: Drawn
    own: Any  # the caches of the completions in the slots
    sample_Pg: Array  # which of its prompt's completions each slot holds
    next_P: Array  # the first completion of each prompt that still waits for a slot


class Sampler(NamedTuple):
    """What every token step reads, and no token step changes."""

    model: LanguageModel
    weights: Any
    cache: Any
    keys_PG: Array
    generation: Generation
    stop: Array
    pad_id: int
    lone_prompt: bool

    @property
    def refills(self) -> bool:
        """Whether completions wait for slots: then each slot is at a token of its own."""
        return self.generation.slots < self.generation.group_size


def _generate(
    model: LanguageModel,
    params: Params,
    prompts: Prompts,
    key: Array,
    first_prompt: Array | int,
    *,
    generation: Generation,
    stop_ids: tuple[int, ...],
    pad_id: int,
) -> Rollout:
    chex.assert_rank([prompts.tokens_PS, prompts.mask_PS], 2)
    P = prompts.tokens_PS.shape[0]
    if model.cast is not None:
        params = model.cast(params)
    hidden_PSD, cache = jax.vmap(partial(model.prefill, params))(*prompts)
    sampler = Sampler(
        model=model,
        weights=model.for_decoding(params),
        cache=cache,
        keys_PG=sample_keys(key, first_prompt, P, generation.group_size),
        generation=generation,
        stop=jnp.asarray(stop_ids, jnp.int32),
        pad_id=pad_id,
        lone_prompt=P == 1,
    )
    drawn = _decode_all(sampler, _first_slots(sampler, hidden_PSD[:, -1:, :]))
    mask_PGT = jnp.arange(generation.max_new_tokens) < drawn.length_PG[..., None]
    return Rollout(prompts, drawn.tokens_PGT, mask_PGT, drawn.logp_PGT, drawn.stopped_PG)


def sample_keys(key: Array, first_prompt: Array | int, prompts: int, group_size: int) -> Array:
    """A key for each completion, from its prompt's index in the whole batch and its own."""
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    key_P = fold(key, first_prompt + jnp.arange(prompts))
    return jax.vmap(fold, in_axes=(0, None))(key_P, jnp.arange(group_size))


take = jax.vmap(lambda x_G, index_g: x_G[index_g])  # of every prompt, some of its completions


def _choose(s: Sampler, hidden_PgD: Array, index_Pg: Array, sample_Pg: Array) -> tuple:
    """Token number `index` of the completions in the slots, with its log-probability."""
    sampling = s.generation.sampling
    logits_PgV = filter_logits(s.model.decode_logits(s.weights, hidden_PgD), sampling)
    if sampling.temperature == 0:
        token_Pg = jnp.argmax(logits_PgV, -1).astype(jnp.int32)
    else:
        at_token = jax.vmap(jax.vmap(lambda k, index, x: draw(jax.random.fold_in(k, index), x)))
        token_Pg = at_token(take(s.keys_PG, sample_Pg), index_Pg, logits_PgV)
    return token_Pg, token_logp(logits_PgV, token_Pg)


def _write(s: Sampler, drawn: Drawn, token_Pg, logp_Pg, index_Pg, sample_Pg) -> Drawn:
    """One more token of the completions in the slots; those that have ended get padding."""
    stopped_Pg = take(drawn.stopped_PG, sample_Pg)
    ended_Pg = stopped_Pg | (index_Pg >= s.generation.max_new_tokens)
    token_Pg = jnp.where(ended_Pg, s.pad_id, token_Pg)
    logp_Pg = jnp.where(ended_Pg, 0.0, logp_Pg)
    put = jax.vmap(lambda x_GT, sample, index, x: x_GT.at[sample, index].set(x, mode="drop"))
    add = jax.vmap(lambda length_G, sample, more: length_G.at[sample].add(more))
    mark = jax.vmap(lambda stopped_G, sample, now: stopped_G.at[sample].set(now))
    now_stopped_Pg = stopped_Pg | (~ended_Pg & jnp.isin(token_Pg, s.stop))
    return Drawn(
        tokens_PGT=put(drawn.tokens_PGT, sample_Pg, index_Pg, token_Pg),
        logp_PGT=put(drawn.logp_PGT, sample_Pg, index_Pg, logp_Pg),
        length_PG=add(drawn.length_PG, sample_Pg, ~ended_Pg),
        stopped_PG=mark(drawn.stopped_PG, sample_Pg, now_stopped_Pg),
    )


def _first_slots(s: Sampler, hidden_P1D: Array) -> Slots:
    """Every completion's first token, and the first completions in their slots.

    First tokens are drawn for all completions at once, so that one that takes a slot later only
    needs its last token and no hidden state of its prompt.
    """
    generation = s.generation
    P, G, T, g = len(hidden_P1D), generation.group_size, generation.max_new_tokens, generation.slots
    nothing = Drawn(
        tokens_PGT=jnp.full((P, G, T), s.pad_id, jnp.int32),
        logp_PGT=jnp.zeros((P, G, T), jnp.float32),
        length_PG=jnp.zeros((P, G), jnp.int32),
        stopped_PG=jnp.zeros((P, G), bool),
    )
    hidden_PGD = jnp.broadcast_to(hidden_P1D, (P, G, hidden_P1D.shape[-1]))
    sample_PG = jnp.broadcast_to(jnp.arange(G), (P, G))
    zero_PG = jnp.zeros((P, G), jnp.int32)
    token_PG, logp_PG = _choose(s, hidden_PGD, zero_PG, sample_PG)
    drawn = _write(s, nothing, token_PG, logp_PG, zero_PG, sample_PG)
    # A lone prompt's caches have no axis of prompts: with one of size 1, XLA's CPU back end copies
    # them at every token.
    axes = (g,) if s.lone_prompt else (P, g)
    own = jax.tree.map(lambda a: jnp.broadcast_to(a, (*axes, *a.shape)), s.model.empty(T))
    index_Pg = jnp.ones((P, g), jnp.int32) if s.refills else None
    return Slots(0, index_Pg, drawn, own, sample_PG[:, :g], jnp.full(P, g))


def _index(s: Sampler, slots: Slots) -> Array:
    """Which token of its completion each slot decodes: `[P, g]`, or one number for all."""
    return slots.index_Pg if s.refills else 1 + slots.steps


def _ended(s: Sampler, slots: Slots) -> Array:
    """Which slots hold a completion that has ended."""
    stopped_Pg = take(slots.drawn.stopped_PG, slots.sample_Pg)
    return stopped_Pg | (_index(s, slots) >= s.generation.max_new_tokens)


def _decode(s: Sampler, own: Any, index: Array, last_Pg: Array) -> tuple[Array, Any]:
    """One pass of the decoder over the last token of every slot: hidden states and grown caches."""
    each = 0 if s.refills else None
    in_slots = jax.vmap(s.model.decode, in_axes=(None, None, 0, each, 0))
    if not s.lone_prompt:
        in_prompts = jax.vmap(in_slots, in_axes=(None, 0, 0, each, 0))
        return in_prompts(s.weights, s.cache, own, index, last_Pg)
    one = partial(jax.tree.map, lambda a: a[0])
    index_g = one(index) if s.refills else index
    hidden_gD, own = in_slots(s.weights, one(s.cache), own, index_g, one(last_Pg))
    return hidden_gD[None], own


def _token_step(s: Sampler, slots: Slots) -> Slots:
    """One more token in every slot; free slots are filled with completions that wait."""
    index = _index(s, slots)
    index_Pg = jnp.broadcast_to(index, slots.sample_Pg.shape)
    before = jax.vmap(lambda tokens_GT, sample, at: tokens_GT[sample, at - 1])
    last_Pg = before(slots.drawn.tokens_PGT, slots.sample_Pg, index_Pg)
    hidden_PgD, own = _decode(s, slots.own, index - 1, last_Pg)
    token_Pg, logp_Pg = _choose(s, hidden_PgD, index_Pg, slots.sample_Pg)
    drawn = _write(s, slots.drawn, token_Pg, logp_Pg, index_Pg, slots.sample_Pg)
    slots = slots._replace(steps=1 + slots.steps, drawn=drawn, own=own)
    return _refill(s, slots._replace(index_Pg=index + 1)) if s.refills else slots


def _refill(s: Sampler, slots: Slots) -> Slots:
    """Gives the slots of ended completions to those that wait, which begin with their token 1.

    Their caches hold what the ended ones left: every place is written before it is attended to.
    """
    free_Pg = _ended(s, slots)
    waiting_Pg = slots.next_P[:, None] + jnp.cumsum(free_Pg, axis=1) - 1
    free_Pg &= waiting_Pg < s.generation.group_size
    return slots._replace(
        index_Pg=jnp.where(free_Pg, 1, slots.index_Pg),
        sample_Pg=jnp.where(free_Pg, waiting_Pg, slots.sample_Pg),
        next_P=slots.next_P + free_Pg.sum(1),
    )


def _decode_all(s: Sampler, slots: Slots) -> Drawn:
    """Token steps until every completion has ended, in slots that become fewer as they do."""
    generation = s.generation
    parts = generation.compactions + 1
    sizes = {-(-generation.slots * part // parts) for part in range(1, parts + 1)}
    for fewer in (*sorted(sizes, reverse=True)[1:], 0):
        going = partial(_more_than, fewer, s)
        slots = jax.lax.while_loop(going, partial(_token_step, s), slots)
        slots = _compacted(s, slots, fewer)
    return slots.drawn


def _more_than(fewer: int, s: Sampler, slots: Slots) -> Array:
    """Whether some prompt needs more than `fewer` slots."""
    generation = s.generation
    rounds = -(-generation.group_size // generation.slots)
    longest = rounds * (generation.max_new_tokens - 1)  # if no completion stops before its limit
    busy_P = jnp.sum(~_ended(s, slots), axis=1)
    waits_P = (slots.next_P < generation.group_size) * generation.slots
    # The bound follows from the rest; it is said outright for those who count the loop's steps.
    return (slots.steps < longest) & (jnp.max(busy_P + waits_P) > fewer)


def _compacted(s: Sampler, slots: Slots, fewer: int) -> Slots:
    """The completions that go on, in `fewer` slots of each prompt."""
    order_Pg = jnp.argsort(_ended(s, slots), axis=1, stable=True)[:, :fewer]

    def kept(x):
        return take(x, order_Pg)

    def kept_cache(x):
        return x[order_Pg[0]] if s.lone_prompt else kept(x)

    return slots._replace(
        index_Pg=jax.tree.map(kept, slots.index_Pg),
        own=jax.tree.map(kept_cache, slots.own),
        sample_Pg=kept(slots.sample_Pg),
    )
