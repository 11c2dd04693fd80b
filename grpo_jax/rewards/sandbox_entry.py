"""Shuts itself in, then runs a Python program: namespaces, a root of its own, limits, no privilege.

Run by its path with `python -I -S` and one argument, JSON (see `sandbox.start`). Knows only the
standard library. As root it takes a user of its own for each run, else it maps its user in a user
namespace; either way nothing of the machine but Python and its libraries is there to be read, and
nothing but `/tmp`, in memory, can be written.
"""

import ctypes
import json
import os
import resource
import signal
import sys

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
RDONLY, NOSUID, NODEV, BIND, REC, PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
DETACH = 2
MOUNT_SETATTR = 442  # the same number on every architecture
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
RECURSIVE = 0x8000
SET_PDEATHSIG, SET_NO_NEW_PRIVS, SET_DUMPABLE = 1, 38, 4
FIRST_USER = 0x70000000  # users that no machine gives to a person

told = os.dup(2)  # closed when the program begins, which cannot speak in this one's name
libc = ctypes.CDLL(None, use_errno=True)


def call(what: str, *arguments: object) -> None:
    """A function of the C library that returns 0 or sets errno."""
    if getattr(libc, what)(*arguments) != 0:
        problem = ctypes.get_errno()
        raise OSError(problem, f"{what}: {os.strerror(problem)}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    call(
        "mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags),
        options.encode(),
    )  # fmt: skip


def read_only(target: str) -> None:
    """Makes a mount, and those below it, read-only, without devices or set-user programs."""
    attributes = (ctypes.c_uint64 * 4)(RDONLY | NOSUID | NODEV, 0, 0, 0)
    call(
        "syscall", ctypes.c_long(MOUNT_SETATTR), -100, target.encode(), RECURSIVE,
        ctypes.byref(attributes), ctypes.c_size_t(32),
    )  # fmt: skip


def unshare(user: int | None) -> None:
    """Namespaces of its own; a user namespace too where there is no `user` to become."""
    flags = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", flags | (0 if user else NEWUSER))
    if not user:
        for name, text in (
            ("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1"),
        ):  # fmt: skip
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def user_of_its_own() -> int | None:
    """A user that nobody else is, for root where it may become any; None for others."""
    if os.geteuid() != 0:
        return None
    user = FIRST_USER + os.getpid()
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return user if any(first <= user < first + count for first, _, count in ranges) else None


def new_root(root: str, paths: list[str], scratch: int) -> None:
    """A root that holds `paths`, read-only, some devices, and /tmp of `scratch` bytes."""
    mount("none", "/", "", REC | PRIVATE)
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    for path in paths:
        target = root + path
        if os.path.islink(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(os.readlink(path), target)
            continue
        os.makedirs(target, exist_ok=True)
        mount(path, target, "", BIND | REC)
        read_only(target)
    os.makedirs(f"{root}/dev")
    for device in ("null", "zero", "urandom", "random"):
        open(f"{root}/dev/{device}", "w").close()
        mount(f"/dev/{device}", f"{root}/dev/{device}", "", BIND)
    os.makedirs(f"{root}/tmp")
    os.makedirs(f"{root}/old")
    mount(
        "tmpfs", f"{root}/tmp", "tmpfs", NOSUID | NODEV, f"size={scratch},nr_inodes=1000,mode=777"
    )
    os.chdir(root)
    call("syscall", ctypes.c_long(PIVOT_ROOT[os.uname().machine]), b".", b"old")
    call("umount2", b"/old", DETACH)
    os.rmdir("/old")
    mount("none", "/", "", RDONLY | NOSUID | NODEV | BIND | 32)  # 32: remount
    os.chdir("/tmp")


def limit(limits: dict) -> None:
    """Bounds of CPU time, memory, processes, files; no core files."""
    for name, most in (
        ("CORE", 0),
        ("CPU", limits["seconds"]),
        ("AS", limits["memory"]),
        ("NPROC", limits["processes"]),
        ("FSIZE", limits["scratch"]),
        ("NOFILE", 64),
        ("MSGQUEUE", 0),
        ("MEMLOCK", 0),
    ):
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None:
            resource.setrlimit(kind, (most, most))


def give_up_privileges(user: int | None) -> None:
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    call("prctl", SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def die_with_parent() -> None:
    call("prctl", SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def wait_for(child: int) -> int:
    """The exit code of a child; others that end meanwhile are cleared away."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def main(config: dict) -> None:
    die_with_parent()
    user = user_of_its_own()
    unshare(user)
    new_root(config["root"], config["paths"], config["limits"]["scratch"])
    call("sethostname", b"sandbox", ctypes.c_size_t(7))
    first = os.fork()  # the first process of the new process namespace: all others end with it
    if first:
        os._exit(wait_for(first))
    os.setsid()
    die_with_parent()
    second = os.fork()
    if second:
        os._exit(wait_for(second))
    give_up_privileges(user)
    limit(config["limits"])
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
    arguments = [config["python"], "-I", "-S", "-c", config["program"], *config["arguments"]]
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    os.execve(config["python"], arguments, environment)


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except BaseException as error:  # told to the parent, which refuses to run without a sandbox
        os.write(told, f"sandbox: {type(error).__name__}: {error}\n".encode())
        os._exit(125)
