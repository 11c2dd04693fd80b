"""A run on disk: what its folder holds, that every option reaches its place, and that a kill changes nothing."""

import dataclasses
import json
import math
import random
import shutil
import signal
import time
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.components import build, objective_of, optimizer_of, reference_rule, remat_of, stages_of
from grpo_jax.config import TrainConfig, load_config, tiny_config
from grpo_jax.inference.logprobs import completion_logp
from grpo_jax.inference.tokenizer import ByteTokenizer
from grpo_jax.models import decoder
from grpo_jax.objectives import every, grpo
from grpo_jax.options import Batching, Generation, OptionError, Sampling, Scoring, Update
from grpo_jax.parallel.backends import SINGLE
from grpo_jax.parallel.memory import memory_for_training
from grpo_jax.runs import run
from grpo_jax.runs.folder import json_text, read_lines
from grpo_jax.tasks import TASKS
from grpo_jax.training.evaluate import evaluate
from grpo_jax.training.loop import train
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.sft import sft
from grpo_jax.types import Prompts, TrainState

from small_runs import Silent, go, same_run, small, state_of
from toy import OPTIONS, ascii_share, bigram, finished_run, install, launch, letters

FILES = {
    "config.json", "metrics.jsonl", "timings.jsonl", "completions.jsonl", "summary.json", "curves.png", "checkpoints",
    "tensorboard",
}  # fmt: skip


def moody(completion: str) -> float | None:
    """A reward that raises for some completions."""
    if completion[:1] > "\x7f":
        raise ZeroDivisionError("not today")
    return ascii_share(completion)


def moody_letters(*, train_size: int = 10):
    return letters(train_size=train_size)._replace(name="moody", reward=moody)


install()
TASKS["moody"] = moody_letters


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return finished_run(tmp_path_factory)


def differ(left, right) -> bool:
    return any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (left, right)), strict=True))


@pytest.mark.parametrize(
    ("remat", "prompts", "expected"), [("auto", 2, "dots"), ("auto", 2**30, "layer"), ("none", 2**30, "none")]
)
def test_what_a_layer_keeps_is_chosen_by_memory(remat, prompts, expected):
    config = TrainConfig.of(remat=remat, prompts_per_step=prompts)
    model = decoder(tiny_config(259), scan=False)
    params = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)
    assert remat_of(config, model, params, 16, SINGLE) == expected


def test_the_model_keeps_what_was_chosen():
    """Its program is that of a model made so."""
    params = build(TrainConfig.of()).params
    tokens, mask = np.zeros((1, 2, 3), np.int32), np.ones((1, 2, 3), bool)
    prompts = Prompts(np.zeros((1, 4), np.int32), np.ones((1, 4), bool))

    def program(model):
        logp = lambda params: completion_logp(model, params, prompts, tokens, mask).sum()
        return str(jax.make_jaxpr(jax.grad(logp))(params))

    made = {name: program(decoder(tiny_config(259), remat=name, scan=False)) for name in ("layer", "dots", "none")}
    assert len(set(made.values())) == 3
    for remat in ("layer", "none"):
        assert program(build(TrainConfig.of(remat=remat)).model) == made[remat]


def test_room_for_training_is_half_of_what_the_state_leaves():
    """Weights, two moments and a reference in their own type, a gradient in float32, over the parts of a mesh."""
    params = {"a": np.zeros(10**6, np.float32), "b": np.zeros(10**6, np.float16)}
    whole = memory_for_training({})
    assert 2 * (whole - memory_for_training(params)) == (16 + 4 + 8 + 4) * 10**6
    assert 2 * (whole - memory_for_training(params, 4)) == (16 + 4 + 8 + 4) * 10**6 // 4


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

    Killed during the supervised updates, in the middle of writing a checkpoint, and somewhere in the iterations
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
    chex.assert_trees_all_equal(state_of(killed)[0].reference, state_of(killed, 0)[0].train.params)
    clock = [row["seconds/update"] for row in read_lines(killed / "timings.jsonl")]
    assert json.loads((killed / "summary.json").read_text())["seconds"] > sum(clock), "of all starts together"
    more = sorted({path.name for path in (folder / "cache").iterdir()} - programs)
    assert not more, "all programs were taken from the cache"


AHEAD = {
    "--max-staleness": "2", "--ref-ema": "0.5", "--epochs": "2", "--save-every": "1", "--keep-checkpoints": "3",
    "--objective-args": "beta=0.1",
}  # fmt: skip


