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
from grpo_jax.inference.logprobs import with_vocabulary
from grpo_jax.inference.text import completion_texts, encode, prompt_texts
from grpo_jax.inference.tokenizer import Tokenizer
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.options import Generation, OptionError, Sampling, Scoring, whole
from grpo_jax.parallel.backends import SINGLE, Devices
from grpo_jax.parallel.processes import run_and_gather
from grpo_jax.rewards import reward_functions
from grpo_jax.tasks import Task
from grpo_jax.training.batch import score_rollout
from grpo_jax.training.checks import check_model
from grpo_jax.types import Params

GREEDY = Generation(group_size=1, sampling=Sampling(temperature=0.0))


class Evaluation(NamedTuple):
    """Rewards of completions of some rows, and their texts.

    `reward_PN` has N completions a row, NaN where a completion could not be scored, and `texts` has
    the completions, `[P][N]`. `mean_reward` is over the scorable ones; `length` is their mean
    number of tokens, `truncated` the share that the length limit cut off.
    """

    mean_reward: float
    unscorable: int
    length: float
    truncated: float
    reward_PN: np.ndarray
    texts: list[list[str]]

    @property
    def accuracy(self) -> float | None:
        """The share of right completions where every reward is 0 or 1; None for other rewards."""
        known = self.reward_PN[~np.isnan(self.reward_PN)]
        return self.mean_reward if np.isin(known, (0.0, 1.0)).all() else None


