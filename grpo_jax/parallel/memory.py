"""How much memory a device has to spare for a backward pass, and what a layer may keep there."""

import os
from typing import Any

import jax

from grpo_jax.models import remat_that_fits
from grpo_jax.types import Params


def remat_by_memory(
    config: Any,
    params: Params,
    prompts: int,
    prompt_length: int,
    group_size: int,
    max_new_tokens: int,
    parts: int = 1,
) -> str:
    """The policy of `remat_that_fits` for updates of so many prompts with their groups at once, a
    prompt's tokens once.

    `parts` is that of `memory_for_training`.
    """
    tokens = prompts * (prompt_length + group_size * max_new_tokens)
    return remat_that_fits(config, tokens, memory_for_training(params, parts))


def memory_for_training(params: Params, parts: int = 1) -> int:
    """Bytes of a device that a backward pass may fill with what the forward pass keeps.

    That is half of what is left beside a device's part of the weights, of two moments, of a
    reference and of a float32 gradient, if they are spread over so many `parts`.
    """
    held = sum(4 * x.nbytes + 4 * x.size for x in jax.tree.leaves(params)) // parts
    return (device_bytes() - held) // 2


def device_bytes() -> int:
    """Bytes of a device's memory; processors' cores share that of the host."""
    stats = jax.local_devices()[0].memory_stats() or {}
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    return stats.get("bytes_limit", host)
