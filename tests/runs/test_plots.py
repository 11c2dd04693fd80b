"""A picture of a run's curves, for any rows."""

import numpy as np
import pytest
from grpo_jax.runs.plots import figure_of, plot_curves, plot_runs, running_mean

ROWS = [{"step": s, "reward": s / 40, "kl": 0.1, "length": 9.0, "frac_zero_variance": 0.5} for s in range(40)]
ROWS[5]["held_out"] = ROWS[30]["held_out"] = 0.5


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], [{"step": 0}], [], [{"step": 0, "reward": None, "kl": 1}]])
def test_a_picture_of_any_rows(tmp_path, rows):
    plot_curves(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def panels(figure):
    return {ax.get_title(loc="left"): ax for ax in figure.axes}


def test_panels_are_drawn_and_labelled():
    axes = panels(figure_of({"": ROWS}))
    assert set(axes) == {
        "Reward", "Held-out accuracy", "KL to the reference", "Completion length", "Zero-variance groups",
    }  # fmt: skip
    assert all(ax.get_xlabel() == "step" and ax.get_ylabel() for ax in axes.values())
    assert axes["Held-out accuracy"].lines[0].get_xydata().tolist() == [[5, 0.5], [30, 0.5]]
    raw, mean = axes["Reward"].lines
    assert raw.get_ydata().tolist() == [row["reward"] for row in ROWS]
    assert mean.get_ydata()[-1] == pytest.approx(np.mean([37, 38, 39]) / 40)
    assert axes["Reward"].get_legend() is None


def test_missing_values_are_said_and_runs_are_named(tmp_path):
    runs = {"a": [{"step": 0, "reward": 1.0}], "b": [{"step": 0, "reward": 2.0}]}
    plot_runs(runs, tmp_path / "runs.png")
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")
    axes = panels(figure_of(runs))
    assert [text.get_text() for text in axes["Reward"].get_legend().get_texts()] == ["a", "b"]
    assert axes["KL to the reference"].texts[0].get_text() == "not measured"


def test_running_mean():
    assert running_mean([1, 2, 3, 4], 2).tolist() == [1, 1.5, 2.5, 3.5]
    assert running_mean([1, 2], 9).tolist() == [1, 1.5]
