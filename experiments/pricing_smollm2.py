"""GRPO on a real pretrained model: SmolLM2-135M-Instruct learns the pricing task; a paired test
says whether it did.

    python -m experiments.pricing_smollm2 [--out RUN] [--steps N] ...

Converts the model where that has not been done (see `experiments.smollm2`), trains it with the
command line's own code, then compares the first and the last checkpoint on held-out rows, greedy,
row by row, with the exact two-sided McNemar test: of the rows that changed, as many would get
better as get worse if training had done nothing.
"""

import dataclasses
import math
from pathlib import Path

import tyro
from rich.console import Console

from experiments.smollm2 import smollm2_folder
from grpo_jax.config import TrainConfig
from grpo_jax.runs import run
from grpo_jax.runs.folder import write_json


@dataclasses.dataclass(frozen=True)
class Study:
    out: str = "runs/pricing-smollm2"
    """The run folder."""
    steps: int = 60
    """GRPO iterations."""
    prompts_per_step: int = 2
    """Prompts in an iteration."""
    group_size: int = 8
    """Completions of each prompt."""
    max_new_tokens: int = 64
    """Length limit of a completion, in tokens."""
    temperature: float = 0.7
    """Of sampling and training; evaluation is greedy."""
    learning_rate: float = 1e-5
    """Of AdamW."""
    level: int = 1
    """Of the pricing task."""
    rows: int = 160
    """Held-out rows to compare on."""
    compute_dtype: str | None = None
    """The type of activations and products: float32 or bfloat16; None: float32."""
    save_every: int = 20
    """Iterations between checkpoints."""
    seed: int = 0
    resume: bool = False
    """Continue behind the newest checkpoint of the run folder."""


def mcnemar(better: int, worse: int) -> float:
    """Exact two-sided p-value of `better` and `worse` discordant pairs under a fair coin (McNemar
    1947).
    """
    n = better + worse
    low = min(better, worse)
    tail = sum(math.comb(n, i) for i in range(low + 1)) / 2**n
    return min(1.0, 2 * tail)


def main(study: Study) -> dict:
    out = Path(study.out)
    config = TrainConfig.of(
        model=str(smollm2_folder()),
        task_args=(f"level={study.level}", f"held_out_size={study.rows}"),
        steps=study.steps,
        prompts_per_step=study.prompts_per_step,
        group_size=study.group_size,
        max_new_tokens=study.max_new_tokens,
        temperature=study.temperature,
        learning_rate=study.learning_rate,
        eval_every=study.steps,
        compute_dtype=study.compute_dtype,
        save_every=study.save_every,
        seed=study.seed,
        out=str(out),
    )
    summary = run.train(config, resume=study.resume)
    rewards = []
    for iteration in (0, None):
        opened = run.open_run(out, iteration)
        _, result = run.held_out(opened.config, opened.components, opened.params)
        rewards.append(result.reward_PN[:, 0])
    better = int((rewards[1] > rewards[0]).sum())
    worse = int((rewards[1] < rewards[0]).sum())
    figures = {
        "before": float(rewards[0].mean()),
        "after": float(rewards[1].mean()),
        "rows": len(rewards[0]),
        "better": better,
        "worse": worse,
        "p_two_sided": mcnemar(better, worse),
        "seconds": summary["seconds"],
        "steps": study.steps,
    }
    write_json(out / "paired_test.json", figures)
    moved = f"{figures['before']:.1%} → {figures['after']:.1%} on {figures['rows']} rows"
    Console().print(
        f"held-out accuracy {moved}: {better} better, {worse} worse; exact two-sided McNemar p = "
        f"{figures['p_two_sided']:.2g}",
        highlight=False,
    )
    return figures


if __name__ == "__main__":
    main(tyro.cli(Study, description=__doc__.splitlines()[0]))
