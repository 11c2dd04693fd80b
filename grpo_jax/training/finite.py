"""An update that is not finite is not applied, and a run of them ends with its cause.

One infinite number in a gradient makes every parameter NaN after one update, and everything that is
saved later. So the loss and the norm of the gradient are looked at inside the compiled step, which
keeps parameters and optimiser as they are where one of them is not finite. The new parameters are
looked at there too. Should finite gradients have made infinite ones, as a learning rate of NaN
does, the old ones have been overwritten (both at once would be one more model in memory), so that
the loop ends before anything is saved.

Left out on purpose: scaling of the loss, for float16 is refused.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpo_jax.types import Array, Params

SKIPPED = "frac_skipped"
INFINITE = "infinite_params"
IN_A_ROW = 5  # iterations without any update that end a run


class NonFiniteError(RuntimeError):
    """Numbers that are not finite, which a run cannot go on with."""


def finite_update(
    update: Callable[[Params, Any, Params], tuple[Params, Any]],
    grads: Params,
    opt_state: Any,
    params: Params,
    finite: Array,
) -> tuple[Params, Any]:
    """The parameters and the optimiser's state behind an update; as they were if not `finite`.

    Args:
      update: `(grads, opt_state, params) -> (params, opt_state)`.
      grads: the gradient.
      opt_state: the optimiser's state.
      params: the parameters.
      finite: whether the loss and the gradient are.
    """
    return jax.lax.cond(
        finite, lambda: update(grads, opt_state, params), lambda: (params, opt_state)
    )


def all_finite(tree: Params) -> Array:
    """Whether no number is NaN or beyond 1e19, whose square float32 does not hold."""
    # As a sum of squares it is computed without an array of booleans as long as the parameters.
    squares = [jnp.vdot(x, x) for x in jax.tree.leaves(single(tree)) if x.size]
    return reduce(jnp.logical_and, map(jnp.isfinite, squares), jnp.array(True))


def optimizer_update(optimizer: optax.GradientTransformation) -> Callable:
    """`(grads, opt_state, params) -> (params, opt_state)` of an Optax transformation.

    It computes in float32 whatever parameters are kept in: their type rounds once, at the very end.
    """

    def update(grads: Params, opt_state: Any, params: Params) -> tuple[Params, Any]:
        whole = single(params)
        updates, opt_state = optimizer.update(grads, opt_state, whole)
        moved = optax.apply_updates(whole, updates)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), moved, params), opt_state

    return update


def single(tree: Params) -> Params:
    """Floating-point arrays in float32: sums over parts and devices would round in less."""

    def widened(x: Array) -> Array:
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(widened, tree)


def check_finite(metrics: dict[str, float], in_a_row: int = 0) -> int:
    """How many iterations in a row had no update that could be applied, this one included.

    Takes `infinite_params` out of the metrics, which is 0 where this returns.

    Raises:
      NonFiniteError: the parameters are not finite, or `IN_A_ROW` iterations had no update.
    """
    if metrics.pop(INFINITE, 0):
        raise NonFiniteError(
            "an update made parameters that are not finite, though its gradient was: look at the "
            "learning rate and its schedule, and go on from an earlier checkpoint"
        )
    skipped = metrics.get(SKIPPED, 0)
    if not skipped:
        return 0
    cause = cause_of(metrics)
    warnings.warn(f"{skipped:.0%} of an iteration's updates were skipped: {cause}", stacklevel=2)
    if skipped < 1:
        return 0
    if in_a_row + 1 >= IN_A_ROW:
        raise NonFiniteError(
            f"no update could be applied in {IN_A_ROW} iterations in a row: {cause}; the "
            "parameters are those from before them"
        )
    return in_a_row + 1


def cause_of(metrics: Mapping[str, float]) -> str:
    """What was not finite, in a clause."""
    if not math.isfinite(metrics["loss"]):
        return f"the loss is {metrics['loss']}"
    return f"the loss is finite and the norm of its gradient is {metrics['grad_norm']}"
