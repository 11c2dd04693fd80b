"""compose: what fits, what does not and says so, what a recipe looks like, what an objective reads."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.objectives import (
    PRESETS,
    Objective,
    batch_advantages,
    batch_loss,
    clipped,
    compose,
    dapo,
    diagnostics,
    dual_clip,
    entropy_bonus,
    fixed_length,
    grpo,
    gspo,
    k1,
    k2,
    k3,
    kl_in_reward,
    masked_is,
    per_sequence,
    per_token,
    ppo,
    reads,
    reads_in_loss,
    reads_in_prepare,
    rloo,
    sequence_mean,
    standardize,
    token_mean,
    top_entropy,
    truncated_is,
    unclipped,
)
from grpo_jax.types import Mean, Sample

import objective_batches as batches
import oracle

clip = functools.partial(clipped, low=0.2, high=0.28)


def test_kinds_of_variants_compose():
    """GSPO's ratio, DAPO's clip, dual clip, TIS and k2 in one objective, against the formula written out."""
    plain = Objective(standardize, compose(per_sequence, clip, token_mean, divergence=k2, beta=0.1))
    objective = truncated_is(dual_clip(plain, c=1.3), cap=1.5)
    lists = batches.make(4.0)

    def formula(logp):
        def cost(p, g, t, a):
            s = math.exp(oracle.mean(oracle.log_ratio(lists, logp, p, g)))
            surrogate = oracle.ppo_cost(s, a, 0.2, 0.28)
            surrogate = min(surrogate, -1.3 * a) if a < 0 else surrogate
            weight = min(math.exp(lists["old"][p][g][t] - lists["sampler"][p][g][t]), 1.5)
            return weight * surrogate + 0.1 * oracle.k2(logp[p][g][t], lists["ref"][p][g][t])

        return oracle.tokenwise(lists, oracle.groups_of(oracle.standardize, lists), cost, "token")

    with batches.float64():
        logp, samples = batches.prepared(objective, lists, np.float64)
        value, slope = jax.value_and_grad(lambda x: batch_loss(objective, x, samples).value())(logp)
    np.testing.assert_allclose(value, formula(lists["logp"]), rtol=1e-10)
    expected = batches.pad(oracle.gradient(formula, lists["logp"]))
    np.testing.assert_allclose(slope, expected, rtol=1e-6, atol=1e-8)


def test_a_variant_of_ones_own():
    def soft_gate(log_ratio, adv, *, tau):
        return -adv * jax.nn.sigmoid(tau * jnp.expm1(log_ratio)) * 4 / tau

    mine = Objective(standardize, compose(per_token, functools.partial(soft_gate, tau=1.0), sequence_mean))
    logp, samples = batches.prepared(mine, batches.make())
    sapo = PRESETS["sapo"](tau_pos=1.0, tau_neg=1.0)
    np.testing.assert_allclose(batch_loss(mine, logp, samples), batch_loss(sapo, logp, samples), rtol=1e-6)
    assert "soft_gate(tau=1.0)" in str(mine)


def test_a_loss_written_whole():
    def mine(logp_T, sample):
        return Mean(-jnp.sum(sample.adv * logp_T * sample.mask_T), jnp.sum(sample.mask_T))

    objective = Objective(standardize, mine)
    logp, samples = batches.prepared(objective, batches.make())
    spoilt = jnp.where(samples.mask_T, logp, jnp.nan)
    value, slope = jax.value_and_grad(lambda x: batch_loss(objective, x, samples).value())(spoilt)
    expected = -jnp.where(samples.mask_T, samples.adv[..., None], 0) / jnp.sum(samples.mask_T)
    np.testing.assert_allclose(slope, expected, rtol=1e-6)
    assert np.isfinite(value)
    assert reads(objective) == {"mask_T", "adv"}
    shown = diagnostics(objective, logp, samples)
    assert shown["clip_fraction"].total == 0
    with pytest.raises(ValueError, match="truncated_is acts through weight_T, which the loss mine does not read"):
        truncated_is(objective)
    with pytest.raises(TypeError, match="mine was written whole"):
        dual_clip(objective)


def test_the_recipe_is_printed():
    text = str(truncated_is(entropy_bonus(dapo(), coef=0.01), cap=3.0))
    assert "0x" not in text
    for part in (
        "advantage=standardize",
        "compose(per_token, clipped(low=0.2, high=0.28), token_mean)",
        "entropy_term(coef=0.01)",
        "truncate(cap=3.0, floor=0.0, ratio=per_token)",
        "prepare=only_signal",
    ):
        assert part in text
    assert "compose(per_token, clipped(low=0.2, high=0.2), sequence_mean, divergence=k3, beta=0.04)" in str(grpo())


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: compose(per_token, clip, token_mean, beta=0.1), ValueError, "divergence"),
        (lambda: compose(per_token, clip, token_mean, divergence=k3, beta=-0.1), ValueError, "beta"),
        (lambda: compose(per_token, clip, token_mean, divergence=k3, beta=math.nan), ValueError, "beta"),
        (
            lambda: compose(per_token, clip, token_mean, divergence=k1, beta=0.1),
            ValueError,
            "expected gradient of zero",
        ),
        (lambda: compose(per_token, clipped, token_mean), TypeError, "surrogate=clipped .*'low'"),
        (lambda: compose(clip, per_token, token_mean), TypeError, "ratio=clipped"),
        (lambda: compose(per_token, clip, fixed_length), TypeError, "aggregate=fixed_length .*'max_length'"),
        (lambda: compose("token", clip, token_mean), TypeError, "ratio must be a function"),
        (lambda: compose(per_token, clip, None), TypeError, "aggregate must be a function"),
        (lambda: compose(per_token, clip, lambda x, m: jnp.sum(x)), TypeError, "must return a Mean"),
        (lambda: compose(lambda x, o, m: jnp.sum(x), clip, token_mean), TypeError, "one value a token"),
        (lambda: compose(per_token, clip, token_mean, divergence=0.1, beta=0.1), TypeError, "divergence must be"),
        (lambda: truncated_is(lambda x: x), TypeError, "takes an Objective"),
    ],
)
def test_misfits_are_errors_at_composition(build, error, message):
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize("objective", [grpo(), truncated_is(grpo()), top_entropy(grpo()), ppo()])
def test_a_missing_field_is_named(objective):
    logp, samples = batches.arrays(batches.make())
    bare = Sample(samples.mask_T, samples.old_logp_T, adv=samples.adv)
    with pytest.raises(ValueError, match=r"reads \w+_T, but the sample has none"):
        batch_loss(objective, logp, bare if objective.prepare is None else objective.prepare(bare))


def test_shapes_are_checked():
    logp, samples = batches.arrays(batches.make())
    with pytest.raises(AssertionError):
        batch_loss(grpo(), logp[0], samples)
    with pytest.raises(AssertionError):
        batch_loss(grpo(), logp[:1], samples)
    with pytest.raises(ValueError, match="P, G"):
        batch_advantages(grpo(), jnp.zeros(4))
    with pytest.raises(AssertionError):
        batch_advantages(grpo(), jnp.zeros((2, 3, 4)))


def read(objective):
    return reads(objective) - {"mask_T", "weight_T"}


def test_what_an_objective_reads():
    assert read(grpo()) == {"old_logp_T", "ref_logp_T", "adv"}
    assert read(grpo(beta=0.0)) == {"old_logp_T", "adv"}
    assert read(rloo()) == {"adv"}
    assert read(rloo(beta=0.1)) == {"old_logp_T", "ref_logp_T", "reward_T"}
    assert read(truncated_is(gspo())) == {"old_logp_T", "sampler_logp_T", "adv"}
    assert read(entropy_bonus(gspo(), coef=0.1)) == {"old_logp_T", "entropy_T", "adv"}
    assert reads_in_prepare(gspo()) == frozenset()
    assert reads_in_prepare(top_entropy(gspo(), fraction=0.5)) == {"mask_T", "entropy_T", "weight_T"}
    assert "entropy_T" not in reads_in_loss(top_entropy(gspo(), fraction=0.5))
    assert "entropy_T" in reads_in_loss(entropy_bonus(gspo(), coef=0.1))
    assert reads_in_prepare(ppo()) - {"mask_T"} == {"old_logp_T", "ref_logp_T", "old_value_T", "reward_T"}
    assert "value_T" in reads_in_loss(ppo())
    assert "ref_logp_T" not in reads_in_loss(ppo())


def test_a_jitted_part_is_looked_into():
    ratio = jax.jit(lambda logp_T, old_logp_T, mask_T: logp_T + 0 * mask_T)
    assert read(Objective(standardize, compose(ratio, unclipped, token_mean))) == {"adv"}


def test_beta_may_be_an_array():
    lists = batches.make()
    for make in (lambda beta: grpo(beta=beta), lambda beta: kl_in_reward(grpo(beta=0.0), beta=beta)):

        def value(beta, make=make):
            objective = make(beta)
            logp, samples = batches.prepared(objective, lists)
            return batch_loss(objective, logp, samples).value()

        np.testing.assert_allclose(jax.jit(value)(jnp.float32(0.3)), value(0.3), rtol=1e-6)


# For every option of every preset, a value that must change what the objective computes.
OTHER = {
    "low": 0.05,
    "high": 0.05,
    "beta": 0.5,
    "max_length": 20,
    "drop_constant": False,
    "tau_pos": 2.0,
    "tau_neg": 2.0,
    "k_pos": 1.0,
    "lam_pos": 1.0,
    "k_neg": 1.0,
    "lam_neg": 1.0,
    "delta": 0.01,
    "bound": 1.1,
    "tau": 3.0,
    "k": 1,
    "gamma": 0.5,
    "lam": 0.5,
    "value_coef": 2.0,
    "value_clip": None,
    "entropy_coef": 0.3,
}
OPTIONS = [
    (name, option)
    for name, preset in PRESETS.items()
    for option in (preset.__kwdefaults__ or {}) | dict.fromkeys(preset.__annotations__)
    if option not in ("return", "weights")
]


@functools.cache
def loss_with(name, **options):
    objective = PRESETS[name](**(batches.REQUIRED.get(name, {}) | options))
    scale = 1e-1 if name in ("gspo", "gspo_token", "luspo") else 4.0 if name in ("cispo", "gmpo") else 1.0
    logp, samples = batches.prepared(objective, batches.make(scale, steps=True))
    return jax.value_and_grad(lambda x: batch_loss(objective, x, samples).value())(logp)


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_every_option_of_a_preset_is_read(name, option):
    clip = {"low": 0.2, "high": 0.2} if name == "rloo" and option in ("low", "high") else {}
    before, after = loss_with(name, **clip), loss_with(name, **(clip | {option: OTHER[option]}))
    assert any(np.abs(x - y).max() > 1e-6 for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize(("name", "option"), [pair for pair in OPTIONS if pair[1] != "drop_constant"])
def test_a_bad_option_of_a_preset_is_named(name, option):
    extra = {"high" if option == "low" else "low": 0.2} if name == "rloo" and option in ("low", "high") else {}
    with pytest.raises(ValueError, match=option):
        PRESETS[name](**(batches.REQUIRED.get(name, {}) | extra | {option: -0.5}))


def test_presets_take_keywords_only():
    for preset in PRESETS.values():
        assert preset.__code__.co_argcount == 0
    with pytest.raises(ValueError, match="low and high"):
        rloo(low=0.2)


def test_diagnostics_count_what_is_clipped():
    objective = Objective(standardize, compose(per_token, clip, token_mean))
    mask = jnp.ones((1, 2, 4), bool)
    old = jnp.full((1, 2, 4), -1.0)
    log_ratio = jnp.log(jnp.array([[[0.5, 1.0, 1.2, 1.5], [0.5, 0.7, 1.0, 1.5]]]))
    samples = Sample(mask, old, ref_logp_T=old, sampler_logp_T=old - 0.1, adv=jnp.array([[1.0, -1.0]]), entropy_T=-old)
    shown = {name: float(x.value()) for name, x in diagnostics(objective, old + log_ratio, samples).items()}
    # A > 0 is clipped at 1.5 alone; A < 0 at .5 and .7.
    expected = {"clip_fraction": 3 / 8, "clip_low": 2 / 8, "clip_high": 1 / 8, "zero_advantage": 0.0, "entropy": 1.0}
    expected |= {"sampler_logp_diff": 0.1, "ratio": float(jnp.mean(jnp.exp(log_ratio)))}
    expected["kl"] = float(jnp.mean(k3(log_ratio, 0.0)))
    assert shown == pytest.approx(expected, abs=1e-6)
    silent = diagnostics(objective, old + log_ratio, samples._replace(adv=jnp.zeros((1, 2))))
    assert silent["zero_advantage"].value() == 1
    assert silent["clip_fraction"].value() == 0
    dropped = diagnostics(masked_is(objective, low=2.0, high=3.0), old + log_ratio, samples)
    assert dropped["clip_fraction"].value() == 1
