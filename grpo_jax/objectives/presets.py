"""A paper is a binding of parts. `PRESETS` names them for the command line; each takes keywords
only.

Where the default here is the paper and TRL 1.16 does otherwise, the last column gives TRL's
numbers:

    what                  here, after the paper         TRL 1.16                 to match TRL
    --------------------  ----------------------------  -----------------------  ------------------
    spread of a group     population, no epsilon        ddof 1, + 1e-4           ddof=1, eps=1e-4
    nearly equal rewards  exactly 0 within 1e-6         rounding noise / 1e-4    none: a fault
    masked truncated      in no denominator             counted as sequences     count_empty=True
    groups in DAPO        constant ones leave the sums  stay in the denominator  drop_constant=False
    denominator of BNPO   tokens of the whole batch     of each micro-batch      none: a fault
    clip of CISPO         1 + high                      epsilon_high itself      epsilon_high − 1
    value: CISPO, VESPO   −w·A, gradient −w·A·∇log π    −w·A·log π               same gradient
    VESPO with a sampler  the sampler is a correction   ρ inside W               from_sampler, cap
    ratio of LUSPO, GSPO  of the sequence               of the token by default  level "sequence"
    RLOO                  REINFORCE, no clip            clipped Π r              low=.2, high=.2
    delta                 dual_clip(c=delta)            r bounded before min     delta > 1 + high
    sequence-level IS     mean log-ratio                sum of log-ratios        ratio=product
    entropy quantile      of the policy that sampled    of the current policy    first epoch: equal
    entropy bonus         divided as the loss is        by the micro-batch       token_mean: equal
    GMPO, top entropy     weighs the sequence's cost    inside the mean          none

Tunix 0.1.7 uses ddof 1 and + 1e-6, and by default k1 as the KL of the loss, which has no gradient
in expectation. Where TRL has nothing to compare with:

    what                  here                          verl                     to match verl
    --------------------  ----------------------------  -----------------------  ------------------
    REINFORCE++, both     tokens whitened, population   tokens, ddof 1, + 1e-8   ddof=1
    weight of DPPO        sg[min(r, 20)]                the same                 bound=20
    value of DPPO         −w·A, gradient −w·A·∇log π    −w·A·log π               same gradient

    what                  here                          transformers             to match it
    --------------------  ----------------------------  -----------------------  ------------------
    ties in top-p         all equally likely ones stay  the first in its order   none
"""

import functools
import math
from collections.abc import Callable, Sequence

from grpo_jax.objectives import preparations
from grpo_jax.objectives.advantages import (
    batch_scale,
    center,
    leave_one_out,
    over_mean,
    pass_at_k_advantage,
    per_reward,
    raw,
    standardize,
)
from grpo_jax.objectives.aggregates import fixed_length, sequence_mean, sequence_sum, token_mean
from grpo_jax.objectives.compose import Loss, Objective, compose, then_prepare, with_steps
from grpo_jax.objectives.corrections import (
    drop_constant_groups,
    entropy_bonus,
    kl_in_reward,
    tv_mask,
    value_loss,
)
from grpo_jax.objectives.divergences import k2, k3
from grpo_jax.objectives.ratios import (
    geometric,
    on_policy,
    per_sequence,
    per_sequence_token,
    per_token,
    product,
    product_token,
)
from grpo_jax.objectives.surrogates import (
    clipped,
    gamma_weighted,
    mirror,
    soft_gated,
    tapered,
    truncated,
    unclipped,
    weighted,
)
from grpo_jax.objectives.values import is_off, not_negative, number, positive, share, whole


def _clip(low: float, high: float):
    not_negative(low=low, high=high)
    return functools.partial(clipped, low=low, high=high)


def grpo(*, low: float = 0.2, high: float = 0.2, beta: float = 0.04) -> Objective:
    """1/B Σ_i 1/|o_i| Σ_t [−min(rA, clip(r)A) + β k3], A standardized. Shao et al. 2024
    (2402.03300), eq. 3.
    """
    return Objective(
        standardize, compose(per_token, _clip(low, high), sequence_mean, divergence=k3, beta=beta)
    )


