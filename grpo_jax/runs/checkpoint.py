"""Checkpoints with Orbax: written whole or not at all, restored bit for bit.

A checkpoint holds the parameters, the rest of the train state with the root key, the reference
parameters if they move, and a JSON record (the configuration and the position in the data). Each is
an item of its own, so that evaluation reads the parameters alone. Left out on purpose: any other
format; `models.save_pretrained` exports.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
from orbax.checkpoint import v1 as ocp

from grpo_jax.types import Params, Rollout, TrainState

Checkpoints = ocp.training.Checkpointer


class RunState(NamedTuple):
    """What a run is continued from. `reference` is None where it does not move.

    `pending` holds what was sampled ahead for the next iterations, where data may be stale.
    """

    state: TrainState
    key: jax.Array
    reference: Params | None = None
    pending: tuple[Rollout, ...] = ()


def open_checkpoints(folder: str | Path, *, keep: int | None = 2) -> Checkpoints:
    """The checkpoints of a run, as a context manager: the newest `keep` stay, and number 0, where
    it started from.

    What an interrupted save left is removed. With `keep` None nothing is removed: so a run is read
    that may be writing.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be at least 1, or None to keep all, got {keep}")
    policies = ocp.training.preservation_policies
    return ocp.training.Checkpointer(
        Path(folder).absolute(),
        preservation_policy=policies.PreserveAll()
        if keep is None
        else policies.AnyPreservationPolicy([policies.LatestN(keep), policies.CustomSteps([0])]),
        cleanup_tmp_directories=keep is not None,
    )


def save(checkpoints: Checkpoints, iteration: int, saved: RunState, record: dict) -> None:
    """Writes checkpoint number `iteration`; a process killed meanwhile leaves the earlier ones as
    they were.
    """
    checkpoints.save_checkpointables(iteration, _items(saved), custom_metadata=record)


def restore(
    checkpoints: Checkpoints, like: RunState, iteration: int | None = None
) -> tuple[RunState, dict]:
    """The checkpoint of an iteration (the newest by default) and its record.

    `like` gives structure, shapes, dtypes and shardings (arrays, or `jax.ShapeDtypeStruct`s): the
    devices may be others than those that saved. Raises FileNotFoundError where there is no
    checkpoint.
    """
    iteration = _known(checkpoints, iteration)
    items = checkpoints.load_checkpointables(iteration, jax.tree.map(_abstract, _items(like)))
    rest = items["training"]
    state = TrainState(rest["step"], items["params"], rest["opt_state"])
    record = checkpoints.metadata(iteration).custom_metadata
    pending = jax.tree.unflatten(jax.tree.structure(like.pending), items.get("pending", []))
    return RunState(state, rest["key"], items.get("reference"), pending), record


def restore_params(checkpoints: Checkpoints, like: Params, iteration: int | None = None) -> Params:
    """The parameters alone of an iteration, the newest by default."""
    iteration = _known(checkpoints, iteration)
    return checkpoints.load_checkpointables(iteration, {"params": jax.tree.map(_abstract, like)})[
        "params"
    ]


def iterations(checkpoints: Checkpoints) -> list[int]:
    """The numbers of the complete checkpoints, ascending."""
    return sorted(checkpoint.step for checkpoint in checkpoints.checkpoints)


def _items(saved: RunState) -> dict[str, Any]:
    rest = {"step": saved.state.step, "opt_state": saved.state.opt_state, "key": saved.key}
    items = {"params": saved.state.params, "training": rest}
    items |= {} if saved.reference is None else {"reference": saved.reference}
    return items | ({"pending": jax.tree.leaves(saved.pending)} if saved.pending else {})


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
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
