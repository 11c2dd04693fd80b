"""One GRPO update as a pure function: micro-batches by scan, `Mean` pairs, one division, Optax.

The gradient of a loss Σ total / Σ weight is accumulated as the gradient of Σ total and divided once
by the global weight, so that it does not depend on the number of micro-batches or devices, whatever
the completions' lengths.

Left out on purpose: compilation and donation (the caller jits: `jax.jit(step, donate_argnums=0)`),
data, logging.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.inference.critic import Critic, policy_of
from grpo_jax.inference.logprobs import completion_scores
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.objectives import (
    AdaptiveObjective,
    Objective,
    batch_loss,
    diagnostics,
    objective_at,
    reads_in_loss,
)
from grpo_jax.options import Sampling, Update
from grpo_jax.training.finite import (
    INFINITE,
    SKIPPED,
    all_finite,
    finite_update,
    optimizer_update,
    single,
)
from grpo_jax.types import Array, Batch, Mean, Params, Rollout, Sample, TrainState, add_means


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first update; the optimiser's state is float32 whatever `params` are."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(single(params)))


class Moment(NamedTuple):
    """Which epoch on a batch this is, and how many updates lay behind the first one."""

    epoch: int
    updates: Array


class StepParts(NamedTuple):
    """What an update is made of, once its objective's state is known."""

    model: LanguageModel
    objective: Objective
    optimizer: optax.GradientTransformation
    update: Update
    sampling: Sampling
    critic: Critic | None
    axis_name: str | None
    fields: frozenset[str]  # what the loss reads of a sample

    @property
    def cuts(self) -> int:
        return self.update.microbatches * self.update.group_microbatches

    def everywhere(self, sums: Any) -> Any:
        """Sums over devices, where a mapped axis spreads the batch over them."""
        return jax.lax.psum(sums, self.axis_name) if self.axis_name else sums


