"""Three ways to run the same functions, with equal numbers: one device, `pmap`, and `jit` over a
mesh.

A program says of each argument what it is, and the back end knows where that lies:

    state    parameters, optimiser state: in the layout of training
    decode   parameters in the layout of the sampler (see `Devices.for_decoding`)
    rows     arrays whose first axis is the prompts of the batch; scalars among them are everywhere
    prompts  rows in the layout of the sampler
    whole    the same on every device
    first    the index of the first prompt that the program sees

A program is made for the shapes of its arguments when it is first called with them, or before: see
`listed`.

Left out on purpose: `pmap` over several processes (a mesh does that), and moving work between
devices while it runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from grpo_jax.models.kernels.fused import AXES as AXES_OF_ATTENTION
from grpo_jax.models.kernels.fused import with_fused_attention
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.parallel.sharding import (
    DECODE_RULES,
    RULES,
    batch_shardings,
    divides,
    gather,
    make_mesh,
    moved_bytes,
    param_shardings,
    prompt_parts,
    replicated,
    spread,
)

AXIS = "devices"  # the mapped axis of pmap
Axes = tuple[tuple[str, str], ...] | None


class Devices(NamedTuple):
    """Where a run's programs run. Make one with `SINGLE`, `pmapped` or `sharded`.

    ```
    put(kind, tree)          -> tree       what every process holds whole, laid out
    local_rows(rows)               -> index_R    which of so many rows are on this process's devices
    owned_rows(rows)                -> index_R    those of them that no process before it holds
    put_rows(tree)           -> tree       the rows that this process holds, joined with those of the others
    fetch(tree)              -> tree       the rows that this process holds, as NumPy arrays
    for_decoding(params)     -> params     from the layout of training to the sampler's
    moved_bytes(params)      -> int        what the busiest device receives in that
    for_training(model)      -> model      one that gathers a layer's weights when it is computed; see `models.fused`
    per_prompt(function, inputs, outputs, donate=())   -> program   of a function that treats prompts one by one
    whole_batch(function, inputs, outputs, donate=())  -> program   of a function that sees all prompts at once
    ```

    `inputs` names the kind of every argument; `outputs` that of the result, or of each of several.
    `donate` lists arguments that are consumed. Keyword arguments of a program of `whole_batch` are
    rows. A `partial` of a function that compiles itself is one program wherever it is bound to
    equal options; any other function is one of its own.

    `parts` is the number of parts that prompts are spread over: their number must be a multiple.
    With an `axis_name` a function given to `per_prompt` must sum over that axis what it adds over
    prompts.
    """

    name: str
    parts: int
    axis_name: str | None
    put: Callable
    local_rows: Callable
    owned_rows: Callable
    put_rows: Callable
    fetch: Callable
    for_decoding: Callable
    moved_bytes: Callable
    for_training: Callable
    per_prompt: Callable
    whole_batch: Callable


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


@contextmanager
def listed() -> Iterator[dict[Any, Program]]:
    """Inside, a program called with shapes (`jax.ShapeDtypeStruct`) for some of its arrays runs
    nothing: it is listed, unless it is made already, and returns shapes.
    """
    token = _found.set({})
    try:
        yield _found.get()
    finally:
        _found.reset(token)


def _program(
    made: dict, function: Callable, options: tuple, lay: Callable, make: Callable, finish: Callable
):
    """One program for each layout of its arguments, kept in `made` where the function is known by
    its options.

    `lay(args, rows)` lays the arguments out, `make(*args, **rows)` gives the jitted function, and
    `finish` makes of its output what is returned.
    """
    known = made
    name = _identity(function)
    if name is None:
        known = {}
        name = ()

    def run(*args, **rows):
        args, rows = lay(args, rows)
        key = (name, options, _shapes((args, rows)))
        if not any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((args, rows))):
            if key not in known:
                known[key] = make(*args, **rows)
            return finish(known[key](*args, **rows))
        found = _found.get()
        place = (id(known), key)
        if place in found:
            return found[place].out
        jitted = make(*args, **rows)
        out = finish(jax.eval_shape(jitted, *args, **rows))
        if key not in known:

            def compile_it() -> None:
                known[key] = _lower(jitted, *args, **rows).compile()

            lower = partial(_lower, jitted, *args, **rows)
            described = (_name(function), _options(function), (args, rows), out)
            found[place] = Program(*described, compile_it, lower)
        return out

    return run


def _lower(function: Callable, *args, platforms: tuple[str, ...] = (), **rows) -> Any:
    """The lowered program; for `platforms` (such as ("tpu",)) other than this machine's, if given."""
    if isinstance(function, partial):
        rows = function.keywords | rows
        args = (*function.args, *args)
        function = function.func
    if platforms:
        return function.trace(*args, **rows).lower(lowering_platforms=platforms)
    return function.lower(*args, **rows)


def _options(function: Callable) -> dict[str, Any]:
    """What a function was bound with, but for the model."""
    return dict(function.keywords) if isinstance(function, partial) else {}


def _name(function: Callable) -> str:
    return getattr(getattr(function, "func", function), "__name__", "program").lstrip("_")


