"""What a checkpoint tells of its run, and whether a run that is resumed is still the same one.

The configuration is written with every state, beside the versions of whatever computed it. A run
that is resumed is compared with it before anything is built: what would change the numbers of the
iterations to come is refused, by name, wherever it was changed.
"""

import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax

from grpo_jax.config import TrainConfig
from grpo_jax.options import OptionError
from grpo_jax.runs.folder import json_text

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grpo_jax")
# Where a run computes, and where it lies: a resumed run may be told anew.
PLACES = ("out", "mesh", "pmap", "decode_weights", "compile_ahead")
# Options that change no number of an iteration: --override takes them.
SAFE = (
    "save_every",
    "keep_checkpoints",
    "keep_minutes",
    "keep_best",
    "eval_every",
    "eval_batch_size",
    "log_completions",
)


def record_of(config: TrainConfig) -> dict[str, Any]:
    """What every checkpoint of a run tells of it, as JSON holds it; not where its folder is."""
    told = json.loads(json_text(config))
    told.pop("out")
    return {"config": told, "made_by": made_by()}


def made_by() -> dict[str, str | None]:
    """The versions of what computes, the commit of the working directory, and the devices' kind."""
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES}
    return versions | {"commit": commit(), "devices": jax.devices()[0].device_kind}


def commit() -> str | None:
    """The git commit of the working directory, with "+" where files differ; None without one."""

    def git(*arguments: str) -> str:
        told = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return told.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def check_same_run(
    record: Mapping[str, Any],
    config: TrainConfig,
    overrides: Collection[str],
    tell: Callable[[str], None],
) -> None:
    """Raises ValueError where a resumed run is not the one of its checkpoints.

    Args:
      record: that of its newest checkpoint.
      config: how it is to go on.
      overrides: the options whose change is meant; only safe ones.
      tell: is told what computes now and did not before, which may change the last bits.
    """
    now = record_of(config)
    was, new = (dict(flat(told["config"])) for told in (record, now))
    names = [name for name in {**was, **new} if was.get(name) != new.get(name)]
    changed = [name for name in names if name not in PLACES]
    refused = [name for name in changed if name not in overrides]
    if refused:
        listed = ", ".join(
            f"{name} is {json.dumps(new.get(name))} and was {json.dumps(was.get(name))}"
            for name in refused
        )
        raise ValueError(
            f"{config.out} is not the run of its checkpoints: {listed}. Put config.json right, or "
            "say --override NAME=VALUE where the change is meant and changes no number"
        )
    for name in changed:
        check_override(name, config)
    before, after = record["made_by"], now["made_by"]
    other = [
        f"{name} {after[name]} (was {before.get(name)})"
        for name in after
        if after[name] != before.get(name)
    ]
    if other:
        tell(f"the run goes on with {', '.join(other)}: numbers may differ in their last bits")


def check_override(name: str, config: TrainConfig) -> None:
    """Raises an `OptionError` for an option that a run cannot change on its way."""
    if name in SAFE or name in PLACES[1:]:
        return
    schedule = config.optimizer.schedule
    if name == "steps" and schedule == "constant":
        return
    if name == "steps":
        reason = f"the {schedule} schedule of the learning rate is computed from them"
    else:
        reason = "it changes what is trained; begin another run with --config RUN/config.json"
    raise OptionError(
        "override",
        f"cannot change {name} of a run that has begun: {reason}. "
        f"It takes {', '.join(SAFE)}, the devices, and steps where the schedule is constant",
    )


def flat(told: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The options of a configuration by the names of their flags, as JSON holds their values."""
    for name, value in told.items():
        if isinstance(value, Mapping):
            yield from flat(value)
        else:
            yield name, value
