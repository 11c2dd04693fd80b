"""TensorBoard's files of a run: what metrics.jsonl and timings.jsonl hold, and nothing else.

They are written by a thread that is seconds behind, and a kill loses what it had not written. So a
resumed run writes them anew from its lines.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TIMINGS = "time/"  # what the tags of timings begin with


class Board:
    """Points of curves for TensorBoard, in a folder of its own; `rows` are those so far."""

    def __init__(self, folder: Path, rows: Mapping[str, Iterable[Mapping[str, Any]]]):
        from tensorboardX import SummaryWriter

        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = SummaryWriter(str(folder), flush_secs=10)
        for prefix, own in rows.items():
            for row in own:
                self.add(row["step"], row, prefix)

    def add(self, step: int, numbers: Mapping[str, Any], prefix: str = "") -> None:
        """The numbers of an iteration; None (NaN) is no point of a curve."""
        for name, value in numbers.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(prefix + name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
