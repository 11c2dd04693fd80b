"""The attention of `models.fused` by cuDNN's flash attention (Dao et al. 2022, 2205.14135).

A prompt's rows see the prompt. A completion's rows see the prompt, all G·T of a group in one call without repeating a
key, and themselves; the two are merged by their log-sum-exp ℓ:

    out = Σ_j exp(ℓ_j − ℓ) out_j        ℓ = log Σ_j exp ℓ_j
    dS_j = P_j ∘ (g Vᵀ − (g · out))     P_j = exp(S_j − ℓ)

so each part's backward kernel, which knows out and ℓ as the forward pass left them, is given the merged ones and adds
to the gradient what the whole softmax has of it. `jax.nn.dot_product_attention` cannot serve: it rounds ℓ to the type
of its output, and its gradient ignores that of ℓ. Hence JAX's own binding of cuDNN, whose names are not public.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.models.attention import take_rows
from grpo_jax.types import Array


class Kernel(NamedTuple):
    """Attention of B sequences of queries to as many of keys; h = H/K query heads share a key head.

    ```
    forward(q_BTHd, k_BSKd, v_BSKd, length_B, causal)                      -> out_BTHd, lse_BHT (float32)
    backward(q_BTHd, k_BSKd, v_BSKd, length_B, causal, out, lse, g_BTHd)   -> the gradients of q, k and v
    ```

    Keys behind the first `length_B` are not seen (None: all are); `causal`: row i sees keys 0 … i.
    """

    forward: Callable
    backward: Callable


def supported(config: Any) -> bool:
    """Whether cuDNN's flash attention takes it, on Ampere and later: two bytes a number, heads of 8, 16 … 128."""
    return config.dtype in ("bfloat16", "float16") and config.head_dim % 8 == 0 and config.head_dim <= 128


def _options(q_BTHd: Array, causal: bool, lengths: tuple) -> dict:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType

    kinds = {(False, False): "NO_MASK", (True, False): "PADDING", (False, True): "CAUSAL"}
    kind = kinds.get((bool(lengths), causal), "PADDING_CAUSAL")
    return {"scale": q_BTHd.shape[-1] ** -0.5, "mask_type": MaskType[kind], "sliding_window_length": None}


def _lengths(q_BTHd: Array, length_B: Array | None) -> tuple:
    rows = lambda: jnp.full(q_BTHd.shape[0], q_BTHd.shape[1], jnp.int32)
    return () if length_B is None else (rows(), length_B.astype(jnp.int32))


def _forward(q, k, v, length_B, causal):
    from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention

    lengths = _lengths(q, length_B)
    named = dict(zip(("q_seqlen", "kv_seqlen"), lengths, strict=False))
    return dot_product_attention(q, k, v, **named, **_options(q, causal, lengths), return_residual=True)


def _backward(q, k, v, length_B, causal, out, lse, g):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    lengths, none = _lengths(q, length_B), jnp.zeros(0, q.dtype)
    arrays = (q, k, v, none, *(lengths or (none, none)), none, none, none, none, lse, out, g)
    return cudnn._dot_product_attention_bwd_p_wrapper.bind(
        *arrays, seed=42, dropout_rate=0.0, variadic_args=(False, False), layout=cudnn.AttentionLayout.BTNH.value,
        **_options(q, causal, lengths),
    )  # fmt: skip


