"""What a policy needs of a language model: a handful of pure functions, written for one sequence.

Left out on purpose: batching (callers `vmap` over prompts and over each prompt's group), sampling,
and weights on disk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class LanguageModel(NamedTuple):
    """Pure functions of one sequence; `inference` and `training` take these and never import a
    model.

    ```
    init(key)                                   -> params
    prefill(params, tokens_S, mask_S)           -> hidden_SD, cache   a left-padded prompt, once
    extend(params, cache, tokens_T)             -> hidden_TD          a completion after that prompt
    logits(params, hidden_D)                    -> logits_V           float32, any leading axes
    for_decoding(params)                        -> weights            the layout that decoding reads
    empty(max_tokens)                           -> own                a completion's own empty cache
    decode(weights, cache, own, index, token)   -> hidden_D, own      the completion's token `index`
    decode_logits(weights, hidden_D)            -> logits_V
    ```

    A model may have `forward(params, tokens_PS, mask_PS, tokens_PGT, token_index_PN) -> hidden_PSD,
    hidden_PND`: prompts and their groups' tokens in one pass, which keeps no cache.
    `token_index_PN` holds the tokens' places g·T + t in their group (None: all). Training then uses
    it.

    A model of parameters that are spread over devices may have `with_gather(gather) -> model`: the
    same model, whose functions for training pass a layer's parameters through `gather(names, x)`
    when that layer is computed, so that no more than one layer is whole at a time.

    Every pass of training begins with `outer(params) -> params`: it casts the parameters to the
    type that they are computed in, and gathers those outside the layers, which are read in several
    places. `cast(params) -> params` is that cast alone, for the sampler; None: there is none.

    A model with `forward` may have `with_attention(attention) -> model`: the same model, whose
    `forward` attends by `attention(q_KPRhd, k_KPRd, v_KPRd, mask_PS, T=T) -> out_KPRhd` (see
    `models.kernels.fused`); `config` then names its `num_key_value_heads`.

    `keeps_products` says that memory is there to keep products for the backward pass, those with
    the vocabulary too.

    `cache` holds a prompt's keys and values and is shared by its group: map `extend` and `decode`
    over completions with `in_axes=None` for it. `config` describes the architecture (`vocab_size`
    at least). `axes` says what the parameters' axes are, as pairs of a path and names, e.g.
    `("layers/q", "layers embed heads")`; None: unknown.
    """

    config: Any
    init: Callable
    prefill: Callable
    extend: Callable
    logits: Callable
    for_decoding: Callable
    empty: Callable
    decode: Callable
    decode_logits: Callable
    axes: tuple[tuple[str, str], ...] | None = None
    forward: Callable | None = None
    with_gather: Callable | None = None
    outer: Callable = lambda params: params
    cast: Callable | None = None
    with_attention: Callable | None = None
    keeps_products: bool = False
