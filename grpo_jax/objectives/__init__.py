"""The mathematics: parts, what composes them, and the papers as bindings of them."""

from grpo_jax.objectives.advantages import center, leave_one_out, standardize
from grpo_jax.objectives.aggregates import fixed_length, sequence_mean, sequence_sum, token_mean
from grpo_jax.objectives.compose import Objective, batch_advantages, batch_loss, compose
from grpo_jax.objectives.diagnostics import diagnostics, reads, reads_in_loss, reads_in_prepare
from grpo_jax.objectives.divergences import k1, k2, k3
from grpo_jax.objectives.presets import dapo, dr_grpo, grpo, gspo
from grpo_jax.objectives.ratios import per_sequence, per_token
from grpo_jax.objectives.surrogates import clipped

__all__ = [
    "Objective",
    "batch_advantages",
    "batch_loss",
    "center",
    "clipped",
    "compose",
    "dapo",
    "diagnostics",
    "dr_grpo",
    "fixed_length",
    "grpo",
    "gspo",
    "k1",
    "k2",
    "k3",
    "leave_one_out",
    "per_sequence",
    "per_token",
    "reads",
    "reads_in_loss",
    "reads_in_prepare",
    "sequence_mean",
    "sequence_sum",
    "standardize",
    "token_mean",
]
