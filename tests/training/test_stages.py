"""Each stage of an iteration by itself: what it returns, and that it is exact."""

from functools import partial

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
    gdpo,
    grpo,
    kl_in_reward,
    process_grpo,
    reinforce_baseline,
    standardize,
    truncated_is,
)
from grpo_jax.objectives.preparations import high_entropy
from grpo_jax.options import Batching, Generation, OptionError, Sampling, Scoring, Update
from grpo_jax.parallel.backends import SINGLE
from grpo_jax.parallel.programs import listed, shapes_of
from grpo_jax.rewards import RewardError
from grpo_jax.training.batch import HostRollout, assemble, cut, infer_logp, rollout_shapes
from grpo_jax.training.checks import SamplerMismatchError
from grpo_jax.training.packing import pack
from grpo_jax.training.programs import programs
from grpo_jax.training.rows import prompt_width, row_indices
from grpo_jax.training.stages import make_stages
from grpo_jax.training.start import root_key
from grpo_jax.training.train_step import init_state, make_train_step
from grpo_jax.types import Weights
from hypothesis import given, settings
from hypothesis import strategies as st
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
    STILL,
    TASK,
    WITH_KL,
    G,
    P,
    T,
    params,
    stages_of,
)

from toy import ascii_share, compilations


@pytest.fixture(scope="module")
def stages():
    return stages_of(WITH_KL)


@pytest.fixture(scope="module")
def weights():
    return Weights(params(), jnp.int32(0), params())


@pytest.fixture(scope="module")
def drawn(stages, weights):
    """The first batch, as the loop marks it."""
    prompts, row_P, _ = stages.prompts({"position": np.int64(0)})
    rollout = stages.generate(stages.publish(weights), prompts, jax.random.key(3))
    return rollout._replace(row_P=row_P, update_P=jnp.zeros(P, jnp.int32))


@pytest.fixture(scope="module")
def short(stages, drawn):
    """The batch and what the host sees of it, once it is trimmed."""
    return stages.shrink(drawn)


@pytest.fixture(scope="module")
def scores(stages, short):
    return stages.reward(short[1])


# What begins a run, and which rows come when.


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 12), size=st.integers(1, 30), seed=st.integers(0, 2**70))
def test_every_epoch_is_a_permutation(count, size, seed):
    """Law: cut the endless sequence of rows into epochs: each holds every row once, wherever iterations end."""
    iterations = range(-(-3 * count // size))
    seen = np.concatenate([row_indices(i * size, size, count, seed) for i in iterations])
    for epoch in range(3):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))


@settings(max_examples=30, deadline=None)
@given(position=st.integers(0, 50), first=st.integers(1, 9), second=st.integers(1, 9), count=st.integers(1, 12))
def test_rows_depend_on_their_place_alone(position, first, second, count):
    """Law: cut where you like, the sequence is the same."""
    whole = row_indices(position, first + second, count, 3)
    parts = row_indices(position, first, count, 3), row_indices(position + first, second, count, 3)
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    assert whole.dtype == np.int32


def test_rows_are_a_function_of_place_and_seed():
    rows = lambda position, seed: row_indices(position, 50, 50, seed).tolist()
    assert rows(350, 3) == rows(350, 3)
    assert rows(350, 3) != rows(350, 4)
    epochs = [rows(50 * e, 3) for e in range(3)]
    assert len(set(map(tuple, epochs))) == 3, "a new order in every epoch"
    assert list(range(50)) not in epochs


SEEDS = (0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**33, 2**64, 2**64 + 1, 2**64 + 2**32, 2**96 + 1)


def test_seeds_of_any_length_do_not_collide():
    keys = {seed: tuple(jax.random.key_data(root_key(seed)).tolist()) for seed in SEEDS}
    assert len(set(keys.values())) == len(SEEDS)
    orders = {tuple(row_indices(0, 50, 50, seed).tolist()) for seed in SEEDS}
    assert len(orders) == len(SEEDS)
    chex.assert_trees_all_equal(root_key(7), jax.random.key(7, impl="threefry2x32"))


