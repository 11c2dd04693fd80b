"""A script for TRL, as comments, beside the same training here: rows and reward functions stay.

`python -m experiments.examples.from_trl` trains a tiny model. `load_pretrained` and
`load_tokenizer` take the folder or the Hub id that is TRL's `model=`.
"""

import tempfile

import jax

import grpo_jax
from grpo_jax.rewards import trl_style

DATASET = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]


def digits(completions, **columns):
    return [sum(map(str.isdecimal, text)) / 2 for text in completions]


def right(completions, answer, **columns):
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def main(steps: int = 5, out: str | None = None):
    tokenizer = grpo_jax.ByteTokenizer()
    model = grpo_jax.decoder(grpo_jax.DecoderConfig(tokenizer.vocab_size, 32, 64, 1, 4, 4, 8))
    params = jax.jit(model.init)(jax.random.key(0))
    # GRPOTrainer(model=…, train_dataset=DATASET, reward_funcs=[digits, right], args=GRPOConfig(
    task = grpo_jax.Task(
        name="sums",
        train=DATASET[8:],
        held_out=DATASET[:8],
        prompt=lambda row: [{"role": "user", "content": row["prompt"]}],
        reward=[trl_style(digits), trl_style(right)],
        target=lambda row: row["answer"],  # a right completion, for supervised updates
    )
    generation = grpo_jax.Generation(
        group_size=4,  #                               num_generations=4,
        max_new_tokens=2,  #                           max_completion_length=2,
        sampling=grpo_jax.Sampling(temperature=1.0),  # temperature=1.0,
    )
    #   per_device_train_batch_size=32 completions of 4 a prompt, gradient_accumulation_steps=2,
    batching = grpo_jax.Batching(prompts_per_step=16)
    update = grpo_jax.Update(epochs=1, microbatches=2)  # num_iterations=1,
    scoring = grpo_jax.Scoring(weights=(1.0, 0.5))  #     reward_weights=[1.0, 0.5],
    # loss_type="grpo", epsilon=0.2, epsilon_high=0.28, beta=0.04,
    objective = grpo_jax.grpo(low=0.2, high=0.28, beta=0.04)
    # learning_rate=1e-2, warmup_steps=1, lr_scheduler_type="linear", max_grad_norm=1.0,
    optimizer = grpo_jax.adamw(1e-2, lr_warmup=1, schedule="linear", clip_norm=1.0)
    run = (model, params, task, tokenizer, objective, optimizer)
    options = {"batching": batching, "update": update, "scoring": scoring}
    with grpo_jax.run_folder(out or tempfile.mkdtemp()) as folder:  # output_dir=…, max_steps=5
        for _, metrics in grpo_jax.train(*run, steps=steps, generation=generation, **options):
            folder.log(metrics)
    return metrics


if __name__ == "__main__":
    print(main()["reward"])
