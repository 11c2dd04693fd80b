"""Does it fit, before the pod is booked: compiles the programs of a run for a TPU slice that is not
there.

`libtpu` compiles for a named topology without hardware. The train step, the sampler, the change of
layout between them and the reference's log-probabilities are compiled as a run would, with shapes
in place of arrays, and asked for their memory; FLOPs, bytes and collectives are counted in their
HLO text (see `hlo`), because XLA's own count takes the body of a loop once.

Left out on purpose: searching for the best mesh (`suggestions` names the next thing to try), and
printing (see `report_plan`).
"""

import dataclasses
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpo_jax.config import at_least, choose, keyword_arguments
from grpo_jax.inference.critic import policy_of, value_network, with_critic
from grpo_jax.inference.generate import generate
from grpo_jax.inference.logprobs import tokens_at_once
from grpo_jax.models import DecoderConfig, LanguageModel, decoder
from grpo_jax.models.decoder import REMAT
from grpo_jax.models.hub import CONFIG, config_from_hf, find_folder
from grpo_jax.objectives import PRESETS, reads
from grpo_jax.parallel.backends import sharded
from grpo_jax.parallel.sharding import (
    DECODE_RULES,
    batch_shardings,
    make_mesh,
    mesh_sizes,
    param_shardings,
    prompt_parts,
    replicated,
)
from grpo_jax.plan import hlo
from grpo_jax.plan.topology import Roofline, Topology, parse_topology, roofline
from grpo_jax.training.batch import assemble, rollout_shapes, score
from grpo_jax.training.loop import takes_several
from grpo_jax.training.optimizers import adamw
from grpo_jax.training.train_step import init_state, make_train_step

