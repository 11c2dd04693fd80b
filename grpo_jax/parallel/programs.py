"""Compiled programs: one for each layout of its arguments, made when it is first called, or before.

Inside `listed()` a program that is called with shapes runs nothing: it is listed as a `Program`,
which can be compiled ahead or lowered for a platform that is not there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

_found: ContextVar[dict] = ContextVar("_found")


class Program(NamedTuple):
    """A program for arguments of some shapes, which has not run yet.

    `options` are what it was bound with, `args` the shapes of its arguments with their shardings,
    `out` those of its result. From `compile()` on, calls run what that has compiled; `lower(…)`
    gives the program for another platform, and changes nothing.
    """

    name: str
    options: dict[str, Any]
    args: Any
    out: Any
    compile: Callable[[], None]
    lower: Callable[..., jax.stages.Lowered]


class Recipe(NamedTuple):
    """How one back end makes programs of a function.

    `lay(args, rows)` lays the arguments out, `make(*args, **rows)` gives the jitted function, and
    `finish(out)` makes of its output what is returned. `made` holds what has been made by functions
    that are known by their options, `options` is what else tells programs apart.
    """

    lay: Callable
    make: Callable
    finish: Callable
    made: dict
    options: tuple


@contextmanager
def listed() -> Iterator[dict[Any, Program]]:
    """Inside, a program that is called with shapes (`jax.ShapeDtypeStruct`) for some of its arrays
    is listed, unless it is made already, and returns shapes.
    """
    token = _found.set({})
    try:
        yield _found.get()
    finally:
        _found.reset(token)


def program_of(function: Callable, recipe: Recipe) -> Callable:
    """The function as programs: one for each layout of its arguments.

    Programs are kept in `recipe.made` where the function is a partial, which is known by its
    options; any other function keeps its own.
    """
    identity = identity_of(function)
    made = {} if identity is None else recipe.made

    def run(*args, **rows):
        args, rows = recipe.lay(args, rows)
        key = (identity, recipe.options, _layout(args, rows))
        if has_shapes((args, rows)):
            return _list(function, recipe, made, key, args, rows)
        if key not in made:
            made[key] = recipe.make(*args, **rows)
        return recipe.finish(made[key](*args, **rows))

    return run


def _list(function: Callable, recipe: Recipe, made: dict, key: Any, args: tuple, rows: dict) -> Any:
    """Lists the program of these arguments, unless it is made or listed; its result as shapes."""
    found = _found.get()
    place = (id(made), key)
    if place in found:
        return found[place].out
    jitted = recipe.make(*args, **rows)
    out = recipe.finish(jax.eval_shape(jitted, *args, **rows))
    if key not in made:

        def compile_it() -> None:
            made[key] = lower(jitted, *args, **rows).compile()

        described = (name_of(function), options_of(function), (args, rows), out)
        found[place] = Program(*described, compile_it, partial(lower, jitted, *args, **rows))
    return out


def lower(function: Callable, *args, platforms: tuple[str, ...] = (), **rows) -> jax.stages.Lowered:
    """The lowered program: for this machine, or for `platforms` such as ("tpu",)."""
    if isinstance(function, partial):
        rows = function.keywords | rows
        args = (*function.args, *args)
        function = function.func
    if platforms:
        return function.trace(*args, **rows).lower(lowering_platforms=platforms)
    return function.lower(*args, **rows)


def identity_of(function: Callable) -> Any:
    """What makes equal partials of one function the same program; None for other functions."""
    if not isinstance(function, partial):
        return None
    return function.func, function.args, tuple(sorted(function.keywords.items()))


def options_of(function: Callable) -> dict[str, Any]:
    """What a function was bound with by name."""
    return dict(function.keywords) if isinstance(function, partial) else {}


def name_of(function: Callable) -> str:
    """The function's own name, without the underscores of a private one."""
    return getattr(getattr(function, "func", function), "__name__", "program").lstrip("_")


def has_shapes(tree: Any) -> bool:
    """Whether some of the arrays are shapes alone."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


def shapes_of(tree: Any) -> Any:
    """The arrays' shapes, in the layout that they have; those of the host have none."""

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))

    return jax.tree.map(shape_of, tree)


def _layout(args: tuple, rows: dict) -> Any:
    leaves, structure = jax.tree.flatten((args, rows))
    return structure, tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)
