"""Rewards in worker processes: whatever a call does to its process, the trainer and the order of results stay."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
from grpo_jax.options import OptionError, Scoring
from grpo_jax.rewards import RewardError, batched, number_reward, rounded, score, trl_style
from grpo_jax.rewards.pool import outcomes_of_workers, pool_of
from grpo_jax.rewards.waiting import waiting
from grpo_jax.tasks.user_code import load_function

WORKERS = 2


def scored(reward, texts, **options):
    options = {"workers": WORKERS, "on_error": "skip"} | options
    return score(reward, [{"answer": "3"}], ["q"], [texts], **options)


def length(completion):
    return len(completion)


def obey(completion):
    """Does to its process what the completion says."""
    if completion == "hang":
        time.sleep(60)
    if completion == "sys.exit":
        sys.exit(3)
    if completion == "os._exit":
        os._exit(3)
    if completion == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "raise":
        raise KeyError("no")
    if completion == "abort":
        os.abort()
    return 1.0


@pytest.mark.parametrize("deed", ["hang", "sys.exit", "os._exit", "kill", "raise", "abort"])
def test_a_reward_that_ends_its_process_is_not_scored_and_others_are(deed):
    begun = time.monotonic()
    scores = scored(obey, ["a", deed, "b", deed, "c"], timeout=1.0)
    assert np.array_equal(scores.reward_PG[0], [1, np.nan, 1, np.nan, 1], equal_nan=True)
    assert scores.failed_N.tolist() == [2]
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    ("deed", "said"),
    [("hang", "TimeoutError.*timeout"), ("os._exit", "exited with code 3"), ("kill", "killed by signal 9")],
)
def test_or_it_ends_the_run_with_its_place(deed, said):
    with pytest.raises(RewardError, match=f"reward 'obey' failed on prompt 0, completion 1: .*{said}"):
        scored(obey, ["a", deed], timeout=1.0, on_error="raise")


def forks(completion):
    if os.fork() == 0 and completion == "stays":
        time.sleep(60)
    return float(len(completion))


def test_a_copy_that_a_reward_has_forked_answers_nothing():
    texts = ["a", "bb", "stays", "cccc"]
    assert scored(forks, texts).reward_PG.tolist() == [[1, 2, 5, 4]]
    assert scored(length, texts).reward_PG.tolist() == [[1, 2, 5, 4]]
    pool_of(WORKERS).end()


def slow_first(completion):
    time.sleep(0.3 if completion == "slow" else 0)
    return float(len(completion))


def test_results_keep_their_order():
    texts = ["slow", "a", "bb", "ccc", "slow", "d"]
    assert scored(slow_first, texts).reward_PG.tolist() == [[4, 1, 2, 3, 4, 1]]


def process(completion):
    return os.getpid()


def has_jax(completion):
    return "jax" in sys.modules


def test_workers_are_other_processes_that_stay_and_import_no_jax():
    first = set(scored(process, ["a"] * 8).reward_PG[0])
    assert os.getpid() not in first
    assert 1 <= len(first | set(scored(process, ["a"] * 8).reward_PG[0])) <= WORKERS
    assert scored(has_jax, ["a"]).reward_PG.tolist() == [[0]]
    assert scored(number_reward, ["it is 3", "4"]).reward_PG.tolist() == [[1, 0]]


def test_functions_of_all_kinds_travel(tmp_path):
    bound = 2
    file = tmp_path / "mine.py"
    file.write_text(
        "FACTOR = 3\ndef helper(x): return FACTOR * x\ndef reward(completion): return helper(len(completion))"
    )
    kinds = [
        lambda completion: bound * len(completion),
        partial(lambda completion, scale: scale * len(completion), scale=4),
        load_function(f"{file}:reward"),
        rounded(load_function(f"{file}:reward")),
        batched(lambda completion: [len(text) for text in completion]),
        trl_style(lambda completions, answer, **columns: [float(len(answer[0]))] * len(completions)),
    ]
    rewards = scored(kinds, ["ab", "c"], on_error="raise").reward_PGN[0].T
    assert rewards.tolist() == [[4, 2], [8, 4], [6, 3], [6, 3], [2, 1], [1, 1]]


def test_the_same_as_without_workers():
    steps = lambda completion: [(1, 0.5), (2, 0.25)]
    for reward in (length, steps, lambda completion: None, batched(lambda completion: [1.0, None, 2.0])):
        here, there = (scored(reward, ["ab", "cd", "ef"], workers=n) for n in (0, WORKERS))
        assert here.steps_PGN == there.steps_PGN
        assert np.array_equal(here.reward_PGN, there.reward_PGN, equal_nan=True)


@pytest.mark.parametrize("workers", [0, WORKERS])
def test_a_wrong_number_of_values_raises_either_way(workers):
    with pytest.raises(RewardError, match="returned 1 values for 2 completions"):
        scored(batched(lambda completion: [1.0]), ["a", "b"], workers=workers)


def test_a_function_that_cannot_be_sent_is_said():
    held = threading.Lock()
    with pytest.raises(RewardError, match="'<lambda>' cannot be sent to a worker process"):
        scored(lambda completion: held.locked(), ["a"])


# Asynchronous functions.


async def patient(completion):
    await asyncio.sleep(0.2 if completion != "late" else 30)
    if completion == "raise":
        raise KeyError("no")
    return float(len(completion))


@pytest.mark.parametrize("workers", [0, WORKERS])
def test_asynchronous_calls_are_awaited_together(workers):
    scored(length, ["a"], workers=workers)
    begun = time.monotonic()
    texts = ["a" * (i % 5) for i in range(40)]
    assert scored(patient, texts, workers=workers).reward_PG[0].tolist() == [i % 5 for i in range(40)]
    assert time.monotonic() - begun < 4  # 8 seconds one after another
    failed = scored(patient, ["a", "raise"], workers=workers)
    assert np.array_equal(failed.reward_PG[0], [1, np.nan], equal_nan=True)


def test_an_asynchronous_call_that_is_late_costs_only_itself():
    scores = scored(patient, ["a", "late", "bb", "cc"], timeout=1.0)
    assert np.array_equal(scores.reward_PG[0], [1, np.nan, 2, 2], equal_nan=True)


async def blocks(completion):
    if completion == "hang":
        time.sleep(60)
    if completion == "exit":
        os._exit(1)
    return 1.0


@pytest.mark.parametrize("deed", ["hang", "exit"])
def test_an_asynchronous_call_that_blocks_costs_only_itself(deed):
    scores = scored(blocks, ["a", deed, "b", "c"], timeout=0.5)
    assert np.array_equal(scores.reward_PG[0], [1, np.nan, 1, 1], equal_nan=True)


async def all_at_once(completion, answer):
    await asyncio.sleep(0)
    return [float(text == right) for text, right in zip(completion, answer, strict=True)]


@pytest.mark.parametrize("workers", [0, WORKERS])
def test_asynchronous_functions_of_whole_batches(workers):
    assert scored(batched(all_at_once), ["3", "4"], workers=workers).reward_PG.tolist() == [[1, 0]]


def test_an_asynchronous_function_inside_a_running_loop():
    async def notebook():
        return scored(patient, ["a"], workers=0).reward_PG.tolist()

    assert asyncio.run(notebook()) == [[1]]


# Without workers, and what is said.


def test_sys_exit_in_the_trainers_own_process_is_an_error_of_the_reward():
    assert np.isnan(scored(obey, ["sys.exit"], workers=0).reward_PG).all()
    with pytest.raises(RewardError, match=r"called sys\.exit"):
        scored(obey, ["sys.exit"], workers=0, on_error="raise")


def test_a_long_wait_is_told_once_and_a_short_one_is_not(capfd):
    with waiting("judge", after=0.05):
        time.sleep(0.3)
    with waiting("quick", after=0.2):
        pass
    time.sleep(0.3)
    assert capfd.readouterr().err == "waiting for reward 'judge' for more than 0.05 seconds …\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": -1}, "workers must be an integer of at least 0"),
        ({"workers": 1.5}, "workers must be"),
        ({"workers": 1, "timeout": 0}, "timeout must be above 0"),
        ({"workers": 1, "timeout": float("nan")}, "timeout must be a finite number"),
        ({"timeout": 1.0}, "timeout needs workers of at least 1"),
    ],
)
def test_options_that_cannot_be(options, said):
    with pytest.raises(OptionError, match=said):
        Scoring(**options).check()
    assert Scoring(workers=2, timeout=0.5).check()


def test_workers_end_with_the_program_even_if_it_is_killed(tmp_path):
    program = (
        "import os, signal\n"
        "from grpo_jax.rewards import score\n"
        "print(int(score(lambda completion: os.getpid(), [{}], ['q'], [['a']], workers=1)"
        ".reward_PG[0, 0]), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    worker = int(done.stdout)
    for _ in range(50):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail(f"the worker {worker} has outlived the program: {done.stderr}")


def test_outcomes_of_many_calls_are_cheap():
    asked = ([{}] * 400, ["q"] * 400, ["abc"] * 400)
    from grpo_jax.rewards.calling import Asked

    outcomes_of_workers(length, Asked(*asked), WORKERS)
    begun = time.monotonic()
    assert outcomes_of_workers(length, Asked(*asked), WORKERS) == [3] * 400
    assert time.monotonic() - begun < 2
