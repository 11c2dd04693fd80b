"""One GRPO update as a pure function: micro-batches by scan, `Mean` pairs, one division, one Optax
update an epoch.

The gradient of a loss Σ total / Σ weight is accumulated as the gradient of Σ total and divided once
by the global weight, so that it does not depend on the number of micro-batches or devices, whatever
the completions' lengths.

Left out on purpose: compilation and donation (the caller jits: `jax.jit(step, donate_argnums=0)`),
data, logging.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from grpo_jax.inference.critic import Critic, policy_of
from grpo_jax.inference.logprobs import Sampling, completion_scores
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.objectives import Objective, batch_loss, diagnostics, reads_in_loss
from grpo_jax.types import Array, Batch, Mean, Params, TrainState, add_means

OLD_LOGP = ("sampler", "first_epoch")


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first update."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def cut(batch: Batch, microbatches: int, group_microbatches: int) -> Batch:
    """Cuts P into `microbatches` and G into `group_microbatches` parts: `[cuts, P/m, G/g, ...]`
    leaves.

    Components are strided, not contiguous: when P is sharded over devices every micro-batch spans
    all of them. A prompt whose group is cut goes with each part.
    """
    m = microbatches
    g = group_microbatches
    P, G = batch.rollout.tokens_PGT.shape[:2]
    if P % m or G % g:
        raise ValueError(
            f"a batch of {P} prompts × {G} completions cannot be cut into {m} × {g} equal micro-batches: "
            f"microbatches must divide {P} and group_microbatches must divide {G}"
        )

    def groups(x):
        x = x.reshape(P // m, m, G // g, g, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 1)).reshape(m * g, P // m, G // g, *x.shape[4:])

    def prompts(x):
        x = jnp.moveaxis(x.reshape(P // m, m, *x.shape[1:]), 1, 0)
        return jnp.repeat(x, g, axis=0)

    if g > 1 and batch.rollout.token_index_PN is not None:
        raise ValueError(
            "a packed batch lists the tokens of whole groups: it goes with group_microbatches=1 only"
        )
    parts = jax.tree.map(
        groups, batch._replace(rollout=batch.rollout._replace(prompts=None, token_index_PN=None))
    )
    whole = jax.tree.map(prompts, (batch.rollout.prompts, batch.rollout.token_index_PN))
    return parts._replace(rollout=parts.rollout._replace(prompts=whole[0], token_index_PN=whole[1]))


def make_train_step(
    model: LanguageModel,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    group_microbatches: int = 1,
    epochs: int = 1,
    sampling: Sampling = Sampling(),
    old_logp: str = "sampler",
    critic: Critic | None = None,
    axis_name: str | None = None,
    chunk: int | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
    """`step(state, batch) -> (state, metrics)`: `epochs` updates (the paper's μ) on one batch,
    π_old fixed.

    Each epoch computes `∇ (Σ total / Σ weight)` of `objective.loss` over the whole batch in
    `microbatches × group_microbatches` parts and applies one `optimizer` update. The batch's
    prompts must be divisible by `microbatches`, its group size by `group_microbatches` (for groups
    too large for memory; the prompt is then computed once a part).

    `sampling` is the distribution the rollout was drawn from. `old_logp` says what π_old is:
    "sampler" keeps `samples.old_logp_T` as the batch has it (the sampler's own log-probabilities:
    ratios are 1 up to rounding), "first_epoch" takes the first epoch's own log-probabilities
    (ratios are exactly 1 there, at no further cost; right when the batch was sampled from these
    very parameters). With `axis_name`, pairs and gradients are summed over that mapped axis before
    the division. `chunk` is the number of tokens projected on the vocabulary at a time; None: as
    many as the logits' memory allows (`policy.LOGITS`).

    An objective that reads `value_T` needs a `critic`; parameters are then `{"policy": …, "critic":
    …}`.

    Metrics: `loss`, `grad_norm` (before the optimiser's own clipping), the objective's diagnostics,
    and `sampler_logp_diff`, the mean of |log π − log π_sampler| in the first epoch, which is
    rounding noise unless sampler and trainer disagree.
    """
    for name, value in (
        ("microbatches", microbatches),
        ("group_microbatches", group_microbatches),
        ("epochs", epochs),
    ):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if old_logp not in OLD_LOGP:
        raise ValueError(f"old_logp must be one of {OLD_LOGP}, got {old_logp!r}")
    sampling.checked()
    if sampling.temperature == 0:
        raise ValueError(
            "temperature must be above 0 in training: a greedy sampler has no policy gradient"
        )
    fields = reads_in_loss(objective)
    with_entropy = "entropy_T" in fields
    with_value = "value_T" in fields
    if with_value and critic is None:
        raise ValueError("the objective reads value_T: pass a critic, such as value_network(model)")
    cuts = microbatches * group_microbatches

    def part_loss(params: Params, part: Batch, own_old: bool):
        rollout = part.rollout
        samples = part.samples
        logp, entropy = completion_scores(
            model,
            policy_of(critic, params),
            rollout.prompts,
            rollout.tokens_PGT,
            rollout.mask_PGT,
            token_index_PN=rollout.token_index_PN,
            sampling=sampling,
            with_entropy=with_entropy,
            chunk=chunk,
        )
        fixed = jax.lax.stop_gradient(logp)
        samples = samples._replace(
            old_logp_T=fixed if own_old else samples.old_logp_T,
            entropy_T=entropy if with_entropy else samples.entropy_T,
        )
        if with_value:
            samples = samples._replace(
                value_T=critic.values(params["critic"], rollout.prompts, rollout.tokens_PGT)
            )
        loss = batch_loss(objective, logp, samples)
        gap = jnp.where(rollout.mask_PGT, jnp.abs(fixed - rollout.logp_PGT), 0.0)
        seen = diagnostics(objective, fixed, jax.lax.stop_gradient(samples))
        seen["sampler_logp_diff"] = Mean(gap.sum(), rollout.mask_PGT.sum().astype(jnp.float32))
        return loss.total, (loss, seen, fixed)

    everywhere = lambda sums: jax.lax.psum(sums, axis_name) if axis_name else sums

    def whole(loss: Mean, seen: dict[str, Mean], rest: dict[str, Mean]):
        """Pairs of the whole batch, and the one division: what its weight makes of a gradient of
        totals.
        """
        loss, seen = everywhere((loss, seen))
        if rest:
            loss = add_means(loss, rest["loss"])
            seen = {
                name: add_means(mean, rest[name]) if name in rest else mean
                for name, mean in seen.items()
            }
        return (
            loss,
            seen,
            jnp.where(loss.weight > 0, 1.0 / jnp.where(loss.weight > 0, loss.weight, 1.0), 0.0),
        )

    def gradient(params: Params, parts: Batch, own_old: bool, rest: dict[str, Mean]):
        """The float32 gradient of the batch's loss, its pairs, and every part's
        log-probabilities.
        """
        single = lambda g: g.astype(jnp.float32)
        if (
            cuts == 1
        ):  # the division goes in where the backward pass begins: no second copy of the gradient
            part = jax.tree.map(lambda x: x[0], parts)
            _, pull, (loss, seen, logp) = jax.vjp(
                lambda p: part_loss(p, part, own_old), params, has_aux=True
            )
            loss, seen, scale = whole(loss, seen, rest)
            return everywhere(jax.tree.map(single, pull(scale)[0])), loss, seen, logp[None]

        def one(part):
            (_, (loss, seen, logp)), grads = jax.value_and_grad(part_loss, has_aux=True)(
                params, part, own_old
            )
            return (jax.tree.map(single, grads), loss, seen), logp

        def body(sums, part):
            more, logp = one(part)
            return add_means(sums, more), logp

        shapes = jax.eval_shape(lambda: one(jax.tree.map(lambda x: x[0], parts))[0])
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        (grads, loss, seen), logp = jax.lax.scan(body, zeros, parts)
        loss, seen, scale = whole(loss, seen, rest)
        return jax.tree.map(lambda g: g * scale, everywhere(grads)), loss, seen, logp

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        _, params, opt_state = state
        rest = batch.rest or {}
        parts = cut(batch._replace(rest=None), microbatches, group_microbatches)
        history = []
        for epoch in range(epochs):
            own_old = old_logp == "first_epoch" and epoch == 0
            grads, loss, seen, logp = gradient(params, parts, own_old, rest)
            if own_old:
                parts = parts._replace(samples=parts.samples._replace(old_logp_T=logp))
            if epoch > 0:
                del seen["sampler_logp_diff"]
            history.append(
                {"loss": loss.value(), "grad_norm": optax.tree.norm(grads)} | _values(seen)
            )
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        metrics = {
            name: sum(h[name] for h in history if name in h) / sum(name in h for h in history)
            for name in history[0]
        }
        return TrainState(state.step + epochs, params, opt_state), metrics

    return step


def _values(means: dict[str, Mean]) -> dict[str, Array]:
    return {name: mean.value() for name, mean in means.items()}
