"""Models written elsewhere: a Flax NNX module, or any `apply(params, tokens_BN) -> logits_BNV`, as
a `LanguageModel`.

Such a function has no cache, so nothing is shared: a prompt is computed again for each of its
completions, decoding computes the whole sequence for each token, and the logits of all tokens live
at once. Right, slow, and hungry: for trying a model out. A model that is trained for long should
get `prefill`, `extend` and `decode` of its own.

The function must be causal: the logits at a place depend on the tokens up to it alone. It needs no
mask and no positions, for it sees every sequence from place 0 on: real tokens of the prompt, the
completion, and only then padding.

Left out on purpose: models with state that a call changes, and dropout.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.models.language_model import LanguageModel
from grpo_jax.types import Array, Params


class ApplyConfig(NamedTuple):
    """What is known of a model that is only a function. Its hidden states are its logits."""

    vocab_size: int
    hidden_size: int
    dtype: str


def from_apply(
    apply: Callable[[Params, Array], Array],
    *,
    vocab_size: int,
    init: Callable[[Array], Params] | None = None,
    dtype: str = "float32",
) -> LanguageModel:
    """A model from `apply(params, tokens_BN) -> logits_BNV`; `init(key) -> params` if it should
    make its parameters.

    `dtype` is that of the parameters: it says how far sampler and trainer may differ by rounding.
    Raises ValueError at the first call where the logits have another shape than [B, N, vocab_size].
    """

    def logits_of(params: Params, tokens_N: Array, padding: Array) -> Array:
        """logits_NV of tokens behind `padding` places without meaning, which are moved to the end
        and back.
        """
        logits = apply(params, jnp.roll(tokens_N, -padding)[None])
        wanted = (1, *tokens_N.shape, vocab_size)
        if getattr(logits, "shape", None) != wanted:
            got = getattr(logits, "shape", type(logits).__name__)
            raise ValueError(
                f"apply(params, tokens_BN) must return logits of shape {wanted}, got {got}"
            )
        return jnp.roll(logits[0], padding, axis=0)

    def prefill(
        params: Params, tokens_S: Array, mask_S: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        padding = (~mask_S).sum()
        return logits_of(params, tokens_S, padding), (tokens_S, padding)

    def extend(params: Params, cache: tuple[Array, Array], tokens_T: Array) -> Array:
        tokens_S, padding = cache
        return logits_of(params, jnp.concatenate([tokens_S, tokens_T]), padding)[len(tokens_S) :]

    def decode(
        params: Params, cache: tuple[Array, Array], own_T: Array, index: Array, token: Array
    ):
        own_T = own_T.at[index].set(token)
        return extend(params, cache, own_T)[index], own_T

    def no_init(key: Array) -> Params:
        raise ValueError(
            "this model was made by from_apply without init=: pass parameters of your own"
        )

    return LanguageModel(
        config=ApplyConfig(vocab_size, vocab_size, dtype),
        init=no_init if init is None else init,
        prefill=prefill,
        extend=extend,
        logits=lambda params, hidden_V: hidden_V.astype(jnp.float32),
        for_decoding=lambda params: params,
        empty=lambda max_tokens: jnp.zeros(max_tokens, jnp.int32),
        decode=decode,
        decode_logits=lambda params, hidden_V: hidden_V.astype(jnp.float32),
    )


def from_nnx(
    module: Any,
    *,
    vocab_size: int,
    call: Callable[[Any, Array], Array] = lambda module, tokens: module(tokens),
) -> tuple[LanguageModel, Params]:
    """The model of a Flax NNX module, and its parameters as a plain tree; the module itself stays
    as it is.

    `call(module, tokens_BN) -> logits_BNV`. Parameters are its `nnx.Param`s; whatever else it holds
    stays fixed. Call `module.eval()` first where training and evaluation differ. `model.init` gives
    the module's own parameters.
    """
    from flax import nnx  # not everyone who trains a decoder should load it

    definition, params, rest = nnx.split(module, nnx.Param, ...)
    values = nnx.to_pure_dict(params)
    leaves = {str(leaf.dtype) for leaf in jax.tree.leaves(values)}

    def apply(values: Params, tokens_BN: Array) -> Array:
        state = jax.tree.map(lambda leaf: leaf, params)
        nnx.replace_by_pure_dict(state, values)
        return call(nnx.merge(definition, state, rest), tokens_BN)

    own = lambda key: jax.tree.map(jnp.copy, values)
    dtype = leaves.pop() if len(leaves) == 1 else "float32"
    return from_apply(apply, vocab_size=vocab_size, init=own, dtype=dtype), own(None)
