"""Functions of a caller's own: found by FILE.py:FUNCTION, told with file and line where they are not."""

import inspect
import pickle
import sys

import pytest
from grpo_jax.tasks import load_function, make_task
from grpo_jax.tasks.user_code import is_reference

FILE = """
from math import sqrt
import dataclasses

@dataclasses.dataclass
class Near:
    scale: float = 1.0
    def __call__(self, completion, answer):
        return -abs(float(completion) - float(answer)) * self.scale

near = Near()
calls = []

def count(completion):
    calls.append(completion)
    return len(calls)

def broken(*, size=3):
    return size / 0
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(FILE)
    return path


def test_a_function_of_a_file(file, monkeypatch):
    before = list(sys.path)
    monkeypatch.chdir(file.parent)
    for name in (f"{file}:count", "rewards.py:count", f"./{file.name}:count"):
        assert load_function(name).__name__ == "count"
    first, second = load_function(f"{file}:count"), load_function("rewards.py:count")
    assert [first("a"), second("b")] == [1, 2], "a file is run once, whoever names it"
    assert load_function(f"{file}:near")("3", "5") == -2
    assert sys.path == before
    assert sorted(path.name for path in file.parent.iterdir()) == ["rewards.py"], "nothing is written beside it"
    assert "len(calls)" in inspect.getsource(first)
    assert pickle.loads(pickle.dumps(first)) is first
    file.write_text(FILE.replace("len(calls)", "7"))
    assert load_function(f"{file}:count")("a") == 7, "a file that has changed is run again"


def test_a_function_of_a_module():
    assert load_function("math:sqrt")(4) == 2
    assert load_function("os.path:join")("a", "b") == "a/b"
    assert all(map(is_reference, ["a.py:f", "a/b.py:f", "a.b:f"]))
    assert not any(map(is_reference, ["f", "a.py", "a.py:", ":f", "a.py:f()"]))


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (FILE, "cuont", r"no function 'cuont'; did you mean 'count'\? there are: Near, near, count, broken"),
        (FILE, "calls", r"rewards\.py holds no function, but a value, at 'calls'"),
        ("x = 1\ndef f(:\n", "f", r"rewards\.py, line 2: invalid syntax"),
        ("\n\nimport nowhere\n", "f", r"rewards\.py, line 3: ModuleNotFoundError: No module named 'nowhere'$"),
        ("import other\n", "f", r"line 1: .*'other'; a file beside it is not found by its name: install both"),
        ("def g():\n    return 1 / 0\n\ng()\n", "f", r"rewards\.py, line 2: ZeroDivisionError: division by zero"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_told(tmp_path, text, name, message):
    path = tmp_path / "rewards.py"
    path.write_text(text)
    (tmp_path / "other.py").write_text("")
    modules = set(sys.modules)
    with pytest.raises(ValueError, match=message):
        load_function(f"{path}:{name}")
    assert set(sys.modules) - modules <= {m for m in sys.modules if m.startswith("grpo_jax_file_") and text == FILE}


def test_what_is_not_there_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nowhere\.py, which"):
        load_function(f"{tmp_path}/nowhere.py:f")
    with pytest.raises(ValueError, match=r"there is no module 'nowhere', .* a file is named with its ending"):
        load_function("nowhere:f")
    with pytest.raises(ValueError, match=r"expected FILE\.py:FUNCTION or module:function, got 'near'"):
        load_function("near")


def test_a_task_that_fails_is_told_with_its_line(file):
    line = FILE.splitlines().index("    return size / 0") + 1
    with pytest.raises(ValueError, match=rf"rewards\.py, line {line}: ZeroDivisionError"):
        make_task(f"{file}:broken", {"size": 2})
    file.write_text("def f():\n    return 3\n")
    with pytest.raises(ValueError, match=r"rewards\.py:f must return a Task, got int"):
        make_task(f"{file}:f", {})
