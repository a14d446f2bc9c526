"""Reads files once and compares them with their digests; copies them in the same pass if a copy is wanted.

The source is read, never mapped. Imports no torch.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from syncd.errors import CorruptDataError, RefusedError, TryAgainError
from syncd.protocol.digest import CHUNK, hasher, name_of
from syncd.protocol.disk import Disk
from syncd.protocol.receipt import FileRecord

THREADS = 4
"""Files that are read at once: one thread alone does not fill a fast mount."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def copy_files(
    disk: Disk, source: str, target: str, records: Sequence[FileRecord], stop: Callable[[], bool]
) -> None:
    """Copy files into a new directory; each byte of the source is read once.

    Args:
        disk: The file system of the source.
        source: The directory that the names are relative to.
        target: A local directory, which is created.
        records: The files.
        stop: Polled; once it returns true, the copy is given up.

    Raises:
        RefusedError: A file does not match its record.
        TryAgainError: `stop` returned true.
        OSError: A file cannot be read or written; a missing one stays `FileNotFoundError`.
    """
    os.mkdir(target, 0o700)
    for directory in sorted({os.path.dirname(record.name) for record in records} - {""}):
        os.makedirs(f"{target}/{directory}", 0o700, exist_ok=True)
    _each(
        records,
        stop,
        lambda record, over: _copy(disk, f"{source}/{record.name}", f"{target}/{record.name}", record, over),
    )


def check_files(disk: Disk, directory: str, records: Sequence[FileRecord], stop: Callable[[], bool]) -> None:
    """Read every byte of files and compare them with their digests; they are in the page cache afterwards.

    Args:
        disk: The file system.
        directory: The directory that the names are relative to.
        records: The files.
        stop: Polled; once it returns true, the check is given up.

    Raises:
        RefusedError: A file does not match its record.
        TryAgainError: `stop` returned true.
        OSError: A file cannot be read; a missing one stays `FileNotFoundError`.
    """
    _each(
        records,
        stop,
        lambda record, over: _read(disk, f"{directory}/{record.name}", record, over, lambda _: None),
    )


def _each(
    records: Sequence[FileRecord],
    stop: Callable[[], bool],
    work: Callable[[FileRecord, Callable[[], bool]], None],
) -> None:
    """Work on several files at once; the first failure ends the work on the others.

    Args:
        records: The files.
        stop: Once it returns true, the work is given up.
        work: Called with a file and a function that returns whether the work is over.
    """
    failed = threading.Event()

    def over() -> bool:
        return failed.is_set() or stop()

    def one(record: FileRecord) -> None:
        try:
            work(record, over)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(THREADS, thread_name_prefix="files") as pool:
        try:
            under_way = [pool.submit(one, record) for record in records]
            errors = [error for job in under_way if (error := job.exception()) is not None]
        except BaseException:
            failed.set()  # leaving the block waits for the threads
            raise
    # Raise the failure that made the others give up, not one of those.
    for error in sorted(errors, key=lambda error: isinstance(error, TryAgainError)):
        raise error


def _copy(disk: Disk, source: str, target: str, record: FileRecord, stop: Callable[[], bool]) -> None:
    descriptor = os.open(target, _NEW, 0o600)
    try:
        _read(disk, source, record, stop, lambda piece: _write(descriptor, memoryview(piece)))
    finally:
        os.close(descriptor)


def _read(
    disk: Disk, source: str, record: FileRecord, stop: Callable[[], bool], use: Callable[[bytes], None]
) -> None:
    """Read a file once, pass each piece to `use`, and compare the file with its record."""
    kind = name_of(record.digest, source)
    state, length = hasher(kind), 0
    while piece := _next(disk, source, length, record.size, stop):
        state.update(piece)
        use(piece)
        length += len(piece)
    found = f"{kind}:{state.hexdigest()}"
    if length != record.size:
        raise RefusedError(f"{length} bytes where {record.size} were written", path=source)
    if found != record.digest:
        raise RefusedError(
            f"content does not match its digest: {found} instead of {record.digest}",
            path=source,
            hint="syncd verify JOB STEP --deep",
        )


def _next(disk: Disk, source: str, place: int, size: int, stop: Callable[[], bool]) -> bytes:
    if stop():
        raise TryAgainError("reading it was given up: told to stop", path=source)
    # Bytes beyond the recorded size are not the step's.
    try:
        return disk.read_at(source, place, min(CHUNK, size - place)) if place < size else b""
    except CorruptDataError as error:
        raise RefusedError(error.message, path=source) from None


def _write(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]
