"""A run on disk: builds the parts a configuration names, trains, and keeps the run folder.

This is the caller's `for` loop around `loop.train`: log, evaluate, save. Left out on purpose: any
decision of the algorithm; a program that needs another loop writes its own around the same
generators.
"""

import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from rich.console import Console

from grpo_jax.config import TINY, TrainConfig, load_config, tiny_config
from grpo_jax.inference.critic import Critic, policy_of, value_network
from grpo_jax.inference.tokenizer import Tokenizer, load_tokenizer
from grpo_jax.models import LanguageModel, decoder, load_pretrained
from grpo_jax.objectives import PRESETS, Objective, ema, every, reads
from grpo_jax.parallel.backends import SINGLE, Devices, Program, listed, pmapped, sharded
from grpo_jax.parallel.memory import remat_by_memory
from grpo_jax.parallel.processes import is_main_process, run_and_gather
from grpo_jax.parallel.sharding import make_mesh, mesh_sizes
from grpo_jax.runs import checkpoint, folder, plots, terminal
from grpo_jax.runs.checkpoint import RunState
from grpo_jax.tasks import TASKS, Task
from grpo_jax.training import loop
from grpo_jax.training.batch import rollout_shapes
from grpo_jax.training.evaluate import Evaluation, evaluate
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.sft import warm_up
from grpo_jax.types import Params


class Components(NamedTuple):
    """What a configuration names, built."""

    model: LanguageModel
    params: Params
    tokenizer: Tokenizer
    task: Task
    objective: Objective
    optimizer: optax.GradientTransformation
    critic: Critic | None
    update_reference: Callable | None
    prompt_length: int
    devices: Devices = SINGLE


def build(config: TrainConfig) -> Components:
    """The parts of a resolved configuration; the parameters are the model's own, before any
    training.

    They are still on the host where a mesh will spread them: a model may be larger than a device.
    """
    task = TASKS[config.task](**config.task_options())
    objective = PRESETS[config.objective](**config.objective_options())
    tokenizer = load_tokenizer("bytes" if config.model == TINY else config.model)
    with on_host(config.mesh is not None):
        if config.model == TINY:
            model = decoder(tiny_config(tokenizer.vocab_size, config.dtype), scan=False)
            params = jax.jit(model.init)(jax.random.key(config.seed))
        else:
            model, params = load_pretrained(config.model, dtype=config.dtype)
    updates = config.steps * config.epochs
    optimizer = adamw(
        config.learning_rate,
        steps=updates,
        warmup_steps=min(config.lr_warmup, updates),
        schedule=config.schedule,
        weight_decay=config.weight_decay,
        clip_norm=None if config.clip_norm == float("inf") else config.clip_norm,
    )
    if not len(task.held_out):
        raise ValueError(
            f"task {task.name!r} has no held-out rows: a run is judged on them before and after training"
        )
    length = loop.prompt_width(task, tokenizer)
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and length + config.max_new_tokens > limit:
        raise ValueError(
            f"prompts of up to {length} tokens and --max-new-tokens {config.max_new_tokens} do not fit the model's "
            f"{limit} positions"
        )
    rule = reference_rule(config)
    devices = devices_of(config, model)
    model = decoder(
        model.config,
        remat=remat_of(config, model, params, length, devices),
        scan=config.model != TINY,
    )
    model = devices.for_training(model)
    critic = value_network(model) if "value_T" in reads(objective) else None
    return Components(
        model, params, tokenizer, task, objective, optimizer, critic, rule, length, devices
    )


