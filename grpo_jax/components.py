"""From a configuration to what a run is made of: model, task, objective, optimiser, devices."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import optax

from grpo_jax.config import TINY, TrainConfig, tiny_config
from grpo_jax.inference.critic import Critic, value_network
from grpo_jax.inference.tokenizer import Tokenizer, load_tokenizer
from grpo_jax.models import DecoderConfig, LanguageModel, decoder, load_pretrained
from grpo_jax.objectives import PRESETS, Objective, ema, every, reads
from grpo_jax.options import Data
from grpo_jax.parallel.backends import SINGLE, Devices, pmapped, sharded
from grpo_jax.parallel.memory import remat_by_memory
from grpo_jax.parallel.sharding import make_mesh, mesh_sizes
from grpo_jax.tasks import Task, load_task, make_task, with_reward
from grpo_jax.training.checks import check_positions
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.rows import prompt_width
from grpo_jax.training.stages import Stages, make_stages
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


def build(config: TrainConfig, record: Mapping[str, Any] | None = None) -> Components:
    """The components of a configuration; the parameters are the model's own, before any training.

    They are still on the host where a mesh will spread them: a model may be larger than a device.
    `record` is what an earlier start of the run kept of its data.
    """
    task = task_of(config, record)
    tokenizer = tokenizer_of(config)
    with on_host(config.mesh is not None):
        model, params = model_of(config, tokenizer)
    length = config.batching.prompt_length or prompt_width(task, tokenizer)
    check_positions(model, length, config.generation.max_new_tokens)
    devices = devices_of(config, model)
    remat = config.remat
    if isinstance(model.config, DecoderConfig):
        remat = remat_of(config, model, params, length, devices)
    return put_together(config, model, params, tokenizer, task, length, devices, remat)


def put_together(
    config: TrainConfig,
    model: LanguageModel,
    params: Params,
    tokenizer: Tokenizer,
    task: Task,
    prompt_length: int,
    devices: Devices,
    remat: str,
) -> Components:
    """The components around a model, for a run and for the plan of one alike."""
    if isinstance(model.config, DecoderConfig):
        model = decoder(model.config, remat=remat, scan=config.model != TINY)
    model = devices.for_training(model)
    objective = objective_of(config)
    return Components(
        model=model,
        params=params,
        tokenizer=tokenizer,
        task=task,
        objective=objective,
        optimizer=optimizer_of(config),
        critic=value_network(model) if "value_T" in reads(objective) else None,
        update_reference=reference_rule(config),
        prompt_length=prompt_length,
        devices=devices,
    )


def stages_of(config: TrainConfig, components: Components) -> Stages:
    """The stages of the run that a configuration describes."""
    return make_stages(
        components.model,
        components.task,
        components.tokenizer,
        components.objective,
        components.optimizer,
        seed=config.seed,
        generation=config.generation,
        update=config.update,
        batching=config.batching._replace(prompt_length=components.prompt_length),
        scoring=config.scoring,
        critic=components.critic,
        devices=components.devices,
    )


def task_of(config: TrainConfig, record: Mapping[str, Any] | None = None) -> Task:
    """The task, which must have rows that a run is judged on.

    `record` is what an earlier start of the run kept of its data.
    """
    source = config.source
    if source.data is not None:
        task = task_of_data(source, record)
    else:
        task = make_task(config.task, config.task_options())
        task = with_reward(task, source.reward) if source.reward else task
    if not len(task.held_out):
        raise ValueError(
            f"task {task.name!r} has no held-out rows: a run is judged on them before and after "
            "training"
        )
    return task


def task_of_data(source: Data, record: Mapping[str, Any] | None = None) -> Task:
    """The task of the caller's own rows."""
    options = source._asdict()
    path_or_id, reward = options.pop("data"), options.pop("reward")
    prompt, target = options.pop("prompt_column"), options.pop("target_column")
    named = {"reward": reward or None, "prompt": prompt, "target": target, "record": record}
    return load_task(path_or_id, **named, **options)


def tokenizer_of(config: TrainConfig) -> Tokenizer:
    if config.model in MODELS:
        return load_tokenizer("bytes")
    return load_tokenizer(config.model, **config.template_options())


def objective_of(config: TrainConfig) -> Objective:
    return PRESETS[config.objective](**config.objective_options())


def tiny(config: TrainConfig, tokenizer: Tokenizer) -> LanguageModel:
    return decoder(tiny_config(tokenizer.vocab_size, config.precision), scan=False)


# Models from scratch, of bytes, by their --model; any other is a Hugging Face folder or Hub id. A
# program may add its own, as it may add to TASKS.
MODELS: dict[str, Callable[[TrainConfig, Tokenizer], LanguageModel]] = {TINY: tiny}


def model_of(config: TrainConfig, tokenizer: Tokenizer) -> tuple[LanguageModel, Params]:
    """The model and its parameters, fresh for one from scratch."""
    if config.model not in MODELS:
        return load_pretrained(config.model, precision=config.precision)
    model = MODELS[config.model](config, tokenizer)
    return model, jax.jit(model.init)(jax.random.key(config.seed))


def optimizer_of(config: TrainConfig) -> optax.GradientTransformation:
    options = config.optimizer._asdict()
    total = config.steps * config.update.epochs
    return adamw(total_updates=total, moments=config.precision.moments, **options)


def on_host(there: bool) -> AbstractContextManager:
    """Inside, new arrays lie in the memory of the host and not on a device."""
    return jax.default_device(jax.local_devices(backend="cpu")[0]) if there else nullcontext()


def devices_of(config: TrainConfig, model: LanguageModel) -> Devices:
    """Where the run's programs run. Raises ValueError where those devices are not there."""
    if config.mesh is not None:
        mesh = make_mesh(**mesh_sizes(config.mesh))
        return sharded(mesh, model.axes, config.decode_weights)
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
    """What a layer keeps for its backward pass: as the configuration says, or by memory."""
    if config.remat != "auto":
        return config.remat
    sizes = {} if config.mesh is None else mesh_sizes(config.mesh)
    cuts = devices.parts * config.update.microbatches
    group = config.generation.group_size // config.update.group_microbatches
    return remat_by_memory(
        model.config,
        params,
        config.batching.prompts_per_step // cuts,
        length,
        group,
        config.generation.max_new_tokens,
        parts=sizes.get("fsdp", 1) * sizes.get("tensor", 1),
    )


def reference_rule(config: TrainConfig) -> Callable | None:
    """How the reference moves: every N iterations, as an average, or not at all (None)."""
    if config.ref_every is not None:
        return partial(every, interval=config.ref_every)
    return None if config.ref_ema is None else partial(ema, decay=config.ref_ema)
