"""States as a run saves them, small, and their bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.train_step import init_state
from grpo_jax.types import RunState, TrainState


def weights(seed, dtype=jnp.float32):
    a, b = jax.random.split(jax.random.key(seed))
    return {"embed": jax.random.normal(a, (8, 6)), "layers": {"q": jax.random.normal(b, (2, 8)).astype(dtype)}}


def state_of(seed, reference=False, iteration=2):
    """A state after two updates, so that its moments, counts and learning rate are no defaults."""
    params = weights(seed, jnp.bfloat16)
    optimizer = adamw(1e-2, total_updates=10, lr_warmup=3, schedule="cosine")
    train = init_state(params, optimizer)
    for i in range(2):
        grads = jax.tree.map(lambda p, i=i: p * (i + 1), params)
        updates, opt_state = optimizer.update(grads, train.opt_state, train.params)
        train = TrainState(train.step + 1, optax.apply_updates(train.params, updates), opt_state)
    reference = weights(seed + 1, jnp.bfloat16) if reference else None
    data = {"position": np.int64(7 * seed)}
    return RunState(iteration, train, jax.random.key(seed + 100), reference, data=data)


def bits(tree):
    """Leaves as bytes: equal only if bit for bit equal, with dtypes, shapes and the structure."""
    leaves, structure = jax.tree.flatten(tree)
    typed = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    leaves = [x if isinstance(x, jax.Array) and typed(x) else np.asarray(x) for x in leaves]
    raw = [jax.random.key_data(x) if typed(x) else x for x in leaves]
    return structure, [(x.dtype, y.shape, np.asarray(y).tobytes()) for x, y in zip(leaves, raw, strict=True)]
