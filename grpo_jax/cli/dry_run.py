"""grpo-jax train --dry-run: what a run would see and score, before anything is trained.

Left out on purpose: weights, which are not read, and a folder, which is not made.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_jax.components import MODELS, task_of, tokenizer_of
from grpo_jax.config import TrainConfig
from grpo_jax.inference.text import prompt_texts
from grpo_jax.inference.tokenizer import HFTokenizer, Tokenizer
from grpo_jax.models import LanguageModel, decoder
from grpo_jax.parallel.memory import device_bytes
from grpo_jax.parallel.sharding import mesh_sizes
from grpo_jax.plan.memory import held_in_training
from grpo_jax.plan.models import model_config
from grpo_jax.rewards import reward_functions
from grpo_jax.tasks import Task
from grpo_jax.training.batch import score_rollout
from grpo_jax.training.rows import is_endless, measured, row_indices
from grpo_jax.types import Rollout

SHOWN = 5
PERCENT = 95  # of prompts that are no longer
SIDE = 1024  # of the matrices whose product tells how fast this device is


class Lengths(NamedTuple):
    """Tokens of prompts, and of right answers where those are known."""

    prompt_N: np.ndarray
    target_N: np.ndarray | None


def dry_run(config: TrainConfig) -> None:
    """Shows what a run would do. Raises what a run would raise for its task, reward or prompts."""
    console = Console()
    task = task_of(config)
    tokenizer = tokenizer_of(config)
    model = model_of(config, tokenizer)
    rows = first_rows(config, task)
    show_rows(console, config, task, rows)
    prompts = [tokenizer.render(task.prompt(row)) for row in rows]
    for ids in prompts:
        show_prompt(console, tokenizer, ids)
    show_lengths(console, config, model, lengths_of(task, tokenizer))
    show_rewards(console, config, task, tokenizer, rows)
    show_cost(console, config, model, prompts)


def model_of(config: TrainConfig, tokenizer: Tokenizer) -> LanguageModel:
    """The model of a run, without its weights."""
    if config.model in MODELS:
        return MODELS[config.model](config, tokenizer)
    return decoder(model_config(config.model, config.precision))


def first_rows(config: TrainConfig, task: Task) -> list[Any]:
    """The rows that the first iteration would take, a few of them."""
    count = min(SHOWN, len(task.train))
    endless = is_endless(task.train)
    index = row_indices(0, count, len(task.train), config.seed, endless=endless)
    return [task.train[i] for i in index]


def show_rows(console: Console, config: TrainConfig, task: Task, rows: Sequence[Any]) -> None:
    """How many rows there are, and how often the run would see each."""
    taken = config.steps * config.batching.prompts_per_step
    if is_endless(task.train):
        told = f"endless rows to train on, of which {taken} are taken"
    else:
        epochs = taken / len(task.train)
        told = f"{len(task.train)} rows to train on, each taken {epochs:.3g} times"
    console.print(f"Task {task.name}: {told}; {len(task.held_out)} held out.", highlight=False)
    console.print(f"Columns: {', '.join(rows[0])}.", markup=False, highlight=False)


# Prompts.


def show_prompt(console: Console, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    """A prompt as the model reads it, with its special tokens."""
    console.rule(f"a prompt of {len(ids)} tokens", style="dim")
    console.print(Text(rendered(tokenizer, ids)), soft_wrap=True)


def rendered(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Ids as text in which special tokens are written out."""
    if isinstance(tokenizer, HFTokenizer):  # which has names for them
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return tokenizer.inner.decode(list(ids), **options)
    parts: list[str] = []
    run: list[int] = []
    for token in [*ids, None]:
        if token is not None and (token < 256 or tokenizer.decode([token])):
            run.append(token)
            continue
        parts.append(tokenizer.decode(run))
        run = []
        parts.append("" if token is None else f"<|{token}|>")
    return "".join(parts)