CUDNN = Kernel(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_prompt(kernel: Kernel, q_PSHd: Array, k_PSKd: Array, v_PSKd: Array, length_P: Array) -> Array:
    """Causal attention of a prompt's rows to the prompt, whose first `length_P` tokens are real."""
    return kernel.forward(q_PSHd, k_PSKd, v_PSKd, length_P, True)[0]


def _prompt_forward(kernel, *args):
    out, lse = kernel.forward(*args, True)
    return out, (args, out, lse)


def _prompt_backward(kernel, kept, g):
    args, out, lse = kept
    return *kernel.backward(*args, True, out, lse, g), None


attend_prompt.defvjp(_prompt_forward, _prompt_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_group(
    kernel: Kernel, q_PGTHd: Array, k_PGTKd: Array, v_PGTKd: Array, k_PSKd: Array, v_PSKd: Array, length_P: Array
) -> Array:
    """Attention of a group's completions, each causally to itself and to all of its prompt."""
    return _merged(kernel, q_PGTHd, k_PGTKd, v_PGTKd, k_PSKd, v_PSKd, length_P)[0]


def _shared(y_PGT: Array) -> Array:
    """The rows of a group as one sequence."""
    P, G, T, *rest = y_PGT.shape
    return y_PGT.reshape(P, G * T, *rest)


def _alone(y_PGT: Array) -> Array:
    """Every completion as a sequence."""
    P, G, T, *rest = y_PGT.shape
    return y_PGT.reshape(P * G, T, *rest)


def _merged(kernel, q, k, v, k_PSKd, v_PSKd, length_P):
    P, G, T, H, _ = q.shape
    parts = (
        kernel.forward(_shared(q), k_PSKd, v_PSKd, length_P, False),
        kernel.forward(_alone(q), _alone(k), _alone(v), None, True),
    )
    lse_PGTH = [lse.swapaxes(1, 2).reshape(P, G, T, H) for _, lse in parts]
    whole = jnp.logaddexp(*lse_PGTH)
    weight = [jnp.exp(lse - whole)[..., None] for lse in lse_PGTH]
    out = sum(w * y.reshape(q.shape).astype(jnp.float32) for w, (y, _) in zip(weight, parts, strict=True))
    return out.astype(q.dtype), whole


def _group_forward(kernel, *args):
    out, lse = _merged(kernel, *args)
    return out, (args, out, lse)


def _group_backward(kernel, kept, g):
    (q, k, v, k_PSKd, v_PSKd, length_P), out, lse = kept
    given = lambda lay: (lay(out), lay(lse).swapaxes(1, 2), lay(g))
    q_first, *prompt = kernel.backward(_shared(q), k_PSKd, v_PSKd, length_P, False, *given(_shared))
    q_then, *own = kernel.backward(_alone(q), _alone(k), _alone(v), None, True, *given(_alone))
    return q_first.reshape(q.shape) + q_then.reshape(q.shape), *(y.reshape(k.shape) for y in own), *prompt, None


attend_group.defvjp(_group_forward, _group_backward)


def attend_together(
    q_KPRhd: Array, k_KPRd: Array, v_KPRd: Array, mask_PS: Array, *, T: int, kernel: Kernel = CUDNN
) -> Array:
    """`fused.attend_together` by another kernel: `[K, P, R, h, d]`, R = S + G·T rows of a prompt and its group."""
    K, P, R, h, d = q_KPRhd.shape
    S = mask_PS.shape[1]
    q = q_KPRhd.transpose(1, 2, 0, 3, 4).reshape(P, R, K * h, d)
    k, v = (y.transpose(1, 2, 0, 3) for y in (k_KPRd, v_KPRd))
    # cuDNN takes a length and no mask: a prompt's tokens come first, its padding last, each in its order.
    order_PS = jnp.argsort(~mask_PS, axis=1, stable=True)
    back_PS = jnp.argsort(order_PS, axis=1)
    first_q, first_k, first_v = (jax.vmap(take_rows)(y[:, :S], order_PS, back_PS) for y in (q, k, v))
    length_P = mask_PS.sum(1)
    first = jax.vmap(take_rows)(attend_prompt(kernel, first_q, first_k, first_v, length_P), back_PS, order_PS)
    own = (y[:, S:].reshape(P, -1, T, *y.shape[2:]) for y in (q, k, v))
    then = attend_group(kernel, *own, first_k, first_v, length_P).reshape(P, R - S, K * h, d)
    return jnp.concatenate([first, then], 1).reshape(P, R, K, h, d).transpose(2, 0, 1, 3, 4)
