"""Code against tests: what is right passes, and nothing that a program tries on its judge, or on the machine, pays."""

import os
import socket
import time
from pathlib import Path

import pytest
from grpo_jax.rewards import python_tests, score
from grpo_jax.rewards.code import python_code, read_tests
from grpo_jax.rewards.sandbox import Limits, run, started, why_not_isolated

LIMITS = Limits(seconds=15.0, memory=256 << 20)
BRIEF = LIMITS._replace(seconds=1.0, output=1 << 16)  # for what would never end
ADD = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
DOUBLE = [{"input": "2\n", "output": "4\n"}, {"input": "5", "output": "10"}]

shut_in = pytest.mark.skipif(why_not_isolated() is not None, reason=f"no sandbox here: {why_not_isolated()}")
pytestmark = shut_in


def judged(code, tests=ADD, entry_point=None, **options):
    reward = python_tests(**{"limits": LIMITS} | options)
    return reward(completion=code, tests=tests, entry_point=entry_point)


RIGHT = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    ("code", "tests", "entry_point"),
    [
        (RIGHT, ADD, None),
        (f"First I think.\n```python\n{RIGHT}```\nDone.", ADD, "add"),
        (f"<think>```python\nadd = None\n```</think>```\n{RIGHT}```", ADD, None),
        (RIGHT, "\n".join(ADD), None),
        (RIGHT, "def check(candidate):\n    assert candidate(2, 2) == 4\n", "add"),
        (RIGHT, "import solution\ndef test_it():\n    assert solution.add('a', 'b') == 'ab'", None),
        (
            RIGHT,
            "import unittest\nclass T(unittest.TestCase):\n"
            "    def test(self):\n        self.assertEqual(add([1], [2]), [1, 2])",
            None,
        ),
        ("import math\ndef root(x): return math.sqrt(x)", "assert math.isclose(root(2), 1.41421356237)", None),
        ("def f(x): x.sort()", "x = [3, 1]\nf(x)\nassert x == [1, 3]", None),
        ("def f(x):\n    if x < 0: raise ValueError('no')\n    return x",
         "try:\n    f(-1)\n    assert False\nexcept ValueError: pass", None),
        (
            "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
            "    def __len__(self): return len(self.items)",
            "s = Stack()\ns.push(3)\nassert s.items == [3] and len(s) == 1",
            None,
        ),
        ("def evens(n):\n    for i in range(0, n, 2): yield i", "assert list(evens(5)) == [0, 2, 4]", None),
        ("def f(): return {(1, 2): {3.5}, 'a': [None, True, b'x', 2j, 10**40]}",
         "assert f() == {(1, 2): {3.5}, 'a': [None, True, b'x', 2j, 10**40]}", None),
        ("print(2 * int(input()))", DOUBLE, None),
        ("import sys\nprint(2 * int(sys.stdin.read()), end='')", DOUBLE, None),
        ("print(2 * int(input()))", '[{"input": "2", "output": "4"}]', None),
    ],
)  # fmt: skip
def test_right_code_passes(code, tests, entry_point):
    assert judged(code, tests, entry_point) == 1.0


@pytest.mark.parametrize(
    "code",
    [
        "def add(a, b): return a - b",
        "def sub(a, b): return a + b",
        "not code (",
        "",
        "```python\n```",
        f"<think>{RIGHT}",
    ],
)
def test_wrong_or_no_code_does_not(code):
    assert judged(code) == 0.0


def test_a_share_where_it_is_graded():
    assert judged("def add(a, b): return 3", graded=True) == 0.5
    assert judged("print(4)", DOUBLE, graded=True) == 0.5
    assert judged("print(4)", DOUBLE) == 0.0


# What a program may try. Each has a right answer somewhere near, and none gets it.


def programs(name):
    """The programs of a file, by the headings over them."""
    text = (Path(__file__).parent / "data" / f"{name}.txt").read_text()
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in text.removeprefix("## ").split("\n## ")}


ON_ITS_JUDGE = programs("attacks_on_the_judge")
ON_THE_MACHINE = programs("attacks_on_the_machine")
ENDLESS = ("an endless answer", "a deep answer")


@pytest.mark.parametrize("name", ON_ITS_JUDGE)
def test_a_program_gets_nothing_of_its_judge(name):
    assert judged(ON_ITS_JUDGE[name], limits=BRIEF if name in ENDLESS else LIMITS) == 0.0


@pytest.mark.parametrize("name", ON_THE_MACHINE)
def test_a_program_gets_nothing_of_the_machine(name):
    with socket.create_server(("127.0.0.1", 0)) as server:
        deed = ON_THE_MACHINE[name].replace("{port}", str(server.getsockname()[1]))
        begun = time.monotonic()
        assert judged(f"{deed}\nprint(2 * int(input()))", DOUBLE, limits=BRIEF) == 0.0
        assert time.monotonic() - begun < 20


