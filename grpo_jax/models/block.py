"""What a decoder computes at each of its rows: RMSNorm, rotary positions, grouped-query attention,
a gated feed-forward part; before its blocks the embedding, behind them a norm and the vocabulary.

One Flax (Linen) module describes a block, of every family: what a configuration does not have is
not computed. It is given its attention as a function, so that encoding a prompt, training on a
group and decoding one token run the same block.

Shape suffixes besides those of `types`, where T stands for any rows: d = size of a head, h = H/K
query heads that share a key head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from grpo_jax.models.decoder_config import DecoderConfig
from grpo_jax.models.matmul import small_batch_matmul, up_projection
from grpo_jax.models.precision import embed_rows, project
from grpo_jax.models.rope import Positions, rotate
from grpo_jax.types import Array, Params

MATRIX = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
ACTIVATIONS = {
    "silu": nn.silu,
    "gelu": partial(nn.gelu, approximate=False),
    "gelu_tanh": partial(nn.gelu, approximate=True),
    "relu": nn.relu,
}


def rms_norm(x_TD: Array, scale_D: Array, eps: float, plus_one: bool = False) -> Array:
    """Rows of mean square 1, times a scale (Zhang & Sennrich 2019, 1910.07467, eq. 4): `[T, D]`.

    `x / sqrt(mean(x²) + eps) · scale`, where Gemma has `1 + scale`
    """
    # In float32: in bfloat16 the mean of D squares would keep 8 bits, and scale the whole row by
    # its error.
    x = x_TD.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    scale = scale_D.astype(jnp.float32)
    return (x * (1 + scale if plus_one else scale)).astype(x_TD.dtype)


def soft_cap(x: Array, cap: float | None) -> Array:
    """`cap · tanh(x / cap)` (Gemma 2, 2408.00118, §2); x where there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def norm_start(config: DecoderConfig) -> Callable:
    """How the scales of norms begin: as norms that only normalise."""
    return nn.initializers.zeros if config.norm_plus_one else nn.initializers.ones


class Block(nn.Module):
    """One layer: attention, then a gated feed-forward part (Shazeer 2020, 2002.05202, eq. 6), each
    added to its input.

    `attention(q_KThd, k_KTd, v_KTd) -> (out_KThd, kept)` decides what the queries see. `decoding`
    takes matrices stored (out, in), for `small_batch_matmul`.
    """

    config: DecoderConfig
    decoding: bool = False

    @nn.compact
    def __call__(self, x_TD: Array, positions: Positions, attention: Callable) -> tuple[Array, Any]:
        """The layer's output, `[T, D]`, and what its attention keeps.

        y = x + o(attention(norm(x)))       out = y + down(silu(gate(norm(y))) · up(norm(y)))
        """
        c = self.config
        before = c.norm_places in ("pre", "both")
        after = c.norm_places in ("post", "both")
        h_TD = self._norm(x_TD, "input_norm") if before else x_TD
        h_TD, kept = self._attend(h_TD, positions, attention)
        h_TD = self._norm(h_TD, "attention_out_norm") if after else h_TD
        x_TD = x_TD + self._scaled(h_TD, c.residual_scale)

        h_TD = self._norm(x_TD, "post_norm") if before else x_TD
        h_TD = self._feed_forward(h_TD)
        h_TD = self._norm(h_TD, "mlp_out_norm") if after else h_TD
        return x_TD + self._scaled(h_TD, c.residual_scale), kept

    # Not wrapped by Flax: these are parts of the one compact method, with its parameters.
    @nn.nowrap
    def _attend(self, h_TD: Array, positions: Positions, attention: Callable) -> tuple[Array, Any]:
        c = self.config
        d = c.head_dim
        H = c.num_attention_heads
        K = c.num_key_value_heads
        q_THd = self._heads(h_TD, "q", H)
        k_TKd = self._heads(h_TD, "k", K)
        v_TKd = self._linear(h_TD, "v", K * d, c.attention_bias).reshape(-1, K, d)
        q_THd = rotate(q_THd, positions.angles, c.rope_interleaved)
        if positions.query_scale_T is not None:
            q_THd = (q_THd * positions.query_scale_T[:, None, None]).astype(h_TD.dtype)
        q_TKhd = q_THd.reshape(-1, K, H // K, d)
        k_TKd = rotate(k_TKd, positions.angles, c.rope_interleaved)
        # Key heads come first: attention is then a batch of K products, whose h query heads share a
        # key head without a copy of it. The names are what remat="attention" keeps.
        q_KThd, k_KTd, v_KTd = (
            checkpoint_name(y.swapaxes(0, 1), "attention") for y in (q_TKhd, k_TKd, v_TKd)
        )
        out_KThd, kept = attention(q_KThd, k_KTd, v_KTd)
        out_TKhd = checkpoint_name(out_KThd, "attention").swapaxes(0, 1)
        return self._linear(out_TKhd.reshape(-1, H * d), "o", c.hidden_size, c.output_bias), kept

    @nn.nowrap
    def _heads(self, h_TD: Array, name: str, heads: int) -> Array:
        """Queries or keys, `[T, heads, d]`, with their norm over each head or over all of them."""
        c = self.config
        y = self._linear(h_TD, name, heads * c.head_dim, c.attention_bias)
        if c.qk_norm == "all":
            y = self._norm(y, f"{name}_norm")
        y = y.reshape(-1, heads, c.head_dim)
        return self._norm(y, f"{name}_norm") if c.qk_norm == "head" else y

    @nn.nowrap
    def _feed_forward(self, h_TD: Array) -> Array:
        c = self.config
        gate_TF = self._linear(h_TD, "gate", c.intermediate_size, c.mlp_bias)
        gate_TF = ACTIVATIONS[c.activation](gate_TF)
        up_TF = self._linear(h_TD, "up", c.intermediate_size, c.mlp_bias)
        return self._linear(gate_TF * up_TF, "down", c.hidden_size, c.mlp_bias)

    @nn.nowrap
    def _scaled(self, x_TD: Array, scale: float) -> Array:
        return x_TD if scale == 1.0 else x_TD * scale

    @nn.nowrap
    def _norm(self, x_TD: Array, name: str) -> Array:
        c = self.config
        scale_D = self.param(name, norm_start(c), x_TD.shape[-1:], c.stored_dtype)
        return rms_norm(x_TD, scale_D, c.rms_norm_eps, c.norm_plus_one)

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
    return rms_norm(x_TD, params["norm"], config.rms_norm_eps, config.norm_plus_one)


def embed(config: DecoderConfig, params: Params, tokens_T: Array) -> Array:
    """What the first block is given: `[T, D]`."""
    x_TD = embed_rows(params, tokens_T)
    return x_TD if config.embed_scale == 1.0 else x_TD * config.embed_scale


def logits(config: DecoderConfig, params: Params, hidden_D: Array) -> Array:
    """Float32 logits `[..., V]` of hidden states with any leading axes."""
    # A tied head is read where it lies, [V, D]: no transposed copy, and the faster product on CPUs.
    if config.tie_word_embeddings:
        return finish_logits(config, project(params, "embed", "...d,vd->...v", hidden_D))
    return finish_logits(config, project(params, "head", "...d,dv->...v", hidden_D))


def finish_logits(config: DecoderConfig, logits_V: Array) -> Array:
    """What families do to the products with the vocabulary: divide and cap them."""
    if config.logit_divisor != 1.0:
        logits_V = logits_V / config.logit_divisor
    return soft_cap(logits_V, config.logit_cap)
