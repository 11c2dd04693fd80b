"""Rewards get the arguments they name, and nothing that they return is lost, broadcast or silently zero."""

import math
from functools import partial

import numpy as np
import pytest
from grpo_jax.rewards import RewardError, batched, call_reward, check_reward, combine, reward_name, score, trl_style

ROWS = [{"answer": "ab", "level": 1}, {"answer": "c", "level": 2}]
PROMPTS = ["p0", "p1"]
COMPLETIONS = [["ab", "x", "abc"], ["c", "cc", ""]]


def right(completion, answer):
    return completion == answer


def length(completion):
    return len(completion)


def test_only_named_arguments_are_passed():
    row = {"answer": 4, "level": 2, "prompt": "a column", "completion": "another"}
    assert call_reward(lambda prompt: prompt, row, "p", "c") == "p"
    assert call_reward(lambda completion, level: (completion, level), row, "p", "c") == ("c", 2)
    assert call_reward(lambda *, answer, other=7: (answer, other), row, "p", "c") == (4, 7)
    assert call_reward(lambda **columns: columns, row, "p", "c") == {**row, "prompt": "p", "completion": "c"}
    assert call_reward(lambda level=0: level, row, "p", "c") == 2


def test_what_a_partial_binds_is_not_replaced_by_a_column():
    row = {"answer": 4, "scale": 100}
    assert call_reward(partial(lambda answer, scale: answer * scale, scale=2), row, "", "") == 8
    assert call_reward(partial(lambda **columns: sorted(columns.items()), scale=2), {"scale": 1}, "", "") == [
        ("completion", ""),
        ("prompt", ""),
        ("scale", 2),
    ]


def test_callable_objects_and_methods_are_rewards():
    class Judge:
        def __call__(self, completion, answer):
            return completion + answer

    assert call_reward(Judge(), {"answer": "b"}, "", "a") == "ab"
    assert call_reward(Judge().__call__, {"answer": "b"}, "", "a") == "ab"
    assert reward_name(partial(Judge())) == "Judge"
    assert reward_name(trl_style(length)) == "length"


def test_missing_column_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"'gold'.*available: answer, level, prompt, completion"):
        call_reward(lambda completion, gold: 0, ROWS[0], "", "")
    with pytest.raises(ValueError, match="'gold'"):
        check_reward(lambda completion, gold: 0, ROWS[0])
    with pytest.raises(ValueError, match="by position only"):
        check_reward(lambda completion, /: 0, ROWS[0])
    check_reward(right, ROWS[0])
    check_reward(trl_style(lambda prompts, completions, answer: []), ROWS[0])
    check_reward(batched(lambda prompt, completion, answer: []), ROWS[0])


@pytest.mark.parametrize("wrap", [lambda fn: fn, batched])
def test_a_column_missing_from_one_row_raises_whatever_on_error_is(wrap):
    rows = [ROWS[0], {"level": 2}]
    with pytest.raises(ValueError, match="'answer'"):
        score(wrap(right), rows, PROMPTS, COMPLETIONS, on_error="skip")


def test_every_completion_has_its_own_reward():
    scores = score([right, length], ROWS, PROMPTS, COMPLETIONS)
    assert scores.reward_PGN.shape == (2, 3, 2)
    assert scores.reward_PGN[..., 0].tolist() == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert scores.reward_PGN[..., 1].tolist() == [[2, 1, 3], [1, 2, 0]]
    assert scores.reward_PG.tolist() == [[3, 1, 3], [2, 2, 0]]
    assert scores.failed_N.tolist() == [0, 0]


def test_weights_scale_the_total_and_not_the_parts():
    scores = score([right, length], ROWS, PROMPTS, COMPLETIONS, weights=[10, -1])
    assert scores.reward_PG.tolist() == [[8, -1, -3], [9, -2, 0]]
    assert scores.reward_PGN[0, 0].tolist() == [1, 2]


