"""Every correction against its formula in loops over Python floats."""

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
    drop_constant_groups,
    drop_off_policy,
    drop_stale,
    drop_truncated,
    dual_clip,
    entropy_bonus,
    from_sampler,
    kl_in_reward,
    kl_mask,
    leave_one_out,
    masked_is,
    per_group,
    per_sequence,
    product,
    rloo,
    top_entropy,
    truncated_is,
    tv_mask,
    value_loss,
    weighted_k3,
)

import objective_batches as batches
import oracle

STOPPED = np.arange(15).reshape(3, 5) % 4 != 1
AGE = np.arange(15).reshape(3, 5) % 3


def batch(objective, lists):
    logp, samples = batches.arrays(lists, np.float64)
    samples = samples._replace(stopped=jnp.asarray(STOPPED), age=jnp.asarray(AGE))
    return logp, batches.prepare(objective, samples, jnp.asarray(lists["reward"]))


def check(objective, formula, scale=1.0):
    """`formula(lists, logp, at)` is the loss; both must agree in value and gradient, and differ from plain BNPO."""
    lists = batches.make(scale)
    at = [[list(row) for row in rows] for rows in lists["logp"]]
    loss = lambda logp: formula(lists, logp, at)
    with batches.float64():
        logp, samples = batch(objective, lists)
        value, slope = jax.value_and_grad(lambda x: batch_loss(objective, x, samples).value())(logp)
    np.testing.assert_allclose(value, loss(lists["logp"]), rtol=1e-10)
    expected = batches.pad(oracle.gradient(loss, lists["logp"]))
    np.testing.assert_allclose(slope, expected, rtol=2e-6, atol=1e-8)
    assert abs(float(value) - oracle.bnpo(lists, lists["logp"], at)) > 1e-6


def weighed(weight, beta=0.0):
    """BNPO with the surrogate of each token multiplied by weight(lists, at, p, g, t, a)."""

    def formula(lists, logp, at):
        def cost(p, g, t, a):
            r = math.exp(oracle.log_ratio(lists, logp, p, g)[t])
            return weight(lists, at, p, g, t, a) * oracle.ppo_cost(r, a, 0.2, 0.2)

        return oracle.tokenwise(lists, oracle.groups_of(oracle.standardize, lists), cost, "token")

    return formula


def rho(lists, p, g):
    return [o - s for o, s in zip(lists["old"][p][g], lists["sampler"][p][g], strict=True)]


LEVELS = {
    "token": (lambda x, t: x[t], None),
    "sequence": (lambda x, t: oracle.mean(x), per_sequence),
    "product": (lambda x, t: sum(x), product),
}


@pytest.mark.parametrize("level", LEVELS)
def test_truncated_is(level):
    of, ratio = LEVELS[level]
    options = {"cap": 1.5, "floor": 0.6} | ({} if ratio is None else {"ratio": ratio})
    weight = lambda lists, at, p, g, t, a: oracle.clip(math.exp(of(rho(lists, p, g), t)), 0.6, 1.5)
    check(truncated_is(bnpo(), **options), weighed(weight))


@pytest.mark.parametrize("level", LEVELS)
def test_masked_is(level):
    of, ratio = LEVELS[level]
    options = {"low": 0.6, "high": 1.5} | ({} if ratio is None else {"ratio": ratio})

    def weight(lists, at, p, g, t, a):
        w = math.exp(of(rho(lists, p, g), t))
        return w if 0.6 <= w <= 1.5 else 0.0

    check(masked_is(bnpo(), **options), weighed(weight))


def test_a_token_that_the_sampler_could_not_score_is_not_corrected():
    objective = truncated_is(bnpo(), cap=1.5)
    logp, samples = batches.prepared(objective, batches.make())
    unknown = samples._replace(sampler_logp_T=samples.sampler_logp_T.at[0, 0, 1].set(jnp.nan))
    equal = samples._replace(sampler_logp_T=samples.sampler_logp_T.at[0, 0, 1].set(samples.old_logp_T[0, 0, 1]))
    np.testing.assert_array_equal(batch_loss(objective, logp, unknown), batch_loss(objective, logp, equal))