def _single() -> Devices:
    made: dict = {}

    def program(function: Callable, inputs: tuple, outputs: Any, donate: tuple = ()) -> Callable:
        # A partial binds the options of a function that compiles itself, once for all callers.
        jitted = (
            function if isinstance(function, partial) else jax.jit(function, donate_argnums=donate)
        )
        options = (inputs, outputs, donate)
        return _program(
            made, function, options, lambda *given: given, lambda *_, **__: jitted, _same
        )

    return Devices(
        name="one device",
        parts=1,
        axis_name=None,
        put=lambda kind, tree: jax.tree.map(_commit, tree),
        local_rows=np.arange,
        owned_rows=np.arange,
        put_rows=_same,
        fetch=lambda tree: jax.tree.map(np.asarray, tree),
        for_decoding=_same,
        moved_bytes=lambda params: 0,
        for_training=lambda model: with_fused_attention(model, _default_device()),
        per_prompt=program,
        whole_batch=program,
    )


def _same(tree: Any) -> Any:
    return tree


SINGLE = _single()


@lru_cache(maxsize=16)
def sharded(mesh: Mesh, axes: Axes = None, decode: str = "gather") -> Devices:
    """`jit` over a mesh, every sharding stated where a program begins and ends.

    `axes` are those of the model (`LanguageModel.axes`). `decode` is a key of
    `parallel.DECODE_RULES`: how the sampler holds the parameters.
    """
    if decode not in DECODE_RULES:
        raise ValueError(f"decode must be one of {tuple(DECODE_RULES)}, got {decode!r}")
    parts = prompt_parts(mesh)
    row_sharding = batch_shardings(mesh, np.empty(parts))

    def layout(kind: str, tree: Any) -> Any:
        rules = DECODE_RULES[decode] if kind in ("decode", "prompts") else RULES
        if kind in ("rows", "prompts"):
            return batch_shardings(mesh, tree, rules)
        if kind in ("state", "decode"):
            return param_shardings(mesh, axes, tree, rules)
        return jax.tree.map(lambda _: replicated(mesh), tree)

    def put(kind: str, tree: Any) -> Any:
        return jax.tree.map(_place, tree, layout(kind, tree))

    def local_rows(rows: int, process: int | None = None) -> np.ndarray:
        return _rows_of(row_sharding, rows, jax.process_index() if process is None else process)

    def owned_rows(rows: int) -> np.ndarray:
        before = [local_rows(rows, process) for process in range(jax.process_index())]
        return np.setdiff1d(local_rows(rows), np.concatenate([np.empty(0, int), *before]))

    def put_rows(tree: Any) -> Any:
        share = parts // len(local_rows(parts))

        def one(x):
            if isinstance(x, jax.Array) and not x.is_fully_addressable:
                return put("rows", x)
            x = np.asarray(x)
            if not x.ndim:
                return put("whole", x)
            place = {row: i for i, row in enumerate(local_rows(len(x) * share))}
            part = lambda index: x[[place[row] for row in range(*index[0].indices(len(x) * share))]]
            return jax.make_array_from_callback((len(x) * share, *x.shape[1:]), row_sharding, part)

        return jax.tree.map(one, tree)

    def for_training(model: LanguageModel) -> LanguageModel:
        # Its key heads are spread over tensor: where they do not divide, XLA splits the attention
        # of einsums.
        if model.with_attention and divides(mesh, "kv", model.config.num_key_value_heads):
            over = lambda attention: spread(mesh, attention, AXES_OF_ATTENTION)
            model = with_fused_attention(model, mesh.devices.flat[0], over)
        return model.with_gather(gather(mesh)) if model.with_gather else model

    made: dict = {}

    def program(function: Callable, inputs: tuple, outputs: Any, donate: tuple = ()) -> Callable:
        call = lambda rows, *args: function(*args, **rows)
        call.__name__ = _name(function)
        kinds = ("rows", *inputs)

        def lay(args: tuple, rows: dict) -> tuple[tuple, dict]:
            return tuple(put(kind, arg) for kind, arg in zip(kinds, (rows, *args), strict=True)), {}

        def make(*args) -> Callable:
            out = jax.eval_shape(call, *args)
            laid = (
                tuple(map(layout, outputs, out))
                if isinstance(outputs, tuple)
                else layout(outputs, out)
            )
            return jax.jit(
                call,
                in_shardings=tuple(map(layout, kinds, args)),
                out_shardings=laid,
                donate_argnums=tuple(1 + index for index in donate),
            )

        return _program(made, function, (inputs, outputs, donate), lay, make, _same)

    return Devices(
        name=" × ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
        or "a mesh of one device",
        parts=parts,
        axis_name=None,
        put=put,
        local_rows=local_rows,
        owned_rows=owned_rows,
        put_rows=put_rows,
        fetch=lambda tree: jax.tree.map(_local, tree),
        for_decoding=lambda params: jax.tree.map(
            _place, put("state", params), layout("decode", params)
        ),
        moved_bytes=lambda params: moved_bytes(mesh, axes, params, decode),
        for_training=for_training,
        per_prompt=program,
        whole_batch=program,
    )


