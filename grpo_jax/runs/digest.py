"""A checksum of every array of a state, that a change of any one element changes.

    digest(x) = Σᵢ mix(bits(xᵢ) + mix(i)) mod 2³²

`mix` is the finaliser of MurmurHash3, a one-to-one map of 32-bit words: where one element differs,
whichever of its bits, its term differs and so does the sum; several wrong elements agree by chance
once in 2³². A sum does not know how an array was cut: it is computed where the array lies, by each
device for its own part, and an array that is restored on other devices has the same digest. (A
checksum of bytes in the host's memory, such as CRC-32, would need all parts in their order.)

Left out on purpose: protection from an adversary, which takes a keyed hash of bytes on the host.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.types import Array

# The path of an array in its tree -> its type, its shape and its digest.
Digests = dict[str, list]


def digests(tree: Any) -> Digests:
    """The digests of a tree of arrays, by the paths of its leaves, as JSON holds them."""
    named = _named(tree)
    sums: dict[str, Any] = {}
    for together in _by_devices(named):
        sums |= _sums({name: _words(x) for name, x in together.items()})
    sums = jax.device_get(sums)
    return {
        name: [str(x.dtype), list(x.shape), f"{int(sums[name]):08x}"] for name, x in named.items()
    }


def differing(found: Digests, expected: Mapping[str, list]) -> list[str]:
    """What is wrong with each array that is not as expected, in a clause; nothing if all are."""
    missing = [f"{name} is missing" for name in expected if name not in found]
    unknown = [f"{name} is no part of it" for name in found if name not in expected]
    wrong = []
    for name, (dtype, shape, digest) in found.items():
        kind = [dtype, shape]
        if name not in expected or [*kind, digest] == expected[name]:
            continue
        if kind != expected[name][:2]:
            was = f"{expected[name][0]}{expected[name][1]}"
            wrong.append(f"{name} was saved as {was} and is asked for as {dtype}{shape}")
        else:
            wrong.append(f"{name} does not have the checksum that it was saved with")
    return [*missing, *unknown, *wrong]


def _named(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = ((path, x if hasattr(x, "dtype") else np.asarray(x)) for path, x in leaves)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in arrays}


def _by_devices(named: dict[str, Any]) -> list[dict[str, Any]]:
    """The arrays in parts that one program can take: those of the same devices."""
    parts: dict[Any, dict[str, Any]] = {}
    for name, x in named.items():
        where = frozenset(x.sharding.device_set) if isinstance(x, jax.Array) else None
        parts.setdefault(where, {})[name] = x
    return list(parts.values())


def _words(x: Any) -> Any:
    """An array whose elements have at most four bytes; the host's wider ones are cut in two."""
    if isinstance(x, jax.Array):
        typed = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if typed else x
    x = np.atleast_1d(np.ascontiguousarray(x))
    return x.view(np.uint32) if x.dtype.itemsize > 4 else x


@jax.jit
def _sums(words: dict[str, Array]) -> dict[str, Array]:
    return {name: _sum(x) for name, x in words.items()}


def _sum(x: Array) -> Array:
    bits = _bits(x)
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis, _ in enumerate(bits.shape):
        stride = math.prod(bits.shape[axis + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride)
    return jnp.sum(_mix(bits + _mix(index)), dtype=jnp.uint32)


def _bits(x: Array) -> Array:
    """The bits of each element as a word of 32."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    width = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)


def _mix(x: Array) -> Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
