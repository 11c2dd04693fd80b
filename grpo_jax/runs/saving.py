"""The checkpoints of a run that goes on: written while it trains, and again where that fails."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from grpo_jax.parallel.processes import is_main_process
from grpo_jax.runs import checkpoint
from grpo_jax.runs.patience import Patience, StorageError
from grpo_jax.runs.quiet import cause_in_a_line
from grpo_jax.training.finite import NonFiniteError
from grpo_jax.types import RunState

# Errors that another attempt meets again: a state that must not or cannot be saved, a run whose
# folder is gone.
FINAL = (NonFiniteError, TypeError, FileNotFoundError, StorageError)


class Saver(NamedTuple):
    """Saves states without waiting for the disk.

    The iterations wait until a state is copied to the host, and no longer; an error of the writing
    is met at the next iteration, which then writes the state that the run holds, as often as
    `patience` says. Under several processes it is met at the next checkpoint and ends the run: the
    others could not know that they must write again.

    Args:
      checkpoints: where.
      patience: how often writing is tried again.
      before: is called before every save; lines that tell of the state are on the disk behind it.
      moving_reference: see `checkpoint.save`.
    """

    checkpoints: checkpoint.Checkpoints
    patience: Patience
    before: Callable[[], None]
    moving_reference: bool = False

    def save(
        self,
        state: RunState,
        record: dict[str, Any],
        held_out: float | None = None,
        *,
        wait: bool = False,
    ) -> None:
        """The checkpoint of a state; `wait` until it is complete."""
        self.before()
        failed = self._failed()
        if failed is None:
            failed = self._attempt(state, record, held_out, wait)
        if failed is not None:
            self._again(failed, state, record, held_out)

    def look(self, state: RunState, record: dict[str, Any]) -> None:
        """Saves the present state where the writing of the one before has failed."""
        if jax.process_count() == 1 and not self.checkpoints.is_saving_in_progress():
            failed = self._failed()
            if failed is not None:
                self._again(failed, state, record, None)

    def _failed(self) -> Exception | None:
        """What ended the writing that has been going on, if it has not succeeded."""
        return self._caught(self.checkpoints.wait)

    def _attempt(
        self, state: RunState, record: dict[str, Any], held_out: float | None, wait: bool
    ) -> Exception | None:
        def write() -> None:
            check_storage(Path(self.checkpoints.directory), state)
            checkpoint.save(
                self.checkpoints,
                state,
                record,
                moving_reference=self.moving_reference,
                held_out=held_out,
                wait=wait,
            )

        return self._caught(write)

    def _caught(self, work: Callable[[], None]) -> Exception | None:
        try:
            work()
        except FINAL:
            raise
        except Exception as error:
            if jax.process_count() > 1:
                raise StorageError(f"a checkpoint failed: {cause_in_a_line(error)}") from error
            return error
        return None

    def _again(
        self,
        failed: Exception,
        state: RunState,
        record: dict[str, Any],
        held_out: float | None,
    ) -> None:
        """Writes a state after a failure, and waits for it."""
        first = [failed]

        def write() -> None:
            if first:
                raise first.pop()
            self.before()
            self.checkpoints.reload()
            if state.iteration in checkpoint.iterations(self.checkpoints):
                return  # it is complete; removing an older one failed
            error = self._attempt(state, record, held_out, True)
            if error is not None:
                raise error

        folder = self.checkpoints.directory
        what = f"the checkpoint of iteration {state.iteration} in {folder}"
        self.patience.write(write, what, again=lambda error: not isinstance(error, FINAL))


def check_storage(folder: Path, state: RunState) -> None:
    """Raises OSError where a state cannot be written to a folder, for space or for another reason.

    Orbax starts many threads, which wait for minutes for one that has failed.
    """
    if not is_main_process():
        return
    probe = folder / ".probe"
    probe.mkdir(exist_ok=True)
    probe.rmdir()
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves((state.train, state.reference)))
    free = shutil.disk_usage(folder).free
    if free < needed:
        told = f"{os.strerror(errno.ENOSPC)} ({free:,} bytes, and {needed:,} are needed)"
        raise OSError(errno.ENOSPC, told)
