"""The training loop: what order stages have, what each of them may be replaced by, and that it can go on anywhere."""

import inspect
import math
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.inference.critic import value_network
from grpo_jax.inference.generate import generate
from grpo_jax.inference.text import completion_texts, encode
from grpo_jax.objectives import (
    AdaptiveObjective,
    drop_stale,
    ema,
    every,
    grpo,
    never,
    process_grpo,
    reinforce,
    reinforce_baseline,
)
from grpo_jax.objectives.preparations import high_entropy
from grpo_jax.options import Batching, Generation, OptionError, Sampling, Scoring, Update
from grpo_jax.parallel.backends import SINGLE
from grpo_jax.rewards import RewardError
from grpo_jax.training.batch import infer_logp, take_prompts, take_scores
from grpo_jax.training.checks import SamplerMismatchError, check_sampler
from grpo_jax.training.loop import collect, iterate, train
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.rows import row_indices
from grpo_jax.types import Prompts, Rollout, RunState
from toy_run import (
    ADAMW,
    BATCHING,
    BUCKETS,
    BYTES,
    GENERATION,
    MODEL,
    PLAIN,
    SEED,
    SGD,
    STEPS,
    STILL,
    TASK,
    WITH_KL,
    G,
    P,
    T,
    copied,
    kept,
    params,
    run,
    stages_of,
    timeless,
)

from toy import ascii_share, bigram, compilations

OWN = bigram.__wrapped__(stop_share=0.7)  # of no other test: the programs that it compiles are counted
OLDEST = drop_stale(PLAIN, max_age=2)
SLOWLY = partial(ema, decay=0.9)


def texts_of(metrics):
    return [row["completion"] for row in metrics["completions"]]


def questions(position, count=P):
    return [TASK.train[i]["question"] for i in row_indices(position, count, len(TASK.train), SEED)]


def same(rest, expected):
    """Bit for bit, in everything that is yielded but the clock."""
    assert len(rest) == len(expected)
    for (left, left_metrics), (right, right_metrics) in zip(rest, expected, strict=True):
        assert timeless(left_metrics) == timeless(right_metrics)
        chex.assert_trees_all_equal(left, right)


@pytest.fixture(scope="module")
def whole():
    """An uninterrupted run with AdamW and a reference that moves, the names of what it compiled, the lengths it had."""
    lengths = []
    stages = stages_of(WITH_KL, ADAMW, model=OWN)

    def shrink(rollout):
        rollout, host = stages.shrink(rollout)
        lengths.append(rollout.tokens_PGT.shape[-1])
        return rollout, host

    with compilations() as compiled:
        return kept(run(stages._replace(shrink=shrink), update_reference=SLOWLY)), compiled, lengths


def test_metrics_are_complete(whole):
    rollout = {"reward", "reward_std", "frac_zero_variance", "unscorable", "length", "truncated", "tokens"}
    update = {
        "loss",
        "grad_norm",
        "ratio",
        "clip_fraction",
        "zero_advantage",
        "kl",
        "sampler_logp_diff",
        "frac_fresh",
        "learning_rate",
    }
    seconds = {"seconds/sample", "seconds/score", "seconds/update"}
    for number, (_, metrics) in enumerate(whole[0], 1):
        assert metrics["iteration"] == number
        assert rollout | update | seconds | {"completions"} <= metrics.keys()
        numbers = {name: value for name, value in metrics.items() if name != "completions"}
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in numbers.values()), numbers
        assert all(metrics[name] > 0 for name in seconds)
        assert metrics["learning_rate"] == pytest.approx(0.05)
        assert metrics["grad_norm"] > 0
        assert metrics["frac_fresh"] == 1


def test_the_first_ratio_is_exactly_one_and_the_first_kl_exactly_zero(whole):
    """π_old and the reference of the first iteration are the policy itself; every batch is fresh."""
    assert whole[0][0][1]["kl"] == 0
    assert [metrics["ratio"] for _, metrics in whole[0]] == [1.0] * STEPS


def test_completions_are_rows_with_their_rewards(whole):
    """Of the rows that the iteration drew, in groups; their mean is the metric."""
    for state, metrics in whole[0]:
        rows = [TASK.train[i] for i in row_indices(P * (metrics["iteration"] - 1), P, len(TASK.train), SEED)]
        completions = metrics["completions"]
        assert [c["prompt"] for c in completions] == [row["question"] for row in rows for _ in range(G)]
        assert [c["answer"] for c in completions] == [row["answer"] for row in rows for _ in range(G)]
        assert [c["reward"] for c in completions] == [ascii_share(c["completion"]) for c in completions]
        known = [c["reward"] for c in completions if c["reward"] is not None]
        assert metrics["reward"] == pytest.approx(np.mean(known))
        assert metrics["unscorable"] == pytest.approx(1 - len(known) / (P * G))
        groups = [{c["reward"] for c in completions[i : i + G]} - {None} for i in range(0, P * G, G)]
        assert metrics["frac_zero_variance"] == pytest.approx(np.mean([len(group) < 2 for group in groups]))
        assert int(state.train.step) == state.iteration == metrics["iteration"]
        assert state.data == {"position": P * state.iteration}


