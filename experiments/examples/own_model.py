"""Models of one's own: a Flax NNX module, a Flax Linen module, and a bare function.

`python -m experiments.examples.own_model` trains each of them. A function from tokens to logits
keeps no cache: every sampled token costs a whole pass (see `grpo_jax/models/README.md`).
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import grpo_jax

V = grpo_jax.ByteTokenizer.vocab_size


class NNXModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(V, 32, rngs=rngs)
        self.out = nnx.Linear(32, V, rngs=rngs)

    def __call__(self, tokens_BN):
        return self.out(jnp.cumsum(self.embed(tokens_BN), axis=1))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, tokens_BN):
        return nn.Dense(V)(jnp.cumsum(nn.Embed(V, 32)(tokens_BN), axis=1))


def bigram(table_VV, tokens_BN):
    return table_VV[tokens_BN]


def models() -> dict:
    module = LinenModel()
    params = module.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    return {
        "nnx": grpo_jax.from_nnx(NNXModel(nnx.Rngs(0)), vocab_size=V),
        "linen": (grpo_jax.from_apply(module.apply, vocab_size=V), params),
        "function": (grpo_jax.from_apply(bigram, vocab_size=V), jnp.zeros((V, V))),
    }


def main(steps: int = 5, names=("nnx", "linen", "function")):
    task = grpo_jax.pricing(wording="terse", train_size=64, held_out_size=8)
    task = task._replace(reward=lambda completion: completion.isascii())
    parts = (task, grpo_jax.ByteTokenizer(), grpo_jax.grpo(), grpo_jax.adamw(1e-2))
    generation = grpo_jax.Generation(group_size=4, max_new_tokens=2)
    last = {}
    for name in names:
        run = (*models()[name], *parts)
        for state, metrics in grpo_jax.train(*run, steps=steps, generation=generation):
            last[name] = (state, metrics)
    return last


if __name__ == "__main__":
    print({name: metrics["reward"] for name, (_, metrics) in main().items()})
