"""What a person watches of a batch, from the host's copies."""

import numpy as np

from grpo_jax.types import Rollout


def group_statistics(rollout: Rollout, reward_PG: np.ndarray) -> dict[str, float]:
    """What a person watches, from the host's copies: rewards, lengths, and groups that teach
    nothing.

    `reward` and `reward_std` are over the scorable completions, NaN if there is none;
    `frac_zero_variance` is the share of groups in which all rewards are equal or at most one is
    known; `truncated` the share cut off by the length limit.
    """
    known = ~np.isnan(reward_PG)
    length = np.asarray(rollout.mask_PGT).sum(-1)
    top = np.where(known, reward_PG, -np.inf).max(1)
    low = np.where(known, reward_PG, np.inf).min(1)
    spread = np.where(known.any(1), top - low, 0.0)
    mean = np.abs(np.where(known, reward_PG, 0).sum(1) / np.maximum(known.sum(1), 1))
    return {
        "reward": float(reward_PG[known].mean()) if known.any() else float("nan"),
        "reward_std": float(reward_PG[known].std()) if known.any() else float("nan"),
        "frac_zero_variance": float((spread <= 1e-6 * np.maximum(1, mean)).mean()),
        "unscorable": float((~known).mean()),
        "length": float(length.mean()),
        "truncated": float(1 - np.asarray(rollout.stopped_PG).mean()),
        "tokens": int(length.sum()),
    }
