"""A run on disk: what its folder holds, that every option reaches its place, and that a kill changes nothing."""

import dataclasses
import io
import json
import random
import shutil
import signal
import time

import chex
import jax
import numpy as np
import pytest
from grpo_jax.config import TrainConfig, load_config
from grpo_jax.models import decoder
from grpo_jax.objectives import grpo
from grpo_jax.parallel import memory as room_of
from grpo_jax.runs import checkpoint, plots, run
from grpo_jax.runs.folder import read_lines
from grpo_jax.runs.terminal import Screen
from grpo_jax.tasks import TASKS
from grpo_jax.training import loop
from grpo_jax.types import TrainState
from rich.console import Console

from toy import OPTIONS, finished_run, install, launch, letters

FILES = {
    "config.json", "metrics.jsonl", "timings.jsonl", "completions.jsonl", "summary.json", "curves.png", "checkpoints",
    "tensorboard",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def toys():
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return finished_run(tmp_path_factory)


def state_of(folder, iteration=None):
    """Everything in a checkpoint of a run."""
    config = load_config(folder)
    parts = run.build(config)
    like = loop.begin(parts.params, parts.optimizer, 0, parts.critic)
    if parts.update_reference is not None and iteration != 0:
        like = like._replace(reference=parts.params)
    with checkpoint.open_checkpoints(folder / "checkpoints", keep=None) as checkpoints:
        return checkpoint.restore(checkpoints, like, iteration)


def same_run(left, right):
    """Byte for byte and bit for bit, but for the clock and the folder's own name."""
    for name in ("metrics.jsonl", "completions.jsonl"):
        assert (left / name).read_bytes() == (right / name).read_bytes(), name
    a, b = (json.loads((folder / "summary.json").read_text()) for folder in (left, right))
    assert a | {"seconds": 0} == b | {"seconds": 0}
    assert dataclasses.replace(load_config(left), out=None) == dataclasses.replace(load_config(right), out=None)
    names = [sorted(path.name for path in (folder / "checkpoints").iterdir()) for folder in (left, right)]
    assert names[0] == names[1]
    (saved, record), (other, other_record) = state_of(left), state_of(right)
    assert record | {"seconds": 0} == other_record | {"seconds": 0}
    assert min(record["seconds"], other_record["seconds"]) > 0
    chex.assert_trees_all_equal(saved, other)
    # An interrupted run measured some steps twice; its timings tell of each step once.
    assert [row["step"] for row in read_lines(left / "timings.jsonl")] == [
        row["step"] for row in read_lines(right / "timings.jsonl")
    ]


@pytest.mark.parametrize(
    ("remat", "room", "expected"), [("auto", 10**9, "dots"), ("auto", 0, "layer"), ("none", 0, "none")]
)
def test_what_a_layer_keeps_is_chosen_by_memory(monkeypatch, remat, room, expected):
    made = []
    monkeypatch.setattr(room_of, "memory_for_training", lambda params, parts=1: room)
    monkeypatch.setattr(run, "decoder", lambda config, **options: made.append(options) or decoder(config, **options))
    run.build(TrainConfig(task="letters", remat=remat).resolved())
    assert made[-1] == {"remat": expected, "scan": False}


def test_room_for_training_is_half_of_what_the_state_leaves():
    """Weights, two moments and a reference in their own type, a gradient in float32, over the parts of a mesh."""
    params = {"a": np.zeros(10**6, np.float32), "b": np.zeros(10**6, np.float16)}
    whole = room_of.memory_for_training({})
    assert 2 * (whole - room_of.memory_for_training(params)) == (16 + 4 + 8 + 4) * 10**6
    assert 2 * (whole - room_of.memory_for_training(params, 4)) == (16 + 4 + 8 + 4) * 10**6 // 4


def kill_when(process, condition, delay):
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, f"ended before it was killed: {process.communicate()[0]}"
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.005)
    time.sleep(delay)
    process.kill()
    process.communicate()
    return process.returncode


