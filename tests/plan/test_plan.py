"""Plans: their options, what they list beside what a run compiles, and what they say."""

import importlib.util
import io
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from grpo_jax.cli.entry import main, parsed
from grpo_jax.cli.train import narrowed
from grpo_jax.components import build, stages_of
from grpo_jax.config import TrainConfig
from grpo_jax.models import DecoderConfig, decoder
from grpo_jax.models.hub import config_to_hf
from grpo_jax.named_options import option_paths
from grpo_jax.options import OptionError
from grpo_jax.parallel.memory import memory_for_training
from grpo_jax.parallel.programs import listed
from grpo_jax.parallel.sharding import make_mesh
from grpo_jax.plan import hlo
from grpo_jax.plan.advice import suggestions
from grpo_jax.plan.config import PlanConfig
from grpo_jax.plan.listed import Listed
from grpo_jax.plan.memory import bytes_per_device, held_in_training
from grpo_jax.plan.models import model_config
from grpo_jax.plan.plan import (
    CompiledProgram,
    Plan,
    Planned,
    largest_of_each_kind,
    make_plan,
    overflow,
)
from grpo_jax.plan.programs import list_programs
from grpo_jax.plan.report import figures, show
from grpo_jax.plan.topology import Roofline, parse_topology
from grpo_jax.runs.run import held_out
from grpo_jax.training.programs import programs_of
from rich.console import Console

from toy import install

ROOT = Path(__file__).resolve().parents[2]
GIB = 1024**3
BIG = {"model": "qwen2.5-1.5b", "topology": "v5e-16"}


# --- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": "v9-4"}, "topology 'v9-4': unknown chip 'v9'"),
        ({"mesh": "data=2,fsdp=4"}, "mesh of data 2 × fsdp 4 × tensor 1 is 8 devices, v5e:4x4 has 16 chips"),
        ({"mesh": "pipeline=16"}, "data=4,fsdp=2,tensor=1"),
        ({"prompts_per_step": 24}, "prompts_per_step must be a multiple of 16"),
        ({"prompts_per_step": 16, "microbatches": 2}, "must be a multiple of 32"),
        ({"group_size": 8, "group_microbatches": 3}, "must divide group_size"),
        ({"pmap": 2}, "pmap is for the devices of this machine"),
        ({"objective": "grpp"}, "did you mean 'grpo'"),
        ({"prompts": 24}, "prompts is no option of a run"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        PlanConfig.of(**BIG | options)


def test_a_plan_needs_a_slice():
    with pytest.raises(OptionError, match="topology is missing: the slice to plan for"):
        make_plan(PlanConfig.of(model="qwen2.5-1.5b"))


def test_defaults_fill_the_slice():
    """Those of the run, but for a mesh over all chips, and a prompt for each part and micro-batch."""
    config = PlanConfig.of(**BIG, microbatches=2)
    assert config.mesh_sizes == {"data": 1, "fsdp": 16, "tensor": 1}
    assert config.batching.prompts_per_step == 32
    assert config.generation == TrainConfig.of(model="qwen2.5-1.5b").generation
    mixed = PlanConfig.of(**BIG, mesh="data=2,fsdp=4,tensor=2")
    assert mixed.mesh_sizes == {"data": 2, "fsdp": 4, "tensor": 2}
    assert mixed.batching.prompts_per_step == 8
    assert replace(mixed, batching=mixed.batching._replace(prompts_per_step=64)).batching.prompts_per_step == 64
    assert PlanConfig.of(**BIG, decode_weights="split").mesh == "fsdp=16"


@pytest.mark.parametrize(
    ("arguments", "prompts", "mesh"),
    [
        (["--topology", "v5e-16"], 16, "fsdp=16"),
        (["--topology=v5e-8", "--microbatches", "4"], 32, "fsdp=8"),
        (["--topology", "v5e-8", "--mesh", "fsdp=2,tensor=4"], 2, "fsdp=2,tensor=4"),
        (["--topology", "v5e-8", "--prompts-per-step", "64"], 64, "fsdp=8"),
    ],
)
def test_the_command_line_has_these_defaults_too(arguments, prompts, mesh):
    config = narrowed(parsed(["plan", "--model", "qwen2.5-1.5b", *arguments]), PlanConfig)
    assert (config.batching.prompts_per_step, config.mesh) == (prompts, mesh)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--topology is missing: the slice to plan for, such as v5e-16"),
        (["--topology", "v5e-16", "--mesh", "data=3"], "--mesh of data 3 × fsdp 1 × tensor 1 is 3 devices"),
        (["--topology", "v5f-16"], "--topology 'v5f-16': unknown chip"),
    ],
)
def test_options_that_do_not_fit_are_an_error_of_the_command(options, message, capsys):
    assert main(["plan", "--model", "smollm2-135m", *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is here")
def test_without_libtpu_it_says_how_to_get_it(capsys):
    assert main(["plan", "--topology", "v5e-16", "--model", "smollm2-135m"]) == 2
    assert "pip install -r requirements-tpu.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("smollm2-135m", 0.1345),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-1.5b", 1.544),
        ("Qwen2.5-7B", 7.616),
        ("qwen2.5-32b", 32.764),
        ("smollm3-3b", 3.075),
        ("llama-3.2-1b", 1.236),
        ("qwen3-0.6b", 0.596),
        ("qwen3-1.7b", 1.721),
        ("qwen3-4b", 4.022),
        ("qwen3-8b", 8.191),
        ("gemma-2-2b", 2.614),
    ],
)
def test_built_in_shapes_have_their_published_size(name, billions):
    leaves = jax.tree.leaves(jax.eval_shape(decoder(model_config(name)).init, jax.random.key(0)))
    assert sum(x.size for x in leaves) / 1e9 == pytest.approx(billions, rel=1e-3)


