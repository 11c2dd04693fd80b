"""A task out of a file: rows, how they are asked, what scores them, which of them are held out.

A file is gone through once, when the task is made: a row that cannot be used is told then, with its
line, and not in the middle of a run. Which rows are held out depends on each row alone: not on
their order, the other rows, or the machine.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_jax import rewards
from grpo_jax.options import Data
from grpo_jax.rewards.scoring import MESSAGES
from grpo_jax.tasks.layouts import (
    TARGETS,
    Layout,
    layout_of,
    messages_of,
    prompt_column,
    template_of,
)
from grpo_jax.tasks.rows import Index, Rows
from grpo_jax.tasks.sources import Found, Source, open_source
from grpo_jax.tasks.task import Message, Row, Task
from grpo_jax.tasks.user_code import is_reference, load_function, nearest

FIRST_ROWS = 100  # of a file, which tell its columns and its layout
EVAL_SHARE = Data().eval_share
# What a reward may take that is no column: it belongs to a completion.
OF_COMPLETION = (
    "prompt",
    "prompts",
    "completion",
    "completions",
    "completion_ids",
    "completion_length",
    "stopped",
    "tokens",
    MESSAGES,
)

Reward = Callable[..., Any]


class Reading(NamedTuple):
    """How the rows of a source are read."""

    layout: Layout
    ask: Callable[[Row], list[Message]]
    columns: tuple[str, ...]  # without any of these a row cannot be used
    on_bad_row: str


def load_task(
    path_or_id: str | Path,
    *,
    reward: str | Reward | Sequence[str | Reward] | Mapping[str, str | Reward] | None = None,
    split: str | None = None,
    subset: str | None = None,
    eval_data: str | Path | None = None,
    eval_split: str | None = None,
    eval_share: float = EVAL_SHARE,
    prompt: str | Callable[[Row], str | list[Message]] | None = None,
    prompt_template: str | None = None,
    system_prompt: str | None = None,
    target: str | Callable[[Row], str] | None = None,
    on_bad_row: str = "raise",
    name: str | None = None,
    record: Mapping[str, Any] | None = None,
) -> Task:
    """The task of a file: JSONL, JSON, CSV, Parquet, a folder of `datasets`, or a Hub id.

    Every column of a row goes to the reward by its name. The layouts of GSM8K and MATH are
    recognised, and their answers become the column `answer`.

    Args:
      path_or_id: where the rows are.
      reward: one function or several, as functions, FILE.py:FUNCTION, module:FUNCTION, or names in
        `grpo_jax.rewards`; one that takes `completions` is called as TRL does. None: the one that
        suits the layout, `number_reward` or `math_reward`.
      split: of a dataset; None: "train", or the only one.
      subset: the configuration of a Hub dataset that has several.
      eval_data: where the held-out rows are; None: a share of the rows, or `eval_split`.
      eval_split: the split of the held-out rows, of `eval_data` or of the data itself.
      eval_share: the share that is held out where nothing else says which: rows whose hash, as a
        number in [0, 1), is below it. Equal rows are on the same side. 1 holds all of them out.
      prompt: the column that is asked, as text or as chat messages, or a function of the row; None:
        the first of prompt, messages, question, problem and instruction that is there.
      prompt_template: a jinja2 template of the row's columns, for what the user says.
      system_prompt: what the system says before the prompt.
      target: the column of a right completion, or a function of the row; None: solution or answer.
      on_bad_row: a row that cannot be used ends in an error ("raise") or is left out ("skip").
      name: of the task; None: that of the file.
      record: `Task.record` of an earlier start. The task then has the rows that it had: what was
        added at the end of a file is left out, and told.

    Raises:
      FileNotFoundError: there is no such file.
      OptionError: an option is out of its range.
      ValueError: a row cannot be used, a reward or template takes a column that is not there, or
        nothing is held out; the message names the file, and the line or the columns.
    """
    Data(str(path_or_id), eval_share=eval_share, on_bad_row=on_bad_row).check()
    source = open_source(path_or_id, split, subset)
    first = first_rows(source)
    layout = layout_of(first)
    ask, asked = prompt_of(source.name, layout, first, prompt, prompt_template, system_prompt)
    chat = not callable(prompt) and any(isinstance(first[0].get(name), list) for name in asked)
    functions = resolved_reward(reward, layout.reward, source.name, chat)
    reading = partial(reading_of, ask=ask, asked=asked, reward=functions, on_bad_row=on_bad_row)
    before = record or {}
    train, told = opened_rows(source, reading(source), before.get("train"))
    record = {"train": told}
    if eval_data is None and eval_split is None:
        train, held_out = divided(train, eval_share)
        record["train"] |= {"eval_share": eval_share}
    else:
        other = open_source(eval_data or path_or_id, eval_split, subset)
        held_out, record["held_out"] = opened_rows(other, reading(other), before.get("held_out"))
        warn_of_shared(train, held_out)
    check_share(source.name, len(train), len(held_out), eval_share)
    answered = target if callable(target) else partial(target_of, source.name, target)
    return Task(name or stem(path_or_id), train, held_out, ask, functions, answered, record)


def stem(path_or_id: str | Path) -> str:
    """The name of a file without its ending, or the last part of a Hub id."""
    path = Path(path_or_id)
    return path.stem if path.is_file() else path.name


# Columns.


def first_rows(source: Source) -> list[Row]:
    """The first rows that can be read; they tell what columns there are."""
    rows = [one.row for one in islice(source.scan(), FIRST_ROWS) if one.row is not None]
    if not rows:
        bad = next((one for one in source.scan()), None)
        why = "" if bad is None else f": {source.unit} {bad.number} {bad.problem}"
        raise ValueError(f"{source.name} holds no rows{why}")
    return rows


def columns_of(rows: Sequence[Row]) -> list[str]:
    """The columns of some rows, in the order in which they come."""
    return list(dict.fromkeys(name for row in rows for name in row))


def reading_of(
    source: Source, ask: Callable, asked: set[str], reward: Any, on_bad_row: str
) -> Reading:
    """How a source is read. Raises ValueError where it lacks a column that is needed."""
    first = first_rows(source)
    layout = layout_of(first)
    wanted = (asked | wanted_columns(reward)) - layout.adds | layout.needs
    check_columns(source.name, wanted, columns_of(first), reward)
    return Reading(layout, ask, tuple(sorted(wanted)), on_bad_row)


def prompt_of(
    name: str,
    layout: Layout,
    first: Sequence[Row],
    prompt: str | Callable | None,
    template: str | None,
    system: str | None,
) -> tuple[Callable[[Row], list[Message]], set[str]]:
    """How a row is asked, and the columns that this takes."""
    if prompt is not None and template is not None:
        raise ValueError("prompt and prompt_template are two ways to ask; give one of them")
    before = [] if system is None else [{"role": "system", "content": system}]
    if template is not None:
        try:
            render, names = template_of(template)
        except ValueError as error:
            raise ValueError(f"prompt_template {error}") from error
        return partial(asked_with, render, before, ""), names
    if callable(prompt):
        return partial(asked_with, prompt, before, ""), set()
    column = prompt_column(name, columns_of(first), prompt or layout.column or None)
    prefill = column if prompt is not None else ""
    return partial(asked_with, partial(cell, column), before, prefill), {column}


def cell(column: str, row: Row) -> Any:
    return row[column]


def asked_with(ask: Callable, before: list[Message], prefill: str, row: Row) -> list[Message]:
    """The messages of a row; `prefill` is the column that may end with an assistant's beginning."""
    try:
        return [*before, *messages_of(ask(row), prefill=bool(prefill))]
    except ValueError as error:
        raise ValueError(f"has a prompt that {error}") from error
    except Exception as error:  # whatever a function of the caller's raises
        raise ValueError(f"cannot be asked: {type(error).__name__}: {error}") from error


