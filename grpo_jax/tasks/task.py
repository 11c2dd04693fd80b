"""What a task is: its rows, how a row is asked, how an answer is scored, and what a right answer
looks like.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Message = dict[str, str]


class Task(NamedTuple):
    """Rows to train on, rows never trained on, and functions of a row.

    `prompt(row)` is a chat as messages, `reward` a function of strings that is called by its
    signature, `target(row)` a right completion, for supervised fine-tuning. Rows may be any
    sequence: those of a large file are read when they are asked for. `record` tells the data apart
    from other data of the same name, for whoever continues a run; rows that are made have none.
    """

    name: str
    train: Sequence[Row]
    held_out: Sequence[Row]
    prompt: Callable[[Row], list[Message]]
    reward: Callable[..., Any]
    target: Callable[[Row], str]
    record: Mapping[str, Any] | None = None
