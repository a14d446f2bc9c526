"""Reads the batches that are due next in a thread, while the engine trains.

It only saves time: what it has read is used instead of reading the file once more. Which batches are read, in which
order, and what happens to bad ones is decided without it (trainer.experience.store).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from itertools import count, takewhile, zip_longest
from threading import Event, Thread

from syncd.errors import SyncdError
from syncd.experience import batch_paths
from syncd.experience.model import Experience
from syncd.protocol.layout import Job
from trainer.experience.cursor import BatchFile

Read = Callable[[BatchFile], tuple[Experience, ...]]


class ReadAhead:
    """Batches that `read`, called in a thread, has read and decoded before they were asked for.

    A batch never changes once its name is there, so what was read of it stays right.
    """

    def __init__(self, job: Job, read: Read) -> None:
        self._job, self._read = job, read
        self._batches: dict[BatchFile, tuple[Experience, ...]] = {}
        self._thread: Thread | None = None

    @contextlib.contextmanager
    def running(self, through: Mapping[str, int], rows: int) -> Iterator[None]:
        """Read during the body; a batch that is being read when it ends is read to its end.

        `through` has the last number of each explorer that was asked for. No batch is read once `rows` rows are held.
        """
        stop = Event()
        if self._thread is None or not self._thread.is_alive():
            # Without those that were read while somebody else read them too.
            due = {
                file: rows for file, rows in self._batches.items() if file.seq > through.get(file.explorer, 0)
            }
            self._batches = due
            work = Thread(target=self._fill, args=(dict(through), rows, stop), name="read-ahead", daemon=True)
            self._thread = work
            work.start()
        try:
            yield
        finally:
            stop.set()

    def take(self, file: BatchFile) -> tuple[Experience, ...] | None:
        return self._batches.pop(file, None)

    def forget(self) -> None:
        """Forget what was read: another cursor is in force."""
        self._batches = {}

    def _fill(self, through: Mapping[str, int], rows: int, stop: Event) -> None:
        # Whatever fails here is met again, and dealt with, where the batch is asked for.
        with contextlib.suppress(OSError, SyncdError):
            held = self._batches
            for file in self._due(through):
                if stop.is_set() or sum(map(len, list(held.values()))) >= rows:
                    return
                if file not in held:
                    held[file] = self._read(file)

    def _due(self, through: Mapping[str, int]) -> Iterator[BatchFile]:
        """Yield the batches that are there, one of each explorer in turn, up to the first that is missing."""
        due = []
        for explorer in batch_paths.explorers(self._job):
            there = batch_paths.numbers(self._job, batch_paths.batches(self._job, explorer))
            after = takewhile(there.__contains__, count(through.get(explorer, 0) + 1))
            due.append([BatchFile(explorer, seq) for seq in after])
        for turn in zip_longest(*due):
            yield from filter(None, turn)
