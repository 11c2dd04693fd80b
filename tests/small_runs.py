"""Runs of the bigram model in this process, and what it means that two of them are the same."""

import dataclasses
import io
import json
from pathlib import Path

import chex
from grpo_jax.components import build, stages_of
from grpo_jax.config import TrainConfig, load_config
from grpo_jax.runs import checkpoint, run
from grpo_jax.runs.folder import read_lines
from grpo_jax.runs.starting import queued_shapes
from grpo_jax.runs.terminal import Screen
from rich.console import Console

# A run in this process.
SMALL = {
    "task": "letters", "steps": 3, "prompts_per_step": 2, "group_size": 4, "max_new_tokens": 8, "sft_steps": 0,
    "learning_rate": 0.05, "lr_warmup": 0, "eval_rows": 3, "save_every": 1, "keep_checkpoints": 2, "length_buckets": 1,
    "pack_tokens": False, "drop_zero_variance": False, "compactions": 0,
}  # fmt: skip


class Silent(Screen):
    """Keeps what it is told."""

    def __init__(self):
        super().__init__(Console(file=io.StringIO(), width=200), interval=0.0)

    @property
    def text(self) -> str:
        return self.console.file.getvalue()


def small(**options) -> TrainConfig:
    return TrainConfig.of("bigram", **SMALL | options)


def go(config: TrainConfig, folder: Path, *, screen: Screen | None = None, **options) -> dict:
    """The run of a configuration in a folder."""
    return run.train(dataclasses.replace(config, out=str(folder)), screen=screen or Silent(), **options)


def state_of(folder, iteration=None):
    """Everything in a checkpoint of a run, and its record."""
    config = load_config(folder)
    components = build(config)
    like = stages_of(config, components).start(components.params)
    queued = queued_shapes(config, components.prompt_length)
    with checkpoint.open_checkpoints(folder / "checkpoints", keep=None) as checkpoints:
        return checkpoint.restore(checkpoints, like, iteration, queued=queued)


def same_run(left, right):
    """Byte for byte and bit for bit, but for the clock and the folder's own name."""
    for name in ("metrics.jsonl", "completions.jsonl"):
        assert (left / name).read_bytes() == (right / name).read_bytes(), name
    a, b = (json.loads((folder / "summary.json").read_text()) for folder in (left, right))
    assert a | {"seconds": 0} == b | {"seconds": 0}
    assert dataclasses.replace(load_config(left), out=None) == dataclasses.replace(load_config(right), out=None)
    names = [sorted(path.name for path in (folder / "checkpoints").iterdir()) for folder in (left, right)]
    assert names[0] == names[1]
    (saved, record), (other, other_record) = state_of(left), state_of(right)
    assert record | {"seconds": 0} == other_record | {"seconds": 0}
    assert min(record["seconds"], other_record["seconds"]) > 0
    chex.assert_trees_all_equal(saved, other)
    # An interrupted run measured some steps twice; its timings tell of each step once.
    assert [row["step"] for row in read_lines(left / "timings.jsonl")] == [
        row["step"] for row in read_lines(right / "timings.jsonl")
    ]
