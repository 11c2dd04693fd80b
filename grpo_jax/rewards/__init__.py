"""Rewards: plain host functions of strings, called by their signature. No JAX here."""

from grpo_jax.rewards.answers import exact_reward, last_number, number_reward, parse_number
from grpo_jax.rewards.code import python_tests
from grpo_jax.rewards.extraction import final_answer
from grpo_jax.rewards.format import boxed_format, hash_format, language, repetition, tag_format
from grpo_jax.rewards.length import overlong
from grpo_jax.rewards.mathematics import math_reward
from grpo_jax.rewards.sandbox import Limits, SandboxError
from grpo_jax.rewards.scoring import (
    RewardError,
    Scores,
    batched,
    call_reward,
    check_reward,
    combine,
    grouped,
    reward_functions,
    reward_name,
    score,
    trl_style,
)
from grpo_jax.rewards.shaping import cosine_length, efficiency, rounded

__all__ = [
    "Limits",
    "RewardError",
    "SandboxError",
    "Scores",
    "batched",
    "boxed_format",
    "call_reward",
    "check_reward",
    "combine",
    "cosine_length",
    "efficiency",
    "exact_reward",
    "final_answer",
    "grouped",
    "hash_format",
    "language",
    "last_number",
    "math_reward",
    "number_reward",
    "overlong",
    "parse_number",
    "python_tests",
    "repetition",
    "reward_functions",
    "reward_name",
    "rounded",
    "score",
    "tag_format",
    "trl_style",
]
