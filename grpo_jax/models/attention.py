"""Softmax attention over several sets of keys, and rows that move between a packed and a padded layout."""

from functools import partial, reduce

import jax
import jax.numpy as jnp

from grpo_jax.types import Array

MASKED = -1e30  # a finite score: a row without any key gives a finite, unused output instead of NaN


def einsum32(spec: str, x: Array, y: Array) -> Array:
    """`einsum` of any dtype, summed in float32. XLA's CPU back end lacks some bfloat16 products: there, of float32."""
    product = partial(jnp.einsum, spec, preferred_element_type=jnp.float32)
    if x.dtype == y.dtype == jnp.float32:
        return product(x, y)
    upcast = lambda x, y: product(x.astype(jnp.float32), y.astype(jnp.float32))
    return jax.lax.platform_dependent(x, y, cpu=upcast, default=product)


def attend(q_TKhd: Array, parts: list[tuple[Array, Array, Array]]) -> Array:
    """Softmax attention over the union of several sets of keys, merged by their log-sum-exp.

    `parts` holds (k_KSd, v_KSd, mask broadcastable to [T, S]) each; h = H/K query heads share one key head. With scores
    s_j of part j and m their common maximum: out = Σ_j exp(s_j − m) v_j / Σ_j Σ exp(s_j − m). Returns [T, K, h, d].
    """
    scale = q_TKhd.shape[-1] ** -0.5
    scores = []
    for k_KSd, _, mask_TS in parts:
        score = einsum32("tkhd,ksd->khts", q_TKhd, k_KSd) * scale
        scores.append(jnp.where(mask_TS, score, MASKED))
    top = scores[0].max(-1, keepdims=True)
    for score in scores[1:]:
        top = jnp.maximum(top, score.max(-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    out, total = 0.0, 0.0
    for score, (_, v_KSd, _) in zip(scores, parts, strict=True):
        weight = jnp.exp(score - top)
        total = total + weight.sum(-1)
        out = out + einsum32("khts,ksd->tkhd", weight.astype(v_KSd.dtype), v_KSd)
    return (out / jnp.moveaxis(total, -1, 0)[..., None]).astype(q_TKhd.dtype)


def attend_causal(q_SKhd: Array, k_KSd: Array, v_KSd: Array, mask_S: Array, *, block: int = 256) -> Array:
    """Causal attention of a sequence to itself. A block of queries sees the keys up to its own end: those behind it,
    which the mask would remove, are not computed. Returns [S, K, h, d]."""
    S, outs = q_SKhd.shape[0], []
    causal_SS = jnp.tril(jnp.ones((S, S), bool)) & mask_S[None, :]
    for start in range(0, S, block):
        end = min(start + block, S)
        mask = causal_SS[start:end, :end]
        outs.append(attend(q_SKhd[start:end], [(k_KSd[:, :end], v_KSd[:, :end], mask)]))
    return jnp.concatenate(outs) if len(outs) > 1 else outs[0]


def attend_one(q_Khd: Array, parts: list[tuple[Array, Array, Array]]) -> Array:
    """`attend` of one query, with keys stored as columns: `parts` holds (k_KdS, v_KSd, mask_S). Returns [K, h, d].

    Both products then read their operands in the order in which they lie, also under `vmap` over sequences.
    """
    scale = q_Khd.shape[-1] ** -0.5
    scores = [jnp.where(mask, einsum32("khd,kds->khs", q_Khd, k) * scale, MASKED) for k, _, mask in parts]
    top = reduce(jnp.maximum, [score.max(-1, keepdims=True) for score in scores])
    out, total = 0.0, 0.0
    for score, (_, v_KSd, _) in zip(scores, parts, strict=True):
        weight = jnp.exp(score - top)
        total = total + weight.sum(-1, keepdims=True)
        out = out + einsum32("khs,ksd->khd", weight.astype(v_KSd.dtype), v_KSd)
    return (out / total).astype(q_Khd.dtype)


@jax.custom_vjp
def take_rows(x_ND: Array, row_M: Array, back_N: Array) -> Array:
    """`x[row]`, zeros where `row` is no row of x; its gradient is `cotangent[back]`, a gather too and not a scatter.

    `back` is the inverse of `row`: row n of x stands in `row` at `back[n]` alone, or nowhere if that is M.
    """
    return x_ND.at[row_M].get(mode="fill", fill_value=0)


def _take_rows_forward(x_ND, row_M, back_N):
    return take_rows(x_ND, row_M, back_N), back_N


def _take_rows_backward(back_N, cotangent_MD):
    return cotangent_MD.at[back_N].get(mode="fill", fill_value=0), None, None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)