SMALL = DecoderConfig(1024, 512, 1024, 2, 8, 4, 64, tie_word_embeddings=False)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(SMALL, "float32")))
    return tmp_path


def test_a_model_is_a_folder_or_its_config(folder):
    expected = replace(SMALL, param_dtype="float32")
    assert model_config(str(folder)) == expected
    assert model_config(str(folder / "config.json")) == expected
    with pytest.raises(OptionError, match=r"model 'qwen-7b' is no file.* qwen2\.5-7b"):
        model_config("qwen-7b")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        model_config(str(folder.parent))


# --- what is listed ----------------------------------------------------------------------------------------------

RUN = {
    "task": "letters", "model": "bigram", "prompts_per_step": 2, "group_size": 4, "max_new_tokens": 6, "eval_rows": 3,
    "length_buckets": 1, "pack_tokens": False, "drop_zero_variance": False, "compactions": 0,
}  # fmt: skip
OPTIONS = {
    "plain": {},
    "packing": {"pack_tokens": True, "length_buckets": 2},
    "sampler": {"compactions": 2, "decode_slots": 3, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    "epochs and a moving reference": {"epochs": 2, "objective_args": ("beta=0.1",), "ref_ema": 0.9},
    "a critic and stale data": {"objective": "ppo", "max_staleness": 2},
    "dropped groups": {"drop_zero_variance": True, "pack_tokens": True},
    "micro-batches": {"drop_zero_variance": True, "microbatches": 2, "group_microbatches": 2, "pack_tokens": True},
    "the tiny model, mixed": {"task": "pricing", "model": "tiny", "compute_dtype": "bfloat16"},
}


def described(programs):
    """Names, static options, and the shapes of arguments and results."""
    shape = lambda x: (x.shape, str(x.dtype))
    shapes = lambda p: (jax.tree.structure((p.args, p.out)), [shape(x) for x in jax.tree.leaves((p.args, p.out))])
    return [(p.name, repr(p.options), *shapes(p)) for p in programs]


def compiled_by_a_run(config):
    """What a run with `compile_ahead` compiles: its iterations' programs, and the evaluation's."""
    components = build(config)
    stages = stages_of(config, components)
    programs = programs_of(stages, stages.start(components.params), components.task)
    with listed() as found:
        held_out(config, components, jax.eval_shape(lambda: components.params))
    return [*programs, *found.values()]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_plan_lists_what_a_run_compiles(options):
    """Law: for equal options both have the same programs, in one order."""
    install()
    options = RUN | options
    run = compiled_by_a_run(TrainConfig.of(**options, mesh="data=1"))
    plan = list_programs(PlanConfig.of(**options, topology="v5e-1"), make_mesh(data=1)).programs
    assert described(one.program for one in plan if one.kind != "supervised") == described(run)


def listing(**options):
    install()
    return list_programs(PlanConfig.of(**RUN | {"topology": "v5e-1"} | options), make_mesh(data=1))


def test_kinds_sizes_and_the_largest_of_each():
    programs = listing(drop_zero_variance=True, pack_tokens=True, sft_steps=3).programs
    kinds = [one.kind for one in programs]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "sampler": 1, "assemble": 4, "busy_and_tokens": 1, "part_and_rest": 7, "step": 8, "evaluation": 1,
        "supervised": 1,
    }  # fmt: skip
    whole = {"prompts": 2, "prompt_length": 16, "group_size": 4, "completion_length": 6}
    largest = {one.kind: one.sizes for one in largest_of_each_kind(programs)}
    assert largest["step"] == largest["sampler"] == largest["assemble"] == whole
    assert largest["part_and_rest"] == whole | {"kept_prompts": 1}
    assert largest["evaluation"] == whole | {"prompts": 3, "group_size": 1}
    assert largest["supervised"] == whole | {"prompts": 64, "group_size": 1, "completion_length": 8}
    assert {one.sizes.get("packed_tokens") for one in programs if one.kind == "step"} == {None, 12, 15, 18}


