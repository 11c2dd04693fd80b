"""Rewards for the form of a completion, by hand."""

from functools import partial

import pytest
from grpo_jax.rewards import boxed_format, exact_reward, hash_format, language, repetition, score, tag_format


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("\n<think>\na\n</think>\n\n<answer> b </answer> \n", 1),
        ("<think>a</think>\nb<answer>c</answer>", 0),
        ("x<think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer>x", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0),
        ("<think>a<think></think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer><answer>b</answer>", 0),
        ("<think></think><answer>b</answer>", 0),
        ("<think>a</think><answer> </answer>", 0),
        ("<think>a</think><answer>b", 0),
        ("<Think>a</Think><answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_tags(completion, reward):
    assert tag_format(completion) == reward


def test_tags_of_ones_own():
    reward = partial(tag_format, tags=("plan", "final-answer"))
    assert reward("<plan>a</plan> <final-answer>b</final-answer>") == 1
    assert reward("<think>a</think><answer>b</answer>") == 0
    for tags in ((), ("a b",), ("<a>",)):
        with pytest.raises(ValueError, match="tags"):
            tag_format("", tags=tags)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (r"so \boxed{7}", 1),
        (r"\fbox{7}", 1),
        (r"\boxed{\frac{1}{2}}", 1),
        (r"\boxed{}", 0),
        (r"\boxed{7", 0),
        (r"\boxed{7} and \boxed{8", 0),
        (r"<think>\boxed{7}</think> 7", 0),
        (r"<think>\boxed{7}", 0),
        ("7", 0),
    ],
)
def test_boxes(completion, reward):
    assert boxed_format(completion) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("2 + 2 = 4\n#### 4", 1), ("####4\n", 1), ("#### 4\nDone.", 0), ("4", 0), ("#### ", 0),
     ("#### 3\n#### 4", 0), ("", 0)],
)  # fmt: skip
def test_hashes(completion, reward):
    assert hash_format(completion) == reward


def test_repeated_ngrams():
    assert repetition([1, 2, 3, 4], n=2) == 0
    assert repetition([1, 2, 1, 2, 1], n=2) == 2 / 4 - 1  # 12 21 12 21
    assert repetition([7] * 12, n=3) == 1 / 10 - 1
    assert repetition([1, 1], n=3) == 0
    assert repetition([], n=1) == 0
    with pytest.raises(ValueError, match="n must be"):
        repetition([1], n=0)
    scores = score(repetition, [{}], ["q"], [["a", "b"]], columns_PG={"completion_ids": [[[1, 2, 3], [5] * 4]]})
    assert scores.reward_PG.tolist() == [[0, -0.5]]


@pytest.mark.parametrize(
    ("completion", "scripts", "share"),
    [
        ("Hello, 42!", ("LATIN",), 1),
        ("Grüße", ("LATIN",), 1),
        ("ab где", ("LATIN",), 2 / 5),
        ("ab где", ("CYRILLIC",), 3 / 5),
        ("漢字かなカナ", ("CJK", "HIRAGANA", "KATAKANA"), 1),
        ("漢字かなカナ", ("CJK",), 1 / 3),
        ("ＡＢ", ("LATIN",), 1),
        ("한국어 abc", ("HANGUL",), 1 / 2),
        ("سلام", ("ARABIC",), 1),
        ("42 + 1", ("LATIN",), None),
        ("", ("LATIN",), None),
    ],
)
def test_share_of_a_script(completion, scripts, share):
    assert language(completion, scripts=scripts) == share


@pytest.mark.parametrize("scripts", [(), ("ELVISH",), "LATIN"])
def test_scripts_that_are_none(scripts):
    with pytest.raises(ValueError, match="scripts must be"):
        language("a", scripts=scripts)


def test_exact_answers():
    assert exact_reward(" yes\n", "yes") == 1
    assert exact_reward("Yes", "yes") == 0
    assert exact_reward("4", 4) == 1
    assert exact_reward("0", 0) == 1
    assert exact_reward("", "") is None
    assert exact_reward("None", None) is None
