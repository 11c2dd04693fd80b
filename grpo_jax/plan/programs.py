"""Every program that a run may run, on shapes: found by going through the run's own stages.

What a run builds from its options is built here without weights and without devices, so that its
programs can be listed for a slice that is not there, or for any other mesh.

Left out on purpose: compiling (see `plan`), and the small programs that cut and move arrays.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grpo_jax.components import (
    Components,
    put_together,
    stages_of,
    task_of,
)
from grpo_jax.inference.critic import policy_of
from grpo_jax.inference.tokenizer import Tokenizer
from grpo_jax.models import DecoderConfig, remat_that_fits
from grpo_jax.parallel.backends import Devices, sharded
from grpo_jax.parallel.programs import Program, listed
from grpo_jax.plan.config import PlanConfig
from grpo_jax.plan.listed import SAMPLE, Listed, described
from grpo_jax.plan.memory import (
    Held,
    bytes_per_device,
    held_in_training,
    layout_of_largest,
    publication,
    sampling_bound,
    shared_bytes,
)
from grpo_jax.plan.models import PROMPT_LENGTH, ShapeTokenizer, model_of
from grpo_jax.plan.topology import parse_topology
from grpo_jax.rewards import reward_functions
from grpo_jax.tasks import Task
from grpo_jax.training.batch import rollout_shapes
from grpo_jax.training.checks import check_positions
from grpo_jax.training.evaluate import GREEDY, evaluate
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.programs import programs
from grpo_jax.training.rows import prompt_width
from grpo_jax.training.sft import sft
from grpo_jax.training.stages import Stages
from grpo_jax.types import Params, Prompts, RunState

# What a program is in a run, where its name does not say it.
KINDS = {"generate": "sampler", "infer_logp": "logp", "cast_matrices": "cast"}


class Listing(NamedTuple):
    """The programs of a run, and the run's options with every one of them said."""

    config: PlanConfig
    parameters: int
    programs: list[Listed]


def list_programs(config: PlanConfig, mesh: Mesh) -> Listing:
    """All programs of the run that `config` describes, on a mesh of devices that may not be there.

    Raises an `OptionError` for options that do not fit together, as the run itself would.
    """
    config, components = components_on(config.resolved(), mesh)
    stages = stages_of(config, components)
    state = state_shapes(stages, components)
    policy = policy_of(components.critic, state.train.params)
    published = publication(stages, state, policy)
    held = Held(
        state=bytes_per_device(state.train),
        reference=bytes_per_device(state.reference),
        queue=config.max_staleness * queued_bytes(config, components),
        shared={
            "sampler": published.shared,
            "evaluation": shared_bytes(policy, components.devices.for_decoding(policy)),
        },
    )
    found = []
    if layout := layout_of_largest(published):
        program, copies = layout
        found.append(described("layout", program, held.everything + copies))
    for kind, program in programs_by_kind(config, components, stages, state):
        found.append(described(kind, program, held.beside(kind, program)))
    own = parse_topology(config.topology).chip.own_bytes
    least = partial(sampling_bound, components.model, published.served, mesh.size, own)
    found = [one._replace(bound_bytes=least(one)) if one.kind in SAMPLE else one for one in found]
    return Listing(config, sum(x.size for x in jax.tree.leaves(policy)), found)


# What a run is made of, without weights and devices.


def components_on(config: PlanConfig, mesh: Mesh) -> tuple[PlanConfig, Components]:
    """`components.build` on shapes; and the options, with those said that depend on them."""
    model, tokenizer = model_of(config)
    task = task_of(config)
    length = prompt_length_of(config, task, tokenizer)
    check_positions(model, length, config.generation.max_new_tokens)
    params = jax.eval_shape(model.init, jax.random.key(0))
    devices = on_shapes(sharded(mesh, model.axes, config.decode_weights))
    remat = config.remat
    if isinstance(model.config, DecoderConfig):
        remat = remat_of(config, model.config, params, length)
    parts = (model, params, tokenizer, task, length, devices)
    components = put_together(config, *parts, remat)
    batching = config.batching._replace(prompt_length=length)
    return dataclasses.replace(config, remat=remat, batching=batching), components


def prompt_length_of(config: PlanConfig, task: Task, tokenizer: Tokenizer) -> int:
    """Tokens of a prompt: as the options say, else the task's longest, else a guess."""
    if config.batching.prompt_length is not None:
        return config.batching.prompt_length
    if isinstance(tokenizer, ShapeTokenizer):
        return PROMPT_LENGTH
    return prompt_width(task, tokenizer)


