"""A run that is resumed is the run that it was: what changed meanwhile is refused by name, or told."""

import dataclasses
import importlib.metadata
import json
import platform
import shutil

import jax
import pytest
from grpo_jax.cli.entry import main
from grpo_jax.config import load_config
from grpo_jax.options import OptionError
from grpo_jax.runs.checkpoint import iterations, newest_record, open_checkpoints, restore, save, seal
from grpo_jax.runs.folder import read_lines, write_json
from grpo_jax.runs.record import check_override

from saved_states import bits, state_of
from small_runs import Silent, go, same_run, small
from toy import install

install()
FAST = {"objective_args": ("beta=0",), "schedule": "constant", "eval_every": 1, "keep_checkpoints": 9}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("same") / "whole"
    go(small(**FAST, steps=2), folder)
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def edited(folder, **changes):
    """Changes config.json as an editor would, by the names of options."""
    values = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        *within, last = name.split("__")
        target = values
        for part in within:
            target = target[part]
        target[last] = value
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"optimizer__learning_rate": 0.5}, "learning_rate is 0.5 and was 0.05"),
        ({"generation__sampling__top_k": 5}, "top_k is 5 and was null"),
        ({"steps": 9, "seed": 3}, "steps is 9 and was 2, seed is 3 and was 0"),
        ({"task_args": ["train_size=9"]}, 'task_args is ["train_size=9"] and was []'),
    ],
    ids=str,
)
def test_an_option_that_was_changed_is_refused_by_name(copy, capsys, change, told, fault):
    edited(copy, **change)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert main(["train", "--resume", str(copy)]) == 2
    error = capsys.readouterr().err
    assert f"error: {copy} is not the run of its checkpoints: {told}. Put config.json right" in error
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    fault(f"config.json edited between two starts: {', '.join(change)}", "refused with what is and what was")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": "many"}, r"config\.json: steps must be of type int, got 'many'"),
        ({"task": None}, r"config\.json: task must be of type str, got None"),
        ({"optimizer": None}, r"config\.json: optimizer must be an object with named fields, got None"),
        ({"optimizer__schedule": "cosin"}, r"config\.json: schedule "),
    ],
    ids=str,
)
def test_an_edited_configuration_is_said_with_file_and_field(copy, change, message, fault):
    edited(copy, **change)
    with pytest.raises(ValueError, match=message):
        load_config(copy)
    fault(f"config.json with {next(iter(change))} = {next(iter(change.values()))!r}", "refused with file and field")


def test_a_cut_configuration_is_said_with_its_place(copy, fault):
    path = copy / "config.json"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"config\.json is no JSON: .*line \d+ column \d+"):
        load_config(copy)
    fault("config.json cut off", "refused with file, line and column")


def test_a_configuration_with_missing_options_takes_no_defaults(copy, fault):
    values = json.loads((copy / "config.json").read_text())
    del values["task"], values["generation"]["group_size"]
    (copy / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"config\.json lacks task, generation\.group_size: it must say every option"):
        load_config(copy)
    fault("config.json without some options", "refused with file and fields")


def test_steps_are_extended_on_purpose(copy, tmp_path, fault):
    """To the same end as a run that was asked for as many at once."""
    assert main(["train", "--resume", str(copy), "--override", "steps=3", "save_every=1"]) == 0
    go(small(**FAST, steps=3), tmp_path / "longer")
    same_run(copy, tmp_path / "longer")
    fault("--override steps=3 under a constant schedule", "goes on; equals a run of 3 steps")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=3", "cannot change seed of a run that has begun: it changes what is trained"),
        ("step=3", "'step' is no option of a run; did you mean 'steps'?"),
        ("steps", "takes NAME=VALUE, got 'steps'"),
        ("save-every=often", "save_every must be of type int, got 'often'"),
    ],
)
def test_an_override_that_is_not_safe_is_refused(copy, capsys, override, message, fault):
    assert main(["train", "--resume", str(copy), "--override", override]) == 2
    assert message in capsys.readouterr().err
    fault(f"--override {override}", "refused with the reason")