# vocabulary, hidden, intermediate, layers, heads, key/value heads, head size, tied embeddings, bias
# on q, k, v
SHAPES = {
    "smollm2-135m": (49_152, 576, 1536, 30, 9, 3, 64, True, False),
    "qwen2.5-0.5b": (151_936, 896, 4864, 24, 14, 2, 64, True, True),
    "qwen2.5-1.5b": (151_936, 1536, 8960, 28, 12, 2, 128, True, True),
    "qwen2.5-7b": (152_064, 3584, 18_944, 28, 28, 4, 128, False, True),
    "qwen2.5-32b": (152_064, 5120, 27_648, 64, 40, 8, 128, False, True),
}
# libtpu looks for hardware and for other processes that use it; neither is there.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "none",
}


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Compile the programs of a run for a TPU slice, without the hardware: memory, FLOPs,
    collectives, best time.
    """

    topology: str
    """The slice: v5e:4x4 (shape in chips), or by size: v5e-16 (chips), v5p-64 (TensorCores, two a
    chip).
    """
    model: str
    """A Hugging Face config.json or its folder, a Hub id, or the name of a shape: smollm2-135m,
    qwen2.5-0.5b, -1.5b, -7b or -32b."""
    mesh: str | None = None
    """Sizes of the mesh's axes, e.g. data=2,fsdp=4,tensor=2; None spreads parameters over all chips
    (fsdp).
    """
    decode_weights: str = "gather"
    """How the sampler holds parameters: "gather" (whole but for the tensor axis) or "split" (over
    fsdp and tensor).
    """
    prompts: int | None = None
    """Prompts in an iteration; None takes one for each part of the mesh and each micro-batch."""
    group_size: int = 8
    """Completions of each prompt (G)."""
    prompt_length: int = 512
    """Tokens of a prompt."""
    max_new_tokens: int = 1024
    """Tokens of a completion; every completion is taken to be that long."""
    microbatches: int = 1
    """Components that the prompts of an update are cut into."""
    group_microbatches: int = 1
    """Components that each group is cut into."""
    decode_slots: int | None = None
    """Completions of a prompt that the sampler computes at once, the others wait for a free seat;
    None: all of them.
    """
    objective: str = "grpo"
    """The loss, by its preset's name."""
    objective_args: tuple[str, ...] = ("beta=0.0",)
    """Options of the objective as NAME=VALUE; with beta above 0 GRPO reads a reference, which takes
    memory.
    """
    dtype: str = "float32"
    """Type of parameters, optimiser moments and activations: float32 or bfloat16."""
    remat: str = "layer"
    """What the backward pass computes again, as `models.decoder` names it."""

    def __post_init__(self):
        object.__setattr__(self, "objective_args", tuple(self.objective_args))
        topology = parse_topology(self.topology)
        choose("objective", self.objective, PRESETS)
        choose("decode-weights", self.decode_weights, DECODE_RULES)
        choose("dtype", self.dtype, ("float32", "bfloat16", "float16"))
        choose("remat", self.remat, REMAT)
        keyword_arguments(PRESETS[self.objective], self.objective_args, "objective-args")
        sizes = (
            "prompts",
            "group_size",
            "prompt_length",
            "max_new_tokens",
            "microbatches",
            "group_microbatches",
        )
        for field in (*sizes, "decode_slots"):
            at_least(field, getattr(self, field), 1)
        sizes = self.mesh_sizes
        chips = sizes["data"] * sizes["fsdp"] * sizes["tensor"]
        if chips != topology.devices:
            shown = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
            each = f" of {topology.chip.devices} devices each" if topology.chip.devices > 1 else ""
            raise ValueError(
                f"--mesh {shown} is {chips} devices, {topology.name} has {topology.chips} chips{each}"
            )
        parts = sizes["data"] * sizes["fsdp"] * self.microbatches
        if self.prompts is not None and self.prompts % parts:
            raise ValueError(
                f"--prompts ({self.prompts}) must be a multiple of {parts}: data {sizes['data']} × fsdp "
                f"{sizes['fsdp']} × {self.microbatches} micro-batches"
            )
        if self.group_size % self.group_microbatches:
            raise ValueError(
                f"--group-microbatches ({self.group_microbatches}) must divide --group-size ({self.group_size})"
            )
        if self.decode_slots is not None and self.decode_slots > self.group_size:
            raise ValueError(
                f"--decode_slots ({self.decode_slots}) must be at most --group-size ({self.group_size})"
            )

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Every axis of the mesh with its size."""
        ones = {"data": 1, "fsdp": 1, "tensor": 1}
        return ones | (
            {"fsdp": parse_topology(self.topology).devices}
            if self.mesh is None
            else mesh_sizes(self.mesh)
        )

    @property
    def batch(self) -> int:
        """Prompts in an iteration."""
        sizes = self.mesh_sizes
        return self.prompts or sizes["data"] * sizes["fsdp"] * self.microbatches


class CompiledProgram(NamedTuple):
    """One compiled program, on one chip. Bytes: `resident` is what others keep in memory while it
    runs.

    `counts` and `roofline` are None where XLA gave up because the program does not fit;
    `needed_bytes` is then XLA's own figure.
    """

    name: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    resident_bytes: int
    compile_seconds: float
    counts: hlo.Counts | None = None
    roofline: Roofline | None = None
    overflow_bytes: int | None = None

    @property
    def needed_bytes(self) -> int:
        own = (
            self.argument_bytes
            + self.output_bytes
            - self.alias_bytes
            + self.temp_bytes
            + self.code_bytes
        )
        return self.resident_bytes + (own if self.overflow_bytes is None else self.overflow_bytes)


class Plan(NamedTuple):
    config: PlanConfig
    topology: Topology
    parameters: int
    programs: dict[str, CompiledProgram]

    @property
    def fits(self) -> bool:
        return all(p.needed_bytes <= self.topology.usable_bytes for p in self.programs.values())


def make_plan(
    config: PlanConfig,
    *,
    only: Sequence[str] | None = None,
    on_program: Callable[[str], None] = lambda name: None,
) -> Plan:
    """Compiles everything, or the programs named in `only`; `on_program` is told each name before
    it is compiled.

    Raises ModuleNotFoundError without libtpu, ValueError for a topology that libtpu does not know.
    """
    topology = parse_topology(config.topology)
    model = decoder(model_config(config.model, config.dtype), remat=config.remat)
    mesh = make_mesh(**config.mesh_sizes, devices=devices_of(topology))
    run = Shapes.of(config, model, mesh)
    programs = {}
    for name, (function, *args), resident in run.programs():
        if only is not None and name not in only:
            continue
        on_program(name)
        programs[name] = compile_program(name, function, args, resident, topology, mesh)
    parameters = sum(x.size for x in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    return Plan(config, topology, parameters, programs)


def model_config(name: str, dtype: str) -> DecoderConfig:
    """The decoder's shape: a built-in name, a config.json, its folder, or a Hub id."""
    if name.lower() in SHAPES:
        *sizes, tied, bias = SHAPES[name.lower()]
        return DecoderConfig(
            *sizes,
            rope_theta=1e6,
            tie_word_embeddings=tied,
            attention_bias=bias,
            max_position_embeddings=32_768,
            dtype=dtype,
        )
    path = Path(name)
    if not path.exists() and "/" not in name:
        raise ValueError(
            f"--model {name!r} is no file, no folder and no known shape: expected a Hugging Face config.json or its "
            f"folder, a Hub id, or one of {', '.join(SHAPES)}"
        )
    path = path if path.is_file() else find_folder(name, (CONFIG,)) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {CONFIG}")
    return config_from_hf(json.loads(path.read_text()), dtype)


