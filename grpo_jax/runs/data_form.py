"""`RunState.data`, of which the restoring program knows nothing, in a checkpoint.

Its form is written into the record, its arrays into a list. Orbax alone would turn numbers that are
keys into text, and take no array without elements.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np


def form_of(tree: Any, arrays: list[np.ndarray]) -> Any:
    """The form of a tree of dicts, lists and arrays as JSON; its arrays are added to `arrays`."""
    if tree is None:
        return None
    if type(tree) is dict:
        return {"dict": [[_key(name), form_of(own, arrays)] for name, own in tree.items()]}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [form_of(own, arrays) for own in tree]}
    if isinstance(tree, tuple) or (array := np.asarray(tree)).dtype.kind in "OSU":
        wanted = "a tree of dicts, lists, tuples and arrays of numbers"
        raise TypeError(f"RunState.data must be {wanted} to be saved; it holds {tree!r}")
    if array.size:
        arrays.append(array)
    return {"array": [array.dtype.name, list(array.shape)]}


def tree_of(form: Any, arrays: Iterator[np.ndarray]) -> Any:
    """The tree of a form, with the next of the arrays wherever one was."""
    if form is None:
        return None
    ((kind, content),) = form.items()
    if kind == "dict":
        return {name: tree_of(own, arrays) for name, own in content}
    if kind == "array":
        dtype, shape = content
        return next(arrays) if math.prod(shape) else np.zeros(shape, dtype)
    trees = [tree_of(own, arrays) for own in content]
    return tuple(trees) if kind == "tuple" else trees


def _key(name: Any) -> str | int:
    """A key of a dict as JSON keeps it in a list: text, or a whole number."""
    if isinstance(name, np.integer):
        return int(name)
    if not isinstance(name, str | int):
        raise TypeError(f"keys in RunState.data must be text or whole numbers, got {name!r}")
    return name
