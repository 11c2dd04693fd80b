"""Which rows of a task come when: an endless sequence of shuffled epochs, and a place in it.

The order is a function of the seed alone, the place is a part of `RunState.data`, so that a run
that is continued takes the rows that it would have taken. Left out on purpose: orders that depend
on what has been learnt; a `prompts` stage of one's own may have them.
"""

import jax
import numpy as np

from grpo_jax.inference.text import encode
from grpo_jax.inference.tokenizer import Tokenizer
from grpo_jax.options import Batching
from grpo_jax.parallel.backends import Devices
from grpo_jax.tasks import Task
from grpo_jax.types import Prompts


def begin_data() -> dict[str, np.ndarray]:
    """Where the rows of a task stand before the first iteration."""
    return {"position": np.zeros((), np.int64)}


def row_indices(position: int, size: int, count: int, seed: int) -> np.ndarray:
    """`size` consecutive places, from `position`, in an endless sequence of shuffled epochs.

    Every epoch is a new permutation of all `count` rows; none is skipped or repeated within it.
    """
    places = range(position, position + size)
    epochs = {place // count for place in places}
    # The epoch stands between the words of a long seed: NumPy ignores zeros at the end.
    low, high = seed % 2**32, seed >> 32
    words = [high] if high else []
    orders = {e: np.random.default_rng([low, e, *words]).permutation(count) for e in epochs}
    return np.array([orders[p // count][p % count] for p in places], np.int32)


def prompt_width(task: Task, tokenizer: Tokenizer, multiple: int = 16) -> int:
    """A width that every prompt of a task fits, rounded up: with one width, one program."""
    rows = (*task.train, *task.held_out)
    longest = max(len(tokenizer.render(task.prompt(row))) for row in rows)
    return -(-longest // multiple) * multiple


def next_prompts(
    task: Task,
    tokenizer: Tokenizer,
    vocab_size: int,
    batching: Batching,
    seed: int,
    devices: Devices,
    data: dict,
) -> tuple[Prompts, jax.Array, dict]:
    """The next rows of the task as prompts, their indices, and where the rows stand after them."""
    position = int(data["position"])
    size = batching.prompts_per_step
    row_P = row_indices(position, size, len(task.train), seed)
    rows = [task.train[i] for i in row_P[devices.local_rows(size)]]
    options = {"length": batching.prompt_length, "vocab_size": vocab_size}
    prompts = encode(tokenizer, task.prompt, rows, **options)
    prompts, row_P = devices.put_rows(prompts), devices.put("rows", row_P)
    return prompts, row_P, data | {"position": np.int64(position + size)}