def test_killed_and_resumed_equals_uninterrupted(whole):
    """Law: whatever moment a run is killed at, `--resume` brings it to the same end.

    Killed during the supervised warm-up, in the middle of writing a checkpoint, and somewhere in the iterations
    between two checkpoints; the moments are drawn from a seed. The uninterrupted run compiled its programs, these take
    them from the cache that it left: results do not depend on it.
    """
    rng, folder = random.Random(2), whole.parent
    killed = folder / "killed"
    programs = {path.name for path in (folder / "cache").iterdir()}
    assert len(programs) > 10
    lines = lambda: len(read_lines(killed / "metrics.jsonl"))

    process = launch(folder, "train", *OPTIONS, "--out", "killed")
    assert kill_when(process, (killed / "config.json").exists, rng.uniform(0, 1)) == -signal.SIGKILL
    assert not (killed / "checkpoints" / "2").exists()

    process = launch(folder, "train", "--resume", "killed", DIE_AT=rng.choice("24"))
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output
    unfinished = lines()
    assert 2 < unfinished < 6

    process = launch(folder, "train", "--resume", "killed")
    code = kill_when(process, lambda: lines() > unfinished, rng.uniform(0, 0.1))
    assert code == -signal.SIGKILL
    assert not (killed / "summary.json").exists(), "killed too late to show anything"

    process = launch(folder, "train", "--resume", "killed")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "Held-out accuracy" in output
    same_run(killed, whole)
    clock = [row["seconds/update"] for row in read_lines(killed / "timings.jsonl")]
    assert json.loads((killed / "summary.json").read_text())["seconds"] > sum(clock), "of all starts together"
    more = sorted({path.name for path in (folder / "cache").iterdir()} - programs)
    assert not more, "all programs were taken from the cache"


@pytest.mark.parametrize("named", [False, True])
def test_the_second_start_compiles_nothing(tmp_path, named):
    """Every program is kept in the user's cache folder, or a named one, and found there when the same run starts."""
    kept = tmp_path / "named" if named else tmp_path / "user" / "grpo_jax" / "programs"
    options, counts = [*OPTIONS, "--steps", "1"], []
    where = {"XDG_CACHE_HOME": str(tmp_path / "user"), "JAX_COMPILATION_CACHE_DIR": str(kept) if named else ""}
    for out in ("first", "second"):
        process = launch(tmp_path, "train", *options, "--out", out, **where)
        output, _ = process.communicate()
        assert process.returncode == 0, output
        counts.append(len([path for path in kept.iterdir() if not path.name.endswith("-atime")]))
    assert counts[0] == counts[1] > 3
    assert (tmp_path / "user" / "grpo_jax").exists() != named


def test_a_run_folder_is_complete(whole):
    assert {path.name for path in whole.iterdir()} == FILES
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((whole / "tensorboard").glob("events*"))
    assert [path.name for path in sorted((whole / "checkpoints").iterdir())] == ["0", "7"], "--keep 1, and the first"


def test_metrics_of_a_run(whole):
    """One line a step, evaluations at the start, every third step and the end; what depends on the clock apart."""
    rows = read_lines(whole / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(8))
    assert [row["step"] for row in rows if "held_out" in row] == [0, 3, 6, 7]
    assert rows[0].keys() == {"step", "held_out", "held_out_length"}
    assert not any(name.startswith("seconds") for row in rows for name in row)
    rates = [row["learning_rate"] for row in rows[1:]]
    np.testing.assert_allclose(rates, [0.025, 0.05, 0.05, 0.04, 0.03, 0.02, 0.01], rtol=1e-5)
    assert all(row["grad_norm"] > 0 and row["kl"] >= 0 for row in rows[1:]), "a run without a signal shows nothing"
    assert rows[7]["kl"] > 1e-4
    timings = read_lines(whole / "timings.jsonl")
    assert [row["step"] for row in timings] == list(range(1, 8))
    assert all(row["tokens_per_second"] > 0 and row["seconds/update"] > 0 for row in timings)