def target_of(name: str, column: str | None, row: Row) -> str:
    """A right completion, by its column."""
    for known in TARGETS if column is None else (column,):
        if row.get(known) is not None:
            return str(row[known])
    wanted = " or ".join(TARGETS) if column is None else column
    raise ValueError(
        f"{name} has no column {wanted} with a right completion: name the one that has "
        f"(target){nearest(column or TARGETS[0], row)}"
    )


# Rewards.


def resolved_reward(reward: Any, usual: str | None, name: str, chat: bool = False) -> Any:
    """Reward functions, from what names them; `usual` is that of the layout."""
    if reward is None or (isinstance(reward, Sequence | Mapping) and not len(reward)):
        reward = usual
    if reward is None:
        known = ", ".join(ready_rewards())
        raise ValueError(
            f"{name} needs a reward: FILE.py:FUNCTION, module:FUNCTION, or one of {known}"
        )
    if isinstance(reward, Mapping):
        return {name: reward_of(one, chat) for name, one in reward.items()}
    if isinstance(reward, str) or callable(reward):
        return reward_of(reward, chat)
    made = [reward_of(one, chat) for one in reward]
    return made if len(made) > 1 else made[0]


def with_reward(task: Task, reward: Any) -> Task:
    """A task that is scored by another reward. Raises ValueError where it lacks a column."""
    reward = resolved_reward(reward, None, task.name)
    row = next(iter(islice(task.train, 1)), None) or task.held_out[0]
    check_columns(f"task {task.name!r}", wanted_columns(reward), list(row), reward)
    return task._replace(reward=reward)


def reward_of(reward: str | Reward, chat: bool) -> Reward:
    """A reward function, or the one that a text names.

    One that takes `completions` is written for TRL; where prompts are chats (`chat`), it is given
    messages, as TRL does.
    """
    if callable(reward):
        function = reward
    elif is_reference(reward):
        function = load_function(reward)
    elif reward in (known := ready_rewards()):
        function = known[reward]
    else:
        raise ValueError(f"reward {reward!r} is no FILE.py:FUNCTION{nearest(reward, known)}")
    if inspect.isfunction(function) and "completions" in parameters(function):
        return rewards.trl_style(function, conversational=chat)
    return function


