"""What a run leaves behind and shows: files, TensorBoard, a picture of the curves, the terminal.

A run folder holds

    config.json         what was asked for
    data.json           of rows out of a file: how many there were, and a hash of them
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

import contextlib
import dataclasses
import errno
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.runs.board import TIMINGS, Board
from grpo_jax.runs.lock import Claim
from grpo_jax.runs.patience import Patience

DATA = "data.json"
STEP_FILES = ("metrics.jsonl", "timings.jsonl", "completions.jsonl")


class RunFolder:
    """Writes the files of one run; a context manager that flushes and closes TensorBoard.

    `resume_step` is the number of steps that a restored state has behind it, counted from 0: lines
    of that step and later are cut off, for they will be written again. To be made when the state is
    restored, and not before. Raises FileExistsError for a folder that already has metrics, unless
    it is resumed, FileNotFoundError for one to resume that is not there, and ValueError, with file
    and line, where a line cannot be read.

    Args:
      path: the folder.
      resume_step: see above; None for a new run.
      claim: what holds the folder, if the caller does; else it is held from here to the end.
      tell: is told where writing fails and is tried again.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        resume_step: int | None = None,
        claim: Claim | None = None,
        tell: Callable[[str], None] = warnings.warn,
    ):
        self.path = Path(path)
        self._own = Claim(path, make=resume_step is None) if claim is None else None
        self._claim = claim or self._own
        self.patience = Patience(tell)
        try:
            self._board = Board(self.path / "tensorboard", self._begin(resume_step))
        except BaseException:
            self._release(failed=True)
            raise

    def _begin(self, resume_step: int | None) -> dict[str, list[dict]]:
        """Makes the files ready; what they hold, by the prefix of its tags for TensorBoard."""
        if resume_step is None:
            if (self.path / "metrics.jsonl").exists():
                raise FileExistsError(
                    f"{self.path} already holds a run: resume it, or choose another folder"
                )
            return {}
        for name in STEP_FILES:
            steps_of(self.path / name)  # nothing is cut where a line cannot be read
        for name in STEP_FILES:
            cut_lines(self.path / name, resume_step)
        names = {"": "metrics.jsonl", TIMINGS: "timings.jsonl"}
        return {prefix: read_lines(self.path / name) for prefix, name in names.items()}

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._board.close()
        finally:
            self._release()

    def _release(self, failed: bool = False) -> None:
        if self._own is not None:
            (self._own.remove if failed else self._own.release)()

    def check(self) -> None:
        """Raises FileNotFoundError where the folder was removed meanwhile."""
        if self._claim is not None:
            self._claim.check()

    def sync(self) -> None:
        """Every line so far is on the disk when this returns, not in the system's memory alone."""
        self.check()
        self._board.flush()
        self._write(lambda: sync_files(self.path, STEP_FILES), self.path)

    def _write(self, work: Callable[[], None], path: Path) -> None:
        def checked() -> None:
            self.check()
            work()

        self.patience.write(checked, str(path))

    def write_config(self, config: Any) -> None:
        """A dataclass or a mapping, as config.json."""
        self._replace("config.json", config)

    def write_data(self, record: Mapping[str, Any]) -> None:
        """`Task.record`, as data.json."""
        self._replace(DATA, record)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self._replace("summary.json", summary)

    def _replace(self, name: str, content: Any) -> None:
        path = self.path / name
        self._write(lambda: write_json(path, content), path)

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
        self._append("metrics.jsonl", {"step": step, **metrics})
        if timings:
            self._append("timings.jsonl", {"step": step, **timings})
        for row in spread(texts, completions):
            self._append("completions.jsonl", {"step": step, **row})
        self._board.add(step, _plain(metrics))
        self._board.add(step, _plain(timings), TIMINGS)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        path = self.path / name
        self._write(lambda: append_line(path, row), path)


def run_folder(path: str | Path, *, resume_step: int | None = None) -> RunFolder:
    """A run folder for a program of one's own: `with run_folder(path) as folder: folder.log(…)`.

    Raises FileExistsError for a folder that already holds a run; with `resume_step`, the number of
    iterations that a restored state has behind it, it is continued.
    """
    return RunFolder(path, resume_step=None if resume_step is None else resume_step + 1)


def read_data(path: str | Path) -> dict[str, Any] | None:
    """What a run kept of its data when it began (`Task.record`); None where it kept nothing."""
    file = Path(path) / DATA
    return json.loads(file.read_text()) if file.is_file() else None


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
    """Appends one JSON object as one line, in one write, or nothing of it."""
    line = (json_text(row) + "\n").encode()
    with open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def sync_files(folder: Path, names: Sequence[str]) -> None:
    """Returns when files of a folder, and which files it has, are on the disk."""
    for path in (*(folder / name for name in names), folder):
        if path.exists():
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)


def write_rows(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes JSON objects, one a line, all or nothing."""
    _replace(Path(path), "".join(json_text(row) + "\n" for row in rows).encode())


def read_lines(path: str | Path) -> list[dict]:
    """The objects of a JSONL file; none where there is no file.

    A last line cut short by a kill is left out. Raises ValueError, with file and line, for any
    other that is no JSON object.
    """
    return [_object(path, number, line) for number, line in enumerate(_lines(path), 1)]


def steps_of(path: str | Path) -> list[int]:
    """The step of each line. Raises ValueError, with file, line and field, where it has none."""
    steps = []
    for number, row in enumerate(read_lines(path), 1):
        step = row.get("step")
        if type(step) is not int:
            told = f"step must be a whole number, got {step!r}" if "step" in row else "has no step"
            raise ValueError(f"{path}, line {number}: {told}")
        steps.append(step)
    return steps


def cut_lines(path: str | Path, step: int) -> None:
    """Keeps the lines whose step is below `step`, byte for byte; a line cut short by a kill goes
    too. Raises ValueError, as `steps_of`, before anything is changed.
    """
    path = Path(path)
    if path.exists():
        lines = zip(_lines(path), steps_of(path), strict=True)
        _replace(path, b"".join(line + b"\n" for line, own in lines if own < step))


def _lines(path: str | Path) -> list[bytes]:
    path = Path(path)
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def _object(path: str | Path, number: int, line: bytes) -> dict:
    where = f"{path}, line {number}"
    if not line.strip():
        raise ValueError(f"{where}: is blank; a line must hold one JSON object")
    try:
        row = json.loads(line)
    except ValueError as error:  # no JSON, or no UTF-8
        shown = line[:40].decode(errors="replace")
        raise ValueError(f"{where}: is no JSON object ({error}): {shown!r}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: must hold one JSON object, got {row!r}")
    return row


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
