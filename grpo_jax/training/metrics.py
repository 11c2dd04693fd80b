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


def completion_rows(host: HostRollout, scores: GatheredScores) -> list[dict]:
    """Prompt, completion and reward of each completion that this process owns, as rows."""
    rows = []
    for place, row in zip(host.owned_rows, host.rows, strict=True):
        answer = {"answer": row["answer"]} if "answer" in row else {}
        for text, reward in zip(scores.texts[place], scores.reward_PG[place], strict=True):
            known = None if np.isnan(reward) else float(reward)
            named = {"prompt": scores.questions[place], "completion": text, "reward": known}
            rows.append(named | answer)
    return rows


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