def test_none_is_nan_and_not_zero():
    scores = score(lambda completion: None, ROWS, PROMPTS, COMPLETIONS)
    assert np.isnan(scores.reward_PGN).all()
    assert np.isnan(scores.reward_PG).all()
    assert scores.failed_N.tolist() == [0]


def test_none_of_one_reward_leaves_the_other():
    scores = score([right, lambda completion: None], ROWS, PROMPTS, COMPLETIONS)
    assert scores.reward_PG.tolist() == [[1, 0, 0], [1, 0, 0]]


def test_columns_of_completions():
    columns = {"tokens": [[1, 2, 3], [4, 5, 6]], "level": [[7, 7, 7], [8, 8, 8]]}
    scores = score(lambda tokens, level: tokens * level, ROWS, PROMPTS, COMPLETIONS, columns_PG=columns)
    assert scores.reward_PG.tolist() == [[7, 14, 21], [32, 40, 48]]
    with pytest.raises(ValueError, match="'tokens'"):
        score(right, ROWS, PROMPTS, COMPLETIONS, columns_PG={"tokens": [[1, 2, 3]]})
    with pytest.raises(ValueError, match="'tokens'"):
        score(right, ROWS, PROMPTS, COMPLETIONS, columns_PG={"tokens": [[1, 2], [3, 4]]})


def test_batched_gets_lists_of_everything():
    seen = {}

    def reward(prompt, completion, answer, level):
        seen.update(prompt=prompt, answer=answer, level=level)
        return [float(c == a) for c, a in zip(completion, answer, strict=True)]

    scores = score(batched(reward), ROWS, PROMPTS, COMPLETIONS)
    assert scores.reward_PG.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert seen == {"prompt": ["p0"] * 3 + ["p1"] * 3, "answer": ["ab"] * 3 + ["c"] * 3, "level": [1] * 3 + [2] * 3}


def test_trl_style_gets_plural_names_and_all_columns():
    def reward(prompts, completions, **columns):
        assert set(columns) == {"answer", "level"}
        return np.array([len(p) + len(c) for p, c in zip(prompts, completions, strict=True)])

    assert score(trl_style(reward), ROWS, PROMPTS, COMPLETIONS).reward_PG.tolist() == [[4, 3, 5], [3, 4, 2]]


def test_trl_style_conversations():
    def reward(prompts, completions):
        assert prompts[0] == [{"role": "user", "content": "p0"}]
        assert completions[0][0]["role"] == "assistant"
        return [len(completion[0]["content"]) for completion in completions]

    fn = trl_style(reward, conversational=True)
    assert score(fn, ROWS, PROMPTS, COMPLETIONS).reward_PG.tolist() == [[2, 1, 3], [1, 2, 0]]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0, 2.0], "2 values for 6"),
        (1.0, "single float for 6"),
        (None, "single NoneType for 6"),
        (np.float32(1), "single float32 for 6"),
    ],
)
def test_a_batched_reward_is_never_broadcast(returned, message, on_error):
    with pytest.raises(RewardError, match=message):
        score(batched(lambda completion: returned), ROWS, PROMPTS, COMPLETIONS, on_error=on_error)


def fails_on_x(completion):
    if completion == "x":
        raise KeyError("no x")
    return 1.0


def test_an_exception_raises_with_its_place():
    with pytest.raises(RewardError, match=r"'fails_on_x' failed on prompt 0, completion 1: KeyError") as caught:
        score([length, fails_on_x], ROWS, PROMPTS, COMPLETIONS)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "'p0'" in str(caught.value)


def test_an_exception_can_be_counted_as_none():
    scores = score([length, fails_on_x], ROWS, PROMPTS, COMPLETIONS, on_error="skip")
    assert scores.failed_N.tolist() == [0, 1]
    assert np.isnan(scores.reward_PGN[..., 1]).tolist() == [[False, True, False], [False] * 3]
    assert scores.reward_PG[0].tolist() == [3, 1, 4]


