"""Many tokens at once: a prompt, a completion after it, or all prompts with their groups.

Layers are stacked and scanned with rematerialisation: one layer is compiled, and one layer's
activations live. `forward` is what training runs; `prefill` encodes a prompt for the sampler, and
`extend` is a completion after such a cache.

A completion attends to its prompt's keys and to its own in two parts that share one softmax: the
prompt's keys are neither repeated nor concatenated, so under `vmap` over a group the prompt part is
one matrix product for all queries.

Shape suffixes besides those of `types`: M = G·T places of a group, N = rows that are computed of
them (all M unless they are packed), R = S + N rows of a prompt, d = size of a head, h = H/K query
heads that share a key head; `x` in a suffix stands for further axes, or for none.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from grpo_jax.models.attention import Scoring, attend_causal, take_rows, within
from grpo_jax.models.block import Block, embed, final_norm
from grpo_jax.models.decoder_config import AXES, DecoderConfig
from grpo_jax.models.decoding_pass import PromptCache
from grpo_jax.models.precision import cast_with_masters, gather_outer
from grpo_jax.models.rope import Positions, rotations
from grpo_jax.types import Array, Params

AXIS_NAMES = dict(AXES)
NO_WINDOW = 2**30  # longer than any text

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


class Context(NamedTuple):
    """What the passes of one model share: the arguments of `decoder`."""

    config: DecoderConfig
    remat: str
    scan: bool
    gather: Callable | None
    attention: Callable | str | None


def prefill(
    context: Context, params: Params, tokens_S: Array, mask_S: Array
) -> tuple[Array, PromptCache]:
    """`LanguageModel.prefill`: a left-padded prompt's hidden states `[S, D]`, and its cache."""
    chex.assert_rank([tokens_S, mask_S], 1)
    config = context.config
    # The first real token is at position 0 wherever it lies, so padding changes no angle.
    turns = rotations(config, jnp.cumsum(mask_S) - 1, mask_S.sum())
    # Nothing is gathered: the sampler runs this pass, on parameters that lie in its own layout.
    ungathered = context._replace(gather=None)
    attention = partial(_attend_prompt, scoring_of(config), mask_S)
    x_SD = embed(config, params, tokens_S)
    x_SD, (k_LKSd, v_LKSd) = _run_layers(ungathered, params, x_SD, turns, attention)
    # Keys as columns and each layer's by itself, as decoding reads them: once here, not at every
    # token.
    cache = PromptCache([*k_LKSd.swapaxes(2, 3)], [*v_LKSd], mask_S)
    return final_norm(config, params, x_SD), cache


def extend(context: Context, params: Params, cache: PromptCache, tokens_T: Array) -> Array:
    """`LanguageModel.extend`: hidden states `[T, D]` of a completion after a prompt's cache."""
    chex.assert_rank(tokens_T, 1)
    config = context.config
    length = cache.mask_S.sum()
    turns = rotations(config, length + jnp.arange(tokens_T.shape[0]), length)
    prompt_kv = jnp.stack(cache.k_KdS).swapaxes(2, 3), jnp.stack(cache.v_KSd)
    attention = partial(_attend_after, scoring_of(config), cache.mask_S)
    x_TD = embed(config, params, tokens_T)
    x_TD, _ = _run_layers(context, params, x_TD, turns, attention, prompt_kv)
    return final_norm(config, params, x_TD)


