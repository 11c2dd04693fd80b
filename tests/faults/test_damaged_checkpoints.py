"""Checkpoints that are damaged on the disk: found, named, skipped, and never restored as if they were whole."""

import random
import shutil
from functools import cache

import jax.numpy as jnp
import pytest
from grpo_jax.runs.checkpoint import DamagedError, iterations, open_checkpoints, restore, restore_params, save
from grpo_jax.runs.folder import read_lines
from grpo_jax.training.finite import NonFiniteError

from saved_states import bits, state_of, weights
from small_runs import Silent, go, same_run, small
from toy import install

install()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints 1 and 2, of different states."""
    folder = tmp_path_factory.mktemp("saved")
    with open_checkpoints(folder, keep=5) as checkpoints:
        for i in (1, 2):
            save(checkpoints, state_of(i, iteration=i), {"note": i})
    return folder


def halved(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path):
    path.write_bytes(b"")


def overwritten(path):
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))


def removed(path):
    path.unlink()


def flipped(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


@cache
def known(number):
    return state_of(number, iteration=number)


def restored(folder):
    """The iteration that is restored, whether its bits are right, and what was told."""
    told = []
    with open_checkpoints(folder, keep=None) as checkpoints:
        state, record = restore(checkpoints, known(9), tell=told.append)
    right = bits(state) == bits(known(state.iteration))
    return state.iteration, right and record == {"note": state.iteration}, told


@pytest.mark.parametrize("damage", [halved, emptied, overwritten, removed])
def test_a_damaged_file_costs_one_checkpoint_at_most(saved, tmp_path, capfd, damage, fault):
    """Law: whichever file it is, a state is restored whole; if it is the one before, a sentence says why."""
    files = [path.relative_to(saved) for path in sorted((saved / "2").rglob("*")) if path.is_file()]
    skipped = 0
    for number, file in enumerate(files):
        folder = shutil.copytree(saved, tmp_path / str(number))
        damage(folder / file)
        iteration, right, told = restored(folder)
        assert right, file
        assert len(told) == 2 - iteration, file
        if told:
            assert told[0].startswith("checkpoint 2 is damaged: "), told
            assert told[0].endswith("; it is skipped, and the one before it is restored")
            skipped += 1
    assert skipped >= 10, "or nothing was damaged"
    assert "Traceback" not in "".join(capfd.readouterr())
    fault(f"a file of a checkpoint {damage.__name__}", "skipped with the reason; the one before it is restored")


@pytest.mark.parametrize("item", ["params", "training", "data"])
def test_a_missing_item_is_named(saved, tmp_path, item, fault):
    folder = shutil.copytree(saved, tmp_path / "copy")
    shutil.rmtree(folder / "2" / item)
    assert restored(folder) == (
        1, True, [f"checkpoint 2 is damaged: {item} is missing; it is skipped, and the one before it is restored"],
    )  # fmt: skip
    fault(f"a checkpoint without its {item}", "skipped with the reason; the one before it is restored")


def test_a_flipped_bit_is_never_restored(saved, tmp_path, fault):
    """In any file of a checkpoint, wherever: what is restored has the bits that were saved."""
    rng = random.Random(3)
    files = [path.relative_to(saved) for path in sorted((saved / "2").rglob("*")) if path.is_file()]
    iterations_seen = []
    for number, file in enumerate([file for file in files for _ in range(2)]):
        folder = shutil.copytree(saved, tmp_path / str(number))
        flipped(folder / file, rng)
        iteration, right, _ = restored(folder)
        assert right, file
        iterations_seen.append(iteration)
    assert iterations_seen.count(1) >= 10, "or no bit mattered"
    fault("a bit flipped in any file of a checkpoint", "found; nothing but what was saved is restored")


def test_a_changed_number_is_named(tmp_path, fault):
    """A number that differs in its last bit, in a checkpoint that can be read without an error."""
    state = state_of(0)
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, state)
        told = checkpoints.metadata(2).custom_metadata
        train = state.train._replace(
            params=state.train.params | {"embed": jnp.nextafter(state.train.params["embed"], 9)}
        )
        save(checkpoints, state._replace(iteration=3, train=train))
    record = tmp_path / "3" / "_CHECKPOINT_METADATA"
    text = record.read_text()
    with open_checkpoints(tmp_path, keep=None) as checkpoints:
        new = checkpoints.metadata(3).custom_metadata
    (*_, digest), (*_, other) = (kept["state"]["digests"]["params"]["embed"] for kept in (told, new))
    record.write_text(text.replace(other, digest).replace(new["seal"], told["seal"]))
    with (
        open_checkpoints(tmp_path, keep=None) as checkpoints,
        pytest.raises(DamagedError, match="checkpoint 3 is damaged: params/embed does not have the checksum"),
    ):
        restore_params(checkpoints, weights(9, jnp.bfloat16), 3)
    fault("a number changed in its last bit", "refused; the array is named")


def test_where_nothing_is_whole_all_reasons_are_told(saved, tmp_path, fault):
    folder = shutil.copytree(saved, tmp_path / "copy")
    for number, item in (("1", "params"), ("2", "training")):
        shutil.rmtree(folder / number / item)
    message = "checkpoint 2 is damaged: training is missing; checkpoint 1 is damaged: params is missing"
    with open_checkpoints(folder, keep=None) as checkpoints, pytest.raises(DamagedError, match=message):
        restore(checkpoints, known(9), tell=lambda _: None)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    fault("all checkpoints damaged", "one error with all reasons; nothing is changed")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_parameters_that_are_not_finite_are_not_saved(tmp_path, value, fault):
    healthy = state_of(0)
    broken = healthy.train.params | {"embed": healthy.train.params["embed"].at[3, 2].set(value)}
    with open_checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, healthy)
        with pytest.raises(
            NonFiniteError, match=r"behind iteration 3 are not finite and are not saved; .* stay: \[2\]"
        ):
            save(checkpoints, healthy._replace(iteration=3, train=healthy.train._replace(params=broken)))
        assert iterations(checkpoints) == [2]
        assert bits(restore(checkpoints, state_of(5))[0]) == bits(healthy)
    fault(f"a parameter is {value}", "not saved; the healthy checkpoint stays")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults") / "whole"
    go(small(objective_args=("beta=0.1",)), folder)
    return folder


def test_a_run_goes_on_behind_the_last_whole_checkpoint(whole, tmp_path, fault):
    """To the same end, bit for bit; what is damaged is kept under another name."""
    folder = shutil.copytree(whole, tmp_path / "run")
    halved(max((folder / "checkpoints" / "3" / "params").rglob("*"), key=lambda path: path.stat().st_size))
    screen = Silent()
    go(small(objective_args=("beta=0.1",)), folder, resume=True, screen=screen)
    assert "checkpoint 3 is damaged: params cannot be read: " in screen.text
    shutil.rmtree(folder / "checkpoints" / "3.damaged")
    same_run(folder, whole)
    fault("the newest checkpoint of a run damaged", "the run goes on from the one before, to the same bits")


@pytest.mark.parametrize("left", ["nothing", "an empty folder"])
def test_checkpoints_that_are_gone_are_missed(whole, tmp_path, left, fault):
    folder = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    if left != "nothing":
        (folder / "checkpoints").mkdir()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(FileNotFoundError, match="has no checkpoint, and its metrics tell of 3 iterations"):
        go(small(objective_args=("beta=0.1",)), folder, resume=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    fault(f"of checkpoints/ there is {left}", "refused; no line is lost")


def test_lines_are_cut_when_the_state_is_restored_and_not_before(whole, tmp_path, fault):
    folder = shutil.copytree(whole, tmp_path / "run")
    for number in ("0", "2", "3"):
        emptied(folder / "checkpoints" / number / "_CHECKPOINT_METADATA")
    with pytest.raises(DamagedError, match="nothing can be restored"):
        go(small(objective_args=("beta=0.1",)), folder, resume=True)
    assert read_lines(folder / "metrics.jsonl") == read_lines(whole / "metrics.jsonl")
    fault("a resume that fails", "no line is cut")