def make_train_step(
    model: LanguageModel,
    objective: Objective | AdaptiveObjective,
    optimizer: optax.GradientTransformation,
    *,
    update: Update = Update(),
    sampling: Sampling = Sampling(),
    critic: Critic | None = None,
    axis_name: str | None = None,
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """`step(state, batch, objective_state=None) -> (state, metrics)`: μ updates, π_old fixed.

    Each of `update.epochs` computes `∇ (Σ total / Σ weight)` of the objective's loss over the whole
    batch, in `microbatches × group_microbatches` parts, and applies one update of the optimiser.
    The batch's prompts must be divisible by `microbatches`, its group size by `group_microbatches`
    (for groups too large for memory; the prompt is then computed once a part).

    `update.old_logp` says what π_old is. "sampler": `samples.old_logp_T` as the batch has it (the
    sampler's own log-probabilities; ratios are 1 up to rounding). "first_epoch": the first epoch's
    own log-probabilities, at no further cost (ratios are exactly 1 there). "auto": the first
    epoch's for prompts that these very parameters sampled (`rollout.update_P` says so), and for all
    of them where the loss reads `sampler_logp_T` and corrects for the sampler by itself; the
    sampler's for prompts that an older policy sampled, and where nobody says which one did.

    Metrics: `loss`, `grad_norm` (before the optimiser's own clipping) and the objective's
    diagnostics; `sampler_logp_diff`, the mean of |log π − log π_sampler| in the first epoch over
    the tokens that these very parameters sampled, is rounding noise unless sampler and trainer
    disagree; `frac_fresh` is those tokens' share, where `rollout.update_P` is known.
    `frac_skipped` is the share of updates that were not applied because their loss or gradient is
    not finite (`TrainState.step` does not count them), `infinite_params` is 1 where the new
    parameters hold a number that is not.

    Args:
      model: pure functions of one sequence.
      objective: what is optimised.
      optimizer: an Optax transformation.
      update: epochs, micro-batches, what π_old is.
      sampling: the distribution that the completions were drawn from.
      critic: for a loss that reads `value_T`; parameters are then `{"policy": …, "critic": …}`.
      axis_name: a mapped axis that pairs and gradients are summed over before the division.

    Raises:
      OptionError: an option is out of its range.
      ValueError: the loss reads values and there is no critic.
    """
    update.check()
    sampling.check_training()
    fields = reads_in_loss(objective)
    if "value_T" in fields and critic is None:
        raise ValueError("the objective reads value_T: pass a critic, such as value_network(model)")

    def step(state: TrainState, batch: Batch, objective_state: Any = None):
        bound = objective_at(objective, objective_state)
        parts = StepParts(model, bound, optimizer, update, sampling, critic, axis_name, fields)
        return take_step(parts, state, batch)

    return step


def take_step(s: StepParts, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
    """The updates of one batch, and the mean of each metric over the epochs that have it."""
    number, params, opt_state = state
    rest = batch.rest or {}
    parts = cut(batch._replace(rest=None), s.update.microbatches, s.update.group_microbatches)
    history = []
    applied = jnp.zeros((), jnp.int32)
    for epoch in range(s.update.epochs):
        grads, loss, seen, old = gradient(s, params, parts, Moment(epoch, number), rest)
        parts = parts._replace(samples=parts.samples._replace(old_logp_T=old))
        values = {name: mean.value() for name, mean in seen.items()}
        values |= {"loss": loss.value(), "grad_norm": optax.tree.norm(grads)}
        finite = jnp.isfinite(values["loss"]) & jnp.isfinite(values["grad_norm"])
        move = optimizer_update(s.optimizer)
        params, opt_state = finite_update(move, grads, opt_state, params, finite)
        applied = applied + finite
        history.append(values)
    told = {SKIPPED: 1 - applied / s.update.epochs, INFINITE: ~all_finite(params)}
    return TrainState(number + applied, params, opt_state), mean_of_epochs(history) | told


def mean_of_epochs(history: list[dict[str, Array]]) -> dict[str, Array]:
    """The mean of every metric over the epochs that measured it."""
    having = {name: [epoch[name] for epoch in history if name in epoch] for name in history[0]}
    return {name: sum(values) / len(values) for name, values in having.items()}


def gradient(
    s: StepParts, params: Params, parts: Batch, at: Moment, rest: dict[str, Mean]
) -> tuple[Params, Mean, dict[str, Mean], Array]:
    """The float32 gradient of a batch's loss, its pairs, and π_old of every part."""
    if s.cuts == 1:
        return gradient_at_once(s, params, jax.tree.map(lambda x: x[0], parts), at, rest)

    def one(part):
        valued = jax.value_and_grad(part_loss, argnums=1, has_aux=True)
        (_, (loss, seen, old)), grads = valued(s, params, part, at)
        return (single(grads), loss, seen), old

    def add(sums, part):
        more, old = one(part)
        return add_means(sums, more), old

    shapes = jax.eval_shape(lambda: one(jax.tree.map(lambda x: x[0], parts))[0])
    zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    (grads, loss, seen), old = jax.lax.scan(add, zeros, parts)
    loss, seen, scale = whole_batch(s, loss, seen, rest)
    return jax.tree.map(lambda g: g * scale, s.everywhere(grads)), loss, seen, old


def gradient_at_once(s: StepParts, params, part: Batch, at: Moment, rest: dict[str, Mean]):
    """As `gradient`, of a batch that is not cut.

    The division goes in where the backward pass begins, so that no second copy of the gradient
    exists, which is as large as the model.
    """
    of_params = lambda params: part_loss(s, params, part, at)
    _, pull, (loss, seen, old) = jax.vjp(of_params, params, has_aux=True)
    loss, seen, scale = whole_batch(s, loss, seen, rest)
    return s.everywhere(single(pull(scale)[0])), loss, seen, old[None]


def whole_batch(s: StepParts, loss: Mean, seen: dict[str, Mean], rest: dict[str, Mean]):
    """Pairs of the whole batch, and what the one division makes of a gradient of totals."""
    loss, seen = s.everywhere((loss, seen))
    if rest:
        loss = add_means(loss, rest["loss"])
        seen = {name: add_means(x, rest[name]) if name in rest else x for name, x in seen.items()}
    positive = jnp.where(loss.weight > 0, loss.weight, 1.0)
    return loss, seen, jnp.where(loss.weight > 0, 1.0 / positive, 0.0)


def part_loss(s: StepParts, params: Params, part: Batch, at: Moment):
    """The loss of a part of the batch: its total, and with it pairs, diagnostics and π_old."""
    rollout = part.rollout
    logp, entropy = completion_scores(
        s.model,
        policy_of(s.critic, params),
        rollout.prompts,
        rollout.tokens_PGT,
        rollout.mask_PGT,
        token_index_PN=rollout.token_index_PN,
        sampling=s.sampling,
        with_entropy="entropy_T" in s.fields,
        chunk=s.update.logit_chunk,
    )
    fixed = jax.lax.stop_gradient(logp)
    samples = part.samples._replace(old_logp_T=old_logp(s, at, fixed, rollout, part.samples))
    if "entropy_T" in s.fields:
        samples = samples._replace(entropy_T=entropy)
    if "value_T" in s.fields:
        values = s.critic.values(params["critic"], rollout.prompts, rollout.tokens_PGT)
        samples = samples._replace(value_T=values)
    loss = batch_loss(s.objective, logp, samples)
    seen = diagnostics(s.objective, fixed, jax.lax.stop_gradient(samples))
    seen.pop("sampler_logp_diff", None)  # that of π_old
    if at.epoch == 0:  # later the parameters have moved: what differs then is not the sampler
        seen |= sampler_difference(at, fixed, rollout)
    return loss.total, (loss, seen, samples.old_logp_T)


def own_old_logp(mode: str, objective: Objective | AdaptiveObjective) -> bool:
    """Whether π_old is the first epoch's own policy, also where a batch is not fresh."""
    corrects = "sampler_logp_T" in reads_in_loss(objective)
    return mode == "first_epoch" or (mode == "auto" and corrects)


def old_logp(s: StepParts, at: Moment, fixed: Array, rollout: Rollout, samples: Sample) -> Array:
    """log π_old of a part of the batch; see `make_train_step`."""
    mode = s.update.old_logp
    if at.epoch > 0 or mode == "sampler":
        return samples.old_logp_T
    if mode == "first_epoch" or "sampler_logp_T" in s.fields:
        return fixed
    fresh_P = fresh_prompts(rollout, at.updates)
    return samples.old_logp_T if fresh_P is None else by_prompt(fresh_P, fixed, samples.old_logp_T)


def fresh_prompts(rollout: Rollout, updates: Array) -> Array | None:
    """Which prompts these very parameters sampled; None where nobody says."""
    return None if rollout.update_P is None else rollout.update_P == updates


def by_prompt(chosen_P: Array, yes_PGT: Array, no_PGT: Array) -> Array:
    return jnp.where(chosen_P[:, None, None], yes_PGT, no_PGT)


def sampler_difference(at: Moment, fixed: Array, rollout: Rollout) -> dict[str, Mean]:
    """|log π − log π_sampler| over the tokens that these very parameters sampled, and their share.

    Over no others: an older policy's differ because the policy has moved.
    """
    mask_PGT = rollout.mask_PGT
    tokens = mask_PGT.sum().astype(jnp.float32)
    fresh_P = fresh_prompts(rollout, at.updates)
    if fresh_P is not None:
        mask_PGT = by_prompt(fresh_P, mask_PGT, False)
    count = mask_PGT.sum().astype(jnp.float32)
    difference = jnp.where(mask_PGT, jnp.abs(fixed - rollout.logp_PGT), 0.0)
    found = {"sampler_logp_diff": Mean(difference.sum(), count)}
    return found if fresh_P is None else found | {"frac_fresh": Mean(count, tokens)}


def cut(batch: Batch, microbatches: int, group_microbatches: int) -> Batch:
    """Cuts P into `microbatches` and G into `group_microbatches` parts: `[cuts, P/m, G/g, ...]`.

    Parts are strided, not contiguous: when P is sharded over devices every micro-batch spans all of
    them. A prompt whose group is cut goes with each part.
    """
    m, g = microbatches, group_microbatches
    P, G = batch.rollout.tokens_PGT.shape[:2]
    if P % m or G % g:
        raise ValueError(
            f"a batch of {P} prompts × {G} completions cannot be cut into {m} × {g} equal "
            f"micro-batches: microbatches must divide {P} and group_microbatches must divide {G}"
        )
    if g > 1 and batch.rollout.token_index_PN is not None:
        raise ValueError(
            "a packed batch lists the tokens of whole groups: it goes with group_microbatches=1"
        )

    def groups(x):
        x = x.reshape(P // m, m, G // g, g, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 1)).reshape(m * g, P // m, G // g, *x.shape[4:])

    def prompts(x):
        x = jnp.moveaxis(x.reshape(P // m, m, *x.shape[1:]), 1, 0)
        return jnp.repeat(x, g, axis=0)

    # What belongs to a prompt as a whole, and has no axis of completions.
    names = ("prompts", "token_index_PN", "row_P", "update_P")
    of_prompts = {name: getattr(batch.rollout, name) for name in names}
    without = batch.rollout._replace(**dict.fromkeys(names))
    parts = jax.tree.map(groups, batch._replace(rollout=without))
    return parts._replace(rollout=parts.rollout._replace(**jax.tree.map(prompts, of_prompts)))
