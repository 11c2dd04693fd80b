"""What a training loop refuses: before it starts, and where the sampler is not what it trains."""

import math
import warnings
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.inference.critic import Critic
from grpo_jax.inference.tokenizer import Tokenizer
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.objectives import (
    AdaptiveObjective,
    Objective,
    batch_loss,
    check_objective,
    corrects_for_sampler,
    has_ratio_to_old,
    objective_at,
    reads,
)
from grpo_jax.objectives.effects import generic_batch
from grpo_jax.options import Generation, OptionError, Precision, Scoring, Update, instance, whole
from grpo_jax.rewards import reward_functions
from grpo_jax.tasks import Task
from grpo_jax.types import RunState

# Mean |log π − log π_sampler| above which sampler and trainer cannot be the same distribution, by
# the type that the factors of products have. TPUs round those of float32 to bfloat16, GPUs to as
# many bits as float16, unless told else.
LIMITS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
ROUNDED = {"tpu": "bfloat16", "gpu": "float16"}


class SamplerMismatchError(RuntimeError):
    """The trainer's log-probabilities of fresh completions are not those of the sampler."""


def check_task(
    task: Task,
    objective: Objective | AdaptiveObjective,
    scoring: Scoring,
    critic: Critic | None,
) -> None:
    """Raises where a task has nothing to train on, or an objective lacks what it reads."""
    if not isinstance(task, Task):
        raise TypeError(f"task must be a Task, such as pricing(), got {task!r}")
    check_rows(task)
    instance("scoring", scoring, Scoring).check(len(reward_functions(task.reward)))
    check_objective(objective)
    if critic is None and reads(objective) & {"value_T", "old_value_T"}:
        raise ValueError("the objective reads values of a critic: pass critic=value_network(model)")


def check_model(
    model: LanguageModel, tokenizer: Tokenizer, prompt_length: int, max_new_tokens: int
) -> None:
    """Raises where tokenizer and model do not belong together, or positions do not suffice."""
    if not isinstance(tokenizer, Tokenizer):
        raise TypeError(
            "tokenizer must have vocab_size, pad_id, stop_ids, encode, decode and render, as "
            f"load_tokenizer(…) gives, got {tokenizer!r}"
        )
    size = model.config.vocab_size
    named = {"pad_id": [tokenizer.pad_id], "stop_ids": tokenizer.stop_ids}
    for name, ids in named.items():
        if not all(0 <= token < size for token in ids):
            raise ValueError(
                f"the tokenizer's {name} {list(ids)} must be below the model's vocabulary size "
                f"({size}): tokenizer and model do not belong together"
            )
    check_positions(model, prompt_length, max_new_tokens)


def check_float16(model: LanguageModel) -> None:
    """Raises an `OptionError` for a model that is kept or computed in float16."""
    dtype = str(getattr(model.config, "dtype", "float32"))
    params = str(getattr(model.config, "stored_dtype", dtype))
    Precision(params, dtype).check_training()


