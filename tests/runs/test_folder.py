"""What a run leaves behind: files that survive a kill, a picture for any rows, a terminal that stays quiet in a log."""

import dataclasses
import io
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.runs.folder import RunFolder, append_line, cut_lines, json_text, read_lines, write_json, write_rows
from grpo_jax.runs.plots import plot_curves, plot_runs, running_mean
from grpo_jax.runs.terminal import Progress, Screen, print_summary, sparkline
from rich.console import Console
from tensorboardX.proto import event_pb2


def metrics(step):
    return {"reward": jnp.float32(0.1 * step), "length": np.int64(step), "kl": math.nan if step == 2 else 0.5}


def write(run, steps):
    for step in steps:
        run.log(step, metrics(step), {"seconds": 1.0})
        run.log_completions(step, [{"prompt": "p\n×", "completion": "c", "reward": math.nan, "answer": "3"}])


def events(folder):
    """(step, tag, value) of every scalar in a TensorBoard folder, and the steps of its session starts."""
    scalars, starts = [], []  # a record: its length, a checksum of that, the event, a checksum of that
    for path in sorted((folder / "tensorboard").glob("events*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            scalars += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            if event.HasField("session_log"):
                starts.append(event.step)
    return scalars, starts


def test_metrics_are_plain_json_lines_with_the_step_first(tmp_path):
    with RunFolder(tmp_path / "run") as run:
        write(run, [2])
    line = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert line == json.dumps({"step": 2, "reward": float(np.float32(0.2)), "length": 2, "kl": None}) + "\n"
    assert read_lines(tmp_path / "run" / "timings.jsonl") == [{"step": 2, "seconds": 1.0}]
    row = {"step": 2, "prompt": "p\n×", "completion": "c", "reward": None, "answer": "3"}
    assert read_lines(tmp_path / "run" / "completions.jsonl") == [row]


def test_a_resumed_run_has_the_same_bytes(tmp_path):
    with RunFolder(tmp_path / "whole") as run:
        write(run, range(6))
    with RunFolder(tmp_path / "killed") as run:
        write(run, range(4))
    for name in ("metrics.jsonl", "completions.jsonl"):
        with open(tmp_path / "killed" / name, "a") as file:
            file.write('{"step": 4, "rew')  # killed in the middle of a line
    with RunFolder(tmp_path / "killed", resume_step=3) as run:
        write(run, range(3, 6))
    for name in ("metrics.jsonl", "timings.jsonl", "completions.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_tensorboard_has_metrics_and_timings_and_purges_on_resume(tmp_path):
    with RunFolder(tmp_path) as run:
        write(run, [1, 2])
    with RunFolder(tmp_path, resume_step=2):
        pass
    scalars, starts = events(tmp_path)
    assert (1, "reward", pytest.approx(0.1)) in scalars
    assert (2, "time/seconds", 1.0) in scalars
    assert "kl" not in {tag for step, tag, _ in scalars if step == 2}  # NaN is no point of a curve
    assert 2 in starts


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    with RunFolder(tmp_path) as run:
        write(run, [0])
    with pytest.raises(FileExistsError, match="already holds a run"):
        RunFolder(tmp_path)
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        RunFolder(tmp_path / "absent", resume_step=1)


def test_config_and_summary(tmp_path):
    @dataclasses.dataclass
    class Config:
        out: Path
        betas: tuple
        rate: float

    with RunFolder(tmp_path) as run:
        run.write_config(Config(Path("runs/a"), (0.9, 0.95), 1e-3))
        run.write_summary({"held_out_after": np.float32(0.5), "best": jnp.bfloat16(0.25), "done": np.bool_(True)})
    assert json.loads((tmp_path / "config.json").read_text()) == {"out": "runs/a", "betas": [0.9, 0.95], "rate": 1e-3}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {"held_out_after": 0.5, "best": 0.25, "done": True}


def test_json_is_written_all_or_nothing(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(TypeError, match="cannot write object"):
        write_json(tmp_path / "a.json", {"x": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_rows_are_written_all_or_nothing(tmp_path):
    """One line each, in the place of what was there; text stays as it is, and NaN is null."""
    path = tmp_path / "failures.jsonl"
    write_rows(path, [{"a": 1}, {"a": 2}])
    write_rows(path, [{"text": "é\n×", "reward": math.nan, "n": np.int32(3)}])
    assert path.read_text(encoding="utf-8") == '{"text": "é\\n×", "reward": null, "n": 3}\n'
    assert read_lines(path) == [{"text": "é\n×", "reward": None, "n": 3}]
    with pytest.raises(TypeError, match="cannot write object"):
        write_rows(path, [{"a": 1}, {"a": object()}])
    assert len(read_lines(path)) == 1
    write_rows(path, [])
    assert path.read_text() == ""
    assert [entry.name for entry in tmp_path.iterdir()] == ["failures.jsonl"]


def test_json_has_neither_nan_nor_infinity():
    assert (
        json_text({"a": [math.nan, -math.inf, 1.5], "b": jnp.float32(math.nan)})
        == '{"a": [null, null, 1.5], "b": null}'
    )
    assert json_text({"a": 1}, indent=2) == '{\n  "a": 1\n}'


def test_lines_are_cut_at_the_step_and_kept_as_they_are(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 0,  "odd":   1}\n{"step": 1}\n{"step": 2}\n{"st')
    assert read_lines(path) == [{"step": 0, "odd": 1}, {"step": 1}, {"step": 2}]
    cut_lines(path, 2)
    assert path.read_text() == '{"step": 0,  "odd":   1}\n{"step": 1}\n'
    append_line(path, {"step": 2, "values": np.arange(2)})
    assert read_lines(path)[-1] == {"step": 2, "values": [0, 1]}
    assert read_lines(tmp_path / "absent.jsonl") == []
    cut_lines(tmp_path / "absent.jsonl", 0)


ROWS = [{"step": s, "reward": s / 40, "kl": 0.1, "length": 9.0, "frac_zero_variance": 0.5} for s in range(40)]
ROWS[5]["held_out"] = ROWS[30]["held_out"] = 0.5


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], [{"step": 0}], [], [{"step": 0, "reward": None, "kl": 1}]])
def test_a_picture_of_any_rows(tmp_path, rows):
    plot_curves(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def panels(figure):
    return {ax.get_title(loc="left"): ax for ax in figure.axes}


@pytest.fixture
def figure(monkeypatch):
    """The figure that is saved last."""
    from matplotlib.figure import Figure

    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: kept.append(self))
    return kept


def test_panels_are_drawn_and_labelled(figure):
    plot_curves(ROWS, "unused")
    axes = panels(figure[0])
    assert set(axes) == {
        "Reward", "Held-out accuracy", "KL to the reference", "Completion length", "Groups without signal",
    }  # fmt: skip
    assert all(ax.get_xlabel() == "step" and ax.get_ylabel() for ax in axes.values())
    assert axes["Held-out accuracy"].lines[0].get_xydata().tolist() == [[5, 0.5], [30, 0.5]]
    raw, mean = axes["Reward"].lines
    assert raw.get_ydata().tolist() == [row["reward"] for row in ROWS]
    assert mean.get_ydata()[-1] == pytest.approx(np.mean([37, 38, 39]) / 40)
    assert axes["Reward"].get_legend() is None


def test_missing_values_are_said_and_runs_are_named(figure):
    plot_runs({"a": [{"step": 0, "reward": 1.0}], "b": [{"step": 0, "reward": 2.0}]}, "unused")
    axes = panels(figure[0])
    assert [text.get_text() for text in axes["Reward"].get_legend().get_texts()] == ["a", "b"]
    assert axes["KL to the reference"].texts[0].get_text() == "not measured"


def test_running_mean():
    assert running_mean([1, 2, 3, 4], 2).tolist() == [1, 1.5, 2.5, 3.5]
    assert running_mean([1, 2], 9).tolist() == [1, 1.5]


def screen(terminal, **options):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, **options)


def test_plain_lines_are_few_and_the_last_one_is_there():
    now, console = [0.0], screen(False)
    with Progress(10, title="run", console=console, interval=5.0, clock=lambda: now[0]) as progress:
        for done in range(1, 11):
            now[0] += 2.0
            progress.update(done, reward=np.float32(done / 10), held_out=0.25 if done == 1 else None)
    lines = console.file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["run 1/10", "run 4/10", "run 7/10", "run 10/10"]
    assert lines[1] == "run 4/10  reward 0.400  held-out 25.0 %  left 0:12"
    assert lines[-1].endswith("left 0:00")


def test_time_left_leaves_the_first_step_out():
    now = [0.0]
    progress = Progress(5, start=1, console=screen(False), clock=lambda: now[0])
    assert progress.seconds_left() is None
    now[0] = 100.0  # the first step compiles
    progress.update(2)
    assert progress.seconds_left() is None
    now[0] = 103.0
    progress.update(3)
    assert progress.seconds_left() == 6.0


def test_a_terminal_shows_the_numbers_live():
    console = screen(True)
    with Screen(console).phase("GRPO", 4) as show:
        show(1, reward=0.25)
        show(2, reward=0.5, tokens_per_second=12345.6, kl=math.nan)
    text = console.file.getvalue()
    assert "GRPO" in text
    assert "2/4" in text
    assert "12,346" in text
    assert "kl" not in text


def test_a_note_lasts_until_the_next_update():
    for terminal in (False, True):
        console = screen(terminal)
        with Progress(4, console=console, interval=0.0) as progress:
            for done, note in ((1, "5 rows evaluated"), (2, "")):
                before = len(console.file.getvalue())
                progress.update(done, reward=0.5, note=note)
                if terminal:
                    console.print(progress._render())
                shown = console.file.getvalue()[before:]
                assert "0.500" in shown
                assert ("5 rows evaluated" in shown) == bool(note)


def test_phases_pass_their_interval_and_start(monkeypatch):
    console = screen(False)
    with Screen(console, interval=0.0).phase("warm-up", 3, start=1) as show:
        for done in (2, 3):
            show(done, loss=1.5)
    assert [line.split("  left")[0] for line in console.file.getvalue().splitlines()] == [
        "warm-up 2/3  loss 1.500",
        "warm-up 3/3  loss 1.500",
    ]


def test_no_total_is_an_error():
    with pytest.raises(ValueError, match="total"):
        Progress(0)


@pytest.mark.parametrize(
    ("values", "bars"), [([0, 1], "▁█"), ([2, 2, 2], "▁▁▁"), ([0, 0, 7, 7], "▁▁██"), (range(80), "▁▂▃▄▅▆▇█")]
)
def test_sparkline(values, bars):
    assert sparkline(values, 8) == bars


def test_summary_says_before_after_and_where(tmp_path):
    with RunFolder(tmp_path) as run:
        write(run, [0])
    console = Console(file=io.StringIO(), width=400)
    summary = {"held_out_before": 0.4, "held_out_after": 0.9, "steps": 120, "seconds": 3725.0}
    Screen(console).summary(summary, tmp_path)
    text = console.file.getvalue()
    for part in ("40.0 % → 90.0 %", "+50.0 points", "120 in 1:02:05", str(tmp_path / "metrics.jsonl")):
        assert part in text
    assert "curves.png" not in text  # only what is there
    assert f"grpo-jax eval {tmp_path}" in text
    print_summary({}, tmp_path, console)
