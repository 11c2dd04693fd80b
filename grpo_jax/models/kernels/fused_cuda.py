"""The attention of `models.kernels.fused` by cuDNN's flash attention (Dao et al. 2022, 2205.14135).

A prompt's rows see the prompt. A completion's rows see the prompt, all G·T of a group in one call
without repeating a key, and themselves; the two are merged by their log-sum-exp ℓ:

    out = Σ_j exp(ℓ_j − ℓ) out_j        ℓ = log Σ_j exp ℓ_j
    dS_j = P_j ∘ (g Vᵀ − (g · out))     P_j = exp(S_j − ℓ)

so each part's backward kernel, which knows out and ℓ as the forward pass left them, is given the
merged ones and adds to the gradient what the whole softmax has of it.
`jax.nn.dot_product_attention` cannot serve: it rounds ℓ to the type of its output, and its gradient
ignores that of ℓ. Hence JAX's own binding of cuDNN, whose names are not public.

The gradient of q is summed in no fixed order unless XLA is told to: with
XLA_FLAGS=--xla_gpu_deterministic_ops=true, at the price of workspace, equal runs are equal bit for
bit.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from grpo_jax.models.attention import take_rows
from grpo_jax.types import Array


class Kernel(NamedTuple):
    """Attention of B sequences of queries to as many of keys; h = H/K query heads share a key head.

    ```
    forward(q_BTHd, k_BSKd, v_BSKd, length_B, causal) -> out_BTHd, lse_BHT (float32)
    backward(q_BTHd, k_BSKd, v_BSKd, length_B, causal, out, lse, g_BTHd) -> dq, dk, dv
    ```

    Keys behind the first `length_B`, at least one, are not seen; `causal`: row i sees keys 0 … i.
    """

    forward: Callable
    backward: Callable


def available(device: jax.Device) -> bool:
    """Whether cuDNN's flash attention is there: NVIDIA's Ampere or later.

    On Hopper from cuDNN 9.26 on: backward kernels before it give NaN where ℓ < −88 (PyTorch's issue
    196678).
    """
    from jax._src.cudnn.fused_attention_stablehlo import check_cudnn_version

    generation = int(str(device.compute_capability).split(".")[0])
    try:
        version = check_cudnn_version()
    except RuntimeError:  # no cuDNN
        return False
    return generation >= 8 and (generation != 9 or version >= 92600)


def takes(config: Any) -> bool:
    """Whether cuDNN's flash attention is made for a model: two bytes a number, heads of 8, 16 …
    128.
    """
    return (
        config.dtype in ("bfloat16", "float16")
        and config.head_dim % 8 == 0
        and config.head_dim <= 128
    )


def _options(q_BTHd: Array, length_B: Array, causal: bool) -> tuple[dict, dict]:
    """Lengths and settings. Lengths are given even where all is seen: kernels without them had bugs
    at short ones.
    """
    from jax._src.cudnn.fused_attention_stablehlo import MaskType

    B, T, _, d = q_BTHd.shape
    lengths = {"q_seqlen": jnp.full(B, T, jnp.int32), "kv_seqlen": length_B.astype(jnp.int32)}
    kind = MaskType.PADDING_CAUSAL if causal else MaskType.PADDING
    return lengths, {"scale": d**-0.5, "mask_type": kind, "sliding_window_length": None}


def _forward(q, k, v, length_B, causal):
    from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention

    lengths, options = _options(q, length_B, causal)
    return dot_product_attention(q, k, v, **lengths, **options, return_residual=True)


def _backward(q, k, v, length_B, causal, out, lse, g):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    lengths, options = _options(q, length_B, causal)
    # An argument that JAX 0.12 added.
    if "score_mod" in inspect.signature(cudnn._dot_product_attention_bwd_rule).parameters:
        options["score_mod"] = None
    bias = offsets = pages = (jnp.zeros(0, q.dtype),)
    return cudnn._dot_product_attention_bwd_p_wrapper.bind(
        q,
        k,
        v,
        *bias,
        *lengths.values(),
        *(offsets * 2),
        *(pages * 2),
        lse,
        out,
        g,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        layout=cudnn.AttentionLayout.BTNH.value,
        **options,
    )


CUDNN = Kernel(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_prompt(
    kernel: Kernel, q_PSHd: Array, k_PSKd: Array, v_PSKd: Array, length_P: Array
) -> Array:
    """Causal attention of a prompt's rows to the prompt, whose first `length_P` tokens are real."""
    return kernel.forward(q_PSHd, k_PSKd, v_PSKd, length_P, True)[0]