def process_grpo(*, low: float = 0.2, high: float = 0.2, beta: float = 0.04) -> Objective:
    """GRPO with process supervision: A_{i,t} sums the standardized step rewards from t on.
    2402.03300, §4.1.3.
    """
    return grpo(low=low, high=high, beta=beta)._replace(prepare=preparations.process_supervision)


def bnpo(*, low: float = 0.2, high: float = 0.2) -> Objective:
    """1/Σ|o_i| Σ_i Σ_t −min(rA, clip(r)A), A standardized, no KL: the "bnpo" loss of TRL, over the
    whole batch.
    """
    return Objective(standardize, compose(per_token, _clip(low, high), token_mean))


def dr_grpo(*, max_length: int, low: float = 0.2, high: float = 0.2) -> Objective:
    """1/(B·max_length) Σ_i Σ_t −min(rA, clip(r)A), A = R − mean. Liu et al. 2025 (2503.20783),
    §3.2.
    """
    whole(max_length=max_length)
    aggregate = functools.partial(fixed_length, max_length=max_length)
    return Objective(center, compose(per_token, _clip(low, high), aggregate))


def dapo(*, low: float = 0.2, high: float = 0.28, drop_constant: bool = True) -> Objective:
    """1/Σ|o_i| Σ_i Σ_t −min(rA, clip(r)A), 0 < #correct < G, no KL. Yu et al. 2025 (2503.14476),
    eq. 8.

    The token mean is over the whole batch, as the paper trains; `per_group(dapo())` takes it group
    by group.
    """
    objective = bnpo(low=low, high=high)
    return drop_constant_groups(objective) if drop_constant else objective


def gspo(*, low: float = 3e-4, high: float = 4e-4) -> Objective:
    """1/B Σ_i −min(sA, clip(s)A), s the geometric mean of r. Zheng et al. 2025 (2507.18071), eq.
    5.
    """
    return Objective(standardize, compose(per_sequence, _clip(low, high), sequence_mean))


def gspo_token(*, low: float = 3e-4, high: float = 4e-4) -> Objective:
    """1/B Σ_i 1/|o_i| Σ_t −min(s_t A_t, clip(s_t)A_t), s_t = sg[s]·π/sg[π]. Zheng et al. 2025
    (2507.18071), eq. 13.
    """
    return Objective(standardize, compose(per_sequence_token, _clip(low, high), sequence_mean))


def luspo(*, low: float = 3e-4, high: float = 4e-4) -> Objective:
    """1/B Σ_i |o_i|·(−min(sA, clip(s)A)): GSPO without its length bias. LUSPO, 2602.05261."""
    return Objective(standardize, compose(per_sequence, _clip(low, high), sequence_sum))


def gmpo(*, low: float = 0.4, high: float = 0.4) -> Objective:
    """1/B Σ_i −A·exp(mean_t clip(log r)), clipped by the sign of A. Zhao et al. 2025
    (2507.20673).
    """
    not_negative(low=low, high=high)
    ratio = functools.partial(geometric, low=low, high=high)
    return Objective(standardize, compose(ratio, unclipped, sequence_mean))


def cispo(*, low: float = 1.0, high: float = 4.0) -> Objective:
    """1/Σ|o_i| Σ_i Σ_t −sg[clip(r, 1−low, 1+high)]·A·log π. MiniMax 2025 (2506.13585), eqs. 4 and
    5.
    """
    not_negative(low=low, high=high)
    return Objective(
        standardize, compose(per_token, functools.partial(weighted, low=low, high=high), token_mean)
    )


