"""What a run leaves behind: files that survive a kill."""

import dataclasses
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.options import Generation, Sampling
from grpo_jax.runs.folder import (
    RunFolder,
    append_line,
    cut_lines,
    json_text,
    read_lines,
    run_folder,
    spread,
    write_json,
    write_rows,
)
from tensorboardX.proto import event_pb2


def metrics(step):
    """As `train` yields them."""
    numbers = {"reward": jnp.float32(0.1 * step), "length": np.int64(step), "kl": math.nan if step == 2 else 0.5}
    row = {"prompt": "p\n×", "completion": "c", "reward": math.nan, "answer": "3"}
    return {"iteration": step} | numbers | {"seconds/update": 1.0, "tokens": 12, "completions": [row]}


def write(run, steps):
    for step in steps:
        run.log(metrics(step))


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
    given = metrics(2)
    with RunFolder(tmp_path / "run") as run:
        run.log(given)
    line = (tmp_path / "run" / "metrics.jsonl").read_text()
    numbers = {"step": 2, "reward": float(np.float32(0.2)), "length": 2, "kl": None, "tokens": 12}
    assert line == json.dumps(numbers) + "\n"
    timings = {"step": 2, "seconds/update": 1.0, "tokens_per_second": 12.0}
    assert read_lines(tmp_path / "run" / "timings.jsonl") == [timings]
    row = {"step": 2, "prompt": "p\n×", "completion": "c", "reward": None, "answer": "3"}
    assert read_lines(tmp_path / "run" / "completions.jsonl") == [row]
    assert given.keys() == metrics(2).keys(), "what a caller hands over stays as it is"


def test_numbers_alone_are_logged_too(tmp_path):
    with RunFolder(tmp_path) as run:
        run.log({"iteration": 0, "held_out": 0.5})
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 0, "held_out": 0.5}]
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "tensorboard"}


@pytest.mark.parametrize(("asked", "kept"), [(4, [0, 3, 6, 9]), (0, []), (99, [*range(10)]), (1, [0])])
def test_completions_are_spread_over_the_batch(tmp_path, asked, kept):
    rows = [{"i": i} for i in range(10)]
    assert [row["i"] for row in spread(rows, asked)] == kept
    with RunFolder(tmp_path) as run:
        run.log({"iteration": 1, "completions": rows}, completions=asked)
    assert [row["i"] for row in read_lines(tmp_path / "completions.jsonl")] == kept
    assert spread([], asked) == []


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


def test_tensorboard_holds_what_the_lines_hold_after_every_resume(tmp_path):
    """What a kill kept from it is written anew, and what is cut from the lines is in it no more."""
    with RunFolder(tmp_path) as run:
        write(run, [1, 2, 3])
    for path in (tmp_path / "tensorboard").iterdir():
        path.unlink()  # nothing had been written yet
    with RunFolder(tmp_path, resume_step=3) as run:
        write(run, [3])
    with RunFolder(tmp_path, resume_step=3):
        pass
    scalars, _ = events(tmp_path)
    assert (1, "reward", pytest.approx(0.1)) in scalars
    assert (2, "time/seconds/update", 1.0) in scalars
    assert (2, "time/tokens_per_second", 12.0) in scalars
    assert "kl" not in {tag for step, tag, _ in scalars if step == 2}  # NaN is no point of a curve
    assert {step for step, _, _ in scalars} == {1, 2}
    with RunFolder(tmp_path, resume_step=3) as run:
        write(run, [3])
    scalars, _ = events(tmp_path)
    assert sorted(scalars) == sorted(set(scalars)), "no point is there twice"
    assert {step for step, _, _ in scalars} == {1, 2, 3}


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    with RunFolder(tmp_path) as run:
        write(run, [0])
    with pytest.raises(FileExistsError, match="already holds a run"):
        RunFolder(tmp_path)
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        RunFolder(tmp_path / "absent", resume_step=1)


def test_a_program_of_ones_own_continues_its_folder(tmp_path):
    """`resume_step` counts the finished iterations of the restored state: what came after is written again."""
    with run_folder(tmp_path / "own") as run:
        write(run, [1, 2, 3])
    with pytest.raises(FileExistsError, match="already holds a run"):
        run_folder(tmp_path / "own")
    with run_folder(tmp_path / "own", resume_step=2) as run:
        write(run, [3, 4])
    for name in ("metrics.jsonl", "timings.jsonl", "completions.jsonl"):
        assert [row["step"] for row in read_lines(tmp_path / "own" / name)] == [1, 2, 3, 4]


def test_config_and_summary(tmp_path):
    @dataclasses.dataclass
    class Config:
        out: Path
        betas: tuple
        rate: float
        generation: Generation

    with RunFolder(tmp_path) as run:
        run.write_config(Config(Path("runs/a"), (0.9, 0.95), 1e-3, Generation(sampling=Sampling(top_k=5))))
        run.write_summary({"held_out_after": np.float32(0.5), "best": jnp.bfloat16(0.25), "done": np.bool_(True)})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("generation") == {
        "group_size": 8, "max_new_tokens": 64, "decode_slots": None, "compactions": 0,
        "sampling": {"temperature": 1.0, "top_k": 5, "top_p": None, "min_p": None},
    }  # fmt: skip
    assert config == {"out": "runs/a", "betas": [0.9, 0.95], "rate": 1e-3}
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
