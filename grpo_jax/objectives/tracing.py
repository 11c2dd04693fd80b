"""What an objective depends on, found by walking the jaxprs of its own functions.

Nothing is declared by hand. A field is read if some output depends on it, and the weight of a loss
depends on the policy if it has a derivative in what the current parameters give. An objective with
a state is traced with the state as an argument, as it is compiled.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten_with_path

from grpo_jax.objectives.adaptive import AdaptiveObjective, objective_at
from grpo_jax.objectives.advantages import PROMPT_AXIS, Advantage
from grpo_jax.objectives.compose import Objective, batch_loss
from grpo_jax.types import Sample

# Equations that are no more than their inner jaxpr, and those whose output is their input.
CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
CALLS |= {"remat", "remat2", "checkpoint"}
COPIES = {"stop_gradient", "copy", "copy_p", "optimization_barrier"}


def is_variable(atom: object) -> bool:
    return not hasattr(atom, "val")  # literals carry a value


def inner_jaxpr(equation) -> Any:
    """The jaxpr that an equation calls, of the same inputs and outputs; None without one."""
    if equation.primitive.name not in CALLS:
        return None
    closed = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    inside = getattr(closed, "jaxpr", closed)
    fits = inside is not None and len(inside.invars) == len(equation.invars)
    return inside if fits and len(inside.outvars) == len(equation.outvars) else None


def live_inputs(jaxpr, live: set) -> set:
    """The inputs that `live` variables depend on: the jaxpr walked backwards."""
    live = set(live)
    for equation in reversed(jaxpr.eqns):
        outputs = [variable in live for variable in equation.outvars]
        if not any(outputs):
            continue
        inputs = equation.invars
        inside = inner_jaxpr(equation)
        if inside is not None:
            pairs = zip(inside.outvars, outputs, strict=True)
            needed = live_inputs(inside, {v for v, on in pairs if on and is_variable(v)})
            pairs = zip(equation.invars, inside.invars, strict=True)
            inputs = [v for v, own in pairs if own in needed]
        live |= {v for v in inputs if is_variable(v)}
    return live & set(jaxpr.invars)


def handed_through(jaxpr, variable) -> Any:
    """The input that an output is, untouched; None where it is computed."""
    if not is_variable(variable) or variable in jaxpr.invars:
        return variable if is_variable(variable) else None
    for equation in jaxpr.eqns:
        if variable not in equation.outvars:
            continue
        place = equation.outvars.index(variable)
        inside = inner_jaxpr(equation)
        if inside is not None:
            own = handed_through(inside, inside.outvars[place])
            return None if own is None else _input(jaxpr, equation, inside.invars.index(own))
        is_copy = equation.primitive.name in COPIES
        return _input(jaxpr, equation, place) if is_copy else None
    return None


def _input(jaxpr, equation, place: int) -> Any:
    return handed_through(jaxpr, equation.invars[place])


def full_batch(P: int = 2, G: int = 3, T: int = 4) -> tuple[jax.ShapeDtypeStruct, Sample]:
    """Shapes of a batch in which every field of `Sample` is present."""
    x_PGT = jax.ShapeDtypeStruct((P, G, T), jnp.float32)
    fields = {name: x_PGT for name in Sample._fields}
    fields["mask_T"] = jax.ShapeDtypeStruct((P, G, T), jnp.bool_)
    scalars = {
        "adv": jnp.float32,
        "stopped": jnp.bool_,
        "age": jnp.int32,
        "group_tokens": jnp.int32,
    }
    for name, dtype in scalars.items():
        fields[name] = jax.ShapeDtypeStruct((P, G), dtype)
    return x_PGT, Sample(**fields)


def state_of(objective: Objective | AdaptiveObjective) -> Any:
    """The first state of an objective that has one."""
    return objective.init() if isinstance(objective, AdaptiveObjective) else None


def prepared_batch(objective: Objective | AdaptiveObjective, **shape: int):
    """Shapes of a full batch as the loss sees it."""
    logp_PGT, samples_PG = full_batch(**shape)
    prepare = lambda state, samples: _prepare(objective, state, samples)
    return logp_PGT, jax.eval_shape(prepare, state_of(objective), samples_PG)


def _prepare(objective: Objective | AdaptiveObjective, state: Any, samples_PG: Sample) -> Sample:
    own = objective_at(objective, state).prepare
    return samples_PG if own is None else own(samples_PG)


def _name(path) -> str | None:
    return getattr(path[-1], "name", None) if path else None


def fields_read(function: Callable, state, logp_PGT, samples_PG: Sample) -> frozenset[str]:
    """The fields of a Sample that an output of `function(state, logp_PGT, samples_PG)` depends on.

    A field that is handed through untouched under its own name is not read; under another name, it
    is.
    """
    arguments = (state, logp_PGT, samples_PG)
    closed, out = jax.make_jaxpr(function, return_shape=True)(*arguments)
    jaxpr = closed.jaxpr
    paths, _ = tree_flatten_with_path(arguments)
    names = [_name(path[1:]) if path[0].idx == 2 else None for path, _ in paths]
    own = dict(zip(jaxpr.invars, names, strict=True))
    computed = set()
    for (path, _), variable in zip(tree_flatten_with_path(out)[0], jaxpr.outvars, strict=True):
        source = handed_through(jaxpr, variable)
        if source is not None and own[source] == _name(path):
            continue
        computed |= {source or variable} if is_variable(variable) else set()
    live = live_inputs(jaxpr, computed) | (computed & set(jaxpr.invars))
    return frozenset(own[v] for v in live if own[v])


def reads_in_prepare(objective: Objective | AdaptiveObjective) -> frozenset[str]:
    """The fields that `prepare` needs, of the policy that sampled (empty without `prepare`)."""
    whole = lambda state, _, samples: _prepare(objective, state, samples)
    return fields_read(whole, state_of(objective), *full_batch())


def reads_in_loss(objective: Objective | AdaptiveObjective) -> frozenset[str]:
    """The fields that the loss itself needs; of them, entropy_T and value_T are the current
    policy's.
    """
    loss = lambda state, logp, samples: batch_loss(objective_at(objective, state), logp, samples)
    return fields_read(loss, state_of(objective), *prepared_batch(objective))


def reads(objective: Objective | AdaptiveObjective) -> frozenset[str]:
    """The fields of `Sample` that decide the loss: what none of them needs does not have to be
    computed.
    """

    def whole(state, logp, samples):
        prepared = _prepare(objective, state, samples)
        return batch_loss(objective_at(objective, state), logp, prepared)

    return fields_read(whole, state_of(objective), *full_batch())


def weight_depends_on_policy(objective: Objective | AdaptiveObjective) -> bool:
    """Whether the weight of the loss's `Mean` has a derivative in logp_T, entropy_T or value_T.

    The gradient of a batch is Σ ∇total / Σ weight: a weight that moves with the parameters would
    lack its own part. Behind a stop_gradient it is a constant.
    """
    logp_PGT, samples_PG = prepared_batch(objective)
    policy = (logp_PGT, samples_PG.entropy_T, samples_PG.value_T)

    def pulled_back(cotangent, state, policy, samples):
        bound = objective_at(objective, state)

        def weight(logp, entropy, value):
            seen = samples._replace(entropy_T=entropy, value_T=value)
            return batch_loss(bound, logp, seen).weight.astype(jnp.float32)

        return jax.vjp(weight, *policy)[1](cotangent)

    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    closed = jax.make_jaxpr(pulled_back)(scalar, state_of(objective), policy, samples_PG)
    outputs = {v for v in closed.jaxpr.outvars if is_variable(v)}
    return closed.jaxpr.invars[0] in live_inputs(closed.jaxpr, outputs)


MOST_REWARDS = 16  # up to which an advantage of several rewards is recognised


def takes_several_rewards(advantage: Advantage) -> bool:
    """Whether an advantage makes one of several rewards, reward_PNG → adv_PG.

    Asked with several numbers of rewards: an advantage with weights takes as many as it has.
    """
    batch = jax.vmap(advantage, axis_name=PROMPT_AXIS)
    for count in range(2, MOST_REWARDS + 1):
        try:
            out = jax.eval_shape(batch, jax.ShapeDtypeStruct((2, count, 4), jnp.float32))
        except Exception:  # it takes another number, or one reward, and says so in its own way
            continue
        if getattr(out, "shape", None) == (2, 4):
            return True
    return False
