"""What a run is: every option checked when it is made, by the name it has on the command line, and saved as it was."""

import dataclasses
import datetime
import inspect
import json
import math
import re

import pytest
from grpo_jax.config import ARGUMENTS, BY_MODEL, TrainConfig, load_config, tiny_config
from grpo_jax.inference.tokenizer import ByteTokenizer
from grpo_jax.named_options import flag, keyword_arguments, option, option_paths, written
from grpo_jax.objectives import PRESETS
from grpo_jax.options import AdamW, Batching, Data, Generation, OptionError, Precision, Sampling, Scoring, Update
from grpo_jax.runs.folder import write_json
from grpo_jax.tasks import TASKS

from other_values import OF_DATA, OTHER, needed

nan = float("nan")
WRONG = {
    "steps": [0, -1, 1.5, True],
    "prompts_per_step": [0],
    "prompt_length": [0],
    "group_size": [0],
    "max_new_tokens": [0],
    "epochs": [0],
    "microbatches": [0],
    "group_microbatches": [0],
    "logit_chunk": [0],
    "eval_every": [0],
    "eval_rows": [0],
    "eval_batch_size": [0],
    "save_every": [0],
    "keep_checkpoints": [0],
    "keep_minutes": [0],
    "keep_best": [-1],
    "ref_every": [0],
    "ref_ema": [-0.1, 1.1, nan],
    "lr_warmup": [-1],
    "sft_steps": [-1],
    "sft_target_loss": [-0.1, nan, math.inf],
    "log_completions": [-1],
    "weight_decay": [-0.1, nan],
    "learning_rate": [-1e-3, nan, math.inf],
    "seed": [-1],
    "clip_norm": [0.0, -1.0, nan],
    "length_buckets": [0],
    "temperature": [0.0, -1.0, math.inf, nan],
    "top_k": [0, -3],
    "top_p": [0.0, 1.5, nan],
    "min_p": [-0.1, 1.5, nan],
    "task": ["pricng"],
    "objective": ["grppo"],
    "param_dtype": ["float23", "float16"],
    "compute_dtype": ["float23", "float16"],
    "moment_dtype": ["float23", "float16"],
    "template_args": [("thinking",)],
    "template_date": ["today", "2024-13-01", 3],
    "schedule": ["cosin"],
    "old_logp": ["samplr"],
    "on_error": ["rais"],
    "workers": [-1],
    "timeout": [0.0, nan, 1.0],
    "weights": [(1.0, nan), ("1",)],
    "compactions": [-1],
    "decode_slots": [0],
    "max_staleness": [-1],
    "pack_tokens": [1],
    "drop_zero_variance": ["yes"],
    "remat": ["layr"],
    "mesh": ["", "data", "dta=2", "data=0", "data=2,data=2", "data=2;fsdp=2"],
    "pmap": [0],
    "decode_weights": ["splt", "split"],
    "reward": ["own.py:near", (3,)],
    "eval_share": [0.0, 1.5, nan, "half"],
    "on_bad_row": ["drop"],
    "prompt_column": ["question"],
    "task_args": [("levl=2",), ("level",), ("level=two",)],
    "objective_args": [("bta=1",), ("beta",), ("beta=little",)],
}

# Of rows of one's own: files and columns are looked for later.
ANY_TEXT = {"data", "split", "subset", "eval_data", "eval_split", "prompt_template", "system_prompt", "target_column"}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_wrong_value_is_named_by_its_option(field, value):
    with pytest.raises(OptionError, match=f"^{field}\\b") as caught:
        TrainConfig.of(**{field: value})
    assert caught.value.name == field
    assert str(caught.value) == f"{field} {caught.value.text}"


def test_every_option_that_can_be_wrong_is_checked():
    """All but a switch, and those for which any text is right: a folder, or a model that is looked for later."""
    assert set(WRONG) == set(option_paths(TrainConfig)) - {"model", "out", "compile_ahead"} - ANY_TEXT


