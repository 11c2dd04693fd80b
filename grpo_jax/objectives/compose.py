"""Objective and compose: parts written for a token, a sequence or a group, put together and mapped
over a batch.

    cost_t = w_t · surrogate(log_ratio_t, A_t) + β · divergence(log π_t, log π_ref,t) + Σ terms_t
    loss   = aggregate(cost_T, mask_T), a `Mean`

Padding is neutralised here, by `where` before any exponential, so that parts never meet it. Left
out on purpose: a class to inherit, a registry, and any reduction but a sum of `Mean` pairs.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.objectives.advantages import PROMPT_AXIS, Advantage
from grpo_jax.objectives.divergences import k1
from grpo_jax.objectives.values import is_off, not_negative
from grpo_jax.types import Array, Mean, Sample

Loss = Callable[[Array, Sample], Mean]
Prepare = Callable[[Sample], Sample]
Term = Callable[[Sample], Array]


class _Functions(NamedTuple):
    advantage: Advantage
    loss: Loss
    prepare: Callable | None = None


class Objective(_Functions):
    """A pair of pure functions, and a third for what needs a whole batch.

    `advantage` maps the rewards of one group (reward_G, or reward_NG for several rewards) to adv_G;
    `loss` maps one sequence (logp_T, Sample) to a `Mean`; `prepare` maps the samples of the whole
    batch, leading axes P and G, once before the epochs on it: quantiles, whitening and process
    advantages live there, so that cutting the batch into micro-batches later changes nothing.
    A preparation that takes `advantage` or `loss` by keyword is given the objective's own; one that
    takes the loss comes last. `print(objective)` shows the recipe.
    """

    __slots__ = ()

    @property
    def prepare(self) -> Prepare | None:
        """The preparation, with what it takes of this objective."""
        steps = sorted(prepare_steps(self), key=lambda step: "loss" in _taken(step))
        steps = tuple(_given(step, self) for step in steps)
        if len(steps) < 2:
            return steps[0] if steps else None
        return functools.partial(in_turn, steps=steps)

    def __repr__(self) -> str:
        named = (
            (name, part) for name, part in zip(self._fields, self, strict=True) if part is not None
        )
        return (
            "Objective(\n" + "".join(f"    {name}={recipe(part)},\n" for name, part in named) + ")"
        )


def recipe(part: object) -> str:
    """How a part was bound, as one would write it: `clipped(low=0.2, high=0.28)`."""
    if isinstance(part, functools.partial):
        if part.func is composed:
            parts = dict(part.keywords)
            kl = (
                {}
                if parts["divergence"] is None
                else {"divergence": parts["divergence"], "beta": parts["beta"]}
            )
            named = functools.partial(
                compose, parts["ratio"], parts["surrogate"], parts["aggregate"], **kl
            )
            return recipe(named) + "".join(f" + {recipe(term)}" for term in parts["terms"])
        arguments = [recipe(value) for value in part.args]
        arguments += [
            f"{name}={recipe(value)}"
            for name, value in part.keywords.items()
            if value is not None and not (isinstance(value, tuple) and not value)
        ]
        return f"{recipe(part.func)}({', '.join(arguments)})"
    if isinstance(part, tuple | list):
        return f"({', '.join(map(recipe, part))})"
    if isinstance(part, jax.core.Tracer):
        return f"traced {part.aval.str_short()}"
    if isinstance(part, jax.Array | np.ndarray | np.generic):
        return f"{part:.6g}" if np.ndim(part) == 0 else np.array2string(np.asarray(part))
    return getattr(part, "__name__", None) or repr(part)


def wants(part: Callable, name: str) -> bool:
    """Whether a part still takes an argument of that name: what it does not ask for, it does not
    get.
    """
    parameter = inspect.signature(part).parameters.get(name)
    return parameter is not None and parameter.kind is not inspect.Parameter.KEYWORD_ONLY


def _taken(step: Callable) -> list[str]:
    """Which functions of its objective a preparation takes and was not bound to."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except ValueError:  # written in C
        return []
    unbound = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    return [name for name in ("advantage", "loss") if name in unbound]


def _given(step: Callable, objective: Objective) -> Prepare:
    own = {name: getattr(objective, name) for name in _taken(step)}
    return functools.partial(step, **own) if own else step


