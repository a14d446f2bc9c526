"""Reads each batch of each explorer once and in order, whatever else is in the directories.

Names are found by listing directories, never by asking for a name that may not be there yet. A batch is read
only after the one numbered before it: a listing made while batches arrive may show the later of two alone.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

import structlog

from syncd.errors import CorruptDataError, ProtocolTooNewError
from syncd.experience import batch_paths
from syncd.experience.model import Experience
from syncd.experience.rejected import set_aside
from syncd.experience.table import MAX_BYTES, decode_batch
from syncd.protocol.disk import MISSING, Clock
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from trainer.experience.cursor import BatchCursor, BatchFile
from trainer.experience.limits import UNLIMITED, Limits
from trainer.experience.read_ahead import ReadAhead

Consumed = Literal["delete", "archive"]  # what happens to batches once a saved state covers them


def _retire_batches(
    job: Job, explorer: str, most: int, keep: AbstractSet[BatchFile], consumed: Consumed
) -> int:
    """Remove or archive the batches of an explorer up to a number, all but those to keep; return how many.

    The number is noted first, so that a writer that starts meanwhile uses none of them again.
    """
    present = batch_paths.numbers(job, batch_paths.batches(job, explorer))
    due = sorted(seq for seq in present if seq <= most and BatchFile(explorer, seq) not in keep)
    if due:
        batch_paths.mark_consumed(job, explorer, max(most, batch_paths.consumed_through(job, explorer)))
    return sum(_retire_batch(job, BatchFile(explorer, seq), consumed) for seq in due)


def _retire_batch(job: Job, file: BatchFile, consumed: Consumed) -> bool:
    path = batch_paths.batch(job, *file)
    with contextlib.suppress(*MISSING):
        if consumed == "delete":
            job.disk.unlink(path)
        else:
            directory = batch_paths.archive(job, file.explorer)
            job.disk.make_directory(directory)
            job.disk.rename(path, f"{directory}/{file.seq}{batch_paths.SUFFIX}")
        return True
    return False


SETTLE = 60.0
"""Seconds for which a number may be missing or unreadable while later ones are there: as long as caches last."""

_PAUSE = 1.0  # seconds between two tries to read a batch that a saved state names
_SAVED = BatchFile("", 0)  # stands for all of these where it is noted since when they cannot be read

_BAD = (CorruptDataError, ProtocolTooNewError)


class _UntrainableError(CorruptDataError):
    """A batch holds what could only fail inside the model."""


class LoadedBatch(NamedTuple):
    file: BatchFile
    experiences: tuple[Experience, ...]


class ExperienceReader:
    """The one reader of a job's experiences."""

    def __init__(self, job: Job, clock: Clock | None = None, *, consumed: Consumed = "delete") -> None:
        self.job, self.clock = job, clock or SystemClock()
        self.limits: Limits = UNLIMITED
        self.cursor = BatchCursor()
        self.counts: Counter[str] = Counter()
        self.waiting_files = 0
        self._consumed = consumed
        self._archived: dict[str, set[int]] = {}
        self._stuck: dict[BatchFile, float] = {}
        self._left: set[tuple[str, str]] = set()
        self._log = structlog.get_logger()
        self._ahead = ReadAhead(job, self._decoded)

    def reading_ahead(self, rows: int) -> AbstractContextManager[None]:
        """Read up to so many rows of the batches that are due next, in a thread, while the body runs."""
        return self._ahead.running(self.cursor.through, rows)

    def poll(self) -> Iterator[LoadedBatch]:
        """Yield the batches that have arrived, one of each explorer in turn; stop iterating to read no more.

        Never raises for what it finds: what is not a batch is set aside, what cannot be read now waits.
        """
        present = self._present()
        while progress := self.cursor.after(name for name, seqs in present.items() if seqs):
            for explorer in progress:
                loaded = self._next(explorer, present[explorer])
                self.waiting_files = sum(map(len, present.values()))
                if loaded is not None:
                    yield loaded

    def restore(self, cursor: BatchCursor) -> None:
        """Resume from a saved cursor; batches that were archived after it was saved are read again."""
        self.cursor = cursor
        self._ahead.forget()
        self._stuck.clear()
        self._archived = {
            name: {seq for seq in self._in_archive(name) if seq > cursor.through.get(name, 0)}
            for name in self._explorers()
        }

    def load(self, file: BatchFile) -> tuple[Experience, ...] | None:
        """Return the experiences of a batch that was read before, None if it is gone.

        What cannot be read is read again for `SETTLE` seconds, which all batches of a saved state share.
        """
        try:
            return self._checked(file)
        except _UntrainableError as error:
            self._reject(file.explorer, f"{file.seq}{batch_paths.SUFFIX}", error.message)
        except (OSError, *_BAD) as error:
            if isinstance(error, OSError) and not isinstance(error, MISSING) and not self._is_settled(_SAVED):
                self._note("retried", explorer=file.explorer, seq=file.seq, reason=str(error))
                self.clock.sleep(_PAUSE)
                return self.load(file)
            self._note("lost", explorer=file.explorer, seq=file.seq, reason=str(error))
        return None

    def commit(self, through: dict[str, int], keep: AbstractSet[BatchFile]) -> int:
        """Release the batches that a durably saved state covers and does not name; return how many."""
        retired = 0
        for explorer, most in sorted(through.items()):
            try:
                retired += _retire_batches(self.job, explorer, most, keep, self._consumed)
            except OSError as error:
                # They are removed at the next commit; neither training nor other explorers' batches wait for that.
                self._note("commit_failed", explorer=explorer, reason=str(error))
        return retired

    def _present(self) -> dict[str, set[int]]:
        present = {}
        for explorer in self._explorers():
            seqs = self._listed(explorer) | self._archived.get(explorer, set())
            present[explorer] = {seq for seq in seqs if seq > self.cursor.through.get(explorer, 0)}
        self.waiting_files = sum(map(len, present.values()))
        return present

    def _explorers(self) -> list[str]:
        try:
            return batch_paths.explorers(self.job)
        except OSError as error:
            self._note("unreachable", reason=str(error))
            return []

    def _in_archive(self, explorer: str) -> set[int]:
        try:
            return batch_paths.numbers(self.job, batch_paths.archive(self.job, explorer))
        except OSError as error:
            self._note("unreachable", explorer=explorer, reason=str(error))
            return set()

    def _listed(self, explorer: str) -> set[int]:
        directory = batch_paths.batches(self.job, explorer)
        try:
            entries = self.job.disk.list(directory)
            self.job.disk.refresh(directory)
        except OSError as error:
            self._note("unreachable", explorer=explorer, reason=str(error))
            return set()
        numbers = {entry.name: batch_paths.parse_batch(entry.name) for entry in entries}
        for name, seq in numbers.items():
            if seq is None and name.endswith(batch_paths.SUFFIX) and not name.startswith("."):
                self._reject(explorer, name, "its name is not the number of a batch")
        return {seq for seq in numbers.values() if seq is not None}

    def _next(self, explorer: str, seqs: set[int]) -> LoadedBatch | None:
        """Read one batch, or skip what is not a batch; empty `seqs` if nothing more can be read now."""
        file = BatchFile(explorer, self.cursor.through.get(explorer, 0) + 1)
        if file.seq not in seqs:
            try:
                self._skip_missing(file, seqs)
            except OSError as error:
                self._wait_for_storage(file, seqs, error)
            return None
        loaded = None
        try:
            loaded = LoadedBatch(file, self._checked(file))
        except _BAD as error:
            self._reject(explorer, f"{file.seq}{batch_paths.SUFFIX}", error.message)
        except OSError as error:
            if not self._is_settled(file):
                self._wait_for_storage(file, seqs, error)
                return None
            self._reject(explorer, f"{file.seq}{batch_paths.SUFFIX}", f"cannot be read: {error}")
        self._advance(file, seqs)
        return loaded

    def _checked(self, file: BatchFile) -> tuple[Experience, ...]:
        experiences = self._read(file)
        if problem := self.limits.problem(experiences):
            raise _UntrainableError(problem, path=batch_paths.batch(self.job, *file))
        return experiences

    def _read(self, file: BatchFile) -> tuple[Experience, ...]:
        if (read := self._ahead.take(file)) is not None:
            return read
        try:
            return self._decoded(file)
        except MISSING:
            path = f"{batch_paths.archive(self.job, file.explorer)}/{file.seq}{batch_paths.SUFFIX}"
            return decode_batch(self.job.disk.read(path, MAX_BYTES), path)

    def _decoded(self, file: BatchFile) -> tuple[Experience, ...]:
        path = batch_paths.batch(self.job, *file)
        return decode_batch(self.job.disk.read(path, MAX_BYTES), path)

    def _advance(self, file: BatchFile, seqs: set[int]) -> None:
        self._stuck.pop(file, None)
        seqs.discard(file.seq)
        self.cursor.advance(file)

    def _skip_missing(self, file: BatchFile, seqs: set[int]) -> None:
        """Skip a number that is missing below others if it was rejected, removed or is long overdue."""
        gap = min(seqs) - 1
        removed = min(gap, batch_paths.consumed_through(self.job, file.explorer))
        if removed >= file.seq:
            self._advance(BatchFile(file.explorer, removed), seqs)
        elif file.seq in batch_paths.numbers(self.job, batch_paths.rejected(self.job, file.explorer)):
            self._advance(file, seqs)
        elif self._is_settled(file):
            self._note("missing", explorer=file.explorer, first=file.seq, last=gap)
            self._advance(BatchFile(file.explorer, gap), seqs)
        else:
            seqs.clear()

    def _wait_for_storage(self, file: BatchFile, seqs: set[int], error: OSError) -> None:
        """Read no more of this explorer until the next poll."""
        self._note("retried", explorer=file.explorer, seq=file.seq, reason=str(error))
        seqs.clear()

    def _is_settled(self, file: BatchFile) -> bool:
        now = self.clock.monotonic()
        return now - self._stuck.setdefault(file, now) >= SETTLE

    def _reject(self, explorer: str, name: str, reason: str) -> None:
        if (explorer, name) in self._left:
            return
        try:
            set_aside(self.job, self.clock, explorer, name, reason)
        except OSError as error:
            self._left.add((explorer, name))
            reason = f"{reason}; left where it is: {error}"
        self._note("rejected", explorer=explorer, name=name, reason=reason)

    def _note(self, what: str, **fields: object) -> None:
        self.counts[what] += 1
        with contextlib.suppress(OSError, ValueError):  # a log that is full or closed must not end training
            self._log.warning(f"experience_{what}", **fields)