def lengths_of(task: Task, tokenizer: Tokenizer) -> Lengths:
    """Lengths of the rows' prompts and right answers."""
    rows, _ = measured(task.train)
    prompts, targets = [], []
    for row in rows:
        prompts.append(len(tokenizer.render(task.prompt(row))))
        if (text := right_answer(task, row)) is not None:
            targets.append(len(tokenizer.encode(text)) + 1)  # the token that ends it
    return Lengths(np.array(prompts), np.array(targets) if targets else None)


def show_lengths(
    console: Console, config: TrainConfig, model: LanguageModel, found: Lengths
) -> None:
    """How long prompts and answers are, and how many are over their limits."""
    limit = config.batching.prompt_length
    T = config.generation.max_new_tokens
    positions = getattr(model.config, "max_position_embeddings", None)
    if limit is None and positions is not None:
        limit = positions - T
    table = Table("tokens of", "shortest", "median", f"{PERCENT} %", "longest", "limit", "over it")
    lists = {"prompts": (found.prompt_N, limit)}
    if found.target_N is not None:
        lists["right answers"] = (found.target_N, T)
    for name, (length_N, most) in lists.items():
        quantiles = np.percentile(length_N, (0, 50, PERCENT, 100))
        over = "–" if most is None else f"{int((length_N > most).sum())} of {len(length_N)}"
        told = "none" if most is None else str(most)
        table.add_row(name, *(f"{value:.0f}" for value in quantiles), told, over)
    console.rule("lengths", style="dim")
    console.print(table)
    if limit is not None and (found.prompt_N > limit).any():
        console.print("A prompt over the limit ends the run: it is not shortened.")


# Rewards.


def right_answer(task: Task, row: Any) -> str | None:
    """A right completion; None where the task knows none."""
    try:
        return task.target(row)
    except (ValueError, KeyError):
        return None


def answers_of(task: Task, rows: Sequence[Any]) -> dict[str, list[str]]:
    """Right, wrong and empty answers of some rows; a wrong one is right for another row."""
    right = [right_answer(task, row) for row in rows]
    if any(one is None for one in right):
        return {"an empty answer": [""] * len(rows)}
    wrong = [next((o for o in right[i:] + right if o != one), "") for i, one in enumerate(right)]
    return {
        "the right answer": right,
        "another row's answer": wrong,
        "an empty answer": [""] * len(rows),
    }  # type: ignore[return-value]


def as_completions(tokenizer: Tokenizer, texts: Sequence[Sequence[str]]) -> Rollout:
    """Texts `[P][G]` as completions that have stopped."""
    ids = [[[*tokenizer.encode(text), tokenizer.stop_ids[0]] for text in group] for group in texts]
    longest = max(len(one) for group in ids for one in group)
    tokens_PGT = np.full((len(ids), len(ids[0]), longest), tokenizer.pad_id, np.int32)
    for p, g in np.ndindex(tokens_PGT.shape[:2]):
        tokens_PGT[p, g, : len(ids[p][g])] = ids[p][g]
    length_PG = np.array([[len(one) for one in group] for group in ids])
    mask_PGT = np.arange(longest) < length_PG[..., None]
    return Rollout(None, tokens_PGT, mask_PGT, None, np.ones(length_PG.shape, bool))  # type: ignore


def show_rewards(
    console: Console, config: TrainConfig, task: Task, tokenizer: Tokenizer, rows: Sequence[Any]
) -> None:
    """What the reward says of answers that are right, wrong and empty."""
    answers = answers_of(task, rows)
    texts = [list(group) for group in zip(*answers.values(), strict=True)]
    rollout = as_completions(tokenizer, texts)
    scores = score_rollout(task, config.scoring, rows, prompt_texts(task, rows), texts, rollout)
    names = list(reward_functions(task.reward))
    console.rule("rewards of the prompts above", style="dim")
    table = Table("reward", "of", *map(str, range(1, len(rows) + 1)))
    for n, name in enumerate(names):
        for g, label in enumerate(answers):
            values = scores.reward_PGN[:, g, n]
            table.add_row(name, label, *("not scored" if np.isnan(v) else f"{v:g}" for v in values))
    console.print(table)
    if len(answers) == 1:
        console.print("No right answers are known: name their column with --target-column.")
    elif unclear := int((~(scores.reward_PG[:, 0] > scores.reward_PG[:, 1:].max(1))).sum()):
        told = "the right answer is not above a wrong or empty one: is the reward what you mean?"
        console.print(f"For {unclear} of {len(rows)} prompts {told}", highlight=False)