def check_positions(model: LanguageModel, prompt_length: int, max_new_tokens: int) -> None:
    """Raises an `OptionError` where prompts and completions do not fit the model's positions."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and prompt_length + max_new_tokens > limit:
        raise OptionError(
            "max_new_tokens",
            f"({max_new_tokens}) and prompts of up to {prompt_length} tokens do not fit the "
            f"model's {limit} positions",
        )


def check_rows(task: Task) -> None:
    if not len(task.train):
        raise ValueError(f"task {task.name!r} has no training rows")


def check_steps(steps: int, state: RunState) -> None:
    whole("steps", steps, 0)
    if not isinstance(state, RunState):
        raise TypeError(f"state must be a RunState, as stages.start(params) gives, got {state!r}")


def check_staleness(
    max_staleness: int, objective: Objective | AdaptiveObjective, old_logp: str = "auto"
) -> None:
    """Data of an older policy needs a ratio to it, which corrects for its age.

    Asked is whether the gradient moves with the sampler's log-probabilities, and not whether some
    field is read: a weight π_old/π_sampler is 1 where π_old is the sampler.
    """
    whole("max_staleness", max_staleness, 0)
    if max_staleness and not corrects_for_sampler(objective, old_logp):
        raise ValueError(
            f"max_staleness={max_staleness} needs an objective with a ratio to the policy that "
            f"sampled, which corrects for its age; with old_logp={old_logp!r} the gradient of this "
            "one does not depend on it"
        )


def warn_group_of_one(generation: Generation) -> None:
    if generation.group_size == 1:
        warnings.warn(
            "group_size=1: a group of one has no spread, its advantage is 0", stacklevel=3
        )


def check_epochs(update: Update, objective: Objective | AdaptiveObjective) -> None:
    """Several updates on one batch need a ratio to the policy before the first of them."""
    if update.epochs > 1 and not has_ratio_to_old(objective):
        raise OptionError(
            "epochs",
            f"({update.epochs}) above 1 needs an objective with a ratio π/π_old: after the first "
            "update the batch is an older policy's, and this one does not correct for that",
        )


def check_state(state: RunState | None, objective: Objective | AdaptiveObjective) -> None:
    """A state to continue from must hold what the objective reads."""
    if state is None:
        return
    if not isinstance(state, RunState):
        raise TypeError(f"state must be a RunState, as train yields, got {type(state).__name__}")
    if "ref_logp_T" in reads(objective) and state.reference is None:
        raise ValueError(
            "the objective reads a reference policy and the state has none: restore the state "
            "with its reference, or give it one with state._replace(reference=…)"
        )


def sampler_limit(config: Any) -> tuple[float, str]:
    """The largest mean difference that rounding explains, and the type that it is told for."""
    dtype = str(getattr(config, "dtype", "float32"))
    exact = jax.config.jax_default_matmul_precision in ("float32", "highest")
    rounded = dtype
    if dtype == "float32" and not exact:
        rounded = ROUNDED.get(jax.default_backend(), dtype)
    return LIMITS.get(rounded, LIMITS["float32"]), dtype


@cache
def clip_range(objective: Objective | AdaptiveObjective) -> float | None:
    """The smallest |log π/π_old| at which a token has no gradient although its advantage is not 0.

    Found by differentiating the loss of single tokens; None: no ratio up to e is clipped.
    """
    log_ratio_P = np.geomspace(1e-4, 1.0, 60)
    logp_PGT, samples = generic_batch(len(log_ratio_P), 4, 1)
    sign_G = np.array(
        [1.0, 1.0, -1.0, -1.0]
    )  # both advantages, each with a ratio above and below 1
    side_G = np.array([1.0, -1.0, 1.0, -1.0])
    old = logp_PGT - (log_ratio_P[:, None] * side_G)[..., None]
    samples = samples._replace(
        old_logp_T=old,
        sampler_logp_T=old,
        ref_logp_T=logp_PGT,  # a KL that is 0 has no gradient
        weight_T=jnp.ones_like(logp_PGT),
        adv=jnp.broadcast_to(sign_G, samples.adv.shape),
        age=jnp.zeros_like(samples.age),
    )
    bound = objective_at(objective)
    total = lambda logp_PGT: batch_loss(bound, logp_PGT, samples).total
    gradient_PGT = jax.jit(jax.grad(total))(logp_PGT)  # one program instead of fifty small ones
    silent_P = (np.asarray(gradient_PGT) == 0).any((1, 2))
    return float(log_ratio_P[silent_P].min()) if silent_P.any() else None


def warn_beyond_clip(difference: float, objective: Objective | AdaptiveObjective) -> None:
    """Warns where π_old is the sampler's and rounding alone is beyond what the loss clips."""
    reach = clip_range(objective)
    if reach is not None and difference > reach:
        warnings.warn(
            f"sampler and trainer differ by {difference:.2g} nats a token, and the loss clips "
            f"beyond {reach:.2g}: tokens start outside the clip range before any update. Take "
            "old_logp='auto' without staleness, or sample in a wider type.",
            stacklevel=2,
        )


def check_sampler(metrics: dict[str, float], config: Any) -> None:
    """Completions that these very parameters sampled must have the log-probabilities they had.

    The difference is dropped from the metrics of a batch without any.
    """
    if metrics.get("frac_fresh") == 0:
        del metrics["sampler_logp_diff"]
        return
    difference = metrics["sampler_logp_diff"]
    if math.isnan(difference) and not math.isfinite(metrics.get("loss", 0.0)):
        return  # the trainer's own numbers are no numbers: that is told by `finite.check_finite`
    limit, dtype = sampler_limit(config)
    if not difference <= limit:  # NaN is no agreement either
        raise SamplerMismatchError(
            f"the trainer's log-probabilities differ from the sampler's by {difference:.2g} a "
            f"token on average (limit {limit:g} for {dtype}): temperature, filters, positions or "
            "weights are not the same"
        )
