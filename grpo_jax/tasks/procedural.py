"""Endless tasks of the library reasoning_gym: a row is made by its number when it is asked for.

    reasoning_gym:NAME

A row is a function of the seed and of its number alone, so there is nothing to store, and every
process makes the same ones. Held-out rows have numbers of their own. Left out on purpose: curricula
and mixtures of that library; a task's options are those of the dataset.
"""

import dataclasses
import hashlib
import importlib.util
import inspect
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

from grpo_jax.tasks.sources import plain
from grpo_jax.tasks.task import Message, Row, Task
from grpo_jax.tasks.user_code import nearest

PREFIX = "reasoning_gym:"
ENDLESS = 2**31 - 1  # as many rows as the number of a row can tell apart
HELD_OUT = 256
BLOCK = 100  # rows that are made by one dataset
BLOCKS = 64  # in memory: a row is asked for when it is sampled, and again when it is scored
TRIES = 64
# Datasets whose entries depend on the order of sets of text, which Python draws anew at each start
# (found by comparing the first entries of two starts; version 0.1.25).
BY_HASH = (
    "codeio",
    "intermediate_integration",
    "isomorphic_strings",
    "knight_swap",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def procedural(name: str) -> Callable[..., Task]:
    """The task of a dataset, as a function of the dataset's own options and of `seed`,
    `held_out_size` and `instruction`.

    Raises ValueError where the library, or the dataset, is not there.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError(
            f"{PREFIX}{name} needs the library reasoning_gym: pip install 'grpo_jax[reasoning-gym]'"
        )
    import reasoning_gym  # noqa: F401  registers its datasets
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ValueError(f"reasoning_gym has no dataset {name!r}{nearest(name, sorted(DATASETS))}")
    if name in BY_HASH and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ValueError(
            f"{PREFIX}{name} makes other rows at each start of Python, so that a run could not be "
            "resumed: set PYTHONHASHSEED=0 in the environment"
        )
    config = DATASETS[name][1]
    make = partial(made, name)
    own = [field for field in dataclasses.fields(config) if field.name not in ("seed", "size")]
    make.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [keyword("seed", 0), keyword("held_out_size", HELD_OUT), keyword("instruction", "")]
        + [keyword(field.name, usual(field)) for field in own]
    )
    make.__name__ = f"{PREFIX}{name}"  # type: ignore[attr-defined]
    return make


def keyword(name: str, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)


def usual(field: dataclasses.Field) -> Any:
    """The default of a dataset's option."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def made(
    name: str,
    *,
    seed: int = 0,
    held_out_size: int = HELD_OUT,
    instruction: str = "",
    **options: Any,
) -> Task:
    """The task. Rows have question, answer, number, and what the dataset tells of them.

    Raises ValueError for options that the dataset refuses, and where it cannot make enough rows
    that ask different questions.
    """
    if seed < 0 or held_out_size < 1:
        raise ValueError(
            f"seed must be at least 0 and held_out_size at least 1, got {seed} and {held_out_size}"
        )
    entries = Entries(name, seed, options)
    held_out = distinct(entries, held_out_size)
    asked = frozenset(row["question"] for row in held_out)
    return Task(
        f"{PREFIX}{name}",
        ProceduralRows(entries, asked),
        held_out,
        partial(ask, instruction),
        scorer(entries, name),
        partial(target, name),
    )


