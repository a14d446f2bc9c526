"""Copies files once, and hashes them in the same pass: plain reads of the source, never an mmap of it."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from explorer_hooks.errors import RefusedError
from syncd.errors import CorruptDataError, TryAgainError
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
        stop: Asked often; once true the copy is given up.

    Raises:
        RefusedError: A file is not what its record says.
        TryAgainError: It was given up.
        OSError: A file cannot be read or written; a missing one stays `FileNotFoundError`.
    """
    os.mkdir(target, 0o700)
    for directory in sorted({os.path.dirname(record.name) for record in records} - {""}):
        os.makedirs(f"{target}/{directory}", 0o700, exist_ok=True)
    failed = threading.Event()

    def one(record: FileRecord) -> None:
        try:
            _copy(disk, f"{source}/{record.name}", f"{target}/{record.name}", record, _either(stop, failed))
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(THREADS, thread_name_prefix="stage") as pool:
        try:
            copies = [pool.submit(one, record) for record in records]
            errors = [error for copy in copies if (error := copy.exception()) is not None]
        except BaseException:
            failed.set()  # the threads are waited for on the way out
            raise
    # What made the others give up comes first, not that they did.
    for error in sorted(errors, key=lambda error: isinstance(error, TryAgainError)):
        raise error


def _either(stop: Callable[[], bool], failed: threading.Event) -> Callable[[], bool]:
    return lambda: failed.is_set() or stop()


def _copy(disk: Disk, source: str, target: str, record: FileRecord, stop: Callable[[], bool]) -> None:
    kind = name_of(record.digest, source)
    state, length = hasher(kind), 0
    descriptor = os.open(target, _NEW, 0o600)
    try:
        while piece := _next(disk, source, length, record.size, stop):
            state.update(piece)
            _write(descriptor, memoryview(piece))
            length += len(piece)
    finally:
        os.close(descriptor)
    if length != record.size or f"{kind}:{state.hexdigest()}" != record.digest:
        raise RefusedError("content does not match its digest", path=source)


def _next(disk: Disk, source: str, place: int, size: int, stop: Callable[[], bool]) -> bytes:
    if stop():
        raise TryAgainError("the copy was given up", path=source)
    # What lies beyond the size that its record names is none of ours to read.
    try:
        return disk.read_at(source, place, min(CHUNK, size - place)) if place < size else b""
    except CorruptDataError as error:
        raise RefusedError(error.message, path=source) from None


def _write(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]