def test_completions_of_a_run(whole):
    rows = read_lines(whole / "completions.jsonl")
    assert [row["step"] for row in rows] == [step for step in range(1, 8) for _ in range(3)], "--log-completions 3"
    assert all({"prompt", "completion", "reward", "answer"} <= row.keys() for row in rows)
    assert len({row["prompt"] for row in rows[:3]}) == 3, "of different prompts"


def test_summary_of_a_run(whole):
    summary = json.loads((whole / "summary.json").read_text())
    rows = read_lines(whole / "metrics.jsonl")
    assert summary["held_out_before"] == rows[0]["held_out"]
    assert summary["held_out_after"] == rows[-1]["held_out"]
    assert summary["sampled_tokens"] == sum(row["tokens"] for row in rows[1:])
    assert summary["seconds"] > 0
    named = {"steps": 7, "task": "letters", "model": "tiny", "objective": "grpo", "seed": 4}
    assert named.items() <= summary.items()


def test_config_holds_every_value_of_a_run(whole):
    config = load_config(whole)
    assert config == config.resolved()
    assert (config.steps, config.out, config.microbatches) == (7, "whole", 1)
    values = json.loads((whole / "config.json").read_text())
    assert values.keys() == {field.name for field in dataclasses.fields(TrainConfig)}


def test_a_run_is_opened_with_the_parameters_of_a_checkpoint(whole):
    """Its evaluation gives the numbers of the run, before and after."""
    summary = json.loads((whole / "summary.json").read_text())
    for iteration, name in ((0, "held_out_before"), (None, "held_out_after"), (7, "held_out_after")):
        opened = run.open_run(whole, iteration)
        assert opened.iteration == (7 if iteration is None else iteration)
        rows, result = run.held_out(opened.config, opened.parts, opened.params)
        assert len(rows) == 5
        assert result.accuracy == pytest.approx(summary[name])
    with pytest.raises(FileNotFoundError, match=r"no checkpoint 3 in .*there are: \[0, 7\]"):
        run.open_run(whole, 3)


def test_a_run_without_checkpoints_is_said(whole, tmp_path):
    shutil.copy(whole / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match="has no checkpoints yet"):
        run.open_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="is no run folder"):
        run.open_run(tmp_path / "absent")


def test_a_run_is_never_overwritten(whole):
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    with pytest.raises(FileExistsError, match="already holds a run: continue it with --resume"):
        run.train(dataclasses.replace(load_config(whole), out=str(whole)))
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


class Silent(Screen):
    def __init__(self):
        super().__init__(Console(file=io.StringIO(), width=200), interval=0.0)


@pytest.fixture
def no_picture(monkeypatch):
    """Whole runs are quicker without one."""
    monkeypatch.setattr(plots, "plot_curves", lambda rows, path: None)


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize(
    "options", [{"ref_ema": 0.8, "objective": "grpo", "stale": 2}, {"objective": "reinforce_baseline"}]
)
def test_a_moving_reference_stale_data_and_a_critic_are_resumed(tmp_path, options):
    """Law: as above, for runs whose state is more than a policy; the kill is a missing last checkpoint."""
    config = TrainConfig(
        task="letters", steps=3, prompts=2, group_size=4, max_new_tokens=8, warm_up=0, learning_rate=0.05, eval_rows=3,
        save_every=1, keep=2, out=str(tmp_path / "whole"), **options,
    ).resolved()  # fmt: skip
    run.train(config, screen=Silent())
    resumed = dataclasses.replace(config, out=str(tmp_path / "resumed"))
    shutil.copytree(config.out, resumed.out)
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "3")
    run.train(resumed, resume=True, screen=Silent())
    same_run(tmp_path / "resumed", tmp_path / "whole")
    if "ref_ema" in options:
        saved, _ = state_of(tmp_path / "whole")
        start, _ = state_of(tmp_path / "whole", 0)
        for other in (saved.state.params, start.state.params):
            assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (saved.reference, other)), strict=True))


