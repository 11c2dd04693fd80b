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

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from grpo_jax.models.kernels.fused import AXES as AXES_OF_ATTENTION
from grpo_jax.models.kernels.fused import with_fused_attention
from grpo_jax.models.language_model import LanguageModel
from grpo_jax.parallel.placement import (
    commit,
    default_device,
    local_part,
    place,
    reshape,
    rows_of,
)
from grpo_jax.parallel.programs import Recipe, name_of, program_of
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
    put_rows(tree)           -> tree       this process's rows, joined with the others'
    fetch(tree)              -> tree       the rows that this process holds, as NumPy arrays
    for_decoding(params)     -> params     from the layout of training to the sampler's
    moved_bytes(params)      -> int        what the busiest device receives in that
    for_training(model)      -> model      gathers a layer when it is computed; fused attention
    per_prompt(function, inputs, outputs, donate=())   -> program   prompts one by one
    whole_batch(function, inputs, outputs, donate=())  -> program   all prompts at once
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


def _same(tree: Any) -> Any:
    return tree


def _single() -> Devices:
    made: dict = {}

    def program(function: Callable, inputs: tuple, outputs: Any, donate: tuple = ()) -> Callable:
        # A partial binds the options of a function that compiles itself, once for all callers.
        jitted = function
        if not isinstance(function, partial):
            jitted = jax.jit(function, donate_argnums=donate)
        recipe = Recipe(
            lay=lambda args, rows: (args, rows),
            make=lambda *_, **__: jitted,
            finish=_same,
            made=made,
            options=(inputs, outputs, donate),
        )
        return program_of(function, recipe)

    return Devices(
        name="one device",
        parts=1,
        axis_name=None,
        put=lambda kind, tree: jax.tree.map(commit, tree),
        local_rows=np.arange,
        owned_rows=np.arange,
        put_rows=_same,
        fetch=lambda tree: jax.tree.map(np.asarray, tree),
        for_decoding=_same,
        moved_bytes=lambda params: 0,
        for_training=lambda model: with_fused_attention(model, default_device()),
        per_prompt=program,
        whole_batch=program,
    )


SINGLE = _single()


