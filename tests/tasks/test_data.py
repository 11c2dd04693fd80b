"""A task out of a file: what is asked, scored and held out, and every mistake by file, line and column."""

import json
import random
import warnings

import pytest
from grpo_jax.rewards import math_reward, number_reward, trl_style
from grpo_jax.tasks import Task, load_task, pricing, with_reward
from grpo_jax.tasks.data import ready_rewards

ROWS = [{"question": f"{i}+1=", "answer": str(i + 1), "level": i % 3} for i in range(200)]


def right(completion, answer):
    return float(completion == answer)


def short(completion):
    return -len(completion)


@pytest.fixture
def file(tmp_path):
    """`file(rows, name)` writes rows, or lines as they are, and returns the path."""

    def write(rows=ROWS, name="sums.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


def questions(rows):
    return {row["question"] for row in rows}


def test_a_file_is_a_task(file):
    task = load_task(file(), reward=right)
    assert isinstance(task, Task)
    assert task.name == "sums"
    assert sorted([*task.train, *task.held_out], key=ROWS.index) == ROWS
    assert task.prompt(ROWS[3]) == [{"role": "user", "content": "3+1="}]
    assert task.reward is right
    assert task.target(ROWS[3]) == "4"


def test_what_is_held_out_depends_on_each_row_alone(file):
    """Not on the order, the others, the format, or the order of columns; equal rows stand on one side."""
    whole = questions(load_task(file(), reward=right, eval_share=0.2).held_out)
    assert 20 <= len(whole) <= 60
    mixed = [dict(reversed(row.items())) for row in random.Random(0).sample(ROWS, len(ROWS))]
    assert questions(load_task(file(mixed, "mixed.jsonl"), reward=right, eval_share=0.2).held_out) == whole
    half = load_task(file(ROWS[:100] * 2, "half.jsonl"), reward=right, eval_share=0.2)
    assert questions(half.held_out) == whole & questions(ROWS[:100])
    assert questions(half.held_out).isdisjoint(questions(half.train))
    path = file([], "list.json")
    path.write_text(json.dumps(ROWS))
    assert questions(load_task(path, reward=right, eval_share=0.2).held_out) == whole
    more = questions(load_task(file(), reward=right, eval_share=0.4).held_out)
    assert whole < more, "a larger share takes more of them"


def test_all_rows_may_be_held_out(file):
    task = load_task(file(), reward=right, eval_share=1)
    assert (len(task.train), len(task.held_out)) == (0, 200)


def test_held_out_rows_of_another_file(file):
    data, other = file(ROWS[:100]), file(ROWS[100:], "other.jsonl")
    task = load_task(data, reward=right, eval_data=other)
    assert list(task.train) == ROWS[:100]
    assert list(task.held_out) == ROWS[100:]
    shared = file(ROWS[90:120], "shared.jsonl")
    with pytest.warns(UserWarning, match=r"^10 rows of .*sums\.jsonl are in .*shared\.jsonl too"):
        load_task(data, reward=right, eval_data=shared)
    with pytest.raises(ValueError, match=r"'right' takes 'answer', and .*bare\.jsonl has no such column"):
        load_task(data, reward=right, eval_data=file([{"question": "q"}], "bare.jsonl"))


def test_a_split_may_be_held_out(tmp_path):
    path = tmp_path / "sums.json"
    path.write_text(json.dumps({"train": ROWS[:5], "test": ROWS[5:8]}))
    task = load_task(path, reward=right, eval_split="test")
    assert (list(task.train), list(task.held_out)) == (ROWS[:5], ROWS[5:8])
    assert list(load_task(path, reward=right, split="test", eval_share=1).held_out) == ROWS[5:8]


def test_layouts_of_others(file):
    words = [{"question": f"{i}?", "answer": f"{i}\n#### {i}"} for i in range(60)]
    task = load_task(file(words), eval_share=0.3)
    row = task.train[0]
    assert task.reward is number_reward
    assert row["answer"] == row["question"][:-1]
    assert task.target(row) == row["solution"] == f"{row['answer']}\n#### {row['answer']}"
    sums = [{"problem": f"{i}?", "solution": rf"\boxed{{{i}}}"} for i in range(60)]
    assert load_task(file(sums), eval_share=0.3).reward is math_reward
    task = load_task(file(sums), reward=right, eval_share=0.3)
    assert task.reward(task.train[0]["answer"], task.train[0]["answer"]) == 1
    assert task.target(task.train[0]) == task.train[0]["solution"]
    assert task.prompt(task.train[0])[0]["content"] == task.train[0]["problem"]
    with pytest.raises(ValueError, match=r"sums\.jsonl, line 61 has no '#### …' at the end of its answer"):
        load_task(file([*words, {"question": "q", "answer": "5"}]))
    # What is held out may be prepared already.
    ready = file([{"question": "7+7=", "answer": "14"}], "ready.jsonl")
    assert load_task(file(words), eval_data=ready).held_out[0] == {"question": "7+7=", "answer": "14"}


def test_ways_to_ask(file):
    path = file()
    ask = lambda **options: load_task(path, reward=right, **options).prompt(ROWS[3])
    assert ask(prompt="answer") == [{"role": "user", "content": "4"}]
    assert ask(prompt_template="Q: {{ question }} ({{ level }})\n") == [{"role": "user", "content": "Q: 3+1= (0)\n"}]
    system = {"role": "system", "content": "Be short."}
    assert ask(system_prompt="Be short.") == [system, {"role": "user", "content": "3+1="}]
    assert ask(prompt=lambda row: row["question"] + "?") == [{"role": "user", "content": "3+1=?"}]
    chat = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "It is "}]
    assert ask(prompt=lambda row: chat[:1]) == chat[:1]
    chats = file([{"messages": chat, "answer": "a"}] * 9, "chats.jsonl")
    with pytest.raises(ValueError, match=r"chats\.jsonl, line 1 has a prompt that ends with an answer of the assis"):
        load_task(chats, reward=right, eval_share=1)
    assert load_task(chats, reward=right, eval_share=1, prompt="messages").prompt({"messages": chat}) == chat


