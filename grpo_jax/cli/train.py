"""grpo-jax train: a new run, or one to continue."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from grpo_jax.config import TINY, TrainConfig, load_config
from grpo_jax.named_options import flag, option, option_paths

RUNS = "runs"


# Options that change no number of a run that is resumed.
ELSEWHERE = ("mesh", "pmap", "decode_weights", "compile_ahead")


@dataclasses.dataclass(frozen=True)
class Train(TrainConfig):
    __doc__ = TrainConfig.__doc__

    resume: str | None = None
    """A run folder to continue behind its newest checkpoint; only its devices may be changed."""
    distributed: str | None = None
    """Several processes: "auto" (TPU pods, Slurm), or HOST:PORT,PROCESSES,INDEX of process 0."""

    def __post_init__(self):
        """Nothing is checked here but in `narrowed`: an error then is told in the flags' words."""


def train(command: Train) -> None:
    from grpo_jax.parallel import processes
    from grpo_jax.runs import run

    check_run(command)
    if command.distributed is not None:
        processes.join(command.distributed)
    try:
        run.train(run_config(command), resume=command.resume is not None)
    except processes.ProcessError:
        raise
    except Exception as error:
        if command.distributed is None:
            raise
        processes.abort_process(error)


def check_run(command: Train) -> None:
    """Raises ValueError for options that do not fit; before processes are joined."""
    if command.resume is None:
        narrowed(command, TrainConfig)
    elif given := changed(command, ELSEWHERE):
        raise ValueError(
            f"--resume takes every option from the run's config.json; leave out {given}"
        )
    else:
        run_config(command)


def run_config(command: Train) -> TrainConfig:
    """The run that a command asks for: a new one, in the next free folder, or one to continue."""
    from grpo_jax.parallel import processes
    from grpo_jax.runs import run

    if command.resume is not None:
        return elsewhere(load_config(command.resume), command, command.resume)
    config = narrowed(command, TrainConfig)
    free = partial(run.next_folder, RUNS, f"{config.task}-{Path(config.model).name}")
    out = config.out or str(processes.run_and_gather(free)[0])
    return dataclasses.replace(config, out=out).resolved()


def narrowed(command: Any, cls: type) -> Any:
    """The part of a command that is a configuration, checked."""
    return cls(**{field.name: getattr(command, field.name) for field in dataclasses.fields(cls)})


def changed(command: TrainConfig, spared: tuple[str, ...] = ()) -> str:
    """The flags of a run that were given a value of their own, for a message."""
    usual = TrainConfig.suited(command.model)
    names = [name for name in option_paths(TrainConfig) if name not in spared]
    given = [name for name in names if option(command, name) != option(usual, name)]
    if command.model != TINY:
        given.append("model")
    return ", ".join(map(flag, given))


def elsewhere(config: TrainConfig, given: TrainConfig, out: str) -> TrainConfig:
    """The configuration of a run, on the devices that are given now if any are."""
    moved: dict[str, Any] = {"out": out}
    if given.mesh or given.pmap:
        moved |= {name: getattr(given, name) for name in ("mesh", "pmap", "decode_weights")}
    if given.compile_ahead:
        moved["compile_ahead"] = True
    return dataclasses.replace(config, **moved)
