"""Several processes on this machine are one program: equal numbers, one writer, and they end together."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from grpo_jax.parallel.processes import exchange, parse, run_and_gather
from grpo_jax.runs.folder import read_lines

HERE = Path(__file__).parents[1]
# fmt: off
OPTIONS = [
    "--task", "faulty", "--model", "bigram", "--steps", "4", "--prompts-per-step", "4", "--group-size", "3",
    "--max-new-tokens", "6", "--sft-steps", "2", "--learning-rate", "0.05", "--lr-warmup", "2", "--schedule", "linear",
    "--seed", "4", "--objective-args", "beta=0.1", "--ref-ema", "0.5", "--eval-rows", "5", "--eval-batch-size", "4",
    "--eval-every", "2", "--save-every", "2", "--keep-checkpoints", "3", "--length-buckets", "1", "--compactions", "0",
    "--no-pack-tokens", "--no-drop-zero-variance", "--max-staleness", "1",
]
# fmt: on
# With two processes, process 1 scores 2 rows of an evaluation and 6 completions of an iteration: calls 1-2, 3-8, 9-14,
# the evaluation after the second iteration 15-16, and 17-22. Process 0 scores 3 rows of an evaluation: 19-24.


def free_port() -> int:
    with closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def slurm_port() -> int:
    """A free port among those that JAX derives from the number of a Slurm job."""
    for port in range(61440 + os.getpid() % 4000, 65536):
        with closing(socket.socket()) as server:
            if server.connect_ex(("127.0.0.1", port)):
                return port
    raise RuntimeError("no free port")


def launch(
    folder: Path,
    *arguments: str,
    processes: int = 1,
    devices: int = 1,
    faults: dict | None = None,
    slurm: bool = False,
) -> list:
    """The command line in so many processes; `faults` maps a process to its fault and the call where it happens.

    With `slurm` they find each other through the variables that Slurm sets.
    """
    port, started = slurm_port() if slurm else free_port(), []
    for index in range(processes):
        shared = {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "GRPO_JAX_HEARTBEAT_SECONDS": "10",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        if index in (faults or {}):
            shared |= dict(zip(("FAULT", "FAULT_AT"), map(str, faults[index]), strict=True))
        joined = ["--distributed", "auto" if slurm else f"127.0.0.1:{port},{processes},{index}"]
        joined = joined if processes > 1 else []
        if slurm:
            shared |= {"SLURM_JOB_ID": str(port - 61440), "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_LOCALID": "0"}
            shared |= {"SLURM_NTASKS": str(processes), "SLURM_PROCID": str(index)}
        command = [sys.executable, HERE / "process_toy.py", "train", *arguments, *joined]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, env=os.environ | shared, cwd=folder, **pipes))
    return started


def finish(started: list) -> list[tuple[int, str]]:
    """Exit code and output of each."""
    outputs = [process.communicate(timeout=300)[0] for process in started]
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


def succeed(started: list) -> None:
    for code, output in finish(started):
        assert code == 0, output[-3000:]


def close_to(folder: Path, whole: Path) -> None:
    """Equal metrics, but for the rounding of sums in another order."""
    got, wanted = (read_lines(path / "metrics.jsonl") for path in (folder, whole))
    assert [row["step"] for row in got] == [row["step"] for row in wanted] == [0, 1, 2, 3, 4]
    for mine, other in zip(got, wanted, strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            np.testing.assert_allclose(mine[name], other[name], rtol=1e-4, atol=1e-5, err_msg=f"{name} {mine['step']}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def whole(folder):
    """The run in one process on one device."""
    succeed(launch(folder, *OPTIONS, "--out", "whole"))
    return folder / "whole"


@pytest.fixture(scope="module")
def slow(folder, whole):
    """Two processes of two devices each, one of which takes seconds longer for a reward."""
    started = launch(
        folder, *OPTIONS, "--out", "slow", "--mesh", "data=2,fsdp=2", processes=2, devices=2, faults={1: ("slow", 8)}
    )
    succeed(started)
    return folder / "slow"


def test_two_processes_equal_one(slow, whole):
    """Law: prompts read, sampled and scored in parts, one of them late: the same metrics, each written once."""
    close_to(slow, whole)
    summaries = [json.loads((path / "summary.json").read_text()) for path in (slow, whole)]
    assert summaries[0]["sampled_tokens"] == summaries[1]["sampled_tokens"]
    assert len({row["reward"] for row in read_lines(whole / "metrics.jsonl") if "reward" in row}) == 4
    timings = read_lines(slow / "timings.jsonl")
    assert max(row["seconds/score"] for row in timings) > 4, "the late reward was waited for"


@pytest.mark.parametrize(("dying", "call", "processes", "mesh"), [(1, 18, 4, "fsdp=4"), (0, 20, 2, "tensor=2")])
def test_a_death_ends_the_others_and_other_processes_continue(folder, whole, dying, call, processes, mesh):
    """One is killed in the third iteration, also the one that the others meet at; others end the run from checkpoint 2.

    Over a tensor axis both of them hold every prompt, and each completion is still scored once.
    """
    name = f"killed-{dying}"
    options = ["--out", name, "--mesh", "data=2,fsdp=2"]
    started = launch(folder, *OPTIONS, *options, processes=2, devices=2, faults={dying: ("die", call)})
    started[dying].wait(timeout=300)
    died = time.monotonic()
    ended = finish(started)
    (killed, _), (code, output) = ended[dying], ended[1 - dying]
    assert time.monotonic() - died < 60
    assert killed == -9
    assert code not in (0, 2)
    told = ("another",) if dying else ("another", "coordination service")  # process 0 takes the service with it
    assert any(words in output.lower() for words in told), output[-3000:]
    assert len(read_lines(folder / name / "metrics.jsonl")) == 3
    succeed(launch(folder, "--resume", name, "--mesh", mesh, processes=processes))
    close_to(folder / name, whole)


def test_a_reward_that_raises_on_one_process_ends_all_with_its_message(folder):
    """In processes that found each other as Slurm's do."""
    mesh = ["--out", "raised", "--mesh", "data=2"]
    began = time.monotonic()
    for code, output in finish(launch(folder, *OPTIONS, *mesh, processes=2, faults={1: ("raise", 7)}, slurm=True)):
        assert code == 2
        assert "process 1: RewardError" in output, output[-3000:]
        assert "the judge is out" in output
    assert time.monotonic() - began < 100


def test_one_process_exchanges_with_itself():
    assert exchange({"a": 1}) == [{"a": 1}]
    assert run_and_gather(lambda: 3) == [3]
    with pytest.raises(ZeroDivisionError):
        run_and_gather(lambda: 1 / 0)


@pytest.mark.parametrize("text", ["host,2,0", "host:1,2", "host:1,2,2", "host:1,0,0", "a b:1,2,0", "AUTO", ""])
def test_addresses_are_checked(text):
    with pytest.raises(ValueError, match="--distributed is auto, or HOST:PORT,PROCESSES,INDEX"):
        parse(text)
    assert parse("10.0.0.1:1234,4,3") == ("10.0.0.1:1234", 4, 3)
