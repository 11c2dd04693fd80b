"""A task from a JSONL file: two weighted rewards, its own evaluation, a Hugging Face folder.

python -m experiments.examples.own_task

A line of the file is a row. A reward function takes the columns that it names.
"""

import json
import random
import tempfile
from pathlib import Path

import jax
from grpo_jax import ByteTokenizer, DecoderConfig, Generation, Sampling, Scoring, Task, adamw
from grpo_jax import decoder, evaluate, grpo, keep_programs, run_folder, save_pretrained, sft, train

GENERATION = Generation(group_size=8, max_new_tokens=4)
GREEDY = Generation(group_size=1, max_new_tokens=4, sampling=Sampling(temperature=0.0))


def right(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)


def digits(completion: str) -> float:
    return sum(map(str.isdigit, completion)) / max(len(completion), 1)


def write_rows(path: Path) -> Path:
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    random.Random(0).shuffle(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load_task(path: Path) -> Task:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    ask = lambda row: [{"role": "user", "content": row["question"]}]
    return Task("sums", rows[16:], rows[:16], ask, [right, digits], lambda row: row["answer"])


def main(steps: int = 40, sft_steps: int = 150, rows: Path | None = None, out: Path | None = None):
    out = out or Path(tempfile.mkdtemp())
    task = load_task(rows or write_rows(out / "rows.jsonl"))
    keep_programs()  # the next start compiles nothing
    tokenizer = ByteTokenizer()
    model = decoder(DecoderConfig(tokenizer.vocab_size, 64, 128, 2, 4, 4, 16))
    params = jax.jit(model.init)(jax.random.key(0))
    for start, _ in sft(model, params, task, tokenizer, adamw(3e-3), steps=sft_steps):
        params = start.params
    options = {"generation": GENERATION, "scoring": Scoring(weights=(1.0, 0.1))}
    with run_folder(out / "run") as folder:
        for state, metrics in train(
            model, params, task, tokenizer, grpo(), adamw(1e-3), steps=steps, **options
        ):
            folder.log(metrics)
            print(metrics["iteration"], metrics["reward"])
    params = state.train.params
    found = evaluate(model, params, tokenizer, task, task.held_out, generation=GREEDY)
    for row, (text,) in zip(task.held_out, found.texts, strict=True):
        print(row["question"], text)
    save_pretrained(out / "model", model.config, params)
    return found, out


if __name__ == "__main__":
    main()
