"""Mathematical answers: the committed pairs, the law of answers, and no answer that a doubt lets through."""

import json
import time
from collections import Counter
from pathlib import Path

import pytest
from grpo_jax.rewards import final_answer, math_reward, score
from grpo_jax.rewards.answer_forms import number, read

# Written by hand. The frozen half was written before any checker had been asked, and stays as it is.
PAIRS = [json.loads(line) for line in (Path(__file__).parent / "data" / "math_pairs.jsonl").read_text().splitlines()]


def test_the_table_is_large_enough_and_half_of_it_frozen():
    counts = Counter((pair["frozen"], pair["right"]) for pair in PAIRS)
    assert len(PAIRS) >= 150
    assert sum(counts[True, right] for right in (True, False)) >= len(PAIRS) / 2
    assert min(counts.values()) >= 40
    assert len({(pair["gold"], pair["answer"]) for pair in PAIRS}) == len(PAIRS)


@pytest.mark.parametrize("frozen", [True, False])
def test_no_wrong_answer_is_accepted_and_at_most_two_percent_of_right_ones_refused(frozen):
    half = [pair for pair in PAIRS if pair["frozen"] is frozen]
    said = [(pair, math_reward(pair["answer"], pair["gold"])) for pair in half]
    assert [pair for pair, reward in said if not pair["right"] and reward != 0] == []
    refused = [pair for pair, reward in said if pair["right"] and reward != 1]
    assert len(refused) <= 0.02 * sum(pair["right"] for pair in half), refused


# Other answers than those of the table.


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("2500", r"\boxed{2\,500}"),
        ("2500", r"\boxed{25\times10^2}"),
        ("-0.75", "\\boxed{\u2212\\frac34}"),
        (r"\frac{22}{7}", r"\boxed{3\frac{1}{7}}"),
        ("7.5%", r"\boxed{0.075}"),
        (r"\{3, 5, 8\}", r"\boxed{\{8, 3, 5\}}"),
        ("2, 3", r"\boxed{x = 3 \text{ or } x = 2}"),
        (r"\pm 2", r"\boxed{-2, 2}"),
        (r"\sqrt{2}+\sqrt{3}", r"\boxed{\sqrt{5+2\sqrt{6}}}"),
        ("0", r"\boxed{\sin(\pi)}"),
        ("x + y = 3", r"\boxed{y + x = 3}"),
        ("x > 2", r"\boxed{2 < x}"),
        ("i", r"\boxed{\sqrt{-1}}"),
        ("16", "The answer is 16 because 4 * 4 = 16."),
        ("12", "**Answer:** 12 apples"),
        (r"Half of it, so \boxed{\frac{1}{2}} is left.", "#### 0.5"),
        ("5 cm", r"\boxed{5}"),
        (3, r"\boxed{3}"),
        (0.5, r"\boxed{\frac12}"),
        ("D", "The answer is (D)."),
    ],
)
def test_other_right_answers(gold, answer):
    assert math_reward(answer, gold) == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5 cm", r"\boxed{5\text{ m}}"),
        ("5 cm", "5 m"),
        ("1/7", r"\boxed{0.142857142857142857}"),
        (r"\sqrt{2}", r"\boxed{1.41421356237309504880168872420969807856967187537694}"),
        ("98765432109876543210", r"\boxed{98765432109876543211}"),
        (r"\frac{1}{2}", r"\boxed{\frac{1+\epsilon}{2}}"),
        ("12", r"\boxed{1,2}"),
        ("1,2", r"\boxed{12}"),
        ("1000", r"\boxed{1,00,0}"),
        ("11", "\\boxed{1\n1}"),
        ("7", "7.0.1"),
        ("a", r"\boxed{A}"),
        ("(1,2)", r"\boxed{(1,2]}"),
        (r"\infty", r"\boxed{-\infty}"),
        ("3", r"\boxed{\text{not } 3}"),
        ("3", r"\boxed{3"),
        ("3", "3<think>"),
        ("3", r"\boxed"),
        ("2", "not 2, not 3"),
    ],
)
def test_other_wrong_answers(gold, answer):
    assert math_reward(answer, gold) == 0.0


@pytest.mark.parametrize("gold", ["", " ", r"\frac{1}{", r"\boxed{7", "####", "(1, 2", r"\frac{}{}", r"7 + "])
def test_a_gold_answer_that_does_not_parse_scores_nothing(gold):
    assert math_reward(r"\boxed{1}", gold) is None
    assert math_reward(str(gold), gold) is None


def test_a_comparison_ends_in_time_and_the_next_one_works():
    begun = time.monotonic()
    assert math_reward(r"\boxed{9^{9^{9^{9}}} + x}", "x", timeout=1.0) == 0.0
    assert time.monotonic() - begun < 15
    assert math_reward(r"\boxed{2 + x}", "x + 2", timeout=60.0) == 1.0


@pytest.mark.parametrize(
    "text",
    ["\\boxed{" * 5000, "$" * 20001, "(" * 20000, "{" * 20000, "1," * 10000, "answer " * 5000, "<think>" * 5000,
     "9" * 50000,
     "\\boxed{" + "9" * 1900 + "}", "\\boxed{" + "(1,2," * 300 + ")" * 300 + "}", "\\boxed{" + "\\frac" * 300 + "}",
     "#### " * 5000, "\\boxed{" + "%" * 1900 + "}", "\\boxed{" + "-" * 1900 + "}", "\\boxed{x=" * 100 + "}" * 100],
    ids=range(15),
)  # fmt: skip
def test_a_completion_made_to_take_long_does_not(text):
    begun = time.monotonic()
    assert math_reward(text, "7") == 0.0
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"a \boxed{1} b \boxed{2}", "2"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed 7", "7"),
        (r"<think>\boxed{1}</think>\boxed{2}", "2"),
        (r"<think>\boxed{1}</think>", None),
        (r"<think>\boxed{1}", None),
        (r"\boxed{1} then #### 2", "2"),
        (r"#### 1 then \boxed{2}", "2"),
        ("The answer is $x^2$.", "x^2"),
        ("I get $1$ and then $2$", "2"),
        ("It costs 3 dollars and 4 cents in all, I think, or so it seems to me at least", "4"),
        ("", None),
    ],
)
def test_where_an_answer_stands(text, answer):
    assert final_answer(text) == answer


def test_numbers_are_exact_and_large_powers_are_not_computed():
    assert number("0.1") + number("0.2") == number("0.3")
    assert number("10^{3}") == number("1e3") == number("1,000") == 1000
    for text in ("10^{100000}", "1e99999", "1/0", r"\frac{1}{0}", "1.2.3", "1,00", "--1", "٣"):
        assert number(text) is None
    assert read("x" * 3000) is None


def test_it_is_a_reward_of_rows_and_works_in_workers():
    rows = [{"answer": "x + 1"}, {"answer": ""}]
    texts = [[r"\boxed{1 + x}", r"\boxed{x}"]] * 2
    for workers in (0, 1):
        rewards = score(math_reward, rows, ["q"] * 2, texts, workers=workers).reward_PG
        assert rewards[0].tolist() == [1, 0]
        assert str(rewards[1].tolist()) == "[nan, nan]"