def test_every_option_of_every_tuple_is_an_option_of_a_run():
    """By its own name, none hidden behind another; `weights` and all."""
    paths = option_paths(TrainConfig)
    for kind in (Data, Sampling, Generation, Update, Batching, Scoring, AdamW):
        for name in kind._fields:
            assert name == "sampling" or paths[name][-1] == name, name
    places = {path[:-1] for path in paths.values()}
    tuples = ("source", "update", "batching", "scoring", "optimizer", "generation")
    assert places == {(), ("generation", "sampling"), *((name,) for name in tuples)}
    fields = [field.name for field in dataclasses.fields(TrainConfig)]
    flat = [name for name, path in paths.items() if len(path) == 1]
    assert flat == [name for name in fields if name not in tuples]


@pytest.mark.parametrize(("name", "meant"), [("group_sise", "group_size"), ("top_kk", "top_k"), ("step", "steps")])
def test_an_option_that_is_not_there_gets_a_suggestion(name, meant):
    with pytest.raises(OptionError, match=f"^{name} is no option of a run: did you mean {meant}\\?"):
        TrainConfig.of(**{name: 1})
    with pytest.raises(OptionError, match=r"^zzz is no option of a run$"):
        TrainConfig.of(zzz=1)


@pytest.mark.parametrize(
    ("field", "value", "meant"),
    [
        ("task", "pricng", "pricing"),
        ("objective", "drgrpo", "dr_grpo"),
        ("remat", "layr", "layer"),
        ("decode_weights", "splt", "split"),
        ("task_args", ("levl=2",), "level"),
        ("objective_args", ("bta=1",), "beta"),
    ],
)
def test_a_misspelled_name_gets_a_suggestion(field, value, meant):
    with pytest.raises(OptionError, match=f"did you mean '{meant}'\\?"):
        TrainConfig.of(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "known"),
    [
        ("schedule", "cosin", ("constant", "linear", "cosine")),
        ("old_logp", "first_epok", ("auto", "sampler", "first_epoch")),
        ("on_error", "rais", ("raise", "skip")),
        ("param_dtype", "float23", ("float32", "bfloat16", "float16")),
    ],
)
def test_a_name_of_few_gets_all_of_them(field, value, known):
    with pytest.raises(OptionError, match=re.escape(f"must be one of {known}, got {value!r}")):
        TrainConfig.of(**{field: value})


def test_what_is_far_from_any_name_gets_all_of_them():
    with pytest.raises(OptionError, match=r"'zzz' is not known\. Known: grpo, ") as caught:
        TrainConfig.of(objective="zzz")
    assert all(name in str(caught.value) for name in PRESETS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompts_per_step": 8, "microbatches": 3}, r"prompts_per_step must be a multiple of 3, .* got 8"),
        ({"group_size": 8, "group_microbatches": 3}, r"group_microbatches must divide group_size \(8\), got 3"),
        ({"group_size": 8, "decode_slots": 9}, r"decode_slots must be at most group_size \(8\), got 9"),
        ({"ref_every": 2, "ref_ema": 0.9}, "ref_every and ref_ema are two ways"),
        ({"mesh": "data=2", "pmap": 2}, "mesh and pmap are two ways"),
        (
            {"mesh": "data=2,fsdp=4,tensor=3", "prompts_per_step": 12},
            r"prompts_per_step must be a multiple of 8, .*: 8 devices × 1 micro-batches \(microbatches\); got 12",
        ),
        (
            {"pmap": 4, "prompts_per_step": 8, "microbatches": 4},
            r"prompts_per_step must be a multiple of 16, .*: 4 devices × 4 micro-batches \(microbatches\); got 8",
        ),
    ],
)
def test_values_that_do_not_fit_each_other(values, message):
    with pytest.raises(OptionError, match=f"^{message}"):
        TrainConfig.of(**values)


def test_a_default_that_does_not_fit_is_found_before_the_run():
    prompts, group = BY_MODEL[True]["prompts_per_step"], BY_MODEL[True]["group_size"]
    with pytest.raises(OptionError, match=f"^prompts_per_step must be a multiple of {prompts + 1}, .* got {prompts}"):
        TrainConfig.of(microbatches=prompts + 1)
    with pytest.raises(OptionError, match=rf"^group_microbatches must divide group_size \({group}\), got {2 * group}"):
        TrainConfig.of(group_microbatches=2 * group)


