"""How a run begins: its folder is held, and what an earlier start of it left is found."""

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.components import Components
from grpo_jax.config import TrainConfig
from grpo_jax.parallel.processes import is_main_process, run_and_gather
from grpo_jax.runs import checkpoint, folder
from grpo_jax.runs.lock import Claim
from grpo_jax.runs.patience import Patience
from grpo_jax.runs.record import check_same_run
from grpo_jax.training.batch import rollout_shapes
from grpo_jax.training.stages import Stages
from grpo_jax.types import RunState

Tell = Callable[[str], None]


class RunStart(NamedTuple):
    """Where a run begins or continues; `seconds` were spent on it by earlier starts."""

    state: RunState
    seconds: float = 0.0


def claim_folder(out: Path, resume: bool) -> Claim | None:
    """Holds the folder of a run, before anything slow; None in a process that does not write it."""
    held: list[Claim] = []

    def claim() -> None:
        if is_main_process():
            check_folder(out, resume)
            held.append(Claim(out, make=not resume))
            check_folder(out, resume)  # another run may have come and gone between the two

    try:
        run_and_gather(claim)
    except BaseException:
        for own in held:
            own.remove()
        raise
    return held[0] if held else None


def check_folder(out: Path, resume: bool) -> None:
    there = (out / "config.json").exists()
    if there and not resume:
        raise FileExistsError(
            f"{out} already holds a run: continue it with --resume {out}, or choose another --out"
        )
    if resume and not there:
        raise FileNotFoundError(f"no run to resume at {out}")


def run_files(
    out: Path, behind: int | None, claim: Claim | None, tell: Tell
) -> "folder.RunFolder | Unwritten":
    """The files of the run, where this process writes them."""
    if claim is None:
        return Unwritten(tell)
    return folder.RunFolder(out, resume_step=behind, claim=claim, tell=tell)


class Unwritten:
    """The run folder as a process sees it that does not write it: every call does nothing."""

    def __init__(self, tell: Callable[[str], None]):
        self.patience = Patience(tell)

    def __enter__(self) -> "Unwritten":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable:
        return lambda *_, **__: None


def check_resumable(
    config: TrainConfig,
    checkpoints: checkpoint.Checkpoints,
    overrides: Collection[str],
    tell: Tell,
) -> None:
    """Raises an error where a run cannot be continued with this configuration; reads little.

    FileNotFoundError where it had checkpoints and has none, ValueError where it is another run than
    that of its checkpoints.
    """
    if run_and_gather(partial(checkpoint.iterations, checkpoints))[0]:
        check_same_run(checkpoint.newest_record(checkpoints), config, overrides, tell)
    else:
        run_and_gather(partial(check_unbegun, Path(config.out)))


def restored(
    config: TrainConfig,
    components: Components,
    stages: Stages,
    checkpoints: checkpoint.Checkpoints,
    tell: Tell,
) -> RunStart:
    """The newest checkpoint that is whole; those after it, which are not, are renamed."""
    like = stages.start(components.params)
    shapes = queued_shapes(config, components.prompt_length)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    queued = components.devices.put("rows", zeros)
    state, record = checkpoint.restore(checkpoints, like, queued=queued, tell=tell)
    for damaged in checkpoint.set_aside(checkpoints, state.iteration):
        tell(f"checkpoint {damaged} is now called {damaged}.damaged")
    return RunStart(state, record["seconds"])


def check_unbegun(out: Path) -> None:
    """Raises FileNotFoundError where a run without checkpoints has had some."""
    steps = folder.steps_of(out / "metrics.jsonl")
    if max(steps, default=0) > 0:
        raise FileNotFoundError(
            f"{out} has no checkpoint, and its metrics tell of {max(steps)} iterations: its "
            f"checkpoints were removed from {out / 'checkpoints'}. Bring them back, or begin anew "
            "with another --out; nothing was changed"
        )


def queued_shapes(config: TrainConfig, prompt_length: int) -> Any:
    """A batch as it waits in the queue, as shapes."""
    P = config.batching.prompts_per_step
    generation = config.generation
    sampled = rollout_shapes(P, generation.group_size, prompt_length, generation.max_new_tokens)
    number_P = jax.ShapeDtypeStruct((P,), np.int32)
    return sampled._replace(row_P=number_P, update_P=number_P)
