"""What a run leaves behind and shows: files, TensorBoard, a picture of the curves, the terminal.

A run folder holds

    config.json         what was asked for             summary.json       held-out accuracy before and after, and more
    metrics.jsonl       one object a step, step first  timings.jsonl      seconds and speeds of the same steps
    completions.jsonl   sampled text with its reward   tensorboard/       both, for TensorBoard
    checkpoints/        whole states                   curves.png         the picture

Metrics hold nothing that depends on the clock, so that a resumed run's file equals an uninterrupted one byte for byte.
Left out on purpose: a logger that collects from afar. Whoever has numbers hands them over, at one place, in the loop.
"""

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# key of the metrics, title of its panel, label of its axis
PANELS = (
    ("reward", "Reward", "mean of the batch"),
    ("held_out", "Held-out accuracy", "share of questions"),
    ("kl", "KL to the reference", "nats per token"),
    ("length", "Completion length", "tokens"),
    ("no_signal", "Groups without signal", "share of groups"),
)
STEP_FILES = ("metrics.jsonl", "timings.jsonl", "completions.jsonl")


class RunFolder:
    """Writes the files of one run; a context manager that flushes and closes TensorBoard.

    `resume_step` is the number of steps that a restored state has behind it, counted from 0: lines of that step and
    later are cut off, for they will be written again. Raises FileExistsError for a folder that already has metrics,
    unless it is resumed, and FileNotFoundError for one to resume that is not there.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None):
        from tensorboardX import SummaryWriter

        self.path = Path(path)
        if resume_step is None and (self.path / "metrics.jsonl").exists():
            raise FileExistsError(f"{self.path} already holds a run: resume it, or choose another folder")
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
            filename_suffix=f".{resume_step or 0}",  # files named by the second alone can overwrite one another
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

    def log(self, step: int, metrics: Mapping[str, Any], timings: Mapping[str, Any] | None = None) -> None:
        """One line of metrics.jsonl, and of timings.jsonl for what depends on the clock; both go to TensorBoard."""
        append_line(self.path / "metrics.jsonl", {"step": step, **metrics})
        if timings:
            append_line(self.path / "timings.jsonl", {"step": step, **timings})
        for prefix, numbers in (("", metrics), ("time/", timings or {})):
            for name, value in numbers.items():
                if isinstance(number := _plain(value), int | float):
                    self._board.add_scalar(prefix + name, number, step)

    def log_completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Lines of completions.jsonl; a row has prompt, completion, reward (NaN: null) and answer."""
        for row in rows:
            append_line(self.path / "completions.jsonl", {"step": step, **row})


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
    """The objects of a JSONL file; none where there is no file. A last line cut short by a kill is left out."""
    path = Path(path)
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def cut_lines(path: str | Path, step: int) -> None:
    """Keeps the lines whose step is below `step`, byte for byte; a line cut short by a kill goes too."""
    path = Path(path)
    if path.exists():
        lines = path.read_bytes().split(b"\n")[:-1]
        _replace(path, b"".join(line + b"\n" for line in lines if json.loads(line)["step"] < step))


def plot_curves(metrics_rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """One picture of a run: reward, held-out accuracy, KL, length, groups without signal, each against the step."""
    plot_runs({"": metrics_rows}, path)


def plot_runs(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: str | Path) -> None:
    """The same picture with one line a run, named in a legend; what a run did not measure stays empty.

    Values of every step are drawn pale with their running mean over them, values of some steps as points.
    """
    from matplotlib.figure import Figure  # not pyplot: no global state, no window
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(12, 6.4), layout="constrained", facecolor="white")
    places = [["reward"] * 3 + ["held_out"] * 3, ["kl"] * 2 + ["length"] * 2 + ["no_signal"] * 2]
    axes = figure.subplot_mosaic(places)
    for key, title, label in PANELS:
        ax = axes[key]
        ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
        ax.set_xlabel("step")
        ax.set_ylabel(label)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="0.9")
        ax.set_axisbelow(True)
        drawn = [_draw(ax, rows, key, name, f"C{index}") for index, (name, rows) in enumerate(runs.items())]
        if not any(drawn):
            ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center", va="center", color="0.6")
            ax.set(xticks=[], yticks=[])
        else:
            ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
            if key in ("held_out", "no_signal"):
                ax.set_ylim(-0.03, 1.03)
        if key == "reward" and any(runs) and any(drawn):
            ax.legend(frameon=False)
    figure.savefig(path, dpi=120)


def _draw(ax: Any, rows: Sequence[Mapping[str, Any]], key: str, name: str, color: str) -> bool:
    points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
    if not points:
        return False
    steps, values = np.array(points, float).T
    if len(points) == 1:
        ax.set_xlim(steps[0] - 1, steps[0] + 1)
    if len(points) < max(20, len(rows) // 2):
        ax.plot(steps, values, "o-", color=color, label=name, markersize=4, linewidth=1.8)
        return True
    ax.plot(steps, values, color=color, alpha=0.25, linewidth=1)
    ax.plot(steps, running_mean(values, max(3, len(values) // 20)), color=color, label=name, linewidth=1.8)
    return True


def running_mean(values: Sequence[float], width: int) -> np.ndarray:
    """The mean of the last `width` values at each place, of as many as there are at the start."""
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(values, float)]))
    ends = np.arange(1, len(sums))
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)


