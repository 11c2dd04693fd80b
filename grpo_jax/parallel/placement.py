"""Arrays and where they lie: on the default device, over a mesh, on the host of each process."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding


def default_device() -> jax.Device:
    return next(iter(jnp.empty(0).devices()))


def commit(x: Any) -> jax.Array:
    """The array on the default device, unless it is bound to a device already.

    Bound and unbound arrays would make two compiled programs. Shapes stay what they are.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    return x if getattr(x, "committed", False) else jax.device_put(x, default_device())


def place(x: Any, sharding: Sharding) -> jax.Array:
    """The array in a sharding: one that every process holds, or that is spread over them already.

    A shape is given the sharding.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=sharding)
    if isinstance(x, jax.Array):
        if x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        if not x.is_fully_addressable:
            return jax.jit(lambda x: x, out_shardings=sharding)(x)
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if jnp.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(x))
        return jax.random.wrap_key_data(place(data, sharding), impl=jax.random.key_impl(x))
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def reshape(x: Any, shape: tuple) -> Any:
    """An array, or a shape, in another shape; a shape loses its sharding."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(shape=shape, sharding=None)
    return x.reshape(shape)


def rows_of(sharding: NamedSharding, rows: int, process: int) -> np.ndarray:
    """The rows, ascending, on a process's devices, of an array that is spread by its first axis."""
    found: set[int] = set()
    for device, (index,) in sharding.devices_indices_map((rows,)).items():
        if device.process_index == process:
            found |= set(range(*index.indices(rows)))
    return np.array(sorted(found), int)


def local_part(x: Any) -> np.ndarray:
    """The rows on this process's devices, of an array that is spread by its first axis alone."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    pieces = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(pieces[start]) for start in sorted(pieces)])
