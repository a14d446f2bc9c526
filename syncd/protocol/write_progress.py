"""How far a writer has come with a shard file, for readers that copy a step while it is written.

`.receipts/00001-of-00004.progress` is replaced as the file grows, never synced, and removed before the receipt. It is
a hint: what was read by it counts only if its digest is that of the sealed step's manifest. A trainer leaves none
unless an explorer has `READS_EARLY` in `reads`.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from syncd.errors import CorruptDataError
from syncd.protocol.disk import MISSING, Clock, Disk, is_temporary, list_if_there, temporary_name
from syncd.protocol.documents import Fields, as_document, encode, read_document, record_from
from syncd.protocol.layout import ACTOR, is_relative_name
from syncd.protocol.receipt import Receipt, read_receipts, receipts_directory

SUFFIX = ".progress"
READS_EARLY = "early"  # what an explorer that copies steps while they are written has in `reads`

_PART, _MOST_PART, _PAUSE = 50, 10, 0.25
"""Notes take one part in `_PART` of the time, or one in `_MOST_PART` rather than none for `_PAUSE` seconds."""


@dataclass(frozen=True, slots=True)
class WriteProgress:
    attempt: str
    world_size: int
    name: str  # of the shard file, below `actor/`
    temporary: str  # what it is called until it is whole
    size: int  # of the whole file
    written: int  # bytes that are there, from the first

    @staticmethod
    def from_fields(fields: Fields) -> "WriteProgress":
        progress = record_from(WriteProgress, fields)
        for key, name in (("name", progress.name), ("temporary", progress.temporary)):
            if "/" in name or not is_relative_name(name):
                raise fields.wrong(key, "a name in the step's directory")
        if is_temporary(progress.name) or not is_temporary(progress.temporary):
            raise fields.wrong("temporary", "a temporary name")
        if progress.written > progress.size:
            raise fields.wrong("written", "at most the size")
        return progress


class ProgressNotes:
    """Leaves the progress of one shard file. A note that cannot be written is left out: nothing depends on it.

    `progress` is what is known before the first byte is written.
    """

    def __init__(self, disk: Disk, clock: Clock, path: str, progress: WriteProgress) -> None:
        self._disk, self._clock, self._path, self._progress = disk, clock, path, progress
        self._next = float("-inf")

    def note(self, written: int) -> None:
        """Say that so many bytes are there, from the first; called in order."""
        begun = self._clock.monotonic()
        written = min(written, self._progress.size)
        if begun < self._next and written < self._progress.size:
            return
        document = as_document(self._progress, written=written)
        with contextlib.suppress(OSError):
            self._replace(encode(document))
        now = self._clock.monotonic()
        took = now - begun
        self._next = now + min(_PART * took, max(_PAUSE, _MOST_PART * took))

    def remove(self) -> None:
        """Remove the note: the receipt says the rest."""
        with contextlib.suppress(OSError):
            self._disk.unlink(self._path)

    def _replace(self, data: bytes) -> None:
        directory, name = os.path.split(self._path)
        temporary = f"{directory}/{temporary_name(name)}"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
            self._disk.adopt(temporary)
            os.rename(temporary, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def read_progress(disk: Disk, attempt_path: str) -> list[WriteProgress]:
    """Return how far the shard files of an attempt are, by its notes and receipts.

    What cannot be read does not count; nor does a step stored as changes, or with them: few bytes of it are read.
    """
    receipts = read_receipts(disk, attempt_path)
    if any(receipt.changes for receipt in receipts):
        return []
    whole = (progress for receipt in receipts for progress in _whole(receipt))
    return list({progress.name: progress for progress in (*_notes(disk, attempt_path), *whole)}.values())


def _notes(disk: Disk, attempt_path: str) -> Iterator[WriteProgress]:
    directory = receipts_directory(attempt_path)
    for entry in sorted(list_if_there(disk, directory)):
        if entry.kind == "file" and entry.name.endswith(SUFFIX) and not is_temporary(entry.name):
            with contextlib.suppress(*MISSING, CorruptDataError):
                yield WriteProgress.from_fields(read_document(disk, f"{directory}/{entry.name}"))


def _whole(receipt: Receipt) -> Iterator[WriteProgress]:
    for record in receipt.shards:
        directory, _, name = record.name.rpartition("/")
        if directory == ACTOR and not is_temporary(name):
            yield WriteProgress(receipt.attempt, receipt.world_size, name, name, record.size, record.size)


def shard_path(attempt_path: str, name: str) -> str:
    return f"{attempt_path}/{ACTOR}/{name}"