def test_a_run_compiles_a_stated_number_of_programs(whole):
    """Law: the sampler once, and what follows it once for each bucket of completion lengths that occurred."""
    _, compiled, lengths = whole
    assert set(lengths) == {T // 2, T}, "a run with one length shows nothing"
    counts = {name: compiled.count(name) for name in ("generate", "infer_logp", "assemble", "step")}
    assert counts == {"generate": 1, "infer_logp": BUCKETS, "assemble": BUCKETS, "step": BUCKETS}


def test_the_same_run_again_compiles_only_its_step(whole):
    """`step` belongs to a run; sampling, scoring and assembling are shared by all runs on the same model."""
    with compilations() as compiled:
        next(run(stages_of(WITH_KL, adamw(0.05), model=OWN)))
    assert {name: compiled.count(name) for name in ("generate", "infer_logp", "assemble", "step")} == {
        "generate": 0, "infer_logp": 0, "assemble": 0, "step": 1,
    }  # fmt: skip


def test_train_is_iterate_with_the_usual_stages(whole):
    """From its arguments, and from a state; the reference that had moved is not the one that is handed in."""
    options = {
        "generation": GENERATION, "batching": BATCHING, "seed": SEED, "steps": 3, "update_reference": SLOWLY,
    }  # fmt: skip
    begin = partial(train, OWN, params(), TASK, BYTES, WITH_KL, ADAMW, **options)
    results = kept(begin())
    same(results, whole[0][:3])
    same(kept(begin(state=copied(results[0][0]), reference=params())), results[1:])


# The order of stages, and one of one's own in place of each.


def recording(stages, order):
    def recorded(name, stage):
        return lambda *args, **options: order.append(name) or stage(*args, **options)

    functions = {
        name: stage for name, stage in stages._asdict().items() if name not in ("objective", "old_logp", "start")
    }
    return stages._replace(**{name: recorded(name, stage) for name, stage in functions.items()})


def test_stages_come_in_their_order():
    order = []
    stages = stages_of(WITH_KL, STILL)._replace(teach=lambda weights, rollout, host, scores: {})
    kept(run(recording(stages, order), steps=2))
    sample = ["publish", "prompts", "generate"]
    learn = ["shrink", "infer", "reward", "teach", "observe", "assemble", "update", "policy"]
    assert order == [*sample, *learn] * 2


def test_what_is_sampled_ahead_is_published_once():
    """Two batches before the first update, then one before each, as long as there are iterations to come."""
    order = []
    kept(run(recording(stages_of(PLAIN, STILL)._replace(teach=lambda *_: {}), order), steps=3, max_staleness=1))
    learn = ["shrink", "infer", "reward", "teach", "observe", "assemble", "update", "policy"]
    ahead = ["publish", "prompts", "generate", "prompts", "generate"]
    assert order == [*ahead, *learn, "publish", "prompts", "generate", *learn, *learn]


def first(stages, **options):
    (found,) = kept(run(stages, steps=1, **options))
    return found


@pytest.fixture(scope="module")
def plain():
    """Stages that every test of a stub starts from, and what their first iteration is."""
    stages = stages_of(WITH_KL)
    return stages, first(stages)


def test_other_prompts(plain):
    stages, _ = plain

    def one_row(data):
        prompts, row_P, data = stages.prompts(data)
        everywhere = lambda x: jnp.repeat(x[:1], P, axis=0)
        return jax.tree.map(everywhere, prompts), everywhere(row_P), data

    state, metrics = first(stages._replace(prompts=one_row))
    assert [row["prompt"] for row in metrics["completions"]] == questions(0, 1) * P * G
    assert len(set(texts_of(metrics))) > G, "each prompt has noise of its own"
    assert state.data == {"position": P}


def test_other_weights_for_the_sampler_are_noticed(plain):
    stages, (_, expected) = plain
    same_again = stages._replace(publish=lambda weights: jax.tree.map(jnp.copy, weights.params))
    assert timeless(first(same_again)[1]) == timeless(expected)
    others = stages._replace(publish=lambda weights: jax.tree.map(lambda x: 0.9 * x, weights.params))
    with pytest.raises(SamplerMismatchError):
        first(others)


def test_a_sampler_of_another_temperature_is_an_error_unless_it_says_so(plain):
    """The log-probabilities that it returns are those of the distribution that is trained."""
    stages, _ = plain
    cold = stages_of(WITH_KL, generation=GENERATION._replace(sampling=Sampling(0.8))).generate
    with pytest.raises(SamplerMismatchError, match=r"differ from the sampler's by 0\.\d+ a token on average"):
        first(stages._replace(generate=cold))

    def told(served, prompts, key):
        rollout = cold(served, prompts, key)
        return rollout._replace(logp_PGT=infer_logp(MODEL, served, rollout)[0])

    _, metrics = first(stages._replace(generate=told))
    assert metrics["sampler_logp_diff"] < 1e-5


def test_a_batch_that_is_never_trimmed(plain):
    stages, (_, expected) = plain
    untrimmed = stages_of(WITH_KL, batching=BATCHING._replace(length_buckets=1)).shrink
    _, metrics = first(stages._replace(shrink=untrimmed))
    assert texts_of(metrics) == texts_of(expected)
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


def test_another_reference_policy(plain):
    stages, _ = plain

    def infer(weights, rollout):
        return {"ref_logp_T": stages.infer(weights, rollout)["ref_logp_T"] - 0.5 * rollout.mask_PGT}

    _, metrics = first(stages._replace(infer=infer))
    assert metrics["kl"] == pytest.approx(np.expm1(-0.5) + 0.5, rel=1e-4)


def test_another_reward(plain):
    stages, _ = plain

    def reward(host):
        length_PG = host.mask_PGT.sum(-1).astype(float)
        return stages.reward(host)._replace(reward_PG=length_PG, reward_PGN=length_PG[..., None])

    _, metrics = first(stages._replace(reward=reward))
    assert metrics["reward"] == metrics["length"]
    assert metrics["unscorable"] == 0


def test_a_teacher_adds_fields_once_rewards_are_known(plain):
    """Here it takes the weight of every completion but those of the highest reward."""
    stages, _ = plain
    seen = []

    def teach(weights, rollout, host, scores):
        best = scores.reward_PG == np.nanmax(scores.reward_PG, axis=1, keepdims=True)
        seen.append(best.mean())
        return {"weight_T": jnp.where(best[..., None], 1.0, 0.0) * rollout.mask_PGT}

    _, metrics = first(stages._replace(teach=teach))
    assert 0 < seen[0] < 1
    assert metrics["grad_norm"] > 0
    assert metrics["grad_norm"] != plain[1][1]["grad_norm"]
    _, metrics = first(stages._replace(teach=lambda w, rollout, *_: {"weight_T": jnp.zeros(rollout.mask_PGT.shape)}))
    assert metrics["grad_norm"] == pytest.approx(0, abs=1e-6)


def test_another_batch_for_the_update(plain):
    stages, (_, expected) = plain

    def assembled(*args):
        batch = stages.assemble(*args)
        return batch._replace(samples=batch.samples._replace(adv=2 * batch.samples.adv))

    _, metrics = first(stages._replace(assemble=assembled))
    assert metrics["grad_norm"] == pytest.approx(2 * expected["grad_norm"], rel=1e-4), "the KL has none at first"


def test_what_is_observed_is_data_and_reaches_the_next_prompts():
    stages = stages_of(PLAIN, STILL)
    seen = []

    def observe(data, host, scores):
        return data | {"rewards": np.append(data.get("rewards", []), np.nanmean(scores.reward_PG))}

    def prompts(data):
        seen.append(len(data.get("rewards", [])))
        return stages.prompts(data)

    results = kept(run(stages._replace(observe=observe, prompts=prompts), steps=3))
    np.testing.assert_allclose(results[-1][0].data["rewards"], [metrics["reward"] for _, metrics in results])
    assert seen == [0, 1, 2]


def test_another_update(plain):
    stages, _ = plain

    def frozen(train, weights, batch, state=None):
        return train._replace(step=train.step + 1), state, {"loss": 0.0, "groups": float(len(batch.samples.adv))}

    state, metrics = first(stages._replace(update=frozen))
    chex.assert_trees_all_equal(state.train.params, params())
    assert metrics["groups"] == P
    assert "grad_norm" not in metrics


def test_another_policy_is_what_references_follow(plain):
    stages, _ = plain
    halved = lambda params: jax.tree.map(lambda x: 0.5 * x, params)
    state, _ = first(stages._replace(policy=halved), update_reference=lambda iteration, params, reference: params)
    chex.assert_trees_all_close(state.reference, halved(state.train.params))


def test_another_beginning(plain):
    stages, _ = plain

    def start(params, reference=None):
        return stages.start(params, reference)._replace(data={"position": np.int64(4)})

    state, metrics = first(stages._replace(start=start))
    assert [row["prompt"] for row in metrics["completions"]][::G] == questions(4)
    assert state.data == {"position": 4 + P}


# Programs of one's own: a sampler, dynamic sampling, replay.


def beginning_with(token: int):
    """A sampler whose completions all begin with the token."""
    generation = Generation(G, T - 1)
    options = {"stop_ids": BYTES.stop_ids, "pad_id": BYTES.pad_id}

    def sample(served, prompts, key):
        begun = Prompts(
            jnp.pad(prompts.tokens_PS, ((0, 0), (0, 1)), constant_values=token),
            jnp.pad(prompts.mask_PS, ((0, 0), (0, 1)), constant_values=True),
        )
        rest = generate(MODEL, served, begun, key, generation=generation, **options)
        behind = lambda x, value: jnp.pad(x, ((0, 0), (0, 0), (1, 0)), constant_values=value)
        tokens, mask = behind(rest.tokens_PGT, token), behind(rest.mask_PGT, True)
        rollout = Rollout(prompts, tokens, mask, behind(rest.logp_PGT, 0.0), rest.stopped_PG)
        # What a policy is trained on has its own log-probabilities, however it came about.
        return rollout._replace(logp_PGT=infer_logp(MODEL, served, rollout)[0])

    return SINGLE.per_prompt(sample, ("decode", "prompts", "whole"), "rows")


def dynamic_sampling(stages, weights, rollout, more, data, *, rounds=8):
    """Groups without spread give way to those of other prompts, sampled in at most so many rounds (DAPO)."""

    def scored(rollout):
        _, host = stages.shrink(rollout)
        return stages.reward(host)

    def has_spread(scores):
        return np.nanmax(scores.reward_PG, axis=1) > np.nanmin(scores.reward_PG, axis=1)

    rollouts, scores = [rollout], [scored(rollout)]
    useful = has_spread(scores[0])
    size = len(useful)
    while useful.sum() < size and len(rollouts) <= rounds:
        rollout, data = more(data)
        rollouts.append(rollout)
        scores.append(scored(rollout))
        useful = np.append(useful, has_spread(scores[-1]))
    index = np.argsort(~useful, kind="stable")[:size]  # those with spread, in the order of sampling
    batch, known = take_prompts(rollouts, index), take_scores(scores, index)
    return collect(stages, weights, batch, more, data, scores=known)


def replay(stages, weights, rollout, more, data):
    """The last prompt of every batch is an old group: of all batches so far, the one of the most spread."""
    size = len(rollout.row_P)
    if "memory" in data:
        old = jax.tree.unflatten(jax.tree.structure(rollout), data["memory"])
        rollout = take_prompts([rollout, old], [*range(size - 1), size])
    found, data = collect(stages, weights, rollout, more, data)
    spread_P = np.nan_to_num(np.nanstd(found.scores.reward_PG, axis=1))
    best = take_prompts([rollout], [spread_P.argmax()])
    return found, data | {"memory": jax.tree.leaves(best)}


@pytest.mark.parametrize("program", [beginning_with, dynamic_sampling, replay], ids=lambda program: program.__name__)
def test_a_program_of_ones_own_is_short(program):
    lines = inspect.getsource(program).splitlines()
    assert len(lines) - 2 <= 25, "but for its name and what it says of itself"


def test_a_sampler_of_ones_own():
    stages = stages_of(PLAIN)._replace(generate=beginning_with(ord("a")))
    norms, texts = [], set()
    for number, (state, metrics) in enumerate(run(stages, steps=3), 1):
        assert {text[0] for text in texts_of(metrics)} == {"a"}
        assert metrics["sampler_logp_diff"] < 1e-5
        assert (metrics["ratio"], metrics["frac_fresh"]) == (1.0, 1.0)
        assert int(state.train.step) == number
        norms.append(metrics["grad_norm"])
        texts.update(texts_of(metrics))
    assert max(norms) > 0
    assert len(texts) > 1


def letter_by_letter(prompt, completion):
    """No spread in most groups."""
    return ascii_share(completion) if prompt[0] in "ab" else 1.0


def test_dynamic_sampling_fills_a_batch_with_groups_that_have_spread():
    stages = stages_of(PLAIN, task=TASK._replace(reward=letter_by_letter))
    _, usual = first(stages)
    assert usual["frac_zero_variance"] > 0
    results = kept(run(stages, steps=3, collect=dynamic_sampling))
    consumed = [int(state.data["position"]) for state, _ in results]
    assert all(np.diff([0, *consumed]) % P == 0)
    assert consumed[-1] > 3 * P, "other prompts were sampled"
    for _, metrics in results:
        assert metrics["frac_zero_variance"] == 0
        assert metrics["frac_fresh"] == 1
        assert metrics["sampler_logp_diff"] < 1e-5
        assert len(metrics["completions"]) == P * G
        assert {row["prompt"][0] for row in metrics["completions"]} <= set("ab")
        for row in metrics["completions"]:
            assert row["reward"] == ascii_share(row["completion"])
    texts = [tuple(texts_of(metrics)) for _, metrics in results]
    assert len(set(texts)) == 3
    same(kept(run(stages, results[0][0], steps=3, collect=dynamic_sampling)), results[1:])


def test_dynamic_sampling_scores_nothing_twice_and_ends():
    scored = []

    def reward(completion):
        scored.append(completion)
        return 1.0

    stages = stages_of(PLAIN, task=TASK._replace(reward=reward))
    state, metrics = first(stages, collect=partial(dynamic_sampling, rounds=2))
    assert metrics["frac_zero_variance"] == 1
    assert state.data["position"] == 3 * P
    assert len(scored) == 3 * P * G
    assert [row["prompt"] for row in metrics["completions"]][::G] == questions(0), "then the first ones stay"
    batches = [tuple(scored[i : i + P * G]) for i in range(0, len(scored), P * G)]
    assert len(set(batches)) == 3, "every round has noise of its own"


@pytest.fixture(scope="module")
def replayed():
    return kept(run(stages_of(OLDEST), collect=replay))


def test_replay_puts_old_groups_into_new_batches(replayed):
    """They keep the row and the updates of the policy that sampled them, so that age and ratio are theirs."""
    seen = []
    stages = stages_of(OLDEST)

    def infer(weights, rollout):
        fields = stages.infer(weights, rollout)
        seen.append((int(weights.step), np.asarray(rollout.update_P), np.asarray(fields["age"])))
        return fields

    results = kept(run(stages._replace(infer=infer), collect=replay))
    same(results, replayed)
    assert (seen[0][1] == 0).all()
    for (before, _), (step, update_P, age_PG) in zip(results[:-1], seen[1:], strict=True):
        *_, marked_P = before.data["memory"]
        assert (update_P[:-1] == step).all()
        assert update_P[-1] == marked_P[0] < step
        np.testing.assert_array_equal(age_PG, np.repeat(step - update_P, G).reshape(P, G))
    for (before, _), (_, after) in pairwise(results):
        *_, row_P, _ = before.data["memory"]
        assert after["completions"][-1]["prompt"] == TASK.train[int(row_P[0])]["question"]
        assert 0 < after["frac_fresh"] < 1
        assert after["ratio"] != 1.0, "that of the old group is to the policy that sampled it"
        assert after["sampler_logp_diff"] < 1e-5, "over fresh tokens alone"


@pytest.mark.parametrize("at", range(1, STEPS))
def test_replay_goes_on_bit_for_bit(replayed, at):
    """The memory is a part of the state, and may have been on disk."""
    stages = stages_of(OLDEST)
    state = replayed[at - 1][0]
    same(kept(run(stages, state, collect=replay)), replayed[at:])
    restored = state._replace(data=jax.tree.map(np.asarray, state.data))
    same(kept(run(stages, restored, collect=replay)), replayed[at:])


# Going on where a run was interrupted.


@pytest.mark.parametrize("at", range(STEPS))
def test_continuing_equals_never_stopping(whole, at):
    """Law: bit for bit, in parameters, optimiser, moving reference, data and every metric but the clock."""
    results = whole[0]
    stages = stages_of(WITH_KL, ADAMW, model=OWN)
    state = results[at - 1][0] if at else None
    same(kept(run(stages, state, update_reference=SLOWLY)), results[at:])


@pytest.fixture(scope="module")
def ahead():
    """A run whose data is two iterations old."""
    return kept(run(stages_of(WITH_KL, ADAMW, model=OWN), max_staleness=2, update_reference=SLOWLY))


@pytest.mark.parametrize("at", range(STEPS))
def test_continuing_with_stale_data_equals_never_stopping(ahead, at):
    """The queue too, which is as long as there are iterations to come."""
    stages = stages_of(WITH_KL, ADAMW, model=OWN)
    state = ahead[at - 1][0] if at else None
    assert not at or len(state.queue) == min(2, STEPS - at)
    same(kept(run(stages, state, max_staleness=2, update_reference=SLOWLY)), ahead[at:])


def test_stale_data_comes_from_the_policy_of_as_many_iterations_ago(ahead):
    """Iteration i is drawn by the policy before iteration i − 2 (the first by the first): by hand, the same texts."""
    policies = [params(), *(state.train.params for state, _ in ahead)]
    for number, (state, metrics) in enumerate(ahead):
        rows = [TASK.train[i] for i in row_indices(P * number, P, len(TASK.train), SEED)]
        prompts = encode(BYTES, TASK.prompt, rows, length=16)
        drawn = generate(
            MODEL, policies[max(0, number - 2)], prompts, jax.random.fold_in(state.key, number), generation=GENERATION,
            stop_ids=BYTES.stop_ids, pad_id=BYTES.pad_id,
        )  # fmt: skip
        assert texts_of(metrics) == [text for group in completion_texts(BYTES, drawn) for text in group]
        assert (abs(metrics["ratio"] - 1) > 1e-5) == (number > 0), "the ratio is to the policy that sampled"
        assert metrics["frac_fresh"] == (number == 0)
        assert ("sampler_logp_diff" in metrics) == (number == 0)
        for place, rollout in enumerate(state.queue, 1):
            np.testing.assert_array_equal(rollout.update_P, max(0, number + place - 2))
            np.testing.assert_array_equal(rollout.row_P, row_indices(P * (number + place), P, len(TASK.train), SEED))


def ages_seen(stages):
    """Stages that note the ages of every batch."""
    seen = []

    def infer(weights, rollout):
        fields = stages.infer(weights, rollout)
        seen.append(sorted(set(np.asarray(fields["age"]).ravel().tolist())))
        return fields

    return stages._replace(infer=infer), seen


def test_an_objective_sees_the_age_in_updates():
    """Two epochs an iteration: the second iteration is two updates old, those behind it four."""
    stages, seen = ages_seen(stages_of(OLDEST, update=Update(epochs=2)))
    norms = [metrics["grad_norm"] for _, metrics in run(stages, steps=4, max_staleness=2)]
    assert seen == [[0], [2], [4], [4]]
    assert [norm > 0 for norm in norms] == [True, True, False, False]


def test_the_age_is_right_where_a_run_goes_on_with_other_epochs():
    """What waits in the queue says itself how many updates its policy had behind it."""
    *_, (state, _) = kept(run(stages_of(OLDEST), steps=6, max_staleness=2))[:2]
    assert [int(rollout.update_P[0]) for rollout in state.queue] == [0, 1]
    stages, seen = ages_seen(stages_of(OLDEST, update=Update(epochs=3)))
    results = kept(run(stages, state, steps=6, max_staleness=2))
    # Iterations 3 to 6 begin after 2, 5, 8 and 11 updates; their policies had 0, 1, 2 and 5.
    assert seen == [[2], [4], [6], [6]]
    assert [int(state.train.step) for state, _ in results] == [5, 8, 11, 14]


def test_the_age_is_right_where_a_run_is_made_longer():
    """It had sampled ahead no further than its end: the next batches are of the policy that it ended with."""
    *_, (state, _) = kept(run(stages_of(OLDEST), steps=3, max_staleness=2))
    assert state.queue == ()
    stages, seen = ages_seen(stages_of(OLDEST))
    kept(run(stages, state, steps=7, max_staleness=2))
    assert seen == [[0], [1], [2], [2]]


def test_less_staleness_uses_up_what_was_sampled():
    *_, (state, _) = kept(run(stages_of(OLDEST), steps=6, max_staleness=2))[:2]
    stages, seen = ages_seen(stages_of(OLDEST))
    kept(run(stages, state, steps=6))
    assert seen == [[2], [2], [0], [0]]


@pytest.mark.parametrize(
    ("objective", "options", "message"),
    [
        (PLAIN, {"max_staleness": -1}, "max_staleness must be an integer of at least 0, got -1"),
        (reinforce(beta=0.0), {"max_staleness": 1}, "max_staleness=1 needs an objective with a ratio"),
        (PLAIN, {"steps": -1}, "steps must be an integer of at least 0, got -1"),
    ],
)
def test_what_the_loop_refuses_it_refuses_at_once(objective, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        run(stages_of(objective), **options)


def test_a_state_is_a_run_state_with_what_the_objective_reads():
    state = stages_of(PLAIN).start(params())
    with pytest.raises(TypeError, match=r"state must be a RunState, as stages\.start\(params\) gives"):
        iterate(stages_of(), state.train, steps=1)
    options = {"generation": GENERATION, "batching": BATCHING, "steps": 1}
    begin = partial(train, MODEL, params(), TASK, BYTES, WITH_KL, SGD, **options)
    with pytest.raises(ValueError, match="reads a reference policy and the state has none"):
        begin(state=state)
    with pytest.raises(TypeError, match="state must be a RunState, as train yields, got TrainState"):
        begin(state=state.train)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": -1}, "steps must be an integer of at least 0, got -1"),
        ({"steps": True}, "steps must be an integer of at least 0, got True"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"max_staleness": 0.5}, "max_staleness must be an integer of at least 0, got 0.5"),
        ({"update": Update(epochs=0)}, "epochs must be an integer of at least 1"),
        ({"batching": Batching(0)}, "prompts_per_step must be an integer of at least 1"),
        ({"scoring": Scoring((1, 2))}, "weights must be 1 finite weights"),
        ({"generation": Generation(G, T, Sampling(0.0))}, "temperature must be above 0 in training"),
    ],
)
def test_bad_options_are_named_where_train_is_called(wrong, message):
    """Before anything is sampled."""
    options = {"steps": 1, "generation": GENERATION, "batching": BATCHING} | wrong
    with pytest.raises(OptionError, match=f"^{message}"):
        train(MODEL, params(), TASK, BYTES, PLAIN, SGD, **options)