def keep_programs() -> None:
    """Keeps compiled programs in the user's cache folder: the second start of the same run compiles
    nothing.

    What JAX was told itself (JAX_COMPILATION_CACHE_DIR, or JAX_ENABLE_COMPILATION_CACHE=false)
    stays as it is; of how long a program takes to compile, by which JAX chooses what to keep, it
    must have been told in the environment.
    """
    if not jax.config.jax_compilation_cache_dir:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "grpo_jax" / "programs"))
    kept = {
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, least in kept.items():
        if name.upper() not in os.environ:
            jax.config.update(name, least)


def on_host(there: bool) -> AbstractContextManager:
    """Inside, new arrays lie in the memory of the host and not on a device."""
    return jax.default_device(jax.local_devices(backend="cpu")[0]) if there else nullcontext()


def devices_of(config: TrainConfig, model: LanguageModel) -> Devices:
    """Where the run's programs run. Raises ValueError where those devices are not there."""
    if config.mesh is not None:
        return sharded(make_mesh(**mesh_sizes(config.mesh)), model.axes, config.decode_weights)
    if config.pmap is not None:
        return pmapped(config.pmap)
    if jax.process_count() > 1:
        raise ValueError(
            f"{jax.process_count()} processes train over a mesh: --mesh data={jax.device_count()}"
        )
    return SINGLE


def remat_of(
    config: TrainConfig, model: LanguageModel, params: Params, length: int, devices: Devices
) -> str:
    """What a layer keeps for its backward pass: as the configuration says, or by the memory of a
    device.
    """
    if config.remat != "auto":
        return config.remat
    sizes = {} if config.mesh is None else mesh_sizes(config.mesh)
    prompts = config.prompts // (devices.parts * config.microbatches)
    return remat_by_memory(
        model.config,
        params,
        prompts,
        length,
        config.group_size // config.group_microbatches,
        config.max_new_tokens,
        parts=sizes.get("fsdp", 1) * sizes.get("tensor", 1),
    )


def reference_rule(config: TrainConfig) -> Callable | None:
    """How the reference moves: every N iterations, as an average, or not at all (None)."""
    if config.ref_every is not None:
        return partial(every, interval=config.ref_every)
    return None if config.ref_ema is None else partial(ema, decay=config.ref_ema)


def held_out(
    config: TrainConfig, parts: Components, params: Params, **options: Any
) -> tuple[list[dict], Evaluation]:
    """The held-out rows that a run is judged on, and their evaluation; greedy unless `options` say
    otherwise.
    """
    rows = list(parts.task.held_out)[: config.eval_rows]
    options = {"max_new_tokens": config.max_new_tokens, "batch_size": config.eval_batch} | options
    options |= {
        "prompt_length": parts.prompt_length,
        "on_error": config.on_error,
        "devices": parts.devices,
    }
    return rows, evaluate(parts.model, params, parts.tokenizer, parts.task, rows, **options)


def start(config: TrainConfig, parts: Components, screen: terminal.Screen) -> Params:
    """The parameters that GRPO starts from: the model's own, after the supervised warm-up if there
    is one.
    """
    params = parts.params
    if config.warm_up:
        # A constant rate where the loss decides when to end: the end of a schedule would have to be
        # known before.
        schedule = "constant" if config.warm_up_loss else "cosine"
        losses = deque(maxlen=8)
        rate = adamw(
            3e-3, steps=config.warm_up, warmup_steps=min(20, config.warm_up), schedule=schedule
        )
        updates = warm_up(
            parts.model,
            params,
            parts.task,
            parts.tokenizer,
            rate,
            steps=config.warm_up,
            seed=config.seed,
            prompt_length=parts.prompt_length,
            devices=parts.devices,
        )
        with screen.phase("supervised warm-up", config.warm_up) as show:
            for state, metrics in updates:
                params = state.params
                losses.append(float(metrics["loss"]))
                show(metrics["iteration"], loss=metrics["loss"])
                if len(losses) == losses.maxlen and np.mean(losses) <= config.warm_up_loss:
                    break
    return params


class Start(NamedTuple):
    """Where a run begins or continues: its state, the fixed reference if there is one, and the
    finished iterations.

    `seconds` were spent on them by earlier starts of the run.
    """

    saved: RunState
    reference: Params | None
    iteration: int
    seconds: float = 0.0


def train(
    config: TrainConfig, *, resume: bool = False, screen: terminal.Screen | None = None
) -> dict:
    """Runs a resolved configuration to its end in `config.out` and returns the summary.

    With `resume` it continues behind the newest checkpoint of that folder, as if it had never
    stopped. Raises FileExistsError where the folder already holds a run, FileNotFoundError where
    there is none to resume.
    """
    began = time.perf_counter()
    out = Path(config.out)
    keep_programs()
    screen = screen or terminal.Screen(Console(quiet=not is_main_process()))
    run_and_gather(partial(_check_folder, out, resume))
    parts = build(config)
    _tell_devices(parts, screen)
    with checkpoint.open_checkpoints(out / "checkpoints", keep=config.keep) as checkpoints:
        done = run_and_gather(partial(checkpoint.iterations, checkpoints))[0] if resume else []
        behind = (done[-1] + 1 if done else 0) if resume else None
        with (
            folder.RunFolder(out, resume_step=behind)
            if is_main_process()
            else Unwritten() as folder
        ):
            folder.write_config(config)
            begun = _continue(config, parts, checkpoints) if done else None
            begun = begun or _begin(config, parts, checkpoints, folder, screen, began)
            began -= begun.seconds
            _iterate(config, parts, begun, checkpoints, folder, screen, began)
            summary = run_and_gather(partial(_finish, config, folder, began))[0]
    screen.summary(summary, out)
    return summary


class Unwritten:
    """The run folder as a process sees it that does not write it: every call does nothing."""

    def __enter__(self) -> "Unwritten":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable:
        return lambda *_: None


def _check_folder(out: Path, resume: bool) -> None:
    there = (out / "config.json").exists()
    if there and not resume:
        raise FileExistsError(
            f"{out} already holds a run: continue it with --resume {out}, or choose another --out"
        )
    if resume and not there:
        raise FileNotFoundError(f"no run to resume at {out}")


def _tell_devices(parts: Components, screen: terminal.Screen) -> None:
    if parts.devices is not SINGLE:
        moved = parts.devices.moved_bytes(parts.params) / 1e6
        cost = (
            f"; for decoding each device receives {moved:.3g} MB of weights an iteration"
            if moved
            else ""
        )
        processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        screen.console.print(f"devices: {parts.devices.name}{processes}{cost}", highlight=False)
    elif jax.device_count() > 1:
        screen.console.print(
            f"one of {jax.device_count()} devices is used; --mesh data={jax.device_count()} uses all"
        )


def _finish(config: TrainConfig, folder: folder.RunFolder | Unwritten, began: float) -> dict | None:
    if not is_main_process():
        return None
    rows = folder.read_lines(folder.path / "metrics.jsonl")
    plots.plot_curves(rows, folder.path / "curves.png")
    summary = _summary(config, rows, time.perf_counter() - began)
    folder.write_summary(summary)
    return summary


def _begin(
    config,
    parts: Components,
    checkpoints,
    folder: folder.RunFolder,
    screen: terminal.Screen,
    began: float,
) -> Start:
    """Warm-up, the evaluation before GRPO, and checkpoint 0: the policy that training starts
    from.
    """
    params = start(config, parts, screen)
    rows = len(list(parts.task.held_out)[: config.eval_rows])
    with screen.phase("evaluation before GRPO", rows) as show:
        _, result = held_out(config, parts, params, progress=show)
    saved = loop.begin(params, parts.optimizer, config.seed, parts.critic, parts.devices)
    folder.log(0, {"held_out": result.accuracy, "held_out_length": result.length})
    checkpoint.save(checkpoints, 0, saved, _record(0, began))
    needed = "ref_logp_T" in reads(parts.objective)
    return Start(
        saved, loop.copy(policy_of(parts.critic, saved.state.params)) if needed else None, 0
    )


def _continue(config: TrainConfig, parts: Components, checkpoints) -> Start:
    """The newest checkpoint; a reference that does not move is the policy of checkpoint 0."""
    like = loop.begin(parts.params, parts.optimizer, 0, parts.critic, parts.devices)
    needed = "ref_logp_T" in reads(parts.objective)
    newest = checkpoint.iterations(checkpoints)[-1]
    if needed and parts.update_reference is not None and newest > 0:
        like = like._replace(reference=policy_of(parts.critic, like.state.params))
    if newest > 0:
        ahead = rollout_shapes(
            config.prompts, config.group_size, parts.prompt_length, config.max_new_tokens
        )
        ahead = parts.devices.put("rows", jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), ahead))
        like = like._replace(pending=(ahead,) * min(config.stale, config.steps - newest))
    saved, record = checkpoint.restore(checkpoints, like)
    reference = saved.reference
    if needed and reference is None:
        reference = policy_of(
            parts.critic, checkpoint.restore_params(checkpoints, like.state.params, 0)
        )
    return Start(saved, reference, record["iteration"], record.get("seconds", 0.0))


