"""Matrix products, each written in the form that is fastest where it is used; the numbers are those
of `x @ w`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from grpo_jax.types import Array


def einsum32(spec: str, x: Array, y: Array) -> Array:
    """`einsum` of any dtype, summed in float32. XLA's CPU back end lacks some bfloat16 products:
    there, of float32.
    """
    product = partial(jnp.einsum, spec, preferred_element_type=jnp.float32)
    if x.dtype == y.dtype == jnp.float32:
        return product(x, y)
    upcast = lambda x, y: product(x.astype(jnp.float32), y.astype(jnp.float32))
    return jax.lax.platform_dependent(x, y, cpu=upcast, default=product)


@jax.custom_vjp
def up_projection(x_TD: Array, w_DF: Array) -> Array:
    """`x @ w` for D < F. Its gradient for w is written as `xᵀ g`: the product transposes x, the
    smaller of the two.

    JAX's own `(gᵀ x)ᵀ` makes XLA's CPU back end compute g, with all that is fused into it, along
    its long side. Forward-mode differentiation stops here: JAX has none of a `custom_vjp`.
    """
    return x_TD @ w_DF


def _up_projection_forward(x_TD, w_DF):
    # Not `up_projection` again: a remat policy sees products, not what is in a custom_vjp.
    return x_TD @ w_DF, (x_TD, w_DF)


def _up_projection_backward(kept, g_TF):
    x_TD, w_DF = kept
    return g_TF @ w_DF.T, jax.lax.dot_general(x_TD, g_TF, (((0,), (0,)), ((), ())))


up_projection.defvjp(_up_projection_forward, _up_projection_backward)


@custom_vmap
def small_batch_matmul(x_ND: Array, w_FD: Array) -> Array:
    """`x @ wᵀ` in float32 where x has few rows, as decoding has; under `vmap` the rows of all
    sequences at once.

    On CPUs as `(w xᵀ)ᵀ`: of all forms of this product the fastest there, at 32 rows by a quarter.
    The barriers keep XLA from turning it back into another one.
    """

    def columns(x_ND, w_FD):
        barrier = jax.lax.optimization_barrier
        return barrier(einsum32("fd,dn->fn", w_FD, barrier(x_ND.T))).T

    rows = partial(einsum32, "nd,fd->nf")
    return jax.lax.platform_dependent(x_ND, w_FD, cpu=columns, default=rows)


@small_batch_matmul.def_vmap
def _rows_of_all_sequences(axis_size, batched, x_BND, w_FD):
    if batched != [True, False]:
        raise NotImplementedError("small_batch_matmul is mapped over its rows alone")
    B, N, D = x_BND.shape
    return small_batch_matmul(x_BND.reshape(B * N, D), w_FD).reshape(B, N, -1), True