def evaluate(
    model: LanguageModel,
    params: Params,
    tokenizer: Tokenizer,
    task: Task,
    rows: Sequence[dict],
    *,
    generation: Generation = GREEDY,
    key: jax.Array | None = None,
    batch_size: int = 64,
    prompt_length: int | None = None,
    scoring: Scoring = Scoring(),
    progress: Callable[[int], None] = lambda rows: None,
    devices: Devices = SINGLE,
) -> Evaluation | None:
    """Completes every row `generation.group_size` times and scores it with the task's reward.

    Rows go through in batches of one shape (the last one is filled up and cut again), so one
    program is compiled; a batch is enlarged to a multiple of the parts that `devices` needs. Row i
    draws the same noise whatever the batch size. Of several processes each completes and scores a
    part of every batch, and all return the whole result.

    Args:
      model: pure functions of one sequence.
      params: the policy's parameters.
      tokenizer: between messages, ids and text.
      task: a prompt for each row, and the reward.
      rows: what is evaluated, such as `task.held_out`.
      generation: how completions are sampled; greedy by default.
      key: the root of the noise; needed unless sampling is greedy.
      batch_size: rows that are completed at a time.
      prompt_length: tokens that prompts are padded to; None: as many as the longest has.
      scoring: how rewards are called and weighed, as in training.
      progress: is called with the number of rows done.
      devices: where the program runs.

    Returns:
      the evaluation; with shapes for parameters, its program is listed (`backends.listed`), nothing
      runs, and None is returned.

    Raises:
      OptionError: an option is out of its range, or two do not fit together.
      ValueError: there are no rows, or no key for sampling.
    """
    check_evaluation(task, rows, generation, key, batch_size, scoring)
    size = model.config.vocab_size
    prompts = encode(tokenizer, task.prompt, rows, length=prompt_length, vocab_size=size)
    check_model(model, tokenizer, prompts.tokens_PS.shape[1], generation.max_new_tokens)
    model = with_vocabulary(model, tokenizer.vocab_size)
    batch_size = -(-min(batch_size, len(rows)) // devices.parts) * devices.parts
    weights = devices.for_decoding(devices.put("state", params))
    key = devices.put("whole", jax.random.key(0) if key is None else key)
    options = {"stop_ids": tokenizer.stop_ids, "pad_id": tokenizer.pad_id}
    sample = partial(generate, model, generation=generation, **options)
    program = devices.per_prompt(sample, ("decode", "prompts", "whole", "first"), "rows")
    local_rows = devices.local_rows(batch_size)
    mine = np.isin(local_rows, devices.owned_rows(batch_size))
    done: list[tuple] = []
    for start in range(0, len(rows), batch_size):
        index = start + local_rows
        filled = np.where(index < len(rows), index, 0)
        part = devices.put_rows(jax.tree.map(lambda x, i=filled: x[i], prompts))
        drawn = program(weights, part, key, start)
        if isinstance(drawn.mask_PGT, jax.ShapeDtypeStruct):
            return None
        scored = mine & (index < len(rows))
        drawn = jax.tree.map(lambda x, kept=scored: x[kept], devices.fetch(drawn))
        judge = partial(_scored, task, tokenizer, scoring, rows, index[scored], drawn)
        done += sorted(chain(*run_and_gather(judge)), key=itemgetter(0))
        progress(len(done))
    return _summarised(done)


def check_evaluation(
    task: Task,
    rows: Sequence[dict],
    generation: Generation,
    key: jax.Array | None,
    batch_size: int,
    scoring: Scoring,
) -> None:
    if not rows:
        raise ValueError("no rows to evaluate")
    whole("batch_size", batch_size, 1)
    scoring.check(len(reward_functions(task.reward)))
    samples = generation.check().group_size
    greedy = generation.sampling.temperature == 0
    if greedy and samples > 1:
        problem = (
            f"must be 1: greedy decoding gives one completion a row, it would repeat {samples}"
        )
        raise OptionError("group_size", problem)
    if key is None and not greedy:
        raise ValueError("sampling at a temperature needs a key")


def _scored(task, tokenizer, scoring: Scoring, rows, index, drawn) -> list[tuple]:
    """(place, reward_N, texts, length_N, stopped_N) of the rows whose completions are `drawn`."""
    if not len(index):
        return []
    rows = [rows[i] for i in index]
    texts = completion_texts(tokenizer, drawn)
    questions = prompt_texts(task, rows)
    reward_PN = score_rollout(task, scoring, rows, questions, texts, drawn).reward_PG
    length_PN = drawn.mask_PGT.sum(-1)
    return list(zip(index, reward_PN, texts, length_PN, drawn.stopped_PG, strict=True))


def _summarised(done: list[tuple]) -> Evaluation:
    _, rewards, texts, lengths, stopped = zip(*done, strict=True)
    reward_PN = np.stack(rewards)
    known = ~np.isnan(reward_PN)
    return Evaluation(
        mean_reward=float(reward_PN[known].mean()) if known.any() else float("nan"),
        unscorable=int((~known).sum()),
        length=float(np.stack(lengths).mean()),
        truncated=float(1 - np.stack(stopped).mean()),
        reward_PN=reward_PN,
        texts=list(texts),
    )


def pass_at_k(correct_PN: np.ndarray, k: int) -> float:
    """The chance that one of k completions is right: mean over rows of `1 − C(n−c, k)/C(n, k)`.

    The unbiased estimator of Chen et al. 2021 (2107.03374), eq. 1, for c of n right. Completions
    that cannot be scored are left out, as they are of an accuracy: n counts the others.

    Args:
      correct_PN: N completions a row: booleans, or floats where 1 is right and NaN is unknown.
      k: at most N. A row with fewer than k known completions is left out; NaN if all are.
    """
    correct_PN = np.asarray(correct_PN, float)
    if not 1 <= k <= correct_PN.shape[1]:
        raise ValueError(
            f"k must be between 1 and the {correct_PN.shape[1]} samples of each row, got {k}"
        )
    known_P = (~np.isnan(correct_PN)).sum(1)
    right_P = (correct_PN >= 1).sum(1)
    shares = [
        1 - math.comb(int(n - c), k) / math.comb(int(n), k)
        for n, c in zip(known_P, right_P, strict=True)
        if n >= k
    ]
    return float(np.mean(shares)) if shares else float("nan")


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
