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
from grpo_jax.options import OptionError
from grpo_jax.runs.checkpoint import iterations, open_checkpoints, restore, restore_params, save
from grpo_jax.training.batch import rollout_shapes
from grpo_jax.types import Prompts

from saved_states import bits, state_of, weights


@pytest.mark.parametrize("reference", [False, True])
def test_everything_comes_back_bit_for_bit(tmp_path, reference):
    """Parameters of two dtypes, AdamW behind hyper-parameters and a clip, a typed key, and a reference if it moves."""
    state = state_of(0, reference)
    record = {"note": "×", "nested": {"rates": [0.1, None]}}
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, state, record, moving_reference=reference)
        back, back_record = restore(checkpoints, state_of(5, reference))
    assert bits(back) == bits(state)
    assert back_record == record
    assert (type(back.iteration), back.iteration) == (int, 2)
    assert back.train.params["layers"]["q"].dtype == jnp.bfloat16
    assert jax.random.bits(back.key) == jax.random.bits(state.key)
    rate = lambda s: optax.tree_utils.tree_get(s.train.opt_state, "hyperparams")["learning_rate"]
    assert float(rate(back)) == pytest.approx(1e-2 * 2 / 3)


def test_the_form_alone_is_enough_to_restore(tmp_path):
    state = state_of(0, True)
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, state, moving_reference=True)
        back, _ = restore(checkpoints, jax.eval_shape(lambda: state))
    assert bits(back) == bits(state)


@pytest.mark.parametrize(
    "data",
    [
        None,
        {"position": np.int64(2**40 + 1)},
        {
            "position": np.int64(3),
            "groups": [
                {"tokens": np.arange(6, dtype=np.int32).reshape(2, 3), "reward": np.float64(1) / 3},
                {"tokens": np.zeros((1, 4), np.int32), "reward": np.float32(np.nan)},
                {},
            ],
            "seen": np.array([True, False]),
            "ages": {},
            "empty": [],
            "none yet": np.zeros((0, 3), jnp.bfloat16),
            "of row": {7: np.ones(2), 11: {"age": np.int32(3)}},
            "pair": (np.int8(3), None),
            "nested": [[np.int8(1)], [jnp.bfloat16(0.1), {"deep": np.float16(2)}]],
        },
        [np.int64(5), {"a": np.ones(2)}],
        {"buffer": [], "array": {}, "none yet": np.zeros(0)},
    ],
    ids=["nothing", "position", "replay", "list", "empty"],
)
def test_data_of_any_form_comes_back_as_it_was(tmp_path, data):
    """Law: a tree of dicts, lists and arrays, which whoever restores it knows nothing of; for a replay buffer, say."""
    state = state_of(0)._replace(data=data)
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, state)
        back, _ = restore(checkpoints, state_of(1))
    assert bits(back.data) == bits(data)
    assert same_keys(back.data, data)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(back.data))
    assert bits(back._replace(data=None)) == bits(state._replace(data=None))


def same_keys(left, right):
    """Whether dicts have keys of the same types, in the same order."""
    if isinstance(left, dict):
        return list(left) == list(right) and all(same_keys(left[name], right[name]) for name in left)
    pairs = zip(left, right, strict=True) if isinstance(left, list | tuple) else ()
    return all(same_keys(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"texts": ["a"]}, "a tree of dicts, lists, tuples and arrays of numbers to be saved; it holds 'a'"),
        ({"texts": np.array(["a", "b"])}, "arrays of numbers to be saved; it holds array"),
        ([Prompts(np.ones(1), np.ones(1))], "it holds Prompts"),
        ({(1, 2): np.ones(1)}, r"keys in RunState.data must be text or whole numbers, got \(1, 2\)"),
    ],
)
def test_data_that_cannot_be_saved_is_said(tmp_path, data, message):
    with open_checkpoints(tmp_path) as checkpoints:
        with pytest.raises(TypeError, match=message):
            save(checkpoints, state_of(0)._replace(data=data))
        assert iterations(checkpoints) == []
    assert not list(tmp_path.iterdir())


