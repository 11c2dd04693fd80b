"""What `compare_objectives` shows: one row a system, as a table, JSON, Markdown and a picture with
its spread.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from grpo_jax.runs import folder as run_folder
from grpo_jax.runs import terminal

LEVELS = (0.7, 0.8)  # held-out accuracies whose first evaluation is reported
GRPO = "grpo"
COLUMNS = (
    "system",
    "before, %",
    "after, %",
    *(f"{level:.0%} at step" for level in LEVELS),
    "tokens",
    "s/step",
    "memory, MB",
    "of GRPO's",
)
LEGEND = (
    "Held-out accuracy before and after, greedy, mean ± standard deviation over {seeds}; the first "
    f"evaluated step with {' and '.join(f'{level:.0%}' for level in LEVELS)} (median); tokens "
    "sampled; the median time of a step; memory of the compiled update: state and batch + "
    "temporaries, and their sum as a share of GRPO's."
)
# The ladder from the policy gradient to GRPO, in the panels of the picture.
LADDER: dict[str, tuple[str, ...]] = {
    "From the policy gradient to GRPO": (
        "reinforce",
        "reinforce_discounted",
        "reinforce_baseline",
        "ppo",
        "grpo",
    ),
    "Where the KL is, and to what": (
        "grpo",
        "grpo_without_kl",
        "grpo_kl_in_reward",
        "grpo_adaptive_beta",
        "grpo_iterative",
        "grpo_ema",
    ),
    "Other rewards, more epochs": (
        "grpo",
        "process_grpo",
        "gdpo",
        "grpo_two_rewards",
        "grpo_2_epochs",
        "grpo_4_epochs",
    ),
}


def steps_to(curve: Sequence[Mapping[str, float]], level: float) -> float:
    """The first evaluated step with at least that accuracy; infinity if there is none."""
    return next((point["step"] for point in curve if point["held_out"] >= level), math.inf)


def summarise(records: Sequence[Mapping[str, Any]]) -> list[dict]:
    """One row a system over its seeds, the best final accuracy first. Deviations are those of a
    sample (n − 1).
    """
    rows = []
    by_system = {}
    for record in records:
        by_system.setdefault(record["system"], []).append(record)
    for name, runs in by_system.items():
        before, after = ([run["curve"][place]["held_out"] for run in runs] for place in (0, -1))
        reached = [
            float(np.median([steps_to(run["curve"], level) for run in runs])) for level in LEVELS
        ]
        rows.append(
            {
                "system": name,
                "settings": runs[0]["settings"],
                "seeds": [run["seed"] for run in runs],
                "before": _spread(before),
                "after": _spread(after),
                "steps_to_levels": [step if math.isfinite(step) else None for step in reached],
                "sampled_tokens": float(np.mean([run["sampled_tokens"] for run in runs])),
                "seconds_per_step": float(np.median([run["seconds_per_step"] for run in runs])),
                "memory": runs[0]["memory"],
            }
        )
    total = lambda row: sum(row["memory"].values())
    base = next((total(row) for row in rows if row["system"] == GRPO), None)
    rows = [row | {"memory_of_grpo": None if base is None else total(row) / base} for row in rows]
    return sorted(rows, key=lambda row: -row["after"]["mean"])


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": float(np.mean(values)),
        "std": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
    }


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the table, in the order of `COLUMNS`."""
    several = len(row["seeds"]) > 1
    percent = lambda x: f"{100 * x['mean']:.1f}" + (f" ± {100 * x['std']:.1f}" if several else "")
    ratio = row["memory_of_grpo"]
    return (
        row["system"],
        percent(row["before"]),
        percent(row["after"]),
        *("–" if step is None else f"{step:g}" for step in row["steps_to_levels"]),
        f"{row['sampled_tokens'] / 1e3:,.0f}k",
        f"{row['seconds_per_step']:.2f}",
        " + ".join(f"{row['memory'][part] / 1e6:.1f}" for part in ("arguments", "temporaries")),
        "–" if ratio is None else f"{ratio:.2f}",
    )