def forward(
    context: Context,
    params: Params,
    tokens_PS: Array,
    mask_PS: Array,
    tokens_PGT: Array,
    token_index_PN: Array | None,
) -> tuple[Array, Array]:
    """`LanguageModel.forward`: hidden states `[P, S, D]` of prompts and `[P, N, D]` of their
    groups' tokens, in one pass.
    """
    chex.assert_rank([tokens_PS, mask_PS, tokens_PGT], [2, 2, 3])
    config = context.config
    P, S = tokens_PS.shape
    G, T = tokens_PGT.shape[1:]
    packed = token_index_PN is not None
    if not packed:
        token_index_PN = jnp.broadcast_to(jnp.arange(G * T), (P, G * T))
    rows = Rows(mask_PS, token_index_PN, G, T, packed)
    tokens_PN = jax.vmap(_at_places)(tokens_PGT.reshape(P, -1), token_index_PN)
    tokens_PR = jnp.concatenate([tokens_PS, tokens_PN], 1)
    # Every completion goes on where its prompt ends; token t of it is at place g·T + t.
    prompt_end_P1 = mask_PS.sum(1, keepdims=True)
    position_PR = jnp.concatenate(
        [jnp.cumsum(mask_PS, 1) - 1, prompt_end_P1 + token_index_PN % T], 1
    )
    length_PR = jnp.broadcast_to(prompt_end_P1, position_PR.shape)
    turns = rotations(config, position_PR.reshape(-1), length_PR.reshape(-1))
    # The blocks' products see the P·R rows of all prompts at once: a weight is read once, and its
    # gradient is one product and not a sum over prompts. Only attention goes prompt by prompt.
    attention = partial(_attend_rows, context.attention, scoring_of(config), rows)
    x = embed(config, params, tokens_PR.reshape(-1))
    x, _ = _run_layers(context, params, x, turns, attention)
    hidden_PRD = final_norm(config, params, x).reshape(*tokens_PR.shape, -1)
    return hidden_PRD[:, :S], hidden_PRD[:, S:]


def outer(context: Context, params: Params) -> Params:
    """`LanguageModel.outer`: the parameters in the type that they are computed in, with embedding
    and head gathered.
    """
    # Cast before they are gathered: half as many bytes then cross between devices.
    params = cast_with_masters(context.config, params)
    if context.gather is None:
        return params
    return gather_outer(context.gather, AXIS_NAMES, params)


class Kind(NamedTuple):
    """In what a layer differs from others; None: in nothing."""

    rope_id: Array | None = None
    window: Array | None = None


def kinds_of(config: DecoderConfig) -> Kind:
    """What the scan over layers must be given of each, `[L]`; what all share is no part of it."""
    rope_id = None
    window = None
    if len(config.ropes) > 1:
        rope_id = jnp.array(config.rope_ids)
    if len(set(config.windows)) > 1:
        window = jnp.array([NO_WINDOW if size is None else size for size in config.windows])
    return Kind(rope_id, window)


def scoring_of(config: DecoderConfig) -> Scoring:
    """How the configuration's attention scores."""
    return Scoring(config.attention_scale, config.attention_cap)


def _run_layers(
    context: Context,
    params: Params,
    x_TD: Array,
    turns: tuple[list[Array], Array | None],
    attention: Callable,
    of_layers: Any = None,
) -> tuple[Array, Any]:
    """The rows behind the last layer, `[T, D]`, and what each layer's attention kept, stacked.

    `attention(of_layer, window, q_KThd, k_KTd, v_KTd) -> (out_KThd, kept)`, given its layer's slice
    of `of_layers`; `turns` is what `rotations` gives.
    """
    angles, query_scale_T = turns
    positions = Positions(angles[0] if len(angles) == 1 else jnp.stack(angles), query_scale_T)
    layer = partial(_layer, context, positions, attention)
    if context.remat != "none":
        layer = jax.checkpoint(layer, policy=REMAT[context.remat])
    step = lambda x_TD, inputs: layer(x_TD, *inputs)
    unroll = 1 if context.scan else context.config.num_hidden_layers
    inputs = params["layers"], of_layers, kinds_of(context.config)
    return jax.lax.scan(step, x_TD, inputs, unroll=unroll)


def _layer(
    context: Context,
    positions: Positions,
    attention: Callable,
    x_TD: Array,
    layer: Params,
    of_layer: Any,
    kind: Kind,
) -> tuple[Array, Any]:
    # Gathered inside of what is rematerialised: for the backward pass a layer is gathered again,
    # and never kept, so that no more than one is whole at a time.
    layer = _gather_layer(context.gather, layer)
    if kind.rope_id is not None:
        angles = jax.lax.dynamic_index_in_dim(positions.angles, kind.rope_id, keepdims=False)
        positions = positions._replace(angles=angles)
    window = context.config.windows[0] if kind.window is None else kind.window
    attention = partial(attention, of_layer, window)
    return Block(context.config).apply({"params": layer}, x_TD, positions, attention)


