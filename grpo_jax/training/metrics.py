"""What a person watches of an iteration, from the host's copies."""

import time
from collections.abc import Callable

import numpy as np
import optax

from grpo_jax.training.batch import GatheredScores, HostRollout
from grpo_jax.types import TrainState

# Which of the times that a person watches each stage belongs to.
TIMES = {
    "prompts": "sample",
    "publish": "sample",
    "generate": "sample",
    "shrink": "sample",
    "infer": "score",
    "reward": "score",
    "teach": "score",
    "assemble": "score",
    "observe": "score",
    "update": "update",
}


def group_statistics(host: HostRollout, reward_PG: np.ndarray) -> dict[str, float]:
    """Rewards, lengths, and the groups that teach nothing.

    `reward` and `reward_std` are over the scorable completions, NaN if there is none;
    `frac_zero_variance` is the share of groups in which all rewards are equal or at most one is
    known; `truncated` the share cut off by the length limit.
    """
    known = ~np.isnan(reward_PG)
    length = host.mask_PGT.sum(-1)
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
        "truncated": float(1 - host.stopped_PG.mean()),
        "tokens": int(length.sum()),
    }


def reward_statistics(scores: GatheredScores) -> dict[str, float]:
    """Mean, spread and weight of each reward function, where there are several."""
    found: dict[str, float] = {}
    if len(scores.names) < 2:
        return found
    for n, (name, weight) in enumerate(zip(scores.names, scores.weights, strict=True)):
        reward_PG = scores.reward_PGN[..., n]
        known = reward_PG[~np.isnan(reward_PG)]
        found[f"rewards/{name}/mean"] = float(known.mean()) if known.size else float("nan")
        found[f"rewards/{name}/std"] = float(known.std()) if known.size else float("nan")
        found[f"rewards/{name}/weight"] = float(weight)
    return found


def completion_rows(host: HostRollout, scores: GatheredScores) -> list[dict]:
    """Prompt, completion and reward of each completion that this process owns, as rows.

    With several reward functions each row has `rewards`, by name, too.
    """
    rows = []
    for place, row in zip(host.owned_rows, host.rows, strict=True):
        answer = {"answer": row["answer"]} if "answer" in row else {}
        for g, text in enumerate(scores.texts[place]):
            reward = known(scores.reward_PG[place, g])
            named = {"prompt": scores.questions[place], "completion": text, "reward": reward}
            if len(scores.names) > 1:
                each = map(known, scores.reward_PGN[place, g])
                named["rewards"] = dict(zip(scores.names, each, strict=True))
            rows.append(named | answer)
    return rows


def known(reward: float) -> float | None:
    """A reward as JSON has it: None is "cannot be scored"."""
    return None if np.isnan(reward) else float(reward)


def learning_rate(state: TrainState) -> dict[str, float]:
    """The learning rate in use, where the optimiser keeps exactly one."""
    kept = optax.tree_utils.tree_get_all_with_path(state.opt_state, "learning_rate")
    rates = [value for _, value in kept if np.ndim(value) == 0]
    return {"learning_rate": float(rates[0])} if len(rates) == 1 else {}


def timed(stages: tuple) -> tuple[tuple, Callable[[], dict[str, float]]]:
    """Stages that are timed, and a function that tells the seconds since it was last asked.

    A stage that devices compute asynchronously is timed where the host waits for it: sampling in
    `shrink`, the reference in `update`.
    """
    seconds = dict.fromkeys(TIMES.values(), 0.0)

    def clocked(name: str, stage: Callable | None) -> Callable | None:
        def run(*args, **options):
            began = time.perf_counter()
            try:
                return stage(*args, **options)
            finally:
                seconds[TIMES[name]] += time.perf_counter() - began

        return stage and run

    def lap() -> dict[str, float]:
        told = {f"seconds/{name}": value for name, value in seconds.items()}
        seconds.update(dict.fromkeys(seconds, 0.0))
        return told

    return stages._replace(**{name: clocked(name, getattr(stages, name)) for name in TIMES}), lap
