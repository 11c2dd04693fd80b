"""Checkpoints with Orbax: written whole or not at all, restored bit for bit.

A checkpoint holds the parameters, the rest of the train state with the root key, what was sampled
ahead, where the data stands, the reference if it moves, and a JSON record. Each is an item of its
own, so that evaluation reads the parameters alone. A reference that does not move is the policy of
checkpoint 0, and is not written again. Left out on purpose: any other format;
`models.save_pretrained` exports.
"""

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
    kept = {"queued": len(state.queue), "fixed_reference": False}
    if state.reference is not None and not moving_reference:
        state = state._replace(reference=None)
        kept["fixed_reference"] = True
    told = (record or {}) | {"iteration": state.iteration} | kept
    checkpoints.save_checkpointables(state.iteration, _items(state), custom_metadata=told)


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
    record = checkpoints.metadata(iteration).custom_metadata
    fixed = record["fixed_reference"]
    like = like._replace(queue=(queued,) * record["queued"], data=None)
    wanted = _items(like._replace(reference=None) if fixed else like)
    shapes = {name: jax.tree.map(_abstract, tree) for name, tree in wanted.items()}
    items = checkpoints.load_checkpointables(iteration, shapes | {"data": None})
    training = items["training"]
    reference = items.get("reference")
    if fixed:
        reference = restore_params(checkpoints, like.reference, 0)
    state = RunState(
        iteration=iteration,
        train=TrainState(training["step"], items["params"], training["opt_state"]),
        key=training["key"],
        reference=reference,
        queue=jax.tree.unflatten(jax.tree.structure(like.queue), items.get("queue", [])),
        data=items["data"]["data"],
        objective=training.get("objective"),
    )
    return state, record


def restore_params(checkpoints: Checkpoints, like: Params, iteration: int | None = None) -> Params:
    """The parameters alone of an iteration, the newest by default; of a critic too, if `like` is."""
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
        training["objective"] = jax.tree.map(np.asarray, state.objective)
    # Of `data` the restoring program knows no structure: it is written as it is, in a tree of its
    # own, whose leaves are arrays (Orbax takes no NumPy scalars).
    items = {"params": train.params, "training": training}
    items["data"] = {"data": jax.tree.map(np.asarray, state.data)}
    if state.reference is not None:
        items["reference"] = state.reference
    if state.queue:
        items["queue"] = jax.tree.leaves(state.queue)
    return items


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