def test_several_rewards(file, tmp_path):
    (tmp_path / "own.py").write_text("def short(completion, level):\n    return -len(completion) * level\n")
    own = f"{tmp_path}/own.py:short"
    assert load_task(file(), reward=own).reward("ab", 2) == -4
    task = load_task(file(), reward=[own, right, "number_reward"])
    assert [fn.__name__ for fn in task.reward] == ["short", "right", "number_reward"]
    assert list(load_task(file(), reward={"a": own, "b": right}).reward) == ["a", "b"]
    assert ready_rewards()["number_reward"] is number_reward
    # One that takes completions is called as TRL calls it: with texts, or with messages for chats.
    plural = lambda prompts, completions, answer, **more: [prompts, completions, answer]
    assert load_task(file(), reward=plural).reward == trl_style(plural)
    chats = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in ROWS]
    assert load_task(file(chats), reward=plural).reward == trl_style(plural, conversational=True)
    assert not {"score", "call_reward", "check_reward", "batched", "combine"} & set(ready_rewards())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"sums\.jsonl needs a reward: FILE\.py:FUNCTION, module:FUNCTION, or one of .*number_reward"),
        ({"reward": "number_rewrd"}, r"'number_rewrd' is no FILE\.py:FUNCTION; did you mean 'number_reward'\?"),
        ({"reward": "nowhere.py:f"}, r"there is no file nowhere\.py"),
        (
            {"reward": lambda completion, anwser: 0},
            r"'<lambda>' takes 'anwser', and .*sums\.jsonl has no such column; did you mean 'answer'\? there are: "
            r"question, answer, level",
        ),
        ({"reward": trl_style(lambda completions, gold, **more: 0)}, "takes 'gold'"),
        ({"reward": right, "prompt": "qestion"}, r"no column 'qestion'; did you mean 'question'\? there are: "),
        ({"reward": right, "prompt_template": "{{ qestion }}"}, r"the prompt takes 'qestion', and .* mean 'que"),
        ({"reward": right, "prompt_template": "{question}"}, r"^prompt_template names no column"),
        ({"reward": right, "prompt_template": "{{ question }}", "prompt": "question"}, "two ways to ask"),
        ({"reward": right, "eval_share": 0}, r"eval_share must be in \(0, 1\], got 0"),
        ({"reward": right, "eval_share": 1e-9}, r"no row of 200 is held out at eval_share=1e-09; raise it, or give"),
        ({"reward": right, "eval_share": 0.999}, "all 200 rows are held out"),
        ({"reward": right, "on_bad_row": "drop"}, r"on_bad_row must be one of \('raise', 'skip'\), got 'drop'"),
        ({"reward": right, "prompt": lambda row: row["a"]}, r"line 1 cannot be asked: KeyError: 'a'"),
    ],
)  # fmt: skip
def test_a_mistake_is_told(file, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_task(file(), **options)


def test_what_a_completion_has_is_no_column(file):
    reward = lambda completion, prompt, completion_ids, completion_length, stopped, answer, hint=None, **more: 0
    assert load_task(file(), reward=reward).reward is reward
    assert load_task(file(), reward=trl_style(lambda prompts, completions, answer, **more: [0])).held_out


BAD = [*ROWS[:3], '{"question": "a"', {"question": "b"}, {"question": "", "answer": "c"}, "7", *ROWS[3:]]
PROBLEMS = {
    4: "is no JSON: Expecting ',' delimiter, column 17",
    5: "has no 'answer'; there are: question",
    6: "has a prompt that is empty",
    7: "must be an object with named values, got 7",
}


@pytest.mark.parametrize("line", PROBLEMS)
def test_a_bad_row_is_told_with_its_line(file, line):
    path = file([row for number, row in enumerate(BAD, 1) if number not in PROBLEMS or number == line])
    place = f"sums.jsonl, line 4 {PROBLEMS[line]} (on_bad_row='skip' leaves such rows out)"
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load_task(path, reward=right)
    assert str(caught.value).endswith(place)


def test_bad_rows_are_left_out_by_choice_and_counted(file):
    first = PROBLEMS[4]
    with pytest.warns(UserWarning, match=rf"^4 of 204 rows of .* are left out; the first: .*line 4 {first}$") as told:
        task = load_task(file(BAD), reward=right, on_bad_row="skip")
    assert len(told) == 1
    assert told[0].filename == __file__, "told where it is asked for"
    assert sorted([*task.train, *task.held_out], key=ROWS.index) == ROWS
    with pytest.raises(ValueError, match=r"sums\.jsonl holds no rows: line 1 is no JSON"):
        load_task(file(["{"]), reward=right, on_bad_row="skip")
    with pytest.raises(ValueError, match=r"sums\.jsonl holds no rows$"):
        load_task(file([]), reward=right)
    only = file([{"question": "", "answer": "1"}] * 3)
    with pytest.raises(
        ValueError, match=r"holds no row that can be used; the first: .*line 1 has a prompt that is emp"
    ):
        load_task(only, reward=right, on_bad_row="skip")


def test_a_right_completion(file):
    path = file()
    assert load_task(path, reward=right, target="question").target(ROWS[3]) == "3+1="
    assert load_task(path, reward=right, target=lambda row: "!").target(ROWS[3]) == "!"
    task = load_task(file([{"question": str(i)} for i in range(50)]), reward=short, eval_share=0.3)
    with pytest.raises(ValueError, match=r"sums\.jsonl has no column solution or answer or completion with a right"):
        task.target(task.train[0])


def test_data_that_grew_or_changed_is_recognised(file):
    """A run goes on with the rows that it began with, where they are still there."""
    load = lambda rows, record=None: load_task(file(rows), reward=right, eval_share=0.2, record=record)
    before = load(ROWS[:150])
    record = json.loads(json.dumps(before.record))
    assert record["train"]["rows"] == 150
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = load(ROWS[:150], record)
    with pytest.warns(
        UserWarning, match=r"sums\.jsonl has grown from 150 to 200 rows: the run goes on with those that"
    ):
        grown = load(ROWS, record)
    for task in (again, grown):
        assert list(task.train) == list(before.train)
        assert list(task.held_out) == list(before.held_out)
        assert task.record == before.record
    for rows in (ROWS[:149], [*ROWS[:149], ROWS[180]], [*ROWS[1:150], ROWS[0]]):
        with pytest.warns(UserWarning, match=r"sums\.jsonl is not what it was when the run began: it had 150 rows"):
            assert len(load(rows, record).train) > 100


def test_held_out_data_that_changed_is_recognised(file):
    train, other = file(ROWS[:100]), file(ROWS[100:150], "other.jsonl")
    record = load_task(train, reward=right, eval_data=other).record
    file(ROWS[100:], "other.jsonl")
    with pytest.warns(UserWarning, match=r"other\.jsonl has grown from 50 to 100 rows"):
        assert len(load_task(train, reward=right, eval_data=other, record=record).held_out) == 50


def test_another_reward_for_a_task():
    task = with_reward(pricing(train_size=3, held_out_size=2), "number_reward")
    assert task.reward is number_reward
    with pytest.raises(ValueError, match=r"takes 'gold', and task 'pricing' has no such column; there are: question"):
        with_reward(task, lambda completion, gold: 0)
