"""Evaluation: the same result however it is cut into batches, and what cannot be scored is not wrong."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_jax.inference.tokenizer import ByteTokenizer
from grpo_jax.options import Generation, OptionError, Sampling, Scoring
from grpo_jax.parallel.programs import listed, shapes_of
from grpo_jax.rewards import RewardError
from grpo_jax.training.evaluate import GREEDY, Evaluation, evaluate, failures, pass_at_k

from toy import STOP, ascii_share, bigram, compilations, letters

MODEL, TASK, BYTES = bigram(), letters(), ByteTokenizer()
ROWS = TASK.held_out  # 7
KEY = jax.random.key(3)
GREEDILY = Generation(1, 6, Sampling(0.0))  # one length everywhere, to share programs
SAMPLED = {"generation": Generation(3, 6, Sampling(temperature=0.9, top_k=50)), "key": KEY}


@pytest.fixture(scope="module")
def params():
    params = MODEL.init(jax.random.key(0))
    return params | {"bias": params["bias"].at[STOP].add(-1.5)}  # greedy completions of several lengths


@pytest.fixture(scope="module")
def run(params):
    """`evaluate` with defaults for these tests."""

    def go(task=TASK, rows=ROWS, params=params, generation=GREEDILY, **options):
        return evaluate(MODEL, params, BYTES, task, rows, generation=generation, prompt_length=16, **options)

    return go


@pytest.fixture(scope="module")
def greedy(run):
    return run(batch_size=64)


@pytest.fixture(scope="module")
def sampled(run):
    return run(batch_size=64, **SAMPLED)


def equal(a: Evaluation, b: Evaluation):
    assert a.texts == b.texts
    np.testing.assert_array_equal(a.reward_PN, b.reward_PN)
    assert a[:4] == b[:4]


def test_the_batch_size_changes_nothing(run, greedy):
    """7 rows in batches of 3: the last batch is filled up, and what fills it is not counted."""
    done = []
    equal(run(batch_size=3, progress=done.append), greedy)
    assert done == [3, 6, 7]
    assert greedy.reward_PN.shape == (7, 1)
    assert len({text for (text,) in greedy.texts}) > 1


def test_the_batch_size_changes_no_sampled_completion(run, sampled):
    """A row's noise depends on the key, its place among all rows and the sample alone."""
    equal(run(batch_size=3, **SAMPLED), sampled)
    assert sampled.reward_PN.shape == (7, 3)
    assert len({text for texts in sampled.texts for text in texts}) > 7
    first = run(rows=ROWS[:3], batch_size=3, **SAMPLED)
    assert first.texts == sampled.texts[:3]


def test_batches_of_one_shape_compile_one_program(params):
    """Seven rows in batches of 2, 2, 2 and 1, then other rows: one compilation of the sampler."""
    with compilations() as compiled:
        for rows in (ROWS, ROWS[::-1]):
            evaluate(
                MODEL, params, BYTES, TASK, rows, generation=Generation(1, 5, Sampling(0.0)), prompt_length=16,
                batch_size=2,
            )  # fmt: skip
    assert compiled.count("generate") == 1


def test_numbers_are_those_of_the_completions(greedy, sampled):
    for result in (greedy, sampled):
        rewards = [ascii_share(text) for texts in result.texts for text in texts]
        known = [reward for reward in rewards if reward is not None]
        assert result.mean_reward == pytest.approx(np.mean(known))
        assert result.accuracy is None, "shares are neither right nor wrong"
        assert result.unscorable == len(rewards) - len(known)
        np.testing.assert_allclose(result.reward_PN.ravel(), np.array(rewards, float))
        # Every byte of a completion is a token; a truncated one has 6, any other its stop token too.
        assert 1 <= result.length <= 6
        assert 0 <= result.truncated < 1
    assert sampled.truncated > 0
    assert greedy.mean_reward != sampled.mean_reward


def test_what_cannot_be_scored_is_left_out_and_counted(run):
    answers = iter([1.0, None, 0.0, None, 1.0, 1.0, None])
    result = run(TASK._replace(reward=lambda completion: next(answers)))
    assert (result.accuracy, result.unscorable) == (0.75, 3)
    assert np.isnan(result.reward_PN).sum() == 3
    nothing = run(TASK._replace(reward=lambda completion: None))
    assert np.isnan(nothing.mean_reward)
    assert nothing.unscorable == 7


def test_a_failing_reward_ends_the_evaluation_or_is_counted(run):
    def reward(completion, question):
        if question == ROWS[2]["question"]:
            raise KeyError("lost")
        return 1.0

    task = TASK._replace(reward=reward)
    with pytest.raises(RewardError, match="lost"):
        run(task)
    result = run(task, scoring=Scoring(on_error="skip"))
    assert (result.accuracy, result.unscorable) == (1.0, 1)


def test_evaluation_is_greedy_by_default(run, greedy):
    """Whatever key is given: no setting of training reaches it, and the most likely token is taken each time."""
    equal(run(key=jax.random.key(9)), greedy)
    # Greedy is the limit of sampling at ever lower temperatures.
    cold = run(generation=Generation(1, 6, Sampling(temperature=1e-4)), key=KEY)
    assert cold.texts == greedy.texts


