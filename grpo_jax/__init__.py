"""Functional GRPO for language models in JAX and Flax."""
