"""Optimisers of one's own: any Optax transformation, frozen parameters, and averaged ones.

`python -m experiments.examples.own_optimizer` trains a few iterations with each of them.
"""

import jax
import jax.numpy as jnp
import optax

import grpo_jax


def label(path, _) -> str:
    """The embedding and the norms stay as they are."""
    name = jax.tree_util.keystr(path)
    return "frozen" if "embed" in name or "norm" in name else "trained"


def freeze(params, optimizer):
    """The optimiser, for a part of the parameters; the others have no moments in memory."""
    labels = jax.tree_util.tree_map_with_path(label, params)
    return optax.partition({"trained": optimizer, "frozen": optax.set_to_zero()}, labels)


def freeze_lower(optimizer, count: int):
    """The lowest `count` layers stay: a decoder's layers are stacked along their first axis."""

    def mask(updates, params):
        keep = lambda x: jnp.where(
            (jnp.arange(len(x)) >= count).reshape(-1, *[1] * (x.ndim - 1)), x, 0
        )
        return updates | {"layers": jax.tree.map(keep, updates["layers"])}

    return optax.chain(optimizer, optax.stateless(mask))


def optimizers(params, steps: int) -> dict[str, optax.GradientTransformation]:
    clip = optax.clip_by_global_norm(1.0)
    cosine = optax.cosine_decay_schedule(1e-2, steps)
    return {
        "lion": optax.chain(clip, optax.lion(cosine, weight_decay=0.01)),
        "adafactor": optax.adafactor(1e-2),
        # An update of the parameters after every second iteration, by the mean gradient of both.
        "multi_steps": optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
        "frozen": freeze(params, grpo_jax.adamw(1e-2)),
        "frozen_lower": freeze_lower(grpo_jax.adamw(1e-2), 1),
    }


def main(steps: int = 4, names=("lion", "adafactor", "multi_steps", "frozen", "frozen_lower")):
    tokenizer = grpo_jax.ByteTokenizer()
    task = grpo_jax.pricing(wording="terse", train_size=64, held_out_size=8)
    task = task._replace(reward=lambda completion: completion.isascii())
    model = grpo_jax.decoder(grpo_jax.DecoderConfig(tokenizer.vocab_size, 32, 64, 2, 4, 4, 8))
    params = jax.jit(model.init)(jax.random.key(0))
    generation = grpo_jax.Generation(group_size=4, max_new_tokens=2)
    trained, average = {}, {}
    for name in names:
        optimizer = optimizers(params, steps)[name]
        run = (model, params, task, tokenizer, grpo_jax.grpo(), optimizer)
        average[name] = params
        for state, metrics in grpo_jax.train(*run, steps=steps, generation=generation):
            trained[name] = state.train.params
            # A moving average of the policy, to evaluate or to save.
            average[name] = optax.incremental_update(trained[name], average[name], step_size=0.1)
            print(name, metrics["iteration"], metrics["reward"])
    return params, trained, average


if __name__ == "__main__":
    main()