def test_the_key_decides_what_is_sampled(run, sampled):
    other = run(batch_size=64, **SAMPLED | {"key": jax.random.key(4)})
    assert other.texts != sampled.texts
    equal(run(batch_size=64, **SAMPLED), sampled)


def test_the_prompts_width_changes_no_text(params, greedy):
    """Left padding is masked; without a width, prompts are padded to a multiple of 16 of their own."""
    wide = evaluate(MODEL, params, BYTES, TASK, ROWS, generation=GREEDILY, prompt_length=24)
    assert wide.texts == greedy.texts
    with pytest.raises(ValueError, match="prompt 0 has 3 tokens, more than the 2 allowed"):
        evaluate(MODEL, params, BYTES, TASK, ROWS, generation=GREEDILY, prompt_length=2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": []}, "no rows to evaluate"),
        ({"generation": Generation(0)}, "group_size must be an integer of at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"generation": Generation(2, 6, Sampling(0.0))}, "group_size must be 1: greedy decoding gives one completion"),
        ({"generation": Generation()}, "needs a key"),
        ({"generation": Generation(1, 6, Sampling(top_p=0.0)), "key": KEY}, "top_p must be in"),
        ({"scoring": Scoring(on_error="none")}, "on_error must be one of"),
        ({"scoring": Scoring((1, 2))}, "weights must be 1 finite weights"),
        ({"generation": Generation(1, 25, Sampling(0.0))}, r"max_new_tokens \(25\) and prompts of up to 16 tokens"),
    ],
)
def test_bad_arguments_are_named(run, wrong, message):
    with pytest.raises(ValueError, match=message):
        run(**wrong)


def test_the_default_is_greedy_and_one_completion(params):
    """64 tokens of it, which this model has no room for."""
    with pytest.raises(OptionError, match=r"^max_new_tokens \(64\)"):
        evaluate(MODEL, params, BYTES, TASK, ROWS, prompt_length=16)
    assert Generation(1, 64, Sampling(0.0)) == GREEDY


def test_weights_weigh_the_rewards(run):
    def one(completion):
        return 1.0

    def two(completion):
        return 2.0

    task = TASK._replace(reward=[one, two])
    assert run(task).mean_reward == 3
    assert run(task, scoring=Scoring((4, -1))).mean_reward == 2


def test_nothing_runs_with_shapes(params):
    """The program is listed, and compiled where it was told to: the evaluation itself then compiles none."""
    generation = Generation(1, 7, Sampling(0.0))
    go = lambda params: evaluate(MODEL, params, BYTES, TASK, ROWS, generation=generation, prompt_length=16)
    with listed() as found:
        assert go(shapes_of(jax.tree.map(jnp.asarray, params))) is None
    (program,) = found.values()
    assert program.name == "generate"
    assert program.options["generation"] == generation
    program.compile()
    with compilations() as compiled:
        assert len(go(params).texts) == 7
    assert "generate" not in compiled


@pytest.mark.parametrize("n", [1, 2, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n):
    """Against every subset of k of the n samples, for every number of right ones in two rows."""
    for k in range(1, n + 1):
        for right in np.ndindex(n + 1, n + 1):
            correct = np.arange(n) < np.array(right)[:, None]
            subsets = [row[list(chosen)].any() for row in correct for chosen in combinations(range(n), k)]
            assert pass_at_k(correct, k) == pytest.approx(np.mean(subsets))


def test_pass_at_k_of_one_is_accuracy_and_grows_with_k():
    correct = np.random.default_rng(0).random((50, 8)) < 0.3
    values = [pass_at_k(correct, k) for k in range(1, 9)]
    assert values[0] == pytest.approx(correct.mean())
    assert values[-1] == pytest.approx(correct.any(1).mean())
    assert values == sorted(values)


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_needs_k_samples(k):
    with pytest.raises(ValueError, match=f"k must be between 1 and the 3 samples of each row, got {k}"):
        pass_at_k(np.ones((2, 3), bool), k)


def test_pass_at_k_leaves_unknown_completions_out():
    """Of three known ones one is right, of one known one none: with k 2 the second row says nothing."""
    nan = np.nan
    correct = np.array([[1.0, nan, 0.0, 0.0], [nan, nan, 0.0, nan]])
    assert pass_at_k(correct, 1) == pytest.approx((1 / 3 + 0) / 2)
    assert pass_at_k(correct, 2) == pytest.approx(2 / 3)
    assert np.isnan(pass_at_k(correct, 4))


def test_failures_hold_what_is_needed_to_read_them():
    rows = [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}]
    reward_PN = np.array([[1.0, 0.25], [np.nan, 2.0]])
    result = Evaluation(0.5, 1, 1.0, 0.0, reward_PN, [["right", "half"], ["?", "more"]])
    half = {"question": "a", "answer": "1", "prompt": "a", "completion": "half", "reward": 0.25}
    unknown = {"question": "b", "answer": "2", "prompt": "b", "completion": "?", "reward": None}
    assert failures(TASK, rows, result) == [half, unknown]
    assert failures(TASK, rows, result, threshold=0.2) == [unknown]
