"""Parameters of one type, products of another: masters in float32, matrices computed in bfloat16.

    y = x · cast(W)        ∂L/∂W = Σ over tokens, in float32

Every matrix is cast once a pass, before anything gathers or reads it. Scales and biases stay as
they are: they are small, and are applied in float32. The embedding and the head are special: their
gradients are sums over all tokens of a batch, which in bfloat16 lose what a frequent token adds (a
token that is seen 2113 times kept 74 % of its gradient's norm). Their products therefore take two
forms of the weights: the cast one, which is read, and the master, which receives the gradient.

Left out on purpose: scaled or quantised types.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.models.decoder_config import DecoderConfig
from grpo_jax.models.matmul import einsum32
from grpo_jax.types import Array, Params

MASTERS = "masters"  # where a cast tree keeps the embedding and the head that gradients go to


def is_mixed(config: DecoderConfig) -> bool:
    """Whether matrices are computed in another type than they are kept in."""
    return config.stored_dtype != config.dtype


def cast(config: DecoderConfig, params: Params) -> Params:
    """The parameters, with all matrices in the type that they are computed in."""
    return cast_matrices(config, params) if is_mixed(config) else params


@partial(jax.jit, static_argnums=0)
def cast_matrices(config: DecoderConfig, params: Params) -> Params:
    """`cast`, compiled by itself."""

    def narrowed(path: tuple, x: Array) -> Array:
        name = str(path[-1].key)
        return x if name.endswith(("norm", "bias")) else x.astype(config.dtype)

    return jax.tree_util.tree_map_with_path(narrowed, params)


def cast_with_masters(config: DecoderConfig, params: Params) -> Params:
    """As `cast`, with the masters of the embedding and the head, for a pass with a gradient."""
    if not is_mixed(config):
        return params
    names = [name for name in ("embed", "head") if name in params]
    return cast(config, params) | {MASTERS: {name: params[name] for name in names}}


def gather_outer(gather: Callable[[str, Array], Array], axes: dict[str, str], params: Params):
    """The parameters, with embedding and head as `gather` lays them out.

    Their masters are laid out alike: the gradient of a master is summed over chunks of tokens, and
    takes its layout. Spread over devices, it would cross them once a chunk; whole on each device it
    is a sum of local products, and XLA moves the one sum over devices behind the loop.
    """
    names = [name for name in ("embed", "head") if name in params]
    whole = lambda tree: {name: gather(axes[name], tree[name]) for name in names}
    gathered = params | whole(params)
    return gathered | {MASTERS: whole(params[MASTERS])} if MASTERS in params else gathered


def embed_rows(params: Params, tokens_T: Array) -> Array:
    """The tokens' rows of the embedding, `[T, D]`."""
    table_VD = params["embed"]
    if MASTERS not in params:
        return _rows(table_VD, tokens_T)
    return _rows_of_master(table_VD, params[MASTERS]["embed"], tokens_T)


def _rows(table_VD: Array, tokens_T: Array) -> Array:
    # Clipped and not filled: an id outside the vocabulary, which no caller means, gives a finite
    # row, where NaN would spread through the sums of everything beside it.
    return table_VD.at[tokens_T].get(mode="clip")


@jax.custom_vjp
def _rows_of_master(table_VD: Array, master_VD: Array, tokens_T: Array) -> Array:
    return _rows(table_VD, tokens_T)


def _rows_forward(table_VD, master_VD, tokens_T):
    return _rows(table_VD, tokens_T), (table_VD, _type_of(master_VD), tokens_T)


def _rows_backward(kept, g_TD):
    table_VD, type_of_master, tokens_T = kept
    grad_VD = jnp.zeros_like(table_VD, dtype=type_of_master.dtype)
    grad_VD = grad_VD.at[tokens_T].add(g_TD.astype(grad_VD.dtype), mode="clip")
    return jnp.zeros_like(table_VD), grad_VD, None


_rows_of_master.defvjp(_rows_forward, _rows_backward)


def _type_of(master: Array) -> Array:
    # No number of a master is read, so that whoever gathers it moves nothing but its gradient.
    return jnp.zeros(0, master.dtype)


def project(params: Params, name: str, spec: str, hidden_D: Array) -> Array:
    """Float32 `einsum(spec, hidden, head)`; `name` is the head, or the embedding that is tied."""
    head = params[name]
    if MASTERS not in params:
        return einsum32(spec, hidden_D, head)
    return _project_to_master(spec, hidden_D, head, params[MASTERS][name])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project_to_master(spec: str, hidden_D: Array, head: Array, master: Array) -> Array:
    return einsum32(spec, hidden_D, head)


def _project_forward(spec: str, hidden_D, head, master):
    return einsum32(spec, hidden_D, head), (hidden_D, head, _type_of(master))


def _project_backward(spec: str, kept: tuple, g_V: Array) -> tuple[Any, ...]:
    """The gradient of the hidden state in its own type, that of the head in the master's."""
    hidden_D, head, type_of_master = kept
    inputs, out = spec.split("->")
    hidden, weights = inputs.split(",")
    wide = head.astype(jnp.float32)
    grad_hidden = einsum32(f"{out},{weights}->{hidden}", g_V, wide).astype(hidden_D.dtype)
    grad_head = _summed_over_rows(weights, hidden_D.astype(jnp.float32), g_V)
    return grad_hidden, jnp.zeros_like(head), grad_head.astype(type_of_master.dtype)


def _summed_over_rows(weights: str, hidden_D: Array, g_V: Array) -> Array:
    rows = hidden_D.reshape(-1, hidden_D.shape[-1])
    grads = g_V.reshape(-1, g_V.shape[-1])
    return einsum32(f"nd,nv->{weights}", rows, grads)


_project_to_master.defvjp(_project_forward, _project_backward)
