"""Objectives with a state of their own that moves between iterations, and compiles nothing anew.

    objective_i = bind(state_i)                      inside the compiled programs
    state_{i+1} = step(state_i, metrics_i)           on the host, after each iteration

The state is an argument of the compiled programs, so that a β that is adapted is a number and not
a new program. Left out on purpose: gradients with respect to the state.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from grpo_jax.objectives.compose import Objective


class AdaptiveObjective(NamedTuple):
    """`init() -> state`, `bind(state) -> Objective`, `step(state, metrics) -> state`.

    The state is a tree of arrays (or numbers); `metrics` are those of the iteration, as floats.
    """

    init: Callable[[], Any]
    bind: Callable[[Any], Objective]
    step: Callable[[Any, dict[str, float]], Any]


def objective_at(objective: Objective | AdaptiveObjective, state: Any = None) -> Objective:
    """The objective in this state; where no state is given, in its first one."""
    if not isinstance(objective, AdaptiveObjective):
        return objective
    return objective.bind(objective.init() if state is None else state)
