"""objective → objective: sampler mismatch, staleness, token selection, bounds and extra terms.

A correction wraps any objective, and a corrected objective is an objective. Those that weigh tokens
multiply the detached weight of the surrogate; the KL term is not touched by them. Weights leave the
denominators alone: a dropped token has no gradient, but it is still there. `drop_truncated` and
`drop_constant_groups` remove the denominators too.
"""

import functools
import math

import jax.numpy as jnp

from grpo_jax.objectives import preparations
from grpo_jax.objectives.compose import (
    Objective,
    corrected,
    group_share,
    need,
    prepare_steps,
    rebind,
    recipe,
    then_prepare,
    with_steps,
)
from grpo_jax.objectives.effects import tells_steps_from_zeros, weights_by_length
from grpo_jax.objectives.exponentials import bounded_exp
from grpo_jax.objectives.ratios import per_sequence, per_token
from grpo_jax.objectives.returns import value_cost
from grpo_jax.objectives.surrogates import floored
from grpo_jax.objectives.tracing import reads_in_loss, reads_in_prepare, takes_several_rewards
from grpo_jax.objectives.values import check, number
from grpo_jax.types import Array, Sample

# What a loss has to do for a correction to act on it.
HINTS = {
    "weight_T": "multiply the cost of each token by sample.weight_T",
    "old_logp_T": "take the ratio to sample.old_logp_T",
}


def check_is_objective(objective: object, taker: str) -> None:
    """Raises a TypeError that says what was given instead of an `Objective`."""
    if isinstance(objective, Objective):
        return
    call = f": call it, {recipe(objective)}()" if callable(objective) else ""
    raise TypeError(f"{taker} takes an Objective, such as grpo(), got {recipe(objective)}{call}.")


def _check_acts(objective: Objective, correction: str, field: str) -> None:
    """Raises a ValueError where the loss does not read the field that a correction changes."""
    check_is_objective(objective, correction)
    if field not in reads_in_loss(objective):
        raise ValueError(
            f"{correction} acts through {field}, which the loss {recipe(objective.loss)} does not "
            f"read, so that it would change nothing: {HINTS[field]}."
        )


def _adjusted(objective: Objective, adjust) -> Objective:
    return objective._replace(loss=functools.partial(corrected, adjust=adjust, loss=objective.loss))


def _weighed(objective: Objective, correction: str, adjust) -> Objective:
    """The objective on samples whose weights were multiplied."""
    _check_acts(objective, correction, "weight_T")
    return _adjusted(objective, adjust)


def _times(sample: Sample, weight_T: Array) -> Sample:
    weight_T = jnp.broadcast_to(weight_T, sample.mask_T.shape).astype(sample.old_logp_T.dtype)
    return sample._replace(
        weight_T=weight_T if sample.weight_T is None else sample.weight_T * weight_T
    )


def _sampler_log_ratio(sample: Sample, ratio, reader: str) -> Array:
    """log ρ = log π_old − log π_sampler by a ratio part; a token that the sampler could not score
    has ρ = 1.
    """
    sampler_logp_T = need(sample, "sampler_logp_T", reader)
    sampler_logp_T = jnp.where(jnp.isnan(sampler_logp_T), sample.old_logp_T, sampler_logp_T)
    return ratio(sample.old_logp_T, sampler_logp_T, sample.mask_T)


def truncate(logp_T: Array, sample: Sample, *, cap: float, floor: float, ratio) -> Sample:
    del logp_T
    weight_T = bounded_exp(_sampler_log_ratio(sample, ratio, "truncated_is"))
    return _times(sample, jnp.clip(weight_T, floor, cap))


def truncated_is(
    objective: Objective, *, cap: float = 2.0, floor: float = 0.0, ratio=per_token
) -> Objective:
    """w ← w·clip(ρ, floor, cap), ρ = π_old/π_sampler: truncated importance sampling (TIS).

    Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training". `ratio` chooses the level: `per_token`, `per_sequence` (the mean log-ratio),
    `product` (the sum, which drifts with length).
    """
    needs = "truncated_is needs 0 <= floor < cap"
    check(lambda floor, cap: 0 <= floor < cap, needs, floor=floor, cap=cap)
    adjust = functools.partial(truncate, cap=cap, floor=floor, ratio=ratio)
    return _weighed(objective, "truncated_is", adjust)