class Entries:
    """Entries of a dataset by number: of both signs, those below 0 are for held-out rows.

    They come in blocks, each a dataset with a seed of its own, for some datasets make all of their
    entries at once.
    """

    def __init__(self, name: str, seed: int, options: Mapping[str, Any]):
        from reasoning_gym.factory import DATASETS

        self.name = name
        self.seed = seed
        self.options = options
        self.kind, self.config = DATASETS[name][:2]
        self.block = lru_cache(BLOCKS)(self.new_block)
        self.dataset, _ = self.block(0)

    def __reduce__(self) -> tuple:
        """Made anew in another process, from what it was made of."""
        return Entries, (self.name, self.seed, self.options)

    def new_block(self, block: int) -> tuple[Any, list]:
        """A dataset, and room for the entries that it has made."""
        text = f"{self.seed}, {block}".encode()
        # Half of the seeds that NumPy takes: a dataset adds the number of an entry to its own.
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") // 2
        try:
            with random_as(text):
                return self.kind(self.config(seed=seed, size=BLOCK, **self.options)), []
        except Exception as error:  # of its own checks, which are assertions
            shown = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
            what = shown or "its default options"
            raise ValueError(f"{PREFIX}{self.name} refuses {what}: {error}") from error

    def entry(self, number: int) -> dict[str, Any] | None:
        """An entry; None where the dataset cannot make it."""
        block, place = divmod(number, BLOCK)
        dataset, made = self.block(block)
        # In their order: some datasets go on with a generator from entry to entry.
        while len(made) <= place:
            try:
                with random_as(f"{self.seed}, {block}, {len(made)}".encode()):
                    made.append(dataset[len(made)])
            except IndexError:  # it ran out of what it makes entries of
                made.append(None)
        return made[place]

    def row(self, number: int) -> Row | None:
        if (entry := self.entry(number)) is None:
            return None
        metadata = plain(entry.get("metadata", {}))
        shown = {"question": entry["question"], "answer": entry["answer"], "number": number}
        return shown | {"metadata": metadata}


@contextmanager
def random_as(seed: bytes) -> Iterator[None]:
    """Inside, Python's own generator starts from this seed: some datasets draw from it."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


def distinct(entries: Entries, count: int) -> list[Row]:
    """Held-out rows that ask different questions, from −1 downwards."""
    rows: dict[str, Row] = {}
    number = 0
    while len(rows) < count:
        number -= 1
        if -number > TRIES * count:
            raise ValueError(
                f"{PREFIX}{entries.name} made {len(rows)} different questions out of "
                f"{TRIES * count}: choose a smaller held_out_size than {count}, or harder options"
            )
        if (row := entries.row(number)) is not None:
            rows.setdefault(row["question"], row)
    return list(rows.values())


class ProceduralRows(Sequence):
    """Rows to train on, by number; one that asks what a held-out row asks is made anew.

    Their order is random as it is, and neighbours are made together.
    """

    endless = True

    def __init__(self, entries: Entries, held_out: frozenset[str]):
        self.entries = entries
        self.held_out = held_out

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if not 0 <= place < ENDLESS:
            raise IndexError(place)
        number = int(place)
        for _ in range(TRIES):
            row = self.entries.row(number)
            if row is not None and row["question"] not in self.held_out:
                return row
            number += ENDLESS  # beyond all others
        raise ValueError(
            f"{PREFIX}{self.entries.name} makes few questions that are not held out: choose a "
            "smaller held_out_size, or harder options"
        )


def ask(instruction: str, row: Row) -> list[Message]:
    question = f"{row['question']} {instruction}" if instruction else row["question"]
    return [{"role": "user", "content": question}]


def target(name: str, row: Row) -> str:
    """The right answer, where the dataset has just one."""
    if row["answer"] is None:
        raise ValueError(f"{PREFIX}{name} has several right answers and names none")
    return str(row["answer"])


def answer_of(completion: str) -> str:
    """What stands in the last `<answer>…</answer>`, or else the whole completion."""
    tagged = _ANSWER.findall(completion)
    return (tagged[-1] if tagged else completion).strip()


def scorer(entries: Entries, name: str) -> Callable[[str, int], float]:
    """The dataset's own judgement of an answer, as a reward."""

    def reward(completion: str, number: int) -> float:
        return float(entries.dataset.score_answer(answer_of(completion), entries.entry(number)))

    reward.__name__ = name
    return reward
