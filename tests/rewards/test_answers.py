"""Numbers are read as written and compared exactly."""

from decimal import Decimal

import pytest
from grpo_jax.rewards import last_number, number_reward, parse_number

WRITTEN = {
    "18": "18",
    "18.": "18",
    "18.0": "18",
    "$18": "18",
    "$ 18.00": "18",
    "\\$18": "18",
    "1,000": "1000",
    "$1,234,567.80": "1234567.8",
    ".5": "0.5",
    "-5": "-5",
    "\u22125": "-5",
    "-$5": "-5",
    "$-5": "-5",
    "1e3": "1000",
    "0": "0",
}


@pytest.mark.parametrize(("text", "value"), WRITTEN.items())
def test_ways_to_write_a_number(text, value):
    assert last_number(f"12 and then {text}") == Decimal(value)
    assert last_number(f"({text}), which is all.") == Decimal(value)
    if not text.startswith("\\"):
        assert parse_number(f" {text}\n") == Decimal(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7*3=21", 21),
        ("3x$7=$21/day", 21),
        ("3 days × $7 = **$21**.", 21),
        ("10-3", 3),
        ("a-3", 3),
        ("x=-3", -3),
        ("(1, 2, 3)", 3),
        ("18 or 19", 19),
        ("It is $80, as 20% of $100 is taken off (20 %).", 100),
        ("$80 (20% off)", 80),
        ("10%-3", 3),
        ("17 of the v3", 17),
        ("3 dollars\nfor 2", 2),
    ],
)
def test_the_last_number_of_a_text(text, value):
    assert last_number(text) == value


@pytest.mark.parametrize("text", ["", "none", "20%", "7, then 1,00", "1.2.3", "1,000,00", "...", "-$-5", "1e99999"])
def test_no_number_or_a_malformed_last_one(text):
    assert last_number(text) is None
    assert parse_number(text) is None


@pytest.mark.parametrize("text", ["18 dollars", "18 19", "3*6", "20%", "1/2"])
def test_more_than_a_number_does_not_parse(text):
    assert parse_number(text) is None


def test_reward_is_exact():
    long = "123456789012345678901234567890123456789"
    assert number_reward("", f"so {long}", long) == 1.0
    assert number_reward("", f"so {long[:-1]}8", long) == 0.0
    assert number_reward("", f"so -{long}", f"-{long}") == 1.0
    assert number_reward("", "3", "3.0000001") == 0.0
    assert number_reward("", "-18", "18") == 0.0
    assert number_reward("", "0.1", "0.1000000000000000055511151231257827") == 0.0
    assert number_reward("", "37.80", "37.8") == 1.0


def test_wrong_and_missing_answers_are_zero():
    assert number_reward("", "20", "18") == 0.0
    assert number_reward("", "no idea", "18") == 0.0


@pytest.mark.parametrize("gold", ["", "eighteen", "18 or 19", "18%", None])
def test_unreadable_gold_is_unscorable(gold):
    assert number_reward("", "18", gold) is None


@pytest.mark.parametrize("gold", [18, "18", Decimal("18.0")])
def test_gold_may_be_a_number(gold):
    assert number_reward("", "$18.", gold) == 1.0
