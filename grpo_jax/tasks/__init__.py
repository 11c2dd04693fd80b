"""Tasks: questions, how they are asked, and how answers are scored. No JAX here."""

from collections.abc import Callable, Mapping
from typing import Any

from grpo_jax.tasks.data import load_task, with_reward
from grpo_jax.tasks.pricing import pricing
from grpo_jax.tasks.procedural import PREFIX, procedural
from grpo_jax.tasks.task import Task
from grpo_jax.tasks.user_code import call_with, load_function

TASKS: dict[str, Callable[..., Task]] = {"pricing": pricing}


def task_function(name: str) -> Callable[..., Task]:
    """The function that makes a task: by its name in `TASKS`, reasoning_gym:NAME, or
    FILE.py:FUNCTION.

    Raises ValueError, or FileNotFoundError, where there is none.
    """
    if name in TASKS:
        return TASKS[name]
    return procedural(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else load_function(name)


def make_task(name: str, options: Mapping[str, Any]) -> Task:
    """A task by its name, with some options.

    Raises ValueError for options that it refuses; an error of a caller's own function is told with
    its file and line.
    """
    function = task_function(name)
    own = name not in TASKS and not name.startswith(PREFIX)
    task = call_with(function, options, name) if own else function(**options)
    if not isinstance(task, Task):
        raise ValueError(f"{name} must return a Task, got {type(task).__name__}")
    return task


__all__ = [
    "TASKS",
    "Task",
    "load_function",
    "load_task",
    "make_task",
    "pricing",
    "task_function",
    "with_reward",
]
