"""Whether a completion of advantage 0 has a gradient, proven from the jaxpr of the gradient.

The jaxpr is evaluated with the advantages known to be 0 and everything else unknown: masks, ages,
stops, log-probabilities, weights. A product with a known 0 is 0, whatever the other factor. What is
not proven to be 0 is taken for a gradient. Unknown numbers are taken for finite ones.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.objectives.adaptive import AdaptiveObjective, objective_at
from grpo_jax.objectives.compose import Objective, batch_loss
from grpo_jax.objectives.tracing import inner_jaxpr, is_variable, prepared_batch, state_of

# Completion lengths to trace: a loss may be written otherwise for short and for long ones.
LENGTHS = (1, 6, 65, 1000, 10000)


class _Unknown:
    """A value that could be anything."""


UNKNOWN = _Unknown()

# Which inputs must be 0 for the outputs to be 0: any of them, the first, or all of them.
ANY = {"mul", "and", "dot_general"}
FIRST = {
    *("neg", "abs", "sign", "square", "sqrt", "cbrt", "sin", "tan", "sinh", "tanh", "asin", "atan"),
    *("erf", "expm1", "log1p", "floor", "ceil", "round", "convert_element_type", "copy", "real"),
    *("stop_gradient", "reduce_precision", "broadcast_in_dim", "reshape", "squeeze", "transpose"),
    *("rev", "slice", "split", "gather", "dynamic_slice", "div", "rem", "integer_pow", "copy_p"),
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_or", "cumsum", "cummax", "cummin"),
}
ALL = {"add", "add_any", "sub", "max", "min", "or", "xor", "concatenate", "pad"}


def _is_zero(value: Any) -> bool:
    return value is not UNKNOWN and not np.any(value)


def _rule(equation, inputs: list) -> bool:
    """Whether the outputs of an equation are 0 although some of its inputs are unknown."""
    name = equation.primitive.name
    if name in ANY:
        return any(map(_is_zero, inputs))
    if name == "integer_pow" and equation.params["y"] <= 0:
        return False
    if name in FIRST:
        return _is_zero(inputs[0])
    if name == "select_n":
        return all(map(_is_zero, _selected(inputs)))
    if name in ("scatter-add", "scatter"):
        return _is_zero(inputs[0]) and _is_zero(inputs[2])
    return name in ALL and all(map(_is_zero, inputs))


def _selected(inputs: list) -> list:
    """The cases of a select that its condition may take."""
    which, *cases = inputs
    if which is UNKNOWN:
        return cases
    return [cases[int(i)] for i in np.unique(which)]


def _outputs(equation, inputs: list) -> list:
    inside = inner_jaxpr(equation)
    if inside is not None:
        closed = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        return evaluate(inside, getattr(closed, "consts", ()), inputs)
    known = all(value is not UNKNOWN for value in inputs)
    if equation.primitive.name == "select_n" and not known:
        cases = _selected(inputs)
        if len(cases) == 1:  # the condition is known, and the same everywhere
            return cases
    if known:
        found = equation.primitive.bind(*map(jnp.asarray, inputs), **equation.params)
        return list(found) if equation.primitive.multiple_results else [found]
    if _rule(equation, inputs):
        return [np.zeros(v.aval.shape, v.aval.dtype) for v in equation.outvars]
    return [UNKNOWN] * len(equation.outvars)


def evaluate(jaxpr, consts, inputs: list) -> list:
    """The outputs of a jaxpr: arrays where they are known, `UNKNOWN` where they are not."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))
    read = lambda atom: values[atom] if is_variable(atom) else atom.val
    for equation in jaxpr.eqns:
        found = _outputs(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _is_inert(objective: Objective | AdaptiveObjective, length: int) -> bool:
    logp, samples = prepared_batch(objective, P=1, G=1, T=length)
    policy = (logp, samples.entropy_T, samples.value_T)
    rest = samples._replace(adv=None, entropy_T=None, value_T=None)

    def gradient(adv, state, policy, rest):
        bound = objective_at(objective, state)

        def total(logp, entropy, value):
            seen = rest._replace(adv=adv, entropy_T=entropy, value_T=value)
            return batch_loss(bound, logp, seen).total

        return jax.grad(total, argnums=(0, 1, 2))(*policy)

    closed = jax.make_jaxpr(gradient)(samples.adv, state_of(objective), policy, rest)
    zero = np.zeros(samples.adv.shape, samples.adv.dtype)
    unknown = [UNKNOWN] * (len(closed.jaxpr.invars) - 1)
    return all(map(_is_zero, evaluate(closed.jaxpr, closed.consts, [zero, *unknown])))


@functools.cache
def gradient_at_zero_advantage(objective: Objective | AdaptiveObjective) -> bool:
    """Whether a completion of advantage 0 may have a gradient: a KL, an entropy bonus, values.

    False is proven, for completions of any length, truncated or not, and of any age; where there is
    a doubt it is True.
    """
    return not all(_is_inert(objective, length) for length in LENGTHS)
