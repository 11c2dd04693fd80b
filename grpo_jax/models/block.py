"""What a decoder computes at each of its rows: RMSNorm, rotary positions, grouped-query attention,
SwiGLU; before its blocks the embedding, behind them a norm and the vocabulary.

One Flax (Linen) module describes a block. It is given its attention as a function, so that encoding
a prompt, training on a group and decoding one token run the same block.

Shape suffixes besides those of `types`, where T stands for any rows: d = size of a head, f = d/2, h
= H/K query heads that share a key head.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from grpo_jax.models.decoder_config import DecoderConfig
from grpo_jax.models.matmul import small_batch_matmul, up_projection
from grpo_jax.models.precision import project
from grpo_jax.types import Array, Params

MATRIX = nn.initializers.variance_scaling(1.0, "fan_in", "normal")


def rms_norm(x_TD: Array, scale_D: Array, eps: float) -> Array:
    """Rows of mean square 1, times a scale (Zhang & Sennrich 2019, 1910.07467, eq. 4): `[T, D]`.

    `x / sqrt(mean(x²) + eps) · scale`
    """
    # In float32: in bfloat16 the mean of D squares would keep 8 bits, and scale the whole row by
    # its error.
    x = x_TD.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (x * scale_D.astype(jnp.float32)).astype(x_TD.dtype)


def rope_frequencies(config: DecoderConfig) -> Array:
    """Angle between one position and the next of each pair of numbers in a head: `[f]`.

    `w_i = theta^(−2i/d)`, i < d/2 (Su et al. 2021, 2104.09864, eq. 15). With Llama 3's scaling (its
    code, `apply_scaling`), of L original positions:

        kept = clip((L w / 2π − low) / (high − low), 0, 1)        kept · w + (1 − kept) · w / factor
    """
    d = config.head_dim
    frequency = config.rope_theta ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)
    if config.rope_scaling is None:
        return frequency
    _, factor, low, high, original = config.rope_scaling
    # A pair that went round often within the original context tells near positions apart, and
    # stays; one that never came round has not been seen at larger angles, and is slowed down.
    rotations = original * frequency / (2 * jnp.pi)
    kept = jnp.clip((rotations - low) / (high - low), 0.0, 1.0)
    return kept * frequency + (1 - kept) * frequency / factor


def rope_angles(position_T: Array, frequency_f: Array) -> Array:
    """Cosine and signed sine of each position's angles: `[2, T, 1, 2, f]`.

    Of the angle a = position · frequency: `(cos a, cos a)` and `(−sin a, sin a)`, for the two
    halves of a head. The axis of 1 is that of the heads.
    """
    # Once for all layers, and handed to each: a layer that is computed again for the gradient would
    # compute its sines again, too.
    angle_Tf = position_T[:, None] * frequency_f
    cos = jnp.cos(angle_Tf)
    sin = jnp.sin(angle_Tf)
    return jnp.stack([jnp.stack([cos, cos], 1), jnp.stack([-sin, sin], 1)])[:, :, None]


def rotate(x_THd: Array, angles_2T12f: Array) -> Array:
    """Rotates the pairs (x_i, x_{i+d/2}) of each head (Su et al. 2021, eq. 34): `[T, H, d]`.

    `(x, y) cos + (−y, x) sin`
    """
    cos, sin = angles_2T12f
    # The halves have an axis of their own, which is reversed: XLA's CPU back end would not fuse a
    # concatenation of the two.
    x = x_THd.astype(jnp.float32).reshape(*x_THd.shape[:-1], 2, -1)
    return (x * cos + x[..., ::-1, :] * sin).reshape(x_THd.shape).astype(x_THd.dtype)


class Block(nn.Module):
    """One pre-norm layer: attention, then SwiGLU (Shazeer 2020, 2002.05202, eq. 6), each added to
    its input.

    `attention(q_KThd, k_KTd, v_KTd) -> (out_KThd, kept)` decides what the queries see. `decoding`
    takes matrices stored (out, in), for `small_batch_matmul`.
    """

    config: DecoderConfig
    decoding: bool = False

    @nn.compact
    def __call__(self, x_TD: Array, angles_2T12f: Array, attention: Callable) -> tuple[Array, Any]:
        """The layer's output, `[T, D]`, and what its attention keeps.

        y = x + o(attention(norm(x)))       out = y + down(silu(gate(norm(y))) · up(norm(y)))
        """
        c = self.config
        d = c.head_dim
        H = c.num_attention_heads
        K = c.num_key_value_heads

        h_TD = self._norm(x_TD, "input_norm")
        q_THd = self._linear(h_TD, "q", H * d, c.attention_bias).reshape(-1, H, d)
        k_TKd = self._linear(h_TD, "k", K * d, c.attention_bias).reshape(-1, K, d)
        v_TKd = self._linear(h_TD, "v", K * d, c.attention_bias).reshape(-1, K, d)
        q_TKhd = rotate(q_THd, angles_2T12f).reshape(-1, K, H // K, d)
        k_TKd = rotate(k_TKd, angles_2T12f)
        # Key heads come first: attention is then a batch of K products, whose h query heads share a
        # key head without a copy of it. The names are what remat="attention" keeps.
        q_KThd, k_KTd, v_KTd = (
            checkpoint_name(y.swapaxes(0, 1), "attention") for y in (q_TKhd, k_TKd, v_TKd)
        )
        out_KThd, kept = attention(q_KThd, k_KTd, v_KTd)
        out_TKhd = checkpoint_name(out_KThd, "attention").swapaxes(0, 1)
        x_TD = x_TD + self._linear(out_TKhd.reshape(-1, H * d), "o", c.hidden_size)

        h_TD = self._norm(x_TD, "post_norm")
        gate_TF = nn.silu(self._linear(h_TD, "gate", c.intermediate_size))
        up_TF = self._linear(h_TD, "up", c.intermediate_size)
        return x_TD + self._linear(gate_TF * up_TF, "down", c.hidden_size), kept

    # Not wrapped by Flax: these are parts of the one compact method, with its parameters.
    @nn.nowrap
    def _norm(self, x_TD: Array, name: str) -> Array:
        scale_D = self.param(name, nn.initializers.ones, x_TD.shape[-1:], self.config.stored_dtype)
        return rms_norm(x_TD, scale_D, self.config.rms_norm_eps)

    @nn.nowrap
    def _linear(self, x_TD: Array, name: str, size: int, bias: bool = False) -> Array:
        dtype = self.config.stored_dtype
        D = x_TD.shape[-1]
        if self.decoding:
            w = self.param(name, MATRIX, (size, D), dtype)
            y = small_batch_matmul(x_TD, w).astype(x_TD.dtype)
        else:
            w = self.param(name, MATRIX, (D, size), dtype)
            y = up_projection(x_TD, w) if size > D else x_TD @ w
        if not bias:
            return y
        bias_F = self.param(f"{name}_bias", nn.initializers.zeros, (size,), dtype)
        # In float32, as norms: its gradient is a sum over all rows.
        return (y.astype(jnp.float32) + bias_F.astype(jnp.float32)).astype(y.dtype)


def final_norm(config: DecoderConfig, params: Params, x_TD: Array) -> Array:
    """The norm behind the last block: hidden states `[T, D]`."""
    return rms_norm(x_TD, params["norm"], config.rms_norm_eps)


def logits(config: DecoderConfig, params: Params, hidden_D: Array) -> Array:
    """Float32 logits `[..., V]` of hidden states with any leading axes."""
    # A tied head is read where it lies, [V, D]: no transposed copy, and the faster product on CPUs.
    if config.tie_word_embeddings:
        return project(params, "embed", "...d,vd->...v", hidden_D)
    return project(params, "head", "...d,dv->...v", hidden_D)
