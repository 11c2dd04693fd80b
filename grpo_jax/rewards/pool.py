"""Worker processes for rewards: a call that hangs, exits or is killed costs its process, no more.

Workers are started anew, not forked, and import neither JAX nor the program that runs; they stay
for the next batch. A function is sent by value where its module cannot be imported by name (a
program's own, a file's, a lambda). What it changes in its process is not seen in another.

Left out on purpose: a guard against a reward that means harm (`code` has a sandbox for that).
"""

import atexit
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import cache
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from grpo_jax.rewards.calling import (
    CONCURRENCY,
    Asked,
    Reward,
    RewardError,
    calls,
    is_async,
    reward_name,
    spread,
)

WORKER = Path(__file__).with_name("worker.py")
START = 120.0  # seconds that a process may take to start and to import what a function needs
GRACE = 1.0  # seconds after which a process that should have timed out by itself is ended
TICK = 0.25  # seconds between looks at processes that have died without closing their pipe


class Worker:
    """One process: it takes a job, answers it, and is ended where it takes too long."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.pipe: Connection | None = None
        self.known: bytes | None = None  # the function that the process holds
        self.deadline: float | None = None
        self.limit: float | None = None

    def start(self) -> Connection:
        """The pipe to the process, which is started where none runs."""
        if self.pipe and self.process and self.process.poll() is None:
            return self.pipe
        self.end()
        self.pipe, theirs = Pipe()
        path = pickle.dumps(sys.path).hex()
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), path]
            self.process = subprocess.Popen(
                [sys.executable, str(WORKER), *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that what it has forked can be ended with it
                env=os.environ | {"JAX_PLATFORMS": "cpu"},  # never the trainer's devices
            )
        return self.pipe

    def send(self, code: bytes, job: bytes, limit: float | None, timeout: float | None) -> None:
        """Hands over a job; the call may take `limit` seconds, each of its parts `timeout`."""
        pipe = self.start()
        new = None if code == self.known else code
        try:
            pipe.send_bytes(pickle.dumps((new, job, timeout)))
        except OSError:  # it has died since: once more, in a new one
            self.end()
            pipe = self.start()
            pipe.send_bytes(pickle.dumps((code, job, timeout)))
        self.known = code
        self.limit = limit
        self.deadline = time.monotonic() + START

    def answer(self) -> tuple | None:
        """The answer to the job, None if there is none yet; an exception where none can come."""
        assert self.pipe is not None
        assert self.process is not None
        try:
            while self.pipe.poll():
                data = self.pipe.recv_bytes()
                if data:
                    return pickle.loads(data)
                self.deadline = None if self.limit is None else time.monotonic() + self.limit
        except (EOFError, OSError):
            return None, self.died()
        if self.process.poll() is not None:
            return None, self.died()
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.end()
            return None, TimeoutError("no value within the time of a call (timeout)")
        return None

    def died(self) -> Exception:
        """What is said of a process that has gone."""
        process = self.process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        self.end()
        code = process.returncode
        how = f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"
        return RuntimeError(f"the worker process {how}")

    def end(self) -> None:
        """Ends the process and all that it has forked."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.pipe is not None:
            self.pipe.close()
        self.process = self.pipe = self.known = None


class Pool:
    """Some workers; one batch at a time."""

    def __init__(self, workers: int):
        self.workers = [Worker() for _ in range(workers)]
        self.lock = threading.Lock()
        atexit.register(self.end)

    def answers(
        self, code: bytes, jobs: Sequence[bytes], limits: Sequence[float | None], timeout: Any
    ) -> list[tuple]:
        """The answers to jobs, in their order, whichever worker was done first."""
        with self.lock:
            try:
                return self._answers(code, jobs, limits, timeout)
            except BaseException:  # a worker that is left at work would answer the next batch
                self.end()
                raise

    def _answers(self, code, jobs, limits, timeout) -> list[tuple]:
        answers: list = [None] * len(jobs)
        left = deque(range(len(jobs)))
        idle = list(self.workers)
        busy: dict[Worker, int] = {}
        while left or busy:
            while left and idle:
                i = left.popleft()
                worker = idle.pop()
                worker.send(code, jobs[i], limits[i], timeout)
                busy[worker] = i
            wait([worker.pipe for worker in busy if worker.pipe], _pause(busy))
            for worker in list(busy):
                answer = worker.answer()
                if answer is not None:
                    answers[busy.pop(worker)] = answer
                    idle.append(worker)
        return answers

    def end(self) -> None:
        """Ends all processes; the next batch starts new ones."""
        for worker in self.workers:
            worker.end()


