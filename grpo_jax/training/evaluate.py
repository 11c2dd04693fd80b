"""Held-out accuracy, pass@k, and the failures to read.

Evaluation has its own sampling settings (greedy by default) and its own key; it never borrows the
training sampler's. Left out on purpose: benchmarks' own prompt formats; a task renders its prompts.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax.inference.generate import generate
from grpo_jax.inference.logprobs import Sampling
from grpo_jax.inference.text import completion_texts, encode, prompt_texts
from grpo_jax.inference.tokenizer import Tokenizer
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.parallel.backends import SINGLE, Devices
from grpo_jax.parallel.processes import run_and_gather
from grpo_jax.rewards import score
from grpo_jax.tasks import Task
from grpo_jax.types import Params

GREEDY = Sampling(temperature=0.0)


class Evaluation(NamedTuple):
    """`accuracy` is the mean reward over the scorable completions; `reward_PN` has N completions a
    row, NaN where a completion could not be scored; `texts` the completions, `[P][N]`; `length`
    their mean number of tokens."""

    accuracy: float
    unscorable: int
    length: float
    truncated: float
    reward_PN: np.ndarray
    texts: list[list[str]]


def evaluate(
    model: LanguageModel,
    params: Params,
    tokenizer: Tokenizer,
    task: Task,
    rows: Sequence[dict],
    *,
    max_new_tokens: int,
    samples: int = 1,
    sampling: Sampling = GREEDY,
    key: jax.Array | None = None,
    batch_size: int = 64,
    prompt_length: int | None = None,
    on_error: str = "raise",
    progress: Callable[[int], None] = lambda rows: None,
    devices: Devices = SINGLE,
) -> Evaluation | None:
    """Completes every row `samples` times and scores it with the task's reward.

    Rows go through in batches of one shape (`batch_size` prompts, the last one filled up and cut
    again), so one program is compiled; a batch is enlarged to a multiple of the parts that
    `devices` needs. `prompt_length` pads prompts to a given width. `key` is needed unless sampling
    is greedy; row i draws the same noise whatever the batch size. `on_error` is that of
    `rewards.score`. `progress` is called with the number of rows done. Of several processes each
    completes and scores a part of every batch, and all return the whole result. With shapes for
    parameters its program is listed (`devices.listed`), and None returned.
    """
    if not rows:
        raise ValueError("no rows to evaluate")
    if samples < 1 or batch_size < 1:
        raise ValueError(
            f"samples and batch_size must be at least 1, got {samples} and {batch_size}"
        )
    if sampling.temperature == 0 and samples > 1:
        raise ValueError(
            f"greedy decoding gives one completion a row, so samples={samples} would repeat it"
        )
    if key is None and sampling.temperature != 0:
        raise ValueError("sampling at a temperature needs a key")
    prompts = encode(tokenizer, task.prompt, rows, length=prompt_length)
    batch_size = -(-min(batch_size, len(rows)) // devices.parts) * devices.parts
    weights = devices.for_decoding(devices.put("state", params))
    key = devices.put("whole", jax.random.key(0) if key is None else key)
    draw = devices.per_prompt(
        partial(
            generate,
            model,
            group_size=samples,
            max_new_tokens=max_new_tokens,
            stop_ids=tokenizer.stop_ids,
            pad_id=tokenizer.pad_id,
            **sampling._asdict(),
        ),
        ("decode", "prompts", "whole", "first"),
        "rows",
    )
    held = devices.held(batch_size)
    mine = np.isin(held, devices.own(batch_size))
    done = []
    for start in range(0, len(rows), batch_size):
        index = start + held
        part = devices.put_rows(
            jax.tree.map(lambda x, i=index: x[np.where(i < len(rows), i, 0)], prompts)
        )
        drawn = draw(weights, part, key, start)
        scored = mine & (index < len(rows))
        if isinstance(drawn.mask_PGT, jax.ShapeDtypeStruct):
            return None
        drawn = devices.fetch(drawn)
        drawn = jax.tree.map(lambda x, kept=scored: x[kept], drawn)
        judge = partial(_judged, task, tokenizer, rows, index[scored], drawn, on_error)
        done += sorted(chain(*run_and_gather(judge)), key=itemgetter(0))
        progress(len(done))
    _, rewards, texts, lengths, stopped = zip(*done, strict=True)
    reward_PN = np.stack(rewards)
    known = ~np.isnan(reward_PN)
    return Evaluation(
        accuracy=float(reward_PN[known].mean()) if known.any() else float("nan"),
        unscorable=int((~known).sum()),
        length=float(np.stack(lengths).mean()),
        truncated=float(1 - np.stack(stopped).mean()),
        reward_PN=reward_PN,
        texts=list(texts),
    )


def _judged(task, tokenizer, rows, index, drawn, on_error) -> list[tuple]:
    """(place, reward_N, texts, length_N, stopped_N) of some of the rows, whose completions are
    `drawn`.
    """
    if not len(index):
        return []
    rows = [rows[i] for i in index]
    texts = completion_texts(tokenizer, drawn)
    reward_PN = score(
        task.reward, rows, prompt_texts(task, rows), texts, on_error=on_error
    ).reward_PG
    return list(zip(index, reward_PN, texts, drawn.mask_PGT.sum(-1), drawn.stopped_PG, strict=True))


def pass_at_k(correct_PN: np.ndarray, k: int) -> float:
    """The chance that one of k completions is right: mean over rows of `1 − C(n−c, k)/C(n, k)`, c
    of n right.

    The unbiased estimator of Chen et al. 2021, 2107.03374, eq. 1. `correct_PN` is boolean, n ≥ k.
    """
    n = correct_PN.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and the {n} samples of each row, got {k}")
    wrong = n - correct_PN.sum(1)
    return float(np.mean([1 - math.comb(int(w), k) / math.comb(n, k) for w in wrong]))


def failures(
    task: Task, rows: Sequence[dict], result: Evaluation, *, threshold: float = 1.0
) -> list[dict]:
    """The completions whose reward is below `threshold` or unknown, with question and answer, as
    JSON-able rows.
    """
    return [
        row
        | {
            "prompt": prompt,
            "completion": text,
            "reward": None if np.isnan(reward) else float(reward),
        }
        for row, prompt, row_texts, row_rewards in zip(
            rows, prompt_texts(task, rows), result.texts, result.reward_PN, strict=True
        )
        for text, reward in zip(row_texts, row_rewards, strict=True)
        if not reward >= threshold
    ]
