"""Tasks: questions, how they are asked, and how answers are scored. No JAX here."""

from grpo_jax.tasks.pricing import pricing
from grpo_jax.tasks.task import Task

TASKS = {"pricing": pricing}

__all__ = ["TASKS", "Task", "pricing"]
