"""Functions of a caller's own, by FILE.py:FUNCTION or module:function.

A file is run as a module of its own. It changes neither `sys.path` nor the folder that it lies in,
so it imports what is installed, and no file beside it.
"""

import hashlib
import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_jax.options import did_you_mean


def is_reference(text: str) -> bool:
    """Whether a text names a function in a file or module, as FILE.py:FUNCTION does."""
    place, _, name = text.rpartition(":")
    return bool(place) and name.isidentifier()


def load_function(reference: str) -> Callable[..., Any]:
    """The function that FILE.py:FUNCTION or module:function names.

    Raises ValueError, with file and line, where the file cannot be run or has no such function, and
    FileNotFoundError where there is no such file.
    """
    place, _, name = reference.rpartition(":")
    if not is_reference(reference):
        raise ValueError(f"expected FILE.py:FUNCTION or module:function, got {reference!r}")
    if place.endswith(".py"):
        path = Path(place).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {place}, which {reference!r} names")
        module = run_file(path.resolve(), path.stat().st_mtime_ns)
    else:
        module = imported(place, reference)
    found = getattr(module, name, None)
    if not callable(found):
        values = vars(module).items()
        own = [key for key, value in values if getattr(value, "__module__", "") == module.__name__]
        what = "has no function" if found is None else "holds no function, but a value, at"
        raise ValueError(f"{place} {what} {name!r}{nearest(name, own)}")
    return found


def nearest(name: str, known: Any) -> str:
    """`; did you mean 'x'? There are: x, y`, for a message."""
    known = list(known)
    return f"{did_you_mean(name, known) or ';'} there are: {', '.join(known) or 'none'}"


def imported(name: str, reference: str) -> ModuleType:
    """An installed module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(error.name or name):
            raise
        raise ValueError(
            f"there is no module {name!r}, which {reference!r} names; a file is named with its "
            "ending, as path/to/file.py:function"
        ) from error


@cache
def run_file(path: Path, changed: int) -> ModuleType:
    """The file as a module; `changed` is its time, so that an edited file is run again."""
    # A module of its own name: classes and functions of it can be found again by pickle.
    name = f"grpo_jax_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    try:
        # Not by an import: that would write a __pycache__ beside the file.
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except SyntaxError as error:
        del sys.modules[name]
        raise ValueError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
    except Exception as error:
        del sys.modules[name]
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if own(f, path)]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise ValueError(
            f"{where}: {type(error).__name__}: {error}{advice(error, path)}"
        ) from error
    return module


def own(frame: traceback.FrameSummary, path: Path) -> bool:
    return frame.filename == str(path)


def advice(error: Exception, path: Path) -> str:
    """What to do where a file imports one that lies beside it."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name and (path.parent / f"{name.partition('.')[0]}.py").exists():
        return (
            "; a file beside it is not found by its name: install both as a package, or set "
            "PYTHONPATH"
        )
    return ""


def call_with(function: Callable[..., Any], options: Mapping[str, Any], reference: str) -> Any:
    """What a function of the caller's returns, with an error that names file and line."""
    try:
        return function(**options)
    except Exception as error:
        path = getattr(sys.modules.get(function.__module__), "__file__", None)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        where = f"{path}, line {lines[-1]}" if lines else reference
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
