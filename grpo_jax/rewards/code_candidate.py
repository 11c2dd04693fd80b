"""The side of a candidate: runs its code and answers calls, one JSON line each, knowing no test.

Runs as a program in a sandbox, with two descriptors as its arguments. Whatever it sends is only
data to the checker; see `code_checker`.
"""

import itertools
import json
import os
import sys
import types

MOST_ITEMS = 100_000
held: dict = {}


def encode(value):
    """A value as JSON: builtin ones by what they hold, others by a number to call them with."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return {"int": str(int.__int__(value))}
    if isinstance(value, float):
        return {"float": float.__repr__(value)}
    if isinstance(value, complex):
        return {"complex": [float.__repr__(value.real), float.__repr__(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in dict.items(value)]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item) for item in kind.__iter__(value)]}  # type: ignore[arg-type]
    if isinstance(value, types.ModuleType):
        return {"module": value.__name__}
    held[id(value)] = value
    return {"held": id(value), "type": type(value).__name__}


def decode(data):
    """The value that the checker means."""
    if not isinstance(data, dict):
        return data
    ((kind, told),) = data.items()
    if kind == "held":
        return held[told]
    if kind == "int":
        return int(told)
    if kind == "float":
        return float(told)
    if kind == "complex":
        return complex(*map(float, told))
    if kind == "bytes":
        return bytes.fromhex(told)
    if kind == "dict":
        return {decode(key): decode(item) for key, item in told}
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](
        map(decode, told)
    )


def deed(asked, given, named):
    """What the checker asks for: a call, an attribute, an item, a length, items, a text."""
    target = held[asked["of"]]
    what = asked["do"]
    if what == "call":
        return target(*given, **named)
    if what == "attribute":
        return getattr(target, *given)
    if what == "set":
        return setattr(target, *given)
    if what == "item":
        return target[given[0]]
    if what == "set item":
        target[given[0]] = given[1]
        return None
    if what == "items":
        return list(itertools.islice(target, MOST_ITEMS))
    return {"length": len, "text": str, "written": repr}[what](target)


def done(asked):
    """The value, and what the call has made of the lists, sets and mappings that it was given."""
    given = [decode(item) for item in asked["given"]]
    named = {key: decode(item) for key, item in asked["named"].items()}
    value = encode(deed(asked, given, named))
    changed = [encode(item) if isinstance(item, list | set | dict) else None for item in given]
    return {"value": value, "given": changed}


def main(reading: int, writing: int) -> None:
    questions = os.fdopen(reading, "r", encoding="utf-8")
    answers = os.fdopen(writing, "w", encoding="utf-8")

    def answer(make):
        try:
            line = json.dumps(make())
        except BaseException as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            line = json.dumps({"raised": kinds, "text": str(error)[:1000]})
        answers.write(line + "\n")
        answers.flush()

    code = sys.stdin.read()
    solution = types.ModuleType("solution")
    sys.modules["solution"] = solution

    def load():
        exec(compile(code, "solution.py", "exec"), vars(solution))
        public = {name: value for name, value in vars(solution).items() if name[:2] != "__"}
        return {"value": encode(public)}

    answer(load)
    for line in questions:
        asked = json.loads(line)
        answer(lambda: done(asked))  # noqa: B023 - called at once


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