def keep_between(logp_T: Array, sample: Sample, *, low: float, high: float, ratio) -> Sample:
    del logp_T
    weight_T = bounded_exp(_sampler_log_ratio(sample, ratio, "masked_is"))
    return _times(sample, jnp.where((weight_T >= low) & (weight_T <= high), weight_T, 0.0))


def masked_is(
    objective: Objective, *, low: float = 0.5, high: float = 5.0, ratio=per_token
) -> Objective:
    """w ← w·ρ·1[low ≤ ρ ≤ high], ρ = π_old/π_sampler: masked importance sampling. IcePop,
    2510.18855.
    """
    check(lambda low, high: 0 <= low < high, "masked_is needs 0 <= low < high", low=low, high=high)
    adjust = functools.partial(keep_between, low=low, high=high, ratio=ratio)
    return _weighed(objective, "masked_is", adjust)


def behave_as_sampler(logp_T: Array, sample: Sample, *, cap: float) -> Sample:
    del logp_T
    known = number("cap", cap)
    most = jnp.log(cap) if known is None else math.log(known)
    log_ratio_T = jnp.minimum(_sampler_log_ratio(sample, per_token, "from_sampler"), most)
    return sample._replace(old_logp_T=sample.old_logp_T - log_ratio_T)


def from_sampler(objective: Objective, *, cap: float = math.inf) -> Objective:
    """log r ← log r + log min(ρ, cap): the mismatch inside the ratio, so that clips act on it too.

    Without a cap it is π_θ/π_sampler, the sampler itself taken for the policy that acted.
    """
    check(lambda cap: cap > 0, "from_sampler needs cap > 0", cap=cap)
    _check_acts(objective, "from_sampler", "old_logp_T")
    return _adjusted(objective, functools.partial(behave_as_sampler, cap=cap))


def keep_close(logp_T: Array, sample: Sample, *, delta: float) -> Sample:
    acted_T = sample.old_logp_T if sample.sampler_logp_T is None else sample.sampler_logp_T
    acted_T = jnp.where(jnp.isnan(acted_T), logp_T, acted_T)
    gap_T = per_sequence(acted_T, logp_T, sample.mask_T)
    return _times(sample, (sample.adv >= 0) | (gap_T <= delta))


def drop_off_policy(objective: Objective, *, delta: float) -> Objective:
    """w ← 0 for a sequence with A < 0 and mean_t log(π_sampler/π_θ) > δ. DeepSeek-AI 2025 (V3.2,
    2512.02556), eq. 9.

    A bad answer that the policy would hardly give any more has little to teach. π_old stands in for
    π_sampler where the sample has no `sampler_logp_T`.
    """
    check(lambda delta: delta >= 0, "drop_off_policy needs delta >= 0", delta=delta)
    return _weighed(objective, "drop_off_policy", functools.partial(keep_close, delta=delta))


def keep_young(logp_T: Array, sample: Sample, *, max_age: int) -> Sample:
    del logp_T
    return _times(sample, need(sample, "age", "drop_stale") <= max_age)


def drop_stale(objective: Objective, *, max_age: int) -> Objective:
    """w ← 0 for samples drawn more than `max_age` updates ago. Fu et al. 2025 (AReaL, 2505.24298),
    §5.1.
    """
    check(lambda max_age: max_age >= 0, "drop_stale needs max_age >= 0", max_age=max_age)
    return _weighed(objective, "drop_stale", functools.partial(keep_young, max_age=max_age))


def keep_stopped(logp_T: Array, sample: Sample) -> Sample:
    del logp_T
    return sample._replace(mask_T=sample.mask_T & need(sample, "stopped", "drop_truncated"))


def drop_truncated(objective: Objective) -> Objective:
    """m ← m·stopped: a completion that the length limit cut off is not there at all.

    Yu et al. 2025 (DAPO, 2503.14476), §3.4, overlong filtering. Its reward still counts in its
    group.
    """
    check_is_objective(objective, "drop_truncated")
    return _adjusted(objective, keep_stopped)