def _named(out: Array, lse: Array) -> tuple[Array, Array]:
    """What a rematerialisation that keeps attention keeps."""
    return checkpoint_name(out, "attention"), checkpoint_name(lse, "attention")


def _prompt_forward(kernel, *args):
    out, lse = _named(*kernel.forward(*args, True))
    return out, (args, out, lse)


def _prompt_backward(kernel, kept, g):
    args, out, lse = kept
    return *kernel.backward(*args, True, out, lse, g), None


attend_prompt.defvjp(_prompt_forward, _prompt_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_group(
    kernel: Kernel,
    q_PGTHd: Array,
    k_PGTKd: Array,
    v_PGTKd: Array,
    k_PSKd: Array,
    v_PSKd: Array,
    length_P: Array,
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


def _whole(q_PGT: Array) -> Array:
    """The lengths of completions that are seen whole."""
    P, G, T, *_ = q_PGT.shape
    return jnp.full(P * G, T)


def _merged(kernel, q, k, v, k_PSKd, v_PSKd, length_P):
    P, G, T, H, _ = q.shape
    parts = (
        kernel.forward(_shared(q), k_PSKd, v_PSKd, length_P, False),
        kernel.forward(_alone(q), _alone(k), _alone(v), _whole(q), True),
    )
    lse_PGTH = [lse.swapaxes(1, 2).reshape(P, G, T, H) for _, lse in parts]
    whole = jnp.logaddexp(*lse_PGTH)
    weight = [jnp.exp(lse - whole)[..., None] for lse in lse_PGTH]
    out = sum(
        w * y.reshape(q.shape).astype(jnp.float32) for w, (y, _) in zip(weight, parts, strict=True)
    )
    return out.astype(q.dtype), whole


def _group_forward(kernel, *args):
    out, lse = _named(*_merged(kernel, *args))
    return out, (args, out, lse)


def _group_backward(kernel, kept, g):
    (q, k, v, k_PSKd, v_PSKd, length_P), out, lse = kept
    given = lambda lay: (lay(out), lay(lse).swapaxes(1, 2), lay(g))
    q_first, *prompt = kernel.backward(_shared(q), k_PSKd, v_PSKd, length_P, False, *given(_shared))
    q_then, *own = kernel.backward(_alone(q), _alone(k), _alone(v), _whole(q), True, *given(_alone))
    return (
        q_first.reshape(q.shape) + q_then.reshape(q.shape),
        *(y.reshape(k.shape) for y in own),
        *prompt,
        None,
    )


attend_group.defvjp(_group_forward, _group_backward)


def attend_together(
    q_KPRhd: Array, k_KPRd: Array, v_KPRd: Array, mask_PS: Array, *, T: int, kernel: Kernel = CUDNN
) -> Array:
    """`fused.attend_together` by another kernel: `[K, P, R, h, d]`, R = S + G·T rows of a prompt
    and its group.
    """
    K, P, R, h, d = q_KPRhd.shape
    S = mask_PS.shape[1]
    q = q_KPRhd.transpose(1, 2, 0, 3, 4).reshape(P, R, K * h, d)
    k, v = (y.transpose(1, 2, 0, 3) for y in (k_KPRd, v_KPRd))
    # cuDNN takes a length and no mask: a prompt's tokens come first, its padding last, each in its
    # order.
    order_PS = jnp.argsort(~mask_PS, axis=1, stable=True)
    back_PS = jnp.argsort(order_PS, axis=1)
    ordered = jax.vmap(take_rows)
    first_q, first_k, first_v = (_two(ordered(y[:, :S], order_PS, back_PS), 1) for y in (q, k, v))
    length_P = mask_PS.sum(1)
    first = ordered(
        attend_prompt(kernel, first_q, first_k, first_v, length_P)[:, :S], back_PS, order_PS
    )
    own = (_two(y[:, S:].reshape(P, -1, T, *y.shape[2:]), 2) for y in (q, k, v))
    then = attend_group(kernel, *own, first_k, first_v, length_P)[:, :, :T].reshape(
        P, R - S, K * h, d
    )
    return jnp.concatenate([first, then], 1).reshape(P, R, K, h, d).transpose(2, 0, 1, 3, 4)


def _two(y: Array, axis: int) -> Array:
    """At least two rows: cuDNN has no backward kernel for one. The first does not see the
    second.
    """
    more = max(2 - y.shape[axis], 0)
    return jnp.pad(y, [(0, more if i == axis else 0) for i in range(y.ndim)]) if more else y
