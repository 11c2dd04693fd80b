"""The pricing task: exact, deterministic, and tested on what was never trained on."""

import hashlib
import json
import re
from fractions import Fraction

import pytest
from grpo_jax.tasks import TASKS, Task, pricing
from grpo_jax.tasks.pricing import LEVELS, VEHICLES, Item, Problem, capacity, money, price, working

DIGEST = "da2ce671e2733bcbf692672b7286edd8bb0cd5c202fb644217efcb95db720de8"
ALL = [(level, wording) for level in LEVELS for wording in ("natural", "terse")]


def content(row):
    """What a terse question asks, apart from its wording: the numbers of every kind, and at level 1 the vehicle."""
    question = row["question"]
    items = sorted(
        (int(count or 1), rate, vehicle if row["level"] == 1 else "")
        for count, vehicle, rate in re.findall(r"(?:(\d+) )?([\w-]+) \$([\d.]+)", question)
        if vehicle in VEHICLES
    )
    rest = [re.findall(pattern, question) for pattern in (r"(\d+) days", r"(\d+)% off", r"fee \$(\d+)")]
    return tuple(items), tuple(map(tuple, rest))


def recomputed(row):
    """The price of a terse question, from its text alone."""
    items, (days, percent, fee) = content(row)
    total = sum(Fraction(rate) * count for count, rate, _ in items) * int(days[0])
    return total * (100 - int(percent[0] if percent else 0)) / 100 + int(fee[0] if fee else 0)


@pytest.mark.parametrize("level", LEVELS)
def test_answers_follow_from_the_question(level):
    task = pricing(level=level, wording="terse", train_size=300, held_out_size=100)
    for row in [*task.train, *task.held_out]:
        assert Fraction(row["answer"]) == recomputed(row), row


@pytest.mark.parametrize(("level", "wording"), ALL)
def test_targets_are_right_and_wrong_answers_are_not(level, wording):
    task = pricing(level=level, wording=wording, train_size=200, held_out_size=100)
    for row in task.train:
        assert task.reward("", task.target(row), row["answer"]) == 1.0
        assert task.reward("", task.target(row) + " Or 1.", row["answer"]) == 0.0
    assert task.reward("", "21", "twenty") is None


@pytest.mark.parametrize(("level", "wording"), ALL)
def test_no_two_rows_share_their_content(level, wording):
    task = pricing(level=level, wording=wording)
    assert (len(task.train), len(task.held_out)) == (2048, 512)
    questions = {row["question"] for row in [*task.train, *task.held_out]}
    assert len(questions) == 2560
    if wording == "terse":
        assert len({content(row) for row in [*task.train, *task.held_out]}) == 2560


@pytest.mark.parametrize("level", LEVELS)
def test_both_wordings_ask_the_same(level):
    natural, terse = (pricing(level=level, wording=wording).held_out for wording in ("natural", "terse"))
    assert [row["answer"] for row in natural] == [row["answer"] for row in terse]
    for row in natural:
        numbers = re.findall(r"\d+(?:\.\d+)?", row["question"])
        for number in re.findall(r"[\d.]+(?=\*)|(?<=\*)[\d.]+(?=%)", row["working"].split()[0]):
            assert number in numbers, row


def test_the_same_rows_on_any_machine():
    rows = [
        row
        for level, wording in ALL
        for part in pricing(level=level, seed=3, wording=wording, train_size=50, held_out_size=50)[1:3]
        for row in part
    ]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest() == DIGEST


def test_seeds_and_levels_give_other_rows_and_sizes_do_not():
    base = pricing(level=3, seed=0, train_size=100)
    assert pricing(level=3, seed=0, train_size=100)[1:3] == base[1:3]
    assert pricing(level=3, seed=1, train_size=100).held_out != base.held_out
    longer = pricing(level=3, seed=0, train_size=200)
    assert longer.held_out == base.held_out
    assert longer.train[:100] == base.train


def test_sizes_reach_the_whole_level_and_no_further():
    everything = pricing(level=1, train_size=capacity(1) - 500, held_out_size=500, wording="terse")
    assert len({content(row) for row in [*everything.train, *everything.held_out]}) == capacity(1) == 11 * 14 * 20
    with pytest.raises(ValueError, match="level 1 has 3080 distinct problems, fewer than the 3081"):
        pricing(level=1, train_size=3000, held_out_size=81)


def test_default_sizes_fit_every_level():
    assert min(map(capacity, LEVELS)) >= 2048 + 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": 0}, "level must be one of 1, 2, 3, 4, 5, got 0"),
        ({"level": 6}, "level"),
        ({"wording": "verbose"}, "wording must be one of natural, terse"),
        ({"seed": -1}, "seed"),
        ({"train_size": 0}, "train_size"),
        ({"held_out_size": -1}, "held_out_size"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        pricing(**options)


@pytest.mark.parametrize(("level", "limit"), [(1, 32), (2, 32), (3, 48), (4, 56), (5, 72)])
def test_terse_prompts_are_short(level, limit):
    task = pricing(level=level, wording="terse")
    assert max(len(task.prompt(row)[0]["content"].encode()) for row in task.train) <= limit
    assert [message["role"] for message in task.prompt(task.train[0])] == ["user"]


@pytest.mark.parametrize("level", LEVELS)
def test_natural_questions_vary(level):
    rows = pricing(level=level).held_out
    shapes = {re.sub(r"[A-Z][a-z]+|\d+|" + "|".join(VEHICLES), "_", row["question"]) for row in rows}
    assert len(shapes) >= 10


def test_the_instruction_is_part_of_the_natural_prompt():
    task = pricing()
    row = task.train[0]
    content = task.prompt(row)[0]["content"]
    assert content.startswith(row["question"])
    assert "the calculation" in content


def test_level_features():
    terse = {level: [row["question"] for row in pricing(level=level, wording="terse").held_out] for level in LEVELS}
    for level, questions in terse.items():
        assert all(("% off" in question) == (level >= 4) for question in questions)
        assert all(("fee" in question) == (level == 5) for question in questions)
        both = sum(" + " in question for question in questions) / len(questions)
        assert both == {1: 0, 2: 0, 5: 1}.get(level, pytest.approx(0.5, abs=0.1))
    assert any("." in row["answer"] for row in pricing(level=5).held_out)


def test_price_and_working_by_hand():
    problem = Problem((Item(2, "bike", 750), Item(1, "trike", 900)), days=3, percent=10, fee=400)
    assert price(problem) == 6880  # (2·7.50 + 9)·3 = 72; less 7.20; plus 4
    steps = ["2*7.50=15", "15+9=24", "24*3=72", "72*10%=7.20", "72-7.20=64.80", "64.80+4=68.80"]
    assert working(problem) == steps
    assert [money(cents) for cents in (2100, 3780, 5, 0)] == ["21", "37.80", "0.05", "0"]


def test_lookup():
    assert isinstance(TASKS["pricing"](train_size=1, held_out_size=1), Task)
