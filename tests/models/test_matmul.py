"""Products in other forms are the same products."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.models.matmul import small_batch_matmul, up_projection

KEYS = jax.random.split(jax.random.key(0))


def test_a_widening_product_has_the_gradient_of_a_product():
    """With the smaller operand transposed: a program of its gradient for w holds no transpose of the wide one."""
    x, w = jax.random.normal(jax.random.key(0), (5, 3)), jax.random.normal(jax.random.key(1), (3, 7))
    loss = lambda product: lambda x, w: jnp.sin(product(x, w)).sum()
    got, wanted = (jax.grad(loss(f), argnums=(0, 1))(x, w) for f in (up_projection, jnp.matmul))
    chex.assert_trees_all_close(got, wanted, rtol=1e-6)
    dots = [
        e
        for e in jax.make_jaxpr(jax.grad(loss(up_projection), argnums=1))(x, w).eqns
        if e.primitive.name == "dot_general"
    ]
    assert dots[-1].outvars[0].aval.shape == (3, 7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_batch_matmul_is_a_product_under_any_vmap(dtype):
    x, w = jax.random.normal(KEYS[0], (2, 3, 1, 5), dtype), jax.random.normal(KEYS[1], (7, 5), dtype)
    mapped = jax.jit(jax.vmap(jax.vmap(small_batch_matmul, in_axes=(0, None)), in_axes=(0, None)))
    assert mapped(x, w).dtype == jnp.float32
    np.testing.assert_allclose(mapped(x, w), np.einsum("pgnd,fd->pgnf", *map(np.float32, (x, w))), rtol=1e-5, atol=1e-5)


def test_rows_of_all_sequences_are_one_product():
    """One product of 6 rows, and not 6 of one: what makes the weights be read once."""
    x, w = jnp.ones((2, 3, 1, 5)), jnp.ones((7, 5))
    mapped = jax.vmap(jax.vmap(small_batch_matmul, in_axes=(0, None)), in_axes=(0, None))
    lines = [line for line in jax.jit(mapped).lower(x, w).as_text().splitlines() if "dot_general" in line]
    assert lines
    assert all("tensor<7x6xf32>" in line for line in lines)


def test_weights_of_each_sequence_are_refused():
    with pytest.raises(NotImplementedError, match="over its rows alone"):
        jax.vmap(small_batch_matmul)(jnp.ones((2, 1, 5)), jnp.ones((2, 7, 5)))