def ready_rewards() -> dict[str, Reward]:
    """The functions of `grpo_jax.rewards` that score a completion and need nothing bound."""
    found = {name: getattr(rewards, name) for name in rewards.__all__}
    return {
        name: fn
        for name, fn in found.items()
        if inspect.isfunction(fn)
        and "completion" in (takes := parameters(fn))
        and takes.isdisjoint({"row", "fn", "reward", "rewards"})
    }


def parameters(reward: Reward) -> set[str]:
    """The names of the arguments that a reward must be given."""
    fn = getattr(reward, "fn", reward)  # what adapters of batches wrap
    taken = inspect.signature(fn).parameters.values()
    spread = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {one.name for one in taken if one.default is one.empty and one.kind not in spread}


def wanted_columns(reward: Any) -> set[str]:
    """The columns without which some reward cannot be called."""
    functions = rewards.reward_functions(reward).values()
    return set().union(*map(parameters, functions)) - set(OF_COMPLETION)


def check_columns(name: str, wanted: set[str], columns: Sequence[str], reward: Any) -> None:
    """Raises ValueError where a column that a template or a reward takes is in no row."""
    for missing in sorted(wanted - set(columns)):
        by = [
            f"the reward {label!r}"
            for label, fn in rewards.reward_functions(reward).items()
            if missing in parameters(fn)
        ]
        takes = " and ".join(by) or "the prompt"
        raise ValueError(
            f"{takes} takes {missing!r}, and {name} has no such column{nearest(missing, columns)}"
        )


# Rows.


def opened_rows(
    source: Source, reading: Reading, record: Mapping[str, Any] | None
) -> tuple[Rows, dict[str, Any]]:
    """All usable rows of a source, and what a run keeps of them."""
    places = indexed(source, reading)
    count = as_recorded(source, places, record)
    rows = Rows(source, places, np.arange(count), reading.layout.shape)
    return rows, {"name": source.name, "rows": count, "digest": places.digest(count)}


def divided(rows: Rows, share: float) -> tuple[Rows, Rows]:
    """Rows to train on and rows that are held out, by the hash of each."""
    is_out = rows.places.hash_N[rows.chosen_N] < share * 2.0**64
    return rows[np.flatnonzero(~is_out)], rows[np.flatnonzero(is_out)]


def indexed(source: Source, reading: Reading) -> Index:
    """Where the usable rows of a source lie. Bad ones are told, or left out and counted."""
    index, skipped = Index(), []
    for one in source.scan():
        if problem := problem_of(one, reading):
            where = f"{source.name}, {source.unit} {one.number} {problem}"
            if reading.on_bad_row == "raise":
                raise ValueError(f"{where} (on_bad_row='skip' leaves such rows out)")
            skipped.append(where)
        else:
            index.add(one)
    if not len(index):
        raise ValueError(f"{source.name} holds no row that can be used; the first: {skipped[0]}")
    if skipped:
        count, total = len(skipped), len(skipped) + len(index)
        warnings.warn(
            f"{count} of {total} rows of {source.name} are left out; the first: {skipped[0]}",
            stacklevel=4,
        )
    return index.done()


def problem_of(one: Found, reading: Reading) -> str:
    """What is wrong with a row; empty where nothing is."""
    if one.row is None:
        return one.problem
    missing = [name for name in reading.columns if name not in one.row]
    if missing:
        return f"has no {missing[0]!r}{nearest(missing[0], one.row)}"
    try:
        reading.ask(reading.layout.shape(one.row))
    except ValueError as error:
        return str(error)
    return ""


def as_recorded(source: Source, index: Index, record: Mapping[str, Any] | None) -> int:
    """How many rows an earlier start had, if they are still there, else all; both are told."""
    if record is None:
        return len(index)
    count, now = record["rows"], len(index)
    if now < count or index.digest(count) != record["digest"]:
        warnings.warn(
            f"{source.name} is not what it was when the run began: it had {count} rows, it has "
            f"{now}, and the first {min(count, now)} are not all the same; the run goes on with "
            "what is there, and is not the run that it would have been",
            stacklevel=4,
        )
        return now
    if now > count:
        warnings.warn(
            f"{source.name} has grown from {count} to {now} rows: the run goes on with those that "
            "it began with; a new run takes all of them",
            stacklevel=4,
        )
    return count


def warn_of_shared(train: Rows, held_out: Rows) -> None:
    """Warns where rows to train on are held-out rows too."""
    hashes = [rows.places.hash_N[rows.chosen_N] for rows in (train, held_out)]
    shared = int(np.isin(*hashes).sum())
    if shared:
        warnings.warn(
            f"{shared} rows of {train.source.name} are in {held_out.source.name} too: what is held "
            "out would be trained on",
            stacklevel=3,
        )


def check_share(name: str, train: int, held_out: int, share: float) -> None:
    """Raises ValueError where a share of the rows leaves nothing to train on or to hold out."""
    if not held_out:
        raise ValueError(
            f"{name}: no row of {train} is held out at eval_share={share}; raise it, or give "
            "eval_data"
        )
    if not train and share < 1:
        raise ValueError(f"{name}: all {held_out} rows are held out at eval_share={share}")
