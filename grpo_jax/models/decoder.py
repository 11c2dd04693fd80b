"""A Llama decoder as pure functions: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

One Flax (Linen) module describes a block; it is given its attention as a function, so that encoding
a prompt, training on a completion and decoding one token run the same block. Layers are stacked and
scanned with rematerialisation for training (one layer is compiled, one layer's activations live),
and unstacked for decoding (no weight is copied for each token).

A completion attends to its prompt's keys and to its own in two parts that share one softmax: the
prompt's keys are neither repeated nor concatenated, so under `vmap` over a group the prompt part is
one matrix product for all queries.

Left out on purpose: mixture of experts, sliding windows, dropout, quantised weights.
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from grpo_jax.models.attention import attend_causal, attend_one, take_rows
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.models.matmul import einsum32, small_batch_matmul, up_projection
from grpo_jax.types import Array, Params

MATRIX = nn.initializers.variance_scaling(1.0, "fan_in", "normal")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The architecture, under Hugging Face's names.

    `rope_scaling` is None or `("llama3", factor, low_freq_factor, high_freq_factor,
    original_max_position_embeddings)`. `dtype` is that of the parameters and activations; norms,
    softmax, logits and rotary angles are float32.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: tuple | None = None
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    max_position_embeddings: int = 2048
    dtype: str = "float32"

    def __post_init__(self):
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} must be a positive integer, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.rope_scaling is not None and (
            len(self.rope_scaling) != 5 or self.rope_scaling[0] != "llama3"
        ):
            raise ValueError(
                f"rope_scaling must be None or ('llama3', 4 numbers), got {self.rope_scaling!r}"
            )
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(
                f"dtype must be 'float32', 'bfloat16' or 'float16', got {self.dtype!r}"
            )


class PromptCache(NamedTuple):
    """A prompt's keys (as columns) and values of each layer, as decoding reads them, and which are
    real tokens.
    """

    k_KdS: list[Array]
    v_KSd: list[Array]
    mask_S: Array


def rms_norm(x_TD: Array, scale_D: Array, eps: float) -> Array:
    """`x / sqrt(mean(x²) + eps) · scale`, computed in float32 (Zhang & Sennrich 2019,
    1910.07467).
    """
    x = x_TD.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x.astype(x_TD.dtype) * scale_D


def rope_frequencies(config: DecoderConfig) -> Array:
    """`theta^(−2i/d)`, i < d/2 (Su et al. 2021, 2104.09864); long wavelengths stretched as in Llama
    3 if configured.
    """
    d = config.head_dim
    frequency = config.rope_theta ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)
    if config.rope_scaling is None:
        return frequency
    _, factor, low, high, original = config.rope_scaling
    turns = original * frequency / (2 * jnp.pi)  # full turns within the original context
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequency + (1 - kept) * frequency / factor


def turns(position_T: Array, frequency_f: Array) -> Array:
    """Cosine and signed sine of each position's angles, `[2, T, 1, 2, f]`: computed once for all
    layers.
    """
    angle_Tf = position_T[:, None] * frequency_f
    cos = jnp.cos(angle_Tf)
    sin = jnp.sin(angle_Tf)
    return jnp.stack([jnp.stack([cos, cos], 1), jnp.stack([-sin, sin], 1)])[:, :, None]


def rotate(x_THd: Array, turns_2T12f: Array) -> Array:
    """Rotates the pairs (x_i, x_{i+d/2}) of each head: (x, y) cos + (−y, x) sin.

    The halves have an axis of their own, which is reversed: a concatenation would not be fused on
    CPUs.
    """
    cos, sin = turns_2T12f
    x = x_THd.astype(jnp.float32).reshape(*x_THd.shape[:-1], 2, -1)
    return (x * cos + x[..., ::-1, :] * sin).reshape(x_THd.shape).astype(x_THd.dtype)


class Block(nn.Module):
    """One pre-norm layer. `attention(q_KThd, k_KTd, v_KTd) -> (out_KThd, kept)` decides what the
    queries see.

    `decoding` takes matrices stored (out, in), for `small_batch_matmul`.
    """

    config: DecoderConfig
    decoding: bool = False

    @nn.compact
    def __call__(self, x_TD: Array, turns_2T12f: Array, attention: Callable) -> tuple[Array, Any]:
        c = self.config
        D = c.hidden_size
        F = c.intermediate_size
        d = c.head_dim
        H = c.num_attention_heads
        K = c.num_key_value_heads

        def linear(x, name, size, bias=False):
            if self.decoding:
                w = self.param(name, MATRIX, (size, x.shape[-1]), c.dtype)
                y = small_batch_matmul(x, w).astype(x.dtype)
            else:
                w = self.param(name, MATRIX, (x.shape[-1], size), c.dtype)
                y = up_projection(x, w) if size > x.shape[-1] else x @ w
            return (
                y + self.param(f"{name}_bias", nn.initializers.zeros, (size,), c.dtype)
                if bias
                else y
            )

        h = rms_norm(
            x_TD, self.param("input_norm", nn.initializers.ones, (D,), c.dtype), c.rms_norm_eps
        )
        q, k, v = (
            linear(h, name, n * d, c.attention_bias) for name, n in (("q", H), ("k", K), ("v", K))
        )
        q = rotate(q.reshape(-1, H, d), turns_2T12f).reshape(-1, K, H // K, d)
        k = rotate(k.reshape(-1, K, d), turns_2T12f)
        v = v.reshape(-1, K, d)
        q, k, v = (checkpoint_name(y.swapaxes(0, 1), "attention") for y in (q, k, v))
        out, kept = attention(q, k, v)
        x_TD = x_TD + linear(
            checkpoint_name(out, "attention").swapaxes(0, 1).reshape(-1, H * d), "o", D
        )

        h = rms_norm(
            x_TD, self.param("post_norm", nn.initializers.ones, (D,), c.dtype), c.rms_norm_eps
        )
        return x_TD + linear(nn.silu(linear(h, "gate", F)) * linear(h, "up", F), "down", D), kept


# What a layer keeps for its backward pass besides its input; the rest is computed again.
REMAT = {
    "layer": jax.checkpoint_policies.nothing_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names("attention"),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "none": None,
}


def remat_that_fits(config: DecoderConfig, tokens: int, room: int) -> str:
    """The policy for updates that compute `tokens` tokens at once on a device with `room` bytes to
    spare.

    "dots", which takes a tenth off an update of SmolLM2-135M on CPUs, if what it keeps fits: the
    outputs of a layer's seven products, L · tokens · (2D + 2F + (H + 2K) d) numbers. Else "layer".
    """
    c = config
    width = (
        2 * (c.hidden_size + c.intermediate_size)
        + (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    )
    kept = c.num_hidden_layers * tokens * width * jnp.dtype(c.dtype).itemsize
    return "dots" if kept <= room else "layer"


AXES = (
    ("embed", "vocab embed"),
    ("head", "embed vocab"),
    ("norm", "norm"),
    ("layers/input_norm", "layers norm"),
    ("layers/post_norm", "layers norm"),
    ("layers/q", "layers embed heads"),
    ("layers/k", "layers embed kv"),
    ("layers/v", "layers embed kv"),
    ("layers/o", "layers heads embed"),
    ("layers/gate", "layers embed mlp"),
    ("layers/up", "layers embed mlp"),
    ("layers/down", "layers mlp embed"),
    ("layers/q_bias", "layers heads"),
    ("layers/k_bias", "layers kv"),
    ("layers/v_bias", "layers kv"),
)
NAMES = dict(AXES)


@lru_cache(
    maxsize=64
)  # equal configurations give one model, hence one compilation of what takes it as a static argument
def decoder(
    config: DecoderConfig,
    *,
    remat: str = "layer",
    scan: bool = True,
    gather: Callable | None = None,
    attention: Callable | str | None = None,
) -> LanguageModel:
    """The functions of a decoder (see `LanguageModel`).

    Parameters: `{"embed": [V, D], "layers": {name: [L, ...]}, "norm": [D], "head": [D, V] unless
    tied}`, matrices stored (in, out). `remat` says what a layer keeps for the backward pass:
    "layer" its input alone (least memory, about a fifth more arithmetic), "attention" also queries,
    keys, values and what they attend to, "dots" every product with a weight, "none" everything.
    `scan=False` unrolls the layers (longer compilation; XLA's cost analysis, which counts a loop's
    body once, then counts every layer). `gather` and `attention` are those of
    `LanguageModel.with_gather` and `with_attention`; "einsum" keeps that of `models.attention` on
    every device.
    """
    if remat not in REMAT:
        raise ValueError(f"remat must be one of {tuple(REMAT)}, got {remat!r}")
    frequencies = partial(rope_frequencies, config)
    block = Block(config)
    gathered = gather or (lambda names, x: x)

    def init(key: Array) -> Params:
        embed_key, layer_key, head_key = jax.random.split(key, 3)
        V = config.vocab_size
        D = config.hidden_size
        x = jnp.zeros((1, D), config.dtype)
        turn = turns(jnp.zeros(1), frequencies())
        layer = lambda k: block.init(k, x, turn, lambda q, k, v: (q, None))["params"]
        params = {
            "embed": nn.initializers.normal(D**-0.5)(embed_key, (V, D), config.dtype),
            "layers": jax.vmap(layer)(jax.random.split(layer_key, config.num_hidden_layers)),
            "norm": jnp.ones((D,), config.dtype),
        }
        if not config.tie_word_embeddings:
            params["head"] = MATRIX(head_key, (D, V), config.dtype)
        return params

    def run_layers(layers: Params, x_TD: Array, body: Callable, extra: Any) -> tuple[Array, Any]:
        """`body(x, layer, extra_of_layer) -> (x, kept)` over the stacked layers."""
        body = body if remat == "none" else jax.checkpoint(body, policy=REMAT[remat])
        step = lambda x, inputs: body(x, *inputs)
        return jax.lax.scan(
            step, x_TD, (layers, extra), unroll=1 if scan else config.num_hidden_layers
        )

    def whole(layer: Params) -> Params:
        # Within the body that is rematerialised: gathered again for the backward pass, never kept.
        return {
            name: gathered(NAMES[f"layers/{name}"].removeprefix("layers "), x)
            for name, x in layer.items()
        }

    def outer(params: Params) -> Params:
        return params | {
            name: gathered(NAMES[name], params[name])
            for name in ("embed", "head")
            if name in params
        }

    def embed(params: Params, tokens_T: Array) -> Array:
        return params["embed"].at[tokens_T].get(mode="clip")

    def final_norm(params: Params, x_TD: Array) -> Array:
        return rms_norm(x_TD, params["norm"], config.rms_norm_eps)

    def prefill(params: Params, tokens_S: Array, mask_S: Array) -> tuple[Array, PromptCache]:
        chex.assert_rank([tokens_S, mask_S], 1)
        turn = turns(jnp.cumsum(mask_S) - 1, frequencies())

        def body(x, layer, _):
            attention = lambda q, k, v: (
                attend_causal(q[:, None], k[:, None], v[:, None], mask_S)[:, 0],
                (k, v),
            )
            return block.apply({"params": layer}, x, turn, attention)

        x, (k, v) = run_layers(params["layers"], embed(params, tokens_S), body, None)
        return final_norm(params, x), PromptCache([*k.swapaxes(2, 3)], [*v], mask_S)

    def extend(params: Params, cache: PromptCache, tokens_T: Array) -> Array:
        chex.assert_rank(tokens_T, 1)
        T = tokens_T.shape[0]
        turn = turns(cache.mask_S.sum() + jnp.arange(T), frequencies())

        def body(x, layer, prompt_kv):
            def attention(q, k, v):
                q, k, v = (y[:, None] for y in (q, k, v))
                return attend_causal(q, k, v, jnp.ones(T, bool), ((*prompt_kv, cache.mask_S),))[
                    :, 0
                ], None

            return block.apply({"params": whole(layer)}, x, turn, attention)

        prompt_kv = jnp.stack(cache.k_KdS).swapaxes(2, 3), jnp.stack(cache.v_KSd)
        x, _ = run_layers(params["layers"], embed(params, tokens_T), body, prompt_kv)
        return final_norm(params, x)

    def together(
        params: Params,
        tokens_PS: Array,
        mask_PS: Array,
        tokens_PGT: Array,
        token_index_PN: Array | None,
    ):
        chex.assert_rank([tokens_PS, mask_PS, tokens_PGT], [2, 2, 3])
        P, S = tokens_PS.shape
        G, T = tokens_PGT.shape[1:]
        packed = token_index_PN is not None
        token_index_PN = (
            token_index_PN if packed else jnp.broadcast_to(jnp.arange(G * T), (P, G * T))
        )
        R = S + token_index_PN.shape[1]
        tokens_PN = jax.vmap(lambda x, place: x.at[place].get(mode="fill", fill_value=0))(
            tokens_PGT.reshape(P, -1), token_index_PN
        )
        tokens_M = jnp.concatenate([tokens_PS, tokens_PN], 1).reshape(
            -1
        )  # all rows of all prompts, M = P (S + N)
        position_PR = jnp.concatenate(
            [jnp.cumsum(mask_PS, 1) - 1, mask_PS.sum(1, keepdims=True) + token_index_PN % T], 1
        )
        turn = turns(position_PR.reshape(-1), frequencies())

        def movers(place_N):
            """From a group's rows to all G·T, and back."""
            if not packed:
                return (lambda y: y,) * 2
            slot_M = (
                jnp.full(G * T, place_N.size).at[place_N].set(jnp.arange(place_N.size), mode="drop")
            )
            rows = jax.vmap(take_rows, in_axes=(0, None, None))
            return (lambda y: rows(y, slot_M, place_N)), (lambda y: rows(y, place_N, slot_M))

        def attend_group(q, k, v, mask_S, place_N):
            """Rows of one prompt: its own see the prompt; its group's, as [G, T], see the prompt
            and themselves.
            """
            pad, pack = movers(place_N)
            k_KSd = k[:, :S]
            v_KSd = v[:, :S]
            first = attend_causal(q[:, None, :S], k_KSd[:, None], v_KSd[:, None], mask_S)[:, 0]
            own = (pad(y[:, S:]).reshape(y.shape[0], G, T, *y.shape[2:]) for y in (q, k, v))
            out = attend_causal(*own, jnp.ones(T, bool), ((k_KSd, v_KSd, mask_S),))
            return jnp.concatenate(
                [first, pack(out.reshape(out.shape[0], G * T, *out.shape[3:]))], 1
            )

        def attend_all(q, k, v):
            if attention in (None, "einsum"):
                return jax.vmap(attend_group, in_axes=(1, 1, 1, 0, 0), out_axes=1)(
                    q, k, v, mask_PS, token_index_PN
                )

            def moved(y, way):
                one = lambda y, place_N: jnp.concatenate(
                    [y[:, :S], movers(place_N)[way](y[:, S:])], 1
                )
                return jax.vmap(one, in_axes=(1, 0), out_axes=1)(y, token_index_PN) if packed else y

            return moved(attention(*(moved(y, 0) for y in (q, k, v)), mask_PS, T=T), 1)

        def body(x, layer, _):
            # Products with weights see all rows of all prompts at once, attention those of one
            # prompt.
            def attend(q, k, v):
                out = attend_all(*(y.reshape(y.shape[0], P, R, *y.shape[2:]) for y in (q, k, v)))
                return out.reshape(out.shape[0], P * R, *out.shape[3:]), None

            return block.apply({"params": whole(layer)}, x, turn, attend)

        x, _ = run_layers(params["layers"], embed(params, tokens_M), body, None)
        hidden = final_norm(params, x).reshape(P, R, -1)
        return hidden[:, :S], hidden[:, S:]

    def logits(params: Params, hidden_D: Array) -> Array:
        # A tied head is read where it lies, [V, D]: no transposed copy, and the faster product on
        # CPUs.
        if config.tie_word_embeddings:
            return einsum32("...d,vd->...v", hidden_D, params["embed"])
        return einsum32("...d,dv->...v", hidden_D, params["head"])

    def for_decoding(params: Params) -> Params:
        """Every layer on its own, its matrices stored (out, in)."""
        layer = lambda i: jax.tree.map(
            lambda a: a[i].T, params["layers"]
        )  # a vector stays as it is
        return params | {"layers": [layer(i) for i in range(config.num_hidden_layers)]}

    def empty(max_tokens: int) -> list[tuple[Array, Array]]:
        K = config.num_key_value_heads
        d = config.head_dim
        own = (
            jnp.zeros((K, d, max_tokens), config.dtype),
            jnp.zeros((K, max_tokens, d), config.dtype),
        )
        return [own] * config.num_hidden_layers

    def decode(
        weights: Params, cache: PromptCache, own: list, index: Array, token: Array
    ) -> tuple[Array, list]:
        x = embed(weights, token[None])
        turn = turns((cache.mask_S.sum() + index)[None], frequencies())
        grown = []
        for i, layer in enumerate(weights["layers"]):

            def attention(q, k, v, i=i):
                k_KdT = jax.lax.dynamic_update_slice(own[i][0], k.swapaxes(1, 2), (0, 0, index))
                v_KTd = jax.lax.dynamic_update_slice(own[i][1], v, (0, index, 0))
                seen = jnp.arange(v_KTd.shape[1]) <= index
                parts = [(cache.k_KdS[i], cache.v_KSd[i], cache.mask_S), (k_KdT, v_KTd, seen)]
                return attend_one(q[:, 0], parts)[:, None], (k_KdT, v_KTd)

            x, kept = Block(config, decoding=True).apply({"params": layer}, x, turn, attention)
            grown.append(kept)
        return final_norm(weights, x)[0], grown

    def decode_logits(weights: Params, hidden_D: Array) -> Array:
        if not config.tie_word_embeddings:
            return logits(weights, hidden_D)
        return small_batch_matmul(
            hidden_D.reshape(-1, hidden_D.shape[-1]), weights["embed"]
        ).reshape(*hidden_D.shape[:-1], -1)

    again = lambda **one: decoder(
        config, remat=remat, scan=scan, **({"gather": gather, "attention": attention} | one)
    )
    return LanguageModel(
        config,
        init,
        prefill,
        extend,
        logits,
        for_decoding,
        empty,
        decode,
        decode_logits,
        AXES,
        together,
        with_gather=lambda gather: again(gather=gather),
        outer=outer,
        with_attention=None
        if attention == "einsum"
        else lambda attention: again(attention=attention),
        keeps_products=remat in ("dots", "none"),
    )
