"""A sampler of one's own in place of a stage: of twice as many completions the finished ones first.

`python -m experiments.examples.own_sampler` replaces `Stages.generate`. An engine of another
program comes in the same way: `publish` hands it the weights, and `generate` returns its tokens as
a `Rollout`, with the log-probabilities that they were drawn with.
"""

from functools import partial

import jax
import jax.numpy as jnp

import grpo_jax


@partial(jax.jit, static_argnums=(0, 1, 2))
def finished_first(model, generation, tokenizer, served, prompts, key) -> grpo_jax.Rollout:
    """Samples 2 G completions and keeps G of each group, those that stopped before the others.

    What is trained on is then no longer what the policy gives: an example, not advice.
    """
    G = generation.group_size
    wide = generation._replace(group_size=2 * G)
    ids = {"stop_ids": tokenizer.stop_ids, "pad_id": tokenizer.pad_id}
    drawn = grpo_jax.generate(model, served, prompts, key, generation=wide, **ids)
    order_PG = jnp.argsort(~drawn.stopped_PG, axis=1, stable=True)[:, :G]

    def take(x):
        index = order_PG.reshape(order_PG.shape + (1,) * (x.ndim - 2))
        return jnp.take_along_axis(x, index, axis=1)

    fields = ("tokens_PGT", "mask_PGT", "logp_PGT", "stopped_PG")
    return drawn._replace(**{name: take(getattr(drawn, name)) for name in fields})


def main(steps: int = 5):
    tokenizer = grpo_jax.ByteTokenizer()
    task = grpo_jax.pricing(wording="terse", train_size=64, held_out_size=8)
    task = task._replace(reward=lambda completion: completion.isascii())
    model = grpo_jax.decoder(grpo_jax.DecoderConfig(tokenizer.vocab_size, 32, 64, 1, 4, 4, 8))
    params = jax.jit(model.init)(jax.random.key(0))
    generation = grpo_jax.Generation(group_size=4, max_new_tokens=16)
    run = (model, task, tokenizer, grpo_jax.grpo(beta=0.0), grpo_jax.adamw(1e-2))
    stages = grpo_jax.make_stages(*run, generation=generation)
    stages = stages._replace(generate=partial(finished_first, model, generation, tokenizer))
    for state, metrics in grpo_jax.iterate(stages, stages.start(params), steps=steps):
        print(state.iteration, metrics["reward"], metrics["truncated"])
    return state, metrics


if __name__ == "__main__":
    main()
