"""Pictures of a run's curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# key of the metrics, title of its panel, label of its axis
PANELS = (
    ("reward", "Reward", "mean of the batch"),
    ("held_out", "Held-out accuracy", "share of questions"),
    ("kl", "KL to the reference", "nats per token"),
    ("length", "Completion length", "tokens"),
    ("frac_zero_variance", "Zero-variance groups", "share of groups"),
)


def plot_curves(metrics_rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """One picture of a run: reward, held-out accuracy, KL, length, zero-variance groups, each
    against the step.
    """
    plot_runs({"": metrics_rows}, path)


def plot_runs(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: str | Path) -> None:
    """The same picture with one line a run, named in a legend; what a run did not measure stays
    empty.
    """
    figure_of(runs).savefig(path, dpi=120)


def figure_of(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> "Figure":
    """The picture of runs by name, as a figure.

    Values of every step are drawn pale with their running mean over them, values of some steps as
    points.
    """
    from matplotlib.figure import Figure  # not pyplot: no global state, no window

    figure = Figure(figsize=(12, 6.4), layout="constrained", facecolor="white")
    places = [
        ["reward"] * 3 + ["held_out"] * 3,
        ["kl"] * 2 + ["length"] * 2 + ["frac_zero_variance"] * 2,
    ]
    axes = figure.subplot_mosaic(places)
    for key, title, label in PANELS:
        ax = axes[key]
        ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
        ax.set_xlabel("step")
        ax.set_ylabel(label)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="0.9")
        ax.set_axisbelow(True)
        drawn = [
            _draw(ax, rows, key, name, f"C{index}")
            for index, (name, rows) in enumerate(runs.items())
        ]
        _finish(ax, key, any(drawn), any(runs))
    return figure


def _finish(ax: Any, key: str, drawn: bool, named: bool) -> None:
    """A panel's ticks and limits, or a word where nothing was drawn."""
    from matplotlib.ticker import MaxNLocator

    if not drawn:
        centred = {"ha": "center", "va": "center", "color": "0.6"}
        ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, **centred)
        ax.set(xticks=[], yticks=[])
        return
    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if key in ("held_out", "frac_zero_variance"):
        ax.set_ylim(-0.03, 1.03)
    if key == "reward" and named:
        ax.legend(frameon=False)


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
    ax.plot(
        steps,
        running_mean(values, max(3, len(values) // 20)),
        color=color,
        label=name,
        linewidth=1.8,
    )
    return True


def running_mean(values: Sequence[float], width: int) -> np.ndarray:
    """The mean of the last `width` values at each place, of as many as there are at the start."""
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(values, float)]))
    ends = np.arange(1, len(sums))
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)