def keep_within_tv(logp_T: Array, sample: Sample, *, delta: float) -> Sample:
    moved_T = bounded_exp(logp_T) - bounded_exp(sample.old_logp_T)
    return _times(
        sample, ~(((sample.adv > 0) & (moved_T > delta)) | ((sample.adv < 0) & (moved_T < -delta)))
    )


def tv_mask(objective: Objective, *, delta: float) -> Objective:
    """w ← 0 where A > 0 and π − π_old > δ, or A < 0 and π − π_old < −δ. Qi et al. 2026 (DPPO,
    2602.04879).

    A trust region in total variation of the sampled token against the rest: probabilities count,
    not their ratio.
    """
    needs = "tv_mask needs 0 < delta <= 1, a difference of probabilities"
    check(lambda delta: 0 < delta <= 1, needs, delta=delta)
    return _weighed(objective, "tv_mask", functools.partial(keep_within_tv, delta=delta))


def keep_within_kl(logp_T: Array, sample: Sample, *, delta: float) -> Sample:
    old_logp_T = sample.old_logp_T
    old_T = bounded_exp(old_logp_T)
    # Probabilities of 1 have no rest: the floor keeps log(1 − p) finite.
    rest = lambda x_T: jnp.log(jnp.maximum(-jnp.expm1(x_T), jnp.finfo(x_T.dtype).tiny))
    kl_T = old_T * (old_logp_T - logp_T) + (1 - old_T) * (rest(old_logp_T) - rest(logp_T))
    away_T = ((sample.adv > 0) & (logp_T > old_logp_T)) | ((sample.adv < 0) & (logp_T < old_logp_T))
    return _times(sample, ~(away_T & (kl_T > delta)))


def kl_mask(objective: Objective, *, delta: float) -> Objective:
    """w ← 0 where A pushes π further from π_old and KL(Bernoulli(π_old)‖Bernoulli(π)) > δ. DPPO,
    2602.04879.
    """
    check(lambda delta: delta > 0, "kl_mask needs delta > 0 nats", delta=delta)
    return _weighed(objective, "kl_mask", functools.partial(keep_within_kl, delta=delta))


def dual_clip(objective: Objective, *, c: float = 3.0) -> Objective:
    """max(min(rA, clip(r)A), cA) for A < 0: a bad token's loss is bounded by c·|A|. Ye et al. 2020
    (1912.09729).

    Equal to bounding the ratio at c ("two-sided clipping", INTELLECT-2, 2505.07291) when c is above
    the clip range.
    """
    check_is_objective(objective, "dual_clip")
    check(lambda c: c > 1, "dual_clip needs c > 1", c=c)
    bound = lambda parts: {
        "surrogate": functools.partial(floored, surrogate=parts["surrogate"], c=c)
    }
    return objective._replace(loss=rebind(objective.loss, bound))


def _plus(objective: Objective, correction: str, term) -> Objective:
    check_is_objective(objective, correction)
    return objective._replace(
        loss=rebind(objective.loss, lambda parts: {"terms": (*parts["terms"], term)})
    )


def entropy_term(sample: Sample, *, coef: float) -> Array:
    return -coef * need(sample, "entropy_T", "entropy_bonus")


def entropy_bonus(objective: Objective, *, coef: float) -> Objective:
    """cost_t ← cost_t − coef·H(π_t), of the current policy. Williams & Peng 1991; Mnih et al. 2016
    (1602.01783).
    """
    check(math.isfinite, "entropy_bonus needs a finite coef", coef=coef)
    return _plus(objective, "entropy_bonus", functools.partial(entropy_term, coef=coef))


def value_term(sample: Sample, *, coef: float, clip: float | None) -> Array:
    value_T, return_T = (need(sample, field, "value_loss") for field in ("value_T", "return_T"))
    old_value_T = value_T if clip is None else need(sample, "old_value_T", "value_loss")
    return coef * value_cost(value_T, old_value_T, return_T, clip=clip)


