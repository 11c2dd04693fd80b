"""Rewards of tokens: returns, GAE, process supervision, several rewards; against the oracle and by hand."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.objectives import (
    Objective,
    at_last_token,
    batch_advantages,
    batch_scale,
    batch_whiten,
    gae,
    gdpo,
    outcome,
    outcome_advantages,
    penalised,
    process_grpo,
    process_supervision,
    raw,
    returns_to_go,
    standardize,
    weighted_sum,
    whiten_tokens,
)

import objective_batches as batches
import oracle

nan = math.nan
close = functools.partial(np.testing.assert_allclose, atol=1e-6)


def test_returns_to_go_by_hand():
    # r = 1, −, 2 with γ = .5: 1 + .5·0 + .25·2 = 1.5, .5·2 = 1, 2.
    reward, mask = jnp.array([1.0, nan, 2.0, 9.0]), jnp.array([True, True, True, False])
    close(returns_to_go(reward, mask, gamma=0.5), [1.5, 1.0, 2.0, 0.0])
    close(returns_to_go(reward, mask), [3.0, 2.0, 2.0, 0.0])


def test_time_passes_over_tokens_that_are_not_actions():
    reward, mask = jnp.array([1.0, 5.0, 2.0]), jnp.array([True, False, True])
    close(returns_to_go(reward, mask, gamma=0.5), [2.0, 0.0, 2.0])
    short = gae(jnp.array([1.0, 2.0]), jnp.array([0.3, 0.4]), jnp.ones(2, bool), gamma=0.9, lam=0.8)
    close(gae(reward, jnp.array([0.3, 7.0, 0.4]), mask, gamma=0.9, lam=0.8), [short[0], 0.0, short[1]])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (1.0, 0.0)])
def test_gae(gamma, lam):
    lists = batches.make(steps=True)
    for steps, values in zip(lists["steps"][0], lists["old_value"][0], strict=True):
        n = len(steps)
        found = gae(jnp.array(steps), jnp.array(values), jnp.ones(n, bool), gamma=gamma, lam=lam)
        close(found, oracle.gae(steps, values, gamma, lam), rtol=1e-5)
        if lam == 1.0:
            close(found, np.array(oracle.returns_to_go(steps, gamma)) - values, rtol=1e-5, atol=1e-5)


def test_an_outcome_is_one_step_at_the_last_token():
    mask = jnp.array([True, True, False])
    placed = at_last_token(jnp.float32(2.0), mask)
    np.testing.assert_array_equal(placed, [nan, 2.0, nan])
    assert outcome(placed, mask) == 2
    assert np.isnan(outcome(jnp.array([nan, nan, 3.0]), mask))
    assert np.all(np.isnan(at_last_token(jnp.float32(2.0), jnp.zeros(3, bool))))


def test_the_kl_is_charged_on_every_token():
    mask = jnp.array([True, True, True, False])
    old, ref = jnp.array([-1.0, -2.0, -0.5, 5.0]), jnp.array([-1.5, -1.0, -0.5, 9.0])
    charged = penalised(jnp.array([nan, nan, 1.0, nan]), mask, old, ref, beta=0.1)
    close(charged, [-0.05, 0.1, 1.0, nan])
    assert np.all(np.isnan(penalised(jnp.full(4, nan), mask, old, ref, beta=0.1)))


def test_process_supervision_by_hand():
    # Step rewards 1, 0 | 0, 1 | 1 with outcome tokens where they end: mean .6, std .4899.
    reward = jnp.array([[[1.0, nan, 0.0], [0.0, 1.0, nan], [nan, 1.0, nan]]])
    mask = jnp.array([[[True] * 3, [True, True, False], [True, True, False]]])
    _, samples = batches.arrays(batches.make())
    samples = samples._replace(reward_T=reward, mask_T=mask)
    up, down = 0.4 / math.sqrt(0.24), -0.6 / math.sqrt(0.24)
    expected = [[[up + down, down, down], [up + down, up, 0.0], [up, up, 0.0]]]
    close(process_supervision(samples).adv, expected)
    loose = process_supervision(samples, ddof=1, eps=0.1).adv
    close(loose[0, 2, 0], 0.4 / (math.sqrt(1.2 / 4) + 0.1))


def test_process_supervision_against_the_oracle():
    lists = batches.make(steps=True)
    _, samples = batches.prepared(process_grpo(), lists)
    close(samples.adv, batches.pad([oracle.process_advantages(rows) for rows in lists["steps"]]), rtol=1e-5)


def test_rewards_of_tokens_are_summed_and_compared():
    lists = batches.make(steps=True)
    _, samples = batches.prepared(Objective(raw, None), lists)
    totals = [[sum(x for x in row if not math.isnan(x)) for row in rows] for rows in lists["steps"]]
    totals[1][1] = nan
    found = outcome_advantages(samples, advantage=standardize).adv
    close(found, [oracle.standardize(row) for row in totals], rtol=1e-4, atol=1e-5)


def test_whitening_leaves_a_mean_of_zero_and_a_spread_of_one():
    lists = batches.make(steps=True)
    _, samples = batches.prepared(Objective(raw, None), lists)
    samples = samples._replace(adv=samples.old_value_T)
    scored = samples.mask_T.at[1, 1].set(False)
    adv = np.asarray(whiten_tokens(samples).adv)[np.asarray(scored)]
    close([adv.mean(), adv.std()], [0.0, 1.0])
    assert np.all(whiten_tokens(samples).adv[1, 1] == 0)
    sloppy = np.asarray(whiten_tokens(samples, ddof=1, eps=0.5).adv)[np.asarray(scored)]
    raw_values = np.asarray(samples.old_value_T)[np.asarray(scored)]
    close(sloppy, (raw_values - raw_values.mean()) / (raw_values.std(ddof=1) + 0.5), rtol=1e-5)
    assert np.all(whiten_tokens(samples._replace(adv=jnp.full((3, 5), 0.7))).adv == 0)


REWARD_PNG = np.array(
    [[[1.0, 0.0, 0.0, 1.0], [0.2, 0.9, nan, 0.1]], [[nan, 1.0, 0.0, 0.0], [nan, 0.5, 0.5, 0.5]]], np.float32
)


def test_several_rewards_summed():
    objective = Objective(functools.partial(weighted_sum, weights=(1.0, 0.5)), None)
    expected = [[1.1, 0.45, 0.0, 1.05], [nan, 1.25, 0.25, 0.25]]
    close(batch_advantages(objective, REWARD_PNG), [oracle.standardize(row) for row in expected], rtol=1e-4)
    single = Objective(weighted_sum, None)
    close(batch_advantages(single, REWARD_PNG[:, 0]), [oracle.standardize(list(row)) for row in REWARD_PNG[:, 0]])


def test_several_rewards_each_normalised():
    found = batch_advantages(gdpo(weights=(1.0, 0.5)), REWARD_PNG)
    by_reward = REWARD_PNG.transpose(1, 0, 2).tolist()
    close(found, oracle.gdpo(by_reward, (1.0, 0.5)), rtol=1e-5)
    assert found[1, 0] == 0
    assert np.abs(found - batch_advantages(gdpo(weights=(1.0, 2.0)), REWARD_PNG)).max() > 0.1


def test_weights_must_be_as_many_as_rewards():
    with pytest.raises(ValueError, match="3 entries, but there are 2 rewards"):
        batch_advantages(gdpo(weights=(1.0, 1.0, 1.0)), REWARD_PNG)


def test_statistics_across_groups():
    reward = [[1.0, 0.0, 0.0, 1.0], [nan, 0.5, 0.9, 0.4]]
    close(batch_advantages(Objective(batch_scale, None), jnp.array(reward)), oracle.batch_scale(reward), rtol=1e-5)
    whitened = oracle.batch_whiten(reward, [oracle.center(row) for row in reward])
    close(batch_advantages(Objective(batch_whiten, None), jnp.array(reward)), whitened, rtol=1e-5)