# References.


def test_a_moving_reference_is_part_of_the_state(whole):
    reference = params()
    for state, _ in whole[0]:
        reference = ema(0, state.train.params, reference, decay=0.9)
        chex.assert_trees_all_close(state.reference, reference, atol=1e-6)


def test_a_fixed_reference_is_part_of_the_state_where_it_is_read():
    (state, _), *_ = kept(run(stages_of(WITH_KL)))
    chex.assert_trees_all_equal(state.reference, params())
    for update_reference in (None, never):
        state, metrics = first(stages_of(PLAIN), update_reference=update_reference)
        assert state.reference is None
        assert "kl" not in metrics


def test_references_move_as_they_are_told():
    """The KL to a policy just copied is 0, to one left behind it is not; iterations are counted from 1."""
    kl = {}
    for name, update in {
        "never": never,
        "always": lambda iteration, params, reference: params,
        "second": lambda iteration, params, reference: params if iteration % 2 == 0 else reference,
        "interval": partial(every, interval=2),
        "fixed": None,
    }.items():
        kl[name] = [metrics["kl"] for _, metrics in run(stages_of(WITH_KL), steps=4, update_reference=update)]
        assert kl[name][0] == 0
    assert min(kl["fixed"][1:]) > 5e-5
    assert kl["never"] == kl["fixed"]
    assert kl["always"] == [0] * 4
    np.testing.assert_allclose(kl["second"], kl["interval"], atol=1e-6)
    assert [value > 5e-5 for value in kl["interval"]] == [False, True, False, True]


