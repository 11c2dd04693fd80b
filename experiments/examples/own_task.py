"""A task from a JSONL file: two weighted rewards, an evaluation of its own, a Hugging Face folder.

`python -m experiments.examples.own_task` writes rows (a line of the file is one), trains on them,
evaluates the policy and saves it. A reward function takes the columns that it names.
"""

import json
import random
import tempfile
from pathlib import Path

import jax

import grpo_jax

GENERATION = grpo_jax.Generation(group_size=8, max_new_tokens=2)
GREEDY = grpo_jax.Generation(1, max_new_tokens=2, sampling=grpo_jax.Sampling(temperature=0.0))


def near(completion: str, answer: str) -> float:
    """1 for the right sum, less for a number that is further off."""
    return 1 - abs(int(completion) - int(answer)) / 100 if completion.isdecimal() else 0.0


def digits(completion: str) -> float:
    return sum(map(str.isdecimal, completion)) / max(len(completion), 1)


def write_rows(path: Path) -> Path:
    pairs = random.Random(0).sample([(a, b) for a in range(10, 50) for b in range(10, 50)], 500)
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def main(steps: int = 60, data: Path | None = None, out: Path | None = None):
    out = out or Path(tempfile.mkdtemp())
    data = data or write_rows(out / "rows.jsonl")
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    ask = lambda row: [{"role": "user", "content": row["question"]}]
    answer = lambda row: row["answer"]
    task = grpo_jax.Task("sums", rows[32:], rows[:32], ask, [near, digits], target=answer)
    tokenizer = grpo_jax.ByteTokenizer()
    model = grpo_jax.decoder(grpo_jax.DecoderConfig(tokenizer.vocab_size, 32, 64, 2, 4, 4, 8))
    params = jax.jit(model.init)(jax.random.key(0))
    run = (model, params, task, tokenizer, grpo_jax.grpo(beta=0.0), grpo_jax.adamw(3e-3))
    options = {"generation": GENERATION, "scoring": grpo_jax.Scoring(weights=(1.0, 0.1))}
    grpo_jax.keep_programs()  # the next start compiles nothing
    with grpo_jax.run_folder(out / "run") as folder:  # metrics, timings, texts, TensorBoard
        for state, metrics in grpo_jax.train(*run, steps=steps, **options):
            folder.log(metrics)
            params = state.train.params
    found = grpo_jax.evaluate(model, params, tokenizer, task, task.held_out, generation=GREEDY)
    right = sum(t == row["answer"] for row, (t,) in zip(task.held_out, found.texts, strict=True))
    print(f"training reward {metrics['reward']:.3f}; {right} of {len(found.texts)} sums right")
    return metrics, grpo_jax.save_pretrained(out / "model", model.config, params)


if __name__ == "__main__":
    main()
