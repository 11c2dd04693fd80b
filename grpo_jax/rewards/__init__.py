"""Rewards: plain host functions of strings, called by their signature. No JAX here."""

from grpo_jax.rewards.answers import last_number, number_reward, parse_number

__all__ = ["last_number", "number_reward", "parse_number"]