def test_a_failing_batch_is_counted_whole():
    def reward(completion):
        raise TimeoutError("too slow")

    assert score(batched(reward), ROWS, PROMPTS, COMPLETIONS, on_error="skip").failed_N.tolist() == [6]
    with pytest.raises(RewardError, match="TimeoutError: too slow"):
        score(batched(reward), ROWS, PROMPTS, COMPLETIONS)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", {"reward": 1}, 1j, np.array([1.0])])
def test_what_is_no_reward_is_an_error_or_counted(value):
    with pytest.raises(RewardError, match="a reward is"):
        score(lambda: value, ROWS, PROMPTS, COMPLETIONS)
    scores = score(lambda: value, ROWS, PROMPTS, COMPLETIONS, on_error="skip")
    assert scores.failed_N.tolist() == [6]
    assert np.isnan(scores.reward_PG).all()


@pytest.mark.parametrize("value", [True, np.bool_(True), 1, np.int32(1), np.float32(1), 1.0])
def test_numbers_and_bools(value):
    assert (score(lambda: value, ROWS, PROMPTS, COMPLETIONS).reward_PGN == 1.0).all()


def test_process_rewards_keep_their_steps_and_sum():
    def steps(completion):
        return [(end, 0.5 * end) for end in range(1, len(completion) + 1)]

    scores = score([right, steps], ROWS, PROMPTS, COMPLETIONS)
    assert scores.steps_PGN[0][0] == [None, ((1, 0.5), (2, 1.0))]
    assert scores.reward_PGN[0, 0].tolist() == [1.0, 1.5]
    assert scores.steps_PGN[0][2][1] == ((1, 0.5), (2, 1.0), (3, 1.5))
    assert scores.steps_PGN[1][2][1] is None  # the empty completion has no step to score
    assert math.isnan(scores.reward_PGN[1, 2, 1])


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([(0, 1.0)], "within 1 … 2"),
        ([(3, 1.0)], "got 3"),
        ([(2, 1.0), (1, 1.0)], "got 1 after 2"),
        ([(1.0, 1.0)], "end position"),
        ([1.0], "end position"),
        ([(1, math.nan)], "finite"),
        ([(1, "x")], "a number"),
    ],
)
def test_bad_steps(steps, message):
    with pytest.raises(RewardError, match=message):
        score(lambda: steps, ROWS[:1], ["p"], [["ab"]])


def test_combine():
    nan = math.nan
    reward_PGN = np.array([[[1.0, 2.0], [nan, 2.0], [1.0, nan], [nan, nan]]])
    np.testing.assert_array_equal(combine(reward_PGN), [[3, 2, 1, nan]])
    np.testing.assert_array_equal(combine(reward_PGN, [2, 0.5]), [[3, 1, 2, nan]])
    np.testing.assert_array_equal(combine(reward_PGN, [2, 0]), [[2, 0, 2, nan]])
    for weights in ([1], [1, 2, 3], [1, nan], 2.0):
        with pytest.raises(ValueError, match="2 finite weights"):
            combine(reward_PGN, weights)


@pytest.mark.parametrize(
    ("rows", "prompts", "completions", "message"),
    [
        ([], [], [], "at least one"),
        (ROWS, PROMPTS[:1], COMPLETIONS, "2 rows, 1 prompts, 2 groups"),
        (ROWS, PROMPTS, [["a"], ["b", "c"]], r"\[1, 2\]"),
        (ROWS, PROMPTS, [[], []], r"\[0\]"),
    ],
)
def test_bad_shapes(rows, prompts, completions, message):
    with pytest.raises(ValueError, match=message):
        score(right, rows, prompts, completions)


def test_bad_options():
    with pytest.raises(ValueError, match="on_error"):
        score(right, ROWS, PROMPTS, COMPLETIONS, on_error="ignore")
    with pytest.raises(ValueError, match="no reward function"):
        score([], ROWS, PROMPTS, COMPLETIONS)
