"""The command line: every option arrives, every mistake is answered, every figure can be read by a program."""

import dataclasses
import importlib.metadata
import json
import re
import shutil

import jax
import pytest
from grpo_jax.cli.arguments import TRL_NAMES
from grpo_jax.cli.entry import main, parsed
from grpo_jax.cli.evaluate import Eval
from grpo_jax.cli.plan import Plan
from grpo_jax.cli.sample import Sample
from grpo_jax.cli.train import Train, narrowed, run_config
from grpo_jax.config import BY_MODEL, TrainConfig, load_config
from grpo_jax.named_options import flag, option, option_paths
from grpo_jax.options import AdamW, Batching, Data, Generation, Sampling, Scoring, Update
from grpo_jax.runs import run
from grpo_jax.runs.folder import read_lines, write_json
from grpo_jax.tasks import TASKS
from grpo_jax.training.evaluate import pass_at_k

from other_values import OTHER, needed
from toy import ascii_share, finished_run, install


def interrupted():
    """A task that is stopped by the keyboard before it is there."""
    raise KeyboardInterrupt


install()
TASKS["interrupted"] = interrupted


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A copy: commands write into the folder."""
    return shutil.copytree(finished_run(tmp_path_factory), tmp_path_factory.mktemp("cli") / "whole")


@pytest.fixture
def call(capsys):
    """`call(argument, …)`: exit code, standard output, standard error with its line breaks and frames taken out."""

    def go(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = exit_.code
        out, err = capsys.readouterr()
        return code, out, " ".join(re.sub("[│╭╮╰╯─]", " ", err).split())

    return go


def folder_bytes(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def asked(*arguments) -> TrainConfig:
    """The run that a command asks for."""
    return run_config(parsed(["train", *map(str, arguments)]))


def words(options) -> list[str]:
    """Options as the command line has them."""
    found = []
    for name, value in options.items():
        given = [] if value is True else value if isinstance(value, tuple) else [value]
        found += [flag(name), *map(str, given)]
    return found


@pytest.mark.parametrize("name", ["task", *OTHER])
def test_every_option_of_train_arrives(name):
    """By its flag, and no other value with it."""
    options = {"out": "o"} | needed(name) | {name: "letters" if name == "task" else OTHER[name]}
    config = asked(*words(options))
    assert config == TrainConfig.of(**options)
    if name == "task_args":
        assert config.task_options() == {"level": 2, "wording": "natural"}
    elif name == "objective_args":
        assert config.objective_options() == {"beta": 0.08, "low": 0.1, "high": 0.25}
    else:
        assert option(config, name) == options[name]
    assert narrowed(parsed(["train", *words(options)]), TrainConfig).resolved() == config


@pytest.mark.parametrize("model", ["tiny", "some/model"])
@pytest.mark.parametrize("name", ["compile_ahead", "pack_tokens", "drop_zero_variance"])
def test_a_switch_may_be_off(model, name):
    assert option(asked("--model", model, "--out", "o", flag(name)), name) is True
    assert option(asked("--out", "o", f"--no-{flag(name)[2:]}", "--model", model), name) is False


@pytest.mark.parametrize(
    "arguments", [["--model", "some/model"], ["--steps", 3, "--model=some/model"], ["--model=tiny"], []]
)
def test_defaults_are_those_of_the_model_that_is_given(arguments):
    """Wherever among the arguments it stands."""
    model = "some/model" if any("some/model" in str(word) for word in arguments) else "tiny"
    steps = {"steps": 3} if "--steps" in arguments else {}
    assert asked(*arguments, "--out", "o") == TrainConfig.of(model, out="o", **steps)


def test_the_last_of_two_values_counts():
    assert asked("--steps", 3, "--out", "o", "--steps", 4).steps == 4


def test_a_run_without_a_folder_gets_the_next_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert asked("--task", "letters").out == "runs/letters-tiny-0001"
    (tmp_path / "runs" / "letters-tiny-0001").mkdir(parents=True)
    assert asked("--task", "letters").out == "runs/letters-tiny-0002"
    assert asked("--model", "models/Some-1B/").out == "runs/pricing-Some-1B-0001"


def test_resume_takes_the_options_of_the_run(whole):
    config = asked("--resume", whole)
    assert config == dataclasses.replace(load_config(whole), out=str(whole)), "from wherever the folder is now"
    assert (config.model, config.steps, config.seed) == ("bigram", 7, 4)


def test_resume_goes_on_with_the_run(whole, call):
    before = (whole / "metrics.jsonl").read_bytes()
    code, out, _ = call("train", "--resume", whole)
    assert code == 0
    assert "Held-out accuracy" in out
    assert (whole / "metrics.jsonl").read_bytes() == before, "there was nothing left to do"


@pytest.mark.parametrize("moved", [("--mesh", "fsdp=3", "--decode-weights", "split"), ("--pmap", 1)])
def test_resume_may_go_on_elsewhere(whole, tmp_path, moved):
    """Devices change no number, so they are no part of what a run is; one way to use them replaces the other."""
    write_json(tmp_path / "config.json", dataclasses.replace(load_config(whole), mesh="data=3"))
    seen = [asked("--resume", tmp_path), asked("--resume", tmp_path, *moved)]
    assert [(config.mesh, config.pmap, config.decode_weights) for config in seen] == [
        ("data=3", None, "gather"),
        ("fsdp=3", None, "split") if "--mesh" in moved else (None, 1, "gather"),
    ]
    assert dataclasses.replace(seen[0], mesh=None) == dataclasses.replace(
        seen[1], mesh=None, pmap=None, decode_weights="gather"
    )


def test_resume_may_compile_ahead(whole):
    seen = [asked("--resume", whole, *option) for option in ((), ("--compile-ahead",))]
    assert seen[1] == dataclasses.replace(seen[0], compile_ahead=True) != seen[0]


def test_a_wrong_address_is_found_before_anything_is_joined(call):
    code, _, err = call("train", "--distributed", "host:1,2,2")
    assert code == 2
    assert "error: --distributed is auto, or HOST:PORT,PROCESSES,INDEX" in err


def test_eval_on_a_mesh_that_is_not_there(whole, call):
    code, _, err = call("eval", whole, "--mesh", "data=64")
    assert code == 2
    assert "a mesh of data 64 × fsdp 1 × tensor 1 needs 64 devices" in err


def test_resume_with_other_options_is_refused(whole, call):
    before = folder_bytes(whole)
    code, _, err = call("train", "--resume", whole, "--steps", 9, "--top-k", 3, "--out", "elsewhere")
    assert code == 2
    assert "takes every option from the run's config.json; leave out --steps, --top-k, --out" in err
    code, _, err = call("train", "--resume", whole, "--model", "tiny", "--no-pack-tokens", "--weights", 1)
    assert "leave out --weights" in err
    code, _, err = call("train", "--resume", whole, "--model", "some/model")
    assert "leave out --model" in err
    assert folder_bytes(whole) == before


def test_resume_of_nothing_is_refused(tmp_path, call):
    code, _, err = call("train", "--resume", tmp_path / "absent")
    assert code == 2
    assert "absent is no run folder: it has no config.json" in err


def test_a_run_is_never_overwritten(whole, call):
    before = folder_bytes(whole)
    code, _, err = call("train", "--task", "letters", "--out", whole)
    assert code == 2
    assert f"error: {whole} already holds a run: continue it with --resume {whole}, or choose another --out" in err
    assert folder_bytes(whole) == before


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (["train", "--group-sze", "3"], ["Unrecognized", "--group-sze", "--group-size"]),
        (["train", "--objectiv", "grpo"], ["Unrecognized", "--objective"]),
        (["eval", "run", "--sample", "3"], ["Unrecognized", "--samples"]),
        (["train", "--steps", "many"], ["--steps", "many"]),
        (["train", "--steps", "0"], ["error: --steps must be an integer of at least 1, got 0"]),
        (["train", "--top-k", "0"], ["--top-k must be an integer of at least 1, or None, got 0"]),
        (["train", "--decode-slots", "99"], ["--decode-slots must be at most group_size (32), got 99"]),
        (["train", "--microbatches", "5"], ["--prompts-per-step must be a multiple of 5, ", "got 32"]),
        (["train", "--mesh", "dta=2"], ["--mesh is not one: "]),
        (["train", "--param-dtype", "float16"], ["--param-dtype must not be float16"]),
        (["train", "--task", "pricng"], ["--task 'pricng' is not known; did you mean 'pricing'?"]),
        (["train", "--objective", "grppo"], ["did you mean 'grpo'?", "dr_grpo", "reinforce_pp"]),
        (["train", "--objective-args", "bta=1"], ["--objective-args grpo takes no 'bta'; did you mean 'beta'?"]),
        (["train", "--task-args", "levl=2"], ["--task-args pricing takes no 'levl'; did you mean 'level'?"]),
        (["train", "--task-args", "level=9", "--out", "unused"], ["level must be one of 1, 2, 3, 4, 5, got 9"]),
        (["train", "--objective-args", "beta=-1", "--out", "unused"], ["error: beta must be", "not negative, got -1"]),
        (["evl"], ["evl", "eval"]),
        ([], ["train", "eval", "sample"]),
        (["eval"], ["error: --model or a run folder must be given, and not both"]),
        (["eval", "--model", "m"], ["error: --data or a task must be given: a model has no rows of its own"]),
        (["train", "--eval-share", "0.5"], ["error: --eval-share is for rows of your own: give data"]),
        (["train", "--data", "none.jsonl", "--out", "unused"], ["error: there is no file none.jsonl"]),
        (["sample", "run"], ["TEXT", "required"]),
    ],
    ids=" ".join,
)
def test_mistakes_are_answered(words, answers, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call(*words)
    assert code == 2
    for answer in answers:
        assert answer in err
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("path", ["[/x]", "[bold]no[/bold]", "x" * 200])
def test_an_error_is_printed_as_it_is(path, capsys):
    """Brackets are no markup, and a message is not broken into lines for a program that reads it."""
    assert main(["eval", path]) == 2
    out, err = capsys.readouterr()
    assert err == f"error: {path} is no run folder: it has no config.json\n"
    assert out == ""


def test_stopped_by_the_keyboard(call, tmp_path):
    code, _, err = call("train", "--task", "interrupted", "--out", tmp_path / "o")
    assert code == 130
    assert "--resume" in err


@pytest.mark.parametrize("name", TRL_NAMES)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_an_option_by_the_name_that_trl_has_gets_the_name_it_has_here(name, command, call):
    for given in ([f"--{name}", "3"], [f"{flag(name)}=3"]):
        code, _, err = call(command, *given)
        assert code == 2
        assert err == f"error: {flag(name)} is TRL's name of an option; did you mean {TRL_NAMES[name]}?"


def test_the_names_of_trl_lead_to_options_that_are_there():
    known = {flag(name) for name in option_paths(Train)}
    for name, meant in TRL_NAMES.items():
        flags = re.findall(r"--[a-z-]+", meant)
        assert flags, name
        assert set(flags) <= known, name
        assert flag(name) not in known, "what TRL has by that name is an option here too"
        for argument in re.findall(r" (\w+)=", meant):
            assert argument in TrainConfig.of(objective_args=(f"{argument}=0.5",)).objective_options()


def entries(text: str) -> dict[str, tuple[str, str]]:
    """Help text and default of every option that a help page lists, by its flag."""
    found: list[str] = []
    for line in text.partition("-h, --help")[2].splitlines():
        line = line.strip("│ ")
        if re.match("--[a-z]", line):
            found.append(line)
        elif found and line.endswith(")"):
            found[-1] += "  " + line
    pages = {}
    for entry in found:
        # The flag, its opposite or what kind of value it takes, the text, the default.
        match = re.fullmatch(r"(--[a-z-]+)(?:, --no-[a-z-]+| [{\[A-Z].*?)  +(.+) \(default: (.*)\)", entry)
        assert match, entry
        pages[match[1]] = (match[2], match[3])
    return pages


@pytest.mark.parametrize("model", ["tiny", "some/model"])
@pytest.mark.parametrize(("name", "command"), [("train", Train), ("eval", Eval), ("sample", Sample), ("plan", Plan)])
def test_help_has_every_option_its_description_and_its_default(name, command, model, call, monkeypatch):
    """A sentence or a phrase, and the defaults of the model that is given."""
    monkeypatch.setenv("COLUMNS", "1000")
    train = issubclass(command, TrainConfig)
    code, out, _ = call(name, *(["--model", model] if train else []), "--help")
    assert code == 0
    required = [] if train else [field for field in dataclasses.fields(command) if field.default is dataclasses.MISSING]
    usual = command.suited(model) if train else command(*("" for _ in required))
    for field in required:
        assert re.search(rf"\n[│ ]+{field.name.upper()} +[A-Z].+\. \(required\)", out)
    pages = entries(out)
    names = set(option_paths(command)) - {field.name for field in required}
    if command is Eval:  # which a --model stands in for
        names -= {"run"}
        assert re.search(r"\n[│ ]+\[RUN\] +The run folder; .+\.", out)
    assert set(pages) == {flag(name) for name in names}
    for name in names:
        text, default = pages[flag(name)]
        value = option(usual, name)
        assert default == (" ".join(map(str, value)) if isinstance(value, tuple) else str(value) or "''"), name
        assert re.fullmatch(r'["A-Z].{8,}\.', text), f"{name}: {text}"
        assert "  " not in text


def test_every_option_of_every_tuple_is_a_flag_of_train(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    pages = entries(call("train", "--help")[1])
    for kind in (Data, Generation, Sampling, Update, Batching, Scoring, AdamW):
        assert {flag(name) for name in kind._fields if name != "sampling"} <= set(pages)
    assert {flag(name) for name in BY_MODEL[True]} <= set(pages)


def test_help_lists_the_commands(call):
    code, out, _ = call("--help")
    assert code == 0
    assert all(re.search(rf" {name} +[A-Z]", out) for name in ("train", "eval", "sample", "plan"))


def test_eval_gives_the_figures_of_the_run(whole, call):
    """The newest checkpoint, greedily, on the rows of the run: the accuracy that its summary tells."""
    code, out, _ = call("eval", whole, "--json")
    figures, summary = json.loads(out), json.loads((whole / "summary.json").read_text())
    assert code == 0
    assert figures["held_out"] == pytest.approx(summary["held_out_after"])
    assert (figures["rows"], figures["checkpoint"]) == (5, 7)
    assert figures.keys() == {
        "held_out", "accuracy", "rows", "unscorable", "length", "truncated", "checkpoint", "failures", "failures_file",
    }  # fmt: skip
    assert figures["accuracy"] is None, "rewards between 0 and 1"
    failures = read_lines(whole / "failures.jsonl")
    assert figures["failures_file"] == str(whole / "failures.jsonl")
    assert figures["failures"] == len(failures) > 0
    for row in failures:
        assert row.keys() == {"question", "answer", "prompt", "completion", "reward"}
        assert row["reward"] == ascii_share(row["completion"])


def test_eval_of_another_checkpoint_and_other_rows(whole, call):
    rows = read_lines(whole / "metrics.jsonl")
    figures = json.loads(call("eval", whole, "--json", "--checkpoint", 0)[1])
    assert figures["held_out"] == pytest.approx(rows[0]["held_out"])
    assert figures["checkpoint"] == 0
    assert json.loads(call("eval", whole, "--json", "--rows", 3, "--max-new-tokens", 8)[1])["rows"] == 3
    code, _, err = call("eval", whole, "--checkpoint", 3)
    assert code == 2
    assert "no checkpoint 3 in" in err
    assert "there are: [0, 7]" in err


def test_eval_for_a_person(whole, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    code, out, _ = call("eval", whole)
    assert code == 0
    assert "held out" in out
    assert "a failure" in out
    assert str(whole / "failures.jsonl") in out


def test_pass_at_k_of_a_run(whole, call):
    arguments = ("eval", whole, "--json", "--k", 1, 2, "--samples", 2)
    figures = json.loads(call(*arguments)[1])
    assert figures.keys() >= {"held_out", "pass@1", "pass@2"}
    assert 0 <= figures["pass@1"] <= figures["pass@2"] <= 1
    assert json.loads(call(*arguments)[1]) == figures


def test_options_of_eval_arrive(whole, call):
    """Samples for pass@k beside the greedy evaluation, which is what it is without them."""
    opened = run.open_run(whole)
    config = dataclasses.replace(
        opened.config, eval_rows=4, generation=opened.config.generation._replace(max_new_tokens=6)
    )
    rows, greedy = run.held_out(config, opened.components, opened.params)
    few = ("--rows", 4, "--max-new-tokens", 6)
    sampling = ["--temperature", 0.3, "--top-p", 0.9, "--top-k", 5, "--min-p", 0.01, "--seed", 5]
    figures = json.loads(call("eval", whole, "--json", "--k", 1, 3, "--samples", 4, *few, *sampling)[1])
    assert figures["held_out"] == pytest.approx(greedy.mean_reward)
    assert (figures["rows"], figures["length"]) == (len(rows), pytest.approx(greedy.length)) == (4, figures["length"])
    chosen = Sampling(temperature=0.3, top_p=0.9, top_k=5, min_p=0.01)
    drawn = lambda generation, seed: (
        run.held_out(config, opened.components, opened.params, generation=generation, key=jax.random.key(seed))[
            1
        ].reward_PN
    )
    reward_PN = drawn(Generation(4, 6, chosen), 5)
    plain = drawn(Generation(4, 6), 5)
    assert pass_at_k(reward_PN, 1) not in (0, 1, pass_at_k(plain, 1)), "or the figures show nothing"
    for k in (1, 3):
        assert figures[f"pass@{k}"] == pytest.approx(pass_at_k(reward_PN, k))
    figures = json.loads(call("eval", whole, "--json", "--k", 2, *few)[1])
    as_many = drawn(Generation(2, 6), 0)
    assert figures["pass@2"] == pytest.approx(pass_at_k(as_many, 2)), "as many samples as the largest k"


def test_nothing_scorable_is_null(whole, tmp_path, call):
    folder = shutil.copytree(whole, tmp_path / "unscorable")
    config = dataclasses.replace(load_config(folder), task="unscorable", task_args=())
    write_json(folder / "config.json", config)
    figures = json.loads(
        call("eval", folder, "--json")[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    )
    assert figures["held_out"] is None
    assert figures["unscorable"] == 5
    assert read_lines(folder / "failures.jsonl")[0]["reward"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "0"], "--rows must be an integer of at least 1, or None, got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be an integer of at least 1, or None, got 0"),
        (["--k", "0"], "--k must be an integer of at least 1, got 0"),
        (["--k", "1", "4", "--samples", "3"], "--samples (3) must be at least k (4)"),
        (["--k", "1", "--samples", "0"], "--samples must be an integer of at least 1, or None, got 0"),
        (["--k", "2", "--temperature", "0"], "--temperature must be above 0 for pass@k"),
        (["--k", "2", "--top-p", "2"], "--top-p must be in (0, 1]"),
        (["--samples", "4"], "--k is missing: without it nothing is sampled; add it, or leave out --samples"),
        (["--temperature", "0.5", "--seed", "2"], "add it, or leave out --seed, --temperature"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_of_eval_that_make_no_sense(words, message, call, tmp_path):
    """They are found before anything is loaded."""
    code, _, err = call("eval", tmp_path / "absent", *words)
    assert code == 2
    assert message in err


def test_a_run_answers_a_question(whole, call):
    """Greedily, and the same each time; with a temperature several answers, the same for a seed."""
    code, out, _ = call("sample", whole, "q é?")
    assert code == 0
    question = json.loads(call("sample", whole, "q é?", "--json")[1])
    assert question["question"] == "q é?"
    assert "\n".join(question["answers"]) + "\n" == out
    drawn = ("sample", whole, "q", "--json", "--number", 3, "--temperature", 1.5)
    answers = json.loads(call(*drawn)[1])["answers"]
    assert len(set(answers)) == 3
    assert json.loads(call(*drawn)[1])["answers"] == answers
    assert json.loads(call(*drawn, "--seed", 1)[1])["answers"] != answers
    assert json.loads(call(*drawn, "--checkpoint", 0)[1])["answers"] != answers
    assert len(json.loads(call("sample", whole, "q", "--json", "--max-new-tokens", 1)[1])["answers"][0]) <= 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--number", "0"], "--number must be an integer of at least 1, got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be an integer of at least 1, or None, got 0"),
        (["--number", "2"], "--number above 1 needs a temperature above 0"),
        (["--temperature", "-1"], "--temperature must be a finite number of at least 0, got -1"),
    ],
)
def test_options_of_sample_that_make_no_sense(words, message, call, tmp_path):
    code, _, err = call("sample", tmp_path / "absent", "q", *words)
    assert code == 2
    assert message in err


def test_the_command_is_installed():
    scripts = importlib.metadata.entry_points(group="console_scripts", name="grpo-jax")
    assert [script.load() for script in scripts] == [main]


def test_an_update_that_is_not_finite_ends_a_run_in_a_sentence(call, tmp_path):
    """A rate of 1e30 makes infinite parameters: warnings and the cause are sentences, and no traceback is shown."""
    code, _, err = call(
        "train", "--steps", "3", "--learning-rate", "1e30", "--sft-steps", "0", "--out", tmp_path / "run"
    )
    assert code == 2
    assert "parameters that are not finite" in err or "no update could be applied" in err
    assert "Traceback" not in err
    assert "UserWarning" not in err
