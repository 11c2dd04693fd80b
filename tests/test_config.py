"""What a run is: every option checked when it is made, by the name it has on the command line, and saved as it was."""

import dataclasses
import inspect
import json
import math

import pytest
from grpo_jax.config import BY_MODEL, TrainConfig, flag, keyword_arguments, load_config, tiny_config
from grpo_jax.inference.logprobs import Sampling
from grpo_jax.inference.tokenizer import ByteTokenizer
from grpo_jax.objectives import PRESETS
from grpo_jax.runs.folder import write_json
from grpo_jax.tasks import TASKS

nan = float("nan")
WRONG = {
    "steps": [0, -1],
    "prompts": [0],
    "group_size": [0],
    "max_new_tokens": [0],
    "epochs": [0],
    "microbatches": [0],
    "group_microbatches": [0],
    "eval_every": [0],
    "eval_rows": [0],
    "eval_batch": [0],
    "save_every": [0],
    "keep": [0],
    "ref_every": [0],
    "ref_ema": [-0.1, 1.1, nan],
    "lr_warmup": [-1],
    "warm_up": [-1],
    "warm_up_loss": [-0.1, nan],
    "log_completions": [-1],
    "weight_decay": [-0.1, nan],
    "learning_rate": [-1e-3, nan],
    "seed": [-1],
    "clip_norm": [0.0, -1.0, nan],
    "length_buckets": [0],
    "temperature": [0.0, -1.0, math.inf, nan],
    "top_k": [0, -3],
    "top_p": [0.0, 1.5, nan],
    "min_p": [-0.1, 1.5, nan],
    "task": ["pricng"],
    "objective": ["grppo"],
    "dtype": ["float23"],
    "schedule": ["cosin"],
    "old_logp": ["samplr"],
    "on_error": ["rais"],
    "compact": [-1],
    "decode_slots": [0],
    "stale": [-1],
    "remat": ["layr"],
    "mesh": ["", "data", "dta=2", "data=0", "data=2,data=2", "data=2;fsdp=2"],
    "pmap": [0],
    "decode_weights": ["splt", "split"],
    "task_args": [("levl=2",), ("level",), ("level=two",)],
    "objective_args": [("bta=1",), ("beta",), ("beta=little",)],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_wrong_value_is_named_by_its_flag(field, value):
    with pytest.raises(ValueError, match=f"^{flag(field)}\\b"):
        TrainConfig(**{field: value})


def test_every_option_that_can_be_wrong_is_checked():
    """All but switches, and those for which any text is right: a folder, or a model that is looked for later."""
    free = {"model", "out", "pack_tokens", "drop_zero_variance", "compile_ahead"}
    assert set(WRONG) == {field.name for field in dataclasses.fields(TrainConfig)} - free


@pytest.mark.parametrize(
    ("field", "value", "meant"),
    [
        ("task", "pricng", "pricing"),
        ("objective", "drgrpo", "dr_grpo"),
        ("dtype", "float23", "float32"),
        ("schedule", "cosin", "cosine"),
        ("old_logp", "first_epok", "first_epoch"),
        ("on_error", "rais", "raise"),
        ("task_args", ("levl=2",), "level"),
        ("objective_args", ("bta=1",), "beta"),
    ],
)
def test_a_misspelled_name_gets_a_suggestion(field, value, meant):
    with pytest.raises(ValueError, match=f"did you mean '{meant}'\\?"):
        TrainConfig(**{field: value})


def test_what_is_far_from_any_name_gets_all_of_them():
    with pytest.raises(ValueError, match=r"'zzz' is not known\. Known: grpo, ") as caught:
        TrainConfig(objective="zzz")
    assert all(name in str(caught.value) for name in PRESETS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompts": 8, "microbatches": 3}, r"--microbatches \(3\) must divide --prompts \(8\)"),
        ({"group_size": 8, "group_microbatches": 3}, r"--group-microbatches \(3\) must divide --group-size \(8\)"),
        ({"group_size": 8, "decode_slots": 9}, r"--decode_slots \(9\) must be at most --group-size \(8\)"),
        ({"ref_every": 2, "ref_ema": 0.9}, "--ref-every and --ref-ema are two ways"),
        ({"mesh": "data=2", "pmap": 2}, "--mesh and --pmap are two ways"),
        ({"mesh": "data=2,fsdp=4,tensor=3", "prompts": 12}, r"--prompts \(12\) must be a multiple of 8 × 1"),
        ({"pmap": 4, "prompts": 8, "microbatches": 4}, r"--prompts \(8\) must be a multiple of 4 × 4"),
    ],
)
def test_values_that_do_not_fit_each_other(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**values)


