"""Tells a person at a terminal which reward a run is waiting for."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 10.0


@contextmanager
def waiting(name: str, after: float = PATIENCE) -> Iterator[None]:
    """Writes one line to stderr if what it holds takes longer than `after` seconds."""
    timer = threading.Timer(after, _tell, (name, after))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell(name: str, after: float) -> None:
    print(f"waiting for reward {name!r} for more than {after:g} seconds …", file=sys.stderr)
