"""kl_in_reward: what it composes with, against loops over Python floats; and what it refuses."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.objectives import (
    Objective,
    batch_loss,
    bnpo,
    center,
    gdpo,
    grpo,
    kl_in_reward,
    leave_one_out,
    opo,
    outcome_advantages,
    ppo,
    process_grpo,
    reinforce,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    standardize,
    then_prepare,
    top_entropy,
    weighted_sum,
)

import objective_batches as batches
import oracle

BETA = 0.3


def advantages(objective, lists):
    return np.asarray(batches.prepared(objective, lists)[1].adv)


def outcomes(lists):
    steps = oracle.step_rewards(lists, BETA)
    return [[sum(row) if not math.isnan(row[-1]) else math.nan for row in rows] for rows in steps]


FORMULAS = {"standardize": oracle.standardize, "center": oracle.center, "leave_one_out": oracle.leave_one_out}


@pytest.mark.parametrize("advantage", [standardize, center, leave_one_out])
def test_the_advantage_is_the_one_that_the_objective_has_at_last(advantage):
    lists = batches.make()
    expected = [FORMULAS[advantage.__name__](row) for row in outcomes(lists)]
    before = kl_in_reward(bnpo()._replace(advantage=advantage), beta=BETA)
    after = kl_in_reward(bnpo(), beta=BETA)._replace(advantage=advantage)
    rebuilt = Objective(advantage, *tuple(kl_in_reward(bnpo(), beta=BETA))[1:])
    wrapped = top_entropy(kl_in_reward(bnpo(), beta=BETA))._replace(advantage=advantage)
    for objective in (before, after, rebuilt, wrapped):
        np.testing.assert_allclose(advantages(objective, lists), expected, rtol=1e-4, atol=1e-5)


def test_an_advantage_that_was_bound_stays():
    lists = batches.make(steps=True)
    bound = functools.partial(outcome_advantages, advantage=center)
    objective = then_prepare(bnpo(), bound)._replace(advantage=leave_one_out)
    totals = [[sum(x for x in row if not math.isnan(x)) for row in rows] for rows in lists["steps"]]
    totals[1][1] = math.nan
    expected = [oracle.center(row) for row in totals]
    np.testing.assert_allclose(advantages(objective, lists), expected, rtol=1e-4, atol=1e-5)


WITHOUT_KL = {
    "reinforce": (reinforce(), reinforce(beta=BETA)),
    "reinforce_pp": (reinforce_pp(beta=0.0), reinforce_pp(beta=BETA)),
    "ppo": (ppo(beta=0.0), ppo(beta=BETA)),
    "rloo": (rloo(), rloo(beta=BETA)),
}


@pytest.mark.parametrize("name", WITHOUT_KL)
def test_it_is_the_kl_that_a_preset_puts_there_itself(name):
    lists = batches.make(steps=True)
    without, own = WITHOUT_KL[name]
    np.testing.assert_allclose(
        advantages(kl_in_reward(without, beta=BETA), lists), advantages(own, lists), rtol=1e-5, atol=1e-6
    )


def test_a_length_weighted_baseline_compares_the_penalised_rewards():
    lists = batches.make()
    totals = outcomes(lists)
    expected = [oracle.length_weighted(r, list(map(len, rows))) for r, rows in zip(totals, lists["old"], strict=True)]
    np.testing.assert_allclose(advantages(kl_in_reward(opo(), beta=BETA), lists), expected, rtol=1e-4, atol=1e-5)


def test_whitening_follows():
    lists = batches.make()
    adv = [[[a] * len(row) for row, a in zip(rows, advs, strict=True)]
           for rows, advs in zip(lists["old"], map(oracle.center, outcomes(lists)), strict=True)]  # fmt: skip
    expected = batches.pad(oracle.whiten_tokens(adv, oracle.known(lists)))
    objective = kl_in_reward(reinforce_pp_baseline(), beta=BETA)
    np.testing.assert_allclose(advantages(objective, lists), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (reinforce_pp(), "reads ref_logp_T, so the reward has a KL already"),
        (ppo(), "a KL already"),
        (rloo(beta=0.1), "a KL already"),
        (kl_in_reward(grpo(), beta=0.1), "a KL already"),
        (process_grpo(), "process_supervision.* credits the steps"),
        (then_prepare(grpo(), jax.jit(process_grpo().prepare)), "credits the steps"),
        (gdpo(), "advantage=per_reward.* compares several rewards"),
        (Objective(weighted_sum, grpo().loss), "several rewards"),
    ],
)
def test_what_it_would_count_twice_or_take_apart_is_refused(objective, message):
    with pytest.raises(ValueError, match=message):
        kl_in_reward(objective, beta=0.1)


def test_equal_rewards_leave_the_kl_alone():
    """By eq. 2 the penalty decides between them: in its own size, or in units of its spread."""
    lists = batches.make()
    kl = [
        [sum(o - f for o, f in zip(*row, strict=True)) for row in zip(olds, refs, strict=True)]
        for olds, refs in zip(lists["old"], lists["ref"], strict=True)
    ][2]
    small = advantages(kl_in_reward(bnpo()._replace(advantage=center), beta=0.01), lists)[2]
    np.testing.assert_allclose(small, [-0.01 * (x - np.mean(kl)) for x in kl], rtol=1e-3, atol=1e-6)
    scaled = advantages(kl_in_reward(bnpo(), beta=0.01), lists)[2]
    np.testing.assert_allclose(scaled, [-(x - np.mean(kl)) / np.std(kl) for x in kl], rtol=1e-3)


def test_a_traced_beta_composes_too():
    lists = batches.make()

    def value(beta, gamma):
        objective = kl_in_reward(reinforce(gamma=gamma), beta=beta)
        logp, samples = batches.prepared(objective, lists)
        return batch_loss(objective, logp, samples).value()

    traced = jax.jit(value)(jnp.float32(0.3), jnp.float32(0.9))
    np.testing.assert_allclose(traced, value(0.3, 0.9), rtol=1e-6)
