"""A run on disk: builds what a configuration names, trains, and keeps the run folder.

This is the caller's `for` loop around `iterate`: log, evaluate, save. Left out on purpose: any
decision of the algorithm; a program that needs another loop writes its own around the same stages.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from grpo_jax.components import Components, build, on_host, stages_of
from grpo_jax.config import TrainConfig, load_config
from grpo_jax.inference.critic import policy_of, with_critic
from grpo_jax.parallel.backends import SINGLE, sharded
from grpo_jax.parallel.processes import is_main_process, run_and_gather
from grpo_jax.parallel.programs import Program, listed
from grpo_jax.parallel.sharding import make_mesh, mesh_sizes
from grpo_jax.runs import checkpoint, folder, plots
from grpo_jax.runs.cache import keep_programs
from grpo_jax.runs.lock import Claim
from grpo_jax.runs.record import record_of
from grpo_jax.runs.saving import Saver
from grpo_jax.runs.starting import (
    RunStart,
    Unwritten,
    check_resumable,
    claim_folder,
    restored,
    run_files,
)
from grpo_jax.runs.terminal import Screen
from grpo_jax.training.evaluate import GREEDY, Evaluation, evaluate
from grpo_jax.training.loop import iterate
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.programs import programs_of
from grpo_jax.training.sft import sft
from grpo_jax.training.stages import Stages
from grpo_jax.types import Params, RunState

SHOWN = ("reward", "held_out", "frac_zero_variance", "length", "kl")


class LoadedRun(NamedTuple):
    """A run folder opened to be used: what it was made with, and its newest parameters."""

    config: TrainConfig
    components: Components
    params: Params
    iteration: int


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    overrides: Collection[str] = (),
    screen: Screen | None = None,
) -> dict:
    """Runs a configuration to its end in `config.out` and returns the summary.

    With `resume` it continues behind the newest checkpoint of that folder that is whole, as if it
    had never stopped. Raises FileExistsError where the folder already holds a run or another run
    holds the folder, FileNotFoundError where there is none to resume, DamagedError where no
    checkpoint can be restored, ValueError where the configuration is not that of the checkpoints;
    `overrides` are the options whose change is meant.
    """
    began = time.perf_counter()
    out = Path(config.out)
    keep_programs()
    screen = screen or Screen(Console(quiet=not is_main_process()))
    claim = claim_folder(out, resume)
    try:
        summary = _train(config, resume, overrides, screen, claim, began)
    except BaseException:
        if claim is not None and not (out / "checkpoints" / "0").is_dir():
            claim.remove()  # it has come to nothing
        raise
    finally:
        if claim is not None:
            claim.release()
    screen.summary(summary, out)
    return summary


def _train(
    config: TrainConfig,
    resume: bool,
    overrides: Collection[str],
    screen: Screen,
    claim: Claim | None,
    began: float,
) -> dict:
    """The run in a folder that is held."""
    out = Path(config.out)
    # What is wrong with a new run is told before anything is written.
    components = None if resume else build(config)
    with _checkpoints(config) as checkpoints:
        if components is None:
            check_resumable(config, checkpoints, overrides, screen.tell)
            components = build(config, folder.read_data(out))
        stages = stages_of(config, components)
        _tell_devices(components, screen)
        start = None
        if checkpoint.iterations(checkpoints):
            start = restored(config, components, stages, checkpoints, screen.tell)
        behind = (start.state.iteration + 1 if start else 0) if resume else None
        with run_files(out, behind, claim, screen.tell) as files:
            files.write_config(config)
            if components.task.record is not None and not resume:
                files.write_data(components.task.record)
            moving = components.update_reference is not None
            saver = Saver(checkpoints, files.patience, files.sync, moving)
            told = record_of(config)
            run = _Run(config, components, stages, saver, files, screen, began, told)
            start = start or _begin(run)
            run = run._replace(began=began - start.seconds)
            _iterate(run, start.state)
            return run_and_gather(partial(_finish, run))[0]


def _checkpoints(config: TrainConfig) -> checkpoint.Checkpoints:
    """The checkpoints of a run that writes them."""
    return checkpoint.open_checkpoints(
        Path(config.out) / "checkpoints",
        keep=config.keep_checkpoints,
        keep_minutes=config.keep_minutes,
        keep_best=config.keep_best,
    )


class _Run(NamedTuple):
    """What a run has at hand while it goes on."""

    config: TrainConfig
    components: Components
    stages: Stages
    saver: Saver
    files: folder.RunFolder | Unwritten
    screen: Screen
    began: float
    told: dict

    def record(self) -> dict:
        """What a checkpoint tells besides the state."""
        return self.told | {"seconds": round(time.perf_counter() - self.began, 3)}

    def policy(self, state: RunState) -> Params:
        return self.stages.policy(state.train.params)


def _tell_devices(components: Components, screen: Screen) -> None:
    devices = components.devices
    if devices is not SINGLE:
        moved = devices.moved_bytes(components.params) / 1e6
        cost = f"; for decoding each device receives {moved:.3g} MB of weights an iteration"
        processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        told = f"devices: {devices.name}{processes}{cost if moved else ''}"
        screen.console.print(told, highlight=False)
    elif jax.device_count() > 1:
        count = jax.device_count()
        screen.console.print(f"one of {count} devices is used; --mesh data={count} uses all")


def held_out(
    config: TrainConfig, components: Components, params: Params, **options: Any
) -> tuple[list[dict], Evaluation]:
    """The held-out rows that a run is judged on, and their evaluation.

    Greedy unless `options` of `evaluate` say otherwise.
    """
    rows = list(islice(components.task.held_out, config.eval_rows))
    usual = {
        "generation": GREEDY._replace(max_new_tokens=config.generation.max_new_tokens),
        "batch_size": config.eval_batch_size,
        "prompt_length": components.prompt_length,
        "scoring": config.scoring,
        "devices": components.devices,
    }
    with_model = (components.model, params, components.tokenizer, components.task, rows)
    return rows, evaluate(*with_model, **(usual | options))


def start_policy(config: TrainConfig, components: Components, screen: Screen) -> Params:
    """The parameters that GRPO starts from: the model's own, or those after supervised updates."""
    params = components.params
    if not config.sft_steps:
        return params
    # A constant rate where the loss decides when to end: the end of a schedule would have to be
    # known before.
    schedule = "constant" if config.sft_target_loss else "cosine"
    warmup = min(20, config.sft_steps)
    optimizer = adamw(3e-3, total_updates=config.sft_steps, lr_warmup=warmup, schedule=schedule)
    updates = sft(
        components.model,
        params,
        components.task,
        components.tokenizer,
        optimizer,
        steps=config.sft_steps,
        seed=config.seed,
        prompt_length=components.prompt_length,
        devices=components.devices,
    )
    with screen.phase("supervised fine-tuning", config.sft_steps) as show:
        for state, metrics in until_loss(updates, config.sft_target_loss):
            params = state.params
            show(metrics["iteration"], loss=metrics["loss"])
    return params