@pytest.mark.parametrize("seed", [-1, True, 1.0, "1", None])
def test_a_seed_is_an_integer_of_at_least_0(seed):
    with pytest.raises(OptionError, match=f"^seed must be an integer of at least 0, got {seed!r}"):
        stages_of(seed=seed).start(params())


def test_noise_does_not_depend_on_jaxs_default_generator(stages, weights, drawn):
    jax.config.update("jax_default_prng_impl", "rbg")
    try:
        state = stages.start(params())
        again = stages.generate(params(), drawn.prompts, state.key)
    finally:
        jax.config.update("jax_default_prng_impl", "threefry2x32")
    expected = stages.start(params())
    assert jax.random.key_impl(state.key) == "threefry2x32"
    chex.assert_trees_all_equal(state, expected)
    chex.assert_trees_all_equal(again, stages.generate(params(), drawn.prompts, expected.key))


def test_a_run_starts_in_buffers_of_its_own(stages):
    """What the update consumes is not what was handed in; the reference is that policy, unless there is another."""
    state = stages.start(params())
    assert (state.iteration, int(state.train.step), state.queue, state.objective) == (0, 0, (), None)
    assert state.data == {"position": 0}
    chex.assert_trees_all_equal(state.train.params, params(), state.reference)
    chex.assert_trees_all_equal(state.train.opt_state, SGD.init(params()))
    pointers = lambda tree: {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)}
    assert not pointers(state.train) & pointers((params(), state.reference))
    assert not pointers(state.reference) & pointers(params())
    other = jax.tree.map(lambda x: x + 1, params())
    chex.assert_trees_all_equal(stages.start(params(), other).reference, other)
    plain = stages_of(PLAIN)
    assert plain.start(params()).reference is None
    assert plain.start(params(), other).reference is None, "it would be read by nobody"


def test_a_critic_and_an_objectives_state_start_too():
    critic = value_network(MODEL)
    state = stages_of(reinforce_baseline(), critic=critic).start(params())
    assert state.train.params.keys() == {"policy", "critic"}
    chex.assert_trees_all_equal(state.train.params["policy"], params(), state.train.params["critic"]["body"])
    adaptive = AdaptiveObjective(lambda: {"beta": 0.5}, lambda state: grpo(beta=state["beta"]), lambda state, _: state)
    state = stages_of(adaptive).start(params())
    assert state.objective == {"beta": 0.5}
    chex.assert_trees_all_equal(state.reference, params())


def test_prompts_are_the_next_rows_each_rendered_once():
    rendered = []

    def prompt(row):
        rendered.append(row)
        return TASK.prompt(row)

    stages = stages_of(task=TASK._replace(prompt=prompt))
    assert rendered == [], "the width was given"
    data = {"position": np.int64(8), "own": [1, 2]}
    prompts, row_P, after = stages.prompts(data)
    expected = row_indices(8, P, 10, SEED)
    np.testing.assert_array_equal(row_P, expected)
    rows = [TASK.train[i] for i in expected]
    assert rendered == rows
    chex.assert_trees_all_equal(prompts, encode(BYTES, TASK.prompt, rows, length=16))
    assert after == {"position": 8 + P, "own": [1, 2]}
    assert data["position"] == 8, "the caller's is not changed"


def test_a_width_that_every_prompt_fits():
    task = TASK._replace(held_out=[{"question": "x" * 40}])
    assert prompt_width(TASK, BYTES) == 16
    assert prompt_width(task, BYTES) == 48, "41 tokens, rounded up"
    assert prompt_width(task, BYTES, multiple=1) == 41


# What is sampled, and what the host sees of it.


