"""One group: reward_G → adv_G. How much better than its siblings was each completion of one prompt?

Three rules hold for every function here. A NaN reward ("could not be scored") is left out of the
statistics and gets advantage 0. A constant group, max − min ≤ 1e-6·max(1, |mean|), gets exactly 0:
in float32 the spread of seven rewards of .7 is 6e-8, and dividing by that turns rounding noise into
a signal. So does a group of one.

Functions named `batch_…` also look across groups: they run under `batch_advantages`, which names
that axis "prompt". Left out on purpose: gradients. Rewards are data.
"""

from collections.abc import Callable, Sequence

import chex
import jax
import jax.numpy as jnp

from grpo_jax.types import Array

Advantage = Callable[[Array], Array]

CONSTANT = 1e-6  # relative to max(1, |mean|)
PROMPT_AXIS = "prompt"


def _is_scored(reward_G: Array) -> Array:
    chex.assert_rank(reward_G, 1)
    return ~jnp.isnan(reward_G)


def _mean(x_G: Array, keep_G: Array) -> Array:
    return jnp.sum(jnp.where(keep_G, x_G, 0.0)) / jnp.maximum(jnp.sum(keep_G), 1)


def has_signal(reward_G: Array) -> Array:
    """Whether a group can teach anything: at least two scored rewards, and not all the same."""
    scored_G = _is_scored(reward_G)
    low = jnp.min(jnp.where(scored_G, reward_G, jnp.inf))
    high = jnp.max(jnp.where(scored_G, reward_G, -jnp.inf))
    tolerance = CONSTANT * jnp.maximum(1.0, jnp.abs(_mean(reward_G, scored_G)))
    return (jnp.sum(scored_G) > 1) & (high - low > tolerance)


def _only_signal(adv_G: Array, reward_G: Array) -> Array:
    return jnp.where(_is_scored(reward_G) & has_signal(reward_G), adv_G, 0.0)


def raw(reward_G: Array) -> Array:
    """The reward itself, A = R: no baseline, and so the one advantage that a constant group does
    not silence.
    """
    return jnp.where(_is_scored(reward_G), reward_G, 0.0)


def center(reward_G: Array) -> Array:
    """A = R − mean(R). Liu et al. 2025 (Dr. GRPO, 2503.20783), §3.2: no division by the spread."""
    return _only_signal(reward_G - _mean(reward_G, _is_scored(reward_G)), reward_G)


def standardize(reward_G: Array, *, ddof: int = 0, eps: float = 0.0) -> Array:
    """A = (R − mean(R)) / (std(R) + eps). Shao et al. 2024 (GRPO, 2402.03300), §4.1.2.

    The spread is the population's; PyTorch trainers use `ddof=1, eps=1e-4`.
    """
    scored_G = _is_scored(reward_G)
    centered_G = reward_G - _mean(reward_G, scored_G)
    degrees = jnp.maximum(jnp.sum(scored_G) - ddof, 1)
    std = jnp.sqrt(jnp.sum(jnp.where(scored_G, centered_G, 0.0) ** 2) / degrees)
    return _only_signal(centered_G / jnp.where(std > 0, std + eps, 1.0), reward_G)


def leave_one_out(reward_G: Array) -> Array:
    """A_i = R_i − mean_{j≠i} R_j = n/(n−1)·(R_i − mean(R)). Ahmadian et al. 2024 (RLOO,
    2402.14740).
    """
    scored_G = _is_scored(reward_G)
    count = jnp.sum(scored_G)
    scale = count / jnp.maximum(count - 1, 1)
    return _only_signal(scale * (reward_G - _mean(reward_G, scored_G)), reward_G)


def over_mean(reward_G: Array) -> Array:
    """A = (R − μ)/μ with μ = mean(R), and 0 where μ ≤ 0. MaxRL, 2602.02710."""
    mean = _mean(reward_G, _is_scored(reward_G))
    positive = mean > 0
    adv_G = (reward_G - mean) / jnp.where(positive, mean, 1.0)
    return _only_signal(jnp.where(positive, adv_G, 0.0), reward_G)


def pass_at_k_advantage(reward_G: Array, *, k: int) -> Array:
    """The advantage of "at least one of k is right", averaged over every subset of k completions.

    With N completions, n of them wrong, and ρ = C(n,k)/C(N,k) the chance that k draws are all
    wrong: R̄ = 1 − ρ, σ = √(R̄(1−R̄)), A_right = (1−R̄)/σ, A_wrong = (1 − R̄ −
    C(n−1,k−1)/C(N−1,k−1))/σ. Chen et al. 2025 (pass@k training, 2508.10751), the analytical form. A
    reward above .5 is right. Groups with fewer than k scored completions get 0.
    """
    scored_G = _is_scored(reward_G)
    right_G = scored_G & (reward_G > 0.5)
    count = jnp.sum(scored_G)
    wrong = count - jnp.sum(right_G)

    def chance(n: Array, total: Array, draws: int) -> Array:
        steps = jnp.arange(draws)
        return jnp.prod(jnp.maximum(n - steps, 0) / jnp.maximum(total - steps, 1))

    all_wrong = chance(wrong, count, k)
    mean = 1.0 - all_wrong
    std = jnp.sqrt(mean * all_wrong)
    wrong_adv = 1.0 - mean - chance(wrong - 1, count - 1, k - 1)
    adv_G = jnp.where(right_G, 1.0 - mean, wrong_adv) / jnp.where(std > 0, std, 1.0)
    return jnp.where(scored_G & (std > 0) & (count >= k), adv_G, 0.0)


