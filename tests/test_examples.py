"""The small programs that people start from run, and do what they say."""

import importlib
import json
import math
import re
from pathlib import Path

import chex
import grpo_jax
import jax
import numpy as np
import pytest
from grpo_jax.cli.arguments import TRL_NAMES
from grpo_jax.cli.train import Train
from grpo_jax.named_options import option_paths

FOLDER = Path(__file__).parent.parent / "experiments" / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def example(name):
    return importlib.import_module(f"experiments.examples.{name}")


def moved(old, new):
    return any(np.any(np.asarray(a) != np.asarray(b)) for a, b in zip(*map(jax.tree.leaves, (old, new)), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_a_screen(name):
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 60


def test_own_task_leaves_a_run_and_a_model_that_loads(tmp_path):
    rows = [{"question": f"{a}+{a}=", "answer": str(2 * a)} for a in range(40)]
    data = tmp_path / "given.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics, folder = example("own_task").main(steps=2, data=data, out=tmp_path / "out")
    assert metrics["rewards/digits/weight"] == 0.1
    assert math.isfinite(metrics["reward"])
    logged = (tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in logged] == [1, 2]
    model, params = grpo_jax.load_pretrained(folder)
    assert model.config.vocab_size == 259
    chex.assert_tree_all_finite(params)


def test_own_task_writes_rows_that_its_rewards_understand(tmp_path):
    module = example("own_task")
    row = json.loads(module.write_rows(tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert module.near(row["answer"], row["answer"]) == 1
    assert module.near("?", row["answer"]) == 0
    assert module.digits("1?") == 0.5


def test_own_losses_train():
    last = example("own_loss").main(steps=2)
    assert set(last) == {"gated", "written", "adaptive"}
    for state, metrics in last.values():
        assert math.isfinite(metrics["loss"])
        assert metrics["grad_norm"] > 0
        assert int(state.train.step) == 2
    assert float(last["adaptive"][0].objective) != pytest.approx(0.04)


def test_own_loop_is_train_bit_for_bit():
    (model, task, tokenizer, objective, optimizer, generation), params, state = example("own_loop").main(steps=3)
    run = grpo_jax.train(model, params, task, tokenizer, objective, optimizer, steps=3, generation=generation)
    *_, (expected, _) = run
    chex.assert_trees_all_equal(state.train, expected.train)
    chex.assert_trees_all_equal(state.data, expected.data)
    assert moved(params, state.train.params)


def test_own_sampler_prefers_what_stopped():
    state, metrics = example("own_sampler").main(steps=1)
    assert int(state.train.step) == 1
    assert metrics["sampler_logp_diff"] < 1e-4
    assert metrics["truncated"] < 0.9  # one completion in sixteen stops by itself


def test_own_optimizers_move_what_they_should():
    module = example("own_optimizer")
    params, found = module.main(steps=2)
    for new, average, metrics in found.values():
        assert math.isfinite(metrics["reward"])
        assert moved(params, new)
        assert moved(average, new)
        assert moved(average, params)
    frozen = found["frozen"][0]
    np.testing.assert_array_equal(frozen["embed"], params["embed"])
    assert moved(frozen["layers"]["q"], params["layers"]["q"])
    layers = found["frozen_layer"][0]["layers"]
    np.testing.assert_array_equal(layers["q"][0], params["layers"]["q"][0])
    assert moved(layers["q"][1], params["layers"]["q"][1])
    params, found = module.main(steps=1, names=("multi_steps",))
    assert not moved(params, found["multi_steps"][0])  # after two iterations


def test_own_models_train():
    module = example("own_model")
    for name, (state, metrics) in module.main(steps=2).items():
        assert math.isfinite(metrics["loss"]), name
        assert moved(module.models()[name][1], state.train.params), name


def test_from_trl_runs_and_names_options_of_trl(tmp_path):
    metrics = example("from_trl").main(steps=2, out=tmp_path / "run")
    assert math.isfinite(metrics["kl"])
    assert metrics["rewards/right/weight"] == 0.5
    comments = " ".join(re.findall(r"#(.*)", (FOLDER / "from_trl.py").read_text()))
    trainer = {"model", "train_dataset", "reward_funcs", "args"}
    for name in set(re.findall(r"(\w+)=", comments)) - trainer:
        assert name in TRL_NAMES or name in option_paths(Train), name
