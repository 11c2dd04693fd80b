"""Every preset against the oracle: values and gradients in float64, on uneven completions.

The scales of the log-ratios put tokens and sequences on both sides of every clip edge, for advantages of both signs.
"""

import jax
import numpy as np
import pytest
from grpo_jax.objectives import PRESETS, batch_loss, diagnostics

import objective_batches as batches
import oracle

SCALES = (1.0, 1e-3, 4.0)
WITH_STEPS = ("process_grpo", "reinforce", "reinforce_pp", "ppo")


def test_the_oracle_knows_every_preset():
    assert set(oracle.LOSSES) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_value_and_gradient(name):
    data = [batches.make(scale, steps=name in WITH_STEPS) for scale in SCALES]
    with batches.float64():
        objective = batches.preset(name)

        def run(logp, samples, reward):
            samples = batches.prepare(objective, samples, reward)
            return jax.value_and_grad(lambda x: batch_loss(objective, x, samples).value())(logp)

        each = [(*batches.arrays(lists, np.float64), np.array(lists["reward"])) for lists in data]
        values, slopes = jax.vmap(run)(*jax.tree.map(lambda *xs: np.stack(xs), *each))
        assert slopes.dtype == np.float64
    for lists, value, slope in zip(data, values, slopes, strict=True):
        at = [[list(row) for row in rows] for rows in lists["logp"]]
        formula = lambda logp, lists=lists, at=at: oracle.LOSSES[name](lists, logp, at)
        np.testing.assert_allclose(value, formula(lists["logp"]), rtol=1e-10, atol=1e-12)
        expected = batches.pad(oracle.gradient(formula, lists["logp"]))
        np.testing.assert_allclose(slope, expected, rtol=2e-6, atol=2e-8 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "gspo_token", "luspo", "gmpo", "dppo", "rloo_clipped", "ppo"])
def test_both_sides_of_both_edges_are_visited(name):
    """The data above would prove little if nothing were clipped, or everything."""
    seen = {"clip_low": set(), "clip_high": set()}
    for scale in SCALES:
        objective = PRESETS["rloo"](low=0.2, high=0.2) if name == "rloo_clipped" else batches.preset(name)
        logp, samples = batches.prepared(objective, batches.make(scale))
        shown = diagnostics(objective, logp, samples)
        for edge in seen:
            seen[edge] |= {float(shown[edge].value()) > 0}
        assert float(shown["clip_fraction"].value()) < 1 - float(shown["zero_advantage"].value())
    assert True in seen["clip_low"]
    assert True in seen["clip_high"]


@pytest.mark.parametrize("name", ["reinforce_baseline", "ppo"])
def test_the_critic_learns_too(name):
    """The value gradient, which the policy's gradient does not show."""
    lists = batches.make(1.0, steps=True)
    at = [[list(row) for row in rows] for rows in lists["logp"]]

    def formula(value):
        return oracle.LOSSES[name]({**lists, "value": value}, lists["logp"], at)

    with batches.float64():
        objective = batches.preset(name)
        logp, samples = batches.prepared(objective, lists, np.float64)
        loss = lambda value: batch_loss(objective, logp, samples._replace(value_T=value)).value()
        slope = jax.grad(loss)(samples.value_T)
    expected = batches.pad(oracle.gradient(formula, lists["value"]))
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(slope, expected, rtol=2e-6, atol=1e-8)
