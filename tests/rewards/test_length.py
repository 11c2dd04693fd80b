"""DAPO's overlong penalty, arXiv 2503.14476, eq. 13."""

from functools import partial

import pytest
from grpo_jax.rewards import overlong, score


@pytest.mark.parametrize(
    ("length", "reward"), [(0, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0), (11, -1.0), (99, -1.0)]
)
def test_pieces(length, reward):
    assert overlong(length, max_length=10, buffer=4) == reward


@pytest.mark.parametrize("buffer", [0, -1, 11])
def test_bad_buffer(buffer):
    with pytest.raises(ValueError, match="buffer"):
        overlong(1, max_length=10, buffer=buffer)


def test_counts_tokens_given_as_a_column():
    lengths = [[5, 8], [10, 12]]
    penalty = partial(overlong, max_length=10, buffer=4)
    scores = score(penalty, [{}, {}], ["a", "b"], [["x", "y"]] * 2, columns_PG={"completion_length": lengths})
    assert scores.reward_PG.tolist() == [[0.0, -0.5], [-1.0, -1.0]]