def neutralise(logp_T: Array, sample: Sample) -> tuple[Array, Sample]:
    """Replaces whatever stands in masked positions, in every field, and detaches what is not of the
    current policy.
    """
    keep_T = sample.mask_T

    def clean(x: Array | float | None, fill: float = 0.0) -> Array | float | None:
        return x if x is None or jnp.ndim(x) == 0 else jnp.where(keep_T, x, fill)

    fixed = (
        "old_logp_T",
        "ref_logp_T",
        "sampler_logp_T",
        "weight_T",
        "adv",
        "old_value_T",
        "return_T",
    )
    fields = {name: getattr(sample, name) for name in fixed}
    cleaned = {
        name: x if x is None else jax.lax.stop_gradient(clean(x)) for name, x in fields.items()
    }
    return clean(logp_T), sample._replace(
        **cleaned,
        reward_T=clean(sample.reward_T, jnp.nan),
        entropy_T=clean(sample.entropy_T),
        value_T=clean(sample.value_T),
    )


def compose(ratio, surrogate, aggregate, *, divergence=None, beta=0.0) -> Loss:
    """Binds parts to a loss (logp_T, Sample) -> Mean, after checking that they fit.

    `ratio(logp_T, old_logp_T, mask_T)`, `surrogate(log_ratio, adv)`, `aggregate(x_T, mask_T)` and
    `divergence(logp, ref_logp)` are functions with their own parameters already bound by
    `functools.partial`. A surrogate is given log-ratios of any size, sums over a sequence among
    them: one that exponentiates them does so with `bounded_exp`, to stay finite.
    """
    _check_beta(divergence, beta)
    x_T = jax.ShapeDtypeStruct((3,), jnp.float32)
    mask_T = jax.ShapeDtypeStruct((3,), jnp.bool_)
    ratio_inputs = [x_T, x_T, mask_T] + [x_T] * wants_if_callable(ratio, "adv")
    _check_part("ratio", ratio, "(logp_T, old_logp_T, mask_T)", ratio_inputs, _is_token_array)
    _check_part("surrogate", surrogate, "(log_ratio, adv)", [x_T, x_T], _is_token_array)
    _check_part("aggregate", aggregate, "(x_T, mask_T)", [x_T, mask_T], _is_mean)
    if divergence is not None:
        inputs = [x_T, x_T] + [x_T] * wants_if_callable(divergence, "log_ratio")
        _check_part("divergence", divergence, "(logp, ref_logp)", inputs, _is_token_array)
    parts = {"ratio": ratio, "surrogate": surrogate, "aggregate": aggregate}
    return functools.partial(composed, **parts, divergence=divergence, beta=beta, terms=())


def wants_if_callable(part: object, name: str) -> bool:
    return callable(part) and wants(part, name)


def _check_beta(divergence: Callable | None, beta: float | Array) -> None:
    not_negative(beta=beta)
    if divergence is None and not is_off(beta):
        raise ValueError(
            f"beta={recipe(beta)} weighs a divergence, but none is given: add divergence=k3 or "
            "set beta=0."
        )
    if getattr(divergence, "func", divergence) is k1:
        raise ValueError(
            "divergence=k1 in the loss has an expected gradient of zero, E[∇(log π − log π_ref)] "
            "= 0, so it would not hold the policy at all: use k2 or k3 in the loss, or k1 in the "
            "reward with kl_in_reward."
        )


def _is_token_array(out: object) -> bool:
    return getattr(out, "shape", None) == (3,)


def _is_mean(out: object) -> bool:
    return isinstance(out, Mean) and out.total.shape == () and out.weight.shape == ()


def _check_part(
    role: str, part: object, form: str, inputs: list, fits: Callable[[object], bool]
) -> None:
    """Calls a part on shapes alone, so that a misfit is an error here and not in the first training
    step.
    """
    if not callable(part):
        raise TypeError(f"{role} must be a function {form}, got {part!r}.")
    try:
        inspect.signature(part).bind(*inputs)
    except TypeError as error:
        raise TypeError(
            f"{role}={recipe(part)} cannot be called as {form}: {error}. Bind its options first."
        ) from None
    out = jax.eval_shape(part, *inputs)
    if not fits(out):
        expected = "a Mean of two scalars" if fits is _is_mean else "one value a token"
        raise TypeError(f"{role}={recipe(part)} must return {expected}, got {out}.")