def test_a_reference_of_ones_own_is_used():
    other = params() | {"bias": params()["bias"] + jnp.linspace(0, 3, len(params()["bias"]))}
    state, metrics = first(stages_of(WITH_KL), reference=other)
    assert metrics["kl"] > 1e-2
    chex.assert_trees_all_equal(state.reference, other)


# What an iteration is made of.


def test_new_noise_in_every_iteration():
    """One row, parameters that do not move: only the noise can make the completions differ."""
    task = TASK._replace(train=TASK.train[:1])

    def texts(**options):
        return [tuple(texts_of(metrics)) for _, metrics in run(stages_of(PLAIN, STILL, task, **options), steps=3)]

    assert len(set(texts())) == 3
    assert texts() == texts()
    assert not set(texts(seed=6)) & set(texts())
    assert not set(texts(seed=SEED + 2**32)) & set(texts())


def test_sampler_and_trainer_agree_under_every_setting():
    """The same settings reach both: otherwise the difference would be an error."""
    sampling = Sampling(temperature=0.7, top_k=40, top_p=0.9, min_p=0.01)
    _, metrics = first(stages_of(WITH_KL, generation=Generation(G, T, sampling)))
    assert metrics["sampler_logp_diff"] < 1e-5
    assert metrics["kl"] == 0
    assert metrics["ratio"] == 1


