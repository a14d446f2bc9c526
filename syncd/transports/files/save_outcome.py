"""The outcome of a save, which all ranks learn through files: a whole step, a rank's failure, or a time-out.

A rank that fails leaves a note beside the receipts, so that the others need not wait for a receipt that will
never come. A rank that was killed leaves nothing; then the others' wait times out.
"""

import contextlib

from syncd.errors import CorruptDataError, StorageError, SyncdError, TimedOutError
from syncd.protocol.disk import MISSING, Clock, list_if_there
from syncd.protocol.documents import encode, read_document
from syncd.protocol.layout import receipt_name
from syncd.protocol.receipt import receipts_directory
from syncd.protocol.writer import StepWriter

_NOTE = ".failed"
_SHORT, _LONG = 0.02, 1.0


class SaveFailedError(StorageError):
    """A rank could not write its part, so the step does not exist."""

    code = "save_failed"


def leave_failure_note(writer: StepWriter, rank: int, error: BaseException) -> None:
    """Leave the note of a failure for the other ranks, if the file system still allows it."""
    name = receipt_name(rank + 1, writer.world_size).removesuffix(".json") + _NOTE
    note = encode(
        {"attempt": writer.attempt, "rank": rank, "error": f"{type(error).__name__}: {error}"[:1000]}
    )
    disk = writer.job.disk
    with contextlib.suppress(OSError, SyncdError):
        writer.begin()  # nothing is added to a step that is sealed, or to a job that is not there
        disk.replace(f"{receipts_directory(writer.path)}/{name}", note)


def wait_until_whole(writer: StepWriter, rank: int, clock: Clock, timeout: float) -> None:
    deadline, pause = clock.monotonic() + timeout, _SHORT
    while not _is_whole(writer, rank):
        _raise_note(writer)
        if clock.monotonic() > deadline:
            raise TimedOutError(
                f"step {writer.step} was not completed by all ranks within {timeout:g} s",
                path=writer.path,
                hint=f"ls {receipts_directory(writer.path)}  # the ranks that are done",
            )
        clock.sleep(pause)
        pause = min(pause * 1.5, _LONG)


def _is_whole(writer: StepWriter, rank: int) -> bool:
    # Whoever left the last receipt has sealed the step, unless it was killed right then: so rank 0 tries too.
    return (rank == 0 and writer.publish_if_whole()) or writer.sealed() is not None


def _raise_note(writer: StepWriter) -> None:
    directory, disk = receipts_directory(writer.path), writer.job.disk
    for entry in list_if_there(disk, directory):
        if not entry.name.endswith(_NOTE) or entry.name.startswith("."):
            continue
        with contextlib.suppress(CorruptDataError, *MISSING):
            fields = read_document(disk, f"{directory}/{entry.name}")
            if fields.text("attempt") == writer.attempt:
                what = f"rank {fields.integer('rank')} could not write its part: {fields.text('error')}"
                raise SaveFailedError(what, path=writer.path)
