"""Plans: names and errors anywhere; with libtpu, compiled for a slice of four v5e chips."""

import importlib.util
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from grpo_jax import cli
from grpo_jax.models import decoder
from grpo_jax.models.hub import config_to_hf
from grpo_jax.models.kernels.fused import AXES
from grpo_jax.models.kernels.fused_tpu import attend_together
from grpo_jax.parallel.backends import sharded
from grpo_jax.parallel.sharding import array_sharding, gather, make_mesh, spread
from grpo_jax.plan import hlo, plan
from grpo_jax.plan.plan import CompiledProgram, Plan, PlanConfig, make_plan, model_config, overflow
from grpo_jax.plan.report import figures, show, suggestions
from grpo_jax.plan.topology import Roofline, parse_topology
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
GIB = 1024**3
libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (requirements-tpu.txt)")


# --- configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": "v9-4"}, "unknown chip 'v9'"),
        ({"mesh": "data=2,fsdp=4"}, "data 2 × fsdp 4 × tensor 1 is 8 devices, v5e:4x4 has 16 chips"),
        ({"mesh": "pipeline=16"}, "data=4,fsdp=2,tensor=1"),
        ({"prompts": 24}, "multiple of 16: data 1 × fsdp 16 × 1 micro-batches"),
        ({"prompts": 16, "microbatches": 2}, "multiple of 32"),
        ({"group_size": 8, "group_microbatches": 3}, "must divide --group-size"),
        ({"prompt_length": 0}, "--prompt-length must be at least 1"),
        ({"decode_slots": 0}, "--decode_slots must be at least 1"),
        ({"group_size": 8, "decode_slots": 9}, "--decode_slots (9) must be at most --group-size (8)"),
        ({"objective": "grpp"}, "did you mean 'grpo'"),
        ({"objective_args": ("gamma=1",)}, "takes no 'gamma'"),
        ({"dtype": "int8"}, "'int8' is not known"),
        ({"decode_weights": "whole"}, "'whole' is not known"),
        ({"remat": "all"}, "'all' is not known"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PlanConfig(**{"topology": "v5e-16", "model": "qwen2.5-1.5b"} | options)


def test_defaults_fill_the_slice():
    config = PlanConfig("v5e-16", "qwen2.5-1.5b", microbatches=2)
    assert config.mesh_sizes == {"data": 1, "fsdp": 16, "tensor": 1}
    assert config.batch == 32
    mixed = replace(config, mesh="data=2,fsdp=4,tensor=2")
    assert mixed.mesh_sizes == {"data": 2, "fsdp": 4, "tensor": 2}
    assert mixed.batch == 16
    assert replace(mixed, prompts=64).batch == 64


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("smollm2-135m", 0.1345),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-1.5b", 1.544),
        ("Qwen2.5-7B", 7.616),
        ("qwen2.5-32b", 32.764),
    ],
)
def test_built_in_shapes_have_their_published_size(name, billions):
    model = plan.decoder(model_config(name, "bfloat16"))
    leaves = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    assert sum(x.size for x in leaves) / 1e9 == pytest.approx(billions, rel=1e-3)
    assert all(x.dtype == "bfloat16" for x in leaves)


SMALL = plan.DecoderConfig(1024, 512, 1024, 2, 8, 4, 64, tie_word_embeddings=False)


@pytest.fixture
def folder(tmp_path):
    def write(layers=2):
        path = tmp_path / f"layers-{layers}"
        path.mkdir(exist_ok=True)
        settings = config_to_hf(replace(SMALL, num_hidden_layers=layers), "float32")
        (path / "config.json").write_text(json.dumps(settings))
        return path

    return write


def test_a_model_is_a_folder_or_its_config(folder):
    path = folder()
    assert model_config(str(path), "float32") == SMALL
    assert model_config(str(path / "config.json"), "bfloat16") == replace(SMALL, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"no known shape: expected .* qwen2\.5-7b"):
        model_config("qwen-7b", "float32")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        model_config(str(path.parent), "float32")


def test_without_libtpu_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(plan.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["plan", "--topology", "v5e-16", "--model", "smollm2-135m"]) == 2
    assert "pip install -r requirements-tpu.txt" in capsys.readouterr().err


def test_options_that_do_not_fit_are_an_error_of_the_command(capsys):
    options = ["--topology", "v5e-16", "--model", "smollm2-135m", "--mesh", "data=3"]
    with pytest.raises(SystemExit):
        cli.main(["plan", *options])
    told = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().err).split())
    assert "is 3 devices, v5e:4x4 has 16 chips" in told


