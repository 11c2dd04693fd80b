"""What a step shows of losses that were written whole or wrapped, beside the composed loss of the same formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.objectives import (
    Objective,
    batch_loss,
    clipped,
    compose,
    diagnostics,
    drop_truncated,
    entropy_bonus,
    grpo,
    gspo,
    k3,
    kimi,
    masked_is,
    per_group,
    per_token,
    standardize,
    token_mean,
    value_loss,
)
from grpo_jax.types import Mean

import objective_batches as batches

CLIP = functools.partial(clipped, low=0.2, high=0.2)
PLAIN = Objective(standardize, compose(per_token, CLIP, token_mean))
WITH_KL = Objective(standardize, compose(per_token, CLIP, token_mean, divergence=k3, beta=0.1))
CLIPS = ("clip_fraction", "clip_low", "clip_high")


def whole(logp_T, sample):
    """The formula of WITH_KL, with an entropy bonus and a term for values beside it."""
    ratio_T = jnp.exp(logp_T - sample.old_logp_T)
    cost_T = -jnp.minimum(ratio_T * sample.adv, jnp.clip(ratio_T, 0.8, 1.2) * sample.adv)
    cost_T += 0.1 * k3(logp_T, sample.ref_logp_T) - 0.1 * sample.entropy_T + sample.value_T**2
    return Mean(jnp.sum(jnp.where(sample.mask_T, cost_T, 0.0)), jnp.sum(sample.mask_T))


def wrapped(objective):
    """In a closure, as a user wraps it."""
    return objective._replace(loss=lambda logp_T, sample: objective.loss(logp_T, sample))


def bound(objective):
    """In a function that is bound to the loss, and leaves out the truncated."""

    def loss_if_stopped(logp_T, sample, *, loss):
        total, weight = loss(logp_T, sample)
        return Mean(jnp.where(sample.stopped, total, 0.0), weight)

    return objective._replace(loss=functools.partial(loss_if_stopped, loss=objective.loss))


def shown(objective, scale=1.0, **fields):
    logp, samples = batches.prepared(objective, batches.make(scale))
    found = diagnostics(objective, logp, samples._replace(**fields))
    return {name: float(mean.value()) for name, mean in found.items()}


def counted(scale, keep=None):
    """Clipped tokens of PLAIN's formula, counted in loops over Python floats."""
    lists = batches.make(scale)
    adv = np.asarray(batches.prepared(PLAIN, lists)[1].adv)
    low = high = tokens = 0
    for p, rows in enumerate(lists["old"]):
        for g, row in enumerate(rows):
            for t, old in enumerate(row):
                if keep is not None and not keep[p][g]:
                    continue
                ratio = np.exp(lists["logp"][p][g][t] - old)
                low += adv[p][g] < 0 and ratio < 0.8
                high += adv[p][g] > 0 and ratio > 1.2
                tokens += 1
    return {"clip_fraction": (low + high) / tokens, "clip_low": low / tokens, "clip_high": high / tokens}


MAKERS = {
    "composed": lambda: PLAIN,
    "composed with a KL": lambda: WITH_KL,
    "wrapped": lambda: wrapped(WITH_KL),
    "written whole": lambda: Objective(standardize, whole),
    "entropy, values": lambda: value_loss(entropy_bonus(WITH_KL, coef=0.1)),
    "wrapped, entropy, values": lambda: wrapped(value_loss(entropy_bonus(WITH_KL, coef=0.1))),
    "per group": lambda: per_group(WITH_KL),
    "corrected whole": lambda: drop_truncated(Objective(standardize, whole)),
}


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("name", MAKERS)
def test_a_clip_is_seen_through_what_is_added_to_it(name, scale):
    found = shown(MAKERS[name](), scale, return_T=jnp.zeros((3, 5, batches.T)))
    expected = counted(scale)
    assert 0 < expected["clip_fraction"] < 1
    assert {edge: found[edge] for edge in CLIPS} == pytest.approx(expected)


def test_what_a_bound_wrapper_leaves_out_has_no_gradient():
    stopped = np.arange(15).reshape(3, 5) % 4 != 1
    adv = np.asarray(batches.prepared(PLAIN, batches.make())[1].adv)
    lengths = np.array(batches.LENGTHS)
    left_out = lengths[~stopped & (adv != 0)].sum()
    kept = counted(1.0, stopped)["clip_fraction"] * lengths[stopped].sum()
    found = shown(bound(WITH_KL), stopped=jnp.asarray(stopped))
    assert found["clip_fraction"] == pytest.approx((left_out + kept) / lengths.sum())


def test_tokens_that_are_not_trained_are_not_counted():
    stopped = np.arange(15).reshape(3, 5) % 4 != 1
    for objective in (drop_truncated(WITH_KL), per_group(drop_truncated(WITH_KL)), drop_truncated(per_group(WITH_KL))):
        found = shown(objective, stopped=jnp.asarray(stopped))
        assert {edge: found[edge] for edge in CLIPS} == pytest.approx(counted(1.0, stopped))


def test_a_clip_that_nobody_knows_of_is_absent():
    """A loss without an advantage has no surrogate whose gradient could be missing."""
    taught = Objective(standardize, lambda logp_T, s: Mean(-jnp.sum(logp_T * s.mask_T), jnp.sum(s.mask_T)))
    found = shown(taught)
    assert not set(CLIPS) & set(found)
    assert {"ratio", "zero_advantage", "kl", "entropy", "sampler_logp_diff"} <= set(found)


@pytest.mark.parametrize("objective", [grpo(), gspo(), kimi(), masked_is(gspo())])
def test_a_wrapper_changes_no_number(objective):
    direct = shown(objective, 4.0)
    around = shown(wrapped(objective), 4.0)
    assert {edge: around[edge] for edge in CLIPS[:1]} == pytest.approx({edge: direct[edge] for edge in CLIPS[:1]})
    assert direct.keys() == around.keys()


def test_tokens_that_the_sampler_could_not_score_are_left_out_of_its_difference():
    logp, samples = batches.prepared(PLAIN, batches.make())
    unknown = samples._replace(sampler_logp_T=samples.sampler_logp_T.at[0, 0, :2].set(jnp.nan))
    found = diagnostics(PLAIN, logp, unknown)["sampler_logp_diff"]
    keep = np.asarray(samples.mask_T).copy()
    keep[0, 0, :2] = False
    expected = np.abs(np.asarray(samples.old_logp_T - samples.sampler_logp_T))[keep].mean()
    np.testing.assert_allclose(found.value(), expected, rtol=1e-6)
    assert found.weight == keep.sum()


def test_diagnostics_run_inside_a_compiled_step():
    objective = wrapped(WITH_KL)
    logp, samples = batches.prepared(objective, batches.make())
    step = jax.jit(lambda x, s: (batch_loss(objective, x, s), diagnostics(objective, x, s)))
    _, compiled = step(logp, samples)
    for name, mean in diagnostics(objective, logp, samples).items():
        np.testing.assert_allclose(compiled[name], mean, rtol=1e-5, atol=1e-6)