def remat_of(config: PlanConfig, shape: DecoderConfig, params: Params, length: int) -> str:
    """What a layer keeps for its backward pass: as the options say, or by the memory of a chip.

    As `components.remat_of` has it on the chip itself.
    """
    if config.remat != "auto":
        return config.remat
    sizes = config.mesh_sizes
    update = config.update
    cuts = sizes["data"] * sizes["fsdp"] * update.microbatches
    prompts = config.batching.prompts_per_step // cuts
    group = config.generation.group_size // update.group_microbatches
    tokens = prompts * (length + group * config.generation.max_new_tokens)
    held = held_in_training(params, sizes["fsdp"] * sizes["tensor"])
    return remat_that_fits(
        shape, tokens, (parse_topology(config.topology).usable_bytes - held) // 2
    )


def on_shapes(devices: Devices) -> Devices:
    """The devices for whoever has shapes alone: every array that a program is given is a shape.

    All prompts are on them, of several processes too, and inside a trace nothing is laid out.
    """

    def put(kind: str, tree: Any) -> Any:
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
        return tree if traced else devices.put(kind, shapes(tree))

    def with_shapes(make: Callable) -> Callable:
        def program(
            function: Callable, inputs: tuple, outputs: Any, donate: tuple = ()
        ) -> Callable:
            run = make(function, inputs, outputs, donate)
            return lambda *args, **rows: run(*shapes(args), **shapes(rows))

        return program

    return devices._replace(
        put=put,
        put_rows=partial(put, "rows"),
        local_rows=np.arange,
        owned_rows=np.arange,
        per_prompt=with_shapes(devices.per_prompt),
        whole_batch=with_shapes(devices.whole_batch),
    )


def shapes(tree: Any) -> Any:
    """The shapes of arrays and numbers, as a program sees them."""

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        known = isinstance(x, jax.ShapeDtypeStruct)
        return x if known else jax.eval_shape(lambda x: x, x)

    return jax.tree.map(shape_of, tree)


def state_shapes(stages: Stages, components: Components) -> RunState:
    """The state before the first iteration, in the layout of training, but for what is on hosts."""
    put = components.devices.put
    state = jax.eval_shape(stages.start, components.params)
    return RunState(
        iteration=None,
        train=put("state", state.train),
        key=put("whole", state.key),
        reference=put("state", state.reference),
        data=None,
        objective=put("whole", state.objective),
    )


def queued_bytes(config: PlanConfig, components: Components) -> int:
    """Bytes on a device of one batch that waits for its update."""
    P = config.batching.prompts_per_step
    generation = config.generation
    sizes = (P, generation.group_size, components.prompt_length, generation.max_new_tokens)
    number_P = jax.ShapeDtypeStruct((P,), jnp.int32)
    batch = rollout_shapes(*sizes)._replace(row_P=number_P, update_P=number_P)
    return bytes_per_device(components.devices.put("rows", batch))


# Its programs.


def programs_by_kind(
    config: PlanConfig, components: Components, stages: Stages, state: RunState
) -> list[tuple[str, Program]]:
    """What the run compiles ahead, and the supervised step before it, each with its kind."""
    P = config.batching.prompts_per_step
    S = components.prompt_length
    array = jax.ShapeDtypeStruct
    prompts = Prompts(array((P, S), jnp.int32), array((P, S), bool))
    prompts = components.devices.put("rows", prompts)
    functions = len(reward_functions(components.task.reward))
    found = [(kind_of(one), one) for one in programs(stages, state, prompts, functions)]
    found += [("evaluation", one) for one in evaluation_programs(config, components)]
    if config.sft_steps:
        found += [("supervised", one) for one in supervised_programs(config, components)]
    return found


def kind_of(program: Program) -> str:
    """What a program of an iteration does."""
    if program.options.get("with_entropy"):
        return "entropy"
    return KINDS.get(program.name, program.name)


def evaluation_programs(config: PlanConfig, components: Components) -> list[Program]:
    """What a run evaluates its held-out rows with."""
    c = components
    rows = list(islice(c.task.held_out, config.eval_rows))
    length = config.generation.max_new_tokens
    with listed() as found:
        evaluate(
            c.model,
            c.params,
            c.tokenizer,
            c.task,
            rows,
            generation=GREEDY._replace(max_new_tokens=length),
            batch_size=config.eval_batch_size,
            prompt_length=c.prompt_length,
            scoring=config.scoring,
            devices=c.devices,
        )
    return list(found.values())


def supervised_programs(config: PlanConfig, components: Components) -> list[Program]:
    """The step of supervised fine-tuning, by going through its first one in a trace."""
    c = components

    def first(params: Params) -> None:
        options = {"steps": 1, "prompt_length": c.prompt_length, "devices": c.devices}
        next(sft(c.model, params, c.task, c.tokenizer, adamw(3e-3), **options))

    with listed() as found:
        jax.eval_shape(first, c.params)
    return list(found.values())