@pytest.mark.parametrize("model", ["tiny", "some/model"])
def test_what_is_left_open_suits_the_model(model):
    config = TrainConfig.of(model)
    defaults, arguments = BY_MODEL[model == "tiny"], ARGUMENTS[model == "tiny"]
    assert config.model == model
    assert all(option(config, name) == value for name, value in defaults.items())
    rest = set(option_paths(TrainConfig)) - set(defaults)
    rest -= {"model", "task_args", "objective_args", "template_date"}
    plain = TrainConfig()
    assert all(option(config, name) == option(plain, name) for name in rest)
    assert config.task_options() == arguments["task_args"]
    assert config.objective_options() == arguments["objective_args"]
    assert config.resolved() == config, "once filled in, nothing changes any more"
    today = datetime.date.today().isoformat()
    assert config.template_date == (None if model == "tiny" else today), "a resumed run asks as it did on that day"


def test_what_is_given_stays():
    config = TrainConfig.of(
        steps=7,
        sft_steps=0,
        learning_rate=0.0,
        microbatches=2,
        objective_args=["beta=0.5"],
        task_args=("wording=natural",),
    )
    given = (config.steps, config.sft_steps, config.optimizer.learning_rate, config.update.microbatches)
    assert given == (7, 0, 0.0, 2)
    assert config.objective_options() == {"beta": 0.5}
    assert config.task_options() == {"wording": "natural"}


def test_every_option_has_another_value():
    assert set(OTHER) == set(option_paths(TrainConfig)) - {"task"}


@pytest.mark.parametrize("name", OTHER)
def test_an_option_is_set_by_its_name_and_survives_a_file(tmp_path, name):
    """Law: it is that value and nothing else is another, before it is written and after it is read."""
    config, usual = TrainConfig.of(**needed(name) | {name: OTHER[name]}), TrainConfig.of(**needed(name))
    assert config.resolved() == config
    if name in ("task_args", "objective_args"):
        expected = getattr(usual, name)
        names = [pair.split("=")[0] for pair in OTHER[name]]
        kept = [pair for pair in expected if pair.split("=")[0] not in names]
        assert set(getattr(config, name)) == {*kept, *OTHER[name]}
    else:
        assert option(config, name) == OTHER[name]
        assert option(usual, name) != OTHER[name], "the default would show nothing"
    if name not in ("model", "objective"):  # others depend on these
        changed = {one for one in option_paths(TrainConfig) if option(config, one) != option(usual, one)}
        assert changed - ({"task", "task_args"} if name == "data" else set()) == {name}
    write_json(tmp_path / "config.json", config)
    assert load_config(tmp_path) == config


def test_a_file_holds_every_option_where_it_is(tmp_path):
    write_json(tmp_path / "config.json", TrainConfig.of(top_k=3))
    values = json.loads((tmp_path / "config.json").read_text())
    for path in option_paths(TrainConfig).values():
        found = values
        for part in path:
            found = found.pop(part) if part == path[-1] else found[part]
    left = {"generation": {"sampling": {}}, "update": {}, "batching": {}, "scoring": {}, "optimizer": {}}
    assert values == left | {"source": {}}, "and no more"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_named(name):
    """Defaults meant for another objective are left out, and Dr. GRPO gets its length limit from the run."""
    config = TrainConfig.of(objective=name, max_new_tokens=11)
    options = config.objective_options()
    known = inspect.signature(PRESETS[name]).parameters
    assert options.keys() <= known.keys()
    if "max_length" in known:
        assert options["max_length"] == 11
        usual = TrainConfig.of(objective=name).objective_options()
        assert usual["max_length"] == BY_MODEL[True]["max_new_tokens"]
        given = TrainConfig.of(objective=name, objective_args=("max_length=5",))
        assert given.objective_options()["max_length"] == 5
    PRESETS[name](**options)