def test_a_group_of_one_has_no_spread():
    results = kept(run(stages_of(generation=Generation(1, T)), steps=2))
    assert [metrics["grad_norm"] for _, metrics in results] == [0, 0]
    assert [metrics["frac_zero_variance"] for _, metrics in results] == [1, 1]


def test_a_failing_reward_ends_the_run_or_is_counted():
    calls = []

    def reward(completion):
        calls.append(completion)
        if len(calls) % 3 == 1:
            raise ZeroDivisionError("every third")
        return float(len(calls))

    task = TASK._replace(reward=reward)
    with pytest.raises(RewardError, match="every third"):
        first(stages_of(task=task))
    calls.clear()
    _, metrics = first(stages_of(task=task, scoring=Scoring(on_error="skip")))
    assert metrics["unscorable"] == pytest.approx(1 / 3)
    assert sum(row["reward"] is None for row in metrics["completions"]) == P * G / 3


def test_several_rewards_are_weighed_and_told_apart():
    def length(completion):
        return len(completion)

    def two(completion):
        return 2.0

    _, metrics = first(stages_of(task=TASK._replace(reward=[length, two]), scoring=Scoring((-0.5, 3))))
    lengths = [len(text) for text in texts_of(metrics)]
    assert [row["reward"] for row in metrics["completions"]] == [6 - n / 2 for n in lengths]
    assert [row["rewards"] for row in metrics["completions"]] == [{"length": n, "two": 2.0} for n in lengths]
    told = {
        "rewards/length/mean": np.mean(lengths), "rewards/length/std": np.std(lengths), "rewards/length/weight": -0.5,
        "rewards/two/mean": 2.0, "rewards/two/std": 0.0, "rewards/two/weight": 3.0,
    }  # fmt: skip
    assert {name: metrics[name] for name in told} == pytest.approx(told)