def sapo(*, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Objective:
    """1/B Σ_i 1/|o_i| Σ_t −A·σ(τ(r−1))·4/τ. Gao et al. 2025 (2511.20347)."""
    positive(tau_pos=tau_pos, tau_neg=tau_neg)
    surrogate = functools.partial(soft_gated, tau_pos=tau_pos, tau_neg=tau_neg)
    return Objective(standardize, compose(per_token, surrogate, sequence_mean))


def vespo(
    *, k_pos: float = 2.0, lam_pos: float = 3.0, k_neg: float = 3.0, lam_neg: float = 2.0
) -> Objective:
    """1/Σ|o_i| Σ_i Σ_t −sg[W^k e^{λ(1−W)}]·A·log π, W = Π_t r_t. VESPO, 2602.10693."""
    options = {"k_pos": k_pos, "lam_pos": lam_pos, "k_neg": k_neg, "lam_neg": lam_neg}
    positive(**options)
    return Objective(
        standardize,
        compose(product_token, functools.partial(gamma_weighted, **options), token_mean),
    )


def dppo(*, delta: float = 0.15, bound: float = 20.0) -> Objective:
    """1/Σ|o_i| Σ_i Σ_t −sg[min(r, bound)]·A·log π, dropped where A pushes |π − π_old| beyond δ. Qi
    et al. 2026 (DPPO-TV, 2602.04879).

    The ratio of a rare token is large long before its probability has moved by δ: the weight is
    truncated, as in verl. `bound=inf` leaves −r·A.
    """
    if number("bound", bound) != math.inf:
        positive(bound=bound)
    surrogate = functools.partial(truncated, bound=bound)
    return tv_mask(Objective(standardize, compose(per_token, surrogate, token_mean)), delta=delta)


def topr() -> Objective:
    """1/B Σ_i Σ_t −w·A·log π, w = 1 for A ≥ 0 and sg[min(W, 1)] below. Roux et al. 2025
    (2503.14286).
    """
    return Objective(center, compose(product_token, tapered, sequence_sum))


def kimi(*, tau: float = 1.0) -> Objective:
    """1/B Σ_i −A·log W + τ/2·(log W)², W = Π_t r_t, A = R − mean. Kimi k1.5 2025 (2501.12599), eq.
    3.
    """
    positive(tau=tau)
    return Objective(center, compose(product, functools.partial(mirror, tau=tau), sequence_mean))


def lite_ppo(*, low: float = 0.2, high: float = 0.2) -> Objective:
    """GRPO's clip, A = (R − mean_group)/std_batch, token mean, no KL. Liu et al. 2025
    (2508.08221).
    """
    return Objective(batch_scale, compose(per_token, _clip(low, high), token_mean))


def maxrl(*, low: float = 0.2, high: float = 0.2) -> Objective:
    """GRPO's clip, A = (R − μ)/μ, token mean, no KL: rare successes weigh more. MaxRL,
    2602.02710.
    """
    return Objective(over_mean, compose(per_token, _clip(low, high), token_mean))


def pass_at_k(*, k: int = 4, low: float = 0.2, high: float = 0.2) -> Objective:
    """GRPO's clip, the advantage of "at least one of k", token mean, no KL. Chen et al. 2025
    (2508.10751).
    """
    whole(k=k)
    advantage = functools.partial(pass_at_k_advantage, k=k)
    return Objective(advantage, compose(per_token, _clip(low, high), token_mean))


def gdpo(
    *,
    weights: Sequence[float] | None = None,
    low: float = 0.2,
    high: float = 0.2,
    beta: float = 0.04,
) -> Objective:
    """GRPO on several rewards (reward_PNG), each standardized on its own. Liu et al. 2026
    (2601.05242).
    """
    weights = None if weights is None else tuple(weights)
    return grpo(low=low, high=high, beta=beta)._replace(
        advantage=functools.partial(per_reward, weights=weights)
    )


def _sequence_reinforce() -> Loss:
    return compose(on_policy, unclipped, sequence_sum)


def opo() -> Objective:
    """1/B Σ_i Σ_t −A·log π, A = R − the length-weighted mean, on policy. Hao et al. 2025
    (2505.23585).
    """
    return Objective(raw, _sequence_reinforce(), preparations.length_weighted_baseline)


def rloo(*, low: float | None = None, high: float | None = None, beta: float = 0.0) -> Objective:
    """1/B Σ_i Σ_t −A·log π, A leave-one-out, β·KL in the reward. Ahmadian et al. 2024 (2402.14740).

    `low` and `high` clip the ratio of the sequence instead: 1/B Σ_i −min(WA, clip(W)A), for several
    epochs.
    """
    if (low is None) != (high is None):
        raise ValueError(
            f"rloo takes low and high together, or neither, got low={low}, high={high}."
        )
    not_negative(beta=beta)
    loss = (
        _sequence_reinforce() if low is None else compose(product, _clip(low, high), sequence_mean)
    )
    objective = Objective(leave_one_out, loss)
    return objective if is_off(beta) else kl_in_reward(objective, beta=beta)


def _from_token_rewards(loss: Loss, beta, *steps) -> Objective:
    """Advantages that `steps` make of reward_T, with the KL inside it unless β is 0."""
    penalty = () if is_off(beta) else (functools.partial(preparations.kl_penalty, beta=beta),)
    return with_steps(Objective(raw, loss), *penalty, *steps)


def reinforce(*, gamma: float = 1.0, beta: float = 0.0) -> Objective:
    """1/B Σ_i Σ_t −G_t·log π, G_t = Σ_k γ^k r_{t+k}: the vanilla policy gradient. Williams 1992."""
    share(gamma=gamma)
    not_negative(beta=beta)
    returns = functools.partial(preparations.reward_to_go, gamma=gamma)
    return _from_token_rewards(_sequence_reinforce(), beta, returns)


def reinforce_baseline(
    *, gamma: float = 1.0, beta: float = 0.0, value_coef: float = 0.5
) -> Objective:
    """1/B Σ_i Σ_t −(G_t − V_t)·log π + value_coef·½(V − G)²: a critic as the baseline. Williams
    1992, §4.
    """
    positive(value_coef=value_coef)
    objective = reinforce(gamma=gamma, beta=beta)
    objective = then_prepare(objective, preparations.minus_value)
    return value_loss(objective, coef=value_coef, clip=None)


def reinforce_pp(*, low: float = 0.2, high: float = 0.2, beta: float = 0.01) -> Objective:
    """PPO's clip with A_t = R − β Σ_{i≥t} k1_i, whitened over the batch's tokens. Hu 2025
    (2501.03262).
    """
    not_negative(beta=beta)
    loss = compose(per_token, _clip(low, high), token_mean)
    steps = (preparations.reward_to_go, preparations.whiten_tokens)
    return _from_token_rewards(loss, beta, *steps)


def reinforce_pp_baseline(*, low: float = 0.2, high: float = 0.2, beta: float = 0.01) -> Objective:
    """PPO's clip + β k2, A = R − mean_group, whitened over the batch's tokens. Hu 2025
    (2501.03262).
    """
    loss = compose(per_token, _clip(low, high), token_mean, divergence=k2, beta=beta)
    return Objective(center, loss, preparations.whiten_tokens)


def ppo(
    *,
    low: float = 0.2,
    high: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    value_coef: float = 0.1,
    value_clip: float | None = 0.2,
    beta: float = 0.05,
    entropy_coef: float = 0.0,
) -> Objective:
    """PPO with a critic: GAE(γ, λ), whitened; value loss; β·KL in the reward. Schulman et al. 2017
    (1707.06347), eq. 9.

    For language models after Ouyang et al. 2022 (2203.02155): 1/Σ|o_i| Σ_i Σ_t.
    """
    share(gamma=gamma, lam=lam)
    not_negative(beta=beta, entropy_coef=entropy_coef)
    positive(value_coef=value_coef, **({} if value_clip is None else {"value_clip": value_clip}))
    advantages = functools.partial(preparations.gae_advantages, gamma=gamma, lam=lam)
    loss = compose(per_token, _clip(low, high), token_mean)
    objective = _from_token_rewards(loss, beta, advantages, preparations.whiten_tokens)
    objective = value_loss(objective, coef=value_coef, clip=value_clip)
    return objective if is_off(entropy_coef) else entropy_bonus(objective, coef=entropy_coef)


PRESETS: dict[str, Callable[..., Objective]] = {
    preset.__name__: preset
    for preset in (
        grpo,
        process_grpo,
        dr_grpo,
        bnpo,
        dapo,
        gspo,
        gspo_token,
        luspo,
        gmpo,
        cispo,
        sapo,
        vespo,
        dppo,
        topr,
        kimi,
        lite_ppo,
        maxrl,
        pass_at_k,
        gdpo,
        opo,
        rloo,
        reinforce,
        reinforce_baseline,
        reinforce_pp,
        reinforce_pp_baseline,
        ppo,
    )
}
