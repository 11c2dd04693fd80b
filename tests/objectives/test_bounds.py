"""Extreme log-ratios, extreme rewards, and options that are arrays."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.objectives import (
    PRESETS,
    AdaptiveObjective,
    Objective,
    batch_advantages,
    batch_loss,
    batch_scale,
    batch_whiten,
    bnpo,
    bounded_exp,
    bounded_expm1,
    center,
    cispo,
    clipped,
    compose,
    dapo,
    dppo,
    dr_grpo,
    drop_off_policy,
    drop_stale,
    dual_clip,
    entropy_bonus,
    from_sampler,
    gdpo,
    gmpo,
    grpo,
    has_signal,
    k2,
    k3,
    kimi,
    kl_in_reward,
    kl_mask,
    leave_one_out,
    length_weighted_baseline,
    masked_is,
    mirror,
    opo,
    over_mean,
    pass_at_k,
    per_token,
    ppo,
    product,
    reads,
    reinforce,
    rounded,
    sapo,
    sequence_mean,
    standardize,
    tapered,
    token_mean,
    top_entropy,
    topr,
    truncated,
    truncated_is,
    tv_mask,
    unclipped,
    value_loss,
    vespo,
    whiten_tokens,
)
from grpo_jax.types import Sample

import objective_batches as batches
import oracle

nan = math.nan

# --- log-ratios ---------------------------------------------------------------------------------------------------


def one_sequence(objective, log_ratio, adv, T):
    """The gradient of the loss of one sequence in log π_1, …, log π_T."""
    mask = jnp.ones((1, 1, T), bool)
    old = jnp.full((1, 1, T), -1.5)
    samples = Sample(mask, old, adv=jnp.full((1, 1), adv))
    return np.asarray(jax.grad(lambda x: batch_loss(objective, x, samples).total)(old + log_ratio))[0, 0]


@pytest.mark.parametrize("mean_log_ratio", [-0.041, 0.041, -0.039, 0.3])
@pytest.mark.parametrize("adv", [1.0, -1.0])
def test_a_sum_over_a_long_sequence_is_not_bounded(mean_log_ratio, adv):
    T = 2000
    total = T * mean_log_ratio
    # TOPR: −w·A with w = 1, or min(e^total, 1) for A < 0. Kimi: −A + τ·total.
    weight = 1.0 if adv > 0 else min(math.exp(total), 1.0)
    np.testing.assert_allclose(one_sequence(topr(), mean_log_ratio, adv, T), -weight * adv, rtol=2e-3)
    np.testing.assert_allclose(one_sequence(kimi(), mean_log_ratio, adv, T), total - adv, rtol=1e-3)
    np.testing.assert_allclose(one_sequence(kimi(tau=0.1), mean_log_ratio, adv, T), 0.1 * total - adv, rtol=1e-3)


@pytest.mark.parametrize("log_old", [-5.0, -10.0, -14.0])
def test_the_weight_of_dppo_is_truncated(log_old):
    mask = jnp.ones((1, 1, 1), bool)
    old = jnp.full((1, 1, 1), log_old)
    total = lambda x, objective, adv: batch_loss(objective, x, Sample(mask, old, adv=jnp.full((1, 1), adv))).total
    slope = lambda objective, adv: jax.grad(total)(jnp.full((1, 1, 1), -0.7), objective, adv).item()
    ratio = math.exp(-0.7 - log_old)
    assert slope(dppo(), -1.0) == pytest.approx(min(ratio, 20.0), rel=1e-5)
    assert slope(dppo(bound=math.inf), -1.0) == pytest.approx(ratio, rel=1e-4)
    assert slope(dppo(bound=100.0), -1.0) == pytest.approx(min(ratio, 100.0), rel=1e-4)
    assert slope(dppo(), 1.0) == 0  # π has moved by more than .15 where A would push it further


def test_a_truncated_weight_below_its_bound_is_the_plain_ratio():
    x = jnp.linspace(-3.0, 2.0, 11)
    for adv in (1.0, -0.5):
        plain = jax.vmap(jax.value_and_grad(functools.partial(unclipped, adv=adv)))(x)
        np.testing.assert_allclose(
            jax.vmap(jax.value_and_grad(functools.partial(truncated, adv=adv, bound=8.0)))(x), plain
        )
    assert jax.grad(functools.partial(truncated, adv=1.0, bound=8.0))(5.0) == -8


def test_a_probability_of_one_at_a_bound_is_finite():
    assert bounded_exp(jnp.float32(1e4)) == bounded_exp(jnp.float32(80.0))
    assert bounded_exp(jnp.float32(-1e4)) == 0
    assert bounded_expm1(jnp.float32(-1e4)) == -1
    np.testing.assert_allclose(bounded_expm1(jnp.float32(1e-6)), 1e-6, rtol=1e-6)
    assert jax.grad(bounded_exp)(100.0) == 0


WRAPPED = {
    "dual clip": lambda: dual_clip(grpo()),
    "tis": lambda: truncated_is(grpo(), ratio=product),
    "icepop": lambda: masked_is(dapo(), ratio=product),
    "sampler as old": lambda: from_sampler(dapo()),
    "sampler as old, product": lambda: from_sampler(vespo()),
    "kl mask": lambda: kl_mask(dapo(), delta=0.05),
    "tv mask": lambda: tv_mask(dapo(), delta=0.05),
    "off-policy": lambda: drop_off_policy(grpo(), delta=0.1),
    "no bound": lambda: dppo(bound=math.inf),
}
EXTREME = {name: functools.partial(batches.preset, name) for name in PRESETS} | WRAPPED


@pytest.mark.parametrize("name", EXTREME)
def test_extreme_log_ratios_give_finite_losses_and_gradients(name):
    objective = EXTREME[name]()
    lists = batches.make(steps=True)
    logp, samples = batches.arrays(lists)
    samples = batches.prepare(objective, samples, jnp.asarray(lists["reward"]))
    loss = jax.jit(jax.value_and_grad(lambda x, s: batch_loss(objective, x, s).value()))
    signs = jnp.sign(jnp.sin(2.0 * jnp.arange(logp.size))).reshape(logp.shape)
    for adv in (samples.adv, jnp.zeros_like(samples.adv), jnp.abs(samples.adv), -jnp.abs(samples.adv)):
        for log_ratio in (1e4, -1e4, 90.0, -90.0, 1e4 * signs):
            for sampler in (samples.sampler_logp_T, samples.old_logp_T - log_ratio):
                seen = samples._replace(adv=adv, sampler_logp_T=sampler)
                value, slope = loss(samples.old_logp_T + log_ratio, seen)
                assert np.isfinite(value)
                assert np.all(np.isfinite(slope))


# --- rewards ------------------------------------------------------------------------------------------------------

REWARDS = {
    "large": [1e20, 0.0, 0.0, 1e20],
    "largest": [3.4e38, -3.4e38, 3.4e38, 1e38],
    "all large": [3e38, 3e38, 3e38, 1e38],
    "spread of 2e19": [2e19, -2e19, nan, 1e19],
    "one of them": [3e38, 1.0, 0.0, 0.5],
    "usual": [0.9, 0.7, 0.4, nan],
    "small": [2e-5, 0.0, 1e-5, 3e-5],
}
AS_TORCH = {"ddof": 1, "eps": 1e-4}
ADVANTAGES = {
    "standardize": (standardize, oracle.standardize),
    "ddof, eps": (functools.partial(standardize, **AS_TORCH), functools.partial(oracle.standardize, **AS_TORCH)),
    "over_mean": (over_mean, oracle.over_mean),
}


def as_float32(rewards):
    return [float(np.float32(r)) for r in rewards]


@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_rewards_of_any_size_are_normalised(name, kind):
    ours, formula = ADVANTAGES[name]
    rewards = as_float32(REWARDS[kind])
    np.testing.assert_allclose(jax.jit(ours)(jnp.array(rewards, jnp.float32)), formula(rewards), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["large", "all large", "spread of 2e19", "usual"])
@pytest.mark.parametrize("name", ["center", "leave_one_out"])
def test_rewards_of_any_size_are_centred(name, kind):
    rewards = as_float32(REWARDS[kind])
    ours = {"center": center, "leave_one_out": leave_one_out}[name]
    expected = getattr(oracle, name)(rewards)
    np.testing.assert_allclose(ours(jnp.array(rewards, jnp.float32)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", REWARDS)
def test_statistics_of_the_batch_take_rewards_of_any_size(kind):
    groups = [as_float32(REWARDS[kind]), [0.0, 1.0, 0.5, 0.25]]
    reward = jnp.array(groups, jnp.float32)
    if kind != "largest":  # a difference of 6.8e38 is no float32
        whitened = oracle.batch_whiten(groups, [oracle.center(row) for row in groups])
        np.testing.assert_allclose(
            batch_advantages(Objective(batch_whiten, None), reward), whitened, rtol=1e-5, atol=1e-6
        )
    found = batch_advantages(Objective(batch_scale, None), reward)
    np.testing.assert_allclose(found, oracle.batch_scale(groups), rtol=1e-5, atol=1e-6)


def test_several_rewards_of_different_size():
    reward = np.array([[[1e20, 0.0, 0.0, 1e20], [0.2, 0.9, nan, 0.1]]], np.float32)
    expected = oracle.gdpo(reward.transpose(1, 0, 2).tolist(), (1.0, 0.5))
    np.testing.assert_allclose(batch_advantages(gdpo(weights=(1.0, 0.5)), reward), expected, rtol=1e-5)


def test_tokens_of_any_size_are_whitened_and_baselines_weighed():
    lists = batches.make(steps=True)
    _, samples = batches.prepared(opo(), lists)
    adv = [[[1e20 * v for v in row] for row in rows] for rows in lists["old_value"]]
    whitened = whiten_tokens(samples._replace(adv=jnp.asarray(1e20 * samples.old_value_T)))
    expected = batches.pad(oracle.whiten_tokens(adv, oracle.known(lists)))
    np.testing.assert_allclose(whitened.adv, expected, rtol=1e-4, atol=1e-5)
    huge = samples._replace(reward_T=1e37 * samples.reward_T)
    totals = [[1e37 * np.nansum(row) if not math.isnan(row[-1]) else nan for row in rows] for rows in lists["steps"]]
    lengths = [list(map(len, rows)) for rows in lists["steps"]]
    expected = [oracle.length_weighted(*group) for group in zip(totals, lengths, strict=True)]
    np.testing.assert_allclose(length_weighted_baseline(huge).adv, expected, rtol=1e-4, atol=1e32)


def test_rounding_does_not_overflow():
    rewards = jnp.array([3e38, 0.0, 0.26, -1e30])
    np.testing.assert_allclose(rounded(rewards, step=0.1, advantage=lambda r: r), [3e38, 0.0, 0.3, -1e30], rtol=1e-6)


def test_an_infinite_reward_is_no_zero():
    """1e39 is infinite in float32: what follows must not look like a zero-variance group."""
    rewards = jnp.array([jnp.inf, 0.0, 0.0, 1.0])
    assert has_signal(rewards)
    assert np.any(np.isnan(standardize(rewards)))


def test_scaling_changes_no_bit_of_usual_rewards():
    rng = np.random.default_rng(0)
    for _ in range(20):
        rewards = rng.normal(size=6).astype(np.float32)
        mean = np.float32(jnp.sum(jnp.asarray(rewards)) / 6)
        centered = rewards - mean
        std = jnp.sqrt(jnp.sum(jnp.asarray(centered) ** 2) / 6)
        np.testing.assert_array_equal(standardize(jnp.asarray(rewards)), jnp.asarray(centered) / std)


# --- options that are arrays --------------------------------------------------------------------------------------

CLIP = functools.partial(clipped, low=0.2, high=0.2)
near_reference = lambda kl: Objective(center, compose(per_token, CLIP, token_mean, divergence=kl, beta=0.1))
# An objective as a function of one option, and the option's value.
TRACED = {
    "high of grpo": (lambda x: grpo(high=x), 0.1),
    "low of grpo": (lambda x: grpo(low=x), 0.1),
    "low of cispo": (lambda x: cispo(low=x), 1.0),
    "high of cispo": (lambda x: cispo(high=x), 0.1),
    "low of gmpo": (lambda x: gmpo(low=x), 0.1),
    "beta of grpo": (lambda x: grpo(beta=x), 0.3),
    "bound of k3": (lambda x: near_reference(functools.partial(k3, bound=x)), 0.1),
    "tau of sapo": (lambda x: sapo(tau_pos=x), 2.0),
    "k of vespo": (lambda x: vespo(k_pos=x), 1.0),
    "tau of kimi": (lambda x: kimi(tau=x), 2.0),
    "delta of dppo": (lambda x: dppo(delta=x), 0.05),
    "bound of dppo": (lambda x: dppo(bound=x), 1.1),
    "max_length": (lambda x: dr_grpo(max_length=x), 8),
    "k of pass_at_k": (lambda x: pass_at_k(k=x), 2),
    "gamma": (lambda x: reinforce(gamma=x), 0.5),
    "lam": (lambda x: ppo(lam=x), 0.5),
    "value_coef": (lambda x: ppo(value_coef=x), 0.5),
    "value_clip": (lambda x: ppo(value_clip=x), 0.1),
    "entropy_coef": (lambda x: ppo(entropy_coef=x), 0.1),
    "c of dual_clip": (lambda x: dual_clip(dapo(), c=x), 1.1),
    "cap of truncated_is": (lambda x: truncated_is(dapo(), cap=x), 1.1),
    "low of masked_is": (lambda x: masked_is(dapo(), low=x), 0.9),
    "cap of from_sampler": (lambda x: from_sampler(dapo(), cap=x), 1.1),
    "delta of drop_off_policy": (lambda x: drop_off_policy(dapo(), delta=x), 0.1),
    "max_age": (lambda x: drop_stale(dapo(), max_age=x), 1),
    "delta of tv_mask": (lambda x: tv_mask(dapo(), delta=x), 0.1),
    "delta of kl_mask": (lambda x: kl_mask(dapo(), delta=x), 0.02),
    "coef of entropy_bonus": (lambda x: entropy_bonus(dapo(), coef=x), 0.1),
    "coef of value_loss": (lambda x: value_loss(ppo(), coef=x), 0.1),
    "fraction": (lambda x: top_entropy(dapo(), fraction=x), 0.5),
    "beta of kl_in_reward": (lambda x: kl_in_reward(dapo(), beta=x), 0.5),
    "eps": (lambda x: bnpo()._replace(advantage=functools.partial(standardize, eps=x)), 0.5),
}  # fmt: skip


def loss_of(objective):
    logp, samples = batches.prepared(objective, batches.make(steps=True))
    samples = samples._replace(age=jnp.arange(15).reshape(3, 5) % 3)
    return jax.value_and_grad(lambda x: batch_loss(objective, x, samples).value())(logp)


@pytest.mark.parametrize("name", TRACED)
def test_an_option_may_be_traced_or_an_array(name):
    make, option = TRACED[name]
    expected = loss_of(make(option))
    shown = []

    def traced(x):
        objective = make(x)
        shown.append(str(objective))
        return loss_of(objective)

    for found in (
        jax.jit(traced)(option),
        jax.jit(lambda: loss_of(make(np.asarray(option))))(),
        jax.jit(lambda: loss_of(make(jnp.asarray(option))))(),
    ):
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert "traced" in shown[0] or name in ("eps",)
    assert f"{option:.6g}" in str(make(np.float32(option)))


def test_a_recipe_shows_arrays():
    weights = np.array([1.0, 0.5])
    objective = Objective(functools.partial(standardize, eps=jnp.float32(0.25)), functools.partial(mirror, tau=weights))
    assert str(objective) == "Objective(\n    advantage=standardize(eps=0.25),\n    loss=mirror(tau=[1.  0.5]),\n)"
    assert "weights=(1, 0.5)" in str(gdpo(weights=weights))
    assert "beta=0.3" in str(grpo(beta=jnp.float32(0.3)))
    assert "beta" in str(
        Objective(center, compose(per_token, CLIP, sequence_mean, divergence=k2, beta=np.float32(0.1)))
    )


@pytest.mark.parametrize("kind", [np.float32, np.asarray, jnp.float32])
def test_an_array_out_of_range_is_refused(kind):
    for make in (
        lambda: grpo(high=kind(-0.5)),
        lambda: grpo(beta=kind(np.nan)),
        lambda: truncated_is(dapo(), cap=kind(-1.0)),
        lambda: tv_mask(dapo(), delta=kind(2.0)),
        lambda: dppo(bound=kind(0.0)),
    ):
        with pytest.raises(ValueError, match=r"must be|needs"):
            make()
    with pytest.raises(TypeError, match=r"high must be a number or an array, got '0\.2'"):
        grpo(high="0.2")


def test_a_number_of_numpy_that_is_zero_is_off():
    assert "ref_logp_T" not in reads(grpo(beta=np.float32(0.0)))
    assert "ref_logp_T" in reads(grpo(beta=jnp.float32(0.0)))
    assert "reward_T" not in reads(rloo_with(np.asarray(0.0)))


def rloo_with(beta):
    return PRESETS["rloo"](beta=beta)


def test_a_clip_may_be_the_state_of_an_objective():
    adaptive = AdaptiveObjective(lambda: jnp.float32(0.2), lambda high: grpo(high=high, beta=0.0), None)
    logp, samples = batches.prepared(bnpo(), batches.make())
    at = jax.jit(lambda high: batch_loss(adaptive.bind(high), logp, samples).value())
    for high in (0.05, 0.2, 0.4):
        np.testing.assert_allclose(at(high), batch_loss(grpo(high=high, beta=0.0), logp, samples).value(), rtol=1e-6)


def test_a_part_of_ones_own_is_given_the_log_ratio_as_it_is():
    seen = []

    def surrogate(log_ratio, adv):
        seen.append(log_ratio)
        return -adv * bounded_exp(log_ratio)

    objective = Objective(standardize, compose(product, surrogate, sequence_mean))
    seen.clear()
    sample = Sample(jnp.ones(2000, bool), jnp.full(2000, -1.0), adv=1.0)
    objective.loss(jnp.full(2000, -0.9), sample)
    np.testing.assert_allclose(seen[0], 200.0, rtol=1e-4)
    np.testing.assert_allclose(tapered(seen[0], 1.0)[0], -1.0)
