"""Log-probabilities of completions: the only shift by one, the only log-softmax.

A prompt is encoded once; its completions attend to its cache. The vocabulary projection runs over
chunks of tokens and is computed again in the backward pass, so that no array of [.., T, V] lives
but a small one.

Left out on purpose: sampling (see `sampler`), losses (see `objectives`).
"""

from collections.abc import Callable
from functools import lru_cache, partial

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from grpo_jax.models.language_model import LanguageModel
from grpo_jax.options import Sampling
from grpo_jax.types import Array, Params, Prompts

LOGITS = 1 << 24  # entries of the logits that exist at once, where the caller does not say
KEPT_LOGITS = (
    4 * LOGITS
)  # as many are kept for the backward pass of a model that keeps its products
FILTERED = -1e30


def filter_logits(logits_V: Array, sampling: Sampling, token: Array | None = None) -> Array:
    """Float32 logits over the last axis, scaled and filtered; a removed token holds `FILTERED`.

    top_k keeps the k largest (ties included), top_p (Holtzman et al. 2019, 1904.09751) the smallest
    set of most likely tokens whose probability reaches p, min_p (Nguyen et al. 2024, 2407.01082)
    those with at least p times the largest probability. `token` is kept in any case: a token that
    was drawn stays possible on the edge of a filter.
    """
    logits_V = logits_V.astype(jnp.float32)
    if sampling.temperature == 0:
        return logits_V
    logits_V = logits_V / sampling.temperature
    kept = logits_V
    if sampling.top_k is not None and sampling.top_k < logits_V.shape[-1]:
        edge = jax.lax.top_k(kept, sampling.top_k)[0][..., -1:]
        kept = jnp.where(kept < edge, FILTERED, kept)
    if sampling.top_p is not None and sampling.top_p < 1:
        order = jnp.sort(kept, axis=-1, descending=True)
        p = jax.nn.softmax(order, axis=-1)
        inside = jnp.cumsum(p, axis=-1) - p < sampling.top_p
        edge = jnp.min(jnp.where(inside, order, jnp.inf), axis=-1, keepdims=True)
        kept = jnp.where(kept < edge, FILTERED, kept)
    if sampling.min_p is not None and sampling.min_p > 0:
        edge = kept.max(-1, keepdims=True) + jnp.log(sampling.min_p)
        kept = jnp.where(kept < edge, FILTERED, kept)
    if token is not None and kept is not logits_V:
        drawn = jnp.arange(logits_V.shape[-1]) == token[..., None]
        kept = jnp.where(drawn, logits_V, kept)
    return kept


@lru_cache(maxsize=64)  # one model for equal arguments, hence one compilation of what takes it
def with_vocabulary(model: LanguageModel, size: int) -> LanguageModel:
    """The model without the ids from `size` on, which its tokenizer does not know.

    Vocabularies are padded to round sizes: an id of the padding has a probability, stands for
    nothing, and would be sampled and trained. Sampler and trainer take the same model, so that both
    normalise over the same ids.
    """
    total = model.config.vocab_size
    if size >= total:
        return model

    def known(logits_V: Array) -> Array:
        return jnp.where(jnp.arange(total) < size, logits_V, FILTERED)

    return model._replace(
        logits=lambda params, hidden_D: known(model.logits(params, hidden_D)),
        decode_logits=lambda weights, hidden_D: known(model.decode_logits(weights, hidden_D)),
    )


def token_logp(logits_V: Array, token: Array) -> Array:
    """`log softmax(logits)[token]` in float32; any leading axes."""
    chosen = jnp.take_along_axis(logits_V, token[..., None], axis=-1)[..., 0]
    return chosen - log_sum_exp(logits_V)


def log_sum_exp(x_V: Array) -> Array:
    """`log Σ_v exp(x_v)` over the last axis, of finite numbers."""
    top = jax.lax.stop_gradient(x_V.max(-1))
    # XLA's CPU back end would compute the exponentials inside the sum, one at a time: a product
    # keeps them apart.
    by_product = lambda p_V: p_V @ jnp.ones(p_V.shape[-1], p_V.dtype)
    total = jax.lax.platform_dependent(
        jnp.exp(x_V - top[..., None]), cpu=by_product, default=lambda p_V: p_V.sum(-1)
    )
    return top + jnp.log(total)