def test_the_kl_term_is_not_touched():
    lists = batches.make()
    parts = bnpo().loss.keywords | {"divergence": weighted_k3, "beta": 0.3}
    plain = Objective(bnpo().advantage, functools.partial(bnpo().loss.func, **parts))
    dropped = masked_is(plain, low=1e6, high=1e7)
    logp, samples = batches.prepared(dropped, lists)
    only_kl = plain._replace(advantage=lambda reward_G: jnp.zeros_like(reward_G))
    _, silent = batches.prepared(only_kl, lists)
    np.testing.assert_allclose(batch_loss(dropped, logp, samples), batch_loss(only_kl, logp, silent), rtol=1e-6)


@pytest.mark.parametrize("cap", [1.3, math.inf])
def test_from_sampler(cap):
    def formula(lists, logp, at):
        def cost(p, g, t, a):
            r = math.exp(oracle.log_ratio(lists, logp, p, g)[t]) * min(math.exp(rho(lists, p, g)[t]), cap)
            return oracle.ppo_cost(r, a, 0.2, 0.2)

        return oracle.tokenwise(lists, oracle.groups_of(oracle.standardize, lists), cost, "token")

    check(from_sampler(bnpo(), cap=cap), formula)


def test_drop_off_policy():
    def weight(lists, at, p, g, t, a):
        gap = oracle.mean([s - x for s, x in zip(lists["sampler"][p][g], at[p][g], strict=True)])
        return 0.0 if a < 0 and gap > 0.02 else 1.0

    check(drop_off_policy(bnpo(), delta=0.02), weighed(weight), scale=2.0)


def test_drop_stale():
    check(drop_stale(bnpo(), max_age=1), weighed(lambda lists, at, p, g, t, a: float(AGE[p][g] <= 1)))


def kept(lists, keep):
    """The same batch with some completions taken out, as the mask takes them out: of sums and denominators."""
    pick = lambda rows: [[x for g, x in enumerate(group) if keep[p][g]] for p, group in enumerate(rows)]
    return {name: pick(rows) for name, rows in lists.items()}, pick


def test_drop_truncated():
    def formula(lists, logp, at):
        part, pick = kept(lists, STOPPED)
        return oracle.ppo_loss(part, pick(logp), pick(oracle.groups_of(oracle.standardize, lists)), "token")

    check(drop_truncated(bnpo()), formula)


def test_drop_constant_groups():
    def formula(lists, logp, at):
        part, pick = kept(lists, np.array([[True] * 5, [True] * 5, [False] * 5]))
        part, logp = {name: rows[:2] for name, rows in part.items()}, pick(logp)[:2]
        return oracle.ppo_loss(part, logp, oracle.groups_of(oracle.standardize, part), "token")

    check(drop_constant_groups(bnpo()), formula)


def test_tv_mask():
    def weight(lists, at, p, g, t, a):
        moved = math.exp(at[p][g][t]) - math.exp(lists["old"][p][g][t])
        return 0.0 if moved * a > 0 and abs(moved) > 0.1 else 1.0

    check(tv_mask(bnpo(), delta=0.1), weighed(weight))


def test_kl_mask():
    def weight(lists, at, p, g, t, a):
        q, old = math.exp(at[p][g][t]), math.exp(lists["old"][p][g][t])
        kl = math.inf if q >= 1 else old * math.log(old / q) + (1 - old) * math.log((1 - old) / (1 - q))
        return 0.0 if (q - old) * a > 0 and kl > 0.02 else 1.0

    check(kl_mask(bnpo(), delta=0.02), weighed(weight))


def test_dual_clip():
    def formula(lists, logp, at):
        def cost(p, g, t, a):
            plain = oracle.ppo_cost(math.exp(oracle.log_ratio(lists, logp, p, g)[t]), a, 0.2, 0.2)
            return min(plain, -1.25 * a) if a < 0 else plain

        return oracle.tokenwise(lists, oracle.groups_of(oracle.standardize, lists), cost, "token")

    check(dual_clip(bnpo(), c=1.25), formula)


def test_top_entropy():
    def weight(lists, at, p, g, t, a):
        entropies = [x for rows in lists["entropy"] for row in rows for x in row]
        return float(lists["entropy"][p][g][t] >= np.quantile(entropies, 0.7))

    check(top_entropy(bnpo(), fraction=0.3), weighed(weight))


