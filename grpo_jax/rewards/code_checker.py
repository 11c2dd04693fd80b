"""The side of the tests: runs them where the candidate's code is not, on values that it sends.

Runs as a program in a sandbox of its own. What the tests call is a `Remote`, which asks the
candidate's process and makes builtin values of the answer, so that no method of the candidate
takes part in a comparison and no name of it replaces a builtin. Writes the verdict to its stdout.
"""

import builtins
import contextlib
import importlib
import io
import json
import os
import sys
import types
from typing import Any

MOST_BYTES = 16 << 20


class SendError(Exception):
    """A test hands over what cannot be sent to another process, such as a function."""


class Candidate:
    """The other end: asks, and counts calls."""

    def __init__(self, reading: int, writing: int):
        self.answers = os.fdopen(reading, "rb")
        self.questions = os.fdopen(writing, "w", encoding="utf-8")
        self.calls = 0

    def hear(self, given=(), modules=False):
        """The next value; what a call has changed in place is changed here too."""
        line = self.answers.readline(MOST_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError("the candidate's process has ended")
        message = json.loads(line)
        if "raised" in message:
            raise raised(message["raised"], str(message["text"]))
        for item, told in zip(given, message.get("given", ()), strict=False):
            changed: Any = self.decode(told)
            if type(item) is list and type(changed) is list:
                item[:] = changed
            if isinstance(item, set | dict) and type(changed) is type(item):
                item.clear()
                item.update(changed)
        if modules:  # those that its code has imported, by their names
            found = dict(message["value"]["dict"])
            return {name: self.imported(data) for name, data in found.items()}
        return self.decode(message["value"])

    def imported(self, data):
        if isinstance(data, dict) and "module" in data:
            known = data["module"] in sys.stdlib_module_names
            return importlib.import_module(data["module"]) if known else None
        return self.decode(data)

    def ask(self, do, of, given=(), named=None):
        self.calls += 1
        question = {
            "do": do,
            "of": of,
            "given": [encode(item) for item in given],
            "named": {key: encode(item) for key, item in (named or {}).items()},
        }
        self.questions.write(json.dumps(question) + "\n")
        self.questions.flush()
        return self.hear(given)

    def decode(self, data):
        if data is None or isinstance(data, bool | str):
            return data
        if "held" in data:
            return Remote(self, int(data["held"]), str(data["type"]))
        ((kind, told),) = data.items()
        if kind == "int":
            return int(told)
        if kind == "float":
            return float(told)
        if kind == "complex":
            return complex(*map(float, told))
        if kind == "bytes":
            return bytes.fromhex(told)
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in told}
        kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
        return kinds[kind](map(self.decode, told))


class Remote:
    """A function or an object of the candidate. It equals only itself, whatever it says."""

    def __init__(self, candidate, number, kind):
        vars(self).update(_candidate=candidate, _number=number, _kind=kind)

    def _ask(self, do, *given, **named):
        return self._candidate.ask(do, self._number, given, named)

    def __call__(self, *given, **named):
        return self._ask("call", *given, **named)

    def __getattr__(self, name):
        return self._ask("attribute", name)

    def __setattr__(self, name, value):
        self._ask("set", name, value)

    def __getitem__(self, key):
        return self._ask("item", key)

    def __setitem__(self, key, value):
        self._ask("set item", key, value)

    def __len__(self):
        length = self._ask("length")
        if type(length) is not int:
            raise TypeError("a length must be an integer")
        return length

    def __iter__(self):
        return iter(self._ask("items"))

    def __str__(self):
        return str(self._ask("text"))

    def __repr__(self):
        return str(self._ask("written"))

    def __bool__(self):
        raise TypeError(f"the truth of a {self._kind} of the candidate is not known")

    def __eq__(self, other):
        return isinstance(other, Remote) and other._number == self._number

    def __hash__(self):
        return hash(self._number)


def encode(value):
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Remote):
        return {"held": value._number}
    if isinstance(value, int):
        return {"int": str(value)}
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item) for item in value]}
    if isinstance(value, range | types.GeneratorType | map | filter | zip):
        return {"list": [encode(item) for item in value]}
    raise SendError(f"a {type(value).__name__} cannot be handed to the candidate")


def raised(kinds, text):
    """The candidate's exception, as the nearest of Python's own."""
    own = (getattr(builtins, str(kind), None) for kind in kinds)
    exceptions = [kind for kind in own if isinstance(kind, type) and issubclass(kind, Exception)]
    try:
        return exceptions[0](text) if exceptions else RuntimeError(text)
    except Exception:  # of a kind that takes more than a text
        return RuntimeError(text)


def namespace(found, entry_points):
    """What the tests see of the candidate: the entry points, or where none is named all that is not
    Python's own.

    A helper that tests take from the candidate is one that it can forge; a module of the standard
    library and a builtin are the real ones in any case.
    """
    names = {name: value for name, value in found.items() if not hasattr(builtins, name)}
    for name in set(found) & set(sys.stdlib_module_names):
        with contextlib.suppress(Exception):
            names[name] = importlib.import_module(name)
    if entry_points:
        modules = {key: item for key, item in names.items() if isinstance(item, types.ModuleType)}
        names = modules | {name: found[name] for name in entry_points if name in found}
    for module in ("solution", "candidate"):
        sys.modules[module] = types.ModuleType(module)
        vars(sys.modules[module]).update(names)
    return names | {"__name__": "tests"}


def suites(code, names, entry_points):
    """The tests of a module: `check`, functions `test…`, cases of unittest."""
    import unittest

    before = dict(names)
    exec(compile(code, "tests", "exec"), names)
    # What the tests define, be it under a name that the candidate has too.
    own = {name: value for name, value in names.items() if before.get(name, names) is not value}
    if callable(own.get("check")):
        if not entry_points:
            raise SendError("check(candidate) needs an entry_point")
        yield lambda: own["check"](names[entry_points[0]])
    for name, value in own.items():
        if isinstance(value, types.FunctionType) and name.startswith("test"):
            yield value
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            for test in unittest.defaultTestLoader.loadTestsFromTestCase(value):
                yield test.debug


def holds(test, candidate):
    """Whether a test passes. What it cannot know raises, but only by the tests' own doing."""
    try:
        test()
    except SendError:
        raise
    except ModuleNotFoundError:
        if candidate.calls == 0:
            raise
        return False
    except BaseException:
        return False
    return True


def verdict(tests, entry_points, candidate):
    """How many tests passed, of how many, and in how many calls."""
    try:
        names = namespace(candidate.hear(modules=True), entry_points)
    except BaseException:  # the candidate's code does not even run
        return {"passed": 0, "all": 1, "calls": 0}
    results = []
    for test in tests:
        more: list = []
        run = lambda: more.extend(suites(test, names, entry_points))  # noqa: B023
        ran = holds(run, candidate)
        # A module's tests come when it has run; a bare assert is one by itself.
        results += [holds(one, candidate) for one in more] if ran and more else [ran]
    return {"passed": sum(results), "all": len(results), "calls": candidate.calls}


def main(reading, writing):
    told = os.dup(1)
    asked = json.load(sys.stdin)
    candidate = Candidate(reading, writing)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            result = verdict(asked["tests"], asked["entry_points"], candidate)
        except BaseException as error:
            result = {"unknown": f"{type(error).__name__}: {error}"}
    os.write(told, json.dumps(result).encode())
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
