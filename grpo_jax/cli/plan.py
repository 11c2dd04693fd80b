"""grpo-jax plan: what a run would need on a TPU slice, compiled here and run nowhere."""

import dataclasses

from rich.console import Console

from grpo_jax.cli.train import narrowed
from grpo_jax.plan.config import PlanConfig


@dataclasses.dataclass(frozen=True)
class Plan(PlanConfig):
    __doc__ = PlanConfig.__doc__

    all: bool = False
    """Compile every program that is listed, and not the largest of each kind alone."""
    json: bool = False
    """Print the figures as one JSON object."""

    def __post_init__(self):
        """As that of `Train`."""


def plan(command: Plan) -> None:
    import jax

    from grpo_jax.plan.plan import make_plan
    from grpo_jax.plan.report import figures, show
    from grpo_jax.runs.folder import json_text

    # Nothing is run: a TPU of this machine is left to others.
    jax.config.update("jax_platforms", "cpu")
    progress = Console(stderr=True)

    def compiling(name: str) -> None:
        progress.print(f"compiling: {name}", style="dim", markup=False)

    try:
        config = narrowed(command, PlanConfig)
        made = make_plan(config, everything=command.all, on_program=compiling)
    except ModuleNotFoundError as error:
        if error.name != "libtpu":
            raise
        raise ValueError(str(error)) from None
    if command.json:
        print(json_text(figures(made)))
    else:
        show(made, Console())
