"""Compiled programs are kept on disk: the second start of the same program compiles nothing."""

import os
from pathlib import Path

import jax


def keep_programs() -> None:
    """Keeps compiled programs in the user's cache folder, from now on.

    What JAX was told itself (JAX_COMPILATION_CACHE_DIR, or JAX_ENABLE_COMPILATION_CACHE=false)
    stays as it is; of how long a program takes to compile, by which JAX chooses what to keep, it
    must have been told in the environment.
    """
    if not jax.config.jax_compilation_cache_dir:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "grpo_jax" / "programs"))
    kept = {
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, least in kept.items():
        if name.upper() not in os.environ:
            jax.config.update(name, least)
