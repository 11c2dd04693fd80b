"""grpo_jax beside TRL, Tunix and a plain PyTorch loop, on the same work: `python -m
experiments.benchmark`.
"""
