"""Softmax attention over several sets of keys, and rows that move between a packed and a padded
layout.
"""

from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.models.matmul import einsum32
from grpo_jax.types import Array

MASKED = -1e30  # a finite score: a row without any key gives a finite, unused output instead of NaN


@jax.custom_vjp
def scores(q_RNd: Array, k_RSd: Array) -> Array:
    """`q kᵀ` for each of R, in float32: `[R, N, S]`.

    The gradient for k is written as `(qᵀ g)ᵀ` and not as `gᵀ q`: XLA's CPU back end makes a
    transposed copy of the first factor, and q is smaller than g wherever the keys are many. Not
    under `vmap` over queries alone.
    """
    return einsum32("rnd,rsd->rns", q_RNd, k_RSd)


def _scores_backward(kept, g_RNS):
    q_RNd, k_RSd = kept
    return mixture(g_RNS, k_RSd).astype(q_RNd.dtype), _summed(q_RNd, g_RNS).astype(k_RSd.dtype)


def _summed(narrow_RNd: Array, wide_RNS: Array) -> Array:
    """Over the queries, for each key: `[R, S, d]`. What is transposed is the narrow factor and the
    result.
    """
    return einsum32("rnd,rns->rds", narrow_RNd, wide_RNS).swapaxes(1, 2)


scores.defvjp(lambda q, k: (einsum32("rnd,rsd->rns", q, k), (q, k)), _scores_backward)


@jax.custom_vjp
def mixture(w_RNS: Array, v_RSd: Array) -> Array:
    """`w v` for each of R, in float32: `[R, N, d]`. The gradient for v is `(gᵀ w)ᵀ`, for the reason
    of `scores`.
    """
    return einsum32("rns,rsd->rnd", w_RNS, v_RSd)


def _mixture_backward(kept, g_RNd):
    w_RNS, v_RSd = kept
    return scores(g_RNd, v_RSd).astype(w_RNS.dtype), _summed(g_RNd, w_RNS).astype(v_RSd.dtype)


mixture.defvjp(lambda w, v: (einsum32("rns,rsd->rnd", w, v), (w, v)), _mixture_backward)


class Scoring(NamedTuple):
    """What scores are: `scale · q kᵀ` (None: 1/√d), and with a cap `cap · tanh(scores / cap)`."""

    scale: float | None = None
    cap: float | None = None

    def of(self, products: Array, d: int) -> Array:
        """The scores of products `q kᵀ` of heads of size d."""
        score = products * (d**-0.5 if self.scale is None else self.scale)
        return score if self.cap is None else self.cap * jnp.tanh(score / self.cap)


BY_SIZE = Scoring()


def within(query_T: Array, key_S: Array, window: int | Array) -> Array:
    """Whether a key's position is one of the last `window` up to the query's: `[T, S]`."""
    return key_S[None, :] > query_T[:, None] - window


def attend(
    q_KGThd: Array,
    parts: list[tuple[Array, Array, Array]],
    scoring: Scoring = BY_SIZE,
) -> Array:
    """Softmax attention over the union of several sets of keys, merged by their log-sum-exp: `[K,
    G, T, h, d]`.

    `parts` holds (k, v, mask broadcastable to [T, S]) each, with keys of all G sequences, [K, S,
    d], or of each, [K, G, S, d]; h = H/K query heads share one key head. With scores s_j of part j
    and m their common maximum: out = Σ_j exp(s_j − m) v_j / Σ_j Σ exp(s_j − m).
    """
    K, G, T, h, d = q_KGThd.shape
    scored = []
    for k, v, mask_TS in parts:
        # One product for the queries of all sequences where they share the keys.
        R = K if k.ndim == 3 else K * G
        k, v = (y.reshape(R, -1, d) for y in (k, v))
        products = scores(q_KGThd.reshape(R, -1, d), k).reshape(K, G, T, h, -1)
        score = scoring.of(products, d)
        scored.append((jnp.where(mask_TS[..., None, :], score, MASKED), v))
    top = reduce(jnp.maximum, [score.max(-1, keepdims=True) for score, _ in scored])
    top = jax.lax.stop_gradient(top)
    out = 0.0
    total = 0.0
    for score, v_RSd in scored:
        weight = jnp.exp(score - top)
        total = total + weight.sum(-1, keepdims=True)
        weight_RNS = weight.reshape(v_RSd.shape[0], -1, v_RSd.shape[1]).astype(v_RSd.dtype)
        out = out + mixture(weight_RNS, v_RSd).reshape(K, G, T, h, d)
    return (out / total).astype(q_KGThd.dtype)


def attend_causal(
    q_KGThd: Array,
    k_KGTd: Array,
    v_KGTd: Array,
    mask_T: Array,
    before: tuple = (),
    *,
    block: int = 256,
    scoring: Scoring = BY_SIZE,
) -> Array:
    """Causal attention of G sequences, each to itself and to the `before`, parts of `attend`: `[K,
    G, T, h, d]`.

    A block of queries sees the keys up to its own end: those behind it, which the mask would
    remove, are not computed. Masks are those of the keys, or [T, S] where queries see different
    ones.
    """
    T = q_KGThd.shape[2]
    outs = []
    causal_TT = jnp.tril(jnp.ones((T, T), bool)) & mask_T
    for start in range(0, T, block):
        end = min(start + block, T)
        own = k_KGTd[:, :, :end], v_KGTd[:, :, :end], causal_TT[start:end, :end]
        earlier = [(k, v, m if m.ndim == 1 else m[start:end]) for k, v, m in before]
        outs.append(attend(q_KGThd[:, :, start:end], [*earlier, own], scoring))
    return jnp.concatenate(outs, 2) if len(outs) > 1 else outs[0]


def attend_one(
    q_Khd: Array, parts: list[tuple[Array, Array, Array]], scoring: Scoring = BY_SIZE
) -> Array:
    """`attend` of one query, with keys stored as columns: `parts` holds (k_KdS, v_KSd, mask_S).
    Returns [K, h, d].

    Both products then read their operands in the order in which they lie, also under `vmap` over
    sequences.
    """
    d = q_Khd.shape[-1]
    scores = [
        jnp.where(mask, scoring.of(einsum32("khd,kds->khs", q_Khd, k), d), MASKED)
        for k, _, mask in parts
    ]
    top = reduce(jnp.maximum, [score.max(-1, keepdims=True) for score in scores])
    out = 0.0
    total = 0.0
    for score, (_, v_KSd, _) in zip(scores, parts, strict=True):
        weight = jnp.exp(score - top)
        total = total + weight.sum(-1, keepdims=True)
        out = out + einsum32("khs,ksd->khd", weight.astype(v_KSd.dtype), v_KSd)
    return (out / total).astype(q_Khd.dtype)


@jax.custom_vjp
def take_rows(x_ND: Array, row_M: Array, back_N: Array) -> Array:
    """`x[row]`, zeros where `row` is no row of x; its gradient is `cotangent[back]`, a gather too
    and not a scatter.

    `back` is the inverse of `row`: row n of x stands in `row` at `back[n]` alone, or nowhere if
    that is M.
    """
    return x_ND.at[row_M].get(mode="fill", fill_value=0)


def _take_rows_forward(x_ND, row_M, back_N):
    return take_rows(x_ND, row_M, back_N), back_N


def _take_rows_backward(back_N, cotangent_MD):
    return cotangent_MD.at[back_N].get(mode="fill", fill_value=0), None, None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)
