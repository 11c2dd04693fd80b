"""Completions of prompts: each prompt is encoded once, its group decodes against that cache. Token
ids only.

One `while_loop` that stops when every completion has stopped. The noise of a token depends on the
key, the prompt's index, the sample's index and the token's index alone, so it is the same on any
number of devices.

Left out on purpose: text, rewards, beams, and penalties that would make the sampler's distribution
another one than the trainer's.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp

from grpo_jax.inference.logprobs import Sampling, filter_logits, token_logp
from grpo_jax.models.language_model import LanguageModel
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
    group_size: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop_ids: tuple[int, ...] = (),
    pad_id: int = 0,
    compact: int = 0,
    decode_slots: int | None = None,
) -> Rollout:
    """`group_size` completions of each prompt, at most `max_new_tokens` long.

    A completion ends with the first token in `stop_ids`, which belongs to it: `mask_PGT` covers it,
    and `stopped_PG` is true. Positions after it hold `pad_id` (which may equal a stop id).
    `logp_PGT` is each token's log-probability under the distribution it was drawn from, see
    `policy.Sampling`; temperature 0 is greedy. `first_prompt` is the index of the first prompt in
    the whole batch, for callers that hold a part of it.

    `compact` is in how many equal steps the batch may shrink as completions stop: with 3, a group
    of 8 is computed as 8, 6, 4 and 2 of them, each once no prompt has more going. It changes no
    token, and compiles the decoder once more each time.

    `decode_slots` is how many completions of a prompt are computed at once, None for all of them:
    the others wait, and take the seat of one that has ended (continuous batching). It changes no
    token either; the cache holds `decode_slots` and not `group_size` completions of a prompt, and a
    long completion keeps fewer stopped ones in the batch.

    Compiled by itself, or as a part of what the caller compiles.
    """
    options = _checked(
        group_size,
        max_new_tokens,
        temperature,
        top_k,
        top_p,
        min_p,
        stop_ids,
        pad_id,
        compact,
        decode_slots,
    )
    inputs = (params, prompts, key, first_prompt)
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(inputs))
    return (_generate if traced else _compiled())(model, *inputs, **options)


def lower(
    model: LanguageModel, params: Params, prompts: Prompts, key: Array, first_prompt=0, **options
) -> Any:
    """`generate.lower(...)`: the program of a call, not compiled yet, as of any jitted function."""
    known = inspect.signature(generate).bind(model, params, prompts, key, first_prompt, **options)
    known.apply_defaults()
    return _compiled().lower(*known.args, **_checked(**known.kwargs))


generate.lower = lower


def _checked(
    group_size,
    max_new_tokens,
    temperature,
    top_k,
    top_p,
    min_p,
    stop_ids,
    pad_id,
    compact,
    decode_slots,
) -> dict[str, Any]:
    if group_size < 1 or max_new_tokens < 1:
        raise ValueError(
            f"group_size and max_new_tokens must be at least 1, got {group_size} and {max_new_tokens}"
        )
    if not (isinstance(compact, int) and compact >= 0):
        raise ValueError(f"compact must be an integer of at least 0, got {compact!r}")
    if decode_slots is not None and not (
        isinstance(decode_slots, int) and 1 <= decode_slots <= group_size
    ):
        raise ValueError(
            f"decode_slots must be None or an integer from 1 to group_size ({group_size}), got {decode_slots!r}"
        )
    sampling = Sampling(temperature, top_k, top_p, min_p).checked()
    return {
        "group_size": group_size,
        "max_new_tokens": max_new_tokens,
        "sampling": sampling,
        "stop_ids": tuple(stop_ids),
        "pad_id": pad_id,
        "compact": compact,
        "decode_slots": decode_slots or group_size,
    }


@cache
def _compiled() -> Callable:
    static = (
        "model",
        "group_size",
        "max_new_tokens",
        "sampling",
        "stop_ids",
        "pad_id",
        "compact",
        "decode_slots",
    )
    return jax.jit(_generate, static_argnames=static, compiler_options=_few_rows())


def _few_rows() -> dict[str, str | bool]:
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


def _generate(
    model: LanguageModel,
    params: Params,
    prompts: Prompts,
    key: Array,
    first_prompt: Array | int,
    *,
    group_size: int,
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
    pad_id: int,
    compact: int,
    decode_slots: int,
) -> Rollout:
    chex.assert_rank([prompts.tokens_PS, prompts.mask_PS], 2)
    stop = jnp.asarray(stop_ids, jnp.int32)
    P = prompts.tokens_PS.shape[0]
    T = max_new_tokens

    hidden_PSD, cache = jax.vmap(partial(model.prefill, params))(*prompts)
    weights = model.for_decoding(params)
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys_PG = jax.vmap(fold, in_axes=(0, None))(
        fold(key, first_prompt + jnp.arange(P)), jnp.arange(group_size)
    )

    def choose(hidden_PgD, index_Pg, seat_Pg):
        """Token number `index` of the samples in the decode_slots, with its log-probability."""
        logits = filter_logits(model.decode_logits(weights, hidden_PgD), sampling)
        if sampling.temperature == 0:
            token = jnp.argmax(logits, -1).astype(jnp.int32)
        else:
            noise = lambda k, index, x: draw(jax.random.fold_in(k, index), x)
            token = jax.vmap(jax.vmap(noise))(take(keys_PG, seat_Pg), index_Pg, logits)
        return token, token_logp(logits, token)

    def write(state, token, logp, index_Pg, seat_Pg):
        tokens, logps, length, done = state
        stopped = take(done, seat_Pg)
        ended = stopped | (index_Pg >= T)
        token = jnp.where(ended, pad_id, token)
        at = jax.vmap(
            lambda buffer_GT, seat, index, x: buffer_GT.at[seat, index].set(x, mode="drop")
        )
        tokens = at(tokens, seat_Pg, index_Pg, token)
        logps = at(logps, seat_Pg, index_Pg, jnp.where(ended, 0.0, logp))
        length = jax.vmap(lambda own, seat, more: own.at[seat].add(more))(length, seat_Pg, ~ended)
        stopped |= ~ended & jnp.isin(token, stop)
        done = jax.vmap(lambda own, seat, now: own.at[seat].set(now))(done, seat_Pg, stopped)
        return tokens, logps, length, done

    shape = (P, group_size)
    empty = (
        jnp.full((*shape, T), pad_id, jnp.int32),
        jnp.zeros((*shape, T), jnp.float32),
        jnp.zeros(shape, jnp.int32),
        jnp.zeros(shape, bool),
    )
    hidden = jnp.broadcast_to(hidden_PSD[:, -1:, :], (*shape, hidden_PSD.shape[-1]))
    seat_PG = jnp.broadcast_to(jnp.arange(group_size), shape)
    zero_PG = jnp.zeros(shape, jnp.int32)
    # Every sample's first token is drawn here, so that a sample that takes a seat later only needs
    # its last token.
    state = write(empty, *choose(hidden, zero_PG, seat_PG), zero_PG, seat_PG)
    refill = (
        decode_slots < group_size
    )  # then each seat is at a token of its own; else all are at the same
    each = 0 if refill else None
    in_seats = jax.vmap(model.decode, in_axes=(None, None, 0, each, 0))
    step = jax.vmap(in_seats, in_axes=(None, 0, 0, each, 0))
    alone = P == 1
    if alone:  # its caches have no axis of prompts: with one of size 1, XLA's CPU back end copies them at every token

        def step(weights, cache, own, index, last_Pg):
            one = partial(jax.tree.map, lambda a: a[0])
            hidden_gD, own = in_seats(
                weights, one(cache), own, one(index) if refill else index, one(last_Pg)
            )
            return hidden_gD[None], own

    axes = (decode_slots,) if alone else (P, decode_slots)
    own = jax.tree.map(lambda a: jnp.broadcast_to(a, (*axes, *a.shape)), model.empty(T))

    def ended(state, index, seat_Pg):
        return take(state[3], seat_Pg) | (index >= T)

    def place(steps, index_Pg):
        """Which token of its sample each seat decodes."""
        return index_Pg if refill else 1 + steps

    def body(carry):
        steps, index, state, own, seat_Pg, next_P = carry
        index = place(steps, index)
        index_Pg = jnp.broadcast_to(index, seat_Pg.shape)
        last = jax.vmap(lambda tokens_GT, seat, at: tokens_GT[seat, at - 1])(
            state[0], seat_Pg, index_Pg
        )
        hidden, own = step(weights, cache, own, index - 1, last)
        state = write(state, *choose(hidden, index_Pg, seat_Pg), index_Pg, seat_Pg)
        index = index + 1
        if refill:
            free = ended(state, index, seat_Pg)
            waiting = next_P[:, None] + jnp.cumsum(free, axis=1) - 1
            free &= waiting < group_size
            seat_Pg = jnp.where(free, waiting, seat_Pg)
            index = jnp.where(free, 1, index)
            next_P += free.sum(1)
        return 1 + steps, index if refill else None, state, own, seat_Pg, next_P

    # The samples of a prompt that go on sit in fewer and fewer decode_slots, of a few fixed
    # numbers.
    sizes = sorted(
        {-(-decode_slots * part // (compact + 1)) for part in range(1, compact + 2)}, reverse=True
    )
    longest = -(-group_size // decode_slots) * (
        T - 1
    )  # token steps, if no completion stops before T
    carry = (
        0,
        jnp.ones((P, decode_slots), jnp.int32) if refill else None,
        state,
        own,
        seat_PG[:, :decode_slots],
        jnp.full(P, decode_slots),
    )
    for fewer in (*sizes[1:], 0):

        def going(carry, fewer=fewer):
            steps, index, state, _, seat_Pg, next_P = carry
            busy_P = jnp.sum(~ended(state, place(steps, index), seat_Pg), axis=1)
            # The bound follows from the rest; it is said outright for those who count the loop's
            # steps.
            return (steps < longest) & (
                jnp.max(busy_P + (next_P < group_size) * decode_slots) > fewer
            )

        steps, index, state, own, seat_Pg, next_P = jax.lax.while_loop(going, body, carry)
        order = jnp.argsort(ended(state, place(steps, index), seat_Pg), axis=1, stable=True)[
            :, :fewer
        ]
        kept = lambda a, order=order: take(a, order)
        own = jax.tree.map((lambda a, order=order: a[order[0]]) if alone else kept, own)
        carry = (steps, jax.tree.map(kept, index), state, own, kept(seat_Pg), next_P)
    _, _, (tokens, logp, length, done), *_ = carry
    mask = jnp.arange(T) < length[..., None]
    return Rollout(prompts, tokens, mask, logp, done)


take = jax.vmap(lambda x_G, index_g: x_G[index_g])  # of every prompt, some of its samples
