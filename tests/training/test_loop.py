"""The training generators: what a run is made of, counted, continued and refused."""

import math
import warnings
from functools import partial
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grpo_jax.inference.critic import value_network
from grpo_jax.inference.generate import generate
from grpo_jax.inference.logprobs import Sampling
from grpo_jax.inference.text import completion_texts, encode
from grpo_jax.inference.tokenizer import ByteTokenizer
from grpo_jax.objectives import drop_stale, ema, every, gdpo, grpo, never, process_grpo, reinforce, reinforce_baseline
from grpo_jax.objectives.preparations import high_entropy
from grpo_jax.parallel.backends import SINGLE
from grpo_jax.rewards import RewardError
from grpo_jax.runs.checkpoint import RunState
from grpo_jax.training import checks, loop
from grpo_jax.training.checks import SamplerMismatchError
from grpo_jax.training.loop import prompt_width, rows_of, train
from grpo_jax.training.optimizers import adamw
from hypothesis import given, settings
from hypothesis import strategies as st

from toy import ascii_share, bigram, compilations, letters

MODEL, TASK, BYTES = bigram(stop_share=0.7), letters(train_size=10), ByteTokenizer()
P, G, T, STEPS, BUCKETS = 3, 4, 8, 6, 2
PLAIN, WITH_KL = grpo(beta=0.0), grpo(beta=0.1)  # made once: a new objective is a new program
SGD, STILL, ADAMW = optax.sgd(0.5), optax.sgd(0.0), adamw(0.05, total_updates=6)


@pytest.fixture(scope="module", autouse=True)
def shared_steps():
    """Runs with the same options share their update's program: `jax.jit` knows it by the function."""
    make, made = loop.make_train_step, {}

    def shared(*args, **options):
        key = (args, tuple(sorted(options.items())))
        if key not in made:
            made[key] = make(*args, **options)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_train_step", shared)
        yield


@pytest.fixture(scope="module")
def params():
    return MODEL.init(jax.random.key(0))


@pytest.fixture(scope="module")
def started(params):
    """`train` with the settings of these tests, `options` in their place; nothing is sampled before it is iterated."""

    def start(objective=PLAIN, optimizer=SGD, task=TASK, **options):
        sizes = {"prompts_per_step": P, "group_size": G, "max_new_tokens": T, "length_buckets": BUCKETS, "seed": 5}
        return train(
            MODEL, params, task, BYTES, objective, optimizer, **{"steps": STEPS, "prompt_length": 16} | sizes | options
        )

    return start


def kept(iterations):
    """Everything that is yielded, with buffers of its own."""
    return [(jax.tree.map(jnp.copy, saved), metrics) for saved, metrics in iterations]


def timeless(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith("seconds/")}


