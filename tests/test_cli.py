"""The command line: every option arrives, every mistake is answered, every figure can be read by a program."""

import dataclasses
import importlib.metadata
import json
import math
import re
import shutil

import jax
import numpy as np
import pytest
from grpo_jax import cli
from grpo_jax.cli import Eval, Sample, Train, main
from grpo_jax.config import TrainConfig, flag, load_config
from grpo_jax.inference.logprobs import Sampling
from grpo_jax.runs import run
from grpo_jax.runs.folder import read_lines
from grpo_jax.training.evaluate import Evaluation, pass_at_k

from toy import ascii_share, finished_run, install


@pytest.fixture(scope="module", autouse=True)
def toys():
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


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


# Every option of train with a value that is not its default, as text and as the value that must arrive.
GIVEN = {
    "task": ("letters", "letters"),
    "task_args": (("train_size=5", "held_out_size=3"), ("train_size=5", "held_out_size=3")),
    "model": ("some/folder", "some/folder"),
    "dtype": ("bfloat16", "bfloat16"),
    "objective": ("dapo", "dapo"),
    "objective_args": (("low=0.1",), ("low=0.1",)),
    "steps": ("3", 3),
    "prompts": ("6", 6),
    "group_size": ("4", 4),
    "max_new_tokens": ("9", 9),
    "length_buckets": ("3", 3),
    "temperature": ("0.5", 0.5),
    "top_k": ("7", 7),
    "top_p": ("0.75", 0.75),
    "min_p": ("0.125", 0.125),
    "epochs": ("2", 2),
    "old_logp": ("first_epoch", "first_epoch"),
    "microbatches": ("2", 2),
    "group_microbatches": ("2", 2),
    "learning_rate": ("1e-4", 1e-4),
    "schedule": ("cosine", "cosine"),
    "lr_warmup": ("0", 0),
    "weight_decay": ("0.1", 0.1),
    "clip_norm": ("inf", math.inf),
    "ref_every": ("4", 4),
    "ref_ema": ("0.99", 0.99),
    "warm_up": ("0", 0),
    "warm_up_loss": ("0.5", 0.5),
    "on_error": ("none", "none"),
    "eval_every": ("5", 5),
    "eval_rows": ("11", 11),
    "eval_batch": ("12", 12),
    "save_every": ("13", 13),
    "keep": ("4", 4),
    "log_completions": ("0", 0),
    "pack_tokens": ("True", True),
    "drop_zero_variance": ("True", True),
    "compact": ("3", 3),
    "decode_slots": ("2", 2),
    "stale": ("2", 2),
    "compile_ahead": ((), True),
    "remat": ("dots", "dots"),
    "mesh": ("data=2,fsdp=4", "data=2,fsdp=4"),
    "pmap": ("2", 2),
    "decode_weights": ("split", "split"),
    "seed": ("99", 99),
    "out": ("some where", "some where"),
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(TrainConfig)])
def test_every_option_of_train_arrives(field, monkeypatch, call):
    seen = []
    monkeypatch.setattr(run, "train", lambda config, **options: seen.append((config, options)))
    text, value = GIVEN[field]
    assert value != getattr(TrainConfig(), field), "the default would show nothing"
    # A fixed folder, and what the option goes with.
    needed = {"task_args": {"task": "letters"}, "decode_weights": {"mesh": "data=2"}}
    base = {"out": "o"} | needed.get(field, {})
    words = [word for name, given in base.items() if name != field for word in (flag(name), given)]
    assert call("train", *words, flag(field), *([text] if isinstance(text, str) else text))[0] == 0
    (config, options), expected = seen[0], TrainConfig(**base | {field: value}).resolved()
    assert config == expected
    assert options == {}
    if field == "task_args":
        assert config.task_args == value
    elif field == "objective_args":
        assert config.objective_options()["low"] == 0.1
    else:
        assert getattr(config, field) == value


def test_a_run_without_a_folder_gets_the_next_one(monkeypatch, tmp_path, call):
    seen = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "train", lambda config: seen.append(config.out))
    call("train", "--task", "letters")
    (tmp_path / "runs" / "letters-tiny-0001").mkdir(parents=True)
    call("train", "--task", "letters")
    call("train", "--model", "models/Some-1B/")
    assert seen == ["runs/letters-tiny-0001", "runs/letters-tiny-0002", "runs/pricing-Some-1B-0001"]


