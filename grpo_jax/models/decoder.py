"""A decoder as pure functions: its parameters, and its passes bound into a `LanguageModel`.

    decoder_config   the architecture
    rope             rotary positions
    block            one layer, the embedding and the vocabulary
    training_pass    many tokens at once: prompts, completions after them, and whole groups
    decoding_pass    one token at a time

Left out on purpose: dropout, quantised weights.
"""

from collections.abc import Callable
from functools import lru_cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.models import decoding_pass, training_pass
from grpo_jax.models.block import MATRIX, Block, logits, norm_start
from grpo_jax.models.decoder_config import DecoderConfig, axes_of
from grpo_jax.models.kernels.fused import not_fused
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.models.precision import cast_matrices, is_mixed
from grpo_jax.models.rope import Positions, rotations
from grpo_jax.models.training_pass import REMAT, Context
from grpo_jax.types import Array, Params


def decoder(
    config: DecoderConfig,
    *,
    remat: str = "layer",
    scan: bool = True,
    gather: Callable | None = None,
    attention: Callable | str | None = None,
) -> LanguageModel:
    """The functions of a decoder (see `LanguageModel`); equal arguments give the identical model.

    Parameters: `{"embed": [V, D], "layers": {name: [L, ...]}, "norm": [D], "head": [D, V] unless
    tied}`, matrices stored (in, out).

    Args:
      config: the architecture.
      remat: what a layer keeps for the backward pass: "layer" its input alone (least memory, about
        a fifth more arithmetic), "attention" also queries, keys, values and what they attend to,
        "dots" every product with a weight, "none" everything.
      scan: False unrolls the layers (longer compilation; XLA's cost analysis, which counts a loop's
        body once, then counts every layer).
      gather: that of `LanguageModel.with_gather`.
      attention: that of `LanguageModel.with_attention`; "einsum" keeps that of `models.attention`
        on every device.
    """
    if remat not in REMAT:
        raise ValueError(f"remat must be one of {tuple(REMAT)}, got {remat!r}")
    return _bind(Context(config, remat, scan, gather, attention))


# A model is a static argument of compiled programs and its functions compare by identity: one model
# for equal contexts means one compilation, wherever the model was made.
@lru_cache(maxsize=64)
def _bind(context: Context) -> LanguageModel:
    config = context.config
    if callable(context.attention) and (reason := not_fused(config)):
        raise ValueError(f"attention: a kernel does not compute {reason}, which the model has")

    def with_gather(gather: Callable | None) -> LanguageModel:
        return _bind(context._replace(gather=gather))

    def with_attention(attention: Callable | None) -> LanguageModel:
        return _bind(context._replace(attention=attention))

    return LanguageModel(
        config=config,
        init=partial(init, config),
        prefill=partial(training_pass.prefill, context),
        extend=partial(training_pass.extend, context),
        logits=partial(logits, config),
        for_decoding=partial(decoding_pass.for_decoding, config),
        empty=partial(decoding_pass.empty, config),
        decode=partial(decoding_pass.decode, config),
        decode_logits=partial(decoding_pass.decode_logits, config),
        axes=axes_of(config),
        forward=partial(training_pass.forward, context),
        with_gather=with_gather,
        outer=partial(training_pass.outer, context),
        cast=partial(cast_matrices, config) if is_mixed(config) else None,
        # None where a caller chose "einsum": no device then puts a kernel in its place.
        with_attention=None if context.attention == "einsum" else with_attention,
        keeps_products=context.remat in ("dots", "none"),
    )


def init(config: DecoderConfig, key: Array) -> Params:
    """`LanguageModel.init`: matrices of variance 1 / (their inputs), scales of 1, biases of 0."""
    embed_key, layer_key, head_key = jax.random.split(key, 3)
    V = config.vocab_size
    D = config.hidden_size
    layer_keys = jax.random.split(layer_key, config.num_hidden_layers)
    params = {
        # Of variance 1 / D, that of a head: where the two are tied, logits start near variance 1.
        "embed": nn.initializers.normal(D**-0.5)(embed_key, (V, D), config.stored_dtype),
        "layers": jax.vmap(partial(_init_layer, config))(layer_keys),
        "norm": norm_start(config)(layer_key, (D,), config.stored_dtype),
    }
    if not config.tie_word_embeddings:
        params["head"] = MATRIX(head_key, (D, V), config.stored_dtype)
    return params


def _init_layer(config: DecoderConfig, key: Array) -> Params:
    # One row and an attention that returns its queries: parameters have the shapes that any input
    # gives them.
    x_1D = jnp.zeros((1, config.hidden_size), config.dtype)
    angles, _ = rotations(config, jnp.zeros(1, int), jnp.ones(1, int))
    return Block(config).init(key, x_1D, Positions(angles[0]), lambda q, k, v: (q, None))["params"]