@pytest.mark.parametrize("name", ["a fork bomb that goes on", "an endless loop", "ten gigabytes", "killing everything"])
def test_nor_does_a_function(name):
    inside = "\n    ".join(ON_THE_MACHINE[name].splitlines())
    assert judged(f"def add(a, b):\n    {inside}\n    return a + b", limits=BRIEF) == 0.0


def test_nothing_outlives_a_run():
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
    code += "    os.close(0); os.close(1)\n    time.sleep(600)\nprint('on')"
    mine = f"/sandbox-{os.getpid()}"
    assert run(code, LIMITS, arguments=[mine]).output == b"on\n"
    with started("import time; time.sleep(600)", LIMITS, arguments=[mine]):
        time.sleep(0.5)
        assert len(running(mine)) >= 1
    time.sleep(0.2)
    assert running(mine) == []


def running(argument):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if argument.encode() in file.read():
                    found.append(pid)
        except OSError:
            continue
    return found


def test_each_limit_is_one():
    eats = "x = bytearray(100 << 20)\nprint(1)"
    assert run(eats, LIMITS).code == 0
    assert run(eats, LIMITS._replace(memory=64 << 20)).code != 0
    forks = "import os\nfor _ in range(3):\n    if os.fork() == 0:\n"
    forks += "        import time; time.sleep(1); os._exit(0)\nprint(1)"
    assert run(forks, LIMITS._replace(processes=4)).output == b"1\n"
    assert run(forks, LIMITS._replace(processes=2)).code != 0
    assert run("print('x' * 5000)", LIMITS._replace(output=6000)).ended_by == ""
    assert run("print('x' * 5000)", LIMITS._replace(output=4000)).ended_by == "output"
    writes = "open('/tmp/x', 'wb').write(bytes(2 << 20)); print(1)"
    assert run(writes, LIMITS).output == b"1\n"
    assert run(writes, LIMITS._replace(scratch=1 << 20)).code != 0
    slow = "import time; time.sleep(5); print(1)"
    assert run(slow, LIMITS._replace(seconds=0.5)).ended_by == "seconds"
    spins = run("while True: pass", LIMITS._replace(seconds=1))
    assert spins.code < 0


def test_two_runs_do_not_meet():
    assert run("open('/tmp/x', 'w').write('1'); print(1)", LIMITS).output == b"1\n"
    assert run("import os; print(os.listdir('/tmp'))", LIMITS).output == b"[]\n"


# Tests that say nothing.


@pytest.mark.parametrize(
    "tests",
    [None, "", [], "def (", ["assert add(1, 2) == 3", "def ("], [{"input": "1"}], 3, "[1, 2]", "# nothing",
     "assert True", "def check(candidate):\n    assert candidate(1, 2) == 3",
     "import no_such_module\nassert add(1, 2) == 3", "assert add(1, object()) == 3"],
)  # fmt: skip
def test_tests_that_cannot_be_read_or_call_nothing_score_nothing(tests):
    assert judged(RIGHT, tests) is None


CHECKS = [
    "def check(candidate):\n    assert candidate(1, 2) == 3",
    "def test_add():\n    assert add(1, 2) == 3",
    "assert add(add(1, 2), 3) == 6",
]


@pytest.mark.parametrize("name", [name for name in ON_ITS_JUDGE if name.startswith("no verdict")])
def test_nor_can_a_program_have_itself_left_unscored(name):
    for tests in CHECKS:
        assert judged(ON_ITS_JUDGE[name], tests, "add") == 0.0


def test_a_program_that_is_too_long_or_no_text_is_wrong_and_ends_nothing():
    assert judged("a = 1\n" * 50_000, DOUBLE) == 0.0
    assert judged("a = '\ud800'", DOUBLE) == 0.0
    assert judged("a = '\0'") == 0.0


def test_a_helper_that_the_code_brings_is_not_seen_beside_an_entry_point():
    forged = "class math:\n    isclose = staticmethod(lambda *a: True)\nnear = lambda *a: True\ndef root(x): return 0"
    assert judged(forged, "assert math.isclose(root(2), 1.41421356)", None) == 0.0
    assert judged(forged, "assert near(root(2), 1.41421356)", "root") == 0.0


def test_it_is_a_reward_of_rows_and_works_in_workers():
    rows = [{"tests": ADD, "entry_point": "add"}]
    for workers in (0, 1):
        scores = score(python_tests(limits=LIMITS), rows, ["q"], [[RIGHT, "x"]], workers=workers)
        assert scores.reward_PG.tolist() == [[1.0, 0.0]]


def test_which_code_of_a_completion():
    assert python_code("a = 1") == "a = 1"
    assert python_code("```py\na = 1\n```\n```json\n{}\n```") == "a = 1\n"
    assert python_code("```python\na\n```\n```python\nb\n```") == "b\n"
    assert python_code("<think>") is None
    assert read_tests('["assert a"]') == ["assert a"]