def test_resume_takes_the_options_of_the_run(whole, monkeypatch, call):
    seen = []
    monkeypatch.setattr(run, "train", lambda config, **options: seen.append((config, options)))
    assert call("train", "--resume", whole)[0] == 0
    config, options = seen[0]
    assert options == {"resume": True}
    assert (config.out, config.steps, config.seed) == (str(whole), 7, 4), "from wherever the folder is now"


@pytest.mark.parametrize("moved", [("--mesh", "fsdp=3", "--decode-weights", "split"), ("--pmap", 1)])
def test_resume_may_go_on_elsewhere(whole, monkeypatch, call, moved):
    """Devices change no number, so they are no part of what a run is; one way to use them replaces the other."""
    seen = []
    monkeypatch.setattr(run, "train", lambda config, **_: seen.append(config))
    monkeypatch.setattr(cli, "load_config", lambda path: dataclasses.replace(load_config(path), mesh="data=3"))
    assert call("train", "--resume", whole)[0] == 0
    assert call("train", "--resume", whole, *moved)[0] == 0
    assert [(config.mesh, config.pmap, config.decode_weights) for config in seen] == [
        ("data=3", None, "gather"),
        ("fsdp=3", None, "split") if "--mesh" in moved else (None, 1, "gather"),
    ]
    assert dataclasses.replace(seen[0], mesh=None) == dataclasses.replace(
        seen[1], mesh=None, pmap=None, decode_weights="gather"
    )


def test_resume_may_compile_ahead(whole, monkeypatch, call):
    seen = []
    monkeypatch.setattr(run, "train", lambda config, **_: seen.append(config))
    for option in ((), ("--compile-ahead",)):
        assert call("train", "--resume", whole, *option)[0] == 0
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
        (["train", "--steps", "0"], ["--steps must be at least 1, got 0"]),
        (["train", "--top-k", "0"], ["--top-k must be a positive integer"]),
        (["train", "--task", "pricng"], ["--task 'pricng' is not known; did you mean 'pricing'?"]),
        (["train", "--objective", "grppo"], ["did you mean 'grpo'?", "dr_grpo", "reinforce_pp"]),
        (["train", "--objective-args", "bta=1"], ["grpo takes no 'bta'; did you mean 'beta'?"]),
        (["train", "--task-args", "levl=2"], ["pricing takes no 'levl'; did you mean 'level'?"]),
        (["train", "--task-args", "level=9", "--out", "unused"], ["level must be one of 1, 2, 3, 4, 5, got 9"]),
        (["train", "--objective-args", "beta=-1", "--out", "unused"], ["error: beta must be", "not negative, got -1"]),
        (["evl"], ["evl", "eval"]),
        ([], ["train", "eval", "sample"]),
        (["eval"], ["RUN", "required"]),
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


def test_stopped_by_the_keyboard(monkeypatch, call):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "train", stop)
    code, _, err = call("train", "--out", "o")
    assert code == 130
    assert "--resume" in err