def batch(seed):
    """A sampled batch as it waits in the queue."""
    rng = np.random.default_rng(seed)
    shapes = rollout_shapes(2, 3, 4, 5)
    number_P = jax.ShapeDtypeStruct((2,), np.int32)
    shapes = shapes._replace(row_P=number_P, update_P=number_P)
    return jax.tree.map(lambda x: jnp.asarray(rng.integers(0, 2, x.shape), x.dtype), shapes)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_what_was_sampled_ahead_comes_back_in_its_order(tmp_path, ahead):
    state = state_of(0)._replace(queue=tuple(batch(i) for i in range(ahead)))
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, state)
        back, _ = restore(checkpoints, state_of(1), queued=batch(9))
        if ahead:
            with pytest.raises(ValueError, match=f"checkpoint 2 holds {ahead} queued batches: give queued"):
                restore(checkpoints, state_of(1))
    assert len(back.queue) == ahead
    assert bits(back) == bits(state)


def test_the_state_of_an_objective_comes_back(tmp_path):
    state = state_of(0)._replace(objective={"beta": np.float32(0.1), "seen": jnp.int32(4)})
    like = state._replace(objective={"beta": np.float32(0), "seen": jnp.int32(0)})
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, state)
        back, _ = restore(checkpoints, like)
    assert bits(back) == bits(state)


def test_the_newest_and_the_first_are_kept(tmp_path):
    states = {i: state_of(i, iteration=i) for i in range(5)}
    with open_checkpoints(tmp_path, keep=2) as checkpoints:
        for i in range(4):
            save(checkpoints, states[i], {"note": i})
        assert iterations(checkpoints) == [0, 2, 3]
    with open_checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, states[4], {"note": 4})
        assert iterations(checkpoints) == [0, 4]
        for i in (0, 4, None):
            back, record = restore(checkpoints, states[1], i)
            expected = 4 if i is None else i
            assert bits(back) == bits(states[expected])
            assert (record, back.iteration) == ({"note": expected}, expected)
    with pytest.raises(OptionError, match="keep must be an integer of at least 1"):
        open_checkpoints(tmp_path, keep=0)


def test_reading_removes_nothing(tmp_path):
    with open_checkpoints(tmp_path, keep=9) as checkpoints:
        for i in range(4):
            save(checkpoints, state_of(0, iteration=i))
    with open_checkpoints(tmp_path, keep=None) as checkpoints:
        save(checkpoints, state_of(0, iteration=4))
        assert iterations(checkpoints) == [0, 1, 2, 3, 4]


def test_a_missing_checkpoint_says_what_there_is(tmp_path):
    state = state_of(0, iteration=3)
    with open_checkpoints(tmp_path) as checkpoints:
        with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*there are: \[\]"):
            restore(checkpoints, state)
        save(checkpoints, state)
        with pytest.raises(FileNotFoundError, match=r"no checkpoint 7 in .*there are: \[3\]"):
            restore(checkpoints, state, 7)
        with pytest.raises(FileNotFoundError, match=r"no checkpoint 0 in .*there are: \[3\]"):
            restore_params(checkpoints, state.train.params, 0)


def test_parameters_are_read_alone(tmp_path):
    """Evaluation needs neither the optimiser's state nor its form."""
    state = state_of(0, True)
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, state, moving_reference=True)
    for item in ("training", "reference", "data"):
        shutil.rmtree(tmp_path / "2" / item)
    with open_checkpoints(tmp_path) as checkpoints:
        assert bits(restore_params(checkpoints, weights(9, jnp.bfloat16))) == bits(state.train.params)