def entropy(logits_V: Array) -> Array:
    """`−Σ_v p_v log p_v` over the last axis, in nats."""
    p_V = jax.nn.softmax(logits_V, axis=-1)
    return log_sum_exp(logits_V) - jnp.sum(p_V * jnp.where(p_V > 0, logits_V, 0.0), axis=-1)


def completion_hidden(
    model: LanguageModel,
    params: Params,
    prompts: Prompts,
    tokens_PGT: Array,
    token_index_PN: Array | None = None,
) -> Array:
    """The hidden state that predicts each completion token, `[P, G, T, D]`: the prompt's last, then
    all but the last.

    Each prompt is encoded once. Completions attend to its cache, so the cost is S + G·T tokens a
    prompt, or S + N with `token_index_PN` (see `types.Rollout`): then only those tokens are
    computed and the result is `[P, N, D]`.
    """
    chex.assert_rank([prompts.tokens_PS, prompts.mask_PS, tokens_PGT], [2, 2, 3])
    chex.assert_equal_shape_prefix([prompts.tokens_PS, tokens_PGT], 1)

    forward = model.forward or partial(_one_after_another, model)
    T = tokens_PGT.shape[-1]
    hidden_PSD, hidden_PND = forward(
        params, prompts.tokens_PS, prompts.mask_PS, tokens_PGT, token_index_PN
    )
    first = (jnp.arange(hidden_PND.shape[1]) if token_index_PN is None else token_index_PN) % T == 0
    hidden_PND = jnp.where(first[..., None], hidden_PSD[:, -1:], jnp.roll(hidden_PND, 1, axis=1))
    return hidden_PND if token_index_PN is not None else hidden_PND.reshape(*tokens_PGT.shape, -1)


def _one_after_another(
    model: LanguageModel, params: Params, *rows: Array | None
) -> tuple[Array, Array]:
    """`LanguageModel.forward` of a model without it: the prompt, then each completion after its
    cache.
    """

    def one_prompt(tokens_S, mask_S, tokens_GT, place_N):
        hidden_SD, cache = model.prefill(params, tokens_S, mask_S)
        hidden_GTD = jax.vmap(lambda tokens_T: model.extend(params, cache, tokens_T))(tokens_GT)
        hidden_ND = hidden_GTD.reshape(-1, hidden_GTD.shape[-1])
        return hidden_SD, hidden_ND if place_N is None else hidden_ND.at[place_N].get(
            mode="fill", fill_value=0
        )

    return jax.vmap(one_prompt)(*rows)


