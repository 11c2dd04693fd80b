"""Rows and rewards of one's own, from the command line: trained on, resumed, evaluated, and looked at before."""

import json
import re
import warnings

import numpy as np
import pytest
from grpo_jax.cli.dry_run import answers_of, as_completions, rendered, told_time
from grpo_jax.cli.entry import main
from grpo_jax.inference.text import completion_texts
from grpo_jax.inference.tokenizer import ByteTokenizer
from grpo_jax.runs.folder import read_data, read_lines
from grpo_jax.tasks import pricing

from toy import OPTIONS, install

install()
BYTES = ByteTokenizer()
SMALL = [*OPTIONS[OPTIONS.index("--model") : OPTIONS.index("--steps")], *OPTIONS[OPTIONS.index("--prompts-per-step") :]]
ROWS = [{"question": f"{'abcdefgh'[i % 8]}{i}", "answer": "abc"[i % 3], "weight": 1 + i % 2} for i in range(30)]
REWARD = """
def share(completion, weight):
    return weight * sum(c < "\\x80" for c in completion) / max(1, len(completion))

def same(completion, answer):
    return float(completion == answer)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to work in, with rows and rewards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


@pytest.fixture
def call(capsys):
    def go(*arguments):
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return go


def train(*more):
    data = ("--data", "letters.jsonl", "--reward", "rewards.py:share", "--eval-share", 0.3, "--on-bad-row", "skip")
    return ("train", *SMALL, *data, "--save-every", 2, *more)


def test_a_run_on_a_file_goes_on_though_the_file_has_grown(folder, call):
    """Bit for bit as the run that was never stopped, and says so; a file that has changed is told."""
    constant = ("--schedule", "constant", "--eval-every", 1, "--sft-steps", 0)
    assert call(*train("--steps", 2, "--out", "part", *constant))[0] == 0
    assert call(*train("--steps", 4, "--out", "same", *constant))[0] == 0
    told = read_data("part")["train"]
    assert told | {"digest": ""} == {"name": "letters.jsonl", "rows": 30, "eval_share": 0.3, "digest": ""}
    assert told == read_data("same")["train"]
    summary = json.loads((folder / "same" / "summary.json").read_text())
    assert summary["task"] == "letters"
    config = json.loads((folder / "part" / "config.json").read_text())
    assert config["task"] == "data"
    with open(folder / "letters.jsonl", "a") as file:
        file.write(json.dumps({"question": "z", "answer": "a", "weight": 1}) + "\n")
    with pytest.warns(UserWarning, match=r"letters\.jsonl has grown from 30 to 31 rows"):
        assert call("train", "--resume", "part", "--override", "steps=4")[0] == 0
    for name in ("metrics.jsonl", "completions.jsonl"):
        assert (folder / "part" / name).read_bytes() == (folder / "same" / name).read_bytes()
    (folder / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[::-1]))
    with pytest.warns(UserWarning, match=r"letters\.jsonl is not what it was when the run began"):
        assert call("train", "--resume", "part")[0] == 0
    # Other rows, asked and scored as in the run unless it is said otherwise.
    (folder / "other.csv").write_text("question,answer,weight\nq,a,2\nr,b,2\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code, out, err = call("eval", "part", "--data", "other.csv", "--json")
        assert code == 2, "a cell is text, and the reward multiplies with it"
        assert re.search(r"error: reward 'share' failed on .*TypeError", err)
        assert err.splitlines()[-1].endswith("rewards.py, line 3")
        code, out, err = call("eval", "part", "--data", "other.csv", "--reward", "rewards.py:same", "--json")
    assert json.loads(out)["rows"] == 2
    assert [row["answer"] for row in read_lines(folder / "part" / "failures.jsonl")] == ["a", "b"]
    assert json.loads(call("eval", "part", "--task", "letters", "--json")[1])["rows"] == 7


def test_a_model_is_evaluated_without_a_run(folder, call):
    given = ("eval", "--model", "bigram", "--max-new-tokens", 8, "--json")
    code, out, err = call(
        *given, "--data", "letters.jsonl", "--reward", "rewards.py:share", "--failures", "wrong.jsonl"
    )
    assert code == 0, err
    figures = json.loads(out)
    assert figures["rows"] == 30, "nothing of it is trained on"
    assert figures["checkpoint"] is None
    wrong = read_lines(folder / "wrong.jsonl")
    assert figures["failures"] == len(wrong) > 0
    assert {row["question"] for row in wrong} <= {row["question"] for row in ROWS}
    right = call(*given, "--data", "letters.jsonl", "--reward", "rewards.py:share", "--eval-share", 0.3, "--rows", 2)[1]
    assert json.loads(right)["rows"] == 2
    assert sorted(path.name for path in folder.iterdir()) == ["letters.jsonl", "rewards.py", "wrong.jsonl"]
    code, _, err = call(*given, "--data", "letters.jsonl", "--reward", "rewards.py:shar")
    assert "rewards.py has no function 'shar'; did you mean 'share'?" in err
    for more, message in (
        (("--checkpoint", 1, "--task", "letters"), "--checkpoint is for a run; leave it out"),
        (("--task", "letters", "--data", "letters.jsonl"), "--task and data are two places of rows"),
        (("--task", "letters", "--split", "test"), "--split is for rows of your own: give data"),
        (("--data", "letters.jsonl", "--task-args", "a=1"), "--task-args are options of a task: give one"),
    ):
        code, _, err = call(*given, *more)
        assert (code, message in err) == (2, True), err


def test_a_dry_run_shows_what_a_run_would_do(folder, call, monkeypatch):
    """Prompts with their special tokens, lengths, rewards, cost; nothing is trained, and no folder is made."""
    monkeypatch.setenv("COLUMNS", "400")
    before = sorted(path.name for path in folder.iterdir())
    code, out, err = call(*train("--steps", 50, "--dry-run", "--prompt-length", 3))
    assert code == 0, err
    assert sorted(path.name for path in folder.iterdir()) == before
    held_out = int(re.search(r"; (\d+) held out", out)[1])
    assert f"{30 - held_out} rows to train on, each taken {150 / (30 - held_out):.3g} times" in out
    shown = re.findall(r"a prompt of (\d) tokens ─+\n([a-h]\d+)<\|258\|>\n", out)
    assert len(shown) == 5
    assert all(int(count) == len(text) + 1 for count, text in shown)
    rows = {row["question"]: row for row in ROWS}
    right = next(line for line in out.splitlines() if "the right answer" in line)
    assert re.findall(r"│ ([\d.]+) +(?=│)", right)[-5:] == [str(rows[text]["weight"]) for _, text in shown]
    over = re.search(r"prompts +│ 3 +│ .* │ 4 +│ 3 +│ (\d+) of (\d+)", out)
    assert int(over[2]) == 30 - held_out
    assert int(over[1]) > 0
    assert "A prompt over the limit ends the run" in out
    assert "the right answer is not above a wrong or empty one: is the reward what you mean?" in out
    assert re.search(r"[\d.]+ million parameters\. On each device [\d.e-]+ GB", out)
    assert "at least" in out
    code, out, _ = call(*train("--steps", 5, "--dry-run", "--reward", "rewards.py:same"))
    assert "is the reward what you mean" not in out
    assert call(*train("--dry-run", "--reward", "rewards.py:sam"))[0] == 2
    code, _, err = call("train", "--resume", "nowhere", "--dry-run")
    assert code == 2


def test_a_dry_run_of_a_task_of_ones_own(folder, call):
    source = (
        "from grpo_jax import pricing\n\ndef easy(*, size=40):\n    return pricing(train_size=size, held_out_size=9)\n"
    )
    (folder / "tasks.py").write_text(source)
    code, out, _ = call("train", "--task", "tasks.py:easy", "--task-args", "size=30", "--dry-run")
    assert code == 0
    assert "30 rows to train on" in out
    assert "9 held out" in out


def test_ids_are_written_with_their_special_tokens():
    ids = BYTES.render([{"role": "system", "content": "é"}, {"role": "user", "content": "b"}])
    assert rendered(BYTES, ids) == "é<|258|>b<|258|>"
    assert rendered(BYTES, []) == ""


def test_answers_that_are_compared():
    task = pricing(train_size=4, held_out_size=2, wording="terse")
    rows = [*task.train[:2], task.train[0]]
    answers = answers_of(task, rows)
    right = [task.target(row) for row in rows]
    assert list(answers.values()) == [right, [right[1], right[0], right[1]], [""] * 3]
    none = task._replace(target=lambda row: row["nothing"])
    assert answers_of(none, rows) == {"an empty answer": [""] * 3}


def test_texts_as_completions():
    texts = [["ab", ""], ["é", "abc"]]
    rollout = as_completions(BYTES, texts)
    assert completion_texts(BYTES, rollout) == texts
    np.testing.assert_array_equal(rollout.mask_PGT.sum(-1), [[3, 1], [3, 4]])


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.5, "0.5 seconds"), (90, "90 seconds"), (300, "5 minutes"), (9000, "2.5 hours")]
)
def test_seconds_in_a_unit(seconds, text):
    assert told_time(seconds) == text


def test_a_run_that_cannot_begin_leaves_nothing_behind(tmp_path, monkeypatch, capfd):
    """Neither its folder nor the one above it, and no word of a program that missed them."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--data", "nothere.jsonl", "--reward", "exact_reward", "--out", "some/where/run"]) == 2
    assert list(tmp_path.iterdir()) == []
    told = capfd.readouterr().err
    assert "nothere.jsonl" in told
    assert "Traceback" not in told
