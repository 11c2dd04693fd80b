"""The train step's laws: cutting changes nothing, the first ratio is one, masked tokens do not count."""

import dataclasses
import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grpo_jax.inference.generate import generate
from grpo_jax.inference.logprobs import completion_logp
from grpo_jax.models import decoder
from grpo_jax.objectives import (
    PRESETS,
    AdaptiveObjective,
    Objective,
    batch_loss,
    clipped,
    compose,
    dapo,
    entropy_bonus,
    gradient_at_zero_advantage,
    grpo,
    per_token,
    reads,
    sequence_mean,
    standardize,
    truncated_is,
)
from grpo_jax.options import Generation, OptionError, Sampling, Update
from grpo_jax.training.batch import assemble, infer_logp
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.packing import FRACTIONS, pack
from grpo_jax.training.train_step import cut, init_state, make_train_step
from grpo_jax.training.zero_variance import drop_zero_variance_groups
from grpo_jax.types import Mean, Rollout, Sample

from conftest import TINY, ragged
from toy import compilations

P, G, T = 4, 4, 6
SGD = optax.sgd(0.1)
OPTIONS = {"dr_grpo": {"max_length": T}}
AS_USERS = {"xla_cpu_use_fusion_emitters": True}  # the code generator of optimised programs, see conftest


def rollout_of(prompts, seed=0, tokens=None):
    rng = np.random.default_rng(seed)
    mask = jnp.asarray(ragged(rng, P, G, T))
    tokens = jnp.asarray(rng.integers(0, TINY.vocab_size, (P, G, T)), jnp.int32) if tokens is None else tokens
    return Rollout(prompts, tokens, mask, jnp.zeros((P, G, T)), jnp.asarray(rng.random((P, G)) < 0.7))


@pytest.fixture(scope="module")
def batch(tiny_model, tiny_params, prompts):
    """Uneven lengths, rewards of both signs around the mean, a slightly different old policy and reference."""
    rollout = rollout_of(prompts)
    rng = np.random.default_rng(1)
    logp = jax.jit(lambda p: completion_logp(tiny_model, p, prompts, rollout.tokens_PGT, rollout.mask_PGT))(tiny_params)
    noise = lambda scale: jnp.where(rollout.mask_PGT, jnp.asarray(rng.normal(0, scale, (P, G, T)), jnp.float32), 0)
    rollout = rollout._replace(logp_PGT=logp + noise(0.15))
    reward = jnp.asarray(rng.normal(size=(P, G)), jnp.float32)
    return rollout, reward, logp + noise(0.3)


def assembled(objective, batch):
    rollout, reward, ref = batch
    fields = {"ref_logp_T": ref} if "ref_logp_T" in reads(objective) else {}
    rng = np.random.default_rng(2)
    if "reward_T" in reads(objective):
        last = jnp.arange(T) == rollout.mask_PGT.sum(-1, keepdims=True) - 1
        fields["reward_T"] = jnp.where(last, reward[..., None], jnp.nan)
    for name in {"entropy_T", "old_value_T"} & reads(objective):
        fields[name] = jnp.asarray(rng.random((P, G, T)), jnp.float32)
    return assemble(objective, rollout, reward, **fields)


@pytest.fixture(scope="module", params=["grpo", "dapo"])
def whole_update(request, tiny_model, tiny_params, batch):
    """An objective, its batch, and the update and metrics of the batch in one piece."""
    objective = PRESETS[request.param]()
    data = assembled(objective, batch)
    step = jax.jit(make_train_step(tiny_model, objective, SGD))
    return objective, data, step(init_state(tiny_params, SGD), data)


@pytest.mark.parametrize("cuts", [(2, 1), (2, 4)], ids=str)
def test_micro_batches_change_nothing(tiny_model, tiny_params, whole_update, cuts):
    """Law: any cut along P and G gives the same update, gradient norm and metrics, with uneven lengths."""
    objective, data, (whole, metrics) = whole_update
    step = make_train_step(tiny_model, objective, SGD, update=Update(1, *cuts))
    parts, part_metrics = jax.jit(step)(init_state(tiny_params, SGD), data)
    chex.assert_trees_all_close(parts.params, whole.params, atol=1e-6, rtol=1e-6)
    chex.assert_trees_all_close(part_metrics, metrics, atol=1e-5, rtol=1e-5)
    moved = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), whole.params, tiny_params)
    assert max(map(float, jax.tree.leaves(moved))) > 1e-4, "the update must be large enough to compare"


