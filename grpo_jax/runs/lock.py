"""One run, one folder: a run folder is claimed before anything slow, and held until its run ends.

Who holds a folder is written in run.lock, and the system's own lock on that file says whether it
still does: that one ends with its process, however it ends. Where the file system knows no locks,
the process that is written there is looked for, by its number and the time of its start, for
numbers are given again; one of another machine cannot be looked for, and counts as running.

Left out on purpose: waiting for a lock. Two runs in one folder are a mistake.
"""

import contextlib
import errno
import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = "run.lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)

_held: set[Path] = set()  # by this process, which the system's locks let in twice


class FolderInUseError(FileExistsError):
    """Another run holds the folder."""


class Claim:
    """A run folder that is held; a context manager that gives it back.

    `made` says whether the claim made the folder. Raises FolderInUseError where another run holds
    it, FileNotFoundError where it is not there and `make` is false.
    """

    def __init__(self, path: str | Path, *, make: bool):
        self.path = Path(path)
        self._parents = [folder for folder in self.path.parents if not folder.exists()]
        self.made = make and _made(self.path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"no run to resume at {self.path}")
        self._real = self.path.resolve()
        if self._real in _held:
            raise FolderInUseError(f"{self.path} is in use by another run of this very process")
        self._file = _locked(self.path)
        _held.add(self._real)
        stat = self.path.stat()
        self._identity = stat.st_dev, stat.st_ino

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def check(self) -> None:
        """Raises FileNotFoundError where the folder that was claimed is not there any more."""
        try:
            stat = self.path.stat()
            there = (stat.st_dev, stat.st_ino) == self._identity
        except FileNotFoundError:
            there = False
        if not there:
            raise FileNotFoundError(
                f"the run folder {self.path} was removed or replaced while its run was going on; "
                "the run ends here and writes nothing more"
            )

    def release(self) -> None:
        """Gives the folder back; a second call does nothing."""
        if self._real not in _held:
            return
        _held.discard(self._real)
        with contextlib.suppress(OSError):
            self.check()
            os.unlink(self.path / LOCK)
        os.close(self._file)

    def remove(self) -> None:
        """Removes the folders that the claim made: the run has come to nothing."""
        self.release()
        if not self.made:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # others may have put something there
            for folder in self._parents:
                folder.rmdir()


def _made(path: Path) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(exist_ok=False)
    except FileExistsError:
        if not path.is_dir():
            raise FileExistsError(f"{path} is a file, and a run needs a folder") from None
        return False
    return True


def _locked(folder: Path) -> int:
    """The file run.lock, open and locked, with this process written in it."""
    path = folder / LOCK
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(file, folder)
            # Its last holder may have removed it between the two lines above.
            if os.path.exists(path) and os.path.samestat(os.fstat(file), os.stat(path)):
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps(_this_process()).encode(), 0)
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _lock(file: int, folder: Path) -> None:
    """Locks the open file. Raises FolderInUseError, with who holds it."""
    if fcntl is not None:
        try:
            # By process: a child that outlives a killed run does not hold its folder.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise FolderInUseError(_in_use(folder, _holder(file))) from None
            if error.errno not in NO_LOCKS:
                raise
    holder = _holder(file)
    if holder and is_running(holder):
        raise FolderInUseError(_in_use(folder, holder))


def _holder(file: int) -> dict[str, Any]:
    try:
        holder = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _in_use(folder: Path, holder: dict[str, Any]) -> str:
    who = f"process {holder.get('pid', '?')} on {holder.get('host', 'an unknown machine')}"
    since = f", since {holder['since']}" if "since" in holder else ""
    return (
        f"{folder} is in use by {who}{since}: two runs cannot write one folder; wait for it, or "
        f"choose another --out (if that process is gone for certain, remove {folder / LOCK})"
    )


def is_running(holder: dict[str, Any]) -> bool:
    """Whether the process that run.lock names still runs; true where that cannot be known."""
    if holder.get("host") != socket.gethostname():
        return True
    try:
        os.kill(int(holder["pid"]), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, KeyError, TypeError, ValueError):
        return True
    start = _start_of(int(holder["pid"]))
    return start is None or start == holder.get("start")


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"pid": pid, "start": _start_of(pid), "host": socket.gethostname(), "since": since}


def _start_of(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None where the system tells not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])