def test_values_of_arguments_are_json_or_text():
    def function(*, a=0, b=None, c="", d=True):
        pass

    pairs = ("a=1e-3", "b=[1, 2]", "c=terse", "d=False")
    assert keyword_arguments(function, pairs, "task_args") == {"a": 1e-3, "b": [1, 2], "c": "terse", "d": False}
    assert keyword_arguments(function, ("b=None", "d=true"), "x") == {"b": None, "d": True}
    assert keyword_arguments(function, ("c=x=y", "a=1", "a=2"), "x") == {"c": "x=y", "a": 2}
    with pytest.raises(OptionError, match=r"^x a takes a number, as 0, got 'one'"):
        keyword_arguments(function, ("a=one",), "x")
    with pytest.raises(OptionError, match=r"^x takes NAME=VALUE, got 'a'"):
        keyword_arguments(function, ("a",), "x")
    with pytest.raises(OptionError, match=r"^x function takes no 'q'\. It takes: a, b, c, d"):
        keyword_arguments(function, ("q=1",), "x")


@pytest.mark.parametrize("text", ["x", "3", "[1, 2]", '["a"]', '{"k": "v"}', "None", "true", '"3"', "0.1", "a=b", ""])
def test_arguments_stay_what_they_were(text):
    """Law: said once more, as a resolved configuration does, they have the same values."""

    def function(*, a=None):
        pass

    pairs = (f"a={text}",)
    known = keyword_arguments(function, pairs, "x")
    again = tuple(f"{name}={written(value)}" for name, value in known.items())
    assert keyword_arguments(function, again, "x") == known


def test_what_a_template_takes():
    assert TrainConfig().template_options() == {"template_args": {}, "date": None}
    config = TrainConfig.of(template_args=["enable_thinking=false", "name=x=y", "n=3"], template_date="2024-07-01")
    values = {"enable_thinking": False, "name": "x=y", "n": 3}
    assert config.template_options() == {"template_args": values, "date": datetime.date(2024, 7, 1)}


def test_types_are_those_of_the_options():
    config = TrainConfig.of(param_dtype="bfloat16", compute_dtype="float32", moment_dtype="bfloat16")
    assert config.precision == Precision("bfloat16", "float32", "bfloat16")


def test_sampling_is_that_of_the_options():
    config = TrainConfig.of(temperature=0.5, top_k=3, top_p=0.8, min_p=0.1)
    assert config.generation.sampling == Sampling(0.5, 3, 0.8, 0.1)


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(),
        TrainConfig.of("some/model"),
        TrainConfig.of(clip_norm=math.inf, task_args=("level=2",), objective_args=("beta=0.1", "low=0.3"), out="a b"),
    ],
)
def test_a_config_is_saved_and_loaded_as_it_was(tmp_path, config):
    write_json(tmp_path / "config.json", config)
    assert load_config(tmp_path) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 3, "betta": 1, "alpha": 2}, " holds options that this version does not know: alpha, betta"),
        ({"generation": {"group_sise": 3}}, ": generation holds options that this version does not know: group_sise"),
        ({"generation": {"sampling": {"topk": 3}}}, ": generation: sampling holds options .* not know: topk"),
        ({"steps": 0}, ": steps must be an integer of at least 1, got 0"),
        ({"steps": "many"}, ": steps must be of type int, got 'many'"),
        ({"steps": 1.5}, ": steps must be of type int, got 1.5"),
        ({"steps": True}, ": steps must be of type int, got True"),
        ({"compile_ahead": 1}, ": compile_ahead must be of type bool, got 1"),
        ({"task": ["pricing"]}, r": task must be of type str, got \['pricing'\]"),
        ({"task": "pricng"}, ": task 'pricng' is not known; did you mean 'pricing'"),
        ({"task_args": "level=2"}, r": task_args must be of type tuple\S*, got 'level=2'"),
        ({"task_args": [1]}, r": task_args must be of type tuple\S*, got \[1\]"),
        ({"ref_ema": "little"}, r": ref_ema must be of type float \| None, got 'little'"),
        ({"mesh": 3}, r": mesh must be of type str \| None, got 3"),
        ({"mesh": "dta=3"}, ": mesh is not one: "),
        ({"out": 3}, r": out must be of type str \| None"),
        ({"optimizer": {"clip_norm": "x"}}, ": optimizer: clip_norm must be of type float, got 'x'"),
        ({"optimizer": {"learning_rate": None}}, ": optimizer: learning_rate must be of type float, got None"),
        ({"optimizer": {"learning_rate": -1}}, ": learning_rate must be a finite number of at least 0, got -1"),
        ({"generation": {"sampling": {"top_p": "x"}}}, r": generation: sampling: top_p must be of type float \| None"),
        ({"generation": {"sampling": {"top_p": 2}}}, r": top_p must be in \(0, 1\] or None, got 2"),
        ({"scoring": {"weights": [1, "x"]}}, r": scoring: weights must be of type .*, got \[1, 'x'\]"),
        ({"generation": 8}, ": generation must be an object with named fields, got 8"),
        ({"generation": [8]}, r": generation must be an object with named fields, got \[8\]"),
        ([], r" must be an object with named fields, got \[\]"),
    ],
    ids=str,
)
def test_loading_says_what_is_wrong_and_where(tmp_path, values, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}{message}"):
        load_config(tmp_path)


