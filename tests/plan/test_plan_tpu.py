"""Plans compiled for TPUs that are not there: memory, FLOPs, collectives, and no less than physics allows."""

import importlib.util
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from grpo_jax.cli.entry import main
from grpo_jax.models import DecoderConfig, decoder
from grpo_jax.models.hub import config_to_hf
from grpo_jax.models.kernels.fused import AXES
from grpo_jax.models.kernels.fused_tpu import attend_together
from grpo_jax.parallel.backends import sharded
from grpo_jax.parallel.sharding import array_sharding, gather, make_mesh, spread
from grpo_jax.plan import hlo
from grpo_jax.plan.config import PlanConfig
from grpo_jax.plan.plan import devices_of, make_plan
from grpo_jax.plan.topology import parse_topology

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu (requirements-tpu.txt)"
)
SMALL = DecoderConfig(1024, 512, 1024, 2, 8, 4, 64, tie_word_embeddings=False, max_position_embeddings=4096)
# Each of its weights and caches is more than a part of what a chip itself holds.
WIDE = DecoderConfig(32_768, 4096, 16_384, 1, 32, 32, 128, max_position_embeddings=4096)
# One program of each kind.
ONE_SIZE = {"length_buckets": 1, "pack_tokens": False, "drop_zero_variance": False, "compactions": 0, "remat": "layer"}


@pytest.fixture
def folder(tmp_path):
    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config, "float32")))
        return str(tmp_path)

    return write


def small_plan(folder, layers=2, **options):
    sizes = {"topology": "v5e:2x2", "group_size": 2, "prompt_length": 16, "max_new_tokens": 16}
    model = folder(replace(SMALL, num_hidden_layers=layers))
    return PlanConfig.of(**{"model": model} | ONE_SIZE | sizes | options)


