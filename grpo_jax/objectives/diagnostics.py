"""What an objective reads, and what a step should show: found by tracing the objective's own
functions.

Nothing is declared by hand. A field is read if some output depends on it, and a token is clipped if
its surrogate has no gradient: a user's own variant is described as exactly as a preset.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten_with_path

from grpo_jax.objectives.adaptive import AdaptiveObjective, objective_at
from grpo_jax.objectives.compose import (
    Objective,
    batch_loss,
    core,
    corrected,
    inner,
    neutralise,
    over_samples,
    surrogate_costs,
)
from grpo_jax.objectives.divergences import k3
from grpo_jax.objectives.ratios import per_token
from grpo_jax.types import Array, Mean, Sample


def _live_inputs(jaxpr, live: set) -> set:
    """The variables that `live` ones depend on: the jaxpr walked backwards."""
    live = set(live)
    for equation in reversed(jaxpr.eqns):
        outputs = [variable in live for variable in equation.outvars]
        if not any(outputs):
            continue
        inner = equation.params.get("jaxpr")
        if equation.primitive.name in ("jit", "pjit") and inner is not None:
            inner = getattr(inner, "jaxpr", inner)
            needed = _live_inputs(
                inner,
                {v for v, on in zip(inner.outvars, outputs, strict=True) if on and _is_var(v)},
            )
            inputs = [
                v for v, own in zip(equation.invars, inner.invars, strict=True) if own in needed
            ]
        else:
            inputs = equation.invars
        live |= {v for v in inputs if _is_var(v)}
    return live & set(jaxpr.invars)


def _is_var(atom: object) -> bool:
    return not hasattr(atom, "val")  # literals carry a value


def _full_batch() -> tuple[jax.ShapeDtypeStruct, Sample]:
    """Shapes of a batch in which every field of `Sample` is present."""
    P = 2
    G = 3
    T = 4
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


def _fields_read(function: Callable, logp_PGT, samples_PG: Sample) -> frozenset[str]:
    """The fields of a Sample that an output of `function(logp_PGT, samples_PG)` depends on.

    A field that is handed through untouched is not read.
    """
    jaxpr = jax.make_jaxpr(function)(logp_PGT, samples_PG).jaxpr
    computed = {v for v in jaxpr.outvars if _is_var(v)} - set(jaxpr.invars)
    live = _live_inputs(jaxpr, computed)
    paths, _ = tree_flatten_with_path((logp_PGT, samples_PG))
    names = [path[-1].name if len(path) > 1 else None for path, _ in paths]
    return frozenset(
        name for name, v in zip(names, jaxpr.invars, strict=True) if name and v in live
    )


def reads_in_prepare(objective: Objective | AdaptiveObjective) -> frozenset[str]:
    """The fields that `prepare` needs, of the policy that sampled (empty without `prepare`)."""
    objective = objective_at(objective)
    if objective.prepare is None:
        return frozenset()
    logp_PGT, samples_PG = _full_batch()
    return _fields_read(lambda _, samples: objective.prepare(samples), logp_PGT, samples_PG)


def reads_in_loss(objective: Objective | AdaptiveObjective) -> frozenset[str]:
    """The fields that the loss itself needs; of them, entropy_T and value_T are the current
    policy's.
    """
    objective = objective_at(objective)
    logp_PGT, samples_PG = _full_batch()
    if objective.prepare is not None:
        samples_PG = jax.eval_shape(objective.prepare, samples_PG)
    return _fields_read(
        lambda logp, samples: batch_loss(objective, logp, samples), logp_PGT, samples_PG
    )


def reads(objective: Objective | AdaptiveObjective) -> frozenset[str]:
    """The fields of `Sample` that decide the loss: what none of them needs does not have to be
    computed.
    """
    objective = objective_at(objective)
    logp_PGT, samples_PG = _full_batch()
    prepare = objective.prepare or (lambda samples: samples)
    return _fields_read(
        lambda logp, samples: batch_loss(objective, logp, prepare(samples)), logp_PGT, samples_PG
    )


def _surrogate_of(
    objective: Objective, logp_T: Array, sample: Sample
) -> tuple[Callable, Array, Sample]:
    """What the token gradients are taken of, the log-ratio, and the sample as the core of the loss
    sees it.
    """
    loss = objective.loss
    while inner(loss) is not None:
        if loss.func is corrected:
            logp_T, sample = neutralise(logp_T, loss.keywords["adjust"](logp_T, sample))
        loss = inner(loss)
    parts = getattr(core(loss), "keywords", None)
    if parts is None:
        return (
            lambda x_T: loss(x_T, sample).total,
            per_token(logp_T, sample.old_logp_T, sample.mask_T),
            sample,
        )
    chosen = {name: parts[name] for name in ("ratio", "surrogate")}
    cost = lambda x_T: jnp.sum(
        jnp.where(sample.mask_T, surrogate_costs(x_T, sample, **chosen)[0], 0.0)
    )
    return cost, surrogate_costs(logp_T, sample, **chosen)[1], sample


def _diagnose(objective: Objective, logp_T: Array, sample: Sample) -> dict[str, Mean]:
    logp_T, sample = neutralise(jax.lax.stop_gradient(logp_T), sample)
    cost, log_ratio_T, sample = _surrogate_of(objective, logp_T, sample)
    ratio_T = jnp.exp(log_ratio_T)
    gradient_T = jax.grad(cost)(logp_T)
    adv_T = jnp.broadcast_to(sample.adv, logp_T.shape)
    silent_T = (gradient_T == 0) & (adv_T != 0)
    values = {
        "ratio": ratio_T,
        "clip_fraction": silent_T,
        "clip_low": silent_T & (log_ratio_T < 0),
        "clip_high": silent_T & (log_ratio_T > 0),
        "zero_advantage": adv_T == 0,
    }
    if sample.ref_logp_T is not None:
        values["kl"] = k3(logp_T, sample.ref_logp_T)
    if sample.entropy_T is not None:
        values["entropy"] = jax.lax.stop_gradient(sample.entropy_T)
    if sample.sampler_logp_T is not None:
        values["sampler_logp_diff"] = jnp.abs(sample.old_logp_T - sample.sampler_logp_T)
    count = jnp.sum(sample.mask_T).astype(logp_T.dtype)
    return {
        name: Mean(jnp.sum(jnp.where(sample.mask_T, x_T, 0.0)), count)
        for name, x_T in values.items()
    }


def diagnostics(objective: Objective, logp_PGT: Array, samples_PG: Sample) -> dict[str, Mean]:
    """Means over the trained tokens, which add up over micro-batches as the loss does.

    `ratio` (π/π_old as the objective takes it); `clip_fraction`, the tokens whose surrogate has no
    gradient although their advantage is not 0, with `clip_low` (r < 1) and `clip_high` (r > 1) of
    it; `zero_advantage`, the tokens of advantage 0; and where the sample has what they need: `kl`
    (k3 against the reference, nats), `entropy` (nats), `sampler_logp_diff` (|log π_old − log
    π_sampler|).
    """
    return over_samples(
        lambda logp_T, sample: _diagnose(objective, logp_T, sample), logp_PGT, samples_PG
    )