def test_what_stays_beside_a_program():
    """State, reference, critic and queue; of them what a program is given counts there."""
    plain, held = listing(), listing(objective_args=("beta=0.1",), max_staleness=3)
    kinds = lambda found: {one.kind: one for one in found.programs}
    params = 4 * plain.parameters
    state = bytes_per_device(kinds(plain)["step"].program.args[0][1])
    batch = 2 * (16 * 5 + 4 * 6 * 9 + 4 + 8)  # prompts, tokens, masks, log-probabilities, stops, rows, updates
    resident = {name: one.resident_bytes for name, one in kinds(plain).items()}
    assert resident == {"sampler": state - params, "assemble": state, "step": 0, "evaluation": state - params}
    resident = {name: one.resident_bytes for name, one in kinds(held).items()}
    assert resident == {
        "sampler": state + 3 * batch, "logp": state + 3 * batch, "assemble": state + params + 3 * batch,
        "step": params + 3 * batch, "evaluation": state + 3 * batch,
    }  # fmt: skip
    critic = kinds(listing(objective="ppo", objective_args=("beta=0.0",)))
    both = bytes_per_device(critic["step"].program.args[0][1])
    assert both > 2 * state
    assert critic["values"].sizes == critic["step"].sizes
    assert critic["values"].resident_bytes < both - params < critic["assemble"].resident_bytes


def test_a_cast_policy_is_a_copy():
    """The sampler of a model that is computed in another type reads nothing of the state."""
    mixed = {"model": "tiny", "task": "pricing", "compute_dtype": "bfloat16", "objective_args": ("beta=0.0",)}
    programs = {one.kind: one for one in listing(**mixed).programs}
    state = bytes_per_device(programs["step"].program.args[0][1])
    params = bytes_per_device(programs["cast"].program.args[0][1])
    kept = {name: programs[name].resident_bytes for name in ("cast", "sampler", "evaluation")}
    assert kept == {"cast": state - params, "sampler": state, "evaluation": state - params}
    assert programs["supervised"].resident_bytes == 0


def test_a_prompt_without_a_tokenizer_has_a_length_of_its_own(folder):
    config = PlanConfig.of(model=str(folder), topology="v5e-1", length_buckets=1, pack_tokens=False, compactions=0)
    found = list_programs(config, make_mesh(data=1))
    assert found.config.batching.prompt_length == 512
    assert found.config.remat == "dots", "a chip has room for it"
    assert {one.kind for one in found.programs} == {"sampler", "assemble", "busy_and_tokens", "step", "evaluation"}
    with pytest.raises(OptionError, match=r"max_new_tokens .* do not fit the model's 2048 positions"):
        list_programs(replace(config, generation=config.generation._replace(max_new_tokens=1537)), make_mesh(data=1))


def test_a_backward_pass_has_the_room_that_a_run_gives_it():
    """The same arithmetic as `parallel.memory`, on shapes and for another chip."""
    params = {"a": jnp.zeros((8, 4)), "b": jnp.zeros((5,), jnp.bfloat16)}
    room = lambda parts: memory_for_training(params, parts)
    shapes = jax.eval_shape(lambda: params)
    assert room(2) - room(1) == (held_in_training(shapes, 1) - held_in_training(shapes, 2)) / 2
    assert held_in_training(shapes, 1) == 4 * (32 * 4 + 5 * 2) + 4 * 37


# --- the decision and the advice, from figures -------------------------------------------------------------------


def program(kind="step", argument=2.0, temp=4.0, resident=0.0, **changes):
    """A program with sizes in GiB."""
    sizes = [int(x * GIB) for x in (argument, 0.5, 0.5, temp, 0, resident)]
    counts = hlo.Counts([hlo.Work(1, 2e12, 1e9)], [hlo.Collective("all-gather", 3, 1e9, ())], {"loop": 3, "free": None})
    compiled = CompiledProgram(*sizes, 1.0, counts, Roofline(2.0, 0.5))._replace(**changes)
    shapes = {"prompts": 64, "prompt_length": 512, "group_size": 8, "completion_length": 64}
    return Planned(Listed(kind, kind, {}, shapes), compiled)


def planned(*programs, **options):
    config = PlanConfig.of(**BIG | {"prompts_per_step": 64, "remat": "layer", "prompt_length": 512} | options)
    return Plan(config, parse_topology(config.topology), 10**9, list(programs))


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
    found = suggestions(planned(program(temp=40), prompts_per_step=16))
    assert found[0].startswith("--group-microbatches 4: 2 completions of a prompt at a time, now 8")
    found = suggestions(planned(program(temp=200), prompts_per_step=16, remat="none"))
    assert found[0].startswith("--remat layer")
    assert found[1].startswith("--group-microbatches 8")
    assert found[2].startswith("--mesh data=1,fsdp=8,tensor=2")
    assert found[-1].startswith("--topology v5e:16x16")