@pytest.fixture(scope="module")
def whole(started):
    """An uninterrupted run with AdamW and a reference that moves, the names of what it compiled, the lengths it had."""
    lengths, trim = [], loop.trim

    def recorded(*args):
        rollout = trim(*args)
        lengths.append(rollout.tokens_PGT.shape[-1])
        return rollout

    with compilations() as compiled, pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "trim", recorded)
        return kept(started(WITH_KL, ADAMW, update_reference=partial(ema, decay=0.9))), compiled, lengths


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 12), size=st.integers(1, 30), seed=st.integers(0, 2**32))
def test_every_epoch_is_a_permutation(count, size, seed):
    """Law: cut the endless sequence of rows into epochs: each holds every row once, wherever iterations end."""
    rows = [{"i": i} for i in range(count)]
    seen = [row["i"] for iteration in range(-(-3 * count // size)) for row in rows_of(iteration, rows, size, seed)]
    for epoch in range(3):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_rows_are_a_function_of_iteration_and_seed():
    rows = list(range(50))
    assert rows_of(7, rows, 20, 3) == rows_of(7, rows, 20, 3)
    assert rows_of(7, rows, 20, 3) != rows_of(7, rows, 20, 4)
    epochs = [rows_of(e, rows, 50, 3) for e in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3, "a new order in every epoch"
    assert rows not in epochs


def test_metrics_are_complete(whole):
    results = whole[0]
    rollout = {"reward", "reward_std", "frac_zero_variance", "unscorable", "length", "truncated", "tokens"}
    update = {
        "loss",
        "grad_norm",
        "ratio",
        "clip_fraction",
        "zero_advantage",
        "kl",
        "sampler_logp_diff",
        "learning_rate",
    }
    seconds = {"seconds/sample", "seconds/score", "seconds/update"}
    for number, (_, metrics) in enumerate(results, 1):
        assert metrics["iteration"] == number
        assert rollout | update | seconds | {"completions"} <= metrics.keys()
        numbers = {name: value for name, value in metrics.items() if name != "completions"}
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in numbers.values()), numbers
        assert all(metrics[name] > 0 for name in seconds)
        assert metrics["learning_rate"] == pytest.approx(0.05)
        assert metrics["grad_norm"] > 0


def test_completions_are_rows_with_their_rewards(whole):
    """Of the rows that the iteration drew, in groups; their mean is the metric."""
    for saved, metrics in whole[0]:
        rows = rows_of(metrics["iteration"] - 1, TASK.train, P, 5)
        completions = metrics["completions"]
        assert [c["prompt"] for c in completions] == [row["question"] for row in rows for _ in range(G)]
        assert [c["answer"] for c in completions] == [row["answer"] for row in rows for _ in range(G)]
        assert [c["reward"] for c in completions] == [ascii_share(c["completion"]) for c in completions]
        known = [c["reward"] for c in completions if c["reward"] is not None]
        assert metrics["reward"] == pytest.approx(np.mean(known))
        assert metrics["unscorable"] == pytest.approx(1 - len(known) / (P * G))
        groups = [{c["reward"] for c in completions[i : i + G]} - {None} for i in range(0, P * G, G)]
        assert metrics["frac_zero_variance"] == pytest.approx(np.mean([len(group) < 2 for group in groups]))
        assert int(saved.state.step) == metrics["iteration"]


def test_a_run_compiles_a_stated_number_of_programs(whole):
    """Law: the sampler once, and what follows it once for each bucket of completion lengths that occurred."""
    _, compiled, lengths = whole
    assert set(lengths) == {T // 2, T}, "a run with one length shows nothing"
    counts = {name: compiled.count(name) for name in ("generate", "score", "assemble", "step")}
    assert counts == {"generate": 1, "score": BUCKETS, "assemble": BUCKETS, "step": BUCKETS}


def test_the_same_run_again_compiles_only_its_step(started, whole):
    """`step` belongs to a run; sampling, scoring and assembling are shared by all runs on the same model."""
    with compilations() as compiled:
        next(started(WITH_KL, adamw(0.05, total_updates=STEPS)))
    assert {name: compiled.count(name) for name in ("generate", "score", "assemble", "step")} == {
        "generate": 0, "score": 0, "assemble": 0, "step": 1,
    }  # fmt: skip


@pytest.mark.parametrize("at", [2, 5])
def test_continuing_equals_never_stopping(started, whole, params, at):
    """Law: bit for bit, in parameters, optimiser, moving reference and every metric but the clock."""
    results = whole[0]
    saved = jax.tree.map(jnp.copy, results[at - 1][0])
    # The reference is the one that had moved, not the one that the run began with.
    options = {"update_reference": partial(ema, decay=0.9), "reference": params}
    rest = kept(started(WITH_KL, ADAMW, saved=RunState(*saved), **options))
    assert len(rest) == STEPS - at
    for (left, left_metrics), (right, right_metrics) in zip(rest, results[at:], strict=True):
        assert timeless(left_metrics) == timeless(right_metrics)
        chex.assert_trees_all_equal(left, right)


@pytest.fixture(scope="module")
def ahead(started):
    """A run whose data is two iterations old."""
    return kept(started(stale=2, length_buckets=1))


def test_stale_data_comes_from_the_policy_of_as_many_iterations_ago(ahead, params):
    """Iteration i is drawn by the policy before iteration i − 2 (the first by the first): by hand, the same texts."""
    policies = [params, *(saved.state.params for saved, _ in ahead)]
    for number, (saved, metrics) in enumerate(ahead):
        prompts = encode(BYTES, TASK.prompt, rows_of(number, TASK.train, P, 5), length=16)
        drawn = generate(
            MODEL, policies[max(0, number - 2)], prompts, jax.random.fold_in(saved.key, number), group_size=G,
            max_new_tokens=T, stop_ids=BYTES.stop_ids, pad_id=BYTES.pad_id,
        )  # fmt: skip
        texts = [text for group in completion_texts(BYTES, drawn) for text in group]
        assert [row["completion"] for row in metrics["completions"]] == texts
        assert len(saved.pending) == min(2, STEPS - number - 1)
        assert (abs(metrics["ratio"] - 1) > 1e-5) == (number > 0), "the ratio is to the policy that sampled"


@pytest.mark.parametrize("at", [1, STEPS - 1])
def test_continuing_with_stale_data_equals_never_stopping(started, ahead, at):
    rest = kept(started(stale=2, length_buckets=1, saved=RunState(*jax.tree.map(jnp.copy, ahead[at - 1][0]))))
    assert len(rest) == STEPS - at
    for (left, left_metrics), (right, right_metrics) in zip(rest, ahead[at:], strict=True):
        assert timeless(left_metrics) == timeless(right_metrics)
        chex.assert_trees_all_equal(left, right)


def test_an_objective_sees_the_age_in_updates(started):
    """Two epochs an iteration: the second iteration is two updates old, those behind it four."""
    norms = [m["grad_norm"] for _, m in started(drop_stale(PLAIN, max_age=2), stale=2, epochs=2, steps=4)]
    assert [norm > 0 for norm in norms] == [True, True, False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stale": -1}, "stale must be an integer of at least 0"),
        ({"stale": 1, "old_logp": "first_epoch"}, "needs old_logp='sampler'"),
        ({"stale": 1, "objective": reinforce(beta=0.0)}, "does not read old_logp_T"),
    ],
)
def test_stale_data_needs_a_ratio_to_its_policy(started, options, message):
    with pytest.raises(ValueError, match=message):
        next(started(**options))


def test_a_moving_reference_is_part_of_what_is_saved(started, whole, params):
    reference = params
    for saved, _ in whole[0]:
        reference = ema(0, saved.state.params, reference, decay=0.9)
        chex.assert_trees_all_close(saved.reference, reference, atol=1e-6)
    assert next(started(WITH_KL))[0].reference is None, "a fixed reference is not saved again and again"


def test_references_move_as_they_are_told(started):
    """The KL to a policy just copied is 0, to one left behind it is not; iterations are counted from 1."""
    kl = {}
    for name, update in {
        "never": never,
        "always": lambda iteration, params, reference: params,
        "second": lambda iteration, params, reference: params if iteration % 2 == 0 else reference,
        "interval": partial(every, interval=2),
        "fixed": None,
    }.items():
        kl[name] = [m["kl"] for _, m in started(WITH_KL, steps=4, update_reference=update)]
        assert kl[name][0] == pytest.approx(0, abs=1e-6)
    assert min(kl["fixed"][1:]) > 5e-5
    assert kl["never"] == kl["fixed"]
    np.testing.assert_allclose(kl["always"], 0, atol=1e-6)
    np.testing.assert_allclose(kl["second"], kl["interval"], atol=1e-6)
    assert [value > 5e-5 for value in kl["interval"]] == [False, True, False, True]


def test_a_reference_of_ones_own_is_used(started, params):
    other = params | {"bias": params["bias"] + jnp.linspace(0, 3, len(params["bias"]))}
    _, metrics = next(started(WITH_KL, reference=other))
    assert metrics["kl"] > 1e-2


def test_the_reference_is_evaluated_only_if_it_is_read(started, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("score was called")

    monkeypatch.setattr(loop, "score", fail)
    (_, metrics) = next(started(PLAIN))
    assert "kl" not in metrics
    (saved, _) = next(started(PLAIN, update_reference=never))
    assert saved.reference is None
    with pytest.raises(AssertionError, match="score was called"):
        next(started(WITH_KL))


def test_new_noise_in_every_iteration(started):
    """One row, parameters that do not move: only the noise can make the completions differ."""
    task = TASK._replace(train=TASK.train[:1])
    texts = [
        tuple(c["completion"] for c in metrics["completions"]) for _, metrics in started(PLAIN, STILL, task, steps=3)
    ]
    assert len(set(texts)) == 3
    again = [tuple(c["completion"] for c in m["completions"]) for _, m in started(PLAIN, STILL, task, steps=3)]
    assert again == texts
    other = [tuple(c["completion"] for c in m["completions"]) for _, m in started(PLAIN, STILL, task, steps=3, seed=6)]
    assert not set(other) & set(texts)


def test_a_sampler_that_differs_from_the_trainer_is_an_error(started, monkeypatch):
    sampler = loop.generate
    monkeypatch.setattr(loop, "generate", lambda *a, **options: sampler(*a, **options | {"temperature": 0.8}))
    with pytest.raises(SamplerMismatchError, match=r"differ from the sampler's by 0\.\d+ a token on average"):
        next(started())


def test_sampler_and_trainer_agree_under_every_setting(started, monkeypatch):
    """The same settings reach both: otherwise the gap would be an error."""
    seen, sampler = [], loop.generate
    monkeypatch.setattr(loop, "generate", lambda *a, **o: seen.append(o) or sampler(*a, **o))
    sampling = Sampling(temperature=0.7, top_k=40, top_p=0.9, min_p=0.01)
    _, metrics = next(started(WITH_KL, sampling=sampling))
    assert metrics["sampler_logp_diff"] < 1e-5
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert sampling._asdict().items() <= seen[0].items()


def test_a_group_of_one_warns_once_where_train_is_called(started):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = kept(started(group_size=1, steps=2))
    caught = [w for w in caught if "group of one" in str(w.message)]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert [m["grad_norm"] for _, m in results] == [0, 0]
    assert [m["frac_zero_variance"] for _, m in results] == [1, 1]


def test_a_failing_reward_ends_the_run_or_is_counted(started):
    calls = []

    def reward(completion):
        calls.append(completion)
        if len(calls) % 3 == 1:
            raise ZeroDivisionError("every third")
        return float(len(calls))

    task = TASK._replace(reward=reward)
    with pytest.raises(RewardError, match="every third"):
        next(started(task=task))
    calls.clear()
    _, metrics = next(started(task=task, on_error="none"))
    assert metrics["unscorable"] == pytest.approx(1 / 3)
    assert sum(c["reward"] is None for c in metrics["completions"]) == P * G / 3


def test_reward_weights_weigh(started):
    def length(completion):
        return len(completion)

    def two(completion):
        return 2.0

    task = TASK._replace(reward=[length, two])
    lengths = lambda metrics: [len(c["completion"]) for c in metrics["completions"]]
    for weights, expected in ((None, lambda n: n + 2), ((1, 0), lambda n: n), ((-0.5, 3), lambda n: 6 - n / 2)):
        _, metrics = next(started(task=task, reward_weights=weights))
        assert [c["reward"] for c in metrics["completions"]] == [expected(n) for n in lengths(metrics)]
    with pytest.raises(ValueError, match="expected 2 finite weights"):
        next(started(task=task, reward_weights=(1,)))


def test_step_rewards_reach_an_objective_that_reads_them(started, monkeypatch):
    """A process reward lies on its tokens, weighted; an objective without them never asks."""
    seen, assemble = [], loop.assemble
    monkeypatch.setattr(loop, "assemble", lambda *a, **fields: seen.append((a, fields)) or assemble(*a, **fields))

    def reward(completion):
        return [(i + 1, float(i)) for i in range(len(completion))] or None

    task = TASK._replace(reward=reward)
    _, metrics = next(started(process_grpo(beta=0.0), task=task, reward_weights=[3.0]))
    (_, rollout, reward_PG), fields = seen.pop()
    assert fields.keys() == {"reward_T"}
    np.testing.assert_allclose(np.nansum(fields["reward_T"], -1), np.nan_to_num(reward_PG))
    assert metrics["grad_norm"] > 0
    written = ~np.isnan(fields["reward_T"])
    np.testing.assert_array_equal(written.sum(-1).ravel(), [len(c["completion"]) for c in metrics["completions"]])
    assert not (written & ~np.asarray(rollout.mask_PGT)).any()
    next(started(PLAIN, task=task))
    assert seen.pop()[1] == {}


def test_entropies_are_computed_for_a_preparation_that_reads_them(started, monkeypatch, params):
    seen, assemble = [], loop.assemble
    monkeypatch.setattr(loop, "assemble", lambda *a, **fields: seen.append((a[1], fields)) or assemble(*a, **fields))
    objective = PLAIN._replace(prepare=partial(high_entropy, fraction=0.2))
    _, metrics = next(started(objective))
    rollout, fields = seen[0]
    _, entropy = loop.score(MODEL, params, rollout, with_entropy=True)
    np.testing.assert_allclose(fields["entropy_T"], entropy, atol=1e-6)
    assert metrics["grad_norm"] > 0


def test_a_critic_serves_an_objective_that_reads_values(started, params):
    objective, critic = reinforce_baseline(), value_network(MODEL)
    saved, metrics = next(started(objective, critic=critic))
    assert saved.state.params.keys() == {"policy", "critic"}
    chex.assert_trees_all_equal_shapes(saved.state.params["policy"], params)
    assert np.any(saved.state.params["critic"]["head"]["Dense_0"]["bias"]), "values start at 0 and learn"
    assert metrics["sampler_logp_diff"] < 1e-5, "the policy that samples is the one that is trained"
    with pytest.raises(ValueError, match="pass a critic"):
        next(started(objective))


def test_an_objective_may_take_several_rewards_apart(started):
    """GDPO standardizes each reward on its own: the scale of one does not matter, that of their sum would."""
    small, large = lambda completion: len(completion), lambda completion: 1000.0 * len(completion)
    task = lambda first: TASK._replace(reward=[first, ascii_share])
    objective = gdpo(beta=0.0)
    one, other = (next(started(objective, task=task(first)))[1] for first in (small, large))
    assert other["reward"] > 100 * one["reward"]
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_epochs_are_updates_and_iterations_stay_iterations(started):
    results = kept(started(steps=3, epochs=2, old_logp="first_epoch"))
    assert [m["iteration"] for _, m in results] == [1, 2, 3]
    assert [int(saved.state.step) for saved, _ in results] == [2, 4, 6]
    rest = kept(started(steps=3, epochs=2, old_logp="first_epoch", saved=RunState(*results[0][0])))
    assert [m["iteration"] for _, m in rest] == [2, 3]
    chex.assert_trees_all_equal(rest[-1][0], results[-1][0])
    assert "learning_rate" not in results[0][1], "this optimiser does not tell its rate"


def test_nothing_is_left_to_do(started, whole):
    assert list(started(WITH_KL, ADAMW, saved=whole[0][-1][0])) == []
    assert list(started(steps=0)) == []


def test_the_callers_parameters_stay_usable(started, params):
    """The state is donated to the update; what was handed in is not."""
    before = jax.tree.map(np.array, params)
    kept(started(WITH_KL, steps=2))
    chex.assert_trees_all_equal(params, before)


class EnoughError(Exception):
    pass


def test_options_arrive_where_they_are_read(started, monkeypatch):
    """Each of them in the train step, the sampler or the trimming, with the value given."""
    made, sampled = {}, {}
    make, sampler = loop.make_train_step, loop.generate

    def recorded(*args, **options):
        made.update(options)
        return make(*args, **options)

    def generate(model, params, prompts, key, first_prompt, **options):
        sampled.update(options, width=prompts.tokens_PS.shape)
        return sampler(model, params, prompts, key, first_prompt, **options)

    def trimmed(rollout, buckets):
        sampled["buckets"] = buckets
        raise EnoughError

    for name, function in (("make_train_step", recorded), ("generate", generate), ("trim", trimmed)):
        monkeypatch.setattr(loop, name, function)
    steps = {"epochs": 2, "microbatches": 2, "group_microbatches": 3, "old_logp": "first_epoch", "chunk": 5}
    with pytest.raises(EnoughError):
        next(
            started(
                prompts_per_step=2, group_size=6, max_new_tokens=5, prompt_length=24, length_buckets=7,
                sampling=Sampling(top_k=3), **steps,
            )
        )  # fmt: skip
    assert (steps | {"sampling": Sampling(top_k=3)}).items() <= made.items()
    expected = {"group_size": 6, "max_new_tokens": 5, "width": (2, 24), "buckets": 7, "top_k": 3, "temperature": 1.0}
    assert expected.items() <= sampled.items()
    assert sampled["stop_ids"] == BYTES.stop_ids


def test_microbatches_change_nothing(started):
    (whole, metrics), (parts, part_metrics) = next(started()), next(started(microbatches=3, group_microbatches=2))
    chex.assert_trees_all_close(parts.state.params, whole.state.params, atol=1e-5)
    assert part_metrics["loss"] == pytest.approx(metrics["loss"], abs=1e-5)


def test_a_width_that_every_prompt_fits():
    task = TASK._replace(held_out=[{"question": "x" * 40}])
    assert prompt_width(TASK, BYTES) == 16
    assert prompt_width(task, BYTES) == 48, "41 tokens, rounded up"
    assert prompt_width(task, BYTES, multiple=1) == 41


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": -1}, "steps must be an integer of at least 0, got -1"),
        ({"prompts_per_step": 0}, "prompts_per_step must be an integer of at least 1"),
        ({"group_size": 2.0}, "group_size must be an integer of at least 1, got 2.0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1"),
        ({"length_buckets": 0}, "length_buckets must be an integer of at least 1"),
        ({"sampling": Sampling(temperature=0.0)}, "temperature must be above 0 in training"),
        ({"sampling": Sampling(min_p=2.0)}, r"min_p must be in \[0, 1\]"),
        ({"task": TASK._replace(train=[])}, "task 'letters' has no training rows"),
        ({"old_logp": "old"}, "old_logp must be one of"),
        ({"microbatches": 2}, "3 prompts × 4 completions cannot be cut into 2 × 1"),
        ({"on_error": "zero"}, "on_error must be"),
        ({"prompt_length": 2}, "tokens, more than the 2 allowed"),
    ],
)
def test_bad_options_are_named(started, wrong, message):
    with pytest.raises(ValueError, match=message):
        next(started(**wrong))


def test_computing_less_changes_cost_only(started):
    """Without padding, without groups that have no gradient, with fewer and fewer sequences: the same run."""

    def sometimes(prompt, completion):
        return 1.0 if prompt[0] in "abcdef" else ascii_share(completion)

    make, seen = loop.make_train_step, []

    def recording(*args, **options):
        step = make(*args, **options)

        def recorded(state, batch):  # as it is traced: once a shape
            seen.append((len(batch.samples.mask_T), batch.rollout.token_index_PN is not None))
            return step(state, batch)

        return recorded

    options = {"task": TASK._replace(reward=sometimes), "microbatches": P}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_train_step", recording)
        *_, (plain, metrics) = kept(started(**options))
        assert set(seen) == {(P, False)}
        seen.clear()
        *_, (less, less_metrics) = kept(
            started(pack_tokens=True, drop_zero_variance=True, compact=1, decode_slots=2, **options)
        )
    assert {packed for _, packed in seen} >= {True}
    assert {size for size, _ in seen} & {1, 2}
    chex.assert_trees_all_close(less.state, plain.state, atol=1e-6, rtol=1e-5)
    for name in ("reward", "loss", "grad_norm", "length"):
        np.testing.assert_allclose(less_metrics[name], metrics[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pack_tokens", [False, True])
def test_devices_compute_what_needs_no_reward_while_the_host_scores(started, pack_tokens):
    order = []

    def per_prompt(function, *kinds, **options):
        program, name = SINGLE.per_prompt(function, *kinds, **options), getattr(function, "func", function).__name__
        return lambda *args: order.append(name) or program(*args)

    def reward(prompt, completion):
        order.append("reward")
        return ascii_share(completion)

    devices, task = SINGLE._replace(per_prompt=per_prompt), TASK._replace(reward=reward)
    next(started(objective=WITH_KL, task=task, devices=devices, pack_tokens=pack_tokens))
    assert list(dict.fromkeys(order)) == ["generate", "score", "reward", "step"]


@pytest.mark.parametrize(
    ("platform", "precision", "dtype", "limit"),
    [
        ("cpu", None, "float32", "0.001 for float32"),
        ("tpu", None, "float32", "0.1 for float32"),
        ("gpu", None, "float32", "0.05 for float32"),
        ("tpu", "highest", "float32", "0.001 for float32"),
        ("gpu", None, "bfloat16", "0.1 for bfloat16"),
    ],
)
def test_the_gap_that_rounding_explains_is_that_of_products(monkeypatch, platform, precision, dtype, limit):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    with jax.default_matmul_precision(precision), pytest.raises(SamplerMismatchError, match=f"limit {limit}"):
        checks.check_gap({"sampler_logp_diff": 0.2}, SimpleNamespace(dtype=dtype))


def test_how_sampling_shrinks_is_checked(started):
    with pytest.raises(ValueError, match="compact must be an integer of at least 0"):
        next(started(compact=-1))
    with pytest.raises(ValueError, match="decode_slots must be None or an integer from 1 to group_size"):
        next(started(decode_slots=0))
