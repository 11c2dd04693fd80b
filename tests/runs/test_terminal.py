"""A terminal that shows what is new, and stays quiet in a log."""

import io
import math

import numpy as np
import pytest
from grpo_jax.runs.folder import append_line
from grpo_jax.runs.terminal import Progress, Screen, print_summary, sparkline
from rich.console import Console


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


def test_phases_pass_their_interval_and_start():
    console = screen(False)
    with Screen(console, interval=0.0).phase("fine-tuning", 3, start=1) as show:
        for done in (2, 3):
            show(done, loss=1.5)
    assert [line.split("  left")[0] for line in console.file.getvalue().splitlines()] == [
        "fine-tuning 2/3  loss 1.500",
        "fine-tuning 3/3  loss 1.500",
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
    append_line(tmp_path / "metrics.jsonl", {"step": 0})
    console = Console(file=io.StringIO(), width=400)
    summary = {"held_out_before": 0.4, "held_out_after": 0.9, "steps": 120, "seconds": 3725.0}
    Screen(console).summary(summary, tmp_path)
    text = console.file.getvalue()
    for part in ("40.0 % → 90.0 %", "+50.0 points", "120 in 1:02:05", str(tmp_path / "metrics.jsonl")):
        assert part in text
    assert "curves.png" not in text  # only what is there
    assert f"grpo-jax eval {tmp_path}" in text
    print_summary({}, tmp_path, console)