def test_a_small_model_for_four_chips(folder, capsys, optimized):
    options = [
        "--topology", "v5e:2x2", "--model", folder(SMALL), "--group-size", "2", "--prompt-length", "16",
        "--max-new-tokens", "16", "--remat", "layer", "--objective-args", "beta=0.1", "--length-buckets", "1",
        "--no-pack-tokens", "--no-drop-zero-variance", "--json",
    ]  # fmt: skip
    assert main(["plan", *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"]
    assert told["chips"] == 4
    programs = {one["kind"]: one for one in told["programs"]}
    assert set(programs) == {"layout", "sampler", "logp", "assemble", "step", "evaluation"}
    # Parameters and two moments of float32, over four chips; a little more for norms, which are whole.
    state = 3 * 4 * told["parameters"] / 4
    assert state < told["argument_bytes"] < 1.02 * state + 1e5
    compiled = {kind: one["compiled"] for kind, one in programs.items()}
    assert all(one["unknown_loops"] == [] for one in compiled.values())
    assert all(one["roofline_seconds"] > 0 for one in compiled.values() if one["flops"])
    # A token costs 2 FLOPs a matrix entry forward, twice that backward, and most of the forward once more (remat).
    c, tokens = SMALL, 16 + 2 * 16
    layer = 2 * c.hidden_size * 64 * (8 + 4) + 3 * c.hidden_size * c.intermediate_size
    once = 2 * (tokens * 2 * layer + 2 * 16 * c.hidden_size * c.vocab_size)
    # And attention computes whole blocks of its 128 rows: two products forward, twice, and seven backward.
    blocks = c.num_hidden_layers * c.num_attention_heads * (2 + 2 + 7) * 2 * 128**2 * 64
    assert 3 * once < told["flops"] - blocks < 4.2 * once
    # What the sampler needs of the state stays in memory beside it, and the reference too.
    assert compiled["sampler"]["resident_bytes"] == pytest.approx(state * 4 / 3, rel=0.02)
    assert programs["sampler"]["options"]["generation"]["compactions"] == 3


def test_parameters_are_gathered_layer_by_layer_and_gradients_scattered(folder, optimized):
    few, many = (make_plan(small_plan(folder, layers), only=("step",)).largest("step") for layers in (4, 8))
    layer = 4 * (2 * 512 * 64 * (8 + 4) + 3 * 512 * 1024)  # bytes of one layer, gathered
    # What is kept of each further layer is its shard of the gradient, and not its gathered parameters.
    assert many.temp_bytes - few.temp_bytes < 4 * layer / 2
    for program, layers in ((few, 4), (many, 8)):
        inside = [c for c in program.counts.collectives if c.times == layers]
        moved = lambda kind, inside=inside: sum(c.bytes for c in inside if c.kind == kind)
        assert moved("all-gather") >= layer  # as bfloat16, forward and backward
        assert max(c.bytes for c in program.counts.collectives if c.kind == "all-gather") < layer / 2
        assert moved("reduce-scatter") == layer  # gradients
        assert moved("all-reduce") < layer / 100  # and no activations


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_of_the_head_crosses_devices_once(tied, folder, optimized):
    """And not once a chunk of tokens, with masters in float32 and products in bfloat16: it is summed over chunks
    where it is computed, and over devices behind the loop."""
    sizes = {"logit_chunk": 64, "compute_dtype": "bfloat16", "param_dtype": "float32", "prompts_per_step": 8}
    shape = replace(SMALL, vocab_size=8192, tie_word_embeddings=tied)
    config = PlanConfig.of(
        model=folder(shape), topology="v5e:2x2", group_size=2, prompt_length=16, max_new_tokens=32, **ONE_SIZE | sizes
    )
    counts = make_plan(config, only=("step",)).largest("step").counts
    head, chunks = 4 * shape.vocab_size * shape.hidden_size, 8 * 2 * 32 // 64
    assert chunks in counts.loops.values(), "the projection goes by chunks"
    sums = [c for c in counts.collectives if c.kind in ("all-reduce", "reduce-scatter") and c.bytes >= head / 8]
    assert max(c.bytes for c in sums) >= head
    assert all(c.times == 1 for c in sums if c.bytes >= head / 2)
    # Masters are laid out as what is read, and not read: no float32 head is gathered.
    assert max(c.bytes for c in counts.collectives if c.kind == "all-gather") <= head / 2


def test_training_attends_by_kernels_on_each_chip(optimized):
    """On TPUs, where the key heads can be spread and the model does not refuse; and their FLOPs are counted."""
    mesh, whole = (make_mesh(**sizes, devices=devices_of(parse_topology("v5e:2x2"))) for sizes in (
        {"data": 2, "tensor": 2}, {"tensor": 4},
    ))  # fmt: skip
    chosen = lambda model, mesh: sharded(mesh, model.axes).for_training(model)
    attention, model, narrow = (
        spread(mesh, attend_together, AXES),
        decoder(SMALL),
        replace(SMALL, num_key_value_heads=2),
    )
    assert chosen(model, mesh) is model.with_attention(attention).with_gather(gather(mesh))
    for plain, on in ((decoder(SMALL, attention="einsum"), mesh), (decoder(narrow), whole)):
        assert chosen(plain, on) is plain.with_gather(gather(on))

    K, P, S, G, T, h, d = 4, 2, 64, 2, 160, 2, 64  # R = 384: of 3 × 3 blocks the upper three are empty
    array = lambda names, *shape: jax.ShapeDtypeStruct(shape, "float32", sharding=array_sharding(mesh, shape, names))
    shapes = (K, P, S + G * T, h, d), (K, P, S + G * T, d), (K, P, S + G * T, d), (P, S)
    *qkv, mask = (array(names, *shape) for names, shape in zip(AXES, shapes, strict=True))
    loss = lambda *args: jnp.square(attention(*args[:3], args[3] > 0, T=T)).sum()
    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*qkv, mask).lower(lowering_platforms=("tpu",)).compile()
    counts = hlo.count(program.as_text())
    assert all(c.kind == "all-reduce" and c.bytes <= 4 for c in counts.collectives)  # of the loss, at most
    assert counts.flops == (2 + 3 + 4) * 2 * 6 * 128**2 * d * (P // 2) * (K // 2) * h


def test_slots_hold_fewer_caches_for_more_steps(folder, optimized):
    T, prompts = 2048, 32
    sizes = {"group_size": 8, "max_new_tokens": T, "prompts_per_step": prompts}
    plans = [small_plan(folder, **sizes, decode_slots=slots) for slots in (None, 2)]
    whole, few = (make_plan(config, only=("sampler",)).largest("sampler") for config in plans)
    cache = 2 * SMALL.num_hidden_layers * 4 * SMALL.num_key_value_heads * SMALL.head_dim * T  # of one completion
    assert whole.temp_bytes - few.temp_bytes > 0.9 * 6 * prompts / 4 * cache
    assert max(whole.counts.loops.values()) == T - 1
    assert max(few.counts.loops.values()) == 4 * (T - 1)


@pytest.mark.parametrize(
    ("topology", "mesh", "compactions"),
    [
        ("v4:2x2x1", "fsdp=4", 0),
        ("v5e:2x2", "fsdp=4", 1),
        ("v5e:2x2", "fsdp=2,tensor=2", 0),
        ("v5p:2x2x1", "fsdp=4", 0),
        ("v6e:2x2", "fsdp=2,tensor=2", 0),
    ],
)
def test_a_token_reads_the_weights_and_the_caches(topology, mesh, compactions, folder, optimized):
    """No less than memory must deliver for the steps of the sampler, but for what the chip itself holds."""
    G, T = 8, 2048
    sizes = {"topology": topology, "group_size": G, "max_new_tokens": T, "mesh": mesh, "compactions": compactions}
    config = PlanConfig.of(model=folder(WIDE), prompt_length=16, param_dtype="bfloat16", **ONE_SIZE | sizes)
    made = make_plan(config, only=("sampler",))
    ((listed, sampler),) = made.compiled
    trips = list(sampler.counts.loops.values())
    assert trips.count(T - 1) == 1, "the first loop makes every step"
    assert trips.count(0) == compactions, "and those of fewer slots none"

    ways, width = config.mesh_sizes["tensor"], 2  # bytes of a bfloat16
    c = WIDE
    weights = c.vocab_size + 3 * c.intermediate_size + 4 * c.num_attention_heads * c.head_dim
    caches = 2 * c.num_key_value_heads * c.head_dim * G * T
    read = width * (c.hidden_size * weights + caches) / ways
    own = made.topology.chip.own_bytes
    assert listed.bound_bytes == pytest.approx((T - 1) * (read - own), rel=1e-3)
    assert listed.bound_bytes <= sampler.counts.bytes <= 1.05 * (T - 1) * read
    assert sampler.roofline.seconds >= listed.bound_bytes / made.topology.chip.hbm_bandwidth


@pytest.mark.parametrize("name", ["v5e-1", "v4:1x1x1", "v5e:2x2", "v4-8", "v6e-16"])
def test_a_device_is_a_chip(name):
    topology = parse_topology(name)
    assert len(devices_of(topology)) == topology.chips


def test_what_libtpu_does_not_know():
    with pytest.raises(ValueError, match="libtpu knows no topology v5e:3x5"):
        devices_of(parse_topology("v5e:3x5"))