@pytest.fixture
def captured(tmp_path, monkeypatch):
    """`go(**options)`: a run whose warm-up, evaluation, optimiser and iterations only note what they are given."""
    seen = {}

    def go(**options):
        made = {"task": "letters", "steps": 4, "prompts": 2, "group_size": 2, "warm_up": 0, "max_new_tokens": 6}
        config = TrainConfig(**made | {"out": str(tmp_path / "run")} | options).resolved()
        run.train(config, screen=Silent())
        return seen

    def note(name, function):
        def noted(*args, **options):
            seen[name] = (args, options)
            return function(*args, **options)

        return noted

    monkeypatch.setattr(loop, "train", note("train", lambda *_, **__: iter(())))
    monkeypatch.setattr(run, "warm_up", note("warm_up", lambda *_, **__: iter(())))
    monkeypatch.setattr(run, "adamw", note("adamw", run.adamw))
    monkeypatch.setattr(checkpoint, "open_checkpoints", note("checkpoints", checkpoint.open_checkpoints))
    result = run.Evaluation(0.5, 0, 1.0, 0.0, np.zeros((1, 1)), [[""]])
    monkeypatch.setattr(run, "evaluate", note("evaluate", lambda *_, **__: result))
    return go


def test_options_reach_the_iterations(captured):
    sampling = {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.01}
    same = {
        "steps": 6, "group_size": 6, "max_new_tokens": 9, "epochs": 2, "microbatches": 3, "group_microbatches": 2,
        "length_buckets": 3, "old_logp": "first_epoch", "on_error": "none", "seed": 11,
    }  # fmt: skip
    args, options = captured(prompts=9, task_args=("train_size=13",), **same, **sampling)["train"]
    assert {name: options[name] for name in same} == same
    assert options["prompts_per_step"] == 9
    assert options["sampling"]._asdict() == sampling
    assert (args[2].name, len(args[2].train)) == ("letters", 13)
    assert options["prompt_length"] == 16
    root, _ = jax.random.split(jax.random.key(11))
    np.testing.assert_array_equal(jax.random.key_data(options["saved"].key), jax.random.key_data(root))


def test_options_reach_the_optimiser(captured):
    options = {"learning_rate": 0.3, "schedule": "cosine", "weight_decay": 0.2, "clip_norm": 7.0}
    args, given = captured(steps=6, epochs=2, lr_warmup=3, **options)["adamw"]
    assert args == (0.3,)
    assert given == {
        "steps": 12, "warmup_steps": 3, "schedule": "cosine", "weight_decay": 0.2, "clip_norm": 7.0,
    }  # fmt: skip


def test_no_clipping_and_a_warm_up_longer_than_the_run(captured):
    _, given = captured(clip_norm=float("inf"), lr_warmup=50)["adamw"]
    assert (given["clip_norm"], given["warmup_steps"]) == (None, 4)


def test_options_reach_the_objective_and_the_reference(captured):
    args, options = captured(objective_args=("low=0.1", "beta=0.5"), ref_every=3)["train"]
    assert str(args[4]).split(" at 0x")[0] == str(grpo(low=0.1, beta=0.5)).split(" at 0x")[0]
    assert "low': 0.1" in str(args[4].loss) or "0.1" in str(args[4].loss)
    assert options["update_reference"].keywords == {"interval": 3}
    assert options["reference"] is not None


def test_a_reference_is_kept_only_if_it_is_read(captured):
    _, options = captured(objective_args=("beta=0",), ref_ema=0.5)["train"]
    assert options["update_reference"].keywords == {"decay": 0.5}
    assert options["reference"] is None


