"""Which rows of a task come when: an endless sequence of shuffled epochs, and a place in it.

The order is a function of the seed alone, the place is a part of `RunState.data`, so that a run
that is continued takes the rows that it would have taken. Left out on purpose: orders that depend
on what has been learnt; a `prompts` stage of one's own may have them.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice

import jax
import numpy as np

from grpo_jax.inference.text import encode
from grpo_jax.inference.tokenizer import Tokenizer
from grpo_jax.options import Batching
from grpo_jax.parallel.backends import Devices
from grpo_jax.tasks import Task
from grpo_jax.tasks.task import Row
from grpo_jax.types import Prompts

MANY = 2**17  # rows that are all measured; of more of them, so many are
FEW = 64  # endless rows that are measured, besides those held out
MARGIN = 1.25
ALIGNED = 100  # endless rows are made in blocks of so many


def begin_data() -> dict[str, np.ndarray]:
    """Where the rows of a task stand before the first iteration."""
    return {"position": np.zeros((), np.int64)}


def row_indices(
    position: int, size: int, count: int, seed: int, *, endless: bool = False
) -> np.ndarray:
    """`size` consecutive places, from `position`, in an endless sequence of shuffled epochs.

    Every epoch is a new permutation of all `count` rows; none is skipped or repeated within it.
    Rows that are `endless` are random as they are: they come one after another, from a place that
    the seed tells.
    """
    places = range(position, position + size)
    if endless:
        begin = int(np.random.default_rng(seed).integers(count)) // ALIGNED * ALIGNED
        return np.array([(begin + place) % count for place in places], np.int32)
    orders = {epoch: order_of(epoch, count, seed) for epoch in {p // count for p in places}}
    return np.array([orders[p // count][p % count] for p in places], np.int32)


@lru_cache(2)  # of a large file the order of an epoch takes longer than the batch
def order_of(epoch: int, count: int, seed: int) -> np.ndarray:
    """The rows of an epoch in their order."""
    # The epoch stands between the words of a long seed: NumPy ignores zeros at the end.
    low, high = seed % 2**32, seed >> 32
    words = [high] if high else []
    order = np.random.default_rng([low, epoch, *words]).permutation(count)
    order.flags.writeable = False
    return order


def is_endless(rows: Sequence[Row]) -> bool:
    """Whether rows are made when they are asked for: there are more of them than can be seen."""
    return getattr(rows, "endless", False)


def measured(rows: Sequence[Row]) -> tuple[Iterable[Row], float]:
    """The rows that lengths are taken from, and what the longest of them is multiplied with.

    All of them, or some of a great many: then a longer one may come.
    """
    if is_endless(rows):
        return islice(rows, FEW), MARGIN
    if len(rows) <= MANY:
        return rows, 1.0
    return (rows[len(rows) * place // MANY] for place in range(MANY)), MARGIN


def prompt_width(task: Task, tokenizer: Tokenizer, multiple: int = 16) -> int:
    """A width that every prompt of a task fits, rounded up: with one width, one program.

    Of endless rows, and of a great many, it is that of some of them and a quarter more.
    """
    longest = 0
    for rows in (task.train, task.held_out):
        some, margin = measured(rows)
        lengths = [len(tokenizer.render(task.prompt(row))) for row in some]
        longest = max(longest, math.ceil(margin * max(lengths, default=0)))
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
    endless = is_endless(task.train)
    row_P = row_indices(position, size, len(task.train), seed, endless=endless)
    rows = [task.train[i] for i in row_P[devices.local_rows(size)]]
    options = {"length": batching.prompt_length, "vocab_size": vocab_size}
    prompts = encode(tokenizer, task.prompt, rows, **options)
    prompts, row_P = devices.put_rows(prompts), devices.put("rows", row_P)
    return prompts, row_P, data | {"position": np.int64(position + size)}