def legend(rows: Sequence[Mapping[str, Any]]) -> str:
    counts = sorted({len(row["seeds"]) for row in rows})
    seeds = " to ".join(map(str, {counts[0]: None, counts[-1]: None})) + (
        " seed" if counts[-1] == 1 else " seeds"
    )
    return LEGEND.format(seeds=seeds)


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    out = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        caption=legend(rows),
        caption_justify="left",
    )
    for index, column in enumerate(COLUMNS):
        out.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        out.add_row(*cells(row))
    return out


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table, and what each system was bound with."""
    line = lambda texts: f"| {' | '.join(texts)} |\n"
    head = line(COLUMNS) + line(["---", *["---:"] * (len(COLUMNS) - 1)])
    settings = "".join(f"- `{row['system']}`: {row['settings']}\n" for row in rows)
    return (
        head
        + "".join(line(cells(row)) for row in rows)
        + f"\n{legend(rows)}\n\nSettings:\n\n{settings}"
    )


def write(
    records: Sequence[Mapping[str, Any]], folder: Path, figure: Path, screen: terminal.Screen
) -> None:
    """summary.json and summary.md in the folder, the picture, and the table on the terminal."""
    rows = summarise(records)
    run_folder.write_json(folder / "summary.json", {"systems": rows, "runs": records})
    (folder / "summary.md").write_text(markdown(rows))
    figure.parent.mkdir(parents=True, exist_ok=True)
    draw(rows, records, figure)
    if not screen.console.is_terminal:  # a pipe has the width of its lines, not 80
        screen = terminal.Screen(Console(file=screen.console.file, width=110))
    screen.console.print(table(rows))
    screen.console.print(
        f"Table: {folder / 'summary.md'}\nPicture: {figure}", soft_wrap=True, highlight=False
    )


def draw(
    rows: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]], path: Path
) -> None:
    """Left the final accuracies with their spread, sorted; right the curves of the ladder as means
    in bands.
    """
    from matplotlib.figure import Figure  # not pyplot: no global state, no window

    figure = Figure(
        figsize=(14, max(9.0, 2.0 + 0.24 * len(rows))), layout="constrained", facecolor="white"
    )
    places = [["points", title] for title in LADDER]
    axes = figure.subplot_mosaic(places, width_ratios=(1, 1.1))
    _points(axes["points"], rows, records)
    for title, names in LADDER.items():
        _curves(axes[title], title, names, records)
    axes[list(LADDER)[-1]].set_xlabel("step")
    figure.savefig(path, dpi=90)


def _points(
    ax: Any, rows: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]
) -> None:
    heights = {row["system"]: place for place, row in enumerate(reversed(rows))}
    for record in records:
        ax.plot(
            100 * record["curve"][-1]["held_out"],
            heights[record["system"]],
            "o",
            color="0.75",
            markersize=3.5,
        )
    for row in rows:
        color = "C3" if row["system"] == GRPO else "C0"
        mean = 100 * row["after"]["mean"]
        std = 100 * row["after"]["std"]
        ax.errorbar(
            mean, heights[row["system"]], xerr=std, fmt="o", color=color, capsize=3, markersize=6
        )
    before = 100 * float(np.mean([row["before"]["mean"] for row in rows]))
    ax.axvline(before, color="0.5", linestyle="--", linewidth=1)
    ax.text(before, len(rows) - 0.4, " start", color="0.4", va="top")
    ax.set_yticks(list(heights.values()), list(heights))
    ax.set_ylim(-0.7, len(rows) - 0.3)
    ax.set_xlabel("held-out accuracy after training, %: mean ± deviation")
    _title(ax, "Every objective, the same budget", "x")


def _curves(
    ax: Any, title: str, names: Sequence[str], records: Sequence[Mapping[str, Any]]
) -> None:
    for index, name in enumerate(names):
        curves = [record["curve"] for record in records if record["system"] == name]
        if not curves:
            continue
        steps = [point["step"] for point in curves[0]]
        values = 100 * np.array([[point["held_out"] for point in curve] for curve in curves])
        mean = values.mean(0)
        std = values.std(0, ddof=1) if len(values) > 1 else np.zeros(len(steps))
        color = "C3" if name == GRPO else ("C0", "C1", "C2", "C4", "C5", "C6", "C7")[index % 7]
        ax.plot(steps, mean, "o-", color=color, label=name, linewidth=1.8, markersize=3.5)
        ax.fill_between(steps, mean - std, mean + std, color=color, alpha=0.15, linewidth=0)
    ax.set_ylabel("held-out accuracy, %")
    _title(ax, title, "y")
    if ax.lines:
        ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _title(ax: Any, title: str, grid: str) -> None:
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis=grid, color="0.9")
    ax.set_axisbelow(True)
