"""Checkpoints: bit for bit, whole or not at all, on other devices, and never in the way of a run that is writing."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grpo_jax.runs.checkpoint import RunState, iterations, open_checkpoints, restore, restore_params, save
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.train_step import init_state
from grpo_jax.types import TrainState


def weights(seed, dtype=jnp.float32):
    a, b = jax.random.split(jax.random.key(seed))
    return {"embed": jax.random.normal(a, (8, 6)), "layers": {"q": jax.random.normal(b, (2, 8)).astype(dtype)}}


def saved_of(seed, reference=False):
    """A state after two updates, so that its moments, counts and learning rate are no defaults."""
    params = weights(seed, jnp.bfloat16)
    optimizer = adamw(1e-2, steps=10, warmup_steps=3, schedule="cosine")
    state = init_state(params, optimizer)
    for i in range(2):
        grads = jax.tree.map(lambda p, i=i: p * (i + 1), params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        state = TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state)
    return RunState(state, jax.random.key(seed + 100), weights(seed + 1, jnp.bfloat16) if reference else None)


def bits(tree):
    """Leaves as bytes: equal only if bit for bit equal, with dtypes, shapes and the structure."""
    leaves, structure = jax.tree.flatten(tree)
    raw = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]
    return structure, [(x.dtype, y.shape, np.asarray(y).tobytes()) for x, y in zip(leaves, raw, strict=True)]


@pytest.mark.parametrize("reference", [False, True])
def test_everything_comes_back_bit_for_bit(tmp_path, reference):
    """Parameters of two dtypes, AdamW behind hyper-parameters and a clip, a typed key, and a reference if it moves."""
    saved = saved_of(0, reference)
    record = {"iteration": 2, "note": "×", "nested": {"rates": [0.1, None]}}
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 2, saved, record)
        back, back_record = restore(checkpoints, saved_of(5, reference))
    assert bits(back) == bits(saved)
    assert back_record == record
    assert back.state.params["layers"]["q"].dtype == jnp.bfloat16
    assert jax.random.bits(back.key) == jax.random.bits(saved.key)
    rate = lambda s: optax.tree_utils.tree_get(s.state.opt_state, "hyperparams")["learning_rate"]
    assert float(rate(back)) == pytest.approx(1e-2 * 2 / 3)


def test_the_form_alone_is_enough_to_restore(tmp_path):
    saved = saved_of(0, True)
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 0, saved, {})
        back, _ = restore(checkpoints, jax.eval_shape(lambda: saved))
    assert bits(back) == bits(saved)


def test_the_newest_and_the_first_are_kept(tmp_path):
    saved = {i: saved_of(i) for i in range(5)}
    with open_checkpoints(tmp_path, keep=2) as checkpoints:
        for i in range(4):
            save(checkpoints, i, saved[i], {"iteration": i})
        assert iterations(checkpoints) == [0, 2, 3]
    with open_checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, 4, saved[4], {"iteration": 4})
        assert iterations(checkpoints) == [0, 4]
        for i in (0, 4, None):
            back, record = restore(checkpoints, saved[1], i)
            assert bits(back) == bits(saved[4 if i is None else i])
            assert record == {"iteration": 4 if i is None else i}
    with pytest.raises(ValueError, match="keep must be at least 1"):
        open_checkpoints(tmp_path, keep=0)


def test_reading_removes_nothing(tmp_path):
    with open_checkpoints(tmp_path, keep=9) as checkpoints:
        for i in range(4):
            save(checkpoints, i, saved_of(0), {})
    with open_checkpoints(tmp_path, keep=None) as checkpoints:
        save(checkpoints, 4, saved_of(0), {})
        assert iterations(checkpoints) == [0, 1, 2, 3, 4]


def test_a_missing_checkpoint_says_what_there_is(tmp_path):
    saved = saved_of(0)
    with open_checkpoints(tmp_path) as checkpoints:
        with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*there are: \[\]"):
            restore(checkpoints, saved)
        save(checkpoints, 3, saved, {})
        with pytest.raises(FileNotFoundError, match=r"no checkpoint 7 in .*there are: \[3\]"):
            restore(checkpoints, saved, 7)
        with pytest.raises(FileNotFoundError, match=r"no checkpoint 0 in .*there are: \[3\]"):
            restore_params(checkpoints, saved.state.params, 0)


def test_parameters_are_read_alone(tmp_path):
    """Evaluation needs neither the optimiser's state nor its form."""
    saved = saved_of(0, True)
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 1, saved, {})
    for item in ("training", "reference"):
        shutil.rmtree(tmp_path / "1" / item)
    with open_checkpoints(tmp_path) as checkpoints:
        assert bits(restore_params(checkpoints, weights(9, jnp.bfloat16))) == bits(saved.state.params)


