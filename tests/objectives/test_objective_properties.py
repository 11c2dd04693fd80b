"""Properties that hold whatever the numbers: a few drawn examples each, the same in every run."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.objectives import (
    batch_advantages,
    batch_loss,
    cispo,
    dapo,
    dual_clip,
    gmpo,
    grpo,
    gspo,
    kl_in_reward,
    reinforce_pp,
    sapo,
    top_entropy,
    truncated_is,
    vespo,
)
from grpo_jax.objectives.advantages import center, leave_one_out, over_mean, pass_at_k_advantage, standardize
from grpo_jax.types import Sample
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle

few = settings(max_examples=25, deadline=None, derandomize=True, database=None)
G, T = 5, 4
reward = st.one_of(st.sampled_from([0.0, 1.0, 0.5, math.nan]), st.floats(-3, 3, width=32))
group = st.lists(reward, min_size=G, max_size=G)
garbage = st.sampled_from([1e4, -1e4, math.inf, -math.inf, math.nan, 0.0])
ADVANTAGES = {
    "standardize": (jax.jit(standardize), oracle.standardize),
    "center": (jax.jit(center), oracle.center),
    "leave_one_out": (jax.jit(leave_one_out), oracle.leave_one_out),
    "over_mean": (jax.jit(over_mean), oracle.over_mean),
    "pass@3": (jax.jit(functools.partial(pass_at_k_advantage, k=3)), functools.partial(oracle.pass_at_k, k=3)),
}


@pytest.mark.parametrize("name", ADVANTAGES)
@few
@given(rewards=group)
def test_an_advantage_is_the_oracles(name, rewards):
    ours, formula = ADVANTAGES[name]
    rewards = [float(np.float32(r)) for r in rewards]
    good = oracle.scored(rewards)
    # Beside the edges of the rules float32 and float64 may differ in which side they are on.
    spread = max(good) - min(good) if good else 0.0
    if 0 < spread < 1e-4 or (name == "over_mean" and good and abs(oracle.mean(good)) < 1e-3):
        return
    np.testing.assert_allclose(ours(jnp.array(rewards, jnp.float32)), formula(rewards), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("name", ADVANTAGES)
@few
@given(value=st.floats(-1e6, 1e6, width=32), unscored=st.integers(0, G))
def test_a_constant_group_is_silent(name, value, unscored):
    rewards = jnp.array([math.nan] * unscored + [value] * (G - unscored), jnp.float32)
    assert np.all(ADVANTAGES[name][0](rewards) == 0)


@pytest.mark.parametrize("name", ADVANTAGES)
@few
@given(rewards=group, order=st.permutations(range(G)))
def test_permuting_a_group_permutes_its_advantages(name, rewards, order):
    ours, order = ADVANTAGES[name][0], np.array(order)
    rewards = jnp.array(rewards, jnp.float32)
    np.testing.assert_allclose(ours(rewards[order]), ours(rewards)[order], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
@few
@given(value=reward)
def test_a_group_of_one_is_silent(name, value):
    if name != "pass@3":
        assert ADVANTAGES[name][0](jnp.array([value], jnp.float32))[0] == 0


OBJECTIVES = {
    "grpo": grpo(),
    "dapo": dapo(),
    "gspo": gspo(),
    "gmpo": gmpo(),
    "cispo": cispo(),
    "sapo": sapo(),
    "vespo": vespo(),
    "reinforce_pp": reinforce_pp(),
    "corrected": top_entropy(truncated_is(dual_clip(kl_in_reward(grpo(), beta=0.1)))),
}


@functools.cache
def compiled(name):
    objective = OBJECTIVES[name]

    def run(logp, samples, rewards):
        samples = samples._replace(adv=batch_advantages(objective, rewards))
        samples = samples if objective.prepare is None else objective.prepare(samples)
        return jax.value_and_grad(lambda x: batch_loss(objective, x, samples).value())(logp)

    return jax.jit(run)


@pytest.mark.parametrize("name", OBJECTIVES)
@few
@given(
    rewards=st.lists(group, min_size=2, max_size=2),
    lengths=st.lists(st.integers(0, T), min_size=2 * G, max_size=2 * G),
    junk=st.lists(garbage, min_size=6, max_size=6),
    seed=st.integers(0, 1000),
)
def test_padding_and_unscored_rewards_never_leak(name, rewards, lengths, junk, seed):
    """Any lengths (0 included), any rewards (NaN included), any padding: finite, and the same as with clean padding."""
    rng = np.random.default_rng(seed)
    mask = np.arange(T) < np.array(lengths).reshape(2, G, 1)
    old, new, ref, sampler = (rng.uniform(-3, 0, (2, G, T)).astype(np.float32) for _ in range(4))
    entropy = rng.uniform(0, 2, (2, G, T)).astype(np.float32)
    rewards = np.array(rewards, np.float32)
    last = mask & ~np.roll(np.pad(mask, ((0, 0), (0, 0), (0, 1))), -1, axis=-1)[..., :T]
    steps = np.where(last, rewards[..., None], np.nan).astype(np.float32)

    def run(padding):
        fill = [
            np.where(mask, x, j).astype(np.float32)
            for x, j in zip((old, new, ref, sampler, entropy), padding, strict=False)
        ]
        spoilt_steps = np.where(mask, steps, np.float32(padding[5]))
        samples = Sample(mask, fill[0], fill[2], fill[3], reward_T=spoilt_steps, entropy_T=fill[4])
        return compiled(name)(jnp.asarray(fill[1]), jax.tree.map(jnp.asarray, samples), jnp.asarray(rewards))

    clean, spoilt = run([0.0] * 6), run(junk)
    np.testing.assert_array_equal(spoilt[0], clean[0])
    np.testing.assert_array_equal(spoilt[1], clean[1])
    assert np.isfinite(clean[0])
    assert np.all(np.isfinite(clean[1]))
    assert np.all(np.asarray(clean[1])[~mask] == 0)
