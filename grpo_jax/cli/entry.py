"""The commands by their names, and how an error is told."""

import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from grpo_jax.cli.arguments import check_trl_names, given_model, given_slice, given_value
from grpo_jax.cli.evaluate import Eval, evaluate
from grpo_jax.cli.plan import Plan, plan
from grpo_jax.cli.sample import Sample, sample
from grpo_jax.cli.train import Train, train
from grpo_jax.config import TINY
from grpo_jax.named_options import flag, option_paths
from grpo_jax.options import OptionError
from grpo_jax.parallel.processes import ProcessError
from grpo_jax.rewards import RewardError
from grpo_jax.training.checks import SamplerMismatchError
from grpo_jax.training.finite import NonFiniteError


def parsed(arguments: list[str]) -> Any:
    """The command that the arguments say."""
    model = given_model(arguments, TINY)
    plan_defaults = Plan.suited(model, **given_slice(arguments))
    repeated = given_value(arguments, "config", None) if arguments[:1] == ["train"] else None
    train_defaults = Train.repeating(repeated) if repeated else Train.suited(model)
    commands = (
        Annotated[Train, tyro.conf.subcommand("train", default=train_defaults)]
        | Annotated[Eval, tyro.conf.subcommand("eval")]
        | Annotated[Sample, tyro.conf.subcommand("sample")]
        | Annotated[Plan, tyro.conf.subcommand("plan", default=plan_defaults)]
    )
    return tyro.cli(
        commands,
        prog="grpo-jax",
        description="GRPO for language models in JAX: train, evaluate, ask, plan.",
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    actions = {Train: train, Eval: evaluate, Sample: sample, Plan: plan}
    try:
        check_trl_names(arguments, {*option_paths(Train), *option_paths(Plan)})
        command = parsed(arguments)
        with plain_warnings():
            actions[type(command)](command)
    except OptionError as error:
        return failed(f"{flag(error.name)} {error.text}")
    except RewardError as error:
        return failed(f"{error}{place_of(error.__cause__)}")
    except (ValueError, OSError, ProcessError, NonFiniteError, SamplerMismatchError) as error:
        return failed(str(error))
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; continue with: grpo-jax train --resume RUN")
        return 130
    return 0


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Warnings are told as a sentence, without the line of the library that they come from."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = usual


def place_of(error: BaseException | None) -> str:
    """File and line that raised an error, where they are known."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    return f"\n  at {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def failed(message: str) -> int:
    """Tells an error; it is no markup, for it may hold brackets."""
    text = Text.assemble(("error: ", "bold red"), message)
    Console(stderr=True).print(text, soft_wrap=True)
    return 2