def value_loss(objective: Objective, *, coef: float = 0.5, clip: float | None = 0.2) -> Objective:
    """cost_t ← cost_t + coef·½·max((V − R)², (clip(V, V_old ± clip) − R)²). Schulman et al. 2017
    (1707.06347).
    """
    check(lambda coef: coef > 0, "value_loss needs coef > 0", coef=coef)
    if clip is not None:
        check(lambda clip: clip > 0, "value_loss needs clip > 0 or None", clip=clip)
    return _plus(objective, "value_loss", functools.partial(value_term, coef=coef, clip=clip))


def top_entropy(objective: Objective, *, fraction: float = 0.2) -> Objective:
    """Only tokens with an entropy in the batch's top `fraction` keep their surrogate. Wang et al.
    2025 (2506.01939).
    """
    needs = "top_entropy needs 0 < fraction <= 1"
    check(lambda fraction: 0 < fraction <= 1, needs, fraction=fraction)
    _check_acts(objective, "top_entropy", "weight_T")
    return then_prepare(objective, functools.partial(preparations.high_entropy, fraction=fraction))


def drop_constant_groups(objective: Objective) -> Objective:
    """Leaves out zero-variance groups, denominators included. Yu et al. 2025 (DAPO, 2503.14476),
    eq. 8.
    """
    check_is_objective(objective, "drop_constant_groups")
    return then_prepare(objective, preparations.only_signal)


def kl_in_reward(objective: Objective, *, beta: float | Array) -> Objective:
    """r_t ← r_t − β(log π_old,t − log π_ref,t), summed and compared in the group, instead of a KL
    in the loss.

    Ouyang et al. 2022 (2203.02155), eq. 2; Shao et al. 2024 (2402.03300), eq. 2. `beta` may be an
    array, such as one that `adaptive_beta` moved. The objective's own advantage compares the sums,
    also one that is put into it later. A KL in the loss stays: have it here alone by
    `kl_in_reward(grpo(beta=0.0), beta=…)`.

    Eq. 2 is PPO's, whose baseline does not divide. An advantage that divides by the spread of the
    group, as `standardize` does, gives the completions of a group with equal rewards advantages of
    order 1 that come from the KL alone, and are as large for any β: `center` and `leave_one_out`
    keep them at the size of β·KL.

    Raises:
      ValueError: the reward has a KL already, the advantage takes several rewards, or the
        preparation credits the steps of a reward, which a KL on every token would all become.
    """
    check_is_objective(objective, "kl_in_reward")
    check(lambda beta: beta >= 0, "kl_in_reward needs beta >= 0", beta=beta)
    own = prepare_steps(objective)
    if "ref_logp_T" in reads_in_prepare(objective):
        raise ValueError(
            f"kl_in_reward: the preparation {recipe(own)} reads ref_logp_T, so the reward has a KL "
            "already and it would count twice: take the objective with beta=0.0."
        )
    if takes_several_rewards(objective.advantage):
        raise ValueError(
            f"kl_in_reward: advantage={recipe(objective.advantage)} compares several rewards, and "
            "the KL would be put into their sum: take an advantage of one reward."
        )
    if "reward_T" in reads_in_prepare(objective) and tells_steps_from_zeros(objective):
        raise ValueError(
            f"kl_in_reward: the preparation {recipe(own)} credits the steps of a reward, and with "
            "a KL on it every token would be a step: take a KL in the loss."
        )
    penalty = functools.partial(preparations.kl_penalty, beta=beta)
    return with_steps(objective, penalty, preparations.outcome_advantages, *own)


def per_group(objective: Objective) -> Objective:
    """1/P Σ_p 1/Σ_i|o_i| Σ_i Σ_t: a token mean for each group, then the mean of the groups.

    Yu et al. 2025 (DAPO, 2503.14476), eq. 8 as printed, for one prompt at a time. What other
    corrections leave out of a group does not count in it, whichever is applied first.

    Raises:
      ValueError: the loss is not divided by its tokens, as with `token_mean`.
    """
    check_is_objective(objective, "per_group")
    lengths, weights = weights_by_length(objective)
    if weights is not None and weights != lengths:
        raise ValueError(
            f"per_group divides by the tokens of a group, but the loss {recipe(objective.loss)} is "
            f"not a token mean: it weighs completions of {lengths} tokens by {weights}."
        )
    objective = then_prepare(objective, preparations.count_group_tokens)
    return objective._replace(loss=functools.partial(group_share, loss=objective.loss))
