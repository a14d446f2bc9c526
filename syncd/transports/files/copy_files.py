"""Reads files once, never mapped, and compares their digests; copies in the same pass if asked. Imports no torch."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from syncd.errors import CorruptDataError, RefusedError, TryAgainError
from syncd.protocol.digest import CHUNK, hasher, name_of
from syncd.protocol.disk import Disk
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.receipt import FileRecord

THREADS = 4  # files that are read at once: one thread alone does not fill a fast mount


def copy_files(
    disk: Disk, source: str, target: str, records: Sequence[FileRecord], stop: Callable[[], bool]
) -> None:
    """Copy files into a local directory; each byte of the source is read once. `stop` is polled.

    The directory is made unless it is there.
    """
    make_directories(target, records)
    _read_all(disk, source, records, stop, target)


def make_directories(target: str, records: Sequence[FileRecord]) -> None:
    """Create a directory for files, and those below it that their names need, unless they are there.

    They are for this user only.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(target, 0o700)
    for directory in sorted({os.path.dirname(record.name) for record in records} - {""}):
        os.makedirs(f"{target}/{directory}", 0o700, exist_ok=True)


def check_files(disk: Disk, directory: str, records: Sequence[FileRecord], stop: Callable[[], bool]) -> None:
    """Compare every byte of files with their digests; they are in the page cache afterwards. `stop` is polled."""
    _read_all(disk, directory, records, stop)


def check_copy(directory: str, records: Sequence[FileRecord], stop: Callable[[], bool]) -> None:
    """Check that a directory of this host holds these files, every byte of them, and no other."""
    names = {
        os.path.relpath(f"{path}/{name}", directory)
        for path, directories, files in os.walk(directory)
        for name in (*files, *(name for name in directories if os.path.islink(f"{path}/{name}")))
    }
    if unlisted := names - {record.name for record in records}:
        raise RefusedError(f"{min(unlisted)!a} is no file of the version", path=directory)
    check_files(LocalDisk(), directory, records, stop)


def _read_all(
    disk: Disk, source: str, records: Sequence[FileRecord], stop: Callable[[], bool], target: str = ""
) -> None:
    """Read files; write what was read below `target`, if that is not empty."""

    def read(record: FileRecord, over: Callable[[], bool]) -> None:
        with new_file(f"{target}/{record.name}") if target else contextlib.nullcontext() as copy:
            _read(disk, f"{source}/{record.name}", record, over, copy)

    several_at_once(records, read, stop)


def several_at_once(
    records: Sequence[FileRecord],
    work: Callable[[FileRecord, Callable[[], bool]], object],
    stop: Callable[[], bool],
) -> None:
    """Do something with each of several files, four at once; the first failure ends the work on the others.

    `work` gets a file and what it polls: once that returns true, as it does when `stop` does, the work is given up.
    """
    failed = threading.Event()

    def over() -> bool:
        return failed.is_set() or stop()

    def copy_record(record: FileRecord) -> None:
        try:
            work(record, over)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(THREADS, thread_name_prefix="files") as pool:
        try:
            under_way = [pool.submit(copy_record, record) for record in records]
            errors = [error for job in under_way if (error := job.exception()) is not None]
        except BaseException:
            failed.set()  # leaving the block waits for the threads
            raise
    # Raise the failure that made the others give up, not one of those.
    for error in sorted(errors, key=lambda error: isinstance(error, TryAgainError)):
        raise error


def is_moved(path: str, target: str) -> bool:
    """Move a file of the stage; return False if it is not there any more: its room was taken."""
    with contextlib.suppress(OSError):
        os.rename(path, target)
        return True
    return False


def new_file(path: str) -> BinaryIO:
    return open(path, "xb", opener=lambda path, flags: os.open(path, flags, 0o600))


def _read(
    disk: Disk, source: str, record: FileRecord, stop: Callable[[], bool], copy: BinaryIO | None
) -> None:
    """Read a file once, write each piece into the copy, and compare the file with its record."""
    kind = name_of(record.digest, source)
    state, length = hasher(kind), 0
    while piece := _next(disk, source, length, record.size, stop):
        state.update(piece)
        if copy is not None:
            copy.write(piece)
        length += len(piece)
    digest = f"{kind}:{state.hexdigest()}"
    if length != record.size:
        raise RefusedError(f"{length} bytes where {record.size} were written", path=source)
    if digest != record.digest:
        raise RefusedError(
            f"content does not match its digest: {digest} instead of {record.digest}",
            path=source,
            hint="syncd verify JOB STEP --deep",
        )


def give_up_if(stop: Callable[[], bool], source: str) -> None:
    if stop():
        raise TryAgainError("reading it was given up: told to stop", path=source)


def _next(disk: Disk, source: str, offset: int, size: int, stop: Callable[[], bool]) -> bytes:
    give_up_if(stop, source)
    # Bytes beyond the recorded size are not the step's.
    try:
        return disk.read_at(source, offset, min(CHUNK, size - offset)) if offset < size else b""
    except CorruptDataError as error:
        raise RefusedError(error.message, path=source) from None
