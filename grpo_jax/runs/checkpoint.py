"""Checkpoints with Orbax: written whole or not at all, restored bit for bit.

A checkpoint holds the parameters, the rest of the train state with the root key, what was sampled
ahead, where the data stands, the reference if it moves, and a JSON record. Each is an item of its
own, so that evaluation reads the parameters alone. A reference that does not move is the policy of
checkpoint 0, and is not written again. Left out on purpose: any other format;
`models.save_pretrained` exports.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from grpo_jax.options import whole
from grpo_jax.types import Params, RunState, TrainState

Checkpoints = ocp.training.Checkpointer


def open_checkpoints(folder: str | Path, *, keep: int | None = 2) -> Checkpoints:
    """The checkpoints of a run, as a context manager: the newest `keep` stay, and number 0.

    What an interrupted save left is removed. With `keep` None nothing is removed: so a run is read
    that may be writing.
    """
    whole("keep", keep, 1, or_none=True)
    policies = ocp.training.preservation_policies
    preserved = policies.PreserveAll()
    if keep is not None:
        kept = [policies.LatestN(keep), policies.CustomSteps([0])]
        preserved = policies.AnyPreservationPolicy(kept)
    return ocp.training.Checkpointer(
        Path(folder).absolute(),
        preservation_policy=preserved,
        cleanup_tmp_directories=keep is not None,
    )


def save(
    checkpoints: Checkpoints,
    state: RunState,
    record: dict | None = None,
    *,
    moving_reference: bool = False,
) -> None:
    """Writes the checkpoint of `state.iteration`.

    A process killed meanwhile leaves the earlier ones as they were.

    Args:
      checkpoints: where.
      state: what `train` yields.
      record: what JSON can hold, for whoever restores it.
      moving_reference: whether the reference is written too; one that does not move is the policy
        of checkpoint 0.
    """
    fixed = state.reference is not None and not moving_reference
    arrays: list[np.ndarray] = []
    kept: dict[str, Any] = {"queued": len(state.queue), "fixed_reference": fixed}
    kept |= {"data": _form_of(state.data, arrays), "arrays": len(arrays)}
    items = _items(state._replace(reference=None) if fixed else state)
    items |= {"data": arrays} if arrays else {}
    told = {"record": record or {}, "state": kept}
    checkpoints.save_checkpointables(state.iteration, items, custom_metadata=told)


def restore(
    checkpoints: Checkpoints, like: RunState, iteration: int | None = None, *, queued: Any = None
) -> tuple[RunState, dict]:
    """The checkpoint of an iteration (the newest by default) and its record.

    Raises FileNotFoundError where there is no checkpoint.

    Args:
      checkpoints: where.
      like: structure, shapes, dtypes and shardings of the state (arrays, or shapes): the devices
        may be others than those that saved. Its queue and data do not matter.
      iteration: which checkpoint; None: the newest.
      queued: one sampled batch like those of the queue; needed where there is a queue.
    """
    iteration = _known(checkpoints, iteration)
    told = checkpoints.metadata(iteration).custom_metadata
    kept = told["state"]
    if kept["queued"] and queued is None:
        count = kept["queued"]
        raise ValueError(f"checkpoint {iteration} holds {count} queued batches: give queued")
    fixed = kept["fixed_reference"]
    like = like._replace(queue=(queued,) * kept["queued"])
    wanted = _items(like._replace(reference=None) if fixed else like)
    shapes: dict[str, Any] = {name: jax.tree.map(_abstract, tree) for name, tree in wanted.items()}
    if kept["arrays"]:
        shapes["data"] = None  # as it was written, on the host
    items = checkpoints.load_checkpointables(iteration, shapes)
    training = items["training"]
    reference = items.get("reference")
    if fixed and like.reference is not None:
        reference = _first_policy(checkpoints, like)
    state = RunState(
        iteration=iteration,
        train=TrainState(training["step"], items["params"], training["opt_state"]),
        key=training["key"],
        reference=reference,
        queue=jax.tree.unflatten(jax.tree.structure(like.queue), items.get("queue", [])),
        data=_tree_of(kept["data"], iter(items.get("data", ()))),
        objective=training.get("objective"),
    )
    return state, told["record"]


def _first_policy(checkpoints: Checkpoints, like: RunState) -> Params:
    """The policy of checkpoint 0, which may have a critic beside it."""
    alone = jax.tree.structure(like.reference) == jax.tree.structure(like.train.params)
    params = restore_params(checkpoints, like.reference if alone else like.train.params, 0)
    return params if alone else params["policy"]


def restore_params(checkpoints: Checkpoints, like: Params, iteration: int | None = None) -> Params:
    """The parameters alone of an iteration, the newest by default; a critic's too if `like` is."""
    iteration = _known(checkpoints, iteration)
    shapes = {"params": jax.tree.map(_abstract, like)}
    return checkpoints.load_checkpointables(iteration, shapes)["params"]