def devices_of(topology: Topology) -> list:
    """Descriptions of the slice's devices, from libtpu.

    It reads the environment once, when it is loaded; values that are set already are left alone.
    """
    if importlib.util.find_spec("libtpu") is None:
        message = "libtpu, which compiles for TPUs without the hardware, is not installed"
        raise ModuleNotFoundError(f"{message}: pip install -r requirements-tpu.txt", name="libtpu")
    from jax.experimental import topologies

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology.name).devices
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"libtpu knows no topology {topology.name}: {str(error).splitlines()[0]}"
        ) from error


class Shapes(NamedTuple):
    """What a run holds, as shapes with shardings: the arguments of its programs."""

    config: PlanConfig
    model: LanguageModel
    mesh: Mesh
    optimizer: Any
    objective: Any
    critic: Any
    state: Any
    weights: Any  # the policy as the sampler holds it
    batch: Any

    @classmethod
    def of(cls, config: PlanConfig, model: LanguageModel, mesh: Mesh) -> "Shapes":
        objective = PRESETS[config.objective](
            **keyword_arguments(PRESETS[config.objective], config.objective_args, "")
        )
        fields = reads(objective)
        model = sharded(mesh, model.axes).for_training(model)
        critic = value_network(model) if "value_T" in fields else None
        optimizer = adamw(1e-6, steps=1000)
        key = jax.random.key(0)

        def begin():
            return init_state(with_critic(critic, key, model.init(key)), optimizer)

        state = jax.eval_shape(begin)
        P = config.batch
        G = config.group_size
        T = config.max_new_tokens
        array = jax.ShapeDtypeStruct
        rollout = rollout_shapes(P, G, config.prompt_length, T)
        floats = array((P, G, T), jnp.float32)
        known = ("ref_logp_T", "reward_T", "entropy_T", "old_value_T")
        samples = {name: floats for name in known if name in fields} | (
            {"age": array((P, G), jnp.int32)} if "age" in fields else {}
        )
        reward = array((P, 2, G) if takes_several(objective) else (P, G), jnp.float32)
        batch = jax.eval_shape(partial(assemble, objective), rollout, reward, **samples)
        rules = DECODE_RULES[config.decode_weights]
        policy = policy_of(critic, state.params)
        return cls(
            config,
            model,
            mesh,
            optimizer,
            objective,
            critic,
            _laid(state, param_shardings(mesh, model, state)),
            _laid(policy, param_shardings(mesh, model, policy, rules)),
            _laid(batch, batch_shardings(mesh, batch)),
        )

    def programs(self) -> Iterator[tuple[str, tuple, int]]:
        """(name, (jitted function, its arguments), bytes on a chip that stay beside its arguments)
        of each program.
        """
        policy = policy_of(self.critic, self.state.params)
        state = bytes_per_chip(self.state)
        own = bytes_per_chip(policy)
        copied = bytes_per_chip(self.weights)
        reference = own if "ref_logp_T" in reads(self.objective) else 0
        yield "step", self._step(), reference
        if any(
            a.sharding != b.sharding
            for a, b in zip(*map(jax.tree.leaves, (policy, self.weights)), strict=True)
        ):
            largest, weight = self._largest()
            beside = reference + state - bytes_per_chip(largest) + copied - bytes_per_chip(weight)
            yield "layout", (jax.jit(lambda x: x, out_shardings=weight.sharding), largest), beside
            yield "sampler", self._sampler(), reference + state
        else:  # the sampler reads the very arrays of the state
            yield "sampler", self._sampler(), reference + state - copied
        if reference:
            yield "reference", self._reference(), state

    def _step(self):
        config = self.config
        step = make_train_step(
            self.model,
            self.objective,
            self.optimizer,
            microbatches=config.microbatches,
            group_microbatches=config.group_microbatches,
            critic=self.critic,
            chunk=self._chunk(),
        )
        out = (_shardings(self.state), replicated(self.mesh))
        return jax.jit(step, donate_argnums=0, out_shardings=out), self.state, self.batch

    def _chunk(self) -> int:
        return tokens_at_once(self.model, prompt_parts(self.mesh))

    def _largest(self):
        """The parameter whose change of layout needs most, before and after: they change one after
        another.
        """
        pairs = zip(
            *map(jax.tree.leaves, (policy_of(self.critic, self.state.params), self.weights)),
            strict=True,
        )
        return max(
            pairs,
            key=lambda pair: bytes_per_chip(pair[1]) if pair[0].sharding != pair[1].sharding else 0,
        )

    def _sampler(self):
        config = self.config
        rules = DECODE_RULES[self.config.decode_weights]
        prompts = self.batch.rollout.prompts
        prompts = _laid(prompts, batch_shardings(self.mesh, prompts, rules))
        key = jax.eval_shape(lambda: jax.random.key(0))
        sample = partial(
            generate,
            self.model,
            group_size=config.group_size,
            max_new_tokens=config.max_new_tokens,
            stop_ids=(0,),
            decode_slots=config.decode_slots,
        )
        out = batch_shardings(self.mesh, jax.eval_shape(sample, self.weights, prompts, key))
        return (
            jax.jit(sample, out_shardings=out),
            self.weights,
            prompts,
            _laid(key, replicated(self.mesh)),
        )

    def _reference(self):
        reference = policy_of(self.critic, self.state.params)
        rollout = self.batch.rollout
        out = batch_shardings(self.mesh, rollout.logp_PGT)
        score_all = lambda params, rollout: score(self.model, params, rollout, chunk=self._chunk())[
            0
        ]
        return jax.jit(score_all, out_shardings=out), reference, rollout


