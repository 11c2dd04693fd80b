"""Writing that fails for now is tried again while the run holds what it has to write.

A disk that is full, a share that is away: someone frees space, the share comes back. Each attempt
is told; after the last one the run ends with one error, and goes on from its newest checkpoint when
it is resumed.
"""

import errno
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from grpo_jax.runs.quiet import cause_in_a_line

# A disk that is full or read-only, a quota, a limit of file sizes, a share that is away.
TRANSIENT = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EFBIG,
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EACCES,
    }
)


class StorageError(OSError):
    """What a run has to write cannot be written."""


def passes_with_time(error: BaseException) -> bool:
    """Whether an error of the system is one that another attempt may not meet."""
    return isinstance(error, OSError) and error.errno in TRANSIENT


class Patience(NamedTuple):
    """How often and how fast writing is tried again: after `seconds`, then twice that, and so on.

    Five attempts after the first, over five minutes, by default.
    """

    tell: Callable[[str], None]
    attempts: int = 5
    seconds: float = 10.0
    sleep: Callable[[float], None] = time.sleep

    def write(
        self,
        work: Callable[[], Any],
        what: str,
        *,
        again: Callable[[BaseException], bool] = passes_with_time,
    ) -> Any:
        """`work()`, until it succeeds. Raises StorageError, with the cause, when patience ends.

        Args:
          work: writes; it is called anew for each attempt.
          what: its object, for messages.
          again: whether an error is one to try again after; others are raised as they are.
        """
        waited = 0.0
        for attempt in range(self.attempts + 1):
            try:
                return work()
            except Exception as error:
                if not again(error):
                    raise
                cause = cause_in_a_line(error)
            if attempt < self.attempts:
                pause = self.seconds * 2**attempt
                count = f"attempt {attempt + 2} of {self.attempts + 1} in {pause:g} s"
                self.tell(f"{what} cannot be written: {cause}; {count}")
                self.sleep(pause)
                waited += pause
        raise StorageError(
            f"{what} cannot be written: {cause}; given up after {waited:g} s. Mend the storage and "
            "continue the run with --resume."
        )
