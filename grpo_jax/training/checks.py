"""What a training loop refuses: before it starts, and where the sampler is not what it trains."""

import warnings
from typing import Any

import jax

from grpo_jax.inference.logprobs import Sampling
from grpo_jax.objectives import Objective, reads_in_loss
from grpo_jax.parallel.backends import Devices
from grpo_jax.tasks import Task

# Mean |log π − log π_sampler| above which sampler and trainer cannot be the same distribution, by
# the type that the factors of products have. TPUs round those of float32 to bfloat16, GPUs to as
# many bits as float16, unless told else.
GAP = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
ROUNDED = {"tpu": "bfloat16", "gpu": "float16"}


class SamplerMismatchError(RuntimeError):
    """The trainer's log-probabilities of fresh completions are not those the sampler drew them
    with.
    """


def check_train(
    steps: int,
    prompts_per_step: int,
    group_size: int,
    max_new_tokens: int,
    length_buckets: int,
    sampling: Sampling,
    task: Task,
) -> None:
    named = {
        "steps": (steps, 0),
        "prompts_per_step": (prompts_per_step, 1),
        "group_size": (group_size, 1),
    }
    named |= {"max_new_tokens": (max_new_tokens, 1), "length_buckets": (length_buckets, 1)}
    for name, (value, least) in named.items():
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if sampling.checked().temperature == 0:
        raise ValueError(
            "temperature must be above 0 in training: a greedy group has no spread to learn from"
        )
    check_rows(task)
    if group_size == 1:
        warnings.warn(
            "group_size=1: a group of one has no spread, its advantage is 0", stacklevel=3
        )


def check_stale(stale: int, old_logp: str, objective: Objective) -> None:
    if not isinstance(stale, int) or stale < 0:
        raise ValueError(f"stale must be an integer of at least 0, got {stale!r}")
    if stale and old_logp != "sampler":
        raise ValueError(
            f"stale={stale} needs old_logp='sampler', the policy that sampled; got {old_logp!r}"
        )
    if stale and "old_logp_T" not in reads_in_loss(objective):
        raise ValueError(
            f"stale={stale} needs an objective with a ratio to the policy that sampled, which corrects for its age; "
            "this one does not read old_logp_T"
        )


def check_parts(name: str, prompts: int, microbatches: int, devices: Devices) -> None:
    if devices.parts > 1 and prompts % (devices.parts * microbatches):
        cuts = f" × {microbatches} micro-batches" if microbatches > 1 else ""
        raise ValueError(
            f"{name} ({prompts}) must be a multiple of {devices.parts} devices{cuts}: prompts are spread evenly over "
            f"{devices.name}"
        )


def check_rows(task: Task) -> None:
    if not len(task.train):
        raise ValueError(f"task {task.name!r} has no training rows")


def check_gap(metrics: dict, config: Any) -> None:
    """In the first epoch on a batch sampler and trainer have the same parameters: they must
    agree.
    """
    dtype = str(getattr(config, "dtype", "float32"))
    exact = jax.config.jax_default_matmul_precision in ("float32", "highest")
    rounded = dtype if exact or dtype != "float32" else ROUNDED.get(jax.default_backend(), dtype)
    gap = metrics["sampler_logp_diff"]
    limit = GAP.get(rounded, GAP["float32"])
    if not gap <= limit:  # NaN is no agreement either
        raise SamplerMismatchError(
            f"the trainer's log-probabilities differ from the sampler's by {gap:.2g} a token on average (limit "
            f"{limit:g} for {dtype}): temperature, filters, positions or weights are not the same"
        )
