"""Endless tasks: a row is a function of its number and the seed, and the dataset itself judges an answer."""

import inspect
import json
import os
import pickle
import random
import subprocess
import sys

import pytest
from grpo_jax.tasks import make_task, task_function
from grpo_jax.tasks.procedural import BLOCK, ENDLESS, answer_of

reasoning_gym = pytest.importorskip("reasoning_gym")
SUM = "reasoning_gym:chain_sum"


def sums(**options):
    return make_task(SUM, {"held_out_size": 20, "max_terms": 3, "max_digits": 2} | options)


def test_a_task_by_its_name():
    task = sums()
    assert (task.name, len(task.train), len(task.held_out)) == (SUM, ENDLESS, 20)
    row = task.train[5]
    terms = row["question"].split(": ")[1].rstrip(" =")
    assert eval(terms) == int(row["answer"]), "an oracle: the question is the sum itself"
    assert task.prompt(row) == [{"role": "user", "content": row["question"]}]
    assert task.target(row) == row["answer"]
    assert row["number"] == 5
    assert row["metadata"]["source_dataset"] == "chain_sum"
    asked = sums(instruction="Only the number.").prompt(row)
    assert asked[0]["content"] == f"{row['question']} Only the number."


def test_rows_are_a_function_of_seed_and_number():
    """In any order, in another process with other hashes, whatever was drawn before."""
    task, again = sums(), sums()
    numbers = [0, 3, BLOCK - 1, BLOCK, 12345, ENDLESS - 1]
    rows = [task.train[i] for i in numbers]
    random.seed(99)
    assert [again.train[i] for i in reversed(numbers)] == rows[::-1]
    after = random.random()
    random.seed(99)
    assert random.random() == after, "the caller's own generator is where it was"
    assert list(again.held_out) == list(task.held_out)
    assert [sums(seed=1).train[i] for i in numbers] != rows
    assert task.train[3:5] == [task.train[3], task.train[4]]
    with pytest.raises(IndexError):
        task.train[ENDLESS]
    program = "import json, sys; from grpo_jax.tasks import make_task; "
    program += "print(json.dumps(make_task(sys.argv[1], json.loads(sys.argv[2])).train[12345]))"
    options = json.dumps({"held_out_size": 20, "max_terms": 3, "max_digits": 2})
    call = [sys.executable, "-c", program, SUM, options]
    told = subprocess.check_output(call, env=os.environ | {"PYTHONHASHSEED": "7"}, text=True)
    assert told == json.dumps(rows[4]) + "\n"


def test_entries_that_draw_from_pythons_own_generator():
    """list_functions does: its rows would differ from start to start."""
    first, second = (make_task("reasoning_gym:list_functions", {"held_out_size": 3}) for _ in range(2))
    assert [first.train[i] for i in range(30)] == [second.train[i] for i in range(30)]


def test_entries_that_depend_on_the_start_of_python(monkeypatch):
    """They are made where the environment fixes the order of sets, and equal then."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match=r"ransom_note makes other rows at each start .* set PYTHONHASHSEED=0"):
        task_function("reasoning_gym:ransom_note")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert make_task("reasoning_gym:ransom_note", {"held_out_size": 1}).train[0]["question"]


def test_no_row_asks_what_a_held_out_row_asks():
    """Of sums of two digits, 90 questions and more, some must come again."""
    task = sums(min_terms=2, max_terms=2, min_digits=1, max_digits=1, held_out_size=40)
    held_out = {row["question"] for row in task.held_out}
    assert len(held_out) == 40
    train = [task.train[i] for i in range(300)]
    assert held_out.isdisjoint(row["question"] for row in train)
    again = [row for row in train if row["number"] >= ENDLESS]
    assert again, "drawn once more"
    assert all(task.train[i] == row for i, row in enumerate(train))


def test_the_dataset_judges():
    task = sums()
    row = task.train[0]
    reward = lambda text: task.reward(completion=text, number=row["number"])
    assert [reward(row["answer"]), reward("no"), reward("")] == [1, 0, 0]
    assert reward(f"I add. <answer>{row['answer']}</answer> done") == 1
    puzzle = make_task("reasoning_gym:countdown", {"held_out_size": 2})
    row = puzzle.train[0]
    first = row["metadata"]["numbers"][0]
    assert puzzle.reward(row["answer"], row["number"]) == 1
    assert puzzle.reward(f"({row['answer']})", row["number"]) == 1, "another way to write it is as right"
    assert puzzle.reward(f"{first}", row["number"]) < 1
    assert pickle.loads(pickle.dumps(task.train.entries)).row(7) == task.train.entries.row(7)


@pytest.mark.parametrize(
    ("text", "answer"),
    [("7", "7"), (" 7\n", "7"), ("<answer> 7 </answer>", "7"), ("<answer>1</answer><answer>\n2</answer>", "2")],
)
def test_where_the_answer_is(text, answer):
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sm", {}, r"reasoning_gym has no dataset 'chain_sm'; did you mean 'chain_sum'\?"),
        ("chain_sum", {"min_terms": 0}, r"reasoning_gym:chain_sum refuses min_terms=0: min_terms must be positive"),
        ("chain_sum", {"held_out_size": 0}, r"held_out_size at least 1, got 0 and 0"),
        ("chain_sum", {"seed": -1}, r"seed must be at least 0"),
        ("coin_flip", {"min_trials": 3, "max_trials": 3}, r"choose a smaller held_out_size than 256"),
    ],
)
def test_a_mistake_is_told(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_task(f"reasoning_gym:{name}", options)


def test_options_are_those_of_the_dataset():
    names = list(inspect.signature(task_function(SUM)).parameters)
    assert names[:3] == ["seed", "held_out_size", "instruction"]
    assert {"min_terms", "max_terms", "min_digits"} <= set(names)
    assert "size" not in names