def until_loss(updates: Iterator[tuple[Any, dict]], target: float) -> Iterator[tuple[Any, dict]]:
    """The updates until the mean of the last eight losses is at most `target`."""
    losses: deque[float] = deque(maxlen=8)
    for state, metrics in updates:
        yield state, metrics
        losses.append(float(metrics["loss"]))
        if len(losses) == losses.maxlen and np.mean(losses) <= target:
            return


def _begin(run: _Run) -> RunStart:
    """The policy that training starts from, its evaluation, and checkpoint 0."""
    params = start_policy(run.config, run.components, run.screen)
    held = len(run.components.task.held_out)
    rows = min(held, run.config.eval_rows or held)
    with run.screen.phase("evaluation before GRPO", rows) as show:
        _, result = held_out(run.config, run.components, params, progress=show)
    state = run.stages.start(params)
    run.files.log({"iteration": 0} | _held_out_metrics(result))
    run.saver.save(state, run.record(), _judged(result.mean_reward), wait=True)
    return RunStart(state)


def _held_out_metrics(result: Evaluation) -> dict[str, float]:
    return {"held_out": result.mean_reward, "held_out_length": result.length}


def _judged(held_out: Any) -> float | None:
    """A held-out reward by which a checkpoint may be the best; None where there is none."""
    return None if held_out is None or not np.isfinite(held_out) else float(held_out)


def _iterate(run: _Run, state: RunState) -> None:
    """The caller's `for` loop around `iterate`: evaluate, log, save."""
    config, screen = run.config, run.screen
    if config.compile_ahead and state.iteration < config.steps:
        compile_programs(run, programs_of(run.stages, state, run.components.task))
    iterations = iterate(
        run.stages,
        state,
        steps=config.steps,
        max_staleness=config.max_staleness,
        update_reference=run.components.update_reference,
    )
    with screen.phase("GRPO", config.steps, start=state.iteration) as show:
        for state, metrics in iterations:
            iteration = state.iteration
            last = iteration == config.steps
            if last or iteration % config.eval_every == 0:
                metrics |= evaluated(run, state, show)
            run.files.log(metrics, completions=config.log_completions)
            if last or iteration % config.save_every == 0:
                held_out = _judged(metrics.get("held_out"))
                run.saver.save(state, run.record(), held_out, wait=last)
            else:
                run.saver.look(state, run.record())
            shown = {name: metrics[name] for name in SHOWN if name in metrics}
            shown["tokens_per_second"] = tokens_per_second(metrics)
            show(iteration, **shown)


