"""Rewards made of other rewards, against the papers' formulas written out."""

import math
from functools import partial

import numpy as np
import pytest
from grpo_jax.rewards import batched, cosine_length, efficiency, number_reward, reward_name, rounded, score

LENGTHS = [[10, 20, 40, 20]]
TEXTS = [["3", "3", "3", "4"]]


def scored(reward, rows=({"answer": "3"},), texts=TEXTS, lengths=LENGTHS, **options):
    columns = {"completion_length": lengths}
    return score(reward, rows, ["q"] * len(rows), texts, columns_PG=columns, **options).reward_PG


@pytest.mark.parametrize("workers", [0, 1])
def test_cosine(workers):
    reward = cosine_length(number_reward, max_length=40, right=(2, 1), wrong=(-10, 0), exceeded=-7)
    cosine = lambda t, at_0, at_end: at_end + 0.5 * (at_0 - at_end) * (1 + math.cos(math.pi * t / 40))
    expected = [cosine(10, 2, 1), cosine(20, 2, 1), -7, cosine(20, -10, 0)]
    assert scored(reward, workers=workers)[0].tolist() == pytest.approx(expected)
    assert expected[1] == 1.5
    assert expected[3] == -5


def test_cosine_falls_where_right_and_grows_where_wrong():
    reward = cosine_length(number_reward, max_length=100)
    lengths = [list(range(0, 100, 10))] * 2
    right, wrong = scored(reward, [{"answer": "3"}] * 2, [["3"] * 10, ["4"] * 10], lengths)
    assert right[0] == 2
    assert wrong[0] == -10
    assert (np.diff(right) < 0).all()
    assert (np.diff(wrong) > 0).all()
    assert (right > wrong).all()
    with pytest.raises(ValueError, match="max_length"):
        cosine_length(number_reward, max_length=0)


@pytest.mark.parametrize("workers", [0, 1])
def test_efficiency_compares_within_its_group(workers):
    rows = [{"answer": "3"}, {"answer": "3"}, {"answer": "3"}]
    texts = [TEXTS[0], ["3", "4", "4", "3"], ["3"] * 4]
    lengths = [LENGTHS[0], [100, 200, 300, 300], [5] * 4]
    expected = [
        [0.5, 0.5 - 1 / 3, -0.5, 0],  # the last is wrong, and gains nothing by being short
        [0.5, 0, -0.5, -0.5],
        [0, 0, 0, 0],
    ]
    assert scored(efficiency(number_reward), rows, texts, lengths, workers=workers) == pytest.approx(np.array(expected))


def test_what_cannot_be_scored_stays_so():
    rows = [{"answer": "none"}]
    for reward in (rounded(number_reward), cosine_length(number_reward, max_length=50), efficiency(number_reward)):
        assert np.isnan(scored(reward, rows)).all()


def test_rounding():
    graded = lambda completion: {"3": 0.505, "4": 0.4951}[completion]
    assert scored(rounded(graded, digits=2))[0].tolist() == [0.5, 0.5, 0.5, 0.5]  # half to even
    assert scored(rounded(graded, digits=1))[0].tolist() == [0.5] * 4
    assert scored(rounded(lambda completion: 12, digits=0))[0].tolist() == [12] * 4
    assert scored(rounded(lambda completion: True))[0].tolist() == [1] * 4
    steps = rounded(lambda completion: [(1, 0.126)])
    assert score(steps, [{}], ["q"], [["ab"]]).steps_PGN[0][0][0] == ((1, 0.13),)
    with pytest.raises(ValueError, match="digits"):
        rounded(graded, digits=-1)


def test_columns_defaults_and_names_are_those_of_the_inner_reward():
    def close(prompt, completion, answer, scale=0.5):
        return scale * (completion == answer) + (prompt == "q")

    reward = rounded(close)
    assert reward_name(reward) == "close"
    assert scored(reward)[0].tolist() == [1.5, 1.5, 1.5, 1.0]
    assert scored(rounded(partial(close, scale=0.126)), [{"answer": "3", "scale": 9}])[0, 0] == 1.13
    assert scored(rounded(lambda completion, **columns: columns["answer"] == completion))[0, 0] == 1
    with pytest.raises(ValueError, match="takes an argument 'answer'"):
        scored(reward, [{}])
    with pytest.raises(ValueError, match="takes an argument 'completion_length'"):
        score(cosine_length(number_reward, max_length=9), [{"answer": "3"}], ["q"], [["3"]])


async def later(completion):
    return 1.0


@pytest.mark.parametrize("reward", [batched(lambda completion: [1]), later, 3])
def test_only_plain_functions_can_be_shaped(reward):
    for shape in (rounded, efficiency, partial(cosine_length, max_length=9)):
        with pytest.raises(TypeError, match="single completions"):
            shape(reward)