def test_what_xla_says_when_memory_runs_out():
    message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded by 4.7G"
    assert overflow(message, 7) == int(20.5 * GIB)
    assert overflow("Used 512.00M of 15.75G hbm", 7) == 512 * 1024**2
    message = "the total memory required for HLO temporaries (17.50G) exceeds available HBM (15.75G)."
    assert overflow(message, GIB) == int(18.5 * GIB)
    assert overflow("INTERNAL: something else", 7) is None


# --- the decision and the advice, from figures -------------------------------------------------------------------


def program(name="step", argument=2.0, temp=4.0, resident=0.0, **changes):
    """A program with sizes in GiB."""
    sizes = [int(x * GIB) for x in (argument, 0.5, 0.5, temp, 0, resident)]
    counts = hlo.Counts([hlo.Work(1, 2e12, 1e9)], [hlo.Collective("all-gather", 3, 1e9, ())], {"loop": 3, "free": None})
    return CompiledProgram(name, *sizes, 1.0, counts, Roofline(2.0, 0.5))._replace(**changes)


def planned(*programs, **options):
    options = {"topology": "v5e-16", "model": "qwen2.5-1.5b", "prompts": 64} | options
    config = PlanConfig(**options)
    return Plan(config, parse_topology(config.topology), 10**9, {p.name: p for p in programs})


def test_it_fits_if_every_program_does_with_what_stays_beside_it():
    assert planned(program(temp=13.7)).fits
    assert not planned(program(temp=13.8)).fits  # 15.75 GiB of a v5e chip's 16
    assert planned(program(), program("sampler", 4, 6, resident=5.7)).fits
    assert not planned(program(), program("sampler", 4, 6, resident=5.8)).fits
    assert planned(program(temp=13.8), topology="v6e-16").fits
    assert not planned(program(overflow_bytes=16 * GIB)).fits
    assert suggestions(planned(program())) == []


def test_advice_cuts_temporaries_by_as_much_as_is_needed():
    found = suggestions(planned(program(temp=20)))
    assert found[0].startswith("--microbatches 2: 2 prompts a chip at a time, now 4")
    found = suggestions(planned(program(temp=40)))
    assert found[0].startswith("--microbatches 4: 1 prompts")
    found = suggestions(planned(program(temp=40), prompts=16))
    assert found[0].startswith("--group-microbatches 4: 2 completions of a prompt at a time, now 8")
    found = suggestions(planned(program(temp=200), prompts=16, remat="none"))
    assert found[0].startswith("--remat layer")
    assert found[1].startswith("--group-microbatches 8")
    assert found[2].startswith("--mesh data=1,fsdp=8,tensor=2")
    assert found[-1].startswith("--topology v5e:16x16")


def test_advice_for_a_state_that_is_too_large():
    found = suggestions(planned(program(argument=18), mesh="data=4,fsdp=4"))
    assert found[0].startswith("--mesh fsdp=16,tensor=1")
    assert found[1].startswith("--dtype bfloat16")
    assert found[2].startswith("--topology v5e:4x8: 32 chips")
    assert suggestions(planned(program(argument=18), dtype="bfloat16"))[0].startswith("--topology")


def test_advice_for_a_sampler_whose_weights_are_too_large():
    sampler = program("sampler", argument=14, temp=2, resident=2)
    found = suggestions(planned(program(), sampler, prompts=16))
    assert found[0].startswith("--mesh data=1,fsdp=8,tensor=2")
    assert found[1].startswith("--decode-weights split: the sampler's weights take 14.0 GiB")
    caches = program("sampler", argument=1, temp=16, resident=2)
    found = suggestions(planned(program(), caches))
    assert found[0].startswith("--prompts 16: fewer caches")
    assert found[1].startswith("--decode_slots 4: caches of half as many completions of a prompt, now 8")
    assert suggestions(planned(program(), caches, prompts=16, decode_slots=2))[0].startswith("--decode_slots 1")
    assert not any(
        advice.startswith("--decode_slots") for advice in suggestions(planned(program(), caches, decode_slots=1))
    )


