"""What a library's threads print about an error that is told in one sentence is kept back."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

LOGGERS = ("absl", "asyncio", "root")


@contextmanager
def errors_told_once() -> Iterator[None]:
    """Inside, an error is raised and nothing else is said of it.

    Orbax reads a checkpoint with coroutines; where one fails, those of the other arrays write a
    traceback each, by the hooks of the interpreter and as log messages, some of them only when they
    are collected: whoever catches an error here should collect garbage here.
    """
    loggers = {name: logging.getLogger(name) for name in LOGGERS}
    levels = {name: logger.level for name, logger in loggers.items()}
    hooks = sys.excepthook, sys.unraisablehook
    for logger in loggers.values():
        logger.setLevel(logging.CRITICAL + 1)
    sys.excepthook = sys.unraisablehook = lambda *_: None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            yield
    finally:
        sys.excepthook, sys.unraisablehook = hooks
        for name, logger in loggers.items():
            logger.setLevel(levels[name])


def cause_in_a_line(error: BaseException, length: int = 200) -> str:
    """The first line of what an error was caused by in the end."""
    while (cause := _cause(error)) is not None:
        error = cause
    text = str(error).strip()
    if isinstance(error, KeyError) or not text:
        text = f"{type(error).__name__} {text}".strip()
    line = text.splitlines()[0].partition(" [tensorstore_spec")[0].rstrip(".:")
    return line if len(line) <= length else line[:length] + "…"


def _cause(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__
