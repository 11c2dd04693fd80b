"""The command line on the toy task of toy.py as one of several processes, with a reward that misbehaves on demand.

`FAULT` is "die", "raise" or "slow", and happens in this process at the reward's call number `FAULT_AT`.
"""

import itertools
import os
import signal
import sys
import time

from grpo_jax import cli
from grpo_jax.tasks import TASKS, Task

import toy

calls = itertools.count(1)


def reward(completion: str) -> float | None:
    if next(calls) == int(os.environ.get("FAULT_AT", 0)):
        fault = os.environ["FAULT"]
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raise":
            raise ZeroDivisionError("the judge is out")
        time.sleep(5)
    return toy.ascii_share(completion)


def faulty() -> Task:
    return toy.letters()._replace(name="faulty", reward=reward)


if __name__ == "__main__":
    toy.install()
    TASKS["faulty"] = faulty
    sys.exit(cli.main())