def test_figures_hold_what_is_promised_and_print():
    made = planned(program(), program("sampler", counts=None, roofline=None, overflow_bytes=20 * GIB))
    told = figures(made)
    promised = "fits chip_bytes argument_bytes temp_bytes flops roofline_seconds collectives compile_seconds"
    assert set(promised.split()) <= set(told)
    assert told["chip_bytes"] == 16 * GIB
    assert told["flops"] == 2e12
    assert told["collectives"] == [{"kind": "all-gather", "count": 3, "bytes": 3e9}]
    assert told["programs"]["step"]["unknown_loops"] == ["free"]
    assert told["programs"]["sampler"]["flops"] is None
    assert not told["fits"]
    assert json.loads(json.dumps(told)) == told
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(made, console)
    text = console.export_text()
    assert "8 completions of 1024, 1 × 1" in text
    assert "does not fit" in text
    assert "all-gather" in text
    assert all(advice in " ".join(text.split()) for advice in told["suggestions"])


# --- versions ----------------------------------------------------------------------------------------------------


def test_requirements_for_tpus_have_the_versions_of_the_project():
    lines = (ROOT / "requirements-tpu.txt").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == ["-e .[tpu]"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (jax_range,) = [d.removeprefix("jax") for d in project["dependencies"] if re.match(r"jax\W", d)]
    assert project["optional-dependencies"]["tpu"] == [f"jax[tpu]{jax_range}"]


# --- compiled for TPUs -------------------------------------------------------------------------------------------


def small_plan(folder, layers, **options):
    sizes = {"group_size": 2, "prompt_length": 16, "max_new_tokens": 16}
    return PlanConfig("v5e:2x2", str(folder(layers)), **sizes | options)


@libtpu
def test_a_small_model_for_four_chips(folder, capsys, optimized):
    path = folder(2)
    options = ["--topology", "v5e:2x2", "--model", str(path), "--group-size", "2", "--prompt-length", "16"]
    assert cli.main(["plan", *options, "--max-new-tokens", "16", "--objective-args", "beta=0.1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"]
    assert told["chips"] == 4
    assert set(told["programs"]) == {"step", "layout", "sampler", "reference"}
    # Parameters and two moments of float32, over four chips; a little more for norms, which are whole.
    state = 3 * 4 * told["parameters"] / 4
    assert state < told["argument_bytes"] < 1.02 * state + 1e5
    assert all(p["unknown_loops"] == [] for p in told["programs"].values())
    assert all(p["roofline_seconds"] > 0 for p in told["programs"].values() if p["flops"])
    # A token costs 2 FLOPs a matrix entry forward, twice that backward, and most of the forward once more (remat).
    c, tokens = SMALL, 16 + 2 * 16
    layer = 2 * c.hidden_size * 64 * (8 + 4) + 3 * c.hidden_size * c.intermediate_size
    once = 2 * (tokens * 2 * layer + 2 * 16 * c.hidden_size * c.vocab_size)
    # And attention computes whole blocks of its 128 rows: two products forward, twice, and seven backward.
    blocks = c.num_hidden_layers * c.num_attention_heads * (2 + 2 + 7) * 2 * 128**2 * 64
    assert 3 * once < told["flops"] - blocks < 4.2 * once
    # What the sampler needs of the state stays in memory beside it, and the reference too.
    assert told["programs"]["sampler"]["resident_bytes"] == pytest.approx(state * 4 / 3, rel=0.02)


@libtpu
def test_parameters_are_gathered_layer_by_layer_and_gradients_scattered(folder, optimized):
    few, many = (make_plan(small_plan(folder, layers), only=("step",)).programs["step"] for layers in (4, 8))
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


@libtpu
def test_training_attends_by_kernels_on_each_chip(optimized):
    """On TPUs, where the key heads can be spread and the model does not refuse; and their FLOPs are counted."""
    mesh, whole = (make_mesh(**sizes, devices=plan.devices_of(parse_topology("v5e:2x2"))) for sizes in (
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


@libtpu
def test_seats_hold_fewer_caches_for_more_steps(folder, optimized):
    sizes = {"group_size": 8, "prompt_length": 16, "max_new_tokens": 16384}  # more than a chip's own memory holds
    plans = [small_plan(folder, 2, **sizes, decode_slots=decode_slots) for decode_slots in (None, 2)]
    whole, few = (make_plan(config, only=("sampler",)).programs["sampler"] for config in plans)
    cache = 2 * SMALL.num_hidden_layers * 4 * SMALL.num_key_value_heads * SMALL.head_dim * 16384  # of one completion
    assert whole.temp_bytes - few.temp_bytes > 0.9 * 6 * cache
    assert 16383 in whole.counts.loops.values()
    assert 4 * 16383 in few.counts.loops.values()


@libtpu
def test_what_libtpu_does_not_know():
    with pytest.raises(ValueError, match="libtpu knows no topology v5e:3x5"):
        plan.devices_of(parse_topology("v5e:3x5"))
