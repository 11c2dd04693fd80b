"""A run on disk: builds what a configuration names, trains, and keeps the run folder.

This is the caller's `for` loop around `iterate`: log, evaluate, save. Left out on purpose: any
decision of the algorithm; a program that needs another loop writes its own around the same stages.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
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
from grpo_jax.runs.terminal import Screen
from grpo_jax.training.batch import rollout_shapes
from grpo_jax.training.evaluate import GREEDY, Evaluation, evaluate
from grpo_jax.training.loop import iterate
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.programs import programs_of
from grpo_jax.training.sft import sft
from grpo_jax.training.stages import Stages
from grpo_jax.types import Params, RunState

SHOWN = ("reward", "held_out", "frac_zero_variance", "length", "kl")


class RunStart(NamedTuple):
    """Where a run begins or continues; `seconds` were spent on it by earlier starts."""

    state: RunState
    seconds: float = 0.0


class LoadedRun(NamedTuple):
    """A run folder opened to be used: what it was made with, and its newest parameters."""

    config: TrainConfig
    components: Components
    params: Params
    iteration: int


def train(config: TrainConfig, *, resume: bool = False, screen: Screen | None = None) -> dict:
    """Runs a configuration to its end in `config.out` and returns the summary.

    With `resume` it continues behind the newest checkpoint of that folder, as if it had never
    stopped. Raises FileExistsError where the folder already holds a run, FileNotFoundError where
    there is none to resume.
    """
    began = time.perf_counter()
    out = Path(config.out)
    keep_programs()
    screen = screen or Screen(Console(quiet=not is_main_process()))
    run_and_gather(partial(_check_folder, out, resume))
    components = build(config)
    stages = stages_of(config, components)
    _tell_devices(components, screen)
    saved = checkpoint.open_checkpoints(out / "checkpoints", keep=config.keep_checkpoints)
    with saved as checkpoints:
        done = run_and_gather(partial(checkpoint.iterations, checkpoints))[0] if resume else []
        behind = (done[-1] + 1 if done else 0) if resume else None
        written = folder.RunFolder(out, resume_step=behind) if is_main_process() else Unwritten()
        with written as files:
            files.write_config(config)
            run = _Run(config, components, stages, checkpoints, files, screen, began)
            start = _continue(run) if done else _begin(run)
            run = run._replace(began=began - start.seconds)
            _iterate(run, start.state)
            summary = run_and_gather(partial(_finish, run))[0]
    screen.summary(summary, out)
    return summary


class Unwritten:
    """The run folder as a process sees it that does not write it: every call does nothing."""

    def __enter__(self) -> "Unwritten":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable:
        return lambda *_, **__: None


class _Run(NamedTuple):
    """What a run has at hand while it goes on."""

    config: TrainConfig
    components: Components
    stages: Stages
    checkpoints: checkpoint.Checkpoints
    files: folder.RunFolder | Unwritten
    screen: Screen
    began: float

    def save(self, state: RunState) -> None:
        """The checkpoint of a state, with the seconds that the run has taken."""
        record = {"seconds": round(time.perf_counter() - self.began, 3)}
        moving = self.components.update_reference is not None
        checkpoint.save(self.checkpoints, state, record, moving_reference=moving)

    def policy(self, state: RunState) -> Params:
        return self.stages.policy(state.train.params)


def _check_folder(out: Path, resume: bool) -> None:
    there = (out / "config.json").exists()
    if there and not resume:
        raise FileExistsError(
            f"{out} already holds a run: continue it with --resume {out}, or choose another --out"
        )
    if resume and not there:
        raise FileNotFoundError(f"no run to resume at {out}")


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
    rows = list(components.task.held_out)[: config.eval_rows]
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
    rows = len(list(run.components.task.held_out)[: run.config.eval_rows])
    with run.screen.phase("evaluation before GRPO", rows) as show:
        _, result = held_out(run.config, run.components, params, progress=show)
    state = run.stages.start(params)
    run.files.log({"iteration": 0} | _held_out_metrics(result))
    run.save(state)
    return RunStart(state)


def _held_out_metrics(result: Evaluation) -> dict[str, float]:
    return {"held_out": result.mean_reward, "held_out_length": result.length}


def _continue(run: _Run) -> RunStart:
    """The newest checkpoint."""
    like = run.stages.start(run.components.params)
    shapes = queued_shapes(run.config, run.components.prompt_length)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    queued = run.components.devices.put("rows", zeros)
    state, record = checkpoint.restore(run.checkpoints, like, queued=queued)
    return RunStart(state, record["seconds"])


def queued_shapes(config: TrainConfig, prompt_length: int) -> Any:
    """A batch as it waits in the queue, as shapes."""
    P = config.batching.prompts_per_step
    generation = config.generation
    sampled = rollout_shapes(P, generation.group_size, prompt_length, generation.max_new_tokens)
    number_P = jax.ShapeDtypeStruct((P,), np.int32)
    return sampled._replace(row_P=number_P, update_P=number_P)


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
                run.save(state)
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
        "task": config.task,
        "model": config.model,
        "objective": config.objective,
        "seed": config.seed,
    }


def open_run(
    run: str | Path, iteration: int | None = None, *, mesh: str | None = None
) -> LoadedRun:
    """A run's components and the parameters of one of its checkpoints, the newest by default.

    On one device unless `mesh` says otherwise, wherever the run was trained.
    """
    keep_programs()
    one_device = {"mesh": None, "pmap": None, "decode_weights": "gather"}
    config = dataclasses.replace(load_config(run), **one_device)
    with on_host(mesh is not None):
        components = build(config)
    if mesh is not None:
        devices = sharded(make_mesh(**mesh_sizes(mesh)), components.model.axes)
        components = components._replace(devices=devices)
    path = Path(run) / "checkpoints"
    if not path.is_dir():
        raise FileNotFoundError(f"{run} has no checkpoints yet")
    like = with_critic(components.critic, jax.random.key(0), components.params)
    like = components.devices.put("state", like)
    with checkpoint.open_checkpoints(path, keep=None) as checkpoints:
        params = checkpoint.restore_params(checkpoints, like, iteration)
        done = checkpoint.iterations(checkpoints)
    policy = policy_of(components.critic, params)
    return LoadedRun(config, components, policy, done[-1] if iteration is None else iteration)


def next_folder(root: str | Path, name: str) -> Path:
    """`root/name-0001`, or the first number that is free."""
    numbers = (Path(root) / f"{name}-{i:04d}" for i in range(1, 10_000))
    return next(path for path in numbers if not path.exists())
