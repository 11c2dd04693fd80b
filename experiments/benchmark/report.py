"""Tables, ratios, the JSON file and the picture, from what the driver has collected."""

import json
import statistics
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.benchmark.workloads import WORKLOADS, Workload, necessary_work

FIELDS = (
    "step_s",
    "sample_s",
    "reference_s",
    "train_s",
    "compile_s",
    "temp_bytes",
    "peak_rss_bytes",
    "device_peak_bytes",
)
STAGES = ("sample", "reference", "train", "step")
NAMED_PEERS = (
    "trl",
    "tunix",
)  # ratios are against the faster of these, and against the PyTorch loop
COLUMNS = (
    "contestant",
    "sample s",
    "reference s",
    "train s",
    "step s",
    "between",
    "tokens/s",
    "train / matrix rate",
    "decode / bound",
    "compile s",
    "peak GB",
    "temporaries GB",
)


def combine(rounds: Iterable[dict], parts: tuple[str, ...]) -> dict[str, Any] | None:
    """Medians and extremes over all steps of all rounds; None where a contestant has not finished
    one.

    `between` is the share of a step in which none of its `parts` runs: the host's work between
    calls to the device.
    """
    rounds = [r for r in rounds if "failed" not in r]
    if not rounds:
        return None
    seconds = {stage: [s for r in rounds for s in r["stages"][stage]] for stage in STAGES}
    laps = zip(seconds["step"], *(seconds[part] for part in parts), strict=True)
    return {
        "between": statistics.median(1 - sum(used) / whole for whole, *used in laps),
        **{f"{stage}_s": statistics.median(values) for stage, values in seconds.items()},
        "spread": {stage: (min(values), max(values)) for stage, values in seconds.items()},
        "compile_s": statistics.median(r["compile_s"] for r in rounds),
        "temp_bytes": rounds[0]["temp_bytes"],
        "peak_rss_bytes": max(r["peak_rss_bytes"] for r in rounds),
        "device_peak_bytes": max(
            (r["device_peak_bytes"] for r in rounds if r.get("device_peak_bytes")), default=None
        ),
    }


def peak_memory(row: dict) -> float:
    """Of the accelerator where there is one, else of the process; bytes."""
    return row["device_peak_bytes"] or row["peak_rss_bytes"]


def machine_rates(rates: dict[str, list[dict]]) -> dict[str, float]:
    """The best that any contestant's runtime reached, and each one's own matrix rate."""
    known = {
        name.removeprefix("machine_"): [r for r in found if "flops" in r]
        for name, found in rates.items()
    }
    flops = {
        f"matrix_flops_{name}": max(r["flops"] for r in found)
        for name, found in known.items()
        if found
    }
    if not flops:
        return {}
    bandwidth = max(r["bytes_per_s"] for found in known.values() for r in found)
    return {"matrix_flops": max(flops.values()), **flops, "bandwidth_bytes_per_s": bandwidth}


def shares(
    row: dict, work: dict[str, float], rates: dict[str, float], width: int
) -> dict[str, float]:
    """`train`: necessary FLOPs over the machine's rate and the time; `decode`: the larger bound
    over the time.
    """
    if not rates:
        return {}
    reads = work["decode_reads"] * width / rates["bandwidth_bytes_per_s"]
    flops = work["decode_flops"]
    return {
        "train": work["train_flops"] / rates["matrix_flops"] / row["train_s"],
        "decode": max(reads, flops / rates["matrix_flops"]) / row["sample_s"],
    }


def ratios(rows: dict[str, dict]) -> dict[str, dict[str, float]]:
    """How many times longer (or larger) the faster of TRL and Tunix is, and the PyTorch loop, than
    our rows.
    """
    found = {}
    for name in ("grpo_jax", "grpo_jax_layer"):
        for ours in _present(rows, name):
            found |= {
                f"{name} against {title}": values for title, values in _ratios(rows, ours).items()
            }
    return found


def _ratios(rows: dict[str, dict], ours: dict) -> dict[str, dict[str, float]]:
    found = {}
    peers = [rows[name] for name in NAMED_PEERS if name in rows]
    for title, others in (
        ("faster of TRL and Tunix", peers),
        ("PyTorch loop", _present(rows, "transformers")),
    ):
        if others:
            found[title] = {
                stage: min(o[f"{stage}_s"] for o in others) / ours[f"{stage}_s"] for stage in STAGES
            }
    for name in ("trl_bf16", "transformers_bf16"):
        for other in _present(rows, name):
            found[name] = {stage: other[f"{stage}_s"] / ours[f"{stage}_s"] for stage in STAGES}
    for other in _present(rows, "tunix"):
        if other["temp_bytes"] and ours["temp_bytes"]:
            found["temporaries of Tunix"] = {"train": other["temp_bytes"] / ours["temp_bytes"]}
    return found


def _present(rows: dict[str, dict], name: str) -> list[dict]:
    return [rows[name]] if name in rows else []


def table_rows(
    rows: dict[str, dict], work: dict[str, float], rates: dict[str, float], width: int
) -> list[list[str]]:
    """A table's cells, one row a contestant: medians with the extremes of the step."""
    cells = []
    for name, row in rows.items():
        # The rates are those of the first rows' type: other types have other bounds.
        share = {} if name.endswith("_bf16") else shares(row, work, rates, width)
        low, high = row["spread"]["step"]
        temp = row["temp_bytes"]
        cells.append(
            [
                name,
                *(f"{row[f'{stage}_s']:.3g}" for stage in STAGES[:3]),
                f"{row['step_s']:.3g} ({low:.3g} to {high:.3g})",
                f"{max(row['between'], 0):.1%}",
                f"{work['tokens'] / row['step_s']:.0f}",
                *(f"{share[k]:.0%}" if k in share else "–" for k in ("train", "decode")),
                f"{row['compile_s']:.3g}",
                f"{peak_memory(row) / 1e9:.2f}",
                "–" if temp is None else f"{temp / 1e9:.3g}",
            ]
        )
    return cells


