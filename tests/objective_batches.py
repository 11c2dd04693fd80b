"""One uneven batch for every test of the objectives, as nested lists (for the oracle) and as padded arrays."""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np
from grpo_jax.objectives import PRESETS, batch_advantages
from grpo_jax.types import Sample

LENGTHS = ((6, 1, 4, 3, 5), (2, 5, 6, 1, 3), (3, 3, 2, 6, 4))
# Mixed, graded with an unscorable completion, constant.
REWARDS = ((1.0, 0.0, 0.0, 1.0, 0.0), (0.9, math.nan, 0.7, 0.4, 0.1), (0.7, 0.7, 0.7, 0.7, 0.7))
T = 7
LOG_RATIOS = (-0.61, 0.33, 0.05, -0.3, 0.15, -0.12, 0.47, -0.02, 0.21, -0.18, 0.26)
REQUIRED = {"dr_grpo": {"max_length": 8}, "pass_at_k": {"k": 2}}


def preset(name):
    return PRESETS[name](**REQUIRED.get(name, {}))


@contextlib.contextmanager
def float64():
    with jax.enable_x64(True):
        yield


def make(scale=1.0, seed=0, steps=False):
    """Nested lists; log-ratios of `scale` times a fixed list on both sides of every usual clip edge.

    `steps` adds rewards inside the completions; without it, each has the outcome alone, at its last token.
    """
    rng = np.random.default_rng(seed)
    rows = lambda draw: [[[draw() for _ in range(n)] for n in ns] for ns in LENGTHS]
    count = iter(range(10**6))
    old = rows(lambda: float(-rng.uniform(0.1, 1.8)))
    ratio = rows(lambda: scale * LOG_RATIOS[next(count) % len(LOG_RATIOS)])
    both = lambda f, xs, ys: [f(x, y) for x, y in zip(xs, ys, strict=True)]
    add = lambda xs, ys: both(add, xs, ys) if isinstance(xs, list) else xs + ys
    outcome = lambda length, reward: [math.nan] * (length - 1) + [reward]
    step_rewards = [both(outcome, lengths, rewards) for lengths, rewards in zip(LENGTHS, REWARDS, strict=True)]
    if steps:
        for p, g, t, value in ((0, 0, 2, 0.3), (0, 2, 1, -0.4), (1, 4, 0, 0.6), (1, 2, 3, -0.2)):
            step_rewards[p][g][t] = value
    return {
        "old": old,
        "logp": add(old, ratio),
        "ref": rows(lambda: float(-rng.uniform(0.2, 2.5))),
        "sampler": rows(lambda: float(-rng.uniform(0.05, 1.5))),
        "entropy": rows(lambda: float(rng.uniform(0.0, 2.0))),
        "old_value": rows(lambda: float(rng.normal())),
        "value": rows(lambda: float(rng.normal())),
        "reward": [list(row) for row in REWARDS],
        "steps": step_rewards,
    }


def pad(rows, fill=0.0):
    """[p][g][t] lists as an array PGT."""
    return np.array([[row + [fill] * (T - len(row)) for row in group] for group in rows])


def arrays(lists, dtype=jnp.float32):
    """logp_PGT and samples with every field, padded with zeros; advantages not yet filled in."""
    lengths = np.array(LENGTHS)
    field = lambda name, fill=0.0: jnp.asarray(pad(lists[name], fill), dtype)
    samples = Sample(
        mask_T=jnp.asarray(np.arange(T) < lengths[..., None]),
        old_logp_T=field("old"),
        ref_logp_T=field("ref"),
        sampler_logp_T=field("sampler"),
        reward_T=field("steps", math.nan),
        adv=jnp.zeros(lengths.shape, dtype),
        stopped=jnp.ones(lengths.shape, bool),
        age=jnp.zeros(lengths.shape, jnp.int32),
        old_value_T=field("old_value"),
        value_T=field("value"),
        entropy_T=field("entropy"),
    )
    return field("logp"), samples


def prepare(objective, samples, reward):
    """What the train step makes of a batch before its epochs: advantages, then `prepare`."""
    samples = samples._replace(adv=batch_advantages(objective, reward))
    return samples if objective.prepare is None else objective.prepare(samples)


def prepared(objective, lists, dtype=jnp.float32):
    logp, samples = arrays(lists, dtype)
    return logp, prepare(objective, samples, jnp.asarray(lists["reward"], dtype))