def _batch_moments(x_G: Array, keep_G: Array, ddof: int) -> tuple[Array, Array]:
    """Mean and spread of the kept values of every group in the batch."""
    total = lambda y_G: jax.lax.psum(jnp.sum(jnp.where(keep_G, y_G, 0.0)), PROMPT_AXIS)
    count = total(jnp.ones_like(x_G))
    mean = total(x_G) / jnp.maximum(count, 1)
    return mean, jnp.sqrt(total((x_G - mean) ** 2) / jnp.maximum(count - ddof, 1))


def batch_scale(reward_G: Array, *, ddof: int = 0, eps: float = 0.0) -> Array:
    """A = (R − mean_group(R)) / (std_batch(R) + eps): one spread for all groups. Liu et al. 2025
    (2508.08221).
    """
    _, std = _batch_moments(reward_G, _is_scored(reward_G), ddof)
    return center(reward_G) / jnp.where(std > 0, std + eps, 1.0)


def batch_whiten(
    reward_G: Array, *, baseline: Advantage = center, ddof: int = 0, eps: float = 0.0
) -> Array:
    """A = z-score over the batch of `baseline(R)`. Hu 2025 (REINFORCE++-baseline, 2501.03262)."""
    scored_G = _is_scored(reward_G)
    adv_G = baseline(reward_G)
    mean, std = _batch_moments(adv_G, scored_G, ddof)
    constant = std <= CONSTANT * jnp.maximum(1.0, jnp.abs(mean))
    return jnp.where(
        scored_G & ~constant, (adv_G - mean) / jnp.where(constant, 1.0, std + eps), 0.0
    )


def rounded(reward_G: Array, *, step: float, advantage: Advantage = standardize) -> Array:
    """`advantage` of rewards rounded to multiples of `step`.

    Standardizing turns [.51, .5, .5, .5] into +1.73 and −.58, as it does [1, 0, 0, 0]: a graded
    reward needs a smallest difference that counts.
    """
    return advantage(jnp.round(reward_G / step) * step)


def limited(reward_G: Array, *, limit: float, advantage: Advantage = standardize) -> Array:
    """`advantage` clipped to [−limit, limit]."""
    return jnp.clip(advantage(reward_G), -limit, limit)


def _weights(reward_NG: Array, weights: Sequence[float] | None) -> Array:
    count = reward_NG.shape[0]
    if weights is not None and len(weights) != count:
        raise ValueError(f"weights has {len(weights)} entries, but there are {count} rewards.")
    return jnp.ones(count) if weights is None else jnp.asarray(weights)


def _nansum(x_NG: Array) -> Array:
    """Sum over rewards of those that could be scored; NaN where none could."""
    return jnp.where(jnp.all(jnp.isnan(x_NG), axis=0), jnp.nan, jnp.nansum(x_NG, axis=0))


def weighted_sum(
    reward_NG: Array, *, weights: Sequence[float] | None = None, advantage: Advantage = standardize
) -> Array:
    """Several rewards, summed and then normalised: A = advantage(Σ_n w_n R_n). No weights: all
    1.
    """
    reward_NG = jnp.atleast_2d(reward_NG)
    return advantage(_nansum(_weights(reward_NG, weights)[:, None] * reward_NG))


def per_reward(
    reward_NG: Array, *, weights: Sequence[float] | None = None, ddof: int = 0, eps: float = 0.0
) -> Array:
    """Several rewards, normalised and then summed: A = z-score_batch(Σ_n w_n z-score_group(R_n)).

    Liu et al. 2026 (GDPO, 2601.05242): a reward of small spread keeps its say. No weights: all 1.
    """
    reward_NG = jnp.atleast_2d(reward_NG)
    z_NG = jnp.stack([standardize(reward_G, ddof=ddof, eps=eps) for reward_G in reward_NG])
    z_NG = jnp.where(jnp.isnan(reward_NG), jnp.nan, z_NG)
    summed_G = _nansum(_weights(reward_NG, weights)[:, None] * z_NG)
    return batch_whiten(summed_G, baseline=raw, ddof=ddof, eps=eps)
