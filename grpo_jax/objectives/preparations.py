"""A whole batch: samples_PG → samples_PG, once before the epochs on it.

Here lives everything that needs more than one sequence to make the samples: advantages of tokens,
whitening, quantiles. A micro-batch sees only the results, and so cannot change them. Each is an
`Objective.prepare`, its options bound by `functools.partial`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.objectives import returns
from grpo_jax.objectives.advantages import (
    PROMPT_AXIS,
    Advantage,
    has_signal,
    standardize,
    weighted_mean,
    z_scores,
)
from grpo_jax.objectives.compose import Loss, map_samples, need, seen_by_core
from grpo_jax.types import Array, Sample


def _each(function: Callable, *arrays: Array) -> Array:
    """`function` of one sequence, for every sequence of the batch."""
    return jax.vmap(jax.vmap(function))(*arrays)


def _rewards(samples_PG: Sample, reader: str) -> Array:
    return need(samples_PG, "reward_T", reader)


def _scored(samples_PG: Sample, reader: str) -> Array:
    """mask_PGT without the sequences that could not be scored."""
    scored_PG = _each(returns.is_scored, _rewards(samples_PG, reader), samples_PG.mask_T)
    return samples_PG.mask_T & scored_PG[..., None]


def kl_penalty(samples_PG: Sample, *, beta: float | Array) -> Sample:
    """r_t ← r_t − β(log π_old,t − log π_ref,t), see `returns.penalised`."""
    old = samples_PG.old_logp_T
    ref = need(samples_PG, "ref_logp_T", "kl_penalty")
    function = functools.partial(returns.penalised, beta=beta)
    return samples_PG._replace(
        reward_T=_each(function, _rewards(samples_PG, "kl_penalty"), samples_PG.mask_T, old, ref)
    )


def outcome_advantages(samples_PG: Sample, *, advantage: Advantage) -> Sample:
    """adv_G = advantage(R_G) with R = Σ_t r_t: the rewards of all tokens summed, then compared in
    the group.
    """
    reward_PG = _each(
        returns.outcome, _rewards(samples_PG, "outcome_advantages"), samples_PG.mask_T
    )
    return samples_PG._replace(adv=jax.vmap(advantage, axis_name=PROMPT_AXIS)(reward_PG))


def process_supervision(samples_PG: Sample, *, ddof: int = 0, eps: float = 0.0) -> Sample:
    """A_{i,t} = Σ_{index(j) ≥ t} r̃_i^{index(j)}, the step rewards of a whole group standardized
    together.

    Shao et al. 2024 (2402.03300), §4.1.3: a token is credited with every step that ends at it or
    later.
    """
    reward_PGT = _rewards(samples_PG, "process_supervision")
    mask_PGT = samples_PG.mask_T
    P, G, T = reward_PGT.shape
    step_PN = jnp.where(mask_PGT, reward_PGT, jnp.nan).reshape(P, G * T)
    normal_PN = jax.vmap(functools.partial(standardize, ddof=ddof, eps=eps))(step_PN)
    return samples_PG._replace(
        adv=_each(returns.returns_to_go, normal_PN.reshape(P, G, T), mask_PGT)
    )


def reward_to_go(samples_PG: Sample, *, gamma: float = 1.0) -> Sample:
    """A_t = G_t = Σ_{k ≥ t} γ^{k−t} r_k: each token is credited with what came after it. Williams
    1992.
    """
    function = functools.partial(returns.returns_to_go, gamma=gamma)
    return_PGT = _each(function, _rewards(samples_PG, "reward_to_go"), samples_PG.mask_T)
    return samples_PG._replace(adv=return_PGT, return_T=return_PGT)


def minus_value(samples_PG: Sample) -> Sample:
    """A_t ← A_t − V_old,t: a learned baseline. Williams 1992, §4; Sutton & Barto 2018, §13.4."""
    value_PGT = need(samples_PG, "old_value_T", "minus_value")
    keep_PGT = _scored(samples_PG, "minus_value")
    return samples_PG._replace(adv=jnp.where(keep_PGT, samples_PG.adv - value_PGT, 0.0))


def gae_advantages(samples_PG: Sample, *, gamma: float = 1.0, lam: float = 0.95) -> Sample:
    """A_t by GAE(γ, λ) from the critic that acted, and its targets R_t = A_t + V_old,t. See
    `returns.gae`.

    A sequence that could not be scored teaches neither the policy (A = 0) nor the critic (R =
    V_old).
    """
    value_PGT = need(samples_PG, "old_value_T", "gae_advantages")
    reward_PGT = _rewards(samples_PG, "gae_advantages")
    value_PGT = jnp.where(samples_PG.mask_T, value_PGT, 0.0)
    adv_PGT = _each(
        functools.partial(returns.gae, gamma=gamma, lam=lam),
        reward_PGT,
        value_PGT,
        samples_PG.mask_T,
    )
    adv_PGT = jnp.where(_scored(samples_PG, "gae_advantages"), adv_PGT, 0.0)
    return samples_PG._replace(adv=adv_PGT, return_T=adv_PGT + value_PGT)


def whiten_tokens(samples_PG: Sample, *, ddof: int = 0, eps: float = 0.0) -> Sample:
    """A_t ← (A_t − mean)/(std + eps) over every trained token of the batch. Hu 2025 (REINFORCE++,
    2501.03262).

    A completion counts as often as it has tokens, so that the advantages of tokens have mean 0.
    Equal advantages everywhere become 0, and so do those of sequences that could not be scored.
    """
    keep_PGT = _scored(samples_PG, "whiten_tokens")
    adv_PGT = samples_PG.adv if jnp.ndim(samples_PG.adv) == 3 else samples_PG.adv[..., None]
    adv_PGT = jnp.broadcast_to(adv_PGT, keep_PGT.shape)
    return samples_PG._replace(adv=z_scores(adv_PGT, keep_PGT, ddof=ddof, eps=eps))


def length_weighted_baseline(samples_PG: Sample) -> Sample:
    """A_i = R_i − Σ_j |o_j| R_j / Σ_j |o_j| within the group. Hao et al. 2025 (OPO, 2505.23585).

    The baseline of least variance when the squared gradient of a sequence grows with its length.
    """
    reward_PG = _each(
        returns.outcome, _rewards(samples_PG, "length_weighted_baseline"), samples_PG.mask_T
    )
    length_PG = jnp.sum(samples_PG.mask_T, axis=-1)

    def one_group(reward_G: Array, length_G: Array) -> Array:
        scored_G = ~jnp.isnan(reward_G)
        baseline = weighted_mean(reward_G, scored_G, length_G)
        return jnp.where(scored_G & has_signal(reward_G), reward_G - baseline, 0.0)

    return samples_PG._replace(adv=jax.vmap(one_group)(reward_PG, length_PG))


def only_signal(samples_PG: Sample) -> Sample:
    """Leaves out every group whose advantages are all 0, from sums and from denominators alike.

    Yu et al. 2025 (DAPO, 2503.14476), eq. 8: the constraint 0 < #correct < G.
    """
    adv_PG = samples_PG.adv
    has_signal_P = jnp.any(adv_PG != 0, axis=tuple(range(1, jnp.ndim(adv_PG))))
    return samples_PG._replace(mask_T=samples_PG.mask_T & has_signal_P[:, None, None])


def high_entropy(samples_PG: Sample, *, fraction: float) -> Sample:
    """w_t ← w_t·1[H_t ≥ τ], τ the entropy that only `fraction` of the batch's trained tokens reach.

    Wang et al. 2025 (2506.01939): the few forking tokens carry the signal. The KL term still sees
    every token.
    """
    entropy_PGT = need(samples_PG, "entropy_T", "high_entropy")
    trained_PGT = jnp.where(samples_PG.mask_T, entropy_PGT, jnp.nan)
    threshold = jnp.nanquantile(trained_PGT, 1.0 - fraction)
    keep_PGT = (samples_PG.mask_T & (entropy_PGT >= threshold)).astype(entropy_PGT.dtype)
    weight_PGT = keep_PGT if samples_PG.weight_T is None else samples_PG.weight_T * keep_PGT
    return samples_PG._replace(weight_T=weight_PGT)


def count_group_tokens(samples_PG: Sample, *, loss: Loss) -> Sample:
    """Tells every sequence how many tokens its group trains, under the masks of the objective's
    loss.

    An objective hands its own loss to a preparation that takes one: what is dropped later counts.
    """

    def trained(logp_T: Array, sample: Sample) -> Array:
        return jnp.sum(seen_by_core(loss, logp_T, sample)[2].mask_T)

    tokens_PG = map_samples(trained, samples_PG.old_logp_T, samples_PG)
    tokens_P1 = jnp.sum(tokens_PG, axis=1, keepdims=True)
    return samples_PG._replace(group_tokens=jnp.broadcast_to(tokens_P1, tokens_PG.shape))