def test_per_group():
    def formula(lists, logp, at):
        groups = range(len(lists["old"]))
        one = lambda p: {name: [rows[p]] for name, rows in lists.items()}
        return oracle.mean([oracle.bnpo(one(p), [logp[p]], at) for p in groups])

    check(per_group(bnpo()), formula)


def test_entropy_bonus():
    def formula(lists, logp, at):
        entropies = [x for rows in lists["entropy"] for row in rows for x in row]
        return oracle.bnpo(lists, logp, at) - 0.3 * oracle.mean(entropies)

    check(entropy_bonus(bnpo(), coef=0.3), formula)


def test_the_entropy_bonus_has_a_gradient():
    objective = entropy_bonus(bnpo(), coef=0.3)
    logp, samples = batches.prepared(objective, batches.make())
    loss = lambda entropy: batch_loss(objective, logp, samples._replace(entropy_T=entropy)).value()
    slope = jax.grad(loss)(samples.entropy_T)
    np.testing.assert_allclose(slope, jnp.where(samples.mask_T, -0.3 / samples.mask_T.sum(), 0.0), rtol=1e-6)


@pytest.mark.parametrize("clip", [0.1, None])
def test_value_loss(clip):
    def formula(lists, logp, at):
        def cost(p, g, t, a):
            new, old = lists["value"][p][g][t], lists["old_value"][p][g][t]
            near = new if clip is None else old + oracle.clip(new - old, -clip, clip)
            return 0.7 * 0.5 * max((new - 0.5) ** 2, (near - 0.5) ** 2)

        zeros = [[0.0] * 5] * 3
        return oracle.bnpo(lists, logp, at) + oracle.tokenwise(lists, zeros, cost, "token")

    objective = value_loss(bnpo(), coef=0.7, clip=clip)
    constant_target = lambda samples: samples._replace(return_T=jnp.full_like(samples.value_T, 0.5))
    check(objective._replace(prepare=constant_target), formula)


def test_kl_in_reward():
    def formula(lists, logp, at):
        steps = oracle.step_rewards(lists, 0.3)
        totals = [[sum(row) if not math.isnan(row[-1]) else math.nan for row in rows] for rows in steps]
        return oracle.ppo_loss(lists, logp, [oracle.standardize(row) for row in totals], "token")

    check(kl_in_reward(bnpo(), beta=0.3), formula)


def test_rloo_with_its_kl():
    lists = batches.make()
    steps = oracle.step_rewards(lists, 0.2)
    totals = [[sum(row) if not math.isnan(row[-1]) else math.nan for row in rows] for rows in steps]
    _, samples = batches.prepared(rloo(beta=0.2), lists)
    np.testing.assert_allclose(samples.adv, [oracle.leave_one_out(row) for row in totals], rtol=1e-4, atol=1e-5)
    assert rloo().advantage is leave_one_out


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: truncated_is(bnpo(), cap=-1.0), "cap"),
        (lambda: truncated_is(bnpo(), cap=1.0, floor=2.0), "floor"),
        (lambda: masked_is(bnpo(), low=2.0, high=1.0), "low"),
        (lambda: from_sampler(bnpo(), cap=0.0), "cap"),
        (lambda: drop_off_policy(bnpo(), delta=-1.0), "delta"),
        (lambda: drop_stale(bnpo(), max_age=-1), "max_age"),
        (lambda: tv_mask(bnpo(), delta=2.0), "delta"),
        (lambda: kl_mask(bnpo(), delta=0.0), "delta"),
        (lambda: dual_clip(bnpo(), c=0.5), "c > 1"),
        (lambda: top_entropy(bnpo(), fraction=0.0), "fraction"),
        (lambda: entropy_bonus(bnpo(), coef=math.nan), "coef"),
        (lambda: value_loss(bnpo(), coef=0.0), "coef"),
        (lambda: value_loss(bnpo(), clip=0.0), "clip"),
        (lambda: kl_in_reward(bnpo(), beta=-1.0), "beta"),
    ],
)
def test_bad_options_are_named(build, name):
    with pytest.raises(ValueError, match=name):
        build()
