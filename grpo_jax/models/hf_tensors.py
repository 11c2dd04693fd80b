"""A folder's tensors to the decoder's parameters and back, by the rows of `families`.

A folder's tensors are torch's: one a layer, matrices (out, in), several of them fused in some
families. Ours are stacked over layers, matrices (in, out), so reading is a transpose into place and
writing the transpose back. Both go through NumPy; PyTorch is not needed. Left out on purpose:
quantised weights.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from grpo_jax.models.decoder import decoder
from grpo_jax.models.decoder_config import DecoderConfig
from grpo_jax.models.families import FAMILIES, LAYER, LAYER_TENSORS, TENSORS, Family
from grpo_jax.types import Params

FLOATS = ("F32", "F16", "BF16", "F64")


class Stored(NamedTuple):
    """Where a file has a parameter: a tensor, which of its rows, and the shape of all of it."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


def shapes_of(config: DecoderConfig) -> Params:
    """The shape and type of every parameter."""
    return jax.eval_shape(decoder(config).init, jax.random.key(0))


def stored_layer(family: Family, layers: Params) -> dict[str, Stored]:
    """Where a layer's parameters are, by their names; `layers` holds shapes."""
    names = {**LAYER_TENSORS, **family.tensors}
    fused = {key: (name, keys) for name, keys in family.fused.items() for key in keys}
    found = {}
    for key, leaf in layers.items():
        name, keys = fused.get(key, (names[key], (key,)))
        # Of a file's tensor the first axis is the last of ours.
        rows = [layers[one].shape[-1] for one in keys]
        start = sum(rows[: keys.index(key)])
        shape = (sum(rows), *leaf.shape[1:-1][::-1])
        found[key] = Stored(name, start, start + leaf.shape[-1], shape)
    return found


def read_params(config: DecoderConfig, tensors: dict[str, Any]) -> Params:
    """The parameters from a file's tensors: names and the open files that hold them.

    One stacked parameter at a time, so that the host holds the model once and a single parameter
    twice. Raises ValueError for what is missing, for what has another shape, and for tensors that
    the decoder has no place for.
    """
    shapes = shapes_of(config)
    params = {}
    left = set(tensors)
    for key in (key for key in shapes if key != "layers"):
        leaf = shapes[key]
        shape = leaf.shape[::-1] if key == "head" else leaf.shape
        stored = _take(tensors, Stored(TENSORS[key], 0, shape[0], shape))
        params[key] = jnp.array(stored.T if key == "head" else stored, leaf.dtype)
        left.discard(TENSORS[key])
    params["layers"] = {}
    for key, at in stored_layer(FAMILIES[config.model_type], shapes["layers"]).items():
        leaf = shapes["layers"][key]
        stacked = np.empty(leaf.shape, leaf.dtype)
        for layer in range(len(stacked)):
            name = LAYER.format(layer) + at.name
            stacked[layer] = _take(tensors, at._replace(name=name)).T
            left.discard(name)
        params["layers"][key] = jnp.array(stacked)
    _refuse_leftovers(config, params, tensors, left)
    return params


def _take(tensors: dict[str, Any], at: Stored) -> np.ndarray:
    if at.name not in tensors:
        raise ValueError(f"tensor {at.name} is missing")
    stored = tensors[at.name].get_slice(at.name)
    if stored.get_dtype() not in FLOATS:
        raise ValueError(f"tensor {at.name} is {stored.get_dtype()}: expected unquantised floats")
    if tuple(stored.get_shape()) != at.shape:
        raise ValueError(
            f"tensor {at.name} has shape {tuple(stored.get_shape())}: expected {at.shape}"
        )
    return stored[at.start : at.stop]


def _refuse_leftovers(
    config: DecoderConfig, params: Params, tensors: dict[str, Any], left: set[str]
) -> None:
    """Tensors that the decoder would ignore are refused, unless ignoring them changes nothing."""
    # Old checkpoints store what the configuration says.
    left = {name for name in left if not name.endswith("rotary_emb.inv_freq")}
    head = TENSORS["head"]
    if config.tie_word_embeddings and head in left:
        shape = params["embed"].shape
        head_VD = _take(tensors, Stored(head, 0, shape[0], shape))
        if not np.array_equal(head_VD.astype(config.stored_dtype), np.asarray(params["embed"])):
            raise ValueError(
                f"tensor {head} differs from {TENSORS['embed']}, though tie_word_embeddings is true"
            )
        left.discard(head)
    # Some folders of Qwen 2 hold a bias of zeros on the output, as Llama has one.
    zeros = {name for name in left if name.endswith("o_proj.bias")}
    for name in sorted(zeros):
        if np.any(_take(tensors, Stored(name, 0, config.hidden_size, (config.hidden_size,)))):
            raise ValueError(
                f"tensor {name} is not zero, though the configuration has no bias on attention's "
                "output"
            )
    if names := sorted(left - zeros):
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ValueError(f"tensors that the decoder has no place for: {', '.join(names[:5])}{more}")


def hf_tensors(kind: str, params: Params) -> dict[str, np.ndarray]:
    """The parameters under a family's names and in torch's layout."""
    tensors = {name: np.asarray(params[key]) for key, name in TENSORS.items() if key in params}
    if "head" in params:
        tensors[TENSORS["head"]] = np.ascontiguousarray(tensors[TENSORS["head"]].T)
    for name, parts in _parts(FAMILIES[kind], params["layers"]):
        for layer in range(len(parts[0])):
            rows = [part[layer].T for part in parts]
            whole = np.ascontiguousarray(rows[0] if len(rows) == 1 else np.concatenate(rows))
            tensors[LAYER.format(layer) + name] = whole
    return tensors


def _parts(family: Family, layers: Params) -> Iterator[tuple[str, list[np.ndarray]]]:
    """The names of a layer's tensors, each with the parameters that it is made of."""
    by_name: dict[str, list[tuple[int, str]]] = {}
    for key, at in stored_layer(family, layers).items():
        by_name.setdefault(at.name, []).append((at.start, key))
    for name, found in by_name.items():
        yield name, [np.asarray(layers[key]) for _, key in sorted(found)]


def check_params(config: DecoderConfig, params: Params) -> None:
    """Raises where `params` is not the tree that `decoder(config).init` gives."""
    flat = lambda tree: {
        keystr(path): tuple(leaf.shape) for path, leaf in tree_leaves_with_path(tree)
    }
    expected = flat(shapes_of(config))
    got = flat(params)
    wrong = [name for name in sorted(expected | got) if expected.get(name) != got.get(name)]
    if wrong:
        lines = [
            f"{name} has shape {got.get(name)}, expected {expected.get(name)}" for name in wrong
        ]
        raise ValueError(f"params do not fit the configuration: {'; '.join(lines)}")
