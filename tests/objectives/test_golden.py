"""Numbers worked out by hand or printed in the papers, each with where it comes from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.objectives import (
    Objective,
    batch_loss,
    center,
    clipped,
    compose,
    dapo,
    dr_grpo,
    dual_clip,
    geometric,
    grpo,
    k1,
    k2,
    k3,
    leave_one_out,
    limited,
    luspo,
    on_policy,
    over_mean,
    pass_at_k_advantage,
    per_sequence,
    per_token,
    product,
    raw,
    rounded,
    sequence_mean,
    soft_gated,
    standardize,
    unclipped,
    weighted_k3,
)
from grpo_jax.types import Sample

close = functools.partial(np.testing.assert_allclose, atol=1e-6, rtol=0)


def A(advantage, *rewards):
    return advantage(jnp.array(rewards))


def test_three_graded_rewards():
    # Hand calculation: mean .666667, population std √(.126667/3) = .205480.
    close(np.std([0.9, 0.7, 0.4]), 0.205480)
    close(A(standardize, 0.9, 0.7, 0.4), [1.135550, 0.162221, -1.297771])


def test_three_clipped_contributions():
    # Hand calculation on the advantages above: r = 7/6, 9/8, 2/3; the last is held at .8 since A < 0.
    adv = A(standardize, 0.9, 0.7, 0.4)
    log_ratio = jnp.log(jnp.array([0.35, 0.45, 0.20]) / jnp.array([0.30, 0.40, 0.30]))
    contributions = -clipped(log_ratio, adv, low=0.2, high=0.2)
    close(contributions, [1.324808, 0.182499, -1.038217])
    close(jnp.mean(contributions), 0.156363)
    # With a mean KL of .05 and β = .1 the objective is .156363 − .005.
    penalty = lambda logp, ref_logp: jnp.full_like(logp, 0.05)
    clip = functools.partial(clipped, low=0.2, high=0.2)
    loss = compose(per_token, clip, sequence_mean, divergence=penalty, beta=0.1)
    old = jnp.log(jnp.array([0.30, 0.40, 0.30]))
    sample = Sample(jnp.ones(3, bool), old, ref_logp_T=old, adv=adv)
    close(-loss(old + log_ratio, sample).value(), 0.151363)


def test_eight_binary_rewards():
    # 3 of 8 right: mean .375, std √(.375·.625) = .484123.
    adv = A(standardize, 1, 0, 0, 1, 0, 0, 0, 1)
    close(adv[:2], [0.625 / 0.4841229, -0.375 / 0.4841229])
    log_ratio = jnp.log(jnp.array([1.05, 0.97, 1.30, 1.10, 0.92, 1.00, 0.70, 1.25]))
    expected = [1.36, -0.75, -1.01, 1.42, -0.71, -0.77, -0.62, 1.55]
    close(-clipped(log_ratio, adv, low=0.2, high=0.2), expected, atol=0.005)


def test_shares_of_right_answers():
    # One right of eight; three and one right of four: √(n_wrong/n_right) and −√(n_right/n_wrong).
    close(A(standardize, 1, 0, 0, 0, 0, 0, 0, 0)[:2], [2.645751, -0.377964])
    close(A(standardize, 1, 1, 1, 0)[2:], [0.577350, -1.732051])
    close(A(standardize, 1, 0, 0, 0)[:2], [1.732051, -0.577350])


def test_scale_is_lost_and_rounding_restores_it():
    close(A(standardize, 10, 0, 0, 0), A(standardize, 1, 0, 0, 0))
    close(A(standardize, 0.51, 0.5, 0.5, 0.5)[0], 1.732051, atol=1e-4)
    assert np.all(A(functools.partial(rounded, step=0.1), 0.51, 0.5, 0.5, 0.5) == 0)
    # Rounded to quarters: .5, 0, 0, .25, of mean .1875.
    quarters = functools.partial(rounded, step=0.25, advantage=center)
    close(A(quarters, 0.6, 0.0, 0.1, 0.26), [0.3125, -0.1875, -0.1875, 0.0625])
    close(A(functools.partial(limited, limit=1.0), 1, 0, 0, 0), [1.0, -0.577350, -0.577350, -0.577350])


def test_four_baselines_on_one_right_of_four():
    rewards = (1.0, 0.0, 0.0, 0.0)
    # std with ddof 1 is .5, so 0.75/(.5 + 1e-4); population std √3/4.
    close(A(functools.partial(standardize, ddof=1, eps=1e-4), *rewards)[:2], [1.499700, -0.499900])
    close(A(standardize, *rewards)[:2], [1.732051, -0.577350])
    close(A(leave_one_out, *rewards)[:2], [1.0, -1 / 3])
    close(A(over_mean, *rewards)[:2], [3.0, -1.0])
    close(A(center, *rewards)[:2], [0.75, -0.25])
    close(A(raw, *rewards), rewards)


def test_pass_at_two_on_one_right_of_four():
    # Three of the six pairs hold the right one: R̄ = .5, σ = .5; the right one is in winning pairs only (A = 1),
    # a wrong one is in one winning and two losing pairs of three (A = −1/3).
    close(A(functools.partial(pass_at_k_advantage, k=2), 1, 0, 0, 0), [1.0, -1 / 3, -1 / 3, -1 / 3])
    close(A(functools.partial(pass_at_k_advantage, k=1), 1, 0, 0, 0), A(standardize, 1, 0, 0, 0))


def test_over_mean_is_silent_where_the_mean_is_not_positive():
    assert np.all(A(over_mean, 0.0, -1.0, 0.5) == 0)


@pytest.mark.parametrize(
    ("objective", "expected"),
    # (1 − 1)/2; (2 − 6)/8; (2 − 6)/(2·8); (2 − 6)/2, for token costs +1 and −1 on lengths 2 and 6.
    [(grpo(beta=0.0), 0.0), (dapo(), -0.5), (dr_grpo(max_length=8), -0.25), (luspo(), -2.0)],
)
def test_two_lengths_four_aggregations(objective, expected):
    mask = jnp.arange(6) < jnp.array([2, 6])[:, None]
    logp = jnp.zeros((1, 2, 6))
    samples = Sample(mask[None], logp, adv=jnp.array([[-1.0, 1.0]]))
    close(batch_loss(objective, logp, samples).value(), expected)


def test_sequence_ratios():
    # log-ratios .2, −.1, .5: mean .2, sum .6; GMPO holds .5 at .4 for A > 0: exp(.5/3).
    log_ratio, mask = jnp.array([0.2, -0.1, 0.5]), jnp.ones(3, bool)
    zero = jnp.zeros(3)
    close(jnp.exp(per_sequence(log_ratio, zero, mask)), [1.2214028] * 3)
    close(jnp.exp(product(log_ratio, zero, mask)), [1.8221188] * 3)
    bounded = functools.partial(geometric, low=0.4, high=0.4)
    close(jnp.exp(bounded(log_ratio, zero, mask, jnp.ones(3))), [1.1813604] * 3)
    close(jnp.exp(bounded(log_ratio, zero, mask, -jnp.ones(3))), [1.2214028] * 3)
    close(jnp.exp(bounded(jnp.array([0.2, -0.7, 0.2]), zero, mask, -jnp.ones(3))), [1.0] * 3)


def test_soft_gate():
    # τ = 1: f(1) = 4σ(0) = 2, f(1.5) = 4σ(.5), f′(1) = 4/4 = 1 by r, and by log r.
    gate = lambda r: -soft_gated(jnp.log(r), 1.0, tau_pos=1.0)
    close(gate(1.0), 2.0)
    close(gate(1.5), 2.4898373)
    close(jax.grad(gate)(1.0), 1.0)


def test_dual_clip_bounds_a_bad_token():
    # A = −1, r = 10: the loss is 10, and 3 with c = 3.
    plain = Objective(raw, compose(per_token, functools.partial(clipped, low=0.2, high=0.2), sequence_mean))
    sample = Sample(jnp.ones(1, bool), jnp.zeros(1), adv=-1.0)
    logp = jnp.log(jnp.array([10.0]))
    close(plain.loss(logp, sample).value(), 10.0, atol=1e-5)
    close(dual_clip(plain, c=3.0).loss(logp, sample).value(), 3.0)
    assert jax.grad(lambda x: dual_clip(plain).loss(x, sample).value())(logp)[0] == 0


def test_divergences():
    # log π = −1, log π_ref = −1.5, d = −.5: ∂k3/∂logπ = 1 − e^d, ∂(r·k3)/∂logπ at r = 1 is k3 + 1 − e^d = −d.
    close(k1(-1.0, -1.5), 0.5)
    close(k2(-1.0, -1.5), 0.125)
    close(k3(-1.0, -1.5), 0.1065307)
    close(k3(-1.20, -1.50), 0.0408182)
    close(jax.grad(k3)(-1.0, -1.5), 0.3934693)
    both = lambda logp: weighted_k3(logp, -1.5, on_policy(logp, None, None))
    close(jax.grad(both)(-1.0), 0.5)


def test_k3_keeps_its_digits():
    # d = 1e-6 in float32: exp(d) − d − 1 is off by 1e-7; d²/2 is 5e-13.
    naive = np.exp(np.float32(1e-6)) - np.float32(1e-6) - np.float32(1)
    assert abs(naive) > 5e-8
    assert abs(float(k3(jnp.float32(0.0), jnp.float32(1e-6)))) < 1e-12
    # d is held at 80: e^100 overflows float32, and a token that far from the reference has no gradient.
    np.testing.assert_allclose(k3(jnp.float32(0.0), jnp.float32(100.0)), np.expm1(80.0) - 80.0, rtol=1e-5)
    assert jax.grad(k3)(0.0, 100.0) == 0
    close(k3(0.0, 100.0, bound=2.0), np.exp(2) - 3, atol=1e-5)
    assert jax.grad(functools.partial(k3, bound=2.0))(0.0, 100.0) == 0


def test_temperature_missing_from_one_side_is_a_false_ratio():
    # Logits [2, 0] under temperature .9 and 1, for the same parameters.
    at = lambda temperature: jax.nn.log_softmax(jnp.array([2.0, 0.0]) / temperature)
    close([at(0.9)[0], at(1.0)[0]], [-0.1028887, -0.1269280])
    close(jnp.exp(per_token(at(0.9), at(1.0), None)), [1.024331, 0.820220])


def test_exponential_of_padding():
    # exp(200) is infinite in float32 and inf · 0 is NaN; the door of compose never takes it.
    naive = jnp.exp(jnp.array([0.0, 200.0])) * jnp.array([1.0, 0.0])
    assert np.isnan(naive[1])
    loss = compose(per_token, unclipped, sequence_mean)
    sample = Sample(jnp.array([True, False]), jnp.zeros(2), adv=-1.0)
    value, slope = jax.value_and_grad(lambda x: loss(x, sample).value())(jnp.array([0.0, 200.0]))
    close(value, 1.0)
    close(slope, [1.0, 0.0])


def test_seven_equal_rewards_in_float32():
    # The float32 std of seven rewards of .7 is 6e-8, not 0.
    rewards = jnp.full(7, 0.7)
    assert np.std(np.full(7, 0.7, np.float32)) > 0
    assert np.all(standardize(rewards) == 0)