# Memory and time.


def show_cost(
    console: Console, config: TrainConfig, model: LanguageModel, prompts: Sequence[Sequence[int]]
) -> None:
    """What a run takes at least, of memory and of time."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    parts, devices = shares(config)
    held = held_in_training(params, parts)
    S = config.batching.prompt_length or int(np.mean([len(ids) for ids in prompts]))
    cache = cache_bytes(config, model, params, S) // devices
    entries = sum(x.size for x in jax.tree.leaves(params))
    gigabyte = lambda size: f"{size / 1e9:.3g} GB"
    console.rule("memory and time", style="dim")
    console.print(
        f"{entries / 1e6:.4g} million parameters. On each device {gigabyte(held)} of weights, "
        f"gradient, moments and reference, and {gigabyte(cache)} of caches while it samples, of "
        f"{gigabyte(device_bytes())} there are; what an update keeps comes on top.",
        highlight=False,
    )
    flops = iteration_flops(config, params, S)
    speed = product_speed(config.precision.computed)
    seconds = flops / speed / devices
    console.print(
        f"An iteration to the length limit is {flops / 1e12:.3g} TFLOP, at least {seconds:.3g} s "
        f"at the {speed / 1e9:.3g} GFLOP/s that a product of two matrices has here, and the "
        f"run of {config.steps} iterations at least {told_time(seconds * config.steps)}, without "
        "evaluation and rewards. Its first iterations tell the time that it takes.",
        highlight=False,
    )
    console.print("Nothing was trained, and no folder was made.")


def shares(config: TrainConfig) -> tuple[int, int]:
    """Parts that the parameters are spread over, and devices."""
    sizes = {} if config.mesh is None else mesh_sizes(config.mesh)
    parts = sizes.get("fsdp", 1) * sizes.get("tensor", 1)
    return parts, config.pmap or math.prod(sizes.values())


def cache_bytes(config: TrainConfig, model: LanguageModel, params: Any, prompt_length: int) -> int:
    """Bytes of the caches of all completions that are sampled at once."""
    array = lambda dtype: jax.ShapeDtypeStruct((prompt_length,), dtype)
    own = jax.eval_shape(lambda: model.empty(config.generation.max_new_tokens))
    _, prompt = jax.eval_shape(model.prefill, params, array("int32"), array("bool"))
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    of_prompt = config.generation.slots * size(own) + size(prompt)
    return config.batching.prompts_per_step * of_prompt


def iteration_flops(config: TrainConfig, params: Mapping[str, Any], prompt_length: int) -> float:
    """`2·N` for a token that is sampled and `6·N` for one that is trained on, N of products.

    A prompt's tokens count once, whatever the size of its group. Attention is left out: it is
    little for short sequences.
    """
    entries = sum(x.size for x in jax.tree.leaves(params))
    if "embed" in params and "head" in params:  # a table of which a token reads one row
        entries -= params["embed"].size
    generation, batching = config.generation, config.batching
    tokens = prompt_length + generation.group_size * generation.max_new_tokens
    each = (2 + 6 * config.update.epochs) * entries * tokens
    return float(batching.prompts_per_step * each)


def product_speed(dtype: str) -> float:
    """FLOP/s of a product of two square matrices on this device, the best of a few."""
    x = jnp.ones((SIDE, SIDE), dtype)
    product = jax.jit(lambda a, b: a @ b)
    product(x, x).block_until_ready()
    best = math.inf
    for _ in range(5):
        began = time.perf_counter()
        product(x, x).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return 2 * SIDE**3 / best


def told_time(seconds: float) -> str:
    """Seconds in a unit that suits them."""
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} seconds"
