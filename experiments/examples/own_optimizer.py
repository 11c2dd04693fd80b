"""Optimisers of one's own: any Optax transformation, frozen parameters, and averaged ones.

`python -m experiments.examples.own_optimizer` trains a few iterations with each.
"""

import jax
import optax

import grpo_jax


def freeze(params, optimizer):
    """The optimiser without the embedding and the norms, which then have no moments in memory."""

    def label(path, _) -> str:
        name = jax.tree_util.keystr(path)
        return "frozen" if "embed" in name or "norm" in name else "trained"

    labels = jax.tree_util.tree_map_with_path(label, params)
    return optax.partition({"trained": optimizer, "frozen": optax.set_to_zero()}, labels)


def keep_lowest(updates, params):
    """The lowest layer stays: a decoder's layers are stacked along the first axis of each array."""
    return updates | {"layers": jax.tree.map(lambda x: x.at[0].set(0.0), updates["layers"])}


def optimizers(params, steps: int) -> dict[str, optax.GradientTransformation]:
    clip = optax.clip_by_global_norm(1.0)
    cosine = optax.cosine_decay_schedule(1e-2, steps)
    return {
        "lion": optax.chain(clip, optax.lion(cosine, weight_decay=0.01)),
        "adafactor": optax.adafactor(1e-2),
        # The parameters move after every second iteration, by the mean gradient of both.
        "multi_steps": optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
        "frozen": freeze(params, grpo_jax.adamw(1e-2)),
        "frozen_layer": optax.chain(grpo_jax.adamw(1e-2), optax.stateless(keep_lowest)),
    }


def main(steps: int = 4, names=("lion", "adafactor", "multi_steps", "frozen", "frozen_layer")):
    tokenizer = grpo_jax.ByteTokenizer()
    task = grpo_jax.pricing(wording="terse", train_size=64, held_out_size=8)
    task = task._replace(reward=lambda completion: completion.isascii())
    model = grpo_jax.decoder(grpo_jax.DecoderConfig(tokenizer.vocab_size, 32, 64, 2, 4, 4, 8))
    params = jax.jit(model.init)(jax.random.key(0))
    generation = grpo_jax.Generation(group_size=4, max_new_tokens=2)
    found = {}
    for name in names:
        run = (model, params, task, tokenizer, grpo_jax.grpo(), optimizers(params, steps)[name])
        average = params  # a moving average of the policy, to evaluate or to save
        for state, metrics in grpo_jax.train(*run, steps=steps, generation=generation):
            average = optax.incremental_update(state.train.params, average, step_size=0.1)
            found[name] = (state.train.params, average, metrics)
    return params, found


if __name__ == "__main__":
    for name, (_, _, metrics) in main()[1].items():
        print(name, metrics["reward"])