def test_steps_are_part_of_a_schedule():
    check_override("steps", small(schedule="constant"))
    with pytest.raises(OptionError, match=r"cannot change steps .*: the cosine schedule of the learning rate is"):
        check_override("steps", small(schedule="cosine"))


def test_a_record_says_what_computed(whole):
    with open_checkpoints(whole / "checkpoints", keep=None) as checkpoints:
        record = newest_record(checkpoints)
    made_by = record["made_by"]
    assert made_by["python"] == platform.python_version()
    for name in ("jax", "jaxlib", "flax", "optax", "grpo_jax"):
        assert made_by[name] == importlib.metadata.version(name)
    assert made_by["devices"] == "cpu"
    assert record["config"]["steps"] == 2
    assert "out" not in record["config"]


def test_other_versions_are_told(copy, fault):
    record = next((copy / "checkpoints" / "2").glob("_CHECKPOINT_METADATA"))
    version = importlib.metadata.version("jax")
    values = json.loads(record.read_text())
    values["custom_metadata"]["record"]["made_by"]["jax"] = "0.1"
    values["custom_metadata"]["seal"] = seal(values["custom_metadata"])
    record.write_text(json.dumps(values))
    screen = Silent()
    go(load_config(copy), copy, resume=True, screen=screen)
    assert f"the run goes on with jax {version} (was 0.1): numbers may differ" in screen.text
    fault("resumed by another version of jax", "told")


def test_a_run_is_repeated_from_its_configuration(whole, tmp_path):
    out = tmp_path / "again"
    assert main(["train", "--config", str(whole / "config.json"), "--out", str(out)]) == 0
    same_run(out, whole)
    other = tmp_path / "other"
    assert main(["train", "--config", str(whole / "config.json"), "--out", str(other), "--seed", "5"]) == 0
    expected = dataclasses.replace(load_config(whole), seed=5, out=str(other))
    assert load_config(other) == expected
    assert read_lines(other / "metrics.jsonl") != read_lines(whole / "metrics.jsonl")


def test_a_configuration_that_is_not_there_is_said(tmp_path, capsys):
    assert main(["train", "--config", str(tmp_path / "absent.json")]) == 2
    assert "there is no file" in capsys.readouterr().err
    write_json(tmp_path / "config.json", {"steps": 3})
    assert main(["train", "--config", str(tmp_path / "config.json")]) == 2
    assert "config.json lacks task" in capsys.readouterr().err


def test_the_best_checkpoints_are_kept(tmp_path):
    rewards = {0: 0.1, 1: 0.9, 2: 0.3, 3: None, 4: 0.5, 5: 0.2}
    with open_checkpoints(tmp_path, keep=1, keep_best=2) as checkpoints:
        for number, reward in rewards.items():
            save(checkpoints, state_of(0, iteration=number), held_out=reward)
        assert iterations(checkpoints) == [0, 1, 4, 5]


@pytest.mark.parametrize(("keep_minutes", "kept"), [(1, [0, 1, 3]), (None, [0, 3])])
def test_a_checkpoint_is_kept_for_each_span_of_time(tmp_path, keep_minutes, kept):
    """Number 0 is made two minutes older: the next one is then kept for its time."""
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, state_of(0, iteration=0))
    path = tmp_path / "0" / "_CHECKPOINT_METADATA"
    values = json.loads(path.read_text())
    for name in ("init_timestamp_nsecs", "commit_timestamp_nsecs"):
        values[name] -= 120 * 10**9
    path.write_text(json.dumps(values))
    with open_checkpoints(tmp_path, keep=1, keep_minutes=keep_minutes) as checkpoints:
        for number in (1, 2, 3):
            save(checkpoints, state_of(0, iteration=number))
        assert iterations(checkpoints) == kept


def test_a_state_that_is_changed_while_it_is_written_is_saved_as_it_was(tmp_path):
    """Its buffers are given to the next update as soon as the save returns."""
    state = state_of(0)
    expected = bits(state)
    overwrite = jax.jit(lambda train: jax.tree.map(lambda x: x * 0, train), donate_argnums=0)
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, state, wait=False)
        jax.block_until_ready(overwrite(state.train))
        checkpoints.wait()
        assert bits(restore(checkpoints, state_of(1))[0]) == expected