def ratio_lines(rows: dict[str, dict]) -> list[str]:
    """The ratios as sentences."""
    lines = []
    for title, values in ratios(rows).items():
        told = ", ".join(f"{stage} {value:.2f}×" for stage, value in values.items())
        lines.append(f"{title}: {told}")
    return lines


def machine_line(machine: dict[str, Any]) -> str:
    """Processor, cores, rates, versions and date in one line."""
    told = [machine["processor"], f"{machine['cores']} cores", machine["dtype"], machine["date"]]
    if "matrix_flops" in machine:
        told.insert(2, f"{machine['matrix_flops'] / 1e9:.0f} GFLOP/s of matrix products")
        told.insert(3, f"{machine['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s of copies")
    return ", ".join(told + [f"{name} {version}" for name, version in machine["versions"].items()])


class Report:
    """All that is shown: `rows[workload][contestant]` in combined figures, the machine, the
    notes.
    """

    def __init__(
        self, results: dict, machine: dict, config: dict, inputs: dict, notes: list[str], dtype: str
    ):
        self.machine = machine
        self.notes = notes
        self.width = 4 if dtype == "float32" else 2
        self.rows = {
            workload: {
                name: row
                for name, found in contestants.items()
                if (row := combine(found, parts)) is not None
            }
            for workload, contestants in results.items()
            for parts in [_parts_of_step(WORKLOADS[workload])]
        }
        self.work = {
            name: necessary_work(WORKLOADS[name], config, inputs[name]) for name in self.rows
        }

    def cells(self, workload: str) -> list[list[str]]:
        return table_rows(self.rows[workload], self.work[workload], self.machine, self.width)

    def print(self, console: Console) -> None:
        for workload, rows in self.rows.items():
            table = Table(title=f"{workload}: {WORKLOADS[workload].title}", title_justify="left")
            for i, column in enumerate(COLUMNS):
                table.add_column(column, justify="left" if i == 0 else "right")
            for row in self.cells(workload):
                table.add_row(*row)
            console.print(table)
            for line in ratio_lines(rows):
                console.print(f"  {line}", highlight=False)
        for line in (machine_line(self.machine), *self.notes):
            console.print(line, highlight=False, soft_wrap=True)

    def markdown(self) -> str:
        lines = []
        for workload, rows in self.rows.items():
            lines += [
                f"**{workload}**: {WORKLOADS[workload].title}",
                "",
                f"| {' | '.join(COLUMNS)} |",
            ]
            lines += [
                "|---" * len(COLUMNS) + "|",
                *(f"| {' | '.join(row)} |" for row in self.cells(workload)),
                "",
            ]
            lines += [*(f"- {line}" for line in ratio_lines(rows)), ""]
        return "\n".join(
            [*lines, machine_line(self.machine), "", *(f"- {note}" for note in self.notes), ""]
        )

    def json(self) -> str:
        workloads = {
            workload: {name: {field: row[field] for field in FIELDS} for name, row in rows.items()}
            for workload, rows in self.rows.items()
        }
        return (
            json.dumps(
                {"machine": self.machine | {"notes": self.notes}, "workloads": workloads}, indent=2
            )
            + "\n"
        )

    def figure(self, path: Path) -> None:
        """Stacked seconds of the stages of a step, and peak resident memory, one row of panels a
        workload.
        """
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        colours = {"sample": "#4c78a8", "reference": "#bab0ac", "train": "#f58518"}
        figure, grid = plt.subplots(
            len(self.rows), 2, figsize=(10, 0.9 + 2.1 * len(self.rows)), squeeze=False
        )
        for (workload, rows), (seconds, memory) in zip(self.rows.items(), grid, strict=True):
            names = list(rows)[::-1]
            parts = _parts_of_step(WORKLOADS[workload])
            left = [0.0] * len(names)
            for part in parts:
                width = [rows[name][f"{part}_s"] for name in names]
                seconds.barh(names, width, left=left, color=colours[part], label=part)
                left = [a + b for a, b in zip(left, width, strict=True)]
            for place, (name, end) in enumerate(zip(names, left, strict=True)):
                seconds.text(end, place, f" {rows[name]['step_s']:.3g} s", va="center", fontsize=8)
            seconds.margins(x=0.15)
            title = textwrap.fill(
                f"{workload}: {WORKLOADS[workload].title}", 76
            )  # as wide as the panel
            seconds.set_title(title, fontsize=8, loc="left")
            memory.barh(names, [peak_memory(rows[name]) / 1e9 for name in names], color="#54a24b")
            memory.set_yticklabels([])
            memory.set_title("peak memory, GB", fontsize=8, loc="left")
            for axis in (seconds, memory):
                axis.spines[["top", "right"]].set_visible(False)
                axis.tick_params(labelsize=8)
        grid[0][0].legend(fontsize=8, frameon=False)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _parts_of_step(workload: Workload) -> tuple[str, ...]:
    return ("sample", "reference", "train") if workload.beta else ("sample", "train")