def _laid(shapes: Any, shardings: Any) -> Any:
    """Shapes with shardings; a single sharding is for all of them."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, shapes)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def _shardings(shapes: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, shapes)


def bytes_per_chip(shapes: Any) -> int:
    """Bytes that one device holds of a tree of shapes with shardings."""
    part = lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)
    return sum(s.size * s.dtype.itemsize for s in map(part, jax.tree.leaves(shapes)))


def compile_program(
    name: str, function: Any, args: Sequence, resident: int, topology: Topology, mesh: Mesh
) -> CompiledProgram:
    """Compiles one program and counts what it does; where XLA gives up for lack of memory, its
    figure is kept.
    """
    started = time.perf_counter()
    arguments = bytes_per_chip(args)
    try:
        compiled = function.trace(*args).lower(lowering_platforms=("tpu",)).compile()
    except jax.errors.JaxRuntimeError as error:
        if (needed := overflow(str(error), arguments)) is None:
            raise
        seconds = time.perf_counter() - started
        return CompiledProgram(
            name,
            arguments,
            0,
            0,
            max(0, needed - arguments),
            0,
            resident,
            seconds,
            overflow_bytes=needed,
        )
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    counts = hlo.count(compiled.as_text())
    coords = [tuple(device.coords) for device in mesh.devices.flat]
    return CompiledProgram(
        name,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        resident,
        seconds,
        counts,
        roofline(counts, topology, coords),
    )


UNITS = {"B": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def overflow(message: str, arguments: int) -> int | None:
    """Bytes that a program needs of the chip's memory, from XLA's message that it ran out of it;
    None for another.

    One form of the message tells all of them, another those of temporaries, without the arguments.
    """
    if found := re.search(r"Used ([\d.]+)([BKMGT]?) of [\d.]+[BKMGT]? hbm", message):
        return int(float(found[1]) * UNITS[found[2] or "B"])
    found = re.search(
        r"required for HLO temporaries \(([\d.]+)([BKMGT]?)\) exceeds available HBM", message
    )
    return arguments + int(float(found[1]) * UNITS[found[2] or "B"]) if found else None
