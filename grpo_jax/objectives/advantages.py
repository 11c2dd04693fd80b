"""One group: reward_G → adv_G. How much better than its siblings was each completion of one prompt?

Three rules hold for every function here. A NaN reward ("could not be scored") is left out of the
statistics and gets advantage 0. A constant group, max − min ≤ 1e-6·max(1, |mean|), gets exactly 0:
in float32 the spread of seven rewards of .7 is 6e-8, and dividing by that turns rounding noise into
a signal. So does a group of one. Rewards of any finite size are compared rightly: they are divided
by a power of two, which is exact, before they are summed or squared.

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


def power_of_two(x: Array) -> Array:
    """A power of two of the size of x > 0, and 1 for x = 0: dividing by it is exact.

    Float32 ends at 3.4e38: the square of 2e19, or the sum of four times 1e38, is not a number.
    """
    mantissa, _ = jnp.frexp(x)  # in [1/2, 1)
    tiny = float(jnp.finfo(x.dtype).tiny)  # a compiler may multiply by 1/scale: no subnormals
    return jnp.where(x > 0, jnp.clip(x / (2.0 * mantissa), tiny, 1.0 / tiny), 1.0)


def _scale(x_G: Array, keep_G: Array) -> Array:
    return power_of_two(jnp.max(jnp.where(keep_G, jnp.abs(x_G), 0.0), initial=0.0))


def _scaled_mean(scaled_G: Array, keep_G: Array, weight_G: Array | float = 1.0) -> Array:
    """Σ w·x / Σ w over the kept values, which were divided by their scale; 0 without any."""
    weight_G = jnp.where(keep_G, weight_G, 0.0)
    weighed_G = weight_G * jnp.where(keep_G, scaled_G, 0.0)
    return jnp.sum(weighed_G) / jnp.maximum(jnp.sum(weight_G), 1)


def weighted_mean(x_G: Array, keep_G: Array, weight_G: Array | float = 1.0) -> Array:
    """Σ w·x / Σ w over the kept values; 0 without any."""
    scale = _scale(x_G, keep_G)
    return scale * _scaled_mean(x_G / scale, keep_G, weight_G)


def _mean(x_G: Array, keep_G: Array) -> Array:
    return weighted_mean(x_G, keep_G)


def has_signal(reward_G: Array) -> Array:
    """Whether a group can teach anything: at least two scored rewards, and not all the same."""
    scored_G = _is_scored(reward_G)
    low = jnp.min(jnp.where(scored_G, reward_G, jnp.inf))
    high = jnp.max(jnp.where(scored_G, reward_G, -jnp.inf))
    tolerance = CONSTANT * jnp.maximum(1.0, jnp.abs(_mean(reward_G, scored_G)))
    # An infinite reward makes the tolerance NaN: it is not constant, and its advantages are NaN.
    return (jnp.sum(scored_G) > 1) & ~(high - low <= tolerance)


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
    scale = _scale(reward_G, scored_G)
    scaled_G = reward_G / scale
    centered_G = scaled_G - _scaled_mean(scaled_G, scored_G)
    degrees = jnp.maximum(jnp.sum(scored_G) - ddof, 1)
    std = jnp.sqrt(jnp.sum(jnp.where(scored_G, centered_G, 0.0) ** 2) / degrees)
    return _only_signal(centered_G / jnp.where(std > 0, std + eps / scale, 1.0), reward_G)


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
    scored_G = _is_scored(reward_G)
    scaled_G = reward_G / _scale(reward_G, scored_G)
    mean = _scaled_mean(scaled_G, scored_G)
    positive = mean > 0
    adv_G = (scaled_G - mean) / jnp.where(positive, mean, 1.0)
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

    def chance(n: Array, total: Array, draws: int | Array) -> Array:
        steps_G = jnp.arange(reward_G.shape[0])
        left_G = jnp.maximum(n - steps_G, 0) / jnp.maximum(total - steps_G, 1)
        return jnp.prod(jnp.where(steps_G < draws, left_G, 1.0))

    all_wrong = chance(wrong, count, k)
    mean = 1.0 - all_wrong
    std = jnp.sqrt(mean * all_wrong)
    wrong_adv = 1.0 - mean - chance(wrong - 1, count - 1, k - 1)
    adv_G = jnp.where(right_G, 1.0 - mean, wrong_adv) / jnp.where(std > 0, std, 1.0)
    return jnp.where(scored_G & (std > 0) & (count >= k), adv_G, 0.0)


def _over_batch(reduce: Callable, x: Array, axis_name: str | None) -> Array:
    return x if axis_name is None else reduce(x, axis_name)


def _batch_moments(
    x: Array, keep: Array, ddof: int, axis_name: str | None
) -> tuple[Array, Array, Array]:
    """A scale, and the mean and spread of the kept values divided by it."""
    scale = _over_batch(jax.lax.pmax, _scale(x, keep), axis_name)

    def total(y: Array) -> Array:
        return _over_batch(jax.lax.psum, jnp.sum(jnp.where(keep, y, 0.0)), axis_name)

    count = total(jnp.ones_like(x))
    mean = total(x / scale) / jnp.maximum(count, 1)
    spread = jnp.sqrt(total((x / scale - mean) ** 2) / jnp.maximum(count - ddof, 1))
    return scale, mean, spread


def z_scores(
    x: Array, keep: Array, *, ddof: int = 0, eps: float = 0.0, axis_name: str | None = None
) -> Array:
    """(x − mean)/(std + eps) over the kept values (of every group, under a mapped axis); others: 0.

    Equal values everywhere become 0.
    """
    scale, mean, std = _batch_moments(x, keep, ddof, axis_name)
    constant = std <= CONSTANT * jnp.maximum(1.0 / scale, jnp.abs(mean))
    score = (x / scale - mean) / jnp.where(constant, 1.0, std + eps / scale)
    return jnp.where(keep & ~constant, score, 0.0)


def batch_scale(reward_G: Array, *, ddof: int = 0, eps: float = 0.0) -> Array:
    """A = (R − mean_group(R)) / (std_batch(R) + eps): one spread for all groups. Liu et al. 2025
    (2508.08221).
    """
    scored_G = _is_scored(reward_G)
    scale, _, std = _batch_moments(reward_G, scored_G, ddof, PROMPT_AXIS)
    scaled_G = reward_G / scale
    centered_G = scaled_G - _scaled_mean(scaled_G, scored_G)
    return _only_signal(centered_G / jnp.where(std > 0, std + eps / scale, 1.0), reward_G)


def batch_whiten(
    reward_G: Array, *, baseline: Advantage = center, ddof: int = 0, eps: float = 0.0
) -> Array:
    """A = z-score over the completions of the batch of `baseline(R)`; `whiten_tokens` counts
    tokens.
    """
    scored_G = _is_scored(reward_G)
    return z_scores(baseline(reward_G), scored_G, ddof=ddof, eps=eps, axis_name=PROMPT_AXIS)


def rounded(reward_G: Array, *, step: float, advantage: Advantage = standardize) -> Array:
    """`advantage` of rewards rounded to multiples of `step`.

    Standardizing turns [.51, .5, .5, .5] into +1.73 and −.58, as it does [1, 0, 0, 0]: a graded
    reward needs a smallest difference that counts.
    """
    # Beyond 2^24 steps float32 has no fractions of a step, and the quotient may overflow.
    coarse_G = jnp.abs(reward_G) >= 2.0**24 * step
    return advantage(jnp.where(coarse_G, reward_G, jnp.round(reward_G / step) * step))


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
