"""A reward for code: Python against tests, in a sandbox, judged where the code is not.

Programs are given input and their output is compared here; the right one never enters the sandbox.
Functions run in one sandbox, the tests in another (`code_candidate`, `code_checker`): between them
go only arguments and builtin values, so code that patches `unittest`, replaces `__eq__`, exits or
reads what is in memory meets no test. Left out on purpose: tests that hand the code a function.
"""

import ast
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from grpo_jax.rewards.calling import Reward
from grpo_jax.rewards.extraction import after_thinking
from grpo_jax.rewards.sandbox import (
    NOT_SHUT_IN,
    Limits,
    SandboxError,
    end,
    run,
    started,
    why_not_isolated,
)

LONGEST = 100_000  # bytes of a program
_SURROGATE = re.compile("[\ud800-\udfff]")
_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_PROGRAMS = {side: Path(__file__).with_name(f"code_{side}.py") for side in ("candidate", "checker")}


def python_tests(
    *,
    limits: Limits | None = None,
    graded: bool = False,
    probe: Callable[[], str | None] = why_not_isolated,
) -> Reward:
    """A reward function for Python code: 1 if it passes all of the column `tests`, 0 if not.

    It takes the columns `tests` and, where the row has it, `entry_point` (see `code_reward`).

    Args:
      limits: what a run may use, None for the defaults of `Limits`; each input has a run of its
        own, all tests of functions share one.
      graded: the share of tests that pass, instead.
      probe: says what keeps this machine from shutting a program in, or None.

    Raises:
      SandboxError: the machine cannot isolate a program, and why.
    """
    reason = probe()
    if reason is not None:
        raise SandboxError(f"code cannot be run here, as this machine cannot isolate it: {reason}")
    return partial(code_reward, limits=(limits or Limits()).check(), graded=graded)


def code_reward(
    completion: str,
    tests: Any,
    entry_point: str | Sequence[str] | None = None,
    *,
    limits: Limits,
    graded: bool,
) -> float | None:
    """1 if the code of a completion passes all tests, 0 if not; made by `python_tests`.

    The code is the last block of Markdown after the thinking, or all of it. `tests` is a list of
    `{"input": …, "output": …}`, text for stdin and from stdout, compared but for space at the ends
    of lines; or a list of statements (`assert f(2) == 3`); or a module of tests: its statements, or
    where it defines them `check(candidate)`, called with `entry_point`, functions `test…` and
    `unittest` cases. It may also be JSON of these. Of the code, tests see `entry_point` (a name or
    several), or, where there is none, all names that are not Python's own. `None` if the tests
    cannot be read or run, or call nothing of the code.
    """
    wanted = read_tests(tests)
    if wanted is None:
        return None
    code = python_code(completion)
    if code is None:
        return 0.0
    if isinstance(wanted[0], Mapping):
        passed, count = _programs(code, wanted, limits, graded)
    else:
        names = [entry_point] if isinstance(entry_point, str) else list(entry_point or ())
        result = _functions(code, wanted, [name for name in names if name], limits)
        if result is None:
            return None
        passed, count = result
    return passed / count if graded else float(passed == count)


def python_code(completion: str) -> str | None:
    """The code that a completion answers with; None if it gives none."""
    said = after_thinking(completion)
    if said is None:
        return None
    blocks = [code for language, code in _BLOCK.findall(said) if language.lower() in _LANGUAGES]
    code = blocks[-1] if blocks else said
    written = json.dumps(code)  # as the sandbox is told it; lone surrogates are no text
    whole = code.strip() and "\0" not in code and not _SURROGATE.search(code)
    return code if whole and len(written) <= LONGEST else None


_LANGUAGES = ("", "python", "python3", "py")


def read_tests(tests: Any) -> list | None:
    """Tests as a list, of pairs or of code; None if they are not such."""
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        try:
            tests = json.loads(tests)
        except ValueError:
            return None
    if isinstance(tests, str | Mapping):
        tests = [tests]
    if not isinstance(tests, Sequence) or isinstance(tests, bytes) or not tests:
        return None
    if all(isinstance(test, Mapping) for test in tests):
        right = all({"input", "output"} <= set(test) for test in tests)
        return list(tests) if right else None
    if not all(isinstance(test, str) and _is_code(test) for test in tests):
        return None
    return list(tests)


def _is_code(text: str) -> bool:
    try:
        return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _programs(code: str, pairs: Sequence[Mapping], limits: Limits, graded: bool) -> tuple[int, int]:
    """How many of the pairs a program gets right; the first wrong one decides if not `graded`."""
    passed = 0
    for pair in pairs:
        ran = run(code, limits, stdin=str(pair["input"]).encode())
        right = ran.code == 0 and _lines(ran.output) == _lines(str(pair["output"]).encode())
        passed += right
        if not right and not graded:
            break
    return passed, len(pairs)


def _lines(output: bytes) -> list[str]:
    lines = output.decode(errors="replace").splitlines()
    return [line.rstrip() for line in "\n".join(lines).strip().splitlines()]


def _functions(
    code: str, tests: Sequence[str], entry_points: list[str], limits: Limits
) -> tuple[int, int] | None:
    """How many tests pass, of how many; None where that says nothing of the code."""
    told = _judged(code, tests, entry_points, limits)
    if told is None:
        return 0, 1
    if "unknown" in told or (told["passed"] == told["all"] and not told["calls"]):
        return None
    return told["passed"], told["all"]


def _judged(
    code: str, tests: Sequence[str], entry_points: list[str], limits: Limits
) -> dict | None:
    """The checker's verdict; None if it did not come to one in time."""
    asked = json.dumps({"tests": list(tests), "entry_points": entry_points}).encode()
    for_candidate, from_checker = os.pipe()
    for_checker, from_candidate = os.pipe()
    ends = {for_candidate, from_checker, for_checker, from_candidate}

    def side(name: str, reads: int, writes: int, stdin: bytes, stdout: int) -> Any:
        fds = (reads, writes)
        program = _PROGRAMS[name].read_text()
        arguments = [str(fd) for fd in fds]
        return started(
            program, limits, arguments=arguments, stdin=stdin, stdout=stdout, pass_fds=fds
        )

    try:
        candidate = side(
            "candidate", for_candidate, from_candidate, code.encode(), subprocess.DEVNULL
        )
        checker = side("checker", for_checker, from_checker, asked, subprocess.PIPE)
        with candidate as tried, checker as judge:
            for descriptor in list(ends):  # each is now only where it is used: an end is seen
                os.close(descriptor)
                ends.discard(descriptor)
            return _verdict(judge, tried, limits)
    finally:
        for descriptor in ends:
            os.close(descriptor)


def _verdict(judge: subprocess.Popen, tried: subprocess.Popen, limits: Limits) -> dict | None:
    deadline = time.monotonic() + limits.seconds
    try:
        output, errors = judge.communicate(timeout=limits.seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(judge)
    if judge.returncode == NOT_SHUT_IN and errors.startswith(b"sandbox: "):
        raise SandboxError(errors.decode(errors="replace").strip())
    if tried.poll() == NOT_SHUT_IN and time.monotonic() < deadline and tried.stderr:
        told = os.read(tried.stderr.fileno(), 1000)
        if told.startswith(b"sandbox: "):
            raise SandboxError(told.decode(errors="replace").strip())
    try:
        return json.loads(output)
    except ValueError:
        return None