def pmapped(count: int | None = None) -> Devices:
    """`pmap` over the first `count` devices (by default all) of one process, every parameter on
    each of them.
    """
    if jax.process_count() > 1:
        raise ValueError("pmap runs in one process; over several use a mesh")
    return _pmapped(jax.device_count() if count is None else count)


@lru_cache(maxsize=16)
def _pmapped(count: int) -> Devices:
    mesh = make_mesh(data=count)
    base = sharded(mesh)
    made = {}
    in_axis = lambda kind, tree: jax.tree.map(
        lambda x: 0 if kind == "first" or x.ndim else None, tree
    )
    mapped = ("rows", "prompts", "first")

    def split(kind: str, tree: Any, size: int) -> Any:
        if kind == "first":
            tree = tree + size // count * jnp.arange(count)
        else:
            tree = jax.tree.map(
                lambda x: _reshape(x, (count, x.shape[0] // count, *x.shape[1:])) if x.ndim else x,
                tree,
            )
        return base.put("rows", tree)

    def merge(kind: str, tree: Any) -> Any:
        if kind not in mapped:
            return tree
        return base.put(
            kind, jax.tree.map(lambda x: _reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:])), tree)
        )

    def per_prompt(function: Callable, inputs: tuple, outputs: Any, donate: tuple = ()) -> Callable:
        out_axes = jax.tree.map(lambda kind: 0 if kind in mapped else None, outputs)

        def lay(args: tuple, rows: dict) -> tuple[tuple, dict]:
            args = [base.put(kind, arg) for kind, arg in zip(inputs, args, strict=True)]
            spread = [
                arg for kind, arg in zip(inputs, args, strict=True) if kind in ("rows", "prompts")
            ]
            size = next(x.shape[0] for x in jax.tree.leaves(spread) if x.ndim)
            return tuple(
                split(k, arg, size) if k in mapped else arg
                for k, arg in zip(inputs, args, strict=True)
            ), rows

        def make(*args) -> Callable:
            in_axes = tuple(
                in_axis(k, arg) if k in mapped else None
                for k, arg in zip(inputs, args, strict=True)
            )
            return jax.pmap(
                function,
                AXIS,
                in_axes=in_axes,
                out_axes=out_axes,
                devices=list(mesh.devices.flat),
                donate_argnums=donate,
            )

        def finish(out: Any) -> Any:
            return (
                tuple(map(merge, outputs, out))
                if isinstance(outputs, tuple)
                else merge(outputs, out)
            )

        return _program(made, function, (inputs, outputs, donate), lay, make, finish)

    return base._replace(
        name=f"pmap over {count}",
        axis_name=AXIS,
        for_training=lambda model: with_fused_attention(model, mesh.devices.flat[0]),
        per_prompt=per_prompt,
    )


def _commit(x: Any) -> jax.Array:
    """On the default device, unless it is bound to one already: bound and unbound arrays make two
    compiled programs.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    return x if getattr(x, "committed", False) else jax.device_put(x, _default_device())


def _default_device() -> jax.Device:
    return next(iter(jnp.empty(0).devices()))


def _identity(function: Callable) -> Any:
    """What makes two partials of one function with equal arguments the same program; None for other
    functions.
    """
    if not isinstance(function, partial):
        return None
    return function.func, function.args, tuple(sorted(function.keywords.items()))


def _shapes(args: Any) -> Any:
    return jax.tree.structure(args), tuple(
        (np.shape(x), getattr(x, "dtype", type(x))) for x in jax.tree.leaves(args)
    )


def shapes_of(tree: Any) -> Any:
    """The arrays' shapes, in the layout that they have; those of the host have none."""

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))

    return jax.tree.map(shape_of, tree)


def _reshape(x: Any, shape: tuple) -> Any:
    return (
        x.update(shape=shape, sharding=None)
        if isinstance(x, jax.ShapeDtypeStruct)
        else x.reshape(shape)
    )


def _place(x: Any, sharding: Sharding) -> jax.Array:
    """An array that every process holds, or one that is already spread over them, in the given
    sharding; or a shape.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=sharding)
    if isinstance(x, jax.Array):
        if x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        if not x.is_fully_addressable:
            return jax.jit(_same, out_shardings=sharding)(x)
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if jnp.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(x))
        return jax.random.wrap_key_data(_place(data, sharding), impl=jax.random.key_impl(x))
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _rows_of(sharding: NamedSharding, rows: int, process: int) -> np.ndarray:
    """The rows, ascending, that are on a process's devices, of an array spread by its first
    axis.
    """
    places = sharding.devices_indices_map((rows,)).items()
    local_rows = {
        i
        for device, (index,) in places
        if device.process_index == process
        for i in range(*index.indices(rows))
    }
    return np.array(sorted(local_rows), int)


def _local(x: Any) -> np.ndarray:
    """The rows that are on this process's devices, of an array that is spread by its first axis
    alone.
    """
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    pieces = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(pieces[start]) for start in sorted(pieces)])
