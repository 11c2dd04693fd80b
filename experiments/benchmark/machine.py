"""What the machine itself reaches, measured in the same run: matrix products and copies, by JAX and
by PyTorch.
"""

import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np


def measure(spec: SimpleNamespace) -> dict[str, float]:
    """`flops` of a product of two square matrices in `spec.dtype`, and bytes a second read and
    written by a copy.
    """
    n = spec.matrix
    size = spec.copy_bytes // 4
    product, copy = (_jax if spec.contestant == "machine_jax" else _torch)(n, size, spec.dtype)
    return {"flops": 2.0 * n**3 / _fastest(product), "bytes_per_s": 8.0 * size / _fastest(copy)}


def _fastest(run: Callable[[], object], times: int = 15) -> float:
    run()
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return float(np.min(seconds))


def _jax(n: int, size: int, dtype: str) -> tuple[Callable, Callable]:
    import jax
    import jax.numpy as jnp

    x, y = (jax.random.normal(jax.random.key(i), (n, n), dtype) for i in range(2))
    source = jnp.ones(size, jnp.float32)
    product = jax.jit(jnp.matmul)
    copy = jax.jit(lambda a: a + 1)
    return lambda: jax.block_until_ready(product(x, y)), lambda: jax.block_until_ready(copy(source))


def _torch(n: int, size: int, dtype: str) -> tuple[Callable, Callable]:
    import torch

    from experiments.benchmark.torch_parts import device, synchronize, use_all_cores

    use_all_cores()
    x, y = (torch.randn(n, n, dtype=getattr(torch, dtype), device=device()) for _ in range(2))
    source = torch.ones(size, device=device())
    target = torch.empty(size, device=device())

    def done(run):
        run()
        synchronize()

    return lambda: done(lambda: torch.mm(x, y)), lambda: done(lambda: target.copy_(source))