def surrogate_costs(logp_T: Array, sample: Sample, *, ratio, surrogate) -> tuple[Array, Array]:
    """The weighted surrogate of each token, and the log-ratio that it was computed from."""
    adv_T = jnp.broadcast_to(sample.adv, logp_T.shape)
    more = (adv_T,) if wants(ratio, "adv") else ()
    log_ratio_T = ratio(logp_T, sample.old_logp_T, sample.mask_T, *more)
    cost_T = surrogate(log_ratio_T, adv_T)
    return (cost_T if sample.weight_T is None else sample.weight_T * cost_T), log_ratio_T


def composed(
    logp_T: Array, sample: Sample, *, ratio, surrogate, aggregate, divergence, beta, terms
) -> Mean:
    """The loss that `compose` binds; see the equation at the top of this file."""
    logp_T, sample = neutralise(logp_T, sample)
    cost_T, log_ratio_T = surrogate_costs(logp_T, sample, ratio=ratio, surrogate=surrogate)
    if divergence is not None and not is_off(beta):
        ref_logp_T = need(sample, "ref_logp_T", recipe(divergence))
        more = (log_ratio_T,) if wants(divergence, "log_ratio") else ()
        cost_T = cost_T + beta * divergence(logp_T, ref_logp_T, *more)
    for term in terms:
        cost_T = cost_T + term(sample)
    return aggregate(cost_T, sample.mask_T)


def corrected(
    logp_T: Array, sample: Sample, *, adjust: Callable[[Array, Sample], Sample], loss: Loss
) -> Mean:
    """A loss on samples that were adjusted first: reweighted, or some of their tokens left out."""
    return loss(*_adjusted(logp_T, sample, adjust))


def _adjusted(logp_T: Array, sample: Sample, adjust: Callable) -> tuple[Array, Sample]:
    logp_T, sample = neutralise(logp_T, sample)
    return neutralise(logp_T, adjust(jax.lax.stop_gradient(logp_T), sample))


def group_share(logp_T: Array, sample: Sample, *, loss: Loss) -> Mean:
    """A loss divided by the trained tokens of the sequence's group."""
    total, weight = loss(logp_T, sample)
    tokens = jnp.maximum(need(sample, "group_tokens", "per_group"), 1)
    return Mean(total / tokens, weight / tokens)


def seen_by_core(loss: Loss, logp_T: Array, sample: Sample) -> tuple[Loss, Array, Sample]:
    """The loss inside its corrections, and what they hand on to it."""
    while getattr(loss, "func", None) in (corrected, group_share):
        if loss.func is corrected:
            logp_T, sample = _adjusted(logp_T, sample, loss.keywords["adjust"])
        loss = loss.keywords["loss"]
    return loss, logp_T, sample


def need(sample: Sample, field: str, reader: str) -> Array:
    """A field of the sample, or an error that says who reads it."""
    value = getattr(sample, field)
    if value is None:
        raise ValueError(f"{reader} reads {field}, but the sample has none.")
    return value


def in_turn(samples_PG: Sample, *, steps: tuple[Prepare, ...]) -> Sample:
    """Several preparations, one after the other."""
    for step in steps:
        samples_PG = step(samples_PG)
    return samples_PG


def prepare_steps(objective: Objective) -> tuple[Callable, ...]:
    """The preparations of an objective, as they were given to it."""
    _, _, prepare = tuple(objective)
    return () if prepare is None else _flat(prepare)


def _flat(step: Callable) -> tuple[Callable, ...]:
    if getattr(step, "func", None) is not in_turn:
        return (step,)
    return sum((_flat(inside) for inside in step.keywords["steps"]), ())


def with_steps(objective: Objective, *steps: Callable) -> Objective:
    """The objective with these preparations and no others."""
    several = steps[0] if len(steps) == 1 else functools.partial(in_turn, steps=steps)
    return objective._replace(prepare=several)


