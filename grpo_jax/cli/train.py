"""grpo-jax train: a new run, or one to continue."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

from grpo_jax.config import TINY, TrainConfig, load_config, read_config
from grpo_jax.named_options import flag, from_json, named_value, option, option_paths
from grpo_jax.options import OptionError, did_you_mean

RUNS = "runs"
# Options that change no number of a run that is resumed.
ELSEWHERE = ("mesh", "pmap", "decode_weights", "compile_ahead")


@dataclasses.dataclass(frozen=True)
class Train(TrainConfig):
    __doc__ = TrainConfig.__doc__

    resume: str | None = None
    """A run folder to continue behind its newest checkpoint; only its devices may be changed."""
    override: tuple[str, ...] = ()
    """With --resume, options that are to change and change no number: save_every=5 steps=400."""
    config: str | None = None
    """A config.json whose run is repeated, in a folder of its own; flags change its options."""
    dry_run: bool = False
    """Show prompts, lengths, rewards of known answers, and what a run takes; train nothing."""
    distributed: str | None = None
    """Several processes: "auto" (TPU pods, Slurm), or HOST:PORT,PROCESSES,INDEX of process 0."""

    def __post_init__(self):
        """Nothing is checked here but in `narrowed`: an error then is told in the flags' words."""

    @classmethod
    def repeating(cls, path: str) -> "Train":
        """The options of a config.json, as defaults of the flags; the folder is another one."""
        config = read_config(path)
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        return cls(**fields | {"out": None, "config": path})


def train(command: Train) -> None:
    from grpo_jax.parallel import processes
    from grpo_jax.runs import run

    check_run(command)
    if command.dry_run:
        show_dry_run(command)
        return
    if command.distributed is not None:
        processes.join(command.distributed)
    try:
        resume = command.resume is not None
        run.train(run_config(command), resume=resume, overrides=override_names(command))
    except processes.ProcessError:
        raise
    except Exception as error:
        if command.distributed is None:
            raise
        processes.abort_process(error)


def show_dry_run(command: Train) -> None:
    from grpo_jax.cli.dry_run import dry_run

    if command.resume is not None:
        raise OptionError("dry_run", "is for a new run; leave out --resume")
    dry_run(narrowed(command, TrainConfig).resolved())


def check_run(command: Train) -> None:
    """Raises ValueError for options that do not fit; before processes are joined."""
    if command.resume is None:
        if command.override:
            raise OptionError("override", "changes a run that goes on; it needs --resume")
        narrowed(command, TrainConfig)
    elif command.config is not None:
        raise OptionError("config", "begins another run, and --resume continues one; give one")
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
        config = overridden(load_config(command.resume), command)
        return elsewhere(config, command, command.resume)
    config = narrowed(command, TrainConfig)
    free = partial(run.next_folder, RUNS, f"{config.task_name}-{Path(config.model).name}")
    out = config.out or str(processes.run_and_gather(free)[0])
    return dataclasses.replace(config, out=out).resolved()


def override_names(command: Train) -> tuple[str, ...]:
    """The options that --override names."""
    names = [named_value("override", pair)[0].replace("-", "_") for pair in command.override]
    known = option_paths(TrainConfig)
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise OptionError("override", f"{name!r} is no option of a run{hint}")
    return tuple(names)


def overridden(config: TrainConfig, command: Train) -> TrainConfig:
    """The configuration of a run with what --override changes, which must be safe."""
    from grpo_jax.runs.folder import json_text
    from grpo_jax.runs.record import check_override

    values = json.loads(json_text(config))
    for name, pair in zip(override_names(command), command.override, strict=True):
        check_override(name, config)
        *within, last = option_paths(TrainConfig)[name]
        target = values
        for part in within:
            target = target[part]
        target[last] = named_value("override", pair)[1]
    return from_json(TrainConfig, values, "--override") if command.override else config


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