def test_a_mean_of_means_would_fail(tiny_model, tiny_params, batch):
    """What the law excludes: DAPO's token mean taken in each half and averaged is another number."""
    objective = dapo()
    data = assembled(objective, batch)
    logp = batch[2]
    parts = cut(data, 2, 1).samples
    halves = [batch_loss(objective, logp[i::2], jax.tree.map(lambda x, i=i: x[i], parts)) for i in (0, 1)]
    whole = batch_loss(objective, logp, data.samples).value()
    np.testing.assert_allclose(
        (halves[0].total + halves[1].total) / (halves[0].weight + halves[1].weight), whole, rtol=1e-5
    )
    assert abs(np.mean([h.value() for h in halves]) - whole) > 1e-3 * abs(whole)


def test_the_gradient_is_that_of_the_written_formula(tiny_model, tiny_params, batch):
    """−(1/B) Σ_i 1/|o_i| Σ_t min(rA, clip(r)A), differentiated as it stands, without the library's loss."""
    rollout, reward, _ = batch
    state = init_state(tiny_params, SGD)
    after, metrics = jax.jit(make_train_step(tiny_model, grpo(beta=0.0), SGD))(state, assembled(grpo(beta=0.0), batch))
    adv = (reward - reward.mean(1, keepdims=True)) / reward.std(1, keepdims=True)

    def loss(params):
        logp = completion_logp(tiny_model, params, rollout.prompts, rollout.tokens_PGT, rollout.mask_PGT)
        r, A, m = jnp.exp(logp - rollout.logp_PGT), adv[..., None], rollout.mask_PGT
        cost = -jnp.minimum(r * A, jnp.clip(r, 0.8, 1.2) * A) * m
        return (cost.sum(-1) / m.sum(-1)).mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(tiny_params)
    np.testing.assert_allclose(metrics["loss"], value, atol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
    chex.assert_trees_all_close(after.params, jax.tree.map(lambda p, g: p - 0.1 * g, tiny_params, grads), atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_zero_has_ratio_one_and_no_kl(dtype, prompts, optimized):
    """Law: at any temperature, with left padding, with bfloat16 weights, ratio exactly 1 and KL exactly 0."""
    model = decoder(dataclasses.replace(TINY, dtype=dtype))
    params = jax.jit(model.init)(jax.random.key(0))
    sampling = Sampling(temperature=0.7)
    rollout = generate(model, params, prompts, jax.random.key(1), generation=Generation(G, T, sampling))
    objective = grpo(beta=0.1)
    ref_logp, _ = infer_logp(model, params, rollout, sampling=sampling)
    reward = jax.random.normal(jax.random.key(2), (P, G))
    data = assemble(objective, rollout._replace(update_P=jnp.zeros(P, jnp.int32)), reward, ref_logp_T=ref_logp)
    step = make_train_step(model, objective, SGD, sampling=sampling)
    _, metrics = jax.jit(step, compiler_options=AS_USERS)(init_state(params, SGD), data)
    assert float(metrics["ratio"]) == 1.0
    assert abs(float(metrics["kl"])) < (1e-12 if dtype == "float32" else 1e-6)
    assert float(metrics["clip_fraction"]) == 0.0


def test_the_samplers_log_probabilities_serve_as_the_old_ones(tiny_model, tiny_params, prompts):
    rollout = generate(tiny_model, tiny_params, prompts, jax.random.key(1), generation=Generation(G, T))
    reward = jax.random.normal(jax.random.key(2), (P, G))
    data = assemble(grpo(beta=0.0), rollout, reward)
    np.testing.assert_array_equal(data.samples.old_logp_T, rollout.logp_PGT)
    _, metrics = jax.jit(make_train_step(tiny_model, grpo(beta=0.0), SGD))(init_state(tiny_params, SGD), data)
    np.testing.assert_allclose(metrics["ratio"], 1.0, atol=1e-5)
    assert 0 <= metrics["sampler_logp_diff"] < 1e-5
    shifted = data._replace(samples=data.samples._replace(old_logp_T=rollout.logp_PGT - 0.5 * rollout.mask_PGT))
    for kind, expected in (("sampler", np.exp(0.5)), ("first_epoch", 1.0)):
        step = jax.jit(make_train_step(tiny_model, grpo(beta=0.0), SGD, update=Update(old_logp=kind)))
        np.testing.assert_allclose(step(init_state(tiny_params, SGD), shifted)[1]["ratio"], expected, atol=1e-4)


@pytest.fixture(scope="module")
def mixed(tiny_model, tiny_params, batch):
    """A batch of which prompts 1 and 2 are of these parameters, after 3 updates, with log-probabilities that are not
    the trainer's: off by 0.5 those of these parameters, by 2 those of older ones. And the trainer's own.
    """
    rollout, reward, _ = batch
    own, _ = infer_logp(tiny_model, tiny_params, rollout)
    update_P = jnp.array([2, 3, 3, 0], jnp.int32)
    off = jnp.where(update_P == 3, 0.5, 2.0)[:, None, None]
    rollout = rollout._replace(logp_PGT=jnp.where(rollout.mask_PGT, own - off, 0.0), update_P=update_P)
    return rollout, reward, own


def after_three(params):
    return init_state(params, SGD)._replace(step=jnp.int32(3))


def test_fresh_prompts_have_their_own_old_policy_and_older_ones_the_samplers(tiny_model, tiny_params, mixed):
    """Mixed in one batch, also cut into micro-batches: the update with π_old put together by hand."""
    rollout, reward, own = mixed
    objective = grpo(beta=0.0, low=9.0, high=9.0)
    data = assemble(objective, rollout, reward)
    fresh = (rollout.update_P == 3)[:, None, None]
    by_hand = jnp.where(fresh, own, rollout.logp_PGT)
    hand_made = data._replace(samples=data.samples._replace(old_logp_T=by_hand))

    def updated(data, **options):
        step = jax.jit(make_train_step(tiny_model, objective, SGD, update=Update(**options)))
        return step(after_three(tiny_params), data)

    (auto, metrics), (expected, hand_metrics) = updated(data), updated(hand_made, old_logp="sampler")
    chex.assert_trees_all_close(auto, expected, atol=1e-6)
    tokens_P = rollout.mask_PGT.sum((1, 2))
    share = float(tokens_P[1:3].sum() / tokens_P.sum())
    np.testing.assert_allclose(metrics["ratio"], share + (1 - share) * np.exp(2.0), rtol=1e-5)
    np.testing.assert_allclose(hand_metrics["ratio"], metrics["ratio"], rtol=1e-5)
    # Not diluted: the mean is over the tokens that these parameters sampled.
    np.testing.assert_allclose(metrics["sampler_logp_diff"], 0.5, rtol=1e-5)
    np.testing.assert_allclose(metrics["frac_fresh"], share, rtol=1e-6)
    parts, part_metrics = updated(data, microbatches=2, group_microbatches=2)
    chex.assert_trees_all_close((parts, part_metrics), (auto, metrics), atol=1e-5, rtol=1e-5)
    for other in ("sampler", "first_epoch"):
        _, other_metrics = updated(data, old_logp=other)
        assert abs(float(other_metrics["ratio"] - metrics["ratio"])) > 0.1, other
        np.testing.assert_allclose(other_metrics["sampler_logp_diff"], 0.5, rtol=1e-5)


def test_dropped_groups_and_older_prompts_do_not_dilute_the_samplers_difference(tiny_model, tiny_params, mixed):
    """Of three prompts one is fresh, and the fourth is left out: the difference stays that of the fresh one."""
    rollout, reward, _ = mixed
    objective = grpo(beta=0.0)
    data = assemble(objective, rollout, reward.at[1].set(0.7))
    less = drop_zero_variance_groups(objective, data, (1, 2, 3))
    np.testing.assert_array_equal(less.rollout.update_P, [2, 3, 0])
    step = jax.jit(make_train_step(tiny_model, objective, SGD))
    (_, whole), (_, metrics) = step(after_three(tiny_params), data), step(after_three(tiny_params), less)
    for found in (whole, metrics):
        np.testing.assert_allclose(found["sampler_logp_diff"], 0.5, rtol=1e-5)
    tokens_P = rollout.mask_PGT.sum((1, 2))
    np.testing.assert_allclose(metrics["frac_fresh"], tokens_P[2] / tokens_P[jnp.array([0, 2, 3])].sum(), rtol=1e-6)
    _, later = step(after_three(tiny_params)._replace(step=jnp.int32(4)), data)
    assert float(later["frac_fresh"]) == 0
    assert float(later["sampler_logp_diff"]) == 0, "nothing to compare"


def test_an_objective_that_corrects_for_the_sampler_has_its_own_old_policy(tiny_model, tiny_params, mixed):
    """Also for prompts of an older policy: the correction's ratio is that of π_old to the sampler."""
    rollout, reward, _ = mixed
    objective = truncated_is(grpo(beta=0.0))
    step = jax.jit(make_train_step(tiny_model, objective, SGD))
    _, metrics = step(after_three(tiny_params), assemble(objective, rollout, reward))
    assert float(metrics["ratio"]) == 1.0


def test_who_sampled_is_unknown_without_the_updates_of_its_policy(tiny_model, tiny_params, mixed):
    """Then π_old is what the batch says, and every token is compared with the sampler's."""
    rollout, reward, _ = mixed
    objective = grpo(beta=0.0, low=9.0, high=9.0)
    data = assemble(objective, rollout._replace(update_P=None), reward)
    step = jax.jit(make_train_step(tiny_model, objective, SGD))
    expected = jax.jit(make_train_step(tiny_model, objective, SGD, update=Update(old_logp="sampler")))
    _, metrics = updated = step(after_three(tiny_params), data)
    chex.assert_trees_all_equal(updated, expected(after_three(tiny_params), data))
    assert "frac_fresh" not in metrics
    tokens_P = rollout.mask_PGT.sum((1, 2))
    mean = float((tokens_P * jnp.array([2.0, 0.5, 0.5, 2.0])).sum() / tokens_P.sum())
    np.testing.assert_allclose(metrics["sampler_logp_diff"], mean, rtol=1e-5)


def test_an_adaptive_objectives_state_is_an_argument(tiny_model, tiny_params, batch):
    """A β that moves is a number and no new program: the update of each is that of the objective with it."""
    rollout, reward, ref = batch
    adaptive = AdaptiveObjective(lambda: jnp.float32(0.0), lambda beta: grpo(beta=beta), lambda beta, metrics: beta)
    step = jax.jit(make_train_step(tiny_model, adaptive, SGD))
    with compilations() as names:
        for beta in (0.0, 0.3):
            data = assemble(adaptive, rollout, reward, jnp.float32(beta), ref_logp_T=ref)
            got, metrics = step(init_state(tiny_params, SGD), data, jnp.float32(beta))
            plain = jax.jit(make_train_step(tiny_model, grpo(beta=beta), SGD))
            wanted, wanted_metrics = plain(init_state(tiny_params, SGD), assembled(grpo(beta=beta), batch))
            chex.assert_trees_all_close(got, wanted, atol=1e-6, rtol=1e-5)
            np.testing.assert_allclose(metrics["loss"], wanted_metrics["loss"], atol=1e-6)
    assert names.count("step") == 3, "one for both of the adaptive objective, and one for each fixed one"


def test_masked_garbage_changes_nothing(tiny_model, tiny_params, batch):
    """Law: ±1e4, ±inf and NaN in masked places of every array that the loss reads, and any token ids there."""
    objective = grpo(beta=0.1)
    data = assembled(objective, batch)
    mask = data.samples.mask_T
    rng = np.random.default_rng(3)
    garbage = jnp.asarray(rng.choice([1e4, -1e4, np.inf, -np.inf, np.nan], (P, G, T)), jnp.float32)
    dirty = lambda x: jnp.where(mask, x, garbage)
    samples = data.samples._replace(
        old_logp_T=dirty(data.samples.old_logp_T),
        ref_logp_T=dirty(data.samples.ref_logp_T),
        sampler_logp_T=dirty(data.samples.sampler_logp_T),
    )
    tokens = jnp.where(mask, data.rollout.tokens_PGT, 7)
    rollout = data.rollout._replace(tokens_PGT=tokens, logp_PGT=dirty(data.rollout.logp_PGT))
    step = jax.jit(make_train_step(tiny_model, objective, SGD))
    clean = step(init_state(tiny_params, SGD), data)
    chex.assert_trees_all_equal(
        step(init_state(tiny_params, SGD), data._replace(rollout=rollout, samples=samples)), clean
    )


def test_a_fully_masked_batch_moves_nothing(tiny_model, tiny_params, batch):
    for objective in (grpo(beta=0.1), dapo()):
        data = assembled(objective, batch)
        none = jnp.zeros_like(data.samples.mask_T)
        empty = data._replace(rollout=data.rollout._replace(mask_PGT=none), samples=data.samples._replace(mask_T=none))
        after, metrics = jax.jit(make_train_step(tiny_model, objective, SGD))(init_state(tiny_params, SGD), empty)
        assert float(metrics["loss"]) == 0
        assert float(metrics["grad_norm"]) == 0
        chex.assert_trees_all_equal(after.params, tiny_params)


def test_the_stop_token_is_trained_and_what_follows_is_not(tiny_model, tiny_params, batch):
    """Law: the gradient changes with the stop token, and not with a token behind it."""
    rollout, reward, _ = batch
    objective = grpo(beta=0.0)
    p, g = next((p, g) for p, g in np.ndindex(P, G) if 1 < rollout.mask_PGT[p, g].sum() < T)
    stop = int(rollout.mask_PGT[p, g].sum()) - 1
    step = jax.jit(make_train_step(tiny_model, objective, SGD))

    def norm(place):
        tokens = rollout.tokens_PGT.at[p, g, place].set((rollout.tokens_PGT[p, g, place] + 1) % TINY.vocab_size)
        data = assemble(objective, rollout._replace(tokens_PGT=tokens), reward)
        return float(step(init_state(tiny_params, SGD), data)[1]["grad_norm"])

    base = float(step(init_state(tiny_params, SGD), assemble(objective, rollout, reward))[1]["grad_norm"])
    assert norm(stop) != base
    assert norm(stop + 1) == base


def test_epochs_update_with_the_old_policy_fixed(tiny_model, tiny_params, batch):
    """Two epochs equal two steps on one batch; with "first_epoch" the second ratio is against the first's log-probs."""
    objective = grpo(beta=0.0)
    data = assembled(objective, batch)
    one = jax.jit(make_train_step(tiny_model, objective, SGD))
    two = jax.jit(make_train_step(tiny_model, objective, SGD, update=Update(epochs=2)))
    twice, metrics = two(init_state(tiny_params, SGD), data)
    first, first_metrics = one(init_state(tiny_params, SGD), data)
    second, second_metrics = one(first, data)
    chex.assert_trees_all_close(twice.params, second.params, atol=1e-6)
    assert int(twice.step) == 2
    np.testing.assert_allclose(metrics["loss"], (first_metrics["loss"] + second_metrics["loss"]) / 2, atol=1e-6)
    own = make_train_step(tiny_model, objective, SGD, update=Update(2, 2, old_logp="first_epoch"))
    _, own_metrics = jax.jit(own)(init_state(tiny_params, SGD), data)
    rollout, _, _ = batch
    score = lambda p: completion_logp(tiny_model, p, rollout.prompts, rollout.tokens_PGT, rollout.mask_PGT)
    start = data._replace(samples=data.samples._replace(old_logp_T=jax.jit(score)(tiny_params)))
    after, _ = one(init_state(tiny_params, SGD), start)
    ratio = one(after, start)[1]["ratio"]
    np.testing.assert_allclose(own_metrics["ratio"], (1.0 + ratio) / 2, rtol=1e-5)


def test_bfloat16_weights_sum_gradients_in_float32(prompts, optimized):
    model = decoder(dataclasses.replace(TINY, dtype="bfloat16"))
    params = jax.jit(model.init)(jax.random.key(0))
    rollout = rollout_of(prompts)
    data = assemble(grpo(beta=0.0), rollout, jnp.arange(P * G, dtype=jnp.float32).reshape(P, G))
    whole, cut_up = (
        jax.jit(make_train_step(model, grpo(beta=0.0), SGD, update=Update(microbatches=m)), compiler_options=AS_USERS)(
            init_state(params, SGD), data
        )[1]
        for m in (1, 4)
    )
    np.testing.assert_allclose(cut_up["grad_norm"], whole["grad_norm"], rtol=0.02)


def test_state_can_be_donated(tiny_model, tiny_params, batch):
    """All of the state's buffers are reused for the new state."""
    optimizer = adamw(1e-3)
    state = init_state(tiny_params, optimizer)
    step = jax.jit(make_train_step(tiny_model, grpo(beta=0.0), optimizer), donate_argnums=0)
    compiled = step.lower(state, assembled(grpo(beta=0.0), batch)).compile()
    size = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    assert compiled.memory_analysis().alias_size_in_bytes >= 0.99 * size


def test_one_gradient_exists_at_once(prompts, optimized):
    """Neither the division by the weight nor the clip makes a second one: what is left besides it is small."""
    wide = decoder(dataclasses.replace(TINY, hidden_size=256, intermediate_size=1024, num_hidden_layers=8))
    params = jax.jit(wide.init)(jax.random.key(0))
    optimizer, objective = adamw(1e-3, clip_norm=1.0), grpo()
    shape = jnp.zeros((P, G, T))
    batch = assemble(objective, rollout_of(prompts), jnp.zeros((P, G)), ref_logp_T=shape)
    step = jax.jit(make_train_step(wide, objective, optimizer), donate_argnums=0)
    memory = step.lower(init_state(params, optimizer), batch).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.5 * sum(x.nbytes for x in jax.tree.leaves(params))


def test_a_whole_loss_of_ones_own_trains(tiny_model, tiny_params, batch):
    """The second level: loss(logp_T, sample) -> Mean, written without compose."""

    def reinforce(logp_T, sample: Sample):
        return Mean(-(sample.adv * jnp.where(sample.mask_T, logp_T, 0)).sum(), jnp.float32(1))

    objective = Objective(standardize, reinforce)
    _, metrics = jax.jit(make_train_step(tiny_model, objective, SGD))(
        init_state(tiny_params, SGD), assembled(objective, batch)
    )
    assert metrics["grad_norm"] > 0


def test_advantage_zero_groups_have_no_gradient(tiny_model, tiny_params, batch):
    rollout, _, _ = batch
    objective = Objective(standardize, compose(per_token, partial(clipped, low=0.2, high=0.2), sequence_mean))
    data = assemble(objective, rollout, jnp.full((P, G), 0.7))
    assert not np.any(data.samples.adv)
    _, metrics = jax.jit(make_train_step(tiny_model, objective, SGD))(init_state(tiny_params, SGD), data)
    assert float(metrics["grad_norm"]) == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"update": Update(microbatches=0)}, "microbatches must be an integer of at least 1, got 0"),
        ({"update": Update(group_microbatches=1.5)}, "group_microbatches must be an integer of at least 1, got 1.5"),
        ({"update": Update(epochs=0)}, "epochs must be an integer of at least 1, got 0"),
        ({"update": Update(old_logp="samper")}, "old_logp must be one of"),
        ({"sampling": Sampling(temperature=0.0)}, "temperature must be above 0"),
    ],
)
def test_bad_options_are_named_at_construction(tiny_model, wrong, message):
    with pytest.raises(OptionError, match=f"^{message}"):
        make_train_step(tiny_model, grpo(), SGD, **wrong)