def then_prepare(objective: Objective, step: Prepare) -> Objective:
    """The objective with one more preparation, after its own."""
    return with_steps(objective, *prepare_steps(objective), step)


def inner(loss: Loss) -> Loss | None:
    """The loss that a correction is wrapped around; None for one that wraps nothing."""
    return loss.keywords.get("loss") if isinstance(loss, functools.partial) else None


def core(loss: Loss) -> functools.partial | None:
    """The composed loss inside any corrections around it; None for a loss that was written
    whole.
    """
    if inner(loss) is not None:
        return core(inner(loss))
    return loss if getattr(loss, "func", None) is composed else None


def rebind(loss: Loss, change: Callable[[dict], dict]) -> Loss:
    """The same loss with the parts of its core changed by `change(parts) -> parts`."""
    if inner(loss) is not None:
        return functools.partial(
            loss.func, **{**loss.keywords, "loss": rebind(inner(loss), change)}
        )
    if core(loss) is None:
        raise TypeError(
            f"{recipe(loss)} was written whole: only a loss made by compose has parts to change."
        )
    return functools.partial(composed, **{**loss.keywords, **change(loss.keywords)})


def batch_advantages(objective: Objective, reward_PG: Array) -> Array:
    """adv_PG of reward_PG (or of reward_PNG), every group on its own; "prompt" names the axis
    across groups.
    """
    if jnp.ndim(reward_PG) not in (2, 3):
        shape = jnp.shape(reward_PG)
        raise ValueError(f"rewards have the axes P, G (N rewards: P, N, G), got shape {shape}.")
    reward_PG = jnp.asarray(reward_PG)
    adv_PG = jax.vmap(objective.advantage, axis_name=PROMPT_AXIS)(reward_PG)
    P, *_, G = reward_PG.shape
    if jnp.shape(adv_PG) != (P, G):
        shown = _shown(jax.tree.map(lambda x: x[0], adv_PG))
        raise TypeError(
            f"advantage={recipe(objective.advantage)} must return one value for each of the {G} "
            f"completions of a group, got {shown}."
        )
    return adv_PG


def _shown(value: Any) -> str:
    """A wrong result, as an error message tells it."""
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return f"an array of shape {value.shape}" if value.shape else "a scalar"
    return type(value).__name__ if isinstance(value, tuple | list | dict) else repr(value)


def as_mean(value: Any, loss: Loss) -> Mean:
    """What a loss returned, or a TypeError where that is not a `Mean` of two scalars."""
    if isinstance(value, Mean):
        shapes = [jnp.shape(x) for x in value]
        if shapes == [(), ()]:
            return value
        shown = f"a Mean of shapes {shapes[0]} and {shapes[1]}"
    else:
        shown = _shown(value)
    raise TypeError(
        f"loss={recipe(loss)} must return a Mean of two scalars for each sequence, "
        f"Mean(total, weight), got {shown}."
    )


def map_samples(function: Callable, logp_PGT: Array, samples_PG: Sample):
    """`function(logp_T, sample)` for every sequence of a batch."""
    chex.assert_rank(logp_PGT, 3)
    P, G, _ = logp_PGT.shape
    if jnp.ndim(samples_PG.adv) == 0:
        samples_PG = samples_PG._replace(adv=jnp.full((P, G), samples_PG.adv, logp_PGT.dtype))
    chex.assert_tree_shape_prefix((logp_PGT, samples_PG), (P, G))
    return jax.vmap(jax.vmap(function))(logp_PGT, samples_PG)


def over_samples(function: Callable, logp_PGT: Array, samples_PG: Sample):
    """`function(logp_T, sample)` for every sequence of a batch, and the sum of what it returns."""
    out_PG = map_samples(function, logp_PGT, samples_PG)
    return jax.tree.map(lambda x_PG: jnp.sum(x_PG, axis=(0, 1)), out_PG)


def batch_loss(objective: Objective, logp_PGT: Array, samples_PG: Sample) -> Mean:
    """The loss of a batch, or of any piece of it: pieces add up to the whole."""

    def one(logp_T: Array, sample: Sample) -> Mean:
        return as_mean(objective.loss(*neutralise(logp_T, sample)), objective.loss)

    return over_samples(one, logp_PGT, samples_PG)