def test_the_sampler_gets_the_policy_alone(weights):
    objective, critic = reinforce_baseline(), value_network(MODEL)
    stages = stages_of(objective, critic=critic)
    both = stages.start(params()).train.params
    chex.assert_trees_all_equal(stages.publish(weights._replace(params=both)), params())
    chex.assert_trees_all_equal(stages.policy(both), params())
    plain = stages_of()
    assert plain.publish(weights) is weights.params, "nothing is moved on one device"
    assert plain.policy(weights.params) is weights.params


def test_completions_are_those_of_generate(stages, drawn, weights):
    expected = generate(
        MODEL, params(), drawn.prompts, jax.random.key(3), generation=GENERATION, stop_ids=BYTES.stop_ids,
        pad_id=BYTES.pad_id,
    )  # fmt: skip
    chex.assert_trees_all_equal(drawn._replace(row_P=None, update_P=None), expected)
    assert shapes(expected) == shapes(rollout_shapes(P, G, 16, T))


def test_options_of_generation_reach_the_sampler():
    """Those that change tokens and those that do not, ids of the tokenizer, and the width of prompts."""
    seen = {}

    def per_prompt(function, *kinds, **options):
        if getattr(function, "func", None) is generate:
            seen.update(function.keywords)
        return SINGLE.per_prompt(function, *kinds, **options)

    generation = Generation(6, 5, Sampling(0.7, 3, 0.9, 0.01), decode_slots=2, compactions=1)
    devices = SINGLE._replace(per_prompt=per_prompt)
    stages = stages_of(generation=generation, batching=Batching(2, 24), devices=devices)
    assert seen == {"generation": generation, "stop_ids": BYTES.stop_ids, "pad_id": BYTES.pad_id}
    prompts, *_ = stages.prompts({"position": np.int64(0)})
    assert prompts.tokens_PS.shape == (2, 24)