def test_killed_with_batches_ahead_of_the_update_equals_uninterrupted(tmp_path):
    """As above, where a state is more than a policy: batches of older policies, a moving reference, packed tokens."""
    options = [*OPTIONS, *(word for pair in AHEAD.items() for word in pair), "--pack-tokens", "--drop-zero-variance"]
    output, _ = launch(tmp_path, "train", *options, "--out", "whole").communicate()
    assert (tmp_path / "whole" / "summary.json").exists(), output
    process = launch(tmp_path, "train", *options, "--out", "killed", DIE_AT="4")
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output
    assert len(state_of(tmp_path / "killed")[0].queue) == 2
    process = launch(tmp_path, "train", "--resume", "killed")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    same_run(tmp_path / "killed", tmp_path / "whole")
    config = load_config(tmp_path / "whole")
    assert (config.max_staleness, config.batching.pack_tokens, config.batching.drop_zero_variance) == (2, True, True)


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
    assert {path.name for path in whole.iterdir()} - {"run.lock"} == FILES, "another test may be resuming it"
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((whole / "tensorboard").glob("events*"))
    assert [path.name for path in sorted((whole / "checkpoints").iterdir())] == ["0", "7"], (
        "--keep-checkpoints 1, and the first"
    )


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
    named = {"steps": 7, "task": "letters", "model": "bigram", "objective": "grpo", "seed": 4}
    assert named.items() <= summary.items()


def test_config_holds_every_value_of_a_run(whole):
    config = load_config(whole)
    assert config == config.resolved()
    assert (config.steps, config.out, config.update.microbatches) == (7, "whole", 1)
    values = json.loads((whole / "config.json").read_text())
    assert values.keys() == {field.name for field in dataclasses.fields(TrainConfig)}


def test_a_run_is_opened_with_the_parameters_of_a_checkpoint(whole):
    """Its evaluation gives the numbers of the run, before and after."""
    summary = json.loads((whole / "summary.json").read_text())
    for iteration, name in ((0, "held_out_before"), (None, "held_out_after"), (7, "held_out_after")):
        opened = run.open_run(whole, iteration)
        assert opened.iteration == (7 if iteration is None else iteration)
        rows, result = run.held_out(opened.config, opened.components, opened.params)
        assert len(rows) == 5
        assert result.mean_reward == pytest.approx(summary[name])
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


def test_a_run_is_what_train_gives_for_its_options(tmp_path):
    """Law: every option that changes a number reaches it; the same tuples, spelled out for `train`, say the same."""
    config = small(
        task="moody", task_args=("train_size=13",), steps=3, prompts_per_step=4, max_new_tokens=7, seed=11,
        temperature=0.9, top_k=200, top_p=0.95, min_p=1e-4, decode_slots=2, compactions=1, epochs=2, microbatches=2,
        group_microbatches=2, old_logp="sampler", logit_chunk=5, prompt_length=20, length_buckets=2,
        pack_tokens=True, drop_zero_variance=True, weights=(0.5,), on_error="skip", learning_rate=0.03,
        schedule="cosine", lr_warmup=3, weight_decay=0.2, clip_norm=0.1, moment_dtype="bfloat16", max_staleness=1,
        ref_every=2, objective_args=("beta=0.3", "low=0.1"), log_completions=99,
    )  # fmt: skip
    go(config, tmp_path / "run")
    model = bigram(0.01)
    iterations = train(
        model, model.init(jax.random.key(11)), moody_letters(train_size=13), ByteTokenizer(), grpo(beta=0.3, low=0.1),
        adamw(
            0.03, total_updates=6, schedule="cosine", lr_warmup=3, weight_decay=0.2, clip_norm=0.1, moments="bfloat16"
        ),
        steps=3, seed=11, generation=Generation(4, 7, Sampling(0.9, 200, 0.95, 1e-4), 2, 1),
        update=Update(2, 2, 2, "sampler", 5), batching=Batching(4, 20, 2, True, True),
        scoring=Scoring((0.5,), "skip"), max_staleness=1, update_reference=partial(every, interval=2),
    )  # fmt: skip
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")[1:]
    texts = read_lines(tmp_path / "run" / "completions.jsonl")
    assert 0 < rows[0]["unscorable"] < 1, "or on_error shows nothing"
    assert rows[-1]["kl"] > 0
    for row, (_, metrics) in zip(rows, iterations, strict=True):
        held_out = {name: row.pop(name) for name in list(row) if name.startswith("held_out")}
        assert bool(held_out) == (row["step"] == 3)
        metrics = {"step": metrics.pop("iteration")} | {
            name: value for name, value in metrics.items() if not name.startswith("seconds/")
        }
        told = [{name: text[name] for name in text if name != "step"} for text in texts if text["step"] == row["step"]]
        assert told == json.loads(json_text(metrics.pop("completions")))
        assert row == json.loads(json_text(metrics))