def test_an_uneven_cut_is_refused(batch):
    data = assembled(grpo(beta=0.0), batch)
    with pytest.raises(ValueError, match="4 prompts × 4 completions cannot be cut into 3 × 1"):
        cut(data, 3, 1)


def rates_of(optimizer, count):
    params = {"q": jnp.ones((2, 2))}
    state = optimizer.init(params)
    zero = jax.tree.map(jnp.zeros_like, params)
    rates = []
    for _ in range(count):
        _, state = optimizer.update(zero, state, params)
        rates.append(float(optax.tree_utils.tree_get(state, "hyperparams")["learning_rate"]))
    return rates


LINEAR = {"lr_warmup": 2, "schedule": "linear", "weight_decay": 0.5, "clip_norm": None}


def test_adamw_follows_its_schedule_and_spares_norms():
    params = {"q": jnp.ones((2, 2)), "input_norm": jnp.ones(2), "q_bias": jnp.ones(2)}
    optimizer = adamw(0.1, total_updates=10, **LINEAR)
    expected = [0.05, 0.1, *(0.1 * (1 - i / 8) for i in range(8))]
    np.testing.assert_allclose(rates_of(optimizer, 10), expected, atol=1e-6)
    zero = jax.tree.map(jnp.zeros_like, params)
    first, _ = optimizer.update(zero, optimizer.init(params), params)
    np.testing.assert_allclose(first["q"], -0.05 * 0.5)
    assert not np.any(first["input_norm"])
    assert not np.any(first["q_bias"])


