"""A small causal model as a Flax NNX module."""

import jax.numpy as jnp
from flax import nnx


class Averager(nnx.Module):
    """Logits of the running mean of embeddings, times a fixed scale that is no parameter."""

    def __init__(self, vocab: int, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(2)])
        self.out = nnx.Linear(width, vocab, rngs=rngs)
        self.scale = nnx.Variable(jnp.float32(3.0))

    def __call__(self, tokens_BN):
        x = self.embed(tokens_BN)
        x = jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None]
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.scale[...] * self.out(x)
