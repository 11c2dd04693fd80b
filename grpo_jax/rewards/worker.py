"""The process that rewards run in: takes jobs from a pipe, answers on it, imports no JAX.

Run by its path, so that nothing of the package is imported before it is asked for. The package
itself stands in as an empty one that finds its rooms; a function that takes one of its public names
(`from grpo_jax import Task`) imports all of it then.
"""

import importlib
import importlib.util
import os
import pickle
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

PACKAGE = "grpo_jax"


class Rooms(ModuleType):
    """A package whose own code has not run; its rooms are imported one by one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if importlib.util.find_spec(f"{PACKAGE}.{name}"):
            return importlib.import_module(f"{PACKAGE}.{name}")
        spec = vars(self)["__spec__"]
        spec.loader.exec_module(self)
        return vars(self)[name]


def main(descriptor: int, parent: int, path: list[str]) -> None:
    """Answers jobs until the pipe closes or the process that started this one is gone."""
    sys.path[:] = path
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    package = Rooms(PACKAGE)
    package.__spec__ = spec
    package.__path__ = list(spec.submodule_search_locations or ())
    package.__file__ = spec.origin
    sys.modules[PACKAGE] = package
    threading.Thread(target=leave_with, args=(parent,), daemon=True).start()
    serve(Connection(descriptor))


def leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def serve(pipe: Connection) -> None:
    """A job is `(function, pickled arguments, timeout)`; the answer is `(values, error)`.

    `function` is the pickled function where this process does not have it yet, else None.
    """
    from grpo_jax.rewards.calling import CountError, made

    own = os.getpid()
    fn: Any = None
    while True:
        try:
            code, job, timeout = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            fn = fn if code is None else pickle.loads(code)
            calls = pickle.loads(job)
            pipe.send_bytes(b"")  # ready: the time of the call begins
            answer: tuple = ([sendable(value) for value in made(fn, calls, timeout)], None)
        except CountError as error:
            answer = (None, error)
        except Exception as error:
            answer = (None, RuntimeError(f"{type(error).__name__}: {error}"))
        if os.getpid() != own:  # a copy of this process, which the reward has forked
            os._exit(0)
        pipe.send_bytes(pickle.dumps(answer))


def sendable(value: Any) -> Any:
    """The value, or what can be told of one that does not survive the way."""
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        if isinstance(value, Exception):
            told = "".join(traceback.format_exception_only(value)).strip()
            return RuntimeError(told)
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
            return value.item()
        return TypeError(f"a {type(value).__name__} cannot be sent from a worker process")
    return value


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), pickle.loads(bytes.fromhex(sys.argv[3])))
