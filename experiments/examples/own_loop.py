"""The stages by hand: one iteration, line by line, in place of `train`.

`python -m experiments.examples.own_loop` makes the same updates as `train` does, bit for bit. A
stage is replaced with `stages._replace(…)`, left out, or called twice; that is the whole interface.
"""

import jax

import grpo_jax


def iteration(stages: grpo_jax.Stages, state: grpo_jax.RunState):
    """`state` after one more iteration, and its metrics."""
    weights = grpo_jax.Weights(state.train.params, state.train.step, state.reference)
    key = jax.random.fold_in(state.key, state.iteration)

    prompts, row_P, data = stages.prompts(state.data)  # the next rows of the task
    served = stages.publish(weights)  # the layout that the sampler reads
    rollout = stages.generate(served, prompts, key)  # a group of completions for each prompt
    rollout = rollout._replace(row_P=row_P, update_P=row_P * 0 + weights.step)

    rollout, host = stages.shrink(rollout)  # padding is cut off; tokens and masks on the host
    fields = stages.infer(weights, rollout)  # the reference's log-probabilities, if they are read
    scores = stages.reward(host)  # texts, and the rewards of the task
    data = stages.observe(data, host, scores)  # what to remember of the batch

    batch = stages.assemble(rollout, host, scores, fields, state.objective)  # advantages
    train, objective, metrics = stages.update(state.train, weights, batch, state.objective)

    state = state._replace(
        iteration=state.iteration + 1, train=train, data=data, objective=objective
    )
    return state, metrics | {"reward": float(scores.reward_PG.mean())}


def main(steps: int = 5):
    tokenizer = grpo_jax.ByteTokenizer()
    task = grpo_jax.pricing(wording="terse", train_size=64, held_out_size=8)
    task = task._replace(reward=lambda completion: completion.isascii())
    model = grpo_jax.decoder(grpo_jax.DecoderConfig(tokenizer.vocab_size, 32, 64, 1, 4, 4, 8))
    params = jax.jit(model.init)(jax.random.key(0))
    run = (model, task, tokenizer, grpo_jax.grpo(beta=0.04), grpo_jax.adamw(1e-2))
    generation = grpo_jax.Generation(group_size=4, max_new_tokens=2)
    stages = grpo_jax.make_stages(*run, generation=generation)
    state = stages.start(params)
    for _ in range(steps):
        state, metrics = iteration(stages, state)
        print(state.iteration, metrics["reward"], metrics["loss"])
    return (*run, generation), params, state


if __name__ == "__main__":
    main()