def _gather_layer(gather: Callable | None, layer: Params) -> Params:
    if gather is None:
        return layer
    # Within the scan a layer's arrays have no axis of layers, which is the first that is named.
    names = {name: AXIS_NAMES[f"layers/{name}"].removeprefix("layers ") for name in layer}
    return {name: gather(names[name], x) for name, x in layer.items()}


def _seen(mask_S: Array, position_S: Array, position_T: Array, window: int | Array | None) -> Array:
    """Which keys are seen: `[S]`, or `[T, S]` where queries have a window."""
    return mask_S if window is None else mask_S & within(position_T, position_S, window)


def _attend_prompt(
    scoring: Scoring,
    mask_S: Array,
    _: None,
    window: int | Array | None,
    q_KShd: Array,
    k_KSd: Array,
    v_KSd: Array,
) -> tuple[Array, tuple[Array, Array]]:
    """A prompt to itself; keeps its keys and values."""
    q, k, v = (y[:, None] for y in (q_KShd, k_KSd, v_KSd))
    position_S = jnp.cumsum(mask_S) - 1
    seen = _seen(mask_S, position_S, position_S, window)
    return attend_causal(q, k, v, seen, scoring=scoring)[:, 0], (k_KSd, v_KSd)


def _attend_after(
    scoring: Scoring,
    mask_S: Array,
    prompt_kv: tuple[Array, Array],
    window: int | Array | None,
    q_KThd: Array,
    k_KTd: Array,
    v_KTd: Array,
) -> tuple[Array, None]:
    """A completion to its prompt's cache and to itself."""
    q, k, v = (y[:, None] for y in (q_KThd, k_KTd, v_KTd))
    return _attend_completions(scoring, mask_S, prompt_kv, window, q, k, v)[:, 0], None


def _attend_completions(
    scoring: Scoring,
    mask_S: Array,
    prompt_kv: tuple[Array, Array],
    window: int | Array | None,
    q_KGThd: Array,
    k_KGTd: Array,
    v_KGTd: Array,
) -> Array:
    """Completions, each to itself and all to one prompt: `[K, G, T, h, d]`."""
    position_T = jnp.arange(q_KGThd.shape[2])
    before_S = jnp.cumsum(mask_S) - 1 - mask_S.sum()  # positions, counted from the prompt's end
    seen = _seen(mask_S, before_S, position_T, window)
    own = _seen(jnp.ones(position_T.size, bool), position_T, position_T, window)
    before = ((*prompt_kv, seen),)
    return attend_causal(q_KGThd, k_KGTd, v_KGTd, own, before, scoring=scoring)


class Rows(NamedTuple):
    """How the rows of `forward` lie: of each prompt its S tokens, then its group's tokens at N of
    the M = G·T places.

    Where rows are not `packed`, row n is place n, and nothing has to be moved.
    """

    mask_PS: Array
    token_index_PN: Array
    G: int
    T: int
    packed: bool


def _at_places(x_M: Array, place_N: Array) -> Array:
    """What stands at the places, `[N]`; 0 for the place M, which is none."""
    return x_M.at[place_N].get(mode="fill", fill_value=0)