def _record(iteration: int, began: float) -> dict:
    return {"iteration": iteration, "seconds": round(time.perf_counter() - began, 3)}


def _iterate(
    config,
    parts: Components,
    begun: Start,
    checkpoints,
    folder,
    screen: terminal.Screen,
    began: float,
) -> None:
    """The caller's `for` loop around `loop.train`: evaluate, log, save."""
    ahead = (
        partial(_compile, config, parts, screen, time.perf_counter())
        if config.compile_ahead
        else None
    )
    iterations = loop.train(
        parts.model,
        policy_of(parts.critic, begun.saved.state.params),
        parts.task,
        parts.tokenizer,
        parts.objective,
        parts.optimizer,
        steps=config.steps,
        prompts_per_step=config.prompts,
        group_size=config.group_size,
        max_new_tokens=config.max_new_tokens,
        sampling=config.sampling,
        seed=config.seed,
        epochs=config.epochs,
        microbatches=config.microbatches,
        group_microbatches=config.group_microbatches,
        old_logp=config.old_logp,
        critic=parts.critic,
        length_buckets=config.length_buckets,
        on_error=config.on_error,
        pack_tokens=config.pack_tokens,
        drop_zero_variance=config.drop_zero_variance,
        compact=config.compact,
        decode_slots=config.decode_slots,
        stale=config.stale,
        compile_ahead=ahead,
        reference=begun.reference,
        update_reference=parts.update_reference,
        saved=begun.saved,
        prompt_length=parts.prompt_length,
        devices=parts.devices,
    )
    with screen.phase("GRPO", config.steps, start=begun.iteration) as show:
        for saved, metrics in iterations:
            iteration = metrics.pop("iteration")
            completions = metrics.pop("completions")
            timings = {
                name: metrics.pop(name) for name in list(metrics) if name.startswith("seconds/")
            }
            timings["tokens_per_second"] = metrics["tokens"] / sum(timings.values())
            last = iteration == config.steps
            if last or iteration % config.eval_every == 0:
                told = lambda rows, finished=iteration - 1: show(
                    finished, note=f"{rows} held-out rows evaluated"
                )
                _, result = held_out(
                    config, parts, policy_of(parts.critic, saved.state.params), progress=told
                )
                metrics |= {"held_out": result.accuracy, "held_out_length": result.length}
            folder.log(iteration, metrics, timings)
            folder.log_completions(iteration, spread(completions, config.log_completions))
            if last or iteration % config.save_every == 0:
                checkpoint.save(checkpoints, iteration, saved, _record(iteration, began))
            shown = ("reward", "held_out", "frac_zero_variance", "length", "kl")
            numbers = {name: metrics[name] for name in shown if name in metrics}
            show(iteration, **numbers, tokens_per_second=timings["tokens_per_second"])