def test_a_default_that_does_not_fit_is_found_before_the_run():
    prompts, group = BY_MODEL[True]["prompts"], BY_MODEL[True]["group_size"]
    with pytest.raises(ValueError, match=rf"--microbatches \({prompts + 1}\) must divide --prompts \({prompts}\)"):
        TrainConfig(microbatches=prompts + 1).resolved()
    with pytest.raises(ValueError, match=rf"--group-microbatches \({2 * group}\) must divide --group-size \({group}\)"):
        TrainConfig(group_microbatches=2 * group).resolved()


@pytest.mark.parametrize("model", ["tiny", "some/model"])
def test_what_is_left_open_suits_the_model(model):
    config = TrainConfig(model=model).resolved()
    defaults = BY_MODEL[model == "tiny"]
    assert all(getattr(config, field) == defaults[field] for field in defaults if not field.endswith("_args"))
    assert config.task_options() == defaults["task_args"]
    assert config.objective_options() == defaults["objective_args"]
    assert config.resolved() == config, "once filled in, nothing changes any more"


def test_what_is_given_stays():
    given = TrainConfig(
        steps=7,
        warm_up=0,
        learning_rate=0.0,
        microbatches=2,
        objective_args=("beta=0.5",),
        task_args=("wording=natural",),
    )
    config = given.resolved()
    assert (config.steps, config.warm_up, config.learning_rate, config.microbatches) == (7, 0, 0.0, 2)
    assert config.objective_options() == {"beta": 0.5}
    assert config.task_options() == {"wording": "natural"}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_named(name):
    """Defaults meant for another objective are left out, and Dr. GRPO gets its length limit from the run."""
    config = TrainConfig(objective=name, max_new_tokens=11).resolved()
    options = config.objective_options()
    known = inspect.signature(PRESETS[name]).parameters
    assert options.keys() <= known.keys()
    if "max_length" in known:
        assert options["max_length"] == 11
        assert (
            TrainConfig(objective=name).resolved().objective_options()["max_length"] == BY_MODEL[True]["max_new_tokens"]
        )
        given = TrainConfig(objective=name, objective_args=("max_length=5",)).resolved()
        assert given.objective_options()["max_length"] == 5
    PRESETS[name](**options)


def test_values_of_arguments_are_json_or_text():
    def function(*, a=0, b=None, c="", d=True):
        pass

    pairs = ("a=1e-3", "b=[1, 2]", "c=terse", "d=False")
    assert keyword_arguments(function, pairs, "task-args") == {"a": 1e-3, "b": [1, 2], "c": "terse", "d": False}
    assert keyword_arguments(function, ("b=None", "d=true"), "x") == {"b": None, "d": True}
    assert keyword_arguments(function, ("c=x=y", "a=1", "a=2"), "x") == {"c": "x=y", "a": 2}
    with pytest.raises(ValueError, match="--x: a takes a number, as 0, got 'one'"):
        keyword_arguments(function, ("a=one",), "x")
    with pytest.raises(ValueError, match="--x takes NAME=VALUE, got 'a'"):
        keyword_arguments(function, ("a",), "x")
    with pytest.raises(ValueError, match=r"--x: function takes no 'q'\. It takes: a, b, c, d"):
        keyword_arguments(function, ("q=1",), "x")


def test_sampling_is_that_of_the_options():
    config = TrainConfig(temperature=0.5, top_k=3, top_p=0.8, min_p=0.1)
    assert config.sampling == Sampling(0.5, 3, 0.8, 0.1)


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(),
        TrainConfig().resolved(),
        TrainConfig(clip_norm=math.inf, task_args=("level=2",), objective_args=("beta=0.1", "low=0.3"), out="a b"),
    ],
)
def test_a_config_is_saved_and_loaded_as_it_was(tmp_path, config):
    write_json(tmp_path / "config.json", config)
    assert load_config(tmp_path) == config


def test_loading_says_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no run folder"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"steps": 3, "betta": 1, "alpha": 2}))
    with pytest.raises(ValueError, match="options that this version does not know: alpha, betta"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"steps": 0}))
    with pytest.raises(ValueError, match="--steps must be at least 1"):
        load_config(tmp_path)


def test_the_tiny_model_is_as_small_as_it_says():
    config = tiny_config(ByteTokenizer.vocab_size, "bfloat16")
    assert (config.vocab_size, config.dtype) == (259, "bfloat16")
    assert config.max_position_embeddings == 512
    assert set(TASKS), "a task to train it on"