def evaluated(run: _Run, state: RunState, show: Callable) -> dict[str, float]:
    """Held-out metrics of a state, with progress on the run's display."""

    def progress(rows: int) -> None:
        show(state.iteration - 1, note=f"{rows} held-out rows evaluated")

    policy = run.policy(state)
    _, result = held_out(run.config, run.components, policy, progress=progress)
    return _held_out_metrics(result)


def tokens_per_second(metrics: dict) -> float:
    seconds = [value for name, value in metrics.items() if name.startswith("seconds/")]
    return metrics["tokens"] / max(sum(seconds), 1e-9)


def compile_programs(run: _Run, programs: list[Program]) -> None:
    """Compiles what the iterations may run, and the evaluation among them where none was before."""
    began = time.perf_counter()
    with listed() as found:
        held_out(run.config, run.components, jax.eval_shape(lambda: run.components.params))
    programs = [*programs, *found.values()]
    with run.screen.phase("compiling", len(programs)) as show:
        for done, program in enumerate(programs):
            show(done, note=program.name)
            program.compile()
        show(len(programs))
    seconds = time.perf_counter() - began
    told = f"{len(programs)} programs compiled ahead in {seconds:.1f} s"
    run.screen.console.print(told, highlight=False)


def _finish(run: _Run) -> dict | None:
    """The picture and the summary, by the process that writes the folder."""
    if not is_main_process():
        return None
    path = Path(run.config.out)
    rows = folder.read_lines(path / "metrics.jsonl")
    plots.plot_curves(rows, path / "curves.png")
    summary = _summary(run.config, rows, time.perf_counter() - run.began)
    run.files.write_summary(summary)
    return summary


def _summary(config: TrainConfig, rows: list[dict], seconds: float) -> dict:
    return {
        "held_out_before": rows[0]["held_out"],
        "held_out_after": rows[-1]["held_out"],
        "steps": config.steps,
        "seconds": round(seconds, 1),
        "sampled_tokens": sum(row.get("tokens", 0) for row in rows),
        "task": config.task_name,
        "model": config.model,
        "objective": config.objective,
        "seed": config.seed,
    }


def open_run(
    run: str | Path,
    iteration: int | None = None,
    *,
    mesh: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> LoadedRun:
    """A run's components and the parameters of one of its checkpoints, the newest by default.

    On one device unless `mesh` says otherwise, wherever the run was trained. `changes` are options
    of the run that are now others, such as its rows.
    """
    keep_programs()
    one_device = {"mesh": None, "pmap": None, "decode_weights": "gather"}
    config = dataclasses.replace(load_config(run), **one_device, **(changes or {}))
    components = placed(config, mesh, None if changes else folder.read_data(run))
    path = Path(run) / "checkpoints"
    if not path.is_dir():
        raise FileNotFoundError(f"{run} has no checkpoints yet")
    like = with_critic(components.critic, jax.random.key(0), components.params)
    like = components.devices.put("state", like)
    with checkpoint.open_checkpoints(path, keep=None) as checkpoints:
        iteration, params = checkpoint.restore_policy(checkpoints, like, iteration)
    return LoadedRun(config, components, policy_of(components.critic, params), iteration)


def open_model(config: TrainConfig, *, mesh: str | None = None) -> LoadedRun:
    """A model as it is, before any training, as if it were a run's."""
    keep_programs()
    components = placed(config, mesh)
    return LoadedRun(config, components, components.params, 0)


def placed(
    config: TrainConfig, mesh: str | None, record: Mapping[str, Any] | None = None
) -> Components:
    """The components of a configuration, to be used over a mesh if there is one."""
    with on_host(mesh is not None):
        components = build(config, record)
    if mesh is None:
        return components
    devices = sharded(make_mesh(**mesh_sizes(mesh)), components.model.axes)
    return components._replace(devices=devices)


def next_folder(root: str | Path, name: str) -> Path:
    """`root/name-0001`, or the first number that is free."""
    numbers = (Path(root) / f"{name}-{i:04d}" for i in range(1, 10_000))
    return next(path for path in numbers if not path.exists())