def _pause(busy: dict[Worker, int]) -> float:
    now = time.monotonic()
    ends = [worker.deadline - now for worker in busy if worker.deadline is not None]
    return max(0.0, min([TICK, *ends]))


@cache
def pool_of(workers: int) -> Pool:
    """The pool of this process with so many workers, which end with it."""
    return Pool(workers)


def outcomes_of_workers(
    fn: Reward, asked: Asked, workers: int, timeout: float | None = None
) -> list:
    """As `calling.outcomes`, in worker processes, for at most `timeout` seconds a call.

    A function of whole batches is one call. Calls of an asynchronous function are shared out among
    the workers and awaited there together; where a worker is lost over them, each is made alone.
    """
    pool = pool_of(workers)
    jobs = calls(fn, asked)
    parts = [[i] for i in range(len(jobs))]
    if is_async(fn):
        parts = [list(range(i, len(jobs), workers)) for i in range(min(workers, len(jobs)))]
    values = _by_parts(pool, fn, jobs, parts, timeout)
    lost = [i for part in parts if len(part) > 1 for i in part if isinstance(values[i], _Lost)]
    values |= _by_parts(pool, fn, jobs, [[i] for i in lost], timeout)
    return spread(fn, jobs, [_told(values[i]) for i in range(len(jobs))])


def value_of(pool: Pool, fn: Reward, row: dict[str, Any], timeout: float | None) -> Any:
    """What one call of a plain function returns, or the exception that it, or its process, ended
    in.
    """
    return _told(_by_parts(pool, fn, [Asked([row], [""], [""])], [[0]], timeout)[0])


class _Lost:
    """A worker did not live to answer."""

    def __init__(self, error: Exception):
        self.error = error


def _told(value: Any) -> Any:
    return value.error if isinstance(value, _Lost) else value


def _by_parts(
    pool: Pool, fn: Reward, jobs: Sequence[Asked], parts: Sequence[Sequence[int]], timeout: Any
) -> dict[int, Any]:
    """What the calls in `parts` returned, by their index; each part is done in one worker."""
    _send_files_by_value()
    sent = [pickled(fn, [jobs[i] for i in part]) for part in parts]
    limits = [None if timeout is None else _limit(fn, len(part), timeout) for part in parts]
    answers = pool.answers(pickled(fn, fn), sent, limits, timeout)
    values: dict[int, Any] = {}
    for part, (found, error) in zip(parts, answers, strict=True):
        if isinstance(error, RewardError):
            raise error
        values |= zip(part, found if error is None else [_Lost(error)] * len(part), strict=True)
    return values


def _limit(fn: Reward, calls: int, timeout: float) -> float:
    """The seconds after which a process is ended; asynchronous calls end themselves before that."""
    if not is_async(fn):
        return timeout
    return timeout * -(-calls // CONCURRENCY) + GRACE


def pickled(fn: Reward, value: Any) -> bytes:
    """Bytes for a worker. Raises RewardError where a function holds what cannot be sent."""
    import cloudpickle

    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise RewardError(
            f"reward {reward_name(fn)!r} cannot be sent to a worker process, with "
            f"{type(value).__name__}: {error}; workers=0 calls it in the trainer's own process"
        ) from error


def _send_files_by_value() -> None:
    """Functions of modules that no import can find, such as files run as one, travel whole."""
    import cloudpickle

    for name, module in list(sys.modules.items()):
        if name != "__main__" and getattr(module, "__spec__", module) is None:
            cloudpickle.register_pickle_by_value(module)
