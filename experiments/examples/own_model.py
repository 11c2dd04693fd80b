"""Models of one's own: a Flax NNX module, a Flax Linen module, and a bare function.

`python -m experiments.examples.own_model` trains each of them. A function from tokens to logits
keeps no cache, so that every token costs a whole pass; see `grpo_jax/models/README.md`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import grpo_jax

V = grpo_jax.ByteTokenizer.vocab_size


def running_mean(x_BND):
    return jnp.cumsum(x_BND, axis=1) / jnp.arange(1, x_BND.shape[1] + 1)[:, None]


class NNXModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(V, 32, rngs=rngs)
        self.out = nnx.Linear(64, V, rngs=rngs)

    def __call__(self, tokens_BN):
        x = self.embed(tokens_BN)
        return self.out(jnp.concatenate([x, running_mean(x)], axis=-1))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, tokens_BN):
        x = nn.Embed(V, 32)(tokens_BN)
        return nn.Dense(V)(jnp.concatenate([x, running_mean(x)], axis=-1))


def bigram(params, tokens_BN):
    return params["table"][tokens_BN]


def models() -> dict:
    """Each as `(model, params)`."""
    linen = LinenModel()
    example = jnp.zeros((1, 2), jnp.int32)
    key = jax.random.key(0)
    table = {"table": 0.1 * jax.random.normal(key, (V, V))}
    return {
        "nnx": grpo_jax.from_nnx(NNXModel(nnx.Rngs(0)), vocab_size=V),
        "linen": (grpo_jax.from_apply(linen.apply, vocab_size=V), linen.init(key, example)),
        "function": (grpo_jax.from_apply(bigram, vocab_size=V), table),
    }


def main(steps: int = 5, names=("nnx", "linen", "function")):
    task = grpo_jax.pricing(wording="terse", train_size=64, held_out_size=8)
    task = task._replace(reward=lambda completion: completion.isascii())
    generation = grpo_jax.Generation(group_size=4, max_new_tokens=2)
    last = {}
    for name in names:
        run = (
            *models()[name],
            task,
            grpo_jax.ByteTokenizer(),
            grpo_jax.grpo(),
            grpo_jax.adamw(1e-2),
        )
        for state, metrics in grpo_jax.train(*run, steps=steps, generation=generation):
            print(name, metrics["iteration"], metrics["reward"])
            last[name] = (state, metrics)
    return last


if __name__ == "__main__":
    main()