def test_adamw_of_a_run_of_unknown_length_is_a_function_of_it():
    known, unknown = adamw(0.1, total_updates=10, **LINEAR), adamw(0.1, **LINEAR)
    assert rates_of(unknown(10), 10) == rates_of(known, 10)
    constant = adamw(0.1, lr_warmup=4)
    np.testing.assert_allclose(rates_of(constant, 6), [0.025, 0.05, 0.075, 0.1, 0.1, 0.1], atol=1e-6)


@pytest.mark.parametrize(("clip", "expected"), [(1.0, 1.0), (None, 300.0)])
def test_adamw_clips_the_global_norm(clip, expected):
    """Adam's first moment after one update is (1 − b1) times the gradient it was given."""
    params, gradient = {"a": jnp.zeros(9)}, {"a": jnp.full(9, 100.0)}
    optimizer = adamw(0.1, clip_norm=clip, b1=0.9)
    _, state = optimizer.update(gradient, optimizer.init(params), params)
    np.testing.assert_allclose(optax.tree.norm(optax.tree_utils.tree_get(state, "mu")), 0.1 * expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"schedule": "cosin"}, "schedule must be one of"),
        ({"lr_warmup": -1}, "lr_warmup must be an integer of at least 0, got -1"),
        ({"weight_decay": -1.0}, "weight_decay must be a finite number of at least 0, got -1.0"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0"),
        ({"learning_rate": -1.0}, "learning_rate must be a finite number of at least 0, got -1.0"),
    ],
)
def test_bad_optimiser_options_are_named(wrong, message):
    with pytest.raises(OptionError, match=f"^{message}"):
        adamw(**{"learning_rate": 1e-3} | wrong)


