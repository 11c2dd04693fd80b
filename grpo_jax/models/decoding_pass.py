"""One token at a time: a completion that grows behind its prompt's cache.

Reading weights and caches is what takes the time here. Layers are unstacked and the caches are one
array a layer, so that none of them is copied for a token, and every operand lies in the order in
which its product reads it.

Shape suffixes besides those of `types`: d = size of a head, h = H/K query heads that share a key
head.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.models.attention import Scoring, attend_one, within
from grpo_jax.models.block import Block, embed, final_norm, finish_logits, logits
from grpo_jax.models.decoder_config import DecoderConfig
from grpo_jax.models.matmul import small_batch_matmul
from grpo_jax.models.rope import Positions, rotations
from grpo_jax.types import Array, Params


class PromptCache(NamedTuple):
    """A prompt's keys and values of each layer, as decoding reads them, and which are real tokens.

    Keys are stored as columns: the scores of one query are then sums of rows of k, read in the
    order in which they lie, and so are the sums over values (see `attend_one`).
    """

    k_KdS: list[Array]
    v_KSd: list[Array]
    mask_S: Array


def for_decoding(config: DecoderConfig, params: Params) -> Params:
    """`LanguageModel.for_decoding`: every layer by itself, its matrices stored (out, in)."""
    # Taken out of their stack once: a loop over stacked layers would copy each layer's weights out
    # of it for every token, as many bytes as the token's products read.
    layers = [_transposed_layer(params["layers"], i) for i in range(config.num_hidden_layers)]
    return params | {"layers": layers}


def _transposed_layer(layers: Params, i: int) -> Params:
    return jax.tree.map(lambda a: a[i].T, layers)  # a vector stays as it is


def empty(config: DecoderConfig, max_tokens: int) -> list[tuple[Array, Array]]:
    """`LanguageModel.empty`: room for a completion's keys, `[K, d, T]`, and values, `[K, T, d]`, of
    each layer.
    """
    K = config.num_key_value_heads
    d = config.head_dim
    k_KdT = jnp.zeros((K, d, max_tokens), config.dtype)
    v_KTd = jnp.zeros((K, max_tokens, d), config.dtype)
    return [(k_KdT, v_KTd)] * config.num_hidden_layers


def decode(
    config: DecoderConfig,
    weights: Params,
    cache: PromptCache,
    own: list[tuple[Array, Array]],
    index: Array,
    token: Array,
) -> tuple[Array, list[tuple[Array, Array]]]:
    """`LanguageModel.decode`: the hidden state `[D]` behind token number `index` of a completion,
    and its own cache with that token in it.
    """
    x_1D = embed(config, weights, token[None])
    length = cache.mask_S.sum()
    angles, query_scale_1 = rotations(config, (length + index)[None], length)
    scoring = Scoring(config.attention_scale, config.attention_cap)
    block = Block(config, decoding=True)
    grown = []
    # Unrolled, so that each layer reads arrays of its own.
    for i, layer in enumerate(weights["layers"]):
        keys = PromptKeys(cache.k_KdS[i], cache.v_KSd[i], cache.mask_S)
        attention = partial(_attend_grown, scoring, config.windows[i], keys, own[i], index)
        positions = Positions(angles[config.rope_ids[i]], query_scale_1)
        x_1D, kept = block.apply({"params": layer}, x_1D, positions, attention)
        grown.append(kept)
    return final_norm(config, weights, x_1D)[0], grown


class PromptKeys(NamedTuple):
    """A prompt's cache in one layer."""

    k_KdS: Array
    v_KSd: Array
    mask_S: Array


def _attend_grown(
    scoring: Scoring,
    window: int | None,
    prompt: PromptKeys,
    own: tuple[Array, Array],
    index: Array,
    q_K1hd: Array,
    k_K1d: Array,
    v_K1d: Array,
) -> tuple[Array, tuple[Array, Array]]:
    """One token to its prompt, to the tokens before it and to itself; keeps its own cache."""
    # Written first and read from there: the token needs no part of its own in the softmax, and XLA
    # updates the cache where it lies.
    k_KdT = jax.lax.dynamic_update_slice(own[0], k_K1d.swapaxes(1, 2), (0, 0, index))
    v_KTd = jax.lax.dynamic_update_slice(own[1], v_K1d, (0, index, 0))
    own_T = jnp.arange(v_KTd.shape[1])
    seen_T = own_T <= index
    if window is not None:
        mask_S = prompt.mask_S
        position = mask_S.sum() + index
        in_window_S = within(position[None], jnp.cumsum(mask_S) - 1, window)[0]
        prompt = prompt._replace(mask_S=mask_S & in_window_S)
        seen_T = seen_T & within(index[None], own_T, window)[0]
    out_Khd = attend_one(q_K1hd[:, 0], [prompt, (k_KdT, v_KTd, seen_T)], scoring)
    return out_Khd[:, None], (k_KdT, v_KTd)


def decode_logits(config: DecoderConfig, weights: Params, hidden_D: Array) -> Array:
    """`LanguageModel.decode_logits`: float32 logits `[..., V]` of hidden states of few rows."""
    # A tied head lies as (out, in), which is what `small_batch_matmul` takes; a head of its own as
    # (in, out).
    if not config.tie_word_embeddings:
        return logits(config, weights, hidden_D)
    rows_ND = hidden_D.reshape(-1, hidden_D.shape[-1])
    products = small_batch_matmul(rows_ND, weights["embed"])
    return finish_logits(config, products.reshape(*hidden_D.shape[:-1], -1))