def iterations(checkpoints: Checkpoints) -> list[int]:
    """The numbers of the complete checkpoints, ascending."""
    return sorted(checkpoint.step for checkpoint in checkpoints.checkpoints)


def _items(state: RunState) -> dict[str, Any]:
    train = state.train
    training = {"step": train.step, "opt_state": train.opt_state, "key": state.key}
    if state.objective is not None:
        training["objective"] = jax.tree.map(_array, state.objective)
    items = {"params": train.params, "training": training}
    if state.reference is not None:
        items["reference"] = state.reference
    if state.queue:
        items["queue"] = jax.tree.leaves(state.queue)
    return items


# Of `RunState.data` the restoring program knows nothing: its form is written into the record, its
# arrays into a list. Orbax alone would turn numbers that are keys into text, and take no array
# without elements.


def _form_of(tree: Any, arrays: list[np.ndarray]) -> Any:
    """The form of a tree of dicts, lists and arrays as JSON; its arrays are added to `arrays`."""
    if tree is None:
        return None
    if type(tree) is dict:
        return {"dict": [[_key(name), _form_of(own, arrays)] for name, own in tree.items()]}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_form_of(own, arrays) for own in tree]}
    if isinstance(tree, tuple) or (array := np.asarray(tree)).dtype.kind in "OSU":
        wanted = "a tree of dicts, lists, tuples and arrays of numbers"
        raise TypeError(f"RunState.data must be {wanted} to be saved; it holds {tree!r}")
    if array.size:
        arrays.append(array)
    return {"array": [array.dtype.name, list(array.shape)]}


def _tree_of(form: Any, arrays: Iterator[np.ndarray]) -> Any:
    """The tree of a form, with the next of the arrays wherever one was."""
    if form is None:
        return None
    ((kind, content),) = form.items()
    if kind == "dict":
        return {name: _tree_of(own, arrays) for name, own in content}
    if kind == "array":
        dtype, shape = content
        return next(arrays) if math.prod(shape) else np.zeros(shape, dtype)
    trees = [_tree_of(own, arrays) for own in content]
    return tuple(trees) if kind == "tuple" else trees


def _key(name: Any) -> str | int:
    """A key of a dict as JSON keeps it in a list: text, or a whole number."""
    if isinstance(name, np.integer):
        return int(name)
    if not isinstance(name, str | int):
        raise TypeError(f"keys in RunState.data must be text or whole numbers, got {name!r}")
    return name


def _array(x: Any) -> Any:
    """An array, for Orbax takes no NumPy scalars; shapes stay as they are."""
    return x if isinstance(x, jax.ShapeDtypeStruct) else np.asarray(x)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _known(checkpoints: Checkpoints, iteration: int | None) -> int:
    known = iterations(checkpoints)
    if iteration is None and known:
        return known[-1]
    if iteration not in known:
        which = "" if iteration is None else f"{iteration} "
        raise FileNotFoundError(
            f"no checkpoint {which}in {checkpoints.directory}; there are: {known}"
        )
    return iteration
