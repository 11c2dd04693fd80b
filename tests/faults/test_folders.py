"""Run folders that are taken, removed, full, or edited: one clear error, and nothing of a run is lost."""

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from grpo_jax.runs.checkpoint import open_checkpoints, restore
from grpo_jax.runs.folder import RunFolder, append_line, cut_lines, read_lines, run_folder
from grpo_jax.runs.lock import LOCK, Claim, FolderInUseError, is_running
from grpo_jax.runs.patience import Patience, StorageError
from grpo_jax.runs.saving import Saver, check_storage

from saved_states import bits, state_of
from small_runs import Silent, go, small
from toy import OPTIONS, install, launch

install()
FAST = {"objective_args": ("beta=0",), "steps": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders") / "whole"
    go(small(**FAST), folder)
    return folder


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_of_two_runs_that_start_together_one_gets_the_folder(tmp_path, fault):
    """As processes: the other ends at once, with who holds it, and the first is not disturbed."""
    arguments = ["train", *OPTIONS, "--out", "same", "--steps", "2"]
    first, second = (launch(tmp_path, *arguments) for _ in range(2))
    outputs = [process.communicate()[0] for process in (first, second)]
    codes = [first.returncode, second.returncode]
    assert sorted(codes) == [0, 2], outputs
    lost = outputs[codes.index(2)]
    assert "is in use by process" in lost or "already holds a run" in lost
    assert "Traceback" not in lost
    assert [row["step"] for row in read_lines(tmp_path / "same" / "metrics.jsonl")] == [0, 1, 2]
    fault("two runs started in one folder", "one runs; the other ends with who holds it")


def test_two_resumes_at_once(whole, tmp_path, fault):
    folder = shutil.copytree(whole, tmp_path / "run")
    with Claim(folder, make=False):
        before = content(folder)
        with pytest.raises(FolderInUseError, match="is in use by another run of this very process"):
            go(small(**FAST), folder, resume=True)
        assert content(folder) == before
    go(small(**FAST), folder, resume=True)
    assert not (folder / LOCK).exists()
    fault("a run resumed twice at once", "the second is refused with who holds it")


HOLD = """
import sys, time
from grpo_jax.runs.lock import Claim
claim = Claim(sys.argv[1], make=True)
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_ends_with_its_process(tmp_path, fault):
    folder = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(FolderInUseError, match=f"in use by process {process.pid} on {socket.gethostname()}, since 20"):
        Claim(folder, make=False)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (folder / LOCK).exists(), "or nothing was left behind"
    with Claim(folder, make=False) as claim:
        claim.check()
    assert not (folder / LOCK).exists()
    fault("a run that was killed", "its lock is recognised as stale")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the start of a process is read from /proc")
def test_a_process_of_the_same_number_is_another_one():
    """Where a file system knows no locks, the process that is written in run.lock is looked for."""
    host = socket.gethostname()
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    assert is_running({"pid": os.getpid(), "start": start, "host": host})
    assert not is_running({"pid": os.getpid(), "start": start - 1, "host": host})
    assert not is_running({"pid": 2**22 + 1, "start": start, "host": host})
    assert is_running({"pid": 2**22 + 1, "start": start, "host": "elsewhere"}), "which cannot be known"


def test_a_folder_is_claimed_once_whoever_is_first(tmp_path):
    claims, errors = [], []

    def claim():
        try:
            claims.append(Claim(tmp_path / "run", make=True))
        except FolderInUseError as error:
            errors.append(error)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(claims), len(errors)) == (1, 7)
    claims[0].release()


@pytest.mark.parametrize("there", [False, True])
def test_a_run_that_fails_before_its_first_checkpoint_leaves_no_folder(tmp_path, there, fault):
    folder = tmp_path / "run"
    if there:
        folder.mkdir()
        (folder / "notes").write_text("mine")
    with pytest.raises(ValueError, match="has no training rows"):
        go(small(**FAST | {"task_args": ("train_size=0",)}), folder)
    if there:
        assert (folder / "notes").read_text() == "mine"
        assert not (folder / LOCK).exists()
    else:
        assert not folder.exists()
    where = "in a folder that was there" if there else "in a folder of its own"
    fault(f"a run that fails before checkpoint 0, {where}", "what it made is removed" if not there else "it stays")


def test_a_folder_that_is_removed_ends_the_run(tmp_path, fault):
    folder = tmp_path / "run"

    class Removing(Silent):
        def phase(self, title, total, *, start=0):
            if title == "GRPO":
                shutil.rmtree(folder)
            return super().phase(title, total, start=start)

    with pytest.raises(FileNotFoundError, match=f"^the run folder {folder} was removed or replaced while"):
        go(small(**FAST), folder, screen=Removing())
    assert not folder.exists(), "nothing of it comes back"
    fault("the run folder removed during the run", "the run ends with its name; nothing reappears")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\n", "line 2: is blank"),
        (b"garbage\n", r"line 2: is no JSON object \(.*\): 'garbage'"),
        (b'{"step": 1, "rew\n', "line 2: is no JSON object"),
        (b"\xff\xfe\n", "line 2: is no JSON object"),
        (b"[1]\n", r"line 2: must hold one JSON object, got \[1\]"),
        (b'{"reward": 1}\n', "line 2: has no step"),
        (b'{"step": "1"}\n', "line 2: step must be a whole number, got '1'"),
        (b'{"step": null}\n', "line 2: step must be a whole number, got None"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl"])
def test_a_line_that_cannot_be_read_is_said_with_its_number(tmp_path, name, line, message, fault):
    with RunFolder(tmp_path / "run") as run:
        for step in (1, 2, 3):
            run.log({"iteration": step, "reward": 0.5, "seconds/update": 1.0})
    path = tmp_path / "run" / name
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], line, *lines[1:]]))
    before = content(tmp_path / "run")
    with pytest.raises(ValueError, match=f"{name}, {message}"):
        run_folder(tmp_path / "run", resume_step=2)
    assert content(tmp_path / "run") == before
    fault(f"a blank, cut or foreign line in {name}", "refused with file, line and field; nothing is cut")


def full(times, error=errno.ENOSPC):
    """Work that fails so often, and how often it was asked."""
    asked = []

    def work():
        asked.append(1)
        if len(asked) <= times:
            raise OSError(error, os.strerror(error))
        return "written"

    return work, asked


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_writing_is_tried_again_while_the_run_holds_its_state(error, fault):
    told, slept = [], []
    patience = Patience(told.append, attempts=3, seconds=2, sleep=slept.append)
    work, asked = full(2, error)
    assert patience.write(work, "FILE") == "written"
    assert (len(asked), slept) == (3, [2, 4])
    assert told[0] == f"FILE cannot be written: [Errno {error}] {os.strerror(error)}; attempt 2 of 4 in 2 s"
    work, asked = full(9, error)
    with pytest.raises(StorageError, match=r"^FILE cannot be written: .*; given up after 14 s\. Mend the storage"):
        patience.write(work, "FILE")
    assert len(asked) == 4
    work, asked = full(1, errno.ENOENT)
    with pytest.raises(FileNotFoundError):
        patience.write(work, "FILE")
    fault(f"{os.strerror(error)}, for a while or for good", "tried again, told; then one error")


def test_a_line_is_written_whole_or_not_at_all(tmp_path, fault):
    """A real full device, in the place of a file; and a limit of file sizes, in the middle of a line."""
    told = []
    with RunFolder(tmp_path, tell=told.append) as run:
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        run.patience = run.patience._replace(attempts=1, sleep=lambda _: (tmp_path / "metrics.jsonl").unlink())
        run.log({"iteration": 1, "reward": 0.5})
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward": 0.5}]
    assert "No space left on device" in told[0]
    code = (
        "import resource, sys; from pathlib import Path; from grpo_jax.runs.folder import append_line\n"
        "path = Path(sys.argv[1]); append_line(path, {'step': 1})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))\n"
        "try: append_line(path, {'step': 2, 'text': 'x' * 50})\n"
        "except OSError as error: print(error.strerror)\n"
    )
    path = tmp_path / "lines.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout in ("No space left on device\n", "File too large\n")
    assert path.read_text() == '{"step": 1}\n'
    append_line(path, {"step": 2})
    cut_lines(path, 3)
    fault("a disk that fills up in the middle of a line", "the line is taken back and written again")


@pytest.mark.parametrize("attempts", [1, 0])
def test_a_checkpoint_that_cannot_be_written_is_written_later(tmp_path, attempts, fault):
    """Its folder is a file for a while: told, and then the state that the run holds is written, or one error."""
    folder, away = tmp_path / "checkpoints", tmp_path / "away"
    first, second = (state_of(i, iteration=i) for i in (1, 2))
    told = []

    def mend(seconds):
        folder.unlink()
        away.rename(folder)

    with open_checkpoints(folder) as checkpoints:
        saver = Saver(checkpoints, Patience(told.append, attempts, sleep=mend), before=lambda: None)
        saver.save(first, {})
        checkpoints.wait()
        folder.rename(away)
        folder.write_text("")
        if attempts:
            saver.save(second, {})
            assert told[0].startswith(f"the checkpoint of iteration 2 in {folder} cannot be written: ")
            assert bits(restore(checkpoints, first)[0]) == bits(second)
        else:
            with pytest.raises(StorageError, match=f"^the checkpoint of iteration 2 in {folder} cannot be written: "):
                saver.save(second, {})
            mend(0)
            assert bits(restore(checkpoints, second)[0]) == bits(first)
    what = "for a while" if attempts else "for good"
    outcome = "told, and the state that the run holds is written" if attempts else "one error; the one before stays"
    fault(f"a checkpoint that cannot be written, {what}", outcome)


def test_a_disk_without_room_for_a_state_is_told_before_it_is_written(tmp_path, fault):
    huge = np.broadcast_to(np.float32(0), 2**50)  # of one number in memory
    with pytest.raises(OSError, match=r"No space left on device \(.* bytes, and 4,503,599,6.* are needed\)"):
        check_storage(tmp_path, state_of(0)._replace(reference=huge))
    assert not list(tmp_path.iterdir())
    fault("a disk that has no room for a checkpoint", "told before anything is written; tried again")
