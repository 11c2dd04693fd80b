"""One device, `pmap` and meshes give equal numbers: the table that device_table.py makes on eight simulated devices."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from grpo_jax.objectives import PRESETS

from device_table import AHEAD, DROPPED, LAYOUTS, MICROBATCHES, MIXED, NORMALISERS, ROWS, RUNS, SAMPLED, WRONG

CLOSE = 1e-6
pytestmark = pytest.mark.slow  # minutes: `pytest -m slow` runs it

HERE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def table():
    """The rows, by kind."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(HERE)}
    halves = ["update", "refused", "ahead"], ["moved", "gathering", "runs", "sampler", "wrong", "presets", "dropped"]
    programs = [
        subprocess.Popen(
            [sys.executable, HERE / "device_table.py", *kinds], env=environment, cwd=HERE.parent,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for kinds in halves
    ]  # fmt: skip
    with ThreadPoolExecutor() as threads:  # both pipes must be read, or a full one stops its program
        outputs = list(threads.map(lambda program: program.communicate(), programs))
    for program, (_, errors) in zip(programs, outputs, strict=True):
        assert program.returncode == 0, errors[-3000:]
    rows = [json.loads(line) for output, _ in outputs for line in output.splitlines()]
    return {kind: [row for row in rows if row["kind"] == kind] for kind in {row["kind"] for row in rows}}


def check(row):
    """Distances of vectors are relative to their norm."""
    for part in ("grads", "params", "momentum"):
        assert row[part] <= CLOSE, (part, row)
    check_metrics(row)


def check_metrics(row):
    """Relative to their size, or to 1."""
    for name, distance in row["metrics"].items():
        assert distance <= CLOSE * max(1.0, row["sizes"][name]), (name, row)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_equal_those_of_one_device(table, layout):
    """Law: loss, gradients, two updates and metrics, with uneven lengths, under any cut into micro-batches."""
    rows = [row for row in table["update"] if row["layout"] == layout]
    assert rows
    for row in rows:
        check(row)


def test_the_table_leaves_nothing_out():
    """Every layout, and on each kind of them and over all every cut and every normaliser."""
    kind = lambda layout: "mixed" if layout.count(" ") > 1 else layout.split()[0]
    kinds = {"pmap", "data", "fsdp", "tensor", "mixed"}
    assert {layout for _, layout, _, _ in ROWS} == set(LAYOUTS)
    assert {(kind(layout), cuts) for _, layout, cuts, _ in ROWS} == {(k, cuts) for k in kinds for cuts in MICROBATCHES}
    assert {name for *_, name in ROWS} == set(NORMALISERS)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_on_a_mixed_mesh(table, name):
    """Advantages, preparation, normaliser, diagnostics, and the gradient that goes into the model."""
    (row,) = (row for row in table["presets"] if row["preset"] == name)
    assert row["layout"] == MIXED
    assert row["size"] > 1e-3
    assert row["gradient"] <= CLOSE
    check_metrics(row)


@pytest.mark.parametrize("name", WRONG)
def test_a_mean_of_means_fails_the_comparison(table, name):
    (row,) = (row for row in table["wrong"] if row["preset"] == name)
    assert min(row["grads"], row["momentum"]) > 1000 * CLOSE
    with pytest.raises(AssertionError):
        check(row)


@pytest.mark.parametrize("layout", DROPPED)
def test_groups_without_spread_are_left_out_over_devices(table, layout):
    """As many prompts stay as have a gradient, rounded up to whole devices; the update is that of all of them."""
    (row,) = (row for row in table["dropped"] if row["layout"] == layout)
    assert (row["prompts"], row["of"]) == (DROPPED[layout], 32)
    assert max(row["grads"], row["params"], row["metrics"]) <= CLOSE


@pytest.mark.parametrize(("model", "layout", "decode"), SAMPLED)
def test_sampled_tokens_are_identical(table, model, layout, decode):
    """Law: a token's noise depends on its prompt's and its sample's index; and `infer_logp` gives equal numbers."""
    (row,) = (
        row for row in table["sampler"] if (row["model"], row["layout"], row["decode"]) == (model, layout, decode)
    )
    assert (row["different"], row["masks"]) == (0, 0)
    assert row["distinct"] > 10
    assert len(row["lengths"]) > 3
    for part in ("logp", "score", "entropy"):
        assert row[part] <= CLOSE, (part, row)


@pytest.mark.parametrize(("layout", "name"), RUNS)
def test_whole_runs_of_unknown_models_are_equal(table, layout, name):
    """Supervised updates, training with reference and critic, evaluation: the same texts, metrics and parameters."""
    (row,) = (row for row in table["runs"] if (row["layout"], row["model"]) == (layout, name))
    assert row["same texts"]
    assert row["same evaluation"]
    assert row["names"]
    assert row["distinct"] > 10
    assert row["params"] <= CLOSE
    assert max(row["metrics"].values()) <= 1e-5, row["metrics"]
    assert (row["spread"] > 0) == (not layout.startswith("pmap")), "a mesh with fsdp must spread some parameter"


def test_what_does_not_fit_is_refused(table):
    (row,) = table["refused"]
    assert row["prompts"].startswith("prompts_per_step must be a multiple of 4, the parts that prompts are spread over")
    assert row["prompts"].endswith("4 devices × 1 micro-batches (microbatches); got 6")
    assert row["cuts"].startswith("prompts_per_step must be a multiple of 8")
    assert row["cuts"].endswith("4 devices × 2 micro-batches (microbatches); got 4")
    assert row["sft"] == "batch_size must be a multiple of 4, the parts that rows are spread over; got 6"
    assert "decode must be one of ('gather', 'split'), got 'splt'" in row["decode"]
    assert "needs 9 devices, there are 8" in row["devices"]


def test_the_cost_of_decoding_is_told(table):
    """Bytes that a device receives are the difference of what it holds; configurations build what they name."""
    (row,) = table["moved"]
    assert row["told"] == row["counted"] > 0
    assert row["built"] == row["split"]
    assert 0 < row["split"][2] < row["gather"]
    assert (row["pmap"], row["single"], row["data"]) == ("pmap over 4", True, 0)


def test_each_layer_is_gathered_twice_and_its_gradient_summed_once(table):
    """Over fsdp, weights move, forward and backward again, and no activations; left to XLA much more does."""
    (row,) = table["gathering"]
    whole, stated, layers = row["whole"], row["as stated"], 5 * row["layer"]
    assert whole["all-gather"] == 2 * layers
    assert layers <= whole["all-reduce"] + whole["reduce-scatter"] < 1.01 * layers
    assert whole["all-to-all"] == whole["collective-permute"] == 0
    assert sum(stated.values()) > 5 * sum(whole.values())


@pytest.mark.parametrize("layout", AHEAD)
def test_no_iteration_compiles_what_was_compiled_ahead(table, layout):
    """Law: also by pmap and over a mesh; and the numbers stay."""
    (row,) = (row for row in table["ahead"] if row["layout"] == layout)
    assert row["ahead"] == []
    assert row["late"] == ["assemble", *(["fun", "part_and_rest"] if "pmap" in layout else ["part_and_rest", "step"])]
    assert row["ahead loss"] == row["late loss"]
