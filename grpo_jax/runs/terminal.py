"""What a run shows on the terminal: progress, then a summary."""

import math
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


class Progress:
    """Shows how far a run is: a live display on a terminal, else a plain line every `interval`
    seconds at most.

    A context manager; `update` takes the number of finished steps and whatever numbers are new, by
    name, and keeps showing those it has; a `note` is shown until the next update. The time left is
    judged from all steps but the first, which compiles.
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
        self.total = total
        self.title = title
        self.done = start
        self.interval = interval
        self._console = console or Console()
        self._clock = clock
        self._began = clock()
        self._first = None
        self._printed = -math.inf
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
        self.done = done
        self._note = note
        self._first = self._first or (done, self._clock())
        self._numbers |= {
            name: float(value) for name, value in numbers.items() if _is_finite(value)
        }
        if _is_finite(numbers.get("reward")):
            self._rewards.append(float(numbers["reward"]))
        if not self._console.is_terminal and (
            done >= self.total or self._clock() - self._printed >= self.interval
        ):
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
        elapsed = _duration(self._clock() - self._began)
        left = _duration(self.seconds_left())
        head.add_row(
            Text(self.title, style="bold"),
            ProgressBar(self.total, self.done, width=32),
            f"{self.done}/{self.total}",
            Text(f"{elapsed} gone, {left} left", style="dim"),
        )
        body = Text()
        for name, value in self._numbers.items():
            body.append(f"{_label(name)} ", style="dim").append(
                _shown(name, value), style="bold"
            ).append("   ")
        if len(self._rewards) > 1:
            body.append(sparkline(self._rewards, 32) + "   ", style="cyan")
        body.append(self._note, style="dim")
        return Group(head, body)


class Screen:
    """The terminal of a run: phases with a progress display each, then the summary, all on one
    console.
    """

    def __init__(self, console: Console | None = None, *, interval: float = 5.0):
        self.console = console or Console()
        self.interval = interval

    @contextmanager
    def phase(self, title: str, total: int, *, start: int = 0) -> Iterator[Callable[..., None]]:
        """A `Progress` while the block runs; gives its `update(done, **numbers)`."""
        with Progress(
            total, title=title, start=start, console=self.console, interval=self.interval
        ) as progress:
            yield progress.update

    def tell(self, message: str) -> None:
        """A sentence on a line of its own; it is no markup, for it may hold brackets."""
        self.console.print(Text(message), soft_wrap=True)

    def summary(self, summary: Mapping[str, Any], path: str | Path) -> None:
        print_summary(summary, path, self.console)


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as a row of at most `width` small bars, each the mean of its share of them."""
    bars = "▁▂▃▄▅▆▇█"
    parts = [
        part.mean() for part in np.array_split(np.asarray(values, float), min(width, len(values)))
    ]
    low = min(parts)
    span = max(parts) - min(parts)
    return "".join(
        bars[round((part - low) / span * (len(bars) - 1)) if span else 0] for part in parts
    )


def print_summary(
    summary: Mapping[str, Any], path: str | Path, console: Console | None = None
) -> None:
    """The end of a run on the terminal: before, after, and where things are."""
    path = Path(path)
    table = Table.grid(padding=(0, 2))
    before = summary.get("held_out_before")
    after = summary.get("held_out_after")
    if _is_finite(before) and _is_finite(after):
        change = f"{_shown('held_out', before)} → [bold]{_shown('held_out', after)}[/]"
        table.add_row("Held-out accuracy", f"{change}  ({100 * (after - before):+.1f} points)")
    if "steps" in summary and "seconds" in summary:
        table.add_row("Steps", f"{summary['steps']} in {_duration(summary['seconds'])}")
    places = {
        "curves.png": "Curves",
        "metrics.jsonl": "Metrics",
        "completions.jsonl": "Completions",
    }
    for name, label in (
        places | {"checkpoints": "Checkpoints", "tensorboard": "TensorBoard"}
    ).items():
        if (path / name).exists():
            table.add_row(label, Text(str(path / name), overflow="fold"))
    table.add_row(
        "Next",
        Text(f'grpo-jax eval {path}\ngrpo-jax sample {path} "your question"', overflow="fold"),
    )
    (console or Console()).print(
        Panel(table, title="Done", title_align="left", expand=False, padding=(1, 2))
    )


def _label(name: str) -> str:
    return {"held_out": "held-out", "tokens_per_second": "tokens/s"}.get(
        name, name.replace("_", " ")
    )


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