def test_step_rewards_reach_an_objective_that_reads_them():
    def reward(completion):
        return [(i + 1, float(i)) for i in range(len(completion))] or None

    task = TASK._replace(reward=reward)
    _, metrics = first(stages_of(process_grpo(beta=0.0), task=task))
    assert metrics["grad_norm"] > 0


def test_entropies_are_computed_for_a_preparation_that_reads_them():
    _, metrics = first(stages_of(PLAIN._replace(prepare=partial(high_entropy, fraction=0.2))))
    assert metrics["grad_norm"] > 0


def test_a_critic_serves_an_objective_that_reads_values():
    state, metrics = first(stages_of(reinforce_baseline(), critic=value_network(MODEL)))
    assert state.train.params.keys() == {"policy", "critic"}
    chex.assert_trees_all_equal_shapes(state.train.params["policy"], params())
    assert np.any(state.train.params["critic"]["head"]["Dense_0"]["bias"]), "values start at 0 and learn"
    assert metrics["sampler_logp_diff"] < 1e-5, "the policy that samples is the one that is trained"


def test_an_adaptive_objective_moves_and_compiles_nothing_anew():
    """β doubles with every iteration: the loss is that of the objective with each of them, in one program."""
    doubled = lambda beta, metrics: beta * (2 if metrics["kl"] > 0 else 1)
    adaptive = AdaptiveObjective(lambda: jnp.float32(0.1), lambda beta: grpo(beta=beta), doubled)
    stages = stages_of(adaptive, batching=BATCHING._replace(length_buckets=1))
    with compilations() as compiled:
        results = kept(run(stages, steps=4))
    assert compiled.count("step") == 1
    assert [float(state.objective) for state, _ in results] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    same(kept(run(stages, results[1][0], steps=4)), results[2:])
    fixed, _ = first(stages_of(WITH_KL))
    chex.assert_trees_all_close(results[0][0].train.params, fixed.train.params, atol=1e-6)