def packed_batch(data, fractions=FRACTIONS):
    token_index_PN = jnp.asarray(pack(np.asarray(data.rollout.mask_PGT), fractions))
    return data._replace(rollout=data.rollout._replace(token_index_PN=token_index_PN))


def test_a_packed_batch_gives_the_same_update(tiny_model, tiny_params, batch):
    """Law: packed or not. Uneven lengths; also with micro-batches, and for a model without a packed form of its own."""
    objective = grpo()
    data = assembled(objective, batch)
    packed = packed_batch(data, (0.6, 0.9))
    assert packed.rollout.token_index_PN.shape == (P, math.ceil(0.9 * G * T))
    state = init_state(tiny_params, SGD)
    expected = jax.jit(make_train_step(tiny_model, objective, SGD))(state, data)
    for model, microbatches in ((tiny_model, 1), (tiny_model, 2), (tiny_model._replace(forward=None), 1)):
        step = jax.jit(make_train_step(model, objective, SGD, update=Update(microbatches=microbatches)))
        chex.assert_trees_all_close(step(state, packed), expected, atol=2e-6, rtol=2e-5)
    with pytest.raises(ValueError, match="group_microbatches=1"):
        jax.eval_shape(make_train_step(tiny_model, objective, SGD, update=Update(group_microbatches=2)), state, packed)


