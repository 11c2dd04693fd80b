"""Runs untrusted Python shut in: no network, no files but Python's own, limits on all it may use.

Linux namespaces and resource limits, set by `sandbox_entry`; every run starts from nothing and ends
with all of its processes. Left out on purpose: a filter of system calls, a virtual machine. This
stops programs that cheat or run wild; for code from an enemy who has a fault of the kernel at hand,
run the trainer itself in a virtual machine.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ENTRY = Path(__file__).with_name("sandbox_entry.py")
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
NOT_SHUT_IN = 125  # the exit code of sandbox_entry where it could not


class Limits(NamedTuple):
    """What a run may use."""

    seconds: float = 10.0
    """Seconds by the clock, and, rounded up, of the processor."""
    memory: int = 512 << 20
    """Bytes of memory of each process."""
    processes: int = 8
    """Processes and threads at once."""
    output: int = 1 << 20
    """Bytes that a run may write to its output before it is ended."""
    scratch: int = 16 << 20
    """Bytes that a run may write to files, in /tmp and in memory."""

    def check(self) -> "Limits":
        """Returns itself, or raises ValueError for a limit that is no positive number."""
        for name, value in self._asdict().items():
            kinds = (int, float) if name == "seconds" else (int,)
            right = isinstance(value, kinds) and not isinstance(value, bool)
            if not right or not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        return self


class Ran(NamedTuple):
    """What came of a run: its output, its exit code, and the limit that ended it, if one did."""

    output: bytes
    code: int
    ended_by: str = ""


class SandboxError(RuntimeError):
    """This machine cannot shut a program in; the message says why."""


@contextlib.contextmanager
def started(
    program: str,
    limits: Limits,
    *,
    arguments: Sequence[str] = (),
    stdin: bytes = b"",
    stdout: Any = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
) -> Iterator[subprocess.Popen]:
    """A program of Python that runs shut in; it has ended, with all its processes, on leaving."""
    python = os.path.realpath(sys.executable)
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        root = Path(folder, "root")
        root.mkdir()
        given = Path(folder, "stdin")
        given.write_bytes(stdin)
        config = {
            "root": str(root),
            "paths": _readable(python),
            "python": python,
            "program": program,
            "arguments": list(arguments),
            "limits": limits._asdict() | {"seconds": max(1, -int(-limits.seconds // 1))},
        }
        with given.open("rb") as file:  # for reading alone: the program could write into it
            process = subprocess.Popen(
                [python, "-I", "-S", str(ENTRY), json.dumps(config)],
                stdin=file,
                stdout=stdout,
                stderr=subprocess.PIPE,
                pass_fds=pass_fds,
                start_new_session=True,
                env={},
            )
        try:
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen) -> None:
    """Ends a run; the kernel ends all processes of its namespace with the first of them."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()


def run(program: str, limits: Limits, *, stdin: bytes = b"", arguments: Sequence[str] = ()) -> Ran:
    """Runs a program of Python to its end or to a limit; its output is what it writes to stdout.

    Raises SandboxError where the machine could not shut it in.
    """
    parts = {"stdin": stdin, "arguments": arguments, "stdout": subprocess.PIPE}
    with started(program, limits, **parts) as process:
        output, errors, ended_by = _read(process, limits)
        if ended_by:
            return Ran(output, -signal.SIGKILL, ended_by)
        code = process.wait()
    if code == NOT_SHUT_IN and errors.startswith(b"sandbox: "):
        raise SandboxError(errors.decode(errors="replace").strip())
    return Ran(output, code)


def _read(process: subprocess.Popen, limits: Limits) -> tuple[bytes, bytes, str]:
    """Output, the beginning of the errors, and the limit that was met."""
    deadline = time.monotonic() + limits.seconds
    read = {process.stdout: b"", process.stderr: b""}
    most = {process.stdout: limits.output, process.stderr: limits.output}
    with selectors.DefaultSelector() as selector:
        for pipe in read:
            assert pipe is not None
            selector.register(pipe, selectors.EVENT_READ)
        ended_by = ""
        while selector.get_map() and not ended_by:
            left = deadline - time.monotonic()
            if left <= 0:
                ended_by = "seconds"
            for key, _ in selector.select(max(0.0, left)):
                pipe: Any = key.fileobj
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(pipe)
                read[pipe] += data
                if len(read[pipe]) > most[pipe]:
                    ended_by = "output"
    return read[process.stdout], read[process.stderr], ended_by


def _readable(python: str) -> list[str]:
    """What a run can read: Python and the libraries that it is linked with."""
    prefix = str(Path(python).parent.parent)
    paths = [prefix, *(path for path in LIBRARIES if os.path.lexists(path))]
    inside = lambda path: any(path.startswith(f"{other}/") for other in paths)
    return [path for path in dict.fromkeys(paths) if not inside(path)]


# What a machine can do.

_ATTEMPTS = """
import json, os, socket, sys
port, outside = int(sys.argv[1]), sys.argv[2:]
done = []
def attempt(name, deed):
    try:
        if deed() is not False:
            done.append(name)
    except BaseException:
        pass
def connect():
    socket.create_connection(("127.0.0.1", port), 1)
def crowd():
    for _ in range(200):
        if os.fork() == 0:
            os.read(waiting, 1)
            os._exit(0)
waiting, _ = os.pipe()
attempt("open a connection", connect)
for path in outside:
    attempt(f"read {path}", lambda: os.stat(path))
for place in ("/", sys.prefix, "/dev"):
    attempt(f"write into {place}", lambda: open(os.path.join(place, "probe"), "w"))
attempt("take more memory than allowed", lambda: bytearray(4 << 30))
attempt("see other processes", lambda: os.getpid() > 100)
attempt("become root", lambda: os.setuid(0))
attempt("start more processes than allowed", crowd)
with open("/tmp/probe", "w") as file:
    file.write("scratch")
print(json.dumps(done))
"""


@cache
def why_not_isolated() -> str | None:
    """What keeps this machine from shutting a program in, or None if it can; by trying it."""
    if sys.platform != "linux":
        return f"it needs the namespaces of Linux, and this is {sys.platform}"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        outside = [str(port), str(Path(__file__)), "/proc/self", "/etc/passwd"]
        try:
            ran = run(_ATTEMPTS, Limits(seconds=30.0), arguments=outside)
        except (SandboxError, OSError) as error:
            return str(error)
    try:
        done = json.loads(ran.output)
    except ValueError:
        return f"a trial program ended with code {ran.code} {ran.ended_by}".strip()
    return f"a trial program could {', '.join(done)}" if done else None