def test_advice_for_a_state_that_is_too_large():
    found = suggestions(planned(program(argument=18), mesh="data=4,fsdp=4"))
    assert found[0].startswith("--mesh fsdp=16,tensor=1")
    assert found[1].startswith("--moment-dtype bfloat16")
    assert found[2].startswith("--topology v5e:4x8: 32 chips")
    assert suggestions(planned(program(argument=18), moment_dtype="bfloat16"))[0].startswith("--topology")


def test_advice_for_a_sampler_whose_weights_are_too_large():
    sampler = program("sampler", argument=14, temp=2, resident=2)
    found = suggestions(planned(program(), sampler, prompts_per_step=16))
    assert found[0].startswith("--mesh data=1,fsdp=8,tensor=2")
    assert found[1].startswith("--decode-weights split: the sampler's weights take 14.0 GiB")
    caches = program("sampler", argument=1, temp=16, resident=2)
    found = suggestions(planned(program(), caches))
    assert found[0].startswith("--prompts-per-step 16: fewer caches")
    assert found[1].startswith("--decode-slots 4: caches of half as many completions of a prompt, now 8")
    assert found[2].startswith("--compute-dtype bfloat16")
    few = suggestions(planned(program(), caches, prompts_per_step=16, decode_slots=2))
    assert few[0].startswith("--decode-slots 1")
    one = suggestions(planned(program(), caches, decode_slots=1, compute_dtype="bfloat16"))
    assert not any(advice.startswith(("--decode-slots", "--compute-dtype")) for advice in one)
    rows = program("evaluation", argument=1, temp=16)
    assert suggestions(planned(program(), rows))[0].startswith("--eval-batch-size 32: fewer caches at a time, now 64")


def test_advice_names_options_of_the_command():
    """Every flag of an advice is one that the command takes."""
    too_large = [program(temp=200), program("sampler", 14, 2), program("evaluation", 1, 16), program("logp", 18)]
    told = suggestions(planned(*too_large, remat="none", mesh="data=2,fsdp=8"))
    known = {f"--{name.replace('_', '-')}" for name in option_paths(PlanConfig)}
    assert len(told) > 8
    assert {advice.split()[0].rstrip(":") for advice in told} <= known


def test_figures_hold_what_is_promised_and_print():
    """Every program, the largest step once more at the top, and a page."""
    listed_only = Planned(program("logp").listed)
    made = planned(
        program(), listed_only, program("sampler", counts=None, roofline=None, overflow_bytes=20 * GIB),
    )  # fmt: skip
    told = figures(made)
    promised = "fits chip_bytes argument_bytes temp_bytes flops roofline_seconds collectives compile_seconds"
    assert set(promised.split()) <= set(told)
    assert told["chip_bytes"] == 16 * GIB
    assert told["flops"] == 2e12
    assert told["collectives"] == [{"kind": "all-gather", "count": 3, "bytes": 3e9}]
    step, logp, sampler = told["programs"]
    assert step["compiled"]["unknown_loops"] == ["free"]
    assert (logp["kind"], logp["shapes"]["prompts"], logp["compiled"]) == ("logp", 64, None)
    assert sampler["compiled"]["flops"] is None
    assert not told["fits"]
    assert json.loads(json.dumps(told)) == told
    assert json.loads(json.dumps(figures(planned(listed_only))))["flops"] is None
    console = Console(width=120, record=True, file=io.StringIO())
    show(made, console)
    text = console.export_text()
    assert "64 prompts of 512 tokens × 8 completions of 64, 1 × 1" in text
    assert "does not fit" in text
    assert "all-gather" in text
    assert all(advice in " ".join(text.split()) for advice in told["suggestions"])


def test_what_xla_says_when_memory_runs_out():
    message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded by 4.7G"
    assert overflow(message, 7) == int(20.5 * GIB)
    assert overflow("Used 512.00M of 15.75G hbm", 7) == 512 * 1024**2
    message = "the total memory required for HLO temporaries (17.50G) exceeds available HBM (15.75G)."
    assert overflow(message, GIB) == int(18.5 * GIB)
    assert overflow("INTERNAL: something else", 7) is None


# --- versions ----------------------------------------------------------------------------------------------------


def test_requirements_for_tpus_have_the_versions_of_the_project():
    lines = (ROOT / "requirements-tpu.txt").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == ["-e .[tpu]"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (jax_range,) = [d.removeprefix("jax") for d in project["dependencies"] if re.match(r"jax\W", d)]
    assert project["optional-dependencies"]["tpu"] == [f"jax[tpu]{jax_range}"]