def test_epochs_are_updates_and_iterations_stay_iterations():
    stages = stages_of(update=Update(epochs=2))
    results = kept(run(stages, steps=3))
    assert [metrics["iteration"] for _, metrics in results] == [1, 2, 3]
    assert [int(state.train.step) for state, _ in results] == [2, 4, 6]
    rest = kept(run(stages, results[0][0], steps=3))
    assert [metrics["iteration"] for _, metrics in rest] == [2, 3]
    same(rest, results[1:])
    assert "learning_rate" not in results[0][1], "this optimiser does not tell its rate"


def test_an_optimiser_may_be_a_function_of_the_updates_of_the_run():
    seen = []

    def optimizer(total_updates):
        seen.append(total_updates)
        return SGD

    options = {"generation": GENERATION, "batching": BATCHING, "steps": 3, "update": Update(epochs=2)}
    train(MODEL, params(), TASK, BYTES, PLAIN, optimizer, **options)
    assert seen == [6]


def test_nothing_is_left_to_do(whole):
    assert list(run(stages_of(WITH_KL, ADAMW, model=OWN), whole[0][-1][0])) == []
    assert list(run(steps=0)) == []


def test_the_callers_parameters_stay_usable():
    """The state is donated to the update; what was handed in is not."""
    before = jax.tree.map(np.array, params())
    kept(run(stages_of(WITH_KL), steps=2))
    chex.assert_trees_all_equal(params(), before)