def tokens_at_once(model: LanguageModel, parts: int = 1) -> int:
    """How many tokens to project on the vocabulary at a time, so that each of `parts` devices makes
    `LOGITS` logits.

    A program over a mesh sees the prompts of all devices: without `parts` each of them would take a
    share of a chunk, and read the vocabulary's weights as many times more often.
    """
    return parts * max(1, LOGITS // model.config.vocab_size)


def over_chunks(
    function: Callable, chunk: int, *arrays: Array, kept: tuple[str, ...] = ()
) -> Array:
    """`function` over chunks of the arrays' second axis, one after another; recomputed, not stored,
    for the gradient but for what has one of the names `kept`.

    Every chunk holds as many entries of every row of the first axis, so that rows may lie on
    different devices: at most `chunk`, and as few as the number of chunks allows, so that hardly
    any is padding.
    """
    P, N = arrays[0].shape[:2]
    count = -(-N // chunk)
    if count == 1:  # all of it may exist at once: nothing is computed again
        return function(*arrays)
    chunk = -(-N // count)

    def cut(a):
        a = jnp.pad(a, [(0, 0), (0, count * chunk - N)] + [(0, 0)] * (a.ndim - 2))
        return jnp.moveaxis(a.reshape(P, count, chunk, *a.shape[2:]), 1, 0)

    policy = jax.checkpoint_policies.save_only_these_names(*kept)
    outs = jax.lax.map(
        jax.checkpoint(lambda inputs: function(*inputs), policy=policy), tuple(map(cut, arrays))
    )
    return jax.tree.map(
        lambda a: jnp.moveaxis(a, 0, 1).reshape(P, count * chunk, *a.shape[3:])[:, :N], outs
    )


def completion_scores(
    model: LanguageModel,
    params: Params,
    prompts: Prompts,
    tokens_PGT: Array,
    mask_PGT: Array,
    *,
    token_index_PN: Array | None = None,
    sampling: Sampling = Sampling(),
    with_entropy: bool = False,
    chunk: int | None = None,
) -> tuple[Array, Array | None]:
    """Log-probabilities and, if asked for, entropies of the distribution before each token; both
    `[P, G, T]`, 0 outside the mask.

    `chunk` is the number of tokens projected on the vocabulary at a time, in chunk · V floats (P ·
    V for more prompts than that); None takes as many as make `LOGITS` of them. The backward pass
    computes them again, unless the model keeps its products and all logits are no more than
    `KEPT_LOGITS`. With `token_index_PN` (see `types.Rollout`) no other tokens are computed; they
    must hold every place of the mask.
    """
    chex.assert_equal_shape([tokens_PGT, mask_PGT])
    params = model.outer(params)  # here once, and not in every chunk
    hidden = completion_hidden(model, params, prompts, tokens_PGT, token_index_PN)
    P = hidden.shape[0]
    hidden_PND = hidden.reshape(P, -1, hidden.shape[-1])
    token_PN = tokens_PGT.reshape(P, -1)
    if token_index_PN is not None:
        token_PN = jax.vmap(lambda x, place: x.at[place].get(mode="fill", fill_value=0))(
            token_PN, token_index_PN
        )

    def score(hidden_D, token):
        logits_V = checkpoint_name(model.logits(params, hidden_D), "logits")
        logits_V = filter_logits(logits_V, sampling, token)
        return token_logp(logits_V, token), entropy(logits_V) if with_entropy else None

    chunk = tokens_at_once(model) if chunk is None else chunk
    kept = (
        ("logits",)
        if model.keeps_products and token_PN.size * model.config.vocab_size <= KEPT_LOGITS
        else ()
    )
    scores = over_chunks(
        score, min(max(chunk // P, 1), token_PN.shape[1]), hidden_PND, token_PN, kept=kept
    )

    def spread(x_PN):
        if token_index_PN is None:
            return x_PN
        place = jax.vmap(
            lambda x, place: jnp.zeros(mask_PGT[0].size, x.dtype).at[place].set(x, mode="drop")
        )
        return place(x_PN, token_index_PN)

    return jax.tree.map(
        lambda x: jnp.where(mask_PGT, spread(x).reshape(mask_PGT.shape), 0.0), scores
    )


def completion_logp(
    model: LanguageModel,
    params: Params,
    prompts: Prompts,
    tokens_PGT: Array,
    mask_PGT: Array,
    *,
    sampling: Sampling = Sampling(),
    logit_chunk: int | None = None,
) -> Array:
    """`log π(token_t | prompt, tokens before t)` of every completion token, 0 outside the mask.

    Under the distribution that `generate` draws from with the same `sampling`. Differentiable in
    `params`.

    Args:
      model: pure functions of one sequence.
      params: the policy's parameters.
      prompts: left-padded ids, one row a prompt.
      tokens_PGT: the completions' ids.
      mask_PGT: true on the tokens that are scored.
      sampling: temperature and filters of the distribution.
      logit_chunk: tokens that are projected on the vocabulary at a time; None: what memory allows.

    Returns:
      float32 log-probabilities, `[P, G, T]`.
    """
    inputs = (model, params, prompts, tokens_PGT, mask_PGT)
    return completion_scores(*inputs, sampling=sampling.check(), chunk=logit_chunk)[0]