@pytest.mark.parametrize(
    "options",
    [
        {"ref_ema": 0.8, "max_staleness": 2},
        {"ref_every": 2, "pack_tokens": True, "drop_zero_variance": True},
        {"objective": "reinforce_baseline"},
        {"objective": "ppo", "objective_args": ("beta=0.1",)},
    ],
    ids=str,
)
def test_what_a_run_is_made_of_is_resumed(tmp_path, options):
    """Law: as above, for states of every kind; the kill is a missing last checkpoint."""
    config = small(**{"objective_args": ("beta=0.1",) if "objective" not in options else ()} | options)
    go(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "3")
    go(config, tmp_path / "resumed", resume=True)
    same_run(tmp_path / "resumed", tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "whole" / "checkpoints").iterdir()) == ["0", "2", "3"]
    saved, _ = state_of(tmp_path / "whole")
    first, _ = state_of(tmp_path / "whole", 0)
    policy = lambda state: state.train.params.get("policy", state.train.params)
    assert differ(policy(saved), policy(first))
    assert saved.iteration == 3
    if saved.reference is None:
        assert "kl" not in read_lines(tmp_path / "whole" / "metrics.jsonl")[-1]
    elif "ref_ema" in options or "ref_every" in options:
        assert differ(saved.reference, policy(saved))
        assert differ(saved.reference, policy(first))
    else:
        assert not (tmp_path / "whole" / "checkpoints" / "3" / "reference").exists()
        chex.assert_trees_all_equal(saved.reference, policy(first))


def test_a_finished_run_goes_on_where_more_steps_are_asked_for(tmp_path):
    """It counts from the iteration of its state, and equals a run that was asked for as many at once."""
    options = {"schedule": "constant", "eval_every": 1, "keep_checkpoints": 9, "objective_args": ("beta=0.1",)}
    go(small(**options, steps=2), tmp_path / "longer")
    go(small(**options, steps=4), tmp_path / "longer", resume=True, overrides=("steps",))
    go(small(**options, steps=4), tmp_path / "whole")
    same_run(tmp_path / "longer", tmp_path / "whole")
    assert [row["step"] for row in read_lines(tmp_path / "longer" / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert state_of(tmp_path / "longer")[0].iteration == 4
    before = (tmp_path / "longer" / "metrics.jsonl").read_bytes()
    go(small(**options, steps=4), tmp_path / "longer", resume=True, overrides=("steps",))
    assert (tmp_path / "longer" / "metrics.jsonl").read_bytes() == before, "there was nothing left to do"


def updates_of(optimizer, count):
    """What an optimiser makes of some gradients, one after another."""
    params = {"w": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    state = optimizer.init(params)
    for i in range(count):
        grads = jax.tree.map(lambda x, i=i: x * (i - 1.5), params)
        updates, state = optimizer.update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        yield params


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"learning_rate": 0.3, "schedule": "cosine", "lr_warmup": 3, "weight_decay": 0.2, "clip_norm": 0.7},
            adamw(0.3, total_updates=12, schedule="cosine", lr_warmup=3, weight_decay=0.2, clip_norm=0.7),
        ),
        (
            {"learning_rate": 0.3, "clip_norm": math.inf, "lr_warmup": 50},
            adamw(0.3, total_updates=12, lr_warmup=12, clip_norm=None),
        ),
        ({"learning_rate": 0.3, "moment_dtype": "bfloat16"}, adamw(0.3, moments="bfloat16")),
    ],
    ids=["all", "no clipping, and a warm-up longer than the run", "moments"],
)
def test_options_reach_the_optimiser(options, expected):
    optimizer = optimizer_of(small(steps=6, epochs=2, **options))
    chex.assert_trees_all_equal(list(updates_of(optimizer, 12)), list(updates_of(expected, 12)))


def test_options_reach_the_objective_and_the_reference():
    config = small(objective_args=("low=0.1", "beta=0.5"), ref_every=3)
    assert str(objective_of(config)).split(" at 0x")[0] == str(grpo(low=0.1, beta=0.5)).split(" at 0x")[0]
    assert "low': 0.1" in str(objective_of(config).loss) or "0.1" in str(objective_of(config).loss)
    assert reference_rule(config).keywords == {"interval": 3}
    assert reference_rule(small(ref_ema=0.5)).keywords == {"decay": 0.5}
    assert reference_rule(small()) is None