def test_a_batch_is_trimmed_and_the_host_has_its_copy(drawn, short):
    rollout, host = short
    longest = int(drawn.mask_PGT.sum(-1).max())
    size = next(n for n in (T // BUCKETS, T) if n >= longest)
    chex.assert_trees_all_equal(rollout, cut(drawn, size))
    assert isinstance(host, HostRollout)
    for field in ("tokens_PGT", "mask_PGT", "stopped_PG"):
        found = getattr(host, field)
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, getattr(rollout, field))
    assert host.rows == [TASK.train[i] for i in row_indices(0, P, 10, SEED)]
    np.testing.assert_array_equal(host.local_rows, np.arange(P))
    np.testing.assert_array_equal(host.owned_rows, np.arange(P))


def shapes(tree):
    """Shapes and types of a tree of arrays, to compare and to put into sets."""
    return str(jax.tree.map(lambda x: f"{x.dtype}{x.shape}", tree))


@pytest.mark.parametrize("batching", [BATCHING, BATCHING._replace(length_buckets=4, pack_tokens=True)], ids=str)
def test_every_size_that_a_batch_may_have_is_known_before(drawn, batching):
    """`on_shapes` of `shrink`: whatever the lengths are, the shape of what it returns is among them."""
    shrink = stages_of(batching=batching).shrink
    known = {shapes(one) for one in shrink.on_shapes(shapes_of(drawn))}
    met = set()
    for longest in range(1, T + 1):
        for others in (1, longest):
            length = jnp.full((P, G), others).at[0, 0].set(longest)
            rollout, host = shrink(drawn._replace(mask_PGT=jnp.arange(T) < length[..., None]))
            met.add(shapes(rollout))
            if batching.pack_tokens and (index_PN := pack(host.mask_PGT)) is not None:
                np.testing.assert_array_equal(rollout.token_index_PN, index_PN)
            else:
                assert rollout.token_index_PN is None
    assert met <= known
    assert len(met) > BUCKETS - 1
    assert batching.pack_tokens == (len(met) > batching.length_buckets)


def test_packed_lists_are_of_whole_groups(drawn):
    batching = BATCHING._replace(pack_tokens=True)
    shrink = stages_of(batching=batching, update=Update(group_microbatches=2)).shrink
    few = drawn._replace(mask_PGT=jnp.arange(T) < jnp.ones((P, G, 1)))
    assert shrink(few)[0].token_index_PN is None


# What the objective reads, and only that.


def test_nothing_is_computed_that_nobody_reads(weights, short):
    with compilations() as names:
        assert stages_of(PLAIN).infer(weights, short[0]) == {}
    assert names == []


def test_the_reference_is_evaluated(stages, weights, short):
    other = jax.tree.map(lambda x: x + 0.1, params())
    fields = stages.infer(weights._replace(reference=other), short[0])
    assert fields.keys() == {"ref_logp_T"}
    expected, _ = infer_logp(MODEL, other, short[0])
    np.testing.assert_allclose(fields["ref_logp_T"], expected, atol=1e-6)
    assert fields["ref_logp_T"].shape == short[0].mask_PGT.shape


def test_entropies_are_computed_for_a_preparation_that_reads_them(weights, short):
    objective = PLAIN._replace(prepare=partial(high_entropy, fraction=0.2))
    fields = stages_of(objective).infer(weights, short[0])
    assert fields.keys() == {"entropy_T"}
    _, expected = infer_logp(MODEL, params(), short[0], with_entropy=True)
    np.testing.assert_allclose(fields["entropy_T"], expected, atol=1e-6)


def test_values_of_the_critic_are_computed(weights, short):
    objective, critic = reinforce_baseline(), value_network(MODEL)
    stages = stages_of(objective, critic=critic)
    both = stages.start(params()).train.params
    both["critic"]["head"]["Dense_0"]["bias"] += 2.0
    fields = stages.infer(weights._replace(params=both), short[0])
    assert "old_value_T" in fields
    np.testing.assert_allclose(fields["old_value_T"], np.full(short[0].mask_PGT.shape, 2.0), atol=1e-6)


def test_ages_are_counted_in_updates(weights, short):
    stages = stages_of(drop_stale(PLAIN, max_age=2))
    rollout = short[0]._replace(update_P=jnp.array([5, 2, 3], jnp.int32))
    fields = stages.infer(weights._replace(step=jnp.int32(5)), rollout)
    assert fields.keys() == {"age"}
    np.testing.assert_array_equal(fields["age"], np.repeat([[0], [3], [2]], G, axis=1))


@pytest.mark.parametrize(
    ("old_logp", "corrected", "own"),
    [
        ("auto", False, [False, True, False]),
        ("first_epoch", False, [True, True, True]),
        ("auto", True, [True, True, True]),
        ("sampler", False, None),
    ],
)
def test_a_preparation_that_reads_the_old_policy_sees_what_the_update_will(weights, short, old_logp, corrected, own):
    """The policy's own log-probabilities of fresh prompts, the sampler's of older ones; none where the batch has it."""
    objective = kl_in_reward(PLAIN, beta=0.1)
    objective = truncated_is(objective) if corrected else objective
    rollout = short[0]._replace(logp_PGT=short[0].logp_PGT - 1.0, update_P=jnp.array([6, 7, 0], jnp.int32))
    stages = stages_of(objective, update=Update(old_logp=old_logp))
    fields = stages.infer(weights._replace(step=jnp.int32(7)), rollout)
    if own is None:
        assert "old_logp_T" not in fields
        return
    expected, _ = infer_logp(MODEL, params(), rollout)
    chosen = jnp.where(jnp.array(own)[:, None, None], expected, rollout.logp_PGT)
    np.testing.assert_allclose(fields["old_logp_T"], chosen, atol=1e-6)


# Rewards.


def test_rewards_are_those_of_the_completions(short, scores):
    _, host = short
    assert scores.texts == completion_texts(BYTES, short[0])
    assert scores.questions == [row["question"] for row in host.rows]
    expected = np.array([[ascii_share(text) for text in group] for group in scores.texts], float)
    np.testing.assert_array_equal(scores.reward_PG, expected)
    np.testing.assert_array_equal(scores.reward_PGN, expected[..., None])
    assert (scores.names, scores.weights) == (("ascii_share",), (1.0,))
    assert np.shape(scores.steps_PGN) == (P, G, 1)


def test_rewards_are_weighed(short):
    def length(completion):
        return len(completion)

    def two(completion):
        return 2.0

    task = TASK._replace(reward=[length, two])
    for weights, expected in ((None, lambda n: n + 2), ((1, 0), lambda n: n), ((-0.5, 3), lambda n: 6 - n / 2)):
        scores = stages_of(task=task, scoring=Scoring(weights)).reward(short[1])
        count = np.array([[len(text) for text in group] for group in scores.texts])
        np.testing.assert_array_equal(scores.reward_PG, expected(count))
        np.testing.assert_array_equal(scores.reward_PGN, np.stack([count, np.full_like(count, 2)], -1))
        assert scores.names == ("length", "two")
        assert scores.weights == ((1.0, 1.0) if weights is None else weights)
    with pytest.raises(OptionError, match=r"^weights must be 2 finite weights, one for each reward function"):
        stages_of(task=task, scoring=Scoring((1,)))


def test_a_failing_reward_raises_or_is_not_scored(short):
    calls = []

    def reward(completion):
        calls.append(completion)
        if len(calls) % 3 == 1:
            raise ZeroDivisionError("every third")
        return float(len(calls))

    task = TASK._replace(reward=reward)
    with pytest.raises(RewardError, match="every third"):
        stages_of(task=task).reward(short[1])
    calls.clear()
    scores = stages_of(task=task, scoring=Scoring(on_error="skip")).reward(short[1])
    assert np.isnan(scores.reward_PG).sum() == P * G / 3
    assert len(calls) == P * G


# What an update takes, and the update.


def test_a_batch_is_assembled(stages, weights, short, scores):
    rollout, host = short
    fields = stages.infer(weights, rollout)
    batch = stages.assemble(rollout, host, scores, fields)
    expected = assemble(WITH_KL, rollout, jnp.asarray(scores.reward_PG, jnp.float32), **fields)
    chex.assert_trees_all_close(batch, expected, atol=1e-6)
    np.testing.assert_array_equal(batch.samples.ref_logp_T, fields["ref_logp_T"])
    assert batch.rest is None


def test_step_rewards_reach_an_objective_that_reads_them(short):
    """A process reward lies on its tokens, weighted; an objective without them never asks."""

    def reward(completion):
        return [(i + 1, float(i)) for i in range(len(completion))] or None

    task = TASK._replace(reward=reward)
    rollout, host = short
    stages = stages_of(process_grpo(beta=0.0), task=task, scoring=Scoring([3.0]))
    scores = stages.reward(host)
    reward_PGT = np.asarray(stages.assemble(rollout, host, scores, {}).samples.reward_T)
    np.testing.assert_allclose(np.nansum(reward_PGT, -1), np.nan_to_num(scores.reward_PG))
    written = ~np.isnan(reward_PGT)
    np.testing.assert_array_equal(written.sum(-1), [[len(text) for text in group] for group in scores.texts])
    assert not (written & ~np.asarray(rollout.mask_PGT)).any()
    assert stages_of(task=task).assemble(rollout, host, scores, {}).samples.reward_T is None


def test_several_rewards_are_taken_apart_by_an_objective_that_wants_them(short):
    """GDPO standardizes each reward on its own: the scale of one does not matter, that of their sum would."""
    small, large = lambda completion: len(completion), lambda completion: 1000.0 * len(completion)
    advantages = []
    for first in (small, large):
        stages = stages_of(gdpo(beta=0.0), task=TASK._replace(reward=[first, ascii_share]))
        rollout, host = short
        advantages.append(stages.assemble(rollout, host, stages.reward(host), {}).samples.adv)
    np.testing.assert_allclose(*advantages, rtol=1e-4, atol=1e-5)
    assert np.any(advantages[0])


def test_groups_without_spread_are_left_out_of_the_batch(stages, weights, short, scores):
    rollout, host = short
    reward_PG = np.tile(np.arange(G, dtype=float), (P, 1))
    reward_PG[1] = 0.7
    equal = scores._replace(reward_PG=reward_PG, reward_PGN=reward_PG[..., None])
    batching = BATCHING._replace(drop_zero_variance=True)
    less = stages_of(PLAIN, batching=batching)
    batch = less.assemble(rollout, host, equal, {})
    assert batch.samples.adv.shape == (2, G)
    np.testing.assert_array_equal(batch.rollout.row_P, np.asarray(rollout.row_P)[[0, 2]])
    assert batch.rest is not None
    with listed():
        known = less.assemble.on_shapes(shapes_of(rollout), 1, {})
    assert [one.samples.adv.shape[0] for one in known] == [P, 1, 2]
    assert shapes(batch) in map(shapes, known)
    whole = stages_of(WITH_KL, batching=batching)
    fields = stages.infer(weights, rollout)
    assert whole.assemble(rollout, host, equal, fields).samples.adv.shape == (P, G), "a KL term has a gradient"


def test_a_batch_is_assembled_in_the_objectives_state(short, scores):
    scaled = lambda scale: PLAIN._replace(advantage=lambda reward_G: scale * standardize(reward_G))
    stages = stages_of(AdaptiveObjective(lambda: jnp.float32(1.0), scaled, lambda scale, _: scale))
    plain = stages_of(PLAIN).assemble(*short, scores, {})
    for scale in (2.0, 3.0):
        batch = stages.assemble(*short, scores, {}, jnp.float32(scale))
        np.testing.assert_allclose(batch.samples.adv, scale * plain.samples.adv, rtol=1e-6)


def test_nothing_is_remembered_of_a_batch_by_default(stages, short, scores):
    data = {"position": 3}
    assert stages.observe(data, short[1], scores) is data
    assert stages.teach is None
    assert stages.objective is WITH_KL


def test_an_update_is_that_of_the_train_step(stages, weights, short, scores):
    rollout, host = short
    batch = stages.assemble(rollout, host, scores, stages.infer(weights, rollout))
    state = stages.start(params()).train
    consumed = jax.tree.leaves(state.params)
    train, state, metrics = stages.update(state, weights, batch)
    assert all(x.is_deleted() for x in consumed), "the state is donated"
    assert state is None
    step = jax.jit(make_train_step(MODEL, WITH_KL, SGD))
    expected, found = step(init_state(params(), SGD), batch)
    chex.assert_trees_all_close(train, expected, atol=1e-6)
    assert all(type(value) is float for value in metrics.values())
    assert metrics == pytest.approx({name: float(value) for name, value in found.items()}, abs=1e-5)
    assert metrics["frac_fresh"] == 1
    assert metrics["ratio"] == 1
    assert int(train.step) == 1


def test_the_state_of_an_objective_moves_with_the_metrics(short, scores):
    seen = []

    def step(state, metrics):
        seen.append(metrics)
        return state + 1

    adaptive = AdaptiveObjective(lambda: jnp.float32(0.0), lambda state: PLAIN, step)
    rollout, host = short
    stages = stages_of(adaptive)
    state = stages.start(params())
    batch = stages.assemble(rollout, host, scores, {}, state.objective)
    _, after, metrics = stages.update(state.train, None, batch, state.objective)
    assert float(after) == 1
    assert seen == [metrics]


@pytest.mark.parametrize("stale", [0, 2])
def test_a_sampler_that_differs_from_the_trainer_is_an_error(short, scores, stale):
    """However many prompts of the batch an older policy sampled, whose difference says nothing."""
    rollout, host = short
    stages = stages_of(PLAIN, STILL)
    fresh = jnp.arange(P) >= stale
    off = jnp.where(rollout.mask_PGT & fresh[:, None, None], 2e-3, 0.0)
    rollout = rollout._replace(logp_PGT=rollout.logp_PGT + off, update_P=jnp.where(fresh, 0, -1))
    batch = stages.assemble(rollout, host, scores, {})
    with pytest.raises(SamplerMismatchError, match=r"differ from the sampler's by 0\.002 a token .*limit 0\.001"):
        stages.update(stages.start(params()).train, None, batch)


def test_a_batch_without_a_fresh_token_says_nothing_about_the_sampler(short, scores):
    rollout, host = short
    stages = stages_of(PLAIN, STILL)
    rollout = rollout._replace(logp_PGT=rollout.logp_PGT - 0.5, update_P=jnp.full(P, -1))
    _, _, metrics = stages.update(stages.start(params()).train, None, stages.assemble(rollout, host, scores, {}))
    assert metrics["frac_fresh"] == 0
    assert "sampler_logp_diff" not in metrics


def test_the_cuts_of_an_update_reach_it(scores, short):
    """Prompts, groups and logits are cut as told: what the vocabulary's projection sees, as it is traced."""
    seen = []

    def logits(params, hidden_D):
        seen.append(hidden_D.shape[:2])
        return MODEL.logits(params, hidden_D)

    update = Update(2, 3, 2, "first_epoch", logit_chunk=6)
    stages = stages_of(model=MODEL._replace(logits=logits), update=update)
    rollout, host = short
    T = rollout.mask_PGT.shape[-1]
    train, _, metrics = stages.update(stages.start(params()).train, None, stages.assemble(rollout, host, scores, {}))
    tokens = T * G // 2  # of a prompt, in a part
    assert set(seen) == {(1, -(-tokens // -(-tokens // 6)))}
    assert int(train.step) == 2
    assert metrics["ratio"] != 1, "the mean over both epochs"


@pytest.mark.parametrize(("old_logp", "ratio"), [("sampler", np.exp(5e-4)), ("first_epoch", 1.0), ("auto", 1.0)])
def test_the_old_policy_reaches_the_update(short, scores, old_logp, ratio):
    rollout, host = short
    rollout = rollout._replace(logp_PGT=jnp.where(rollout.mask_PGT, rollout.logp_PGT - 5e-4, 0.0))
    stages = stages_of(PLAIN, STILL, update=Update(old_logp=old_logp))
    _, _, metrics = stages.update(stages.start(params()).train, None, stages.assemble(rollout, host, scores, {}))
    assert metrics["ratio"] == pytest.approx(ratio, abs=1e-5)
    assert (metrics["ratio"] == 1.0) == (old_logp != "sampler")


# Everything that may run.


def programs_of(stages, functions=1):
    state = stages.start(params())
    prompts, *_ = stages.prompts(state.data)
    arrays = state._replace(iteration=None, queue=(), data=None)
    return programs(stages, shapes_of(arrays), shapes_of(prompts), functions)


def new_stages(objective, optimizer=SGD, **options):
    """Stages that share nothing, of a group size that no other test has: a program that is made is not listed."""
    options = {"generation": Generation(5, T), "batching": BATCHING} | options
    return make_stages(MODEL, TASK, BYTES, objective, optimizer, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"objective": WITH_KL}, {"generate": 1, "infer_logp": 2, "assemble": 2, "step": 2}),
        (
            {"objective": PLAIN, "batching": BATCHING._replace(length_buckets=1, drop_zero_variance=True)},
            {"generate": 1, "assemble": 1, "busy_and_tokens": 1, "part_and_rest": 2, "step": 3},
        ),
        (
            {"objective": PLAIN, "batching": BATCHING._replace(length_buckets=1, pack_tokens=True)},
            {"generate": 1, "assemble": 4, "step": 4},
        ),
    ],
)
def test_programs_are_listed_and_nothing_runs(options, expected):
    with compilations() as names:
        found = [program.name for program in programs_of(new_stages(**options))]
    assert {name: found.count(name) for name in found} == expected
    assert not set(names) & set(expected)


def test_a_stage_of_ones_own_is_asked_for_its_shapes():
    """With `on_shapes` that is called, without it the stage itself, on shapes."""
    usual = new_stages(PLAIN, batching=BATCHING._replace(length_buckets=1))
    generation = Generation(5, T)

    def on_the_host(served, prompts, key):
        raise AssertionError("sampling by another program")

    on_the_host.on_shapes = lambda served, prompts, key: rollout_shapes(P, generation.group_size, 16, T)
    calls = []

    def infer(weights, rollout):
        calls.append(rollout)
        return {}

    found = programs_of(usual._replace(generate=on_the_host, infer=infer))
    assert [program.name for program in found] == ["assemble", "step"]
    assert isinstance(calls[0].tokens_PGT, jax.ShapeDtypeStruct)


def test_what_was_compiled_ahead_is_what_runs():
    stages = new_stages(WITH_KL, ADAMW, generation=Generation(6, T))
    for program in programs_of(stages):
        program.compile()
    weights = Weights(params(), jnp.int32(0), params())
    with compilations() as names:
        prompts, row_P, _ = stages.prompts({"position": np.int64(0)})
        rollout = stages.generate(stages.publish(weights), prompts, stages.start(params()).key)
        rollout, host = stages.shrink(rollout._replace(row_P=row_P, update_P=row_P * 0))
        batch = stages.assemble(rollout, host, stages.reward(host), stages.infer(weights, rollout))
        stages.update(stages.start(params()).train, weights, batch)
    assert not {"generate", "infer_logp", "assemble", "step"} & set(names)


# What does not fit.


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batching": Batching(0)}, "prompts_per_step must be an integer of at least 1"),
        ({"generation": Generation(2.0)}, "group_size must be an integer of at least 1, got 2.0"),
        ({"generation": Generation(G, 0)}, "max_new_tokens must be an integer of at least 1"),
        ({"generation": Generation(G, T, Sampling(temperature=0.0))}, "temperature must be above 0 in training"),
        ({"generation": Generation(G, T, Sampling(min_p=2.0))}, r"min_p must be in \[0, 1\]"),
        ({"generation": Generation(G, T, compactions=-1)}, "compactions must be an integer of at least 0"),
        ({"generation": Generation(G, T, decode_slots=0)}, "decode_slots must be an integer of at least 1, or None"),
        ({"generation": Generation(G, 30)}, r"max_new_tokens \(30\) and prompts of up to 16 tokens do not fit"),
        ({"batching": BATCHING._replace(length_buckets=0)}, "length_buckets must be an integer of at least 1"),
        ({"update": Update(old_logp="old")}, "old_logp must be one of"),
        ({"update": Update(microbatches=2)}, "prompts_per_step must be a multiple of 2, the parts"),
        ({"update": Update(group_microbatches=3)}, r"group_microbatches must divide group_size \(4\), got 3"),
        ({"scoring": Scoring(on_error="zero")}, "on_error must be one of"),
        ({"scoring": Scoring((1, 2))}, "weights must be 1 finite weights"),
    ],
)  # fmt: skip
def test_bad_options_are_named(wrong, message):
    with pytest.raises(OptionError, match=f"^{message}"):
        stages_of(**wrong)


def test_a_task_without_rows_and_a_missing_critic_are_named():
    with pytest.raises(ValueError, match="task 'letters' has no training rows"):
        stages_of(task=TASK._replace(train=[]))
    with pytest.raises(ValueError, match="pass critic=value_network"):
        stages_of(reinforce_baseline())
    with pytest.raises(TypeError, match="objective must be an Objective"):
        stages_of("grpo")
    with pytest.raises(ValueError, match="tokens, more than the 2 allowed"):
        stages_of(batching=Batching(P, 2)).prompts({"position": np.int64(0)})