@pytest.mark.parametrize(("name", "command"), [("train", Train), ("eval", Eval), ("sample", Sample)])
def test_help_has_every_option_its_description_and_its_default(name, command, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    code, out, _ = call(name, "--help")
    assert code == 0
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", out).split())
    for field in dataclasses.fields(command):
        if field.default is dataclasses.MISSING:
            assert re.search(rf"{field.name.upper()} .+ \(required\)", text)
            continue
        default = re.escape("" if field.default == () else str(field.default))
        # The flag, what kind of value it takes, and a description up to the first default that follows.
        entry = rf"{flag(field.name)}(?:, --no-[a-z-]+| [{{\[A-Z]\S*) (?:(?!\(default:).){{12,}} \(default: {default}\)"
        assert re.search(entry, text), f"{entry} in {text}"


def test_eval_gives_the_figures_of_the_run(whole, call):
    """The newest checkpoint, greedily, on the rows of the run: the accuracy that its summary tells."""
    code, out, _ = call("eval", whole, "--json")
    figures, summary = json.loads(out), json.loads((whole / "summary.json").read_text())
    assert code == 0
    assert figures["held_out"] == pytest.approx(summary["held_out_after"])
    assert (figures["rows"], figures["checkpoint"]) == (5, 7)
    assert figures.keys() == {
        "held_out", "rows", "unscorable", "length", "truncated", "checkpoint", "failures", "failures_file",
    }  # fmt: skip
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


@pytest.fixture
def evaluations(monkeypatch):
    """What the evaluations of a command were given; what they say is fixed."""
    seen = []
    correct = np.array([[1.0, 0.0, 1.0, np.nan], [0.0, 0.0, 0.5, 1.0]])

    def noted(config, parts, params, **options):
        seen.append((config, options))
        reward_PN = correct[:, : options.get("samples", 1)]
        return parts.task.held_out[:2], Evaluation(0.25, 1, 2.0, 0.0, reward_PN, [["t"] * reward_PN.shape[1]] * 2)

    monkeypatch.setattr(run, "held_out", noted)
    return seen, correct


def test_options_of_eval_arrive(whole, call, evaluations):
    seen, correct = evaluations
    sampling = ["--temperature", 0.7, "--top-p", 0.9, "--top-k", 5, "--seed", 3]
    out = call("eval", whole, "--json", "--k", 1, 3, "--samples", 4, "--rows", 2, "--max-new-tokens", 6, *sampling)[1]
    (config, greedy), (other, options) = seen
    assert (config.eval_rows, config.max_new_tokens) == (2, 6)
    assert other == config
    assert greedy == {}, "the accuracy is greedy, whatever is sampled for pass@k"
    assert options["sampling"] == Sampling(temperature=0.7, top_p=0.9, top_k=5)
    assert (options["samples"], options["batch_size"]) == (4, 1)
    np.testing.assert_array_equal(jax.random.key_data(options["key"]), jax.random.key_data(jax.random.key(3)))
    figures = json.loads(out)
    for k in (1, 3):
        assert figures[f"pass@{k}"] == pytest.approx(pass_at_k(correct >= 1, k))
    call("eval", whole, "--json", "--k", 2)
    assert seen[-1][1]["samples"] == 2, "as many samples as the largest k"


def test_nothing_scorable_is_null(whole, call, monkeypatch):
    result = Evaluation(float("nan"), 2, 2.0, 0.0, np.full((2, 1), np.nan), [["t"], ["t"]])
    monkeypatch.setattr(run, "held_out", lambda config, parts, params: (parts.task.held_out[:2], result))
    figures = json.loads(
        call("eval", whole, "--json")[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    )
    assert figures["held_out"] is None
    assert read_lines(whole / "failures.jsonl")[0]["reward"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "0"], "--rows must be at least 1, got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--k", "0"], "--k must be at least 1, got 0"),
        (["--k", "1", "4", "--samples", "3"], "--samples (3) must be at least the largest --k (4)"),
        (["--k", "1", "--samples", "0"], "--samples (0) must be at least the largest --k (1)"),
        (["--k", "2", "--temperature", "0"], "--temperature must be above 0 for pass@k"),
        (["--k", "2", "--top-p", "2"], "top_p must be in (0, 1]"),
        (
            ["--samples", "4"],
            "without --k nothing is sampled, the evaluation is greedy; add --k or leave out --samples",
        ),
        (["--temperature", "0.5", "--seed", "2"], "add --k or leave out --temperature, --seed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_of_eval_that_make_no_sense(whole, words, message, call, monkeypatch):
    monkeypatch.setattr(run, "open_run", lambda *_: pytest.fail("must be found before anything is loaded"))
    code, _, err = call("eval", whole, *words)
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
        (["--number", "0"], "--number must be at least 1, got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--number", "2"], "--number above 1 needs a --temperature above 0"),
        (["--temperature", "-1"], "temperature must be at least 0, got -1"),
    ],
)
def test_options_of_sample_that_make_no_sense(whole, words, message, call):
    code, _, err = call("sample", whole, "q", *words)
    assert code == 2
    assert message in err


def test_the_command_is_installed():
    scripts = importlib.metadata.entry_points(group="console_scripts", name="grpo-jax")
    assert [script.load() for script in scripts] == [main]
