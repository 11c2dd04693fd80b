"""Several processes as one program: how they find each other, agree on what the host computes, and
end together.

JAX's own multi-controller runtime does the work: every process runs the same program on its own
devices. What the host computes (rewards) may differ in time or fail on one process alone, so it is
exchanged through the coordination service, which waits for a slow process and notices a dead one;
collectives of the devices do neither well.

Left out on purpose: starting processes (a pod's or a cluster's launcher does), and going on with
fewer of them.
"""

import itertools
import os
import pickle
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed  # the coordination service's key-value store has no public name

# Without a sign of life for so long a process counts as dead.
HEARTBEAT_SECONDS = int(os.environ.get("GRPO_JAX_HEARTBEAT_SECONDS", 30))
POLL_SECONDS = 10
PIECE = 1 << 20  # bytes of one entry in the store

_rounds = itertools.count()


class ProcessError(RuntimeError):
    """One of several processes failed, and all of them know: each raises this at the same place."""


def join(where: str) -> None:
    """Joins the other processes: "HOST:PORT,PROCESSES,INDEX", or "auto" on TPU pods, under Slurm
    and under Open MPI.

    HOST:PORT is that of process 0, and INDEX counts from 0. To be called before anything asks JAX
    for a device.
    """
    if where == "auto":
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
        return
    address, count, index = parse(where)
    jax.distributed.initialize(
        address,
        count,
        index,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        cluster_detection_method="deactivate",
    )


def parse(where: str) -> tuple[str, int, int]:
    """`"HOST:PORT,PROCESSES,INDEX"` taken apart. Raises ValueError where it is not of that form."""
    found = re.fullmatch(r"([^,\s]+:\d+),(\d+),(\d+)", where)
    if not found or not int(found[3]) < int(found[2]):
        raise ValueError(
            "--distributed is auto, or HOST:PORT,PROCESSES,INDEX with an index below the number of "
            f"processes, such as 10.0.0.1:1234,4,0; got {where!r}"
        )
    return found[1], int(found[2]), int(found[3])


def is_main_process() -> bool:
    """Whether this process writes the files of a run: process 0 does."""
    return jax.process_index() == 0


def exchange(value: Any) -> list:
    """What every process gave, in their order; it waits for the slowest. All processes must call it
    equally often.

    Values must be picklable. They go through the host, so they should be small: rewards and
    lengths, not activations.
    """
    count = jax.process_count()
    me = jax.process_index()
    number = next(_rounds)
    if count == 1:
        return [value]
    store = distributed.global_state.client
    name = lambda process, number=number: f"grpo_jax/{number}/{process}"
    data = pickle.dumps(value)
    pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
    for index, piece in enumerate(pieces):
        store.key_value_set_bytes(f"{name(me)}/{index}", piece)
    store.key_value_set_bytes(f"{name(me)}/count", str(len(pieces)).encode())

    def of(process):
        size = int(_wait(store, f"{name(process)}/count"))
        return pickle.loads(
            b"".join(_wait(store, f"{name(process)}/{index}") for index in range(size))
        )

    values = [value if process == me else of(process) for process in range(count)]
    if (
        number > 0
    ):  # every process has given its value of this round, so it has read those of the round before
        store.key_value_delete(name(me, number - 1))
    return values


def _wait(store: Any, key: str) -> bytes:
    while True:
        try:
            return store.blocking_key_value_get_bytes(key, POLL_SECONDS * 1000)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def run_and_gather(work: Callable[[], Any]) -> list:
    """`work()` on every process, and the results of all. If it fails on one, all raise
    `ProcessError` with its message.

    On a single process an exception stays what it is.
    """
    if jax.process_count() == 1:
        return [work()]
    value = None
    failure = None
    try:
        value = work()
    except Exception as error:
        failure = error
    said = exchange((value, None if failure is None else f"{type(failure).__name__}: {failure}"))
    failed = [
        f"process {process}: {message}"
        for process, (_, message) in enumerate(said)
        if message is not None
    ]
    if failed:
        raise ProcessError("; ".join(failed)) from failure
    return [value for value, _ in said]


def abort_process(error: BaseException) -> None:
    """Ends this process at once after an error that the others do not share, so that they notice it
    is gone.

    The ordinary way out would wait for them, while they wait for this one.
    """
    traceback.print_exception(error)
    print(
        f"process {jax.process_index()} of {jax.process_count()} ends here. If the error is one of "
        "communication, another process has ended before: see its output. Continue with "
        "--resume RUN.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