def test_what_is_no_run_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is no run folder: it has no config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"steps": ')
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}/config.json is no JSON: "):
        load_config(tmp_path)


def test_a_file_says_every_option(tmp_path):
    """A default may have been another one when the run began."""
    write_json(tmp_path / "config.json", TrainConfig(steps=3))
    values = json.loads((tmp_path / "config.json").read_text())
    assert load_config(tmp_path) == TrainConfig(steps=3)
    del values["steps"], values["optimizer"]["clip_norm"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"config\.json lacks steps, optimizer\.clip_norm: it must say every option"):
        load_config(tmp_path)


def test_a_file_that_is_no_text_is_said(tmp_path):
    write_json(tmp_path / "config.json", TrainConfig(steps=3))
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_config(tmp_path) == TrainConfig(steps=3), "a byte order mark is no mistake"
    (tmp_path / "config.json").write_bytes(b'{"task": "caf\xe9"}')
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}/config.json is no UTF-8 text: "):
        load_config(tmp_path)


def test_the_tiny_model_is_as_small_as_it_says():
    config = tiny_config(ByteTokenizer.vocab_size, Precision("float32", "bfloat16"))
    assert (config.vocab_size, config.dtype, config.param_dtype) == (259, "bfloat16", "float32")
    assert config.max_position_embeddings == 512
    assert set(TASKS), "a task to train it on"


def test_flags_are_names_with_dashes():
    assert flag("max_new_tokens") == "--max-new-tokens"


@pytest.mark.parametrize("name", sorted(OF_DATA))
def test_options_of_rows_need_rows(name):
    with pytest.raises(OptionError, match=f"^{name} is for rows of your own: give data"):
        TrainConfig.of(**{name: OTHER[name]})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": "a.jsonl", "task": "reasoning_gym:chain_sum"}, r"^task and data are two places of rows"),
        ({"data": "a.jsonl", "task_args": ("level=2",)}, r"^task_args are options of a task, and data has none"),
        ({"task": "data"}, r"^task 'data' is not known"),
        ({"data": "a", "prompt_column": "q", "prompt_template": "{{ q }}"}, r"^prompt_column and prompt_template are"),
        ({"task": "nowhere.py:f"}, r"^task cannot be made: there is no file nowhere\.py"),
        ({"task": "reasoning_gym:chain_sm"}, r"^task cannot be made: .* did you mean 'chain_sum'\?"),
        ({"task": "reasoning_gym:chain_sum", "task_args": ("mx_terms=2",)}, r"^task_args .* did you mean 'max_terms'"),
    ],
)  # fmt: skip
def test_where_rows_come_from_is_said_once(values, message):
    with pytest.raises(OptionError, match=message):
        TrainConfig.of(**values)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "pricing"),
        ({"data": "some/words.jsonl"}, "words"),
        ({"data": "owner/words"}, "words"),
        ({"task": "reasoning_gym:chain_sum"}, "chain_sum"),
    ],
)
def test_a_task_in_a_word(values, name):
    """Which a run folder is named by."""
    assert TrainConfig.of(**values).task_name == name


def test_every_option_of_a_task_of_reasoning_gym_is_said():
    config = TrainConfig.of(task="reasoning_gym:chain_sum", task_args=("max_terms=3",))
    assert config.task_options() == {"max_terms": 3}