def test_packing_computes_fewer_tokens(tiny_params, batch):
    """XLA's own count of an update, layers unrolled so that every one is counted."""
    objective = grpo()
    rollout, reward, ref = batch
    rollout = rollout._replace(mask_PGT=jnp.arange(T) < jnp.arange(1, 5)[:, None] + jnp.zeros((P, 1, 1), int))
    data = assembled(objective, (rollout, reward, ref))
    model = decoder(TINY, remat="none", scan=False)
    step = jax.jit(make_train_step(model, objective, SGD, update=Update(logit_chunk=10_000)))
    flops = lambda data: step.lower(init_state(tiny_params, SGD), data).compile().cost_analysis()["flops"]
    whole, packed = flops(data), flops(packed_batch(data))
    assert packed < 0.75 * whole


@pytest.mark.parametrize("name", ["dapo", "dr_grpo", "gspo"])
def test_groups_without_spread_are_left_out_exactly(tiny_model, tiny_params, batch, name):
    """Their weight stays in the normaliser: update, loss and metrics are those of the whole batch."""
    objective = PRESETS[name](**OPTIONS.get(name, {}))
    rollout, reward, ref = batch
    reward = reward.at[jnp.array([1, 3])].set(0.7)
    data = assembled(objective, (rollout, reward, ref))
    less = drop_zero_variance_groups(objective, data, (1, 2, 3))
    assert less.rollout.tokens_PGT.shape[0] == 2
    np.testing.assert_array_equal(less.rollout.prompts.tokens_PS, rollout.prompts.tokens_PS[jnp.array([0, 2])])
    state, step = init_state(tiny_params, SGD), jax.jit(make_train_step(tiny_model, objective, SGD))
    (expected, metrics), (got, less_metrics) = step(state, data), step(state, less)
    chex.assert_trees_all_close(got.params, expected.params, atol=1e-6, rtol=1e-6)
    for metric in ("loss", "grad_norm", "zero_advantage"):
        np.testing.assert_allclose(less_metrics[metric], metrics[metric], rtol=1e-5, atol=1e-7)
    packed = drop_zero_variance_groups(objective, packed_batch(data, (0.9,)), (1, 2, 3))
    assert packed.rollout.token_index_PN.shape == (2, 18)  # 17 tokens of 24, packed before for 19
    chex.assert_trees_all_close(step(state, packed)[0].params, expected.params, atol=1e-6, rtol=1e-6)
    assert drop_zero_variance_groups(objective, data, (3,)).rollout.tokens_PGT.shape[0] == 3
    assert drop_zero_variance_groups(objective, data, (1,)) is data


def test_groups_stay_where_they_have_a_gradient(batch):
    """A KL term pulls at every token, so does an entropy bonus; without them a group without spread is inert."""
    objective = grpo(beta=0.1)
    rollout, reward, ref = batch
    data = assembled(objective, (rollout, jnp.zeros_like(reward), ref))
    assert drop_zero_variance_groups(objective, data, (1, 2)) is data
    inert = {
        name: not gradient_at_zero_advantage(PRESETS[name](**OPTIONS.get(name, {})))
        for name in ("dapo", "dr_grpo", "gspo", "ppo", "grpo")
    }
    assert inert == {"dapo": True, "dr_grpo": True, "gspo": True, "ppo": False, "grpo": False}
    assert not gradient_at_zero_advantage(grpo(beta=0.0))
    assert gradient_at_zero_advantage(entropy_bonus(dapo(), coef=0.01))