def spread_over_devices(tree):
    """Rows of 8 on eight devices, the rest on every device."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    place = lambda x: jax.sharding.NamedSharding(mesh, jax.P("data") if x.shape[:1] == (8,) else jax.P())
    return jax.tree.map(lambda x: jax.device_put(x, place(x)), tree)


def on_eight_devices(folder):
    """In a process of its own: restores, saves what is spread over devices, and is killed in the middle of a save."""
    like = state_of(7)
    like = like._replace(train=spread_over_devices(like.train), key=spread_over_devices(like.key))
    with open_checkpoints(folder) as checkpoints:
        back, _ = restore(checkpoints, like)
        embed = back.train.params["embed"]
        print(json.dumps({"devices": len(embed.sharding.device_set), "shard": embed.addressable_shards[0].data.shape}))
        later = back.train._replace(step=back.train.step + 40)
        save(checkpoints, back._replace(iteration=2, train=later), {"note": "moved"})
        # Orbax writes into a temporary folder and renames it when all is there: the last moment before that.
        sys.stdout.flush()
        sys.addaudithook(
            lambda event, args: event == "os.rename" and "tmp" in str(args[0]) and os.kill(os.getpid(), signal.SIGKILL)
        )
        save(checkpoints, back._replace(iteration=3))


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A folder with a checkpoint from one device and one from eight, and the rest of a save that was killed."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with open_checkpoints(folder) as checkpoints:
        save(checkpoints, state_of(0, iteration=1))
    code = f"import test_checkpoint; test_checkpoint.on_eight_devices({str(folder)!r})"
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, env=environment, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return folder, json.loads(done.stdout)


def test_a_checkpoint_moves_to_other_devices_and_back(interrupted):
    folder, seen = interrupted
    assert seen == {"devices": 8, "shard": [1, 6]}
    with open_checkpoints(folder, keep=None) as checkpoints:
        back, record = restore(checkpoints, state_of(7))
    expected = state_of(0)
    assert (record, back.iteration) == ({"note": "moved"}, 2)
    assert int(back.train.step) == int(expected.train.step) + 40
    assert bits(back._replace(train=back.train[1:])) == bits(expected._replace(train=expected.train[1:]))
    chex.assert_trees_all_equal(jax.tree.map(lambda x: len(x.sharding.device_set), back.train.params["embed"]), 1)


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
        state = state_of(0, iteration=3)
        save(checkpoints, state)
        assert bits(restore(checkpoints, state_of(7))[0]) == bits(state)
    assert names() == ["2", "3"]


def test_a_reference_that_does_not_move_is_the_policy_of_checkpoint_0(tmp_path):
    """It is not written again, and comes back from there, whichever checkpoint is restored."""
    begun = state_of(0, iteration=0)
    begun = begun._replace(reference=begun.train.params)
    later = state_of(1, iteration=4)._replace(reference=begun.reference)
    with open_checkpoints(tmp_path) as checkpoints:
        for state in (begun, later):
            save(checkpoints, state)
            assert not (tmp_path / str(state.iteration) / "reference").exists()
        for state in (begun, later):
            assert bits(restore(checkpoints, state_of(5, True), state.iteration)[0]) == bits(state)


def test_a_reference_that_does_not_move_is_found_beside_a_critic(tmp_path):
    def begun(seed):
        state = state_of(seed, iteration=0)
        train = state.train._replace(params={"policy": state.train.params, "critic": weights(seed + 3)})
        return state._replace(train=train, reference=state.train.params)

    state, other = begun(0), begun(1)
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, state)
        save(checkpoints, other._replace(iteration=1))
        back, _ = restore(checkpoints, begun(2))
    assert bits(back.reference) == bits(state.reference)
    assert bits(back.train) == bits(other.train)


@pytest.mark.parametrize("moving", [False, True])
def test_a_reference_is_read_only_where_it_is_asked_for(tmp_path, moving):
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, state_of(0, True, iteration=0), moving_reference=moving)
        assert restore(checkpoints, state_of(1, False))[0].reference is None