class Progress:
    """Shows how far a run is: a live display on a terminal, else a plain line every `interval` seconds at most.

    A context manager; `update` takes the number of finished steps and whatever numbers are new, by name, and keeps
    showing those it has; a `note` is shown until the next update. The time left is judged from all steps but the first,
    which compiles.
    """

    def __init__(
        self,
        total: int,
        *,
        title: str = "GRPO",
        start: int = 0,
        console: Console | None = None,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        if total < 1:
            raise ValueError(f"total must be at least 1, got {total}")
        self.total, self.title, self.done, self.interval = total, title, start, interval
        self._console = console or Console()
        self._clock, self._began, self._first, self._printed = clock, clock(), None, -math.inf
        self._numbers: dict[str, float] = {}
        self._note = ""
        self._rewards: list[float] = []
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, done: int, *, note: str = "", **numbers: Any) -> None:
        self.done, self._note = done, note
        self._first = self._first or (done, self._clock())
        self._numbers |= {name: float(value) for name, value in numbers.items() if _is_finite(value)}
        if _is_finite(numbers.get("reward")):
            self._rewards.append(float(numbers["reward"]))
        if not self._console.is_terminal and (done >= self.total or self._clock() - self._printed >= self.interval):
            self._printed = self._clock()
            self._console.print(self._line(), markup=False, highlight=False, soft_wrap=True)

    def seconds_left(self) -> float | None:
        """`None` until two steps are done."""
        if self._first is None or self.done <= self._first[0]:
            return None
        first_done, first_time = self._first
        return (self._clock() - first_time) / (self.done - first_done) * (self.total - self.done)

    def _line(self) -> str:
        numbers = [f"{_label(name)} {_shown(name, value)}" for name, value in self._numbers.items()]
        note = [self._note] if self._note else []
        left = f"left {_duration(self.seconds_left())}"
        return "  ".join([f"{self.title} {self.done}/{self.total}", *numbers, *note, left])

    def _render(self) -> RenderableType:
        head = Table.grid(padding=(0, 2))
        elapsed, left = _duration(self._clock() - self._began), _duration(self.seconds_left())
        head.add_row(
            Text(self.title, style="bold"),
            ProgressBar(self.total, self.done, width=32),
            f"{self.done}/{self.total}",
            Text(f"{elapsed} gone, {left} left", style="dim"),
        )
        body = Text()
        for name, value in self._numbers.items():
            body.append(f"{_label(name)} ", style="dim").append(_shown(name, value), style="bold").append("   ")
        if len(self._rewards) > 1:
            body.append(sparkline(self._rewards, 32) + "   ", style="cyan")
        body.append(self._note, style="dim")
        return Group(head, body)


class Screen:
    """The terminal of a run: phases with a progress display each, then the summary, all on one console."""

    def __init__(self, console: Console | None = None, *, interval: float = 5.0):
        self.console, self.interval = console or Console(), interval

    @contextmanager
    def phase(self, title: str, total: int, *, start: int = 0) -> Iterator[Callable[..., None]]:
        """A `Progress` while the block runs; gives its `update(done, **numbers)`."""
        with Progress(total, title=title, start=start, console=self.console, interval=self.interval) as progress:
            yield progress.update

    def summary(self, summary: Mapping[str, Any], path: str | Path) -> None:
        print_summary(summary, path, self.console)


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as a row of at most `width` small bars, each the mean of its share of them."""
    bars = "▁▂▃▄▅▆▇█"
    parts = [part.mean() for part in np.array_split(np.asarray(values, float), min(width, len(values)))]
    low, span = min(parts), max(parts) - min(parts)
    return "".join(bars[round((part - low) / span * (len(bars) - 1)) if span else 0] for part in parts)


def print_summary(summary: Mapping[str, Any], path: str | Path, console: Console | None = None) -> None:
    """The end of a run on the terminal: before, after, and where things are."""
    path, table = Path(path), Table.grid(padding=(0, 2))
    before, after = summary.get("held_out_before"), summary.get("held_out_after")
    if _is_finite(before) and _is_finite(after):
        change = f"{_shown('held_out', before)} → [bold]{_shown('held_out', after)}[/]"
        table.add_row("Held-out accuracy", f"{change}  ({100 * (after - before):+.1f} points)")
    if "steps" in summary and "seconds" in summary:
        table.add_row("Steps", f"{summary['steps']} in {_duration(summary['seconds'])}")
    places = {"curves.png": "Curves", "metrics.jsonl": "Metrics", "completions.jsonl": "Completions"}
    for name, label in (places | {"checkpoints": "Checkpoints", "tensorboard": "TensorBoard"}).items():
        if (path / name).exists():
            table.add_row(label, Text(str(path / name), overflow="fold"))
    table.add_row("Next", Text(f'grpo-jax eval {path}\ngrpo-jax sample {path} "your question"', overflow="fold"))
    (console or Console()).print(Panel(table, title="Done", title_align="left", expand=False, padding=(1, 2)))


def _label(name: str) -> str:
    return {"held_out": "held-out", "tokens_per_second": "tokens/s"}.get(name, name.replace("_", " "))


def _shown(name: str, value: float) -> str:
    if name.startswith("held_out"):
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _is_finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _plain(value: Any) -> Any:
    """What JSON can hold: scalars of any array library as int, float or bool, NaN and infinities as None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
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
        return _plain((array if array.dtype.kind in "biu" else array.astype(float)).tolist())  # bfloat16 has no JSON
    raise TypeError(f"cannot write {type(value).__name__} {value!r} as JSON")


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
