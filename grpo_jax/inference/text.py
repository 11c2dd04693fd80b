"""Rows to ids and completions to text: where strings begin and end."""

from collections.abc import Callable, Sequence

import numpy as np

from grpo_jax.inference.tokenizer import Tokenizer, pad_prompts
from grpo_jax.rewards import Scores
from grpo_jax.tasks import Task
from grpo_jax.types import Prompts, Rollout


def encode(
    tokenizer: Tokenizer, prompt: Callable, rows: Sequence[dict], *, length: int | None = None
) -> Prompts:
    """The rows' prompts as left-padded ids; a prompt longer than `length` is an error that names
    the row.
    """
    return pad_prompts(
        [tokenizer.render(prompt(row)) for row in rows], tokenizer.pad_id, length=length
    )


def prompt_texts(task: Task, rows: Sequence[dict]) -> list[str]:
    """What a reward receives as `prompt`: the contents of the messages, one a line."""
    return ["\n".join(message["content"] for message in task.prompt(row)) for row in rows]


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


def step_rewards(
    tokenizer: Tokenizer, rollout: Rollout, scores: Scores, weights: Sequence[float] | None = None
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
