"""Losses of one's own: a part, a whole loss, and a coefficient that moves.

`python -m experiments.examples.own_loss` trains a few iterations with each. How an objective is
wrapped in another one, as the corrections do it, is in `grpo_jax/objectives/README.md`.
"""

from functools import partial

import jax
import jax.numpy as jnp

import grpo_jax
from grpo_jax.objectives import adaptive_beta


def soft_gate(log_ratio, adv, *, tau):
    """A part: the cost of one token."""
    return -adv * jax.nn.sigmoid(tau * jnp.expm1(log_ratio)) * 4 / tau


def policy_gradient(logp_T, sample):
    """A whole loss: that of one sequence, and what the sum over sequences is divided by."""
    total = -jnp.sum(jnp.where(sample.mask_T, sample.adv * logp_T, 0.0))
    return grpo_jax.Mean(total, jnp.float32(1.0))


gate = partial(soft_gate, tau=1.0)
gated = grpo_jax.compose(grpo_jax.per_token, gate, grpo_jax.sequence_mean)
OBJECTIVES = {
    "gated": grpo_jax.Objective(grpo_jax.standardize, gated),
    "written": grpo_jax.Objective(grpo_jax.standardize, policy_gradient),
    "adaptive": grpo_jax.AdaptiveObjective(  # β is a number of the state: nothing compiles again
        init=lambda: jnp.float32(0.04),
        bind=lambda beta: grpo_jax.grpo(beta=beta),
        step=lambda beta, metrics: adaptive_beta(beta, metrics["kl"], target=0.01),
    ),
}


def main(steps: int = 5, names=tuple(OBJECTIVES)):
    tokenizer = grpo_jax.ByteTokenizer()
    task = grpo_jax.pricing(wording="terse", train_size=64, held_out_size=8)
    task = task._replace(reward=lambda completion: completion.isascii())
    model = grpo_jax.decoder(grpo_jax.DecoderConfig(tokenizer.vocab_size, 32, 64, 1, 4, 4, 8))
    params = jax.jit(model.init)(jax.random.key(0))
    generation = grpo_jax.Generation(group_size=4, max_new_tokens=2)
    last = {}
    for name in names:
        run = (model, params, task, tokenizer, OBJECTIVES[name], grpo_jax.adamw(1e-2))
        for state, metrics in grpo_jax.train(*run, steps=steps, generation=generation):
            print(name, metrics["iteration"], metrics["reward"], metrics["loss"])
            last[name] = (state, metrics)
    return last


if __name__ == "__main__":
    main()
