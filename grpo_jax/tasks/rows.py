"""What is kept of a source: where each row lies, and a hash of what it holds."""

import hashlib
import json
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_jax.tasks.sources import Found, Source
from grpo_jax.tasks.task import Row


def row_hash(row: Row) -> int:
    """64 bits of what a row holds, whatever the order of its columns and the spaces between."""
    text = json.dumps(row, sort_keys=True, separators=(",", ":"), default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Index:
    """Where rows lie: one entry a row, in the order of the file; as arrays once it is `done`."""

    def __init__(self):
        self.number_N: Any = array("q")
        self.start_N: Any = array("q")
        self.size_N: Any = array("q")
        self.hash_N: Any = array("Q")

    def add(self, one: Found) -> None:
        self.number_N.append(one.number)
        self.start_N.append(one.start)
        self.size_N.append(one.size)
        self.hash_N.append(row_hash(one.row or {}))

    def done(self) -> "Index":
        for name in ("number_N", "start_N", "size_N", "hash_N"):
            setattr(self, name, np.array(getattr(self, name)))
        return self

    def __len__(self) -> int:
        return len(self.number_N)

    def digest(self, count: int) -> str:
        """A hash of the first `count` rows, in their order."""
        return hashlib.blake2b(
            self.hash_N[:count].astype("<u8").tobytes(), digest_size=8
        ).hexdigest()


class Rows(Sequence):
    """Some rows of a source, each read when it is asked for.

    `shape(row)` adds what the layout knows. A row that is no longer what it was when the source was
    opened raises a ValueError with its place.
    """

    def __init__(self, source: Source, places: Index, chosen_N: np.ndarray, shape: Any):
        self.source = source
        self.places = places
        self.chosen_N = chosen_N
        self.shape = shape

    def __len__(self) -> int:
        return len(self.chosen_N)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice | np.ndarray):
            return Rows(self.source, self.places, self.chosen_N[place], self.shape)
        i = self.chosen_N[place]
        try:
            row = self.source.read(int(self.places.start_N[i]), int(self.places.size_N[i]))
            same = row_hash(row) == self.places.hash_N[i]
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.place(place)} cannot be read any more: {error}") from error
        if not same:
            raise ValueError(f"{self.place(place)} has changed since the file was opened")
        return self.shape(row)

    def place(self, place: int) -> str:
        """Where a row lies, as FILE, line 7."""
        number = self.places.number_N[self.chosen_N[place]]
        return f"{self.source.name}, {self.source.unit} {number}"
