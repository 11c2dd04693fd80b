"""Rotary positions (Su et al. 2021, 2104.09864): of one kind in all layers, or of several.

Shape suffixes besides those of `types`: T stands for any rows, f = pairs of a head that are
rotated.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp

from grpo_jax.models.decoder_config import DecoderConfig, Rope
from grpo_jax.types import Array


class Positions(NamedTuple):
    """What a block needs of its rows' positions: its angles, `[2, T, 1, 2, f]` (see
    `rope_angles`), and what their queries are multiplied by, if they are.
    """

    angles: Array
    query_scale_T: Array | None = None


def rope_frequencies(
    config: DecoderConfig, rope: Rope | None = None, *, long: bool = False
) -> Array:
    """Angle between one position and the next of each pair of numbers in a head: `[f]`.

    `w_i = theta^(−i/f)`, i < f (Su et al. 2021, eq. 15), then scaled: "linear" divides by its
    factor, "llama3" and "yarn" see below, and "longrope" (Ding et al. 2024, 2402.13753) divides
    each by a number of its own, of which there is one set for `long` texts.
    """
    rope = config.ropes[0] if rope is None else rope
    assert rope is not None, "a layer without rotation has no frequencies"
    d = config.rotary_dim
    frequency = rope.theta ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)
    match rope.scaling:
        case None:
            return frequency
        case ("linear", factor):
            return frequency / factor
        case ("llama3", *numbers):
            return _llama3(frequency, *numbers)
        case ("yarn", factor, original, fast, slow, _, truncate):
            return _yarn(frequency, rope.theta, factor, original, (fast, slow), truncate)
        case ("longrope", short_f, long_f, _, _):
            return frequency / jnp.array(long_f if long else short_f, jnp.float32)
    raise AssertionError(rope)  # refused by `check_rope`


def _llama3(frequency_f: Array, factor: float, low: float, high: float, original: int) -> Array:
    """Llama 3's scaling (its code, `apply_scaling`), of L original positions:

    kept = clip((L w / 2π − low) / (high − low), 0, 1)        kept · w + (1 − kept) · w / factor
    """
    # A pair that went round often within the original context tells near positions apart, and
    # stays; one that never came round has not been seen at larger angles, and is slowed down.
    rotations = original * frequency_f / (2 * jnp.pi)
    kept = jnp.clip((rotations - low) / (high - low), 0.0, 1.0)
    return kept * frequency_f + (1 - kept) * frequency_f / factor


def _yarn(
    frequency_f: Array,
    theta: float,
    factor: float,
    original: int,
    betas: tuple[float, float],
    truncate: bool,
) -> Array:
    """YaRN (Peng et al. 2023, 2309.00071, eqs. 17 to 23), of L original positions:

    i(β) = f ln(L / 2πβ) / ln theta        ramp = clip((i − i(fast)) / (i(slow) − i(fast)), 0, 1)
    (1 − ramp) · w + ramp · w / factor
    """
    f = frequency_f.size

    # The pair that goes round β times within the original context.
    def pair(beta):
        return f * math.log(original / (beta * 2 * math.pi)) / math.log(theta)

    low, high = (pair(beta) for beta in betas)
    if truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, 2 * f - 1)
    ramp_f = jnp.clip((jnp.arange(f) - low) / (high - low if high != low else 1e-3), 0.0, 1.0)
    return (1 - ramp_f) * frequency_f + ramp_f * frequency_f / factor


def attention_factor(rope: Rope) -> float:
    """What cosines and sines are multiplied by: yarn and longrope sharpen attention by it."""
    match rope.scaling:
        case ("yarn", _, _, _, _, factor, _) | ("longrope", _, _, _, factor):
            return factor
    return 1.0


def rope_angles(position_T: Array, frequency_f: Array, factor: float = 1.0) -> Array:
    """Cosine and signed sine of each position's angles, times a factor: `[2, T, 1, 2, f]`.

    Of the angle a = position · frequency: `(cos a, cos a)` and `(−sin a, sin a)`, for the two
    numbers of a pair. The axis of 1 is that of the heads. Frequencies may differ between positions,
    `[T, f]`.
    """
    angle_Tf = position_T[:, None] * frequency_f
    cos = jnp.cos(angle_Tf)
    sin = jnp.sin(angle_Tf)
    if factor != 1.0:
        cos = cos * factor
        sin = sin * factor
    return jnp.stack([jnp.stack([cos, cos], 1), jnp.stack([-sin, sin], 1)])[:, :, None]


def angles_of(
    config: DecoderConfig, rope: Rope | None, position_T: Array, prompt_length_T: Array
) -> Array:
    """`rope_angles` of one of the configuration's rotations; of None: those that change nothing."""
    if rope is None:
        one_T2f = jnp.ones((position_T.shape[0], 2, config.rotary_dim // 2))
        return jnp.stack([one_T2f, jnp.zeros_like(one_T2f)])[:, :, None]
    frequency = rope_frequencies(config, rope)
    if rope.scaling is not None and rope.scaling[0] == "longrope":
        # Which of the two is the prompt's to say, and stays that of its completions: keys that are
        # cached are never rotated again, and trainer and sampler agree on them.
        original = rope.scaling[3]
        is_long_T1 = jnp.broadcast_to(prompt_length_T > original, position_T.shape)[:, None]
        frequency = jnp.where(is_long_T1, rope_frequencies(config, rope, long=True), frequency)
    return rope_angles(position_T, frequency, attention_factor(rope))


def rotations(
    config: DecoderConfig, position_T: Array, prompt_length_T: Array
) -> tuple[list[Array], Array | None]:
    """The angles of each of `config.ropes`, and what queries are multiplied by, at some positions.

    Args:
      prompt_length_T: how many tokens the prompt of each row has, or one number for all rows.
    """
    # Once for all layers, and handed to each: a layer that is computed again for the gradient would
    # compute its sines again, too.
    angles = [angles_of(config, rope, position_T, prompt_length_T) for rope in config.ropes]
    if config.query_scale is None:
        return angles, None
    beta, original = config.query_scale
    # Padding stands before position 0, where the logarithm would be infinite.
    return angles, 1 + beta * jnp.log1p(jnp.maximum(position_T, 0) // original)


def rotate(x_THd: Array, angles_2T12f: Array, interleaved: bool = False) -> Array:
    """Rotates the pairs (x_i, x_{i+f}) of each head's first 2f numbers (Su et al. 2021, eq. 34), or
    the pairs (x_2i, x_{2i+1}): `[T, H, d]`.

    `(x, y) cos + (−y, x) sin`
    """
    r = 2 * angles_2T12f.shape[-1]
    if r < x_THd.shape[-1]:
        turned_THr = rotate(x_THd[..., :r], angles_2T12f, interleaved)
        return jnp.concatenate([turned_THr, x_THd[..., r:]], -1)
    cos, sin = angles_2T12f.swapaxes(-1, -2) if interleaved else angles_2T12f
    # The numbers of a pair have an axis of their own, which is reversed: XLA's CPU back end would
    # not fuse a concatenation of the two.
    x = x_THd.astype(jnp.float32).reshape(*x_THd.shape[:-1], *cos.shape[-2:])
    turned = x * cos + jnp.flip(x, -1 if interleaved else -2) * sin
    return turned.reshape(x_THd.shape).astype(x_THd.dtype)
