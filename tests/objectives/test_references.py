"""The moving reference and the moving β."""

import jax.numpy as jnp
import numpy as np
from grpo_jax.objectives import adaptive_beta, ema, every, never

NEW, OLD = {"w": jnp.array([2.0, 4.0])}, {"w": jnp.array([0.0, 0.0])}


def test_never():
    assert never(1, NEW, OLD) is OLD


def test_every():
    steps = [float(every(jnp.int32(step), NEW, OLD, interval=3)["w"][0]) for step in range(1, 7)]
    assert steps == [0.0, 0.0, 2.0, 0.0, 0.0, 2.0]


def test_ema():
    np.testing.assert_allclose(ema(1, NEW, OLD, decay=0.75)["w"], [0.5, 1.0])
    half = ema(1, NEW, {"w": OLD["w"].astype(jnp.bfloat16)}, decay=0.75)
    assert half["w"].dtype == jnp.bfloat16


def test_adaptive_beta():
    # KL twice the target: the error is held at .2, β rises by 2 %; KL at the target: β stays.
    np.testing.assert_allclose(adaptive_beta(1.0, 2.0, target=1.0), 1.02)
    np.testing.assert_allclose(adaptive_beta(1.0, 0.0, target=1.0), 0.98)
    np.testing.assert_allclose(adaptive_beta(0.5, 1.1, target=1.1), 0.5)
    np.testing.assert_allclose(adaptive_beta(1.0, 1.1, target=1.0, rate=0.5), 1.05, rtol=1e-6)
    np.testing.assert_allclose(adaptive_beta(1.0, 3.0, target=1.0, limit=1.0), 1.1, rtol=1e-6)