def spread_over_devices(tree):
    """Rows of 8 on eight devices, the rest on every device."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    place = lambda x: jax.sharding.NamedSharding(mesh, jax.P("data") if x.shape[:1] == (8,) else jax.P())
    return jax.tree.map(lambda x: jax.device_put(x, place(x)), tree)


def on_eight_devices(folder):
    """In a process of its own: restores, saves what is spread over devices, and is killed in the middle of a save."""
    like = spread_over_devices(saved_of(7))
    with open_checkpoints(folder) as checkpoints:
        back, _ = restore(checkpoints, like)
        embed = back.state.params["embed"]
        print(json.dumps({"devices": len(embed.sharding.device_set), "shard": embed.addressable_shards[0].data.shape}))
        save(checkpoints, 2, back._replace(state=back.state._replace(step=back.state.step + 40)), {"iteration": 2})
        # Orbax writes into a temporary folder and renames it when all is there: the last moment before that.
        sys.stdout.flush()
        sys.addaudithook(
            lambda event, args: event == "os.rename" and "tmp" in str(args[0]) and os.kill(os.getpid(), signal.SIGKILL)
        )
        save(checkpoints, 3, back, {"iteration": 3})


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A folder with a checkpoint from one device and one from eight, and the rest of a save that was killed."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with open_checkpoints(folder) as checkpoints:
        save(checkpoints, 1, saved_of(0), {"iteration": 1})
    code = f"import test_checkpoint; test_checkpoint.on_eight_devices({str(folder)!r})"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return folder, json.loads(done.stdout)


def test_a_checkpoint_moves_to_other_devices_and_back(interrupted):
    folder, seen = interrupted
    assert seen == {"devices": 8, "shard": [1, 6]}
    with open_checkpoints(folder, keep=None) as checkpoints:
        back, record = restore(checkpoints, saved_of(7))
    expected = saved_of(0)
    assert record == {"iteration": 2}
    assert int(back.state.step) == int(expected.state.step) + 40
    assert bits(back.state[1:]) == bits(expected.state[1:])
    chex.assert_trees_all_equal(jax.tree.map(lambda x: len(x.sharding.device_set), back.state.params["embed"]), 1)


def test_an_interrupted_save_is_ignored_and_then_removed(interrupted, tmp_path):
    folder = shutil.copytree(interrupted[0], tmp_path / "copy")
    names = lambda: sorted(path.name for path in folder.iterdir())
    left = [name for name in names() if name not in ("1", "2")]
    assert len(left) == 1, "the killed save must have left something, or this test shows nothing"
    with open_checkpoints(folder, keep=None) as checkpoints:
        assert iterations(checkpoints) == [1, 2]
    assert left[0] in names(), "a reader must not remove what another process may be writing"
    with open_checkpoints(folder) as checkpoints:
        assert iterations(checkpoints) == [1, 2]
        save(checkpoints, 3, saved_of(0), {"iteration": 3})
        assert bits(restore(checkpoints, saved_of(7))[0]) == bits(saved_of(0))
    assert names() == ["2", "3"]


def test_a_reference_is_read_only_where_it_is_asked_for(tmp_path):
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 0, saved_of(0, True), {})
        assert restore(checkpoints, saved_of(1, False))[0].reference is None
