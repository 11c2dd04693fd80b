"""What a run leaves behind and shows: files, TensorBoard, a picture of the curves, the terminal.

A run folder holds

    config.json         what was asked for
    metrics.jsonl       one object a step, step first
    timings.jsonl       seconds and speeds of the same steps
    completions.jsonl   sampled text with its reward
    tensorboard/        metrics and timings, for TensorBoard
    curves.png          the picture
    summary.json        held-out reward before and after, and more
    checkpoints/        whole states

Metrics hold nothing that depends on the clock, so that a resumed run's file equals an uninterrupted
one byte for byte. Left out on purpose: a logger that collects from afar. Whoever has numbers hands
them over, at one place, in the loop.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

STEP_FILES = ("metrics.jsonl", "timings.jsonl", "completions.jsonl")


class RunFolder:
    """Writes the files of one run; a context manager that flushes and closes TensorBoard.

    `resume_step` is the number of steps that a restored state has behind it, counted from 0: lines
    of that step and later are cut off, for they will be written again. Raises FileExistsError for a
    folder that already has metrics, unless it is resumed, and FileNotFoundError for one to resume
    that is not there.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None):
        from tensorboardX import SummaryWriter

        self.path = Path(path)
        if resume_step is None and (self.path / "metrics.jsonl").exists():
            raise FileExistsError(
                f"{self.path} already holds a run: resume it, or choose another folder"
            )
        if resume_step is not None:
            if not self.path.is_dir():
                raise FileNotFoundError(f"no run to resume at {self.path}")
            for name in STEP_FILES:
                cut_lines(self.path / name, resume_step)
        self.path.mkdir(parents=True, exist_ok=True)
        self._board = SummaryWriter(
            str(self.path / "tensorboard"),
            purge_step=resume_step,
            flush_secs=10,
            # Files named by the second alone can overwrite one another.
            filename_suffix=f".{resume_step or 0}",
        )

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._board.close()

    def write_config(self, config: Any) -> None:
        """A dataclass or a mapping, as config.json."""
        write_json(self.path / "config.json", config)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.path / "summary.json", summary)

    def log(self, metrics: Mapping[str, Any], *, completions: int = 4) -> None:
        """An iteration, as `train` yields its metrics, or any numbers with an `iteration`.

        What depends on the clock (`seconds/…`) goes to timings.jsonl, `completions` of the sampled
        texts to completions.jsonl, the rest to metrics.jsonl; numbers go to TensorBoard, too.
        """
        metrics = dict(metrics)
        step = metrics.pop("iteration")
        texts = metrics.pop("completions", [])
        names = [name for name in metrics if name.startswith("seconds/")]
        timings = {name: metrics.pop(name) for name in names}
        if timings and "tokens" in metrics:
            timings["tokens_per_second"] = metrics["tokens"] / max(sum(timings.values()), 1e-9)
        append_line(self.path / "metrics.jsonl", {"step": step, **metrics})
        if timings:
            append_line(self.path / "timings.jsonl", {"step": step, **timings})
        for row in spread(texts, completions):
            append_line(self.path / "completions.jsonl", {"step": step, **row})
        for prefix, numbers in (("", metrics), ("time/", timings)):
            for name, value in numbers.items():
                if isinstance(number := _plain(value), int | float):
                    self._board.add_scalar(prefix + name, number, step)


def run_folder(path: str | Path, *, resume_step: int | None = None) -> RunFolder:
    """A run folder for a program of one's own: `with run_folder(path) as folder: folder.log(…)`.

    Raises FileExistsError for a folder that already holds a run; with `resume_step`, the number of
    iterations that a restored state has behind it, it is continued.
    """
    return RunFolder(path, resume_step=None if resume_step is None else resume_step + 1)


def spread(rows: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """`count` of the rows, evenly spaced: completions of different prompts."""
    places = np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int)
    return [rows[i] for i in places]


def json_text(content: Any, *, indent: int | None = None) -> str:
    """JSON; NaN and infinities become null, for JSON has neither."""
    return json.dumps(_plain(content), indent=indent, ensure_ascii=False, allow_nan=False)


def write_json(path: str | Path, content: Any) -> None:
    """Writes JSON all or nothing: a kill leaves the old file or the new one, never half of it."""
    _replace(Path(path), (json_text(content, indent=2) + "\n").encode())


def append_line(path: str | Path, row: Mapping[str, Any]) -> None:
    """Appends one JSON object as one line, in one write."""
    with open(path, "ab", buffering=0) as file:
        file.write((json_text(row) + "\n").encode())


def write_rows(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes JSON objects, one a line, all or nothing."""
    _replace(Path(path), "".join(json_text(row) + "\n" for row in rows).encode())


def read_lines(path: str | Path) -> list[dict]:
    """The objects of a JSONL file; none where there is no file. A last line cut short by a kill is
    left out.
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def cut_lines(path: str | Path, step: int) -> None:
    """Keeps the lines whose step is below `step`, byte for byte; a line cut short by a kill goes
    too.
    """
    path = Path(path)
    if path.exists():
        lines = path.read_bytes().split(b"\n")[:-1]
        _replace(path, b"".join(line + b"\n" for line in lines if json.loads(line)["step"] < step))


def _plain(value: Any) -> Any:
    """What JSON can hold: scalars of any array library as int, float or bool, NaN and infinities as
    None.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if hasattr(value, "_asdict"):  # a tuple of options
        return _plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        return _plain(
            (array if array.dtype.kind in "biu" else array.astype(float)).tolist()
        )  # bfloat16 has no JSON
    raise TypeError(f"cannot write {type(value).__name__} {value!r} as JSON")


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
