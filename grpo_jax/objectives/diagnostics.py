"""What a step should show of an objective, found from its own functions.

Nothing is declared by hand: a token is clipped if its surrogate has no gradient, so that a user's
own variant is described as exactly as a preset.
"""

import jax
import jax.numpy as jnp

from grpo_jax.objectives.compose import (
    Loss,
    Objective,
    batch_loss,
    composed,
    core,
    neutralise,
    over_samples,
    seen_by_core,
    surrogate_costs,
)
from grpo_jax.objectives.divergences import k3
from grpo_jax.objectives.exponentials import bounded_exp
from grpo_jax.objectives.ratios import per_token
from grpo_jax.objectives.tracing import fields_read
from grpo_jax.types import Array, Mean, Sample


def _log_ratio(loss: Loss, logp_T: Array, sample: Sample) -> Array:
    """As the composed loss inside takes it; of the tokens, for one that was written whole."""
    parts = getattr(core(loss), "keywords", None)
    if parts is None:
        return per_token(logp_T, sample.old_logp_T, sample.mask_T)
    return surrogate_costs(logp_T, sample, ratio=parts["ratio"], surrogate=parts["surrogate"])[1]


def _surrogate_gradient(loss: Loss, logp_T: Array, sample: Sample) -> Array:
    """∂/∂log π_t of what the advantage is in: without a KL, an entropy bonus, values.

    Of a composed loss, the sum of its surrogates. Of one that was written whole, what the gradient
    is more than at advantage 0.
    """
    if getattr(loss, "func", None) is composed:
        chosen = {name: loss.keywords[name] for name in ("ratio", "surrogate")}

        def cost(x_T: Array) -> Array:
            cost_T, _ = surrogate_costs(x_T, sample, **chosen)
            return jnp.sum(jnp.where(sample.mask_T, cost_T, 0.0))

        return jax.grad(cost)(logp_T)

    def gradient(adv: Array) -> Array:
        return jax.grad(lambda x_T: loss(x_T, sample._replace(adv=adv)).total)(logp_T)

    return gradient(sample.adv) - gradient(jnp.zeros_like(sample.adv))


def _clipped(silent_T: Array, log_ratio_T: Array) -> dict[str, Array]:
    return {
        "clip_fraction": silent_T,
        "clip_low": silent_T & (log_ratio_T < 0),
        "clip_high": silent_T & (log_ratio_T > 0),
    }


def _diagnose(
    objective: Objective, logp_T: Array, sample: Sample, *, with_clips: bool
) -> dict[str, Mean]:
    logp_T, sample = neutralise(jax.lax.stop_gradient(logp_T), sample)
    loss, logp_T, sample = seen_by_core(objective.loss, logp_T, sample)
    log_ratio_T = _log_ratio(loss, logp_T, sample)
    adv_T = jnp.broadcast_to(sample.adv, logp_T.shape)
    values = {"ratio": bounded_exp(log_ratio_T), "zero_advantage": adv_T == 0}
    if with_clips:
        silent_T = (_surrogate_gradient(loss, logp_T, sample) == 0) & (adv_T != 0)
        values |= _clipped(silent_T, log_ratio_T)
    if sample.ref_logp_T is not None:
        values["kl"] = k3(logp_T, sample.ref_logp_T)
    if sample.entropy_T is not None:
        values["entropy"] = jax.lax.stop_gradient(sample.entropy_T)

    def mean(x_T: Array, mask_T: Array) -> Mean:
        return Mean(jnp.sum(jnp.where(mask_T, x_T, 0.0)), jnp.sum(mask_T).astype(logp_T.dtype))

    means = {name: mean(x_T, sample.mask_T) for name, x_T in values.items()}
    if sample.sampler_logp_T is not None:
        difference_T = jnp.abs(sample.old_logp_T - sample.sampler_logp_T)
        known_T = sample.mask_T & ~jnp.isnan(sample.sampler_logp_T)  # NaN: it could not score it
        means["sampler_logp_diff"] = mean(difference_T, known_T)
    return means


def diagnostics(objective: Objective, logp_PGT: Array, samples_PG: Sample) -> dict[str, Mean]:
    """Means over the trained tokens, which add up over micro-batches as the loss does.

    `ratio` (π/π_old as the objective takes it, or of the tokens for a loss that was written whole);
    `clip_fraction`, the tokens whose surrogate has no gradient although their advantage is not 0,
    with `clip_low` (r < 1) and `clip_high` (r > 1) of it, absent where the loss reads no advantage;
    `zero_advantage`, the tokens of advantage 0; and where the sample has what they need: `kl` (k3
    against the reference, nats), `entropy` (nats), `sampler_logp_diff` (|log π_old − log
    π_sampler|).
    """
    loss = lambda _, logp, samples: batch_loss(objective, logp, samples)
    with_clips = "adv" in fields_read(loss, None, logp_PGT, samples_PG)

    def one(logp_T: Array, sample: Sample) -> dict[str, Mean]:
        return _diagnose(objective, logp_T, sample, with_clips=with_clips)

    return over_samples(one, logp_PGT, samples_PG)
