"""Checkpoints with Orbax: written whole or not at all, restored bit for bit, verified.

A checkpoint holds the parameters, the rest of the train state with the root key, what was sampled
ahead, where the data stands, the reference if it moves, and a JSON record. Each is an item of its
own, so that evaluation reads the parameters alone. A reference that does not move is the policy of
checkpoint 0, and is not written again. Every array and the record have a checksum, by which a
damaged checkpoint is known; the newest whole one before it is restored. Left out on purpose: any
other format; `models.save_pretrained` exports.
"""

import gc
import hashlib
import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from grpo_jax.options import whole
from grpo_jax.parallel.processes import is_main_process, run_and_gather
from grpo_jax.runs.data_form import form_of, tree_of
from grpo_jax.runs.digest import differing, digests
from grpo_jax.runs.quiet import cause_in_a_line, errors_told_once
from grpo_jax.training.finite import NonFiniteError, all_finite
from grpo_jax.types import Params, RunState, TrainState

Checkpoints = ocp.training.Checkpointer
BEST = "held_out"  # the metric by which the best checkpoint is known

_all_finite = jax.jit(all_finite)


class DamagedError(OSError):
    """A checkpoint cannot be restored as it was saved."""


def open_checkpoints(
    folder: str | Path,
    *,
    keep: int | None = 2,
    keep_minutes: int | None = None,
    keep_best: int = 0,
) -> Checkpoints:
    """The checkpoints of a run, as a context manager: the newest `keep` stay, and number 0.

    What an interrupted save left is removed. With `keep` None nothing is removed: so a run is read
    that may be writing.

    Args:
      folder: where.
      keep: how many of the newest stay; None: all of them.
      keep_minutes: one checkpoint stays for each so many minutes; None: none does for its time.
      keep_best: how many of those stay that had the highest `held_out` (see `save`).
    """
    whole("keep", keep, 1, or_none=True)
    whole("keep_minutes", keep_minutes, 1, or_none=True)
    whole("keep_best", keep_best, 0)
    policies = ocp.training.preservation_policies
    preserved = policies.PreserveAll()
    if keep is not None:
        kept: list[Any] = [policies.LatestN(keep), policies.CustomSteps([0])]
        if keep_minutes is not None:
            kept.append(policies.EveryNSeconds(60 * keep_minutes))
        if keep_best:
            best = {"get_metric_fn": _best, "n": keep_best}
            kept.append(policies.BestN(**best, keep_checkpoints_without_metrics=False))
        preserved = policies.AnyPreservationPolicy(kept)
    with errors_told_once():
        return ocp.training.Checkpointer(
            Path(folder).absolute(),
            preservation_policy=preserved,
            cleanup_tmp_directories=keep is not None,
        )


def _best(metrics: dict[str, float]) -> float:
    return metrics.get(BEST, -math.inf)


def save(
    checkpoints: Checkpoints,
    state: RunState,
    record: dict | None = None,
    *,
    moving_reference: bool = False,
    held_out: float | None = None,
    wait: bool = True,
) -> None:
    """Writes the checkpoint of `state.iteration`.

    A process killed meanwhile leaves the earlier ones as they were. Raises NonFiniteError where
    the parameters are not finite, with nothing written or removed.

    Args:
      checkpoints: where.
      state: what `train` yields.
      record: what JSON can hold, for whoever restores it.
      moving_reference: whether the reference is written too; one that does not move is the policy
        of checkpoint 0.
      held_out: the state's held-out reward, by which the best checkpoints are kept.
      wait: whether to return when all is written, or when the arrays are copied to the host; an
        error of the writing is then raised by the next save or by `checkpoints.wait()`.
    """
    if not _all_finite(state.train.params):
        raise NonFiniteError(
            f"the parameters behind iteration {state.iteration} are not finite and are not saved; "
            f"the checkpoints of before stay: {iterations(checkpoints)}"
        )
    fixed = state.reference is not None and not moving_reference
    arrays: list[np.ndarray] = []
    kept: dict[str, Any] = {"queued": len(state.queue), "fixed_reference": fixed}
    kept |= {"data": form_of(state.data, arrays), "arrays": len(arrays)}
    items = _items(state._replace(reference=None) if fixed else state)
    items |= {"data": arrays} if arrays else {}
    kept["digests"] = {name: digests(tree) for name, tree in items.items()}
    told = {"record": record or {}, "state": kept}
    checkpoints.wait()  # one at a time: Orbax would leave this one out
    checkpoints.save_checkpointables_async(
        state.iteration,
        items,
        metrics=None if held_out is None else {BEST: held_out},
        custom_metadata=told | {"seal": seal(told)},
    )
    if wait:
        checkpoints.wait()


