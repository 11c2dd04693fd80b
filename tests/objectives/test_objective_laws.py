"""Laws that hold for every preset, and for objectives corrected in every way: values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.objectives import (
    PRESETS,
    Objective,
    batch_advantages,
    batch_loss,
    center,
    compose,
    dapo,
    diagnostics,
    drop_off_policy,
    drop_stale,
    drop_truncated,
    dual_clip,
    entropy_bonus,
    from_sampler,
    grpo,
    gspo,
    gspo_token,
    kl_in_reward,
    kl_mask,
    leave_one_out,
    luspo,
    masked_is,
    on_policy,
    per_group,
    process_grpo,
    product,
    reads,
    reinforce,
    rloo,
    sequence_mean,
    sequence_sum,
    standardize,
    top_entropy,
    truncated_is,
    unclipped,
)

import objective_batches as batches

CORRECTED = {
    "tis": lambda: truncated_is(grpo(), cap=1.5),
    "tis of the sequence": lambda: truncated_is(gspo(), cap=1.5, ratio=product),
    "icepop": lambda: masked_is(dapo(), low=0.5, high=2.0),
    "sampler as old": lambda: from_sampler(dapo(), cap=2.0),
    "off-policy mask": lambda: drop_off_policy(grpo(), delta=0.1),
    "stale": lambda: drop_stale(grpo(), max_age=1),
    "truncated": lambda: drop_truncated(grpo()),
    "dual clip": lambda: dual_clip(grpo(), c=1.3),
    "kl mask": lambda: kl_mask(dapo(), delta=0.05),
    "entropy": lambda: entropy_bonus(dapo(), coef=0.1),
    "top entropy": lambda: top_entropy(grpo(), fraction=0.3),
    "per group": lambda: per_group(dapo()),
    "kl in reward": lambda: kl_in_reward(dapo(), beta=0.3),
    "many": lambda: truncated_is(dual_clip(top_entropy(drop_truncated(per_group(dapo()))), c=1.3), cap=1.2),
}
OBJECTIVES = {name: functools.partial(batches.preset, name) for name in PRESETS} | CORRECTED
# Without a group baseline a constant reward is still a reward.
WITHOUT_BASELINE = ("reinforce", "reinforce_baseline", "reinforce_pp", "ppo")
every_objective = pytest.mark.parametrize("name", OBJECTIVES)


def batch(objective, lists=None):
    """A prepared batch in which some completions are truncated and some are old."""
    logp, samples = batches.arrays(lists or batches.make(1.0, steps=True))
    place = jnp.arange(samples.age.size).reshape(samples.age.shape)
    samples = samples._replace(stopped=place % 4 != 1, age=place % 3)
    return logp, batches.prepare(objective, samples, jnp.asarray(batches.REWARDS))


def pair_and_slope(objective, logp, samples):
    """The Mean, and the gradient of its total: both add over the pieces of a batch."""
    slope, mean = jax.grad(lambda x: (lambda m: (m.total, m))(batch_loss(objective, x, samples)), has_aux=True)(logp)
    return mean, slope


@every_objective
def test_cutting_along_prompts_and_groups_changes_nothing(name):
    objective = OBJECTIVES[name]()
    logp, samples = batch(objective)
    whole, slope = pair_and_slope(objective, logp, samples)
    assert np.abs(slope).max() > 0
    for axis in (0, 1):
        # One prompt at a time, then one completion of each prompt at a time.
        pieces = jax.tree.map(lambda x, axis=axis: jnp.expand_dims(jnp.moveaxis(x, axis, 0), axis + 1), (logp, samples))
        parts, part_slopes = jax.vmap(functools.partial(pair_and_slope, objective))(*pieces)
        np.testing.assert_allclose(jnp.sum(parts.total), whole.total, rtol=1e-6, atol=2e-6)
        np.testing.assert_allclose(jnp.sum(parts.weight), whole.weight, rtol=1e-6)
        joined = jnp.moveaxis(jnp.squeeze(part_slopes, axis + 1), 0, axis)
        np.testing.assert_allclose(joined, slope, rtol=1e-6, atol=1e-7)


@every_objective
def test_masked_tokens_change_nothing(name):
    objective = OBJECTIVES[name]()
    lists = batches.make(1.0, steps=True)
    logp, samples = batches.arrays(lists)
    garbage = jnp.resize(jnp.array([jnp.nan, 1e4, -jnp.inf, -1e4, jnp.inf]), logp.shape)
    spoil = lambda x: jnp.where(samples.mask_T, x, garbage) if x.ndim == 3 and x.dtype == logp.dtype else x
    advantages = functools.partial(batches.prepare, objective, reward=jnp.asarray(batches.REWARDS))
    clean = advantages(samples=samples)
    # What `prepare` made is spoilt once more: an advantage or weight of a masked token is no more than padding.
    spoilt = jax.tree.map(spoil, advantages(samples=jax.tree.map(spoil, samples)))
    mean, slope = pair_and_slope(objective, logp, clean)
    spoilt_mean, spoilt_slope = pair_and_slope(objective, spoil(logp), spoilt)
    np.testing.assert_array_equal(spoilt_mean, mean)
    np.testing.assert_array_equal(spoilt_slope, slope)
    shown, spoilt_shown = diagnostics(objective, logp, clean), diagnostics(objective, spoil(logp), spoilt)
    for key, value in shown.items():
        np.testing.assert_array_equal(spoilt_shown[key], value, err_msg=key)


@every_objective
def test_a_fully_masked_batch_is_nothing(name):
    objective = OBJECTIVES[name]()
    logp, samples = batches.arrays(batches.make())
    samples = samples._replace(mask_T=jnp.zeros_like(samples.mask_T))
    samples = batches.prepare(objective, samples, jnp.asarray(batches.REWARDS))
    value, slope = jax.value_and_grad(lambda x: batch_loss(objective, x, samples).value())(logp)
    assert value == 0
    assert np.all(slope == 0)


@every_objective
def test_permuting_a_group_permutes_its_results(name):
    objective = OBJECTIVES[name]()
    lists = batches.make(1.0, steps=True)
    logp, samples = batches.arrays(lists)
    reward, order = jnp.asarray(batches.REWARDS), np.array([3, 0, 4, 1, 2])
    shuffled = jax.tree.map(lambda x: x[:, order], samples)
    mean, slope = pair_and_slope(objective, logp, batches.prepare(objective, samples, reward))
    other = batches.prepare(objective, shuffled, reward[:, order])
    mean_after, slope_after = pair_and_slope(objective, logp[:, order], other)
    np.testing.assert_allclose(mean_after, mean, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(slope_after, slope[:, order], rtol=1e-5, atol=2e-6)


@every_objective
def test_at_step_zero_every_ratio_is_one(name):
    objective = OBJECTIVES[name]()
    _, samples = batch(objective)
    samples = samples._replace(ref_logp_T=samples.old_logp_T, sampler_logp_T=samples.old_logp_T)
    shown = diagnostics(objective, samples.old_logp_T, samples)
    assert shown["ratio"].value() == 1
    assert shown["kl"].value() == 0
    assert shown["sampler_logp_diff"].value() == 0
    assert shown["clip_low"].total == shown["clip_high"].total == 0


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in (*WITHOUT_BASELINE, "kl in reward")])
def test_equal_rewards_teach_nothing(name):
    objective = OBJECTIVES[name]()
    _, samples = batches.arrays(batches.make())
    constant = lambda value: jnp.where(jnp.isnan(samples.reward_T), jnp.nan, value)
    for value in (0.0, 1.0, 0.7, -3.3, 1e6):
        equal = batches.prepare(objective, samples._replace(reward_T=constant(value)), jnp.full((3, 5), value))
        assert np.all(equal.adv == 0)
    alone = jax.tree.map(lambda x: x[:1, :1], samples._replace(reward_T=constant(0.7)))
    assert np.all(batches.prepare(objective, alone, jnp.array([[0.7]])).adv == 0)


@every_objective
def test_what_cannot_be_scored_teaches_nothing(name):
    """The unscorable completion and a group of them get advantage 0, and nothing becomes NaN."""
    objective = OBJECTIVES[name]()
    logp, samples = batches.arrays(batches.make())
    reward = jnp.asarray(batches.REWARDS).at[2].set(jnp.nan)
    reward_T = samples.reward_T.at[2].set(jnp.nan)
    samples = batches.prepare(objective, samples._replace(reward_T=reward_T), reward)
    assert np.all(samples.adv[1, 1] == 0)
    assert np.all(samples.adv[2] == 0)
    assert np.any(samples.adv[1, 0] != 0)
    mean, slope = pair_and_slope(objective, logp, samples)
    assert np.isfinite(mean.total)
    assert np.all(np.isfinite(slope))


@pytest.mark.parametrize(
    "name", [n for n in PRESETS if n not in ("lite_ppo", "gdpo", "reinforce_pp_baseline", *WITHOUT_BASELINE, "opo")]
)
def test_unscorable_rewards_are_left_out_of_the_statistics(name):
    objective = batches.preset(name)
    full = batch_advantages(objective, jnp.array([[1.0, jnp.nan, 0.0, 0.0, 1.0, 0.25]]))
    without = batch_advantages(objective, jnp.array([[1.0, 0.0, 0.0, 1.0, 0.25]]))
    np.testing.assert_allclose(np.delete(full, 1, axis=1), without, rtol=1e-6)
    assert np.any(without != 0)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl", "pass_at_k", "lite_ppo", "gdpo"])
def test_advantages_of_a_group_sum_to_zero(name):
    adv = batch_advantages(batches.preset(name), jnp.array([[1.0, 0.0, 0.0, 1.0, 0.0, 1.0], [0.0, 0, 0, 0, 1, 0]]))
    np.testing.assert_allclose(jnp.sum(adv, axis=1), 0.0, atol=2e-6)


@pytest.mark.parametrize("advantage", [standardize, center, leave_one_out])
def test_shifting_rewards_changes_nothing(advantage):
    reward = jnp.array([0.9, 0.7, 0.4, 0.1])
    np.testing.assert_allclose(advantage(reward + 3), advantage(reward), atol=1e-5)
    np.testing.assert_allclose(standardize(5 * reward), standardize(reward), atol=1e-5)


def slope_of(objective, logp, samples):
    return jax.grad(lambda x: batch_loss(objective, x, samples).value())(logp)


def same(left, right, logp, left_samples, right_samples=None):
    right_samples = left_samples if right_samples is None else right_samples
    np.testing.assert_allclose(
        slope_of(left, logp, left_samples), slope_of(right, logp, right_samples), rtol=1e-5, atol=1e-7
    )


def scored_batch(objective):
    lists = batches.make(1.0)
    lists["reward"] = [[1.0, 0.0, 0.5, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0, 0.0], [0.2, 0.3, 0.9, 1.0, 0.0]]
    outcome = lambda row, reward: [np.nan] * (len(row) - 1) + [reward]
    lists["steps"] = [
        [outcome(row, reward) for row, reward in zip(rows, rewards, strict=True)]
        for rows, rewards in zip(lists["old"], lists["reward"], strict=True)
    ]
    return batches.prepared(objective, lists)


def test_gspo_on_sequences_of_one_token_is_grpo():
    left, right = gspo(low=0.2, high=0.2), grpo(beta=0.0)
    logp, samples = scored_batch(left)
    samples = samples._replace(mask_T=samples.mask_T & (jnp.arange(batches.T) == 0))
    same(left, right, logp, samples)


def test_gspo_token_with_one_advantage_a_sequence_is_gspo():
    logp, samples = scored_batch(gspo())
    same(gspo(low=0.1, high=0.1), gspo_token(low=0.1, high=0.1), logp, samples)


def test_dapo_is_grpo_when_all_lengths_are_equal():
    logp, samples = scored_batch(dapo())
    samples = samples._replace(mask_T=jnp.broadcast_to(jnp.arange(batches.T) < 3, samples.mask_T.shape))
    same(dapo(high=0.28), grpo(high=0.28, beta=0.0), logp, samples)
    same(per_group(dapo()), dapo(), logp, per_group(dapo()).prepare(samples), samples)


def test_luspo_is_gspo_times_the_length():
    logp, samples = scored_batch(gspo())
    three = samples._replace(mask_T=jnp.broadcast_to(jnp.arange(batches.T) < 3, samples.mask_T.shape))
    np.testing.assert_allclose(slope_of(luspo(), logp, three), 3 * slope_of(gspo(), logp, three), rtol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo_token", "gmpo", "sapo"])
def test_at_ratio_one_every_sequence_mean_has_the_gradient_of_reinforce(name):
    objective = batches.preset(name)
    _, samples = scored_batch(objective)
    samples = samples._replace(ref_logp_T=samples.old_logp_T)
    plain = Objective(standardize, compose(on_policy, unclipped, sequence_mean))
    same(objective, plain, samples.old_logp_T, samples)


def test_rloo_clipped_at_ratio_one_is_reinforce_on_the_sequence():
    _, samples = scored_batch(rloo())
    same(rloo(low=0.2, high=0.2), rloo(), samples.old_logp_T, samples)


def test_on_policy_objectives_need_no_second_forward_pass():
    for objective in (rloo(), batches.preset("opo"), reinforce()):
        assert "old_logp_T" not in reads(objective)
    assert "old_logp_T" in reads(grpo())


def test_process_supervision_of_an_outcome_is_grpo():
    logp, samples = scored_batch(process_grpo())
    _, outcomes = scored_batch(grpo())
    same(process_grpo(), grpo(), logp, samples, outcomes)


def test_reinforce_with_an_outcome_weighs_every_token_by_the_reward():
    logp, samples = scored_batch(reinforce())
    plain = Objective(standardize, compose(on_policy, unclipped, sequence_sum))
    _, rewards = scored_batch(plain)
    rewards = rewards._replace(adv=jnp.nansum(samples.reward_T, axis=-1))
    same(reinforce(), plain, logp, samples, rewards)


def test_the_sampler_as_old_is_its_log_probabilities_as_old():
    logp, samples = scored_batch(grpo())
    swapped = samples._replace(old_logp_T=samples.sampler_logp_T)
    same(from_sampler(grpo()), grpo(), logp, samples, swapped)


def test_no_kl_in_the_reward_is_the_plain_objective():
    logp, samples = scored_batch(grpo())
    same(kl_in_reward(grpo(), beta=0.0), grpo(), logp, kl_in_reward(grpo(), beta=0.0).prepare(samples), samples)