def test_microbatches_change_nothing(plain):
    _, (state, metrics) = plain
    parts, part_metrics = first(stages_of(WITH_KL, update=Update(1, 3, 2)))
    chex.assert_trees_all_close(parts.train.params, state.train.params, atol=1e-5)
    assert part_metrics["loss"] == pytest.approx(metrics["loss"], abs=1e-5)


def test_computing_less_changes_cost_only():
    """Without padding, without groups that have no gradient, with fewer and fewer sequences: the same run."""
    seen = []

    def noted(stages):
        def update(train, weights, batch, state=None):
            seen.append((len(batch.samples.mask_T), batch.rollout.token_index_PN is not None))
            return stages.update(train, weights, batch, state)

        return stages._replace(update=update)

    options = {"task": TASK._replace(reward=letter_by_letter), "update": Update(microbatches=P)}
    *_, (plain, metrics) = kept(run(noted(stages_of(**options))))
    assert set(seen) == {(P, False)}
    seen.clear()
    fewer = {
        "generation": GENERATION._replace(compactions=1, decode_slots=2),
        "batching": BATCHING._replace(pack_tokens=True, drop_zero_variance=True),
    }
    *_, (less, less_metrics) = kept(run(noted(stages_of(**options, **fewer))))
    assert {packed for _, packed in seen} >= {True}
    assert {size for size, _ in seen} & {1, 2}
    chex.assert_trees_all_close(less.train, plain.train, atol=1e-6, rtol=1e-5)
    for name in ("reward", "loss", "grad_norm", "length"):
        np.testing.assert_allclose(less_metrics[name], metrics[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pack_tokens", [False, True])
def test_devices_compute_what_needs_no_reward_while_the_host_scores(pack_tokens):
    order = []

    def per_prompt(function, *kinds, **options):
        program = SINGLE.per_prompt(function, *kinds, **options)
        name = getattr(function, "func", function).__name__
        return lambda *args: order.append(name) or program(*args)

    def reward(prompt, completion):
        order.append("reward")
        return ascii_share(completion)

    devices = SINGLE._replace(per_prompt=per_prompt)
    batching = BATCHING._replace(pack_tokens=pack_tokens)
    first(stages_of(WITH_KL, task=TASK._replace(reward=reward), devices=devices, batching=batching))
    assert list(dict.fromkeys(order)) == ["generate", "infer_logp", "reward", "step"]


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
def test_the_difference_that_rounding_explains_is_that_of_products(monkeypatch, platform, precision, dtype, limit):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    with jax.default_matmul_precision(precision), pytest.raises(SamplerMismatchError, match=f"limit {limit}"):
        check_sampler({"sampler_logp_diff": 0.2}, SimpleNamespace(dtype=dtype))


def test_not_a_number_is_no_agreement():
    with pytest.raises(SamplerMismatchError):
        check_sampler({"sampler_logp_diff": float("nan"), "frac_fresh": 0.5}, SimpleNamespace(dtype="float32"))


def test_noise_does_not_depend_on_jaxs_default_generator(whole):
    jax.config.update("jax_default_prng_impl", "rbg")
    try:
        results = kept(run(stages_of(WITH_KL, ADAMW, model=OWN), steps=1, update_reference=SLOWLY))
    finally:
        jax.config.update("jax_default_prng_impl", "threefry2x32")
    same(results, whole[0][:1])


def test_what_is_yielded_is_a_run_state(whole):
    state = whole[0][0][0]
    assert type(state) is RunState
    assert state._fields == ("iteration", "train", "key", "reference", "queue", "data", "objective")
    assert state.queue == ()