def seal(told: dict) -> str:
    """A checksum of what JSON holds."""
    text = json.dumps([told["record"], told["state"]], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def restore(
    checkpoints: Checkpoints,
    like: RunState,
    iteration: int | None = None,
    *,
    queued: Any = None,
    tell: Callable[[str], None] = _warn,
) -> tuple[RunState, dict]:
    """The checkpoint of an iteration (by default the newest that is whole) and its record.

    Raises FileNotFoundError where there is no checkpoint, DamagedError where none is whole.

    Args:
      checkpoints: where.
      like: structure, shapes, dtypes and shardings of the state (arrays, or shapes): the devices
        may be others than those that saved. Its queue and data do not matter.
      iteration: which checkpoint; None: the newest.
      queued: one sampled batch like those of the queue; needed where there is a queue.
      tell: is told of every checkpoint that is skipped, and why.
    """
    return _newest(checkpoints, iteration, lambda own: _read(checkpoints, own, like, queued), tell)


def newest_record(checkpoints: Checkpoints) -> dict:
    """The record of the newest checkpoint whose record is whole."""
    read = lambda own: _told(checkpoints, own)["record"]
    return _newest(checkpoints, None, read, lambda _: None)


def _newest(
    checkpoints: Checkpoints,
    iteration: int | None,
    read: Callable[[int], Any],
    tell: Callable[[str], None],
) -> Any:
    """What `read` makes of the newest checkpoint that it does not find damaged."""
    newest = _known(checkpoints, iteration)
    candidates = [newest]
    if iteration is None:
        candidates = [own for own in reversed(iterations(checkpoints)) if own <= newest]
    reasons = []
    for candidate in candidates:
        try:
            return read(candidate)
        except DamagedError as error:
            reasons.append(f"checkpoint {candidate} is damaged: {error}")
            if candidate != candidates[-1]:
                tell(f"{reasons[-1]}; it is skipped, and the one before it is restored")
    raise DamagedError(
        f"nothing can be restored from {checkpoints.directory}: {'; '.join(reasons)}"
    )


def _read(
    checkpoints: Checkpoints, iteration: int, like: RunState, queued: Any
) -> tuple[RunState, dict]:
    told = _told(checkpoints, iteration)
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
    items = _load(checkpoints, iteration, shapes, told)
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
        data=tree_of(kept["data"], iter(items.get("data", ()))),
        objective=training.get("objective"),
    )
    return state, told["record"]


def _told(checkpoints: Checkpoints, iteration: int) -> dict:
    """What JSON holds of a checkpoint, verified."""

    def read() -> dict:
        told = checkpoints.metadata(iteration).custom_metadata
        if not isinstance(told, dict) or not {"record", "state", "seal"} <= told.keys():
            raise ValueError("its record is not there")
        if seal(told) != told["seal"]:
            raise ValueError("its record does not have the checksum that it was saved with")
        return told

    return _agreed(read)


def _load(checkpoints: Checkpoints, iteration: int, shapes: dict[str, Any], told: dict) -> dict:
    """The items of a checkpoint, verified by every process for what it has read itself."""

    def load() -> dict:
        loaded = {}
        for name, shape in shapes.items():
            if not (Path(checkpoints.directory) / str(iteration) / name).is_dir():
                raise ValueError(f"{name} is missing")
            try:
                loaded |= checkpoints.load_checkpointables(iteration, {name: shape})
            except Exception as error:  # a damaged file ends in an error of whatever read it
                raise ValueError(f"{name} cannot be read: {cause_in_a_line(error)}") from None
        return loaded

    items = _agreed(load)
    # A program of all processes: they are all here, or the line above has raised.
    found = {name: digests(items[name]) for name in shapes}

    def verify() -> None:
        wrong = []
        for name, tree in found.items():
            expected = told["state"]["digests"].get(name, {})
            wrong += [f"{name}/{text}" for text in differing(tree, expected)]
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise ValueError(wrong[0] + more)

    _agreed(verify)
    return items


def _agreed(work: Callable[[], Any]) -> Any:
    """`work()`, or a DamagedError on all processes where it fails on one of them."""
    value = reason = None
    with errors_told_once():
        try:
            value = work()
        except Exception as error:
            reason = cause_in_a_line(error)
        if reason is not None:
            gc.collect()
    reasons = [told for told in run_and_gather(lambda: reason) if told is not None]
    if reasons:
        raise DamagedError(reasons[0])
    return value


def set_aside(checkpoints: Checkpoints, iteration: int) -> list[int]:
    """Renames the checkpoints after an iteration to NUMBER.damaged, and returns their numbers.

    They could not be restored, and the run will write those iterations again.
    """
    later = [own for own in iterations(checkpoints) if own > iteration]

    def rename() -> None:
        for own in later if is_main_process() else ():
            folder = Path(checkpoints.directory) / str(own)
            shutil.rmtree(aside := folder.with_name(f"{own}.damaged"), ignore_errors=True)
            folder.rename(aside)

    run_and_gather(rename)
    if later:
        checkpoints.reload()
    return later


def _first_policy(checkpoints: Checkpoints, like: RunState) -> Params:
    """The policy of checkpoint 0, which may have a critic beside it."""
    alone = jax.tree.structure(like.reference) == jax.tree.structure(like.train.params)
    params = restore_params(checkpoints, like.reference if alone else like.train.params, 0)
    return params if alone else params["policy"]


def restore_params(
    checkpoints: Checkpoints,
    like: Params,
    iteration: int | None = None,
    *,
    tell: Callable[[str], None] = _warn,
) -> Params:
    """The parameters alone of an iteration, as `restore`; a critic's too if `like` has them."""
    return restore_policy(checkpoints, like, iteration, tell=tell)[1]


def restore_policy(
    checkpoints: Checkpoints,
    like: Params,
    iteration: int | None = None,
    *,
    tell: Callable[[str], None] = _warn,
) -> tuple[int, Params]:
    """As `restore_params`, with the number of the iteration whose parameters they are."""

    def read(own: int) -> tuple[int, Params]:
        shapes = {"params": jax.tree.map(_abstract, like)}
        return own, _load(checkpoints, own, shapes, _told(checkpoints, own))["params"]

    return _newest(checkpoints, iteration, read, tell)


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
