"""One full checkpoint on its way to disk: a thread of each rank writes, and that of rank 0 completes it.

The threads use no collectives. They learn through files that the step is sealed, that there is a directory for the
training state, and that every rank has written its part.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import nullcontext
from threading import Event, Thread
from typing import Any

from syncd.errors import StorageError, SyncdError, TimedOutError, storage_errors
from syncd.protocol.disk import MISSING
from syncd.protocol.manifest import read_manifest
from syncd.transports.ranks import all_or_error
from trainer import checkpoints
from trainer.engines.base import EngineContext
from trainer.engines.state_copy import CapturedState

_SHORT, _LONG = 0.01, 0.25
_TURN = 0.1  # seconds after which the ranks that wait for a save ask each other whether one has failed


class SaveAbandonedError(StorageError):
    """Another rank's part of the checkpoint failed, so this one's is not needed."""

    code = "save_abandoned"


class CheckpointSave:
    """The save of one full checkpoint; `start` begins it. All ranks make the same calls.

    Args:
        step: The step, whose weights are on their way or sealed.
        attempt: The save of its weights; empty if they are sealed.
        save: A name that the ranks share in this save and that no other save has.
        captured: This rank's training state; None if the checkpoint has one already.
        state: The loop's state; rank 0's counts.
        as_hf: Whether to add a complete Hugging Face directory.
    """

    def __init__(
        self,
        context: EngineContext,
        step: int,
        attempt: str,
        save: str,
        captured: CapturedState | None,
        state: Mapping[str, Any],
        *,
        as_hf: bool,
    ) -> None:
        self.step = step
        self._context, self._attempt, self._save = context, attempt, save
        self._captured, self._state, self._as_hf = captured, state, as_hf
        self._timeout = context.config.sync.save_timeout
        self._abandoned = Event()
        self._done: Future[None] = Future()

    def start(self) -> None:
        """Begin to write, in a thread that does not delay the exit of the process."""
        Thread(target=self._run, name="checkpoint", daemon=True).start()

    @property
    def is_saved(self) -> bool:
        """Return whether this rank's part is durable; rank 0's is the whole checkpoint."""
        return self._done.done() and not self._done.exception()

    @property
    def has_failed(self) -> bool:
        return self._done.done() and bool(self._done.exception())

    def wait(self) -> None:
        ranks = self._context.ranks
        while True:
            wait([self._done], _TURN)
            states = ranks.gather((self._done.done(), self.has_failed))
            if any(has_failed for _, has_failed in states):
                self.abandon()
            if all(is_done for is_done, _ in states):
                break
        try:
            all_or_error(ranks, self._result)
        except SyncdError:
            self._discard()
            raise

    def abandon(self) -> None:
        """Have the thread stop waiting for the weights, or for other ranks."""
        self._abandoned.set()

    def close(self) -> None:
        """Wait for this rank's thread, without the other ranks: until it has ended it reads what was captured."""
        wait([self._done], self._timeout)
        self.abandon()

    def _result(self) -> None:
        with contextlib.suppress(SaveAbandonedError):
            self._done.result()

    def _run(self) -> None:
        try:
            with storage_errors(self._context.job.step(self.step)):
                self._write()
        except Exception as error:  # noqa: BLE001 - raised by whoever waits
            self._done.set_exception(error)
        else:
            self._done.set_result(None)

    def _write(self) -> None:
        if self._attempt:
            self._wait_for(self._is_sealed)
        client = self._context.client
        with client.lease(self.step) if client else nullcontext():
            if self._captured is not None:
                self._write_training(self._captured)
            if self._context.ranks.rank == 0:
                self._complete()

    def _write_training(self, captured: CapturedState) -> None:
        job, ranks, timeout = self._context.job, self._context.ranks, self._timeout
        if ranks.rank == 0:
            checkpoints.begin_training(job, self._save, self._context.fence)
        else:
            self._wait_for(lambda: checkpoints.is_begun(job, self._save), timeout)
        directory = checkpoints.staged_directory(job, self._save)
        checkpoints.sync_files(job, directory, captured.write(directory))
        checkpoints.note_written(job, directory, ranks.rank)

    def _complete(self) -> None:
        context, save = self._context, self._save if self._captured is not None else ""
        if save:
            directory = checkpoints.staged_directory(context.job, save)
            count = context.ranks.world_size
            self._wait_for(lambda: checkpoints.is_written(context.job, directory, count), self._timeout)
        checkpoints.complete(
            context.job, self.step, self._state, save=save, as_hf=self._as_hf, fence=context.fence
        )

    def _is_sealed(self) -> bool:
        """Return whether the step holds the weights of this save; if it never will, waiting for them tells."""
        job = self._context.job
        job.disk.refresh(job.root)
        try:
            return read_manifest(job.disk, job.step(self.step)).attempt == self._attempt
        except MISSING:
            return False

    def _wait_for(self, condition: Callable[[], bool], timeout: float = float("inf")) -> None:
        end, pause = time.monotonic() + timeout, _SHORT
        while not condition():
            if self._abandoned.wait(pause):
                raise SaveAbandonedError("another rank's part of the checkpoint failed")
            if time.monotonic() > end:
                path = self._context.job.step(self.step)
                hint = "read the log of the rank that has not written its part"
                raise TimedOutError(f"a rank has not written within {timeout:g} s", path=path, hint=hint)
            pause = min(pause * 1.5, _LONG)

    def _discard(self) -> None:
        """Remove what was written, once no rank writes any more: if the disk is full, its space is needed."""
        context = self._context
        if context.ranks.rank == 0 and self._captured is not None:
            checkpoints.discard_training(context.job, self._save, context.fence)