def _attend_rows(
    attention: Callable | str | None,
    scoring: Scoring,
    rows: Rows,
    _: None,
    window: int | Array | None,
    q_KBhd: Array,
    k_KBd: Array,
    v_KBd: Array,
) -> tuple[Array, None]:
    """All B = P·R rows, each to those of its own prompt: `[K, B, h, d]`."""
    P, S = rows.mask_PS.shape
    R = S + rows.token_index_PN.shape[1]
    q, k, v = (y.reshape(y.shape[0], P, R, *y.shape[2:]) for y in (q_KBhd, k_KBd, v_KBd))
    if callable(attention):
        # A kernel scores by 1/√d, and knows no packing: it is given the M places of every group,
        # in order.
        if scoring.scale is not None:
            q = q * (scoring.scale * q.shape[-1] ** 0.5)
        q, k, v = (_move_group_rows(rows, to_places, y) for y in (q, k, v))
        out = _move_group_rows(rows, to_rows, attention(q, k, v, rows.mask_PS, T=rows.T))
    else:
        group = partial(_attend_group, scoring, rows, window)
        by_prompt = jax.vmap(group, in_axes=(1, 1, 1, 0, 0), out_axes=1)
        out = by_prompt(q, k, v, rows.mask_PS, rows.token_index_PN)
    return out.reshape(q_KBhd.shape), None


def _attend_group(
    scoring: Scoring,
    rows: Rows,
    window: int | Array | None,
    q_KRhd: Array,
    k_KRd: Array,
    v_KRd: Array,
    mask_S: Array,
    place_N: Array,
) -> Array:
    """Rows of one prompt, `[K, R, h, d]`: its own see the prompt; its group's see the prompt and
    their own completion.
    """
    G = rows.G
    T = rows.T
    S = mask_S.shape[0]
    row_M = rows_of_places(place_N, G * T) if rows.packed else None
    k_KSd = k_KRd[:, :S]
    v_KSd = v_KRd[:, :S]
    first, _ = _attend_prompt(scoring, mask_S, None, window, q_KRhd[:, :S], k_KSd, v_KSd)
    # As [G, T] each completion stands alone: one causal triangle serves all of them, and no scores
    # between siblings are computed. Packed rows begin and end elsewhere in every group; their
    # attention would be N x N scores, most of them masked.
    group = (to_places(y[:, S:], place_N, row_M) for y in (q_KRhd, k_KRd, v_KRd))
    q, k, v = (y.reshape(y.shape[0], G, T, *y.shape[2:]) for y in group)
    out = _attend_completions(scoring, mask_S, (k_KSd, v_KSd), window, q, k, v)
    out = out.reshape(out.shape[0], G * T, *out.shape[3:])
    return jnp.concatenate([first, to_rows(out, place_N, row_M)], 1)


def rows_of_places(place_N: Array, size: int) -> Array:
    """The inverse of `place_N`: which row holds each of `size` places, N where none does."""
    N = place_N.size
    return jnp.full(size, N).at[place_N].set(jnp.arange(N), mode="drop")


# `take_rows` is given rows and places, each the inverse of the other: its gradient is then a
# gather too, and not the scatter that an ordinary gather's gradient is.
_take_rows_of_heads = jax.vmap(take_rows, in_axes=(0, None, None))


def to_places(y_KNx: Array, place_N: Array, row_M: Array | None) -> Array:
    """A group's packed rows at their places, zeros where none is: `[K, M, x]`. `row_M` None: not
    packed.
    """
    return y_KNx if row_M is None else _take_rows_of_heads(y_KNx, row_M, place_N)


def to_rows(y_KMx: Array, place_N: Array, row_M: Array | None) -> Array:
    """The inverse of `to_places`: `[K, N, x]`."""
    return y_KMx if row_M is None else _take_rows_of_heads(y_KMx, place_N, row_M)


def _move_group_rows(rows: Rows, move: Callable, y_KPRx: Array) -> Array:
    """`move`, one of the two above, of every prompt's group; the prompts' own rows stay."""
    if not rows.packed:
        return y_KPRx
    S = rows.mask_PS.shape[1]

    def of_prompt(y_KRx, place_N):
        row_M = rows_of_places(place_N, rows.G * rows.T)
        return jnp.concatenate([y_KRx[:, :S], move(y_KRx[:, S:], place_N, row_M)], 1)

    return jax.vmap(of_prompt, in_axes=(1, 0), out_axes=1)(y_KPRx, rows.token_index_PN)