def test_a_reference_is_kept_only_if_it_is_read():
    for beta, kept in ((0, False), (0.1, True)):
        config = small(objective_args=(f"beta={beta}",), ref_ema=0.5)
        components = build(config)
        assert (stages_of(config, components).start(components.params).reference is not None) == kept


@pytest.mark.parametrize(("target", "schedule"), [(0.0, "cosine"), (0.1, "constant")])
def test_options_reach_the_supervised_updates(target, schedule):
    config = small(sft_steps=4, seed=3, param_dtype="bfloat16", sft_target_loss=target)
    components = build(config)
    assert components.model.config.dtype == "bfloat16"
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(components.params)} == {"bfloat16"}
    optimizer = adamw(3e-3, total_updates=4, lr_warmup=4, schedule=schedule)
    *_, (state, _) = sft(
        components.model, components.params, letters(), ByteTokenizer(), optimizer, steps=4, seed=3, prompt_length=16
    )
    chex.assert_trees_all_equal(run.start_policy(config, components, Silent()), state.params)
    assert differ(state.params, components.params)


def test_the_supervised_updates_end_at_their_loss():
    """Where the mean of the last eight losses is that low; with 0, after all of them."""
    losses = (*[3.0] * 8, *[1.0] * 20)
    ends = {}
    for limit, target in ((28, 2.0), (28, 1.0), (28, 0.0), (4, 9.0), (9, 9.0)):
        asked = []

        def updates(asked=asked, limit=limit):
            for number, loss in enumerate(losses[:limit], 1):
                asked.append(number)
                yield TrainState(number, {}, ()), {"iteration": number, "loss": loss}

        *_, (state, metrics) = run.until_loss(updates(), target)
        assert state.step == metrics["iteration"] == asked[-1], "no update is made in vain"
        ends[limit, target] = asked[-1]
    assert ends == {(28, 2.0): 12, (28, 1.0): 16, (28, 0.0): 28, (4, 9.0): 4, (9, 9.0): 8}


def test_options_reach_the_evaluation():
    """Greedy, whatever training samples with; of as many rows, in batches as large as was said."""
    config = small(task="moody", eval_rows=4, eval_batch_size=3, max_new_tokens=6, temperature=0.7, on_error="skip")
    components, done = build(config), []
    rows, found = run.held_out(config, components, components.params, progress=done.append)
    assert rows == letters().held_out[:4]
    assert done == [3, 4]
    expected = evaluate(
        components.model, components.params, ByteTokenizer(), moody_letters(), rows,
        generation=Generation(1, 6, Sampling(0.0)), scoring=Scoring(on_error="skip"),
    )  # fmt: skip
    assert found.texts == expected.texts
    np.testing.assert_array_equal(found.reward_PN, expected.reward_PN)
    drawn = run.held_out(config, components, components.params, generation=Generation(3, 6), key=jax.random.key(0))[1]
    assert drawn.reward_PN.shape == (4, 3)


def test_the_seed_makes_the_weights():
    for model in ("tiny", "bigram"):
        configs = [TrainConfig.of(model, task="letters", max_new_tokens=8, seed=seed) for seed in (0, 0, 1)]
        a, b, c = (build(config).params for config in configs)
        chex.assert_trees_all_equal(a, b)
        assert differ(a, c)


def test_what_cannot_run_is_said_before_it_starts(tmp_path):
    with pytest.raises(
        OptionError,
        match=r"^max_new_tokens \(30\) and prompts of up to 16 tokens do not fit the model's 40 positions",
    ):
        go(small(max_new_tokens=30), tmp_path / "run")
    with pytest.raises(ValueError, match="task 'letters' has no held-out rows"):
        go(small(task_args=("held_out_size=0",)), tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        go(small(), tmp_path / "run", resume=True)
    for sft_steps in (0, 2):
        with pytest.raises(ValueError, match="task 'letters' has no training rows"):
            go(small(task_args=("train_size=0",), sft_steps=sft_steps), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_nothing_scorable_does_not_end_a_run_in_an_error(tmp_path):
    config = small(task="unscorable", steps=1, eval_every=1, objective_args=("beta=0",))
    summary = go(config, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["held_out_after"] is None
    assert math.isnan(summary["held_out_after"] or math.nan)
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert (rows[1]["reward"], rows[1]["unscorable"]) == (None, 1.0)


def test_the_next_free_folder(tmp_path):
    assert run.next_folder(tmp_path, "a") == tmp_path / "a-0001"
    (tmp_path / "a-0001").mkdir()
    (tmp_path / "a-0003").mkdir()
    assert run.next_folder(tmp_path, "a") == tmp_path / "a-0002"