class OverMesh(NamedTuple):
    """How arrays lie over a mesh, for a model whose parameters have these axes."""

    mesh: Mesh
    axes: Axes
    decode: str
    made: dict

    @property
    def parts(self) -> int:
        return prompt_parts(self.mesh)

    @property
    def rows(self) -> NamedSharding:
        """The sharding of an array whose first axis is the prompts."""
        return batch_shardings(self.mesh, np.empty(self.parts))

    def layout(self, kind: str, tree: Any) -> Any:
        """The sharding of every array of a tree of this kind."""
        rules = DECODE_RULES[self.decode] if kind in ("decode", "prompts") else RULES
        if kind in ("rows", "prompts"):
            return batch_shardings(self.mesh, tree, rules)
        if kind in ("state", "decode"):
            return param_shardings(self.mesh, self.axes, tree, rules)
        return jax.tree.map(lambda _: replicated(self.mesh), tree)

    def put(self, kind: str, tree: Any) -> Any:
        return jax.tree.map(place, tree, self.layout(kind, tree))

    def local_rows(self, rows: int) -> np.ndarray:
        return rows_of(self.rows, rows, jax.process_index())

    def owned_rows(self, rows: int) -> np.ndarray:
        before = [rows_of(self.rows, rows, process) for process in range(jax.process_index())]
        return np.setdiff1d(self.local_rows(rows), np.concatenate([np.empty(0, int), *before]))

    def put_rows(self, tree: Any) -> Any:
        return jax.tree.map(self._put_own_rows, tree)

    def _put_own_rows(self, x: Any) -> jax.Array:
        """Joins the rows that this process holds with those of the others."""
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return self.put("rows", x)
        x = np.asarray(x)
        if not x.ndim:
            return self.put("whole", x)
        rows = len(x) * (self.parts // len(self.local_rows(self.parts)))
        own = {row: i for i, row in enumerate(self.local_rows(rows))}

        def part(index: tuple) -> np.ndarray:
            return x[[own[row] for row in range(*index[0].indices(rows))]]

        return jax.make_array_from_callback((rows, *x.shape[1:]), self.rows, part)

    def for_decoding(self, params: Any) -> Any:
        return jax.tree.map(place, self.put("state", params), self.layout("decode", params))

    def moved_bytes(self, params: Any) -> int:
        return moved_bytes(self.mesh, self.axes, params, self.decode)

    def for_training(self, model: LanguageModel) -> LanguageModel:
        # Its key heads are spread over tensor: where they do not divide, XLA splits the attention
        # of einsums.
        if model.with_attention and divides(self.mesh, "kv", model.config.num_key_value_heads):
            over = lambda attention: spread(self.mesh, attention, AXES_OF_ATTENTION)
            model = with_fused_attention(model, self.mesh.devices.flat[0], over)
        return model.with_gather(gather(self.mesh)) if model.with_gather else model

    def program(
        self, function: Callable, inputs: tuple, outputs: Any, donate: tuple = ()
    ) -> Callable:
        """`jit` with a sharding stated for every argument and result."""

        def call(rows: dict, *args):
            return function(*args, **rows)

        call.__name__ = name_of(function)
        kinds = ("rows", *inputs)

        def lay(args: tuple, rows: dict) -> tuple[tuple, dict]:
            return tuple(map(self.put, kinds, (rows, *args))), {}

        def make(*args) -> Callable:
            return jax.jit(
                call,
                in_shardings=tuple(map(self.layout, kinds, args)),
                out_shardings=_of_each(self.layout, outputs, jax.eval_shape(call, *args)),
                donate_argnums=tuple(1 + index for index in donate),
            )

        return program_of(function, Recipe(lay, make, _same, self.made, (inputs, outputs, donate)))


def _of_each(function: Callable, kinds: Any, tree: Any) -> Any:
    """`function(kind, tree)`: of each part where `kinds` is a tuple, else of the whole."""
    return tuple(map(function, kinds, tree)) if isinstance(kinds, tuple) else function(kinds, tree)


@lru_cache(maxsize=16)
def sharded(mesh: Mesh, axes: Axes = None, decode: str = "gather") -> Devices:
    """`jit` over a mesh, every sharding stated where a program begins and ends.

    `axes` are those of the model (`LanguageModel.axes`). `decode` is a key of
    `sharding.DECODE_RULES`: how the sampler holds the parameters.
    """
    if decode not in DECODE_RULES:
        raise ValueError(f"decode must be one of {tuple(DECODE_RULES)}, got {decode!r}")
    over = OverMesh(mesh, axes, decode, {})
    spread_over = [f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1]
    return Devices(
        name=" × ".join(spread_over) or "a mesh of one device",
        parts=over.parts,
        axis_name=None,
        put=over.put,
        local_rows=over.local_rows,
        owned_rows=over.owned_rows,
        put_rows=over.put_rows,
        fetch=lambda tree: jax.tree.map(local_part, tree),
        for_decoding=over.for_decoding,
        moved_bytes=over.moved_bytes,
        for_training=over.for_training,
        per_prompt=over.program,
        whole_batch=over.program,
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
    over = OverPmap(count, mesh, sharded(mesh), {})
    return over.base._replace(
        name=f"pmap over {count}",
        axis_name=AXIS,
        for_training=lambda model: with_fused_attention(model, mesh.devices.flat[0]),
        per_prompt=over.program,
    )


MAPPED = ("rows", "prompts", "first")  # kinds whose first axis pmap spreads


class OverPmap(NamedTuple):
    """How arrays go to the devices of `pmap` and come back: `[devices, rows of each, …]`."""

    count: int
    mesh: Mesh
    base: Devices
    made: dict

    def split(self, kind: str, tree: Any, size: int) -> Any:
        """The rows of each device; of `first`, the index of each device's first prompt."""
        if kind not in MAPPED:
            return tree
        if kind == "first":
            return self.base.put("rows", tree + size // self.count * jnp.arange(self.count))

        def of_devices(x: Any) -> Any:
            if not x.ndim:
                return x
            return reshape(x, (self.count, x.shape[0] // self.count, *x.shape[1:]))

        return self.base.put("rows", jax.tree.map(of_devices, tree))

    def merge(self, kind: str, tree: Any) -> Any:
        """The rows of all devices, one after another."""
        if kind not in MAPPED:
            return tree
        joined = lambda x: reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))
        return self.base.put(kind, jax.tree.map(joined, tree))

    def axes_of(self, kind: str, tree: Any) -> Any:
        """The axis of every array that is mapped; scalars are everywhere."""
        if kind not in MAPPED:
            return None
        return jax.tree.map(lambda x: 0 if kind == "first" or x.ndim else None, tree)

    def program(
        self, function: Callable, inputs: tuple, outputs: Any, donate: tuple = ()
    ) -> Callable:
        """`pmap` of a function that sums over its axis what it adds over prompts."""

        def lay(args: tuple, rows: dict) -> tuple[tuple, dict]:
            args = tuple(map(self.base.put, inputs, args))
            spread_args = [x for kind, x in zip(inputs, args, strict=True) if kind in MAPPED[:2]]
            size = next(x.shape[0] for x in jax.tree.leaves(spread_args) if x.ndim)
            return tuple(map(partial(self.split, size=size), inputs, args)), rows

        def make(*args) -> Callable:
            return jax.pmap(
                function,
                AXIS,
                in_axes=tuple(map(self.axes_of, inputs, args)),
                out_axes=jax.tree.map(lambda kind: 0 if kind in MAPPED else None, outputs),
                devices=list(self.mesh.devices.flat),
                donate_argnums=donate,
            )

        finish = partial(_of_each, self.merge, outputs)
        return program_of(function, Recipe(lay, make, finish, self.made, (inputs, outputs, donate)))