def _compile(
    config: TrainConfig,
    parts: Components,
    screen: terminal.Screen,
    began: float,
    programs: list[Program],
) -> None:
    """Compiles what the iterations may run, and the evaluation among them where none was before."""
    with listed() as found:
        held_out(config, parts, jax.eval_shape(lambda: parts.params))
    programs = [*programs, *found.values()]
    with screen.phase("compiling", len(programs)) as show:
        for done, program in enumerate(programs):
            show(done, note=program.name)
            program.compile()
        show(len(programs))
    seconds = time.perf_counter() - began
    screen.console.print(
        f"{len(programs)} programs compiled ahead in {seconds:.1f} s", highlight=False
    )


def spread(rows: list[dict], count: int) -> list[dict]:
    """`count` of the rows, evenly spaced: completions of different prompts."""
    places = np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int)
    return [rows[i] for i in places]


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


class LoadedRun(NamedTuple):
    """A run folder opened to be used: what it was made with, and its newest parameters."""

    config: TrainConfig
    parts: Components
    params: Params
    iteration: int


def open_run(
    run: str | Path, iteration: int | None = None, *, mesh: str | None = None
) -> LoadedRun:
    """A run's parts and the parameters of one of its checkpoints, the newest by default.

    On one device unless `mesh` says otherwise, wherever the run was trained.
    """
    keep_programs()
    config = dataclasses.replace(
        load_config(run), mesh=None, pmap=None, decode_weights="gather"
    ).resolved()
    with on_host(mesh is not None):
        parts = build(config)
    if mesh is not None:
        parts = parts._replace(devices=sharded(make_mesh(**mesh_sizes(mesh)), parts.model.axes))
    folder = Path(run) / "checkpoints"
    if not folder.is_dir():
        raise FileNotFoundError(f"{run} has no checkpoints yet")
    with checkpoint.open_checkpoints(folder, keep=None) as checkpoints:
        like = loop.begin(
            parts.params, parts.optimizer, 0, parts.critic, parts.devices
        ).state.params
        params = policy_of(parts.critic, checkpoint.restore_params(checkpoints, like, iteration))
        done = checkpoint.iterations(checkpoints)
    return LoadedRun(config, parts, params, done[-1] if iteration is None else iteration)


def next_folder(root: str | Path, name: str) -> Path:
    """`root/name-0001`, or the first number that is free."""
    numbers = (Path(root) / f"{name}-{i:04d}" for i in range(1, 10_000))
    return next(path for path in numbers if not path.exists())
