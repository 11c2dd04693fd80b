"""Rewards: plain host functions of strings, called by their signature. No JAX here."""

from grpo_jax.rewards.answers import last_number, number_reward, parse_number
from grpo_jax.rewards.length import overlong
from grpo_jax.rewards.scoring import (
    RewardError,
    Scores,
    batched,
    call_reward,
    check_reward,
    combine,
    reward_functions,
    reward_name,
    score,
    trl_style,
)

__all__ = [
    "RewardError",
    "Scores",
    "batched",
    "call_reward",
    "check_reward",
    "combine",
    "last_number",
    "number_reward",
    "overlong",
    "parse_number",
    "reward_functions",
    "reward_name",
    "score",
    "trl_style",
]
