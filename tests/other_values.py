"""A value of every option of a run but its task: none is the default of the tiny model."""

import math
from typing import Any

from grpo_jax.options import Data

OTHER = {
    "task_args": ("level=2", "wording=natural"),
    "data": "some.jsonl",
    "reward": ("number_reward", "own.py:near"),
    "split": "test",
    "subset": "main",
    "eval_data": "other.jsonl",
    "eval_split": "dev",
    "eval_share": 0.25,
    "prompt_column": "ask",
    "prompt_template": "{{ question }}",
    "system_prompt": "Be short.",
    "target_column": "gold",
    "on_bad_row": "skip",
    "model": "some/folder",
    "template_args": ("enable_thinking=false", "name=value"),
    "template_date": "2024-07-01",
    "param_dtype": "bfloat16",
    "compute_dtype": "bfloat16",
    "moment_dtype": "bfloat16",
    "objective": "dapo",
    "objective_args": ("low=0.1", "high=0.25"),
    "steps": 7,
    "group_size": 6,
    "max_new_tokens": 9,
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.75,
    "min_p": 0.125,
    "decode_slots": 2,
    "compactions": 4,
    "epochs": 2,
    "microbatches": 2,
    "group_microbatches": 2,
    "old_logp": "first_epoch",
    "logit_chunk": 100,
    "prompts_per_step": 24,
    "prompt_length": 64,
    "length_buckets": 3,
    "pack_tokens": True,
    "drop_zero_variance": True,
    "weights": (1.0, 0.5),
    "on_error": "skip",
    "workers": 3,
    "timeout": 30.0,
    "learning_rate": 1e-4,
    "schedule": "linear",
    "lr_warmup": 3,
    "weight_decay": 0.1,
    "clip_norm": math.inf,
    "max_staleness": 2,
    "compile_ahead": True,
    "remat": "dots",
    "ref_every": 4,
    "ref_ema": 0.99,
    "sft_steps": 5,
    "sft_target_loss": 0.5,
    "eval_every": 5,
    "eval_rows": 11,
    "eval_batch_size": 12,
    "save_every": 13,
    "keep_checkpoints": 4,
    "keep_minutes": 30,
    "keep_best": 2,
    "log_completions": 0,
    "mesh": "data=2,fsdp=4",
    "pmap": 2,
    "decode_weights": "split",
    "seed": 99,
    "out": "some where",
}


OF_DATA = set(Data._fields) - {"data", "reward"}  # what is said of rows of one's own


def needed(name: str) -> dict[str, Any]:
    """What another option must be for the value of this one."""
    if name in OF_DATA:
        return {"data": "any.csv"}
    return {"decode_weights": {"mesh": "data=2"}, "timeout": {"workers": 2}}.get(name, {})
