"""What a sum is divided by: groups of which some completions are left out, and tokens that are whitened."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.objectives import (
    Objective,
    batch_loss,
    bnpo,
    center,
    count_group_tokens,
    dapo,
    dr_grpo,
    drop_truncated,
    grpo,
    per_group,
    reinforce_pp_baseline,
    rloo,
    standardize,
    then_prepare,
    truncated_is,
)
from grpo_jax.types import Mean, Sample

import objective_batches as batches
import oracle

STOPPED = np.arange(15).reshape(3, 5) % 4 != 1
LONE = np.array([[False] * 5, [True, False, True, True, False], [True] * 5])
ORDERS = {
    "groups of what is left": lambda: per_group(drop_truncated(bnpo())),
    "truncated ones of groups": lambda: drop_truncated(per_group(bnpo())),
    "between": lambda: truncated_is(drop_truncated(truncated_is(per_group(bnpo())))),
}


@pytest.mark.parametrize("stopped", [STOPPED, LONE])
@pytest.mark.parametrize("order", ORDERS)
def test_every_group_that_is_trained_weighs_the_same(order, stopped):
    """1/P Σ_p 1/Σ|o_i| Σ_i Σ_t over the completions that are left, whatever was applied first."""
    lists = batches.make()
    objective = ORDERS[order]()

    def formula(logp):
        means = []
        for p, rewards in enumerate(lists["reward"]):
            adv = oracle.standardize(rewards)
            costs = [
                oracle.ppo_cost(np.exp(x), adv[g], 0.2, 0.2)
                for g in range(5)
                if stopped[p][g]
                for x in oracle.log_ratio(lists, logp, p, g)
            ]
            means += [oracle.mean(costs)] if costs else []
        return oracle.mean(means)

    with batches.float64():
        logp, samples = batches.arrays(lists, np.float64)
        samples = samples._replace(stopped=jnp.asarray(stopped), sampler_logp_T=samples.old_logp_T)
        samples = batches.prepare(objective, samples, jnp.asarray(lists["reward"]))
        by_group = [
            batch_loss(objective, logp[p : p + 1], jax.tree.map(lambda x, p=p: x[p : p + 1], samples)).weight
            for p in range(3)
        ]
        value, slope = jax.value_and_grad(lambda x: batch_loss(objective, x, samples).value())(logp)
    np.testing.assert_allclose(by_group, np.any(stopped, axis=1), rtol=1e-12)
    np.testing.assert_allclose(value, formula(lists["logp"]), rtol=1e-10)
    expected = batches.pad(oracle.gradient(formula, lists["logp"]))
    np.testing.assert_allclose(slope, expected, rtol=2e-6, atol=1e-8)


def test_a_preparation_that_drops_is_counted_wherever_it_stands():
    def only_even(samples_PG):
        return samples_PG._replace(mask_T=samples_PG.mask_T & (jnp.arange(5) % 2 == 0)[:, None])

    lists = batches.make()
    found = [
        batches.prepared(objective, lists)[1].group_tokens
        for objective in (then_prepare(per_group(bnpo()), only_even), per_group(then_prepare(bnpo(), only_even)))
    ]
    expected = np.array(batches.LENGTHS)[:, ::2].sum(axis=1, keepdims=True)
    for tokens in found:
        np.testing.assert_array_equal(tokens, np.broadcast_to(expected, (3, 5)))


def test_a_count_can_be_taken_for_any_loss():
    _, samples = batches.arrays(batches.make())
    plain = count_group_tokens(samples._replace(adv=0.0), loss=bnpo().loss)
    np.testing.assert_array_equal(plain.group_tokens[:, 0], np.array(batches.LENGTHS).sum(axis=1))


@pytest.mark.parametrize(
    "objective",
    [grpo(), rloo(), dr_grpo(max_length=8), Objective(standardize, lambda logp_T, s: Mean(jnp.sum(logp_T), 1.0))],
    ids=["grpo", "rloo", "dr_grpo", "whole"],
)
def test_groups_are_not_divided_by_tokens_that_their_loss_does_not_count(objective):
    with pytest.raises(ValueError, match=r"not a token mean: it weighs completions of \[1, 2, 4, 5\] tokens by"):
        per_group(objective)
    per_group(dapo())


def test_the_tokens_of_reinforce_pp_baseline_are_whitened():
    """Two completions of 40 and 400 tokens: the tokens' advantages have mean 0 and spread 1, not the completions'."""
    lengths = np.array([[40, 400], [400, 40]])
    mask = np.arange(400) < lengths[..., None]
    reward = np.array([[1.0, 0.0], [0.0, 0.5]])
    last = np.arange(400) == lengths[..., None] - 1
    old = jnp.zeros((2, 2, 400))
    samples = Sample(jnp.asarray(mask), old, reward_T=jnp.where(last, reward[..., None], jnp.nan))
    adv = np.asarray(batches.prepare(reinforce_pp_baseline(), samples, jnp.asarray(reward)).adv)
    rows = [
        [[c] * n for c, n in zip(oracle.center(list(r)), ns, strict=True)]
        for r, ns in zip(reward, lengths, strict=True)
    ]
    expected = oracle.whiten_tokens(rows, [[True] * 2] * 2)
    for p in range(2):
        for g in range(2):
            np.testing.assert_allclose(adv[p, g, : lengths[p, g]], expected[p][g], rtol=1e-5)
    np.testing.assert_allclose([adv[mask].mean(), adv[mask].std()], [0.0, 1.0], atol=1e-5)
    centred = batches.prepare(Objective(center, bnpo().loss), samples, jnp.asarray(reward)).adv
    assert abs(np.broadcast_to(centred[..., None], mask.shape)[mask].mean()) > 0.1
