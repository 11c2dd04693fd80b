"""What a correction acts on, what an objective depends on, and what is refused before training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.objectives import (
    PRESETS,
    AdaptiveObjective,
    Objective,
    batch_loss,
    center,
    check_objective,
    cispo,
    compose,
    corrects_for_sampler,
    dapo,
    drop_off_policy,
    drop_stale,
    drop_truncated,
    dual_clip,
    entropy_bonus,
    from_sampler,
    gdpo,
    gradient_at_zero_advantage,
    grpo,
    gspo,
    has_ratio_to_old,
    kimi,
    kl_in_reward,
    kl_mask,
    masked_is,
    opo,
    per_group,
    per_token,
    reads,
    reads_in_loss,
    reads_in_prepare,
    reinforce,
    rloo,
    standardize,
    token_mean,
    top_entropy,
    topr,
    truncated_is,
    tv_mask,
    unclipped,
    value_loss,
    vespo,
    weight_depends_on_policy,
    weighted_sum,
)
from grpo_jax.types import Mean

import objective_batches as batches


def policy_gradient(logp_T, sample):
    return Mean(-jnp.sum(jnp.where(sample.mask_T, sample.adv * logp_T, 0.0)), 1)


def reweighted(logp_T, sample):
    weight_T = 1.0 if sample.weight_T is None else sample.weight_T
    return Mean(-jnp.sum(jnp.where(sample.mask_T, weight_T * sample.adv * logp_T, 0.0)), 1)


WHOLE = Objective(standardize, policy_gradient)
WEIGHS = {
    "truncated_is": truncated_is,
    "masked_is": masked_is,
    "drop_stale": functools.partial(drop_stale, max_age=1),
    "drop_off_policy": functools.partial(drop_off_policy, delta=0.1),
    "tv_mask": functools.partial(tv_mask, delta=0.1),
    "kl_mask": functools.partial(kl_mask, delta=0.1),
    "top_entropy": top_entropy,
}


@pytest.mark.parametrize("name", WEIGHS)
def test_a_correction_whose_weight_the_loss_does_not_read_is_refused(name):
    message = f"{name} acts through weight_T, which the loss policy_gradient does not read"
    with pytest.raises(ValueError, match=message):
        WEIGHS[name](WHOLE)
    wrapped = drop_truncated(Objective(standardize, lambda logp_T, s: policy_gradient(logp_T, s)))
    with pytest.raises(ValueError, match=rf"{name} acts through weight_T, which .*<lambda>.* does not read"):
        WEIGHS[name](wrapped)


@pytest.mark.parametrize("objective", [WHOLE, rloo(), Objective(standardize, reweighted)], ids=["whole", "rloo", "w"])
def test_a_ratio_to_the_sampler_needs_a_ratio(objective):
    with pytest.raises(ValueError, match="from_sampler acts through old_logp_T, which the loss"):
        from_sampler(objective)


@pytest.mark.parametrize("correct", [dual_clip, functools.partial(entropy_bonus, coef=0.1), value_loss])
def test_a_correction_of_parts_needs_parts(correct):
    with pytest.raises(TypeError, match="policy_gradient was written whole"):
        correct(WHOLE)


@pytest.mark.parametrize("name", WEIGHS)
def test_a_whole_loss_that_reads_the_weight_is_corrected(name):
    """As the composed loss of the same formula is."""
    composed = Objective(standardize, compose(lambda x_T, old_T, mask_T: x_T, lambda x, a: -a * x, token_mean))
    plain = Objective(standardize, reweighted)
    logp, samples = batches.prepared(plain, batches.make(4.0))
    samples = samples._replace(age=jnp.arange(15).reshape(3, 5) % 3)
    found = []
    for objective in (WEIGHS[name](plain), WEIGHS[name](composed)):
        seen = samples if objective.prepare is None else objective.prepare(samples)
        found.append(jax.grad(lambda x, o=objective, s=seen: batch_loss(o, x, s).total)(logp))
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert np.abs(found[0] - jax.grad(lambda x: batch_loss(plain, x, samples).total)(logp)).max() > 1e-3


def test_a_truncated_completion_is_nothing_for_a_loss_that_reads_no_mask():
    objective = drop_truncated(Objective(standardize, lambda logp_T, s: Mean(-jnp.sum(s.adv * logp_T), 1)))
    logp, samples = batches.prepared(objective, batches.make())
    stopped = jnp.arange(15).reshape(3, 5) % 4 != 1
    slope = jax.grad(lambda x: batch_loss(objective, x, samples._replace(stopped=stopped)).total)(logp)
    expected = -np.where(samples.mask_T & stopped[..., None], samples.adv[..., None], 0.0)
    np.testing.assert_allclose(slope, expected, rtol=1e-6)


@pytest.mark.parametrize("correct", [truncated_is, top_entropy, dual_clip, per_group, drop_truncated])
def test_a_preset_that_was_not_called_is_told_so(correct):
    with pytest.raises(TypeError, match=r"takes an Objective.*got grpo: call it, grpo\(\)"):
        correct(grpo)


# --- what is read -------------------------------------------------------------------------------------------------


def read_by(prepare):
    return reads_in_prepare(Objective(standardize, policy_gradient, prepare))


def test_a_field_that_is_handed_on_under_another_name_is_read():
    assert read_by(lambda s: s._replace(weight_T=s.entropy_T)) == {"entropy_T"}
    assert read_by(jax.jit(lambda s: s._replace(weight_T=s.entropy_T))) == {"entropy_T"}
    assert read_by(lambda s: s._replace(weight_T=s.entropy_T, entropy_T=s.weight_T)) == {"entropy_T", "weight_T"}
    assert read_by(lambda s: s._replace(weight_T=jax.lax.stop_gradient(s.value_T))) == {"value_T"}


def test_a_field_that_keeps_its_name_is_not_read():
    assert read_by(lambda s: s) == frozenset()
    assert read_by(jax.jit(lambda s: s)) == frozenset()
    assert read_by(lambda s: s._replace(entropy_T=jax.lax.stop_gradient(s.entropy_T))) == frozenset()
    assert read_by(jax.jit(lambda s: s._replace(adv=2 * s.adv))) == {"adv"}


def test_what_a_preparation_hands_to_the_loss_is_read():
    handed = Objective(standardize, reweighted, lambda s: s._replace(weight_T=s.entropy_T))
    assert reads(handed) == {"mask_T", "adv", "entropy_T"}
    assert reads_in_loss(handed) == {"mask_T", "adv", "weight_T"}


def test_an_objective_with_a_state_reads_what_any_state_of_it_reads():
    """A coefficient that starts at 0 is a traced number in the compiled program."""
    adaptive = AdaptiveObjective(lambda: 0.0, lambda beta: grpo(beta=beta), lambda beta, metrics: beta)
    assert "ref_logp_T" not in reads(grpo(beta=0.0))
    assert "ref_logp_T" in reads(adaptive)
    assert "ref_logp_T" in reads_in_loss(adaptive)
    in_reward = adaptive._replace(bind=lambda beta: rloo(beta=beta))
    assert {"ref_logp_T", "reward_T"} <= reads_in_prepare(in_reward)


# --- weights ------------------------------------------------------------------------------------------------------


def normalised(logp_T, sample):
    ratio_T = jnp.where(sample.mask_T, jnp.exp(logp_T - sample.old_logp_T), 0.0)
    return Mean(-jnp.sum(ratio_T * sample.adv), jnp.sum(ratio_T))


def detached(logp_T, sample):
    total, weight = normalised(logp_T, sample)
    return Mean(total, jax.lax.stop_gradient(weight))


def by_entropy(logp_T, sample):
    return Mean(-jnp.sum(logp_T * sample.adv), jnp.sum(sample.entropy_T))


def by_count(logp_T, sample):
    return Mean(-jnp.sum(logp_T * sample.adv), jnp.sum(sample.mask_T & (logp_T > sample.old_logp_T)))


@pytest.mark.parametrize(
    ("loss", "depends"), [(normalised, True), (by_entropy, True), (detached, False), (by_count, False)]
)
def test_a_weight_that_moves_with_the_parameters_is_found(loss, depends):
    objective = Objective(standardize, loss)
    assert weight_depends_on_policy(objective) == depends
    assert weight_depends_on_policy(truncated_is(grpo())) is False
    if depends:
        with pytest.raises(ValueError, match=f"loss={loss.__name__} has a weight that depends on the policy"):
            check_objective(objective)
    else:
        check_objective(objective)
    # What is refused is wrong by its own part of the derivative: ∇(N/W) = ∇N/W − N·∇W/W².
    logp, samples = batches.prepared(objective, batches.make())
    value = lambda x: batch_loss(objective, x, samples)
    true = jax.grad(lambda x: value(x).total / value(x).weight)(logp)
    taken = jax.grad(lambda x: value(x).total)(logp) / value(logp).weight
    if loss is by_entropy:
        true = jax.grad(lambda h: batch_loss(objective, logp, samples._replace(entropy_T=h)).value())(samples.entropy_T)
        taken = jnp.zeros_like(true)
    assert (np.abs(true - taken).max() > 1e-3 * np.abs(true).max()) == depends


# --- what is refused ----------------------------------------------------------------------------------------------


def test_every_preset_and_wrapped_objective_is_right():
    for name in PRESETS:
        check_objective(batches.preset(name))
    check_objective(per_group(drop_truncated(dapo())))
    check_objective(truncated_is(kl_in_reward(grpo(), beta=0.1)))
    check_objective(WHOLE)
    check_objective(Objective(weighted_sum, policy_gradient))
    check_objective(AdaptiveObjective(lambda: 0.0, lambda beta: grpo(beta=beta), lambda beta, metrics: beta))


scalar = lambda logp_T, sample: -jnp.sum(sample.adv * logp_T)
tokens = lambda logp_T, sample: Mean(-sample.adv * logp_T, jnp.sum(sample.mask_T))


@pytest.mark.parametrize(
    ("objective", "error", "message"),
    [
        (Objective(standardize, scalar), TypeError, "must return a Mean of two scalars.*got a scalar"),
        (Objective(standardize, tokens), TypeError, r"two scalars.*got a Mean of shapes \(\d+,\) and \(\)"),
        (Objective(standardize, lambda x, s: (jnp.sum(x), 1.0)), TypeError, "two scalars.*got tuple"),
        (Objective(standardize, lambda x, s: None), TypeError, "two scalars.*got None"),
        (Objective(jnp.mean, policy_gradient), TypeError, "advantage=mean must .*4 completions.*got a scalar"),
        (Objective(lambda r: r[:2], policy_gradient), TypeError, r"4 completions.*got an array of shape \(2,\)"),
        (Objective(lambda r: 1 / 0, policy_gradient), TypeError, "advantage=<lambda> must map the rewards of a group"),
        (Objective(0.5, policy_gradient), TypeError, "advantage must be a function, got 0.5"),
        (Objective(center, None), TypeError, "loss must be a function, got None"),
        (Objective(center, policy_gradient, lambda s: s.adv), TypeError, "prepare=<lambda> must return .*a Sample"),
        (
            Objective(center, policy_gradient, lambda s: s._replace(adv=s.adv[0])),
            TypeError,
            r"adv \[P, G\] or \[P, G, T\]",
        ),
        (grpo, TypeError, r"must be an Objective, such as grpo\(\), got grpo: call it, grpo\(…\)"),
        ("grpo", TypeError, "must be an Objective, such as grpo"),
        (AdaptiveObjective(lambda: 0.0, lambda s: grpo, None), TypeError, r"bind\(state\) must be an Objective"),
        (Objective(standardize, lambda x, s: Mean(jnp.sum(x), -1.0)), ValueError, "a weight of -1: .* not be negative"),
        (
            Objective(standardize, lambda x, s: Mean(jnp.sum(x), jnp.where(s.stopped, 1.0, -0.5))),
            ValueError,
            "a weight of -0.5",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(objective, error, message):
    with pytest.raises(error, match=message):
        check_objective(objective)


@pytest.mark.parametrize("loss", [scalar, tokens])
def test_a_batch_takes_no_loss_that_training_would_not(loss):
    objective = Objective(standardize, loss)
    logp, samples = batches.prepared(objective, batches.make())
    with pytest.raises(TypeError, match="must return a Mean of two scalars for each sequence"):
        batch_loss(objective, logp, samples)


# --- completions of advantage 0 -----------------------------------------------------------------------------------

HELD = ("grpo", "process_grpo", "gdpo", "kimi", "reinforce_baseline", "reinforce_pp_baseline", "ppo")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_with_a_gradient_at_advantage_zero(name):
    assert gradient_at_zero_advantage(batches.preset(name)) == (name in HELD)


def held_where(condition):
    def loss(logp_T, sample):
        kl_T = (logp_T - sample.ref_logp_T) ** 2
        cost_T = -sample.adv * logp_T + jnp.where(condition(sample), kl_T, 0.0)
        return Mean(jnp.sum(jnp.where(sample.mask_T, cost_T, 0.0)), 1.0)

    return Objective(standardize, loss)


def long_by_shape(logp_T, sample):
    plain = policy_gradient(logp_T, sample)
    return Mean(plain.total + jnp.sum(logp_T), 1.0) if logp_T.shape[0] > 64 else plain


@pytest.mark.parametrize(
    ("objective", "found"),
    [
        (held_where(lambda s: ~s.stopped), True),
        (held_where(lambda s: jnp.sum(s.mask_T) > 64), True),
        (held_where(lambda s: s.age > 7), True),
        (held_where(lambda s: s.group_tokens > 3000), True),
        (held_where(lambda s: s.old_logp_T < -9.0), True),
        (Objective(standardize, long_by_shape), True),
        (held_where(lambda s: s.adv != 0), False),
        (held_where(lambda s: jnp.zeros_like(s.mask_T)), False),
        (WHOLE, False),
        (entropy_bonus(dapo(), coef=0.01), True),
        (value_loss(dapo()), True),
        (truncated_is(dual_clip(top_entropy(per_group(drop_truncated(drop_off_policy(dapo(), delta=0.1)))))), False),
        (AdaptiveObjective(lambda: 0.0, lambda beta: grpo(beta=beta), None), True),
        (AdaptiveObjective(lambda: 0.2, lambda high: grpo(high=high, beta=0.0), None), False),
    ],
)
def test_no_term_for_some_completions_is_overlooked(objective, found):
    assert gradient_at_zero_advantage(objective) == found


# --- staleness and epochs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "sampler", "first_epoch", "auto", "ratio"),
    [
        (grpo(), True, False, True, True),
        (gspo(), True, False, True, True),
        (cispo(), True, False, True, True),
        (vespo(), True, False, True, True),
        (topr(), True, False, True, True),
        (kimi(), True, False, True, True),
        (rloo(low=0.2, high=0.2), True, False, True, True),
        (rloo(), False, False, False, False),
        (rloo(beta=0.1), False, False, False, False),
        (opo(), False, False, False, False),
        (reinforce(), False, False, False, False),
        (WHOLE, False, False, False, False),
        (drop_stale(rloo(), max_age=2), False, False, False, False),
        (truncated_is(rloo()), False, True, True, False),
        (masked_is(rloo(), low=0.99999, high=1.00001), False, True, True, False),
        (truncated_is(grpo()), True, True, True, True),
        (from_sampler(grpo()), True, True, True, True),
        (tv_mask(rloo(), delta=0.1), True, False, True, False),
        (drop_off_policy(rloo(), delta=0.05), True, True, True, False),
        (gdpo(), True, False, True, True),
        (AdaptiveObjective(lambda: 0.0, lambda beta: grpo(beta=beta), None), True, False, True, True),
    ],
)
def test_what_corrects_for_the_age_of_data(objective, sampler, first_epoch, auto, ratio):
    assert corrects_for_sampler(objective, "sampler") == sampler
    assert corrects_for_sampler(objective, "first_epoch") == first_epoch
    assert corrects_for_sampler(objective) == auto
    assert has_ratio_to_old(objective) == ratio


def test_every_ratio_of_a_preset_is_found():
    without = {"opo", "rloo", "reinforce", "reinforce_baseline"}
    assert {name for name in PRESETS if not has_ratio_to_old(batches.preset(name))} == without


def test_an_unknown_mode_is_named():
    with pytest.raises(ValueError, match="old_logp must be one of"):
        corrects_for_sampler(grpo(), "own")


def test_a_composed_objective_of_ones_own_is_seen_through():
    mine = Objective(standardize, compose(per_token, unclipped, token_mean))
    assert not gradient_at_zero_advantage(mine)
    assert has_ratio_to_old(mine)