def test_options_reach_warm_up_model_and_evaluation(captured, tmp_path):
    seen = captured(warm_up=5, seed=3, dtype="bfloat16", eval_rows=4, eval_batch=2, keep=7, on_error="none")
    args, options = seen["warm_up"]
    assert (options["steps"], options["seed"]) == (5, 3)
    assert args[0].config.dtype == "bfloat16"
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(args[1])} == {"bfloat16"}
    args, options = seen["evaluate"]
    assert args[4] == letters().held_out[:4]
    assert (options["batch_size"], options["max_new_tokens"], options["on_error"]) == (2, 6, "none")
    assert "sampling" not in options, "greedy, whatever training samples with"
    assert seen["checkpoints"] == ((tmp_path / "run" / "checkpoints",), {"keep": 7})


def test_the_warm_up_ends_at_its_loss(captured, monkeypatch):
    """Where the mean of the last eight losses is that low; with 0, after all of its updates."""
    losses = (*[3.0] * 8, *[1.0] * 20)

    def updates(*_, **options):
        for number, loss in enumerate(losses[: options["steps"]], 1):
            seen.append(number)
            yield TrainState(number, {}, ()), {"iteration": number, "loss": loss}

    ends = {}
    for limit, target in ((28, 2.0), (28, 1.0), (28, 0.0), (4, 9.0), (9, 9.0)):
        seen = []
        monkeypatch.setattr(run, "warm_up", updates)
        config = TrainConfig(task="letters", warm_up=limit, warm_up_loss=target).resolved()
        run.start(config, run.build(config), Silent())
        ends[limit, target] = seen[-1]
    assert ends == {(28, 2.0): 12, (28, 1.0): 16, (28, 0.0): 28, (4, 9.0): 4, (9, 9.0): 8}


def test_the_seed_makes_the_weights():
    configs = [TrainConfig(task="letters", seed=seed).resolved() for seed in (0, 0, 1)]
    a, b, c = (run.build(config).params for config in configs)
    chex.assert_trees_all_equal(a, b)
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (a, c)), strict=True))


def test_what_cannot_run_is_said_before_it_starts(tmp_path, monkeypatch):
    def make(**options):
        return TrainConfig(**{"task": "letters", "out": str(tmp_path / "run")} | options).resolved()

    with pytest.raises(
        ValueError, match=r"up to 16 tokens and --max-new-tokens 30 do not fit the model's 40 positions"
    ):
        run.train(make(max_new_tokens=30))
    with pytest.raises(ValueError, match="task 'letters' has no held-out rows"):
        run.train(make(task_args=("held_out_size=0",)))
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        run.train(make(), resume=True)
    assert not (tmp_path / "run").exists()
    monkeypatch.setitem(TASKS, "letters", lambda: letters()._replace(train=[]))
    for warm_up in (0, 2):
        with pytest.raises(ValueError, match="task 'letters' has no training rows"):
            run.train(make(warm_up=warm_up, out=str(tmp_path / str(warm_up))), screen=Silent())


@pytest.mark.usefixtures("no_picture")
def test_nothing_scorable_does_not_end_a_run_in_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "letters", lambda: letters()._replace(reward=lambda completion: None))
    config = TrainConfig(
        task="letters", steps=1, prompts=2, group_size=4, max_new_tokens=8, warm_up=0, eval_rows=3, eval_every=1,
        objective_args=("beta=0",), out=str(tmp_path / "run"),
    )  # fmt: skip
    summary = run.train(config.resolved(), screen=Silent())
    assert summary["held_out_after"] is None
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert (rows[1]["reward"], rows[1]["unscorable"]) == (None, 1.0)


def test_completions_are_spread_over_the_batch():
    rows = [{"i": i} for i in range(10)]
    assert [row["i"] for row in run.spread(rows, 4)] == [0, 3, 6, 9]
    assert run.spread(rows, 0) == []
    assert run.spread(rows, 99) == rows
    assert run.spread(rows, 1) == rows[:1]


def test_the_next_free_folder(tmp_path):
    assert run.next_folder(tmp_path, "a") == tmp_path / "a-0001"
    (tmp_path / "a-0001").mkdir()
    (tmp_path / "a-0003").mkdir()
    assert run.next_folder(tmp_path, "a") == tmp_path / "a-0002"
