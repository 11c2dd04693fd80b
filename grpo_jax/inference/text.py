"""Rows to ids and completions to text: where strings begin and end."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from grpo_jax.inference.tokenizer import Tokenizer, message_text, pad_prompts
from grpo_jax.rewards.scoring import MESSAGES
from grpo_jax.tasks import Task
from grpo_jax.types import Prompts, Rollout


def encode(
    tokenizer: Tokenizer,
    prompt: Callable,
    rows: Sequence[dict],
    *,
    length: int | None = None,
    vocab_size: int | None = None,
) -> Prompts:
    """The rows' prompts as left-padded ids.

    Raises ValueError for a prompt longer than `length`, or with an id that a model of `vocab_size`
    does not know.
    """
    ids = [tokenizer.render(prompt(row)) for row in rows]
    largest = max((max(row, default=0) for row in ids), default=0)
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"a prompt has the token {largest}, and the model's vocabulary ends at "
            f"{vocab_size - 1}: tokenizer and model do not belong together"
        )
    return pad_prompts(ids, tokenizer.pad_id, length=length)


def reward_columns(rollout: Rollout) -> dict[str, list[list]]:
    """What a reward may read of a completion besides its text, `[P][G]` each.

    `completion_ids` (without padding), `completion_length` in tokens, and `stopped`, false where
    the length limit cut the completion off.
    """
    length_PG = rollout.mask_PGT.sum(-1)
    groups = zip(rollout.tokens_PGT, length_PG, strict=True)
    return {
        "completion_ids": [
            [ids[:n].tolist() for ids, n in zip(*group, strict=True)] for group in groups
        ],
        "completion_length": length_PG.tolist(),
        "stopped": rollout.stopped_PG.tolist(),
    }


def with_messages(task: Task, rows: Sequence[dict]) -> list[dict]:
    """The rows, with the messages that each was asked with, for rewards that take messages."""
    return [{**row, MESSAGES: task.prompt(row)} for row in rows]


def prompt_texts(task: Task, rows: Sequence[dict]) -> list[str]:
    """What a reward receives as `prompt`: the contents of the messages, one a line."""
    return ["\n".join(map(message_text, task.prompt(row))) for row in rows]


def completion_texts(tokenizer: Tokenizer, rollout: Rollout) -> list[list[str]]:
    """The completions as text, `[P][G]`, without the stop token that ended them."""
    tokens, mask, stopped = (
        np.asarray(x) for x in (rollout.tokens_PGT, rollout.mask_PGT, rollout.stopped_PG)
    )
    length = mask.sum(-1) - stopped
    return [
        [tokenizer.decode(ids[:n]) for ids, n in zip(*group, strict=True)]
        for group in zip(tokens, length, strict=True)
    ]


class StepScores(Protocol):
    """Rewards of N functions and their steps: `rewards.Scores`, or those of all processes."""

    @property
    def reward_PGN(self) -> np.ndarray: ...

    @property
    def steps_PGN(self) -> list: ...


def step_rewards(
    tokenizer: Tokenizer,
    rollout: Rollout,
    scores: StepScores,
    weights: Sequence[float] | None = None,
) -> np.ndarray:
    """`reward_PGT`: the weighted reward at each token where a step ends, NaN where none does.

    A step that ends after `end` characters is placed on the token that completes them (the last one
    of a character that takes several tokens); a reward without steps on the last token. A
    completion that cannot be scored has no step.
    """
    tokens = np.asarray(rollout.tokens_PGT)
    length = np.asarray(rollout.mask_PGT).sum(-1)
    reward_PGT = np.full(tokens.shape, np.nan, np.float32)
    count = scores.reward_PGN.shape[-1]
    weight_N = np.ones(count) if weights is None else np.asarray(weights, float)
    for p, g, n in np.ndindex(scores.reward_PGN.shape):
        if np.isnan(scores.reward_PGN[p, g, n]):
            continue
        last = length[p, g] - 1
        steps = scores.steps_PGN[p][g][n]
        if steps is None:
            placed = [(last, scores.reward_PGN[p, g, n])]
        else:
            ends, values = zip(*steps, strict=True)
            placed = zip(_places(tokenizer, tokens[p, g, : last + 1], ends), values, strict=True)
        for t, reward in placed:
            reward_PGT[p, g, t] = np.nan_to_num(reward_PGT[p, g, t]) + weight_N[n] * reward
    return reward_PGT


def _places(tokenizer: Tokenizer, ids: np.ndarray, ends: Sequence[int]) -> list[int]:
    """For each `end`, the first token after which the completion's first `end` characters are
    written for good.

    A prefix of the tokens may decode to as many characters and still not to those: a cut character
    reads as U+FFFD.
    """
    written = [tokenizer.decode(ids[: t + 1]) for t in range(len(ids))]
    whole = written[-1]
    last = len(ids) - 1
    return [
        next((t for t, text in enumerate(written) if text[:end] == whole[:end]), last)
        for end in ends
    ]
