"""The journal: a file of JSON lines on this host's own disk; a record is durable before anybody is told of it.

Records that arrive while one `fsync` runs share the next one. A line that a killed process left torn at the end is no
record; anything else that is none, or whose checksum is wrong, is damage.
"""

import asyncio
import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from typing import Any

from explorer_hooks.parts.agents.records import DamagedLine, encoded, has_checksum, read_line
from syncd.context import Closing
from syncd.errors import SyncdError, UsageError, storage_error, storage_errors

NAME = "journal.jsonl"
_LOCK = "journal.lock"
_PRIVATE = 0o600
_GROWN = 64 << 20  # bytes by which a journal may grow until it is rewritten without what is over

_NO_FIGURES: dict[str, Any] = {"dropped": {}, "forgotten": {}}

Needs = Callable[[dict[str, Any]], bool]


class TurnJournal(Closing):
    """The journal of one gateway, in a directory of this user alone; a second process that opens it is refused."""

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, NAME)
        with storage_errors(directory):
            os.makedirs(directory, mode=0o700, exist_ok=True)
            self._lock = _locked(os.path.join(directory, _LOCK))
            self._file = self._opened()
        self._waiting: list[tuple[bytes, Callable[[SyncdError | None], None]]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._grown_at = _GROWN
        self.failure: SyncdError | None = None  # why nothing can be recorded any more
        self._thread = threading.Thread(target=self._commit, name="journal", daemon=True)

    def begin(self, record: dict[str, Any], aside: str) -> None:
        """Begin anew with a record, before `start`; what there is goes aside if that is a path."""
        with storage_errors(self.path):
            self._file.close()
            if aside:
                os.replace(self.path, aside)
            self._file = self._opened()
            _write(self._file, encoded(record))

    def start(self, needs: Needs, rest: Callable[[], dict[str, Any]]) -> None:
        """Begin to record, after the journal was rewritten without what is over, or damaged.

        Args:
            needs: Returns whether a record still says something; called in another thread, as is `rest`.
            rest: Returns a record that stands for those that do not.
        """
        self._needs, self._rest = needs, rest
        self._rewrite(keeps_damage=False)
        self._thread.start()

    def records(self) -> Iterator[dict[str, Any] | DamagedLine]:
        """Yield the records, without a torn last line, and what is damaged in between."""
        with storage_errors(self.path), open(self.path, "rb") as file:
            # Journals of before have no checksums, and an older release adds lines without one at the end.
            with_checksum = [number for number, line in enumerate(file) if has_checksum(line)]
            file.seek(0)
            last = with_checksum[-1] if with_checksum else -1
            for number, line in enumerate(file):
                yield from read_line(line, needs_checksum=number < last)

    def set_aside(self) -> str:
        """Keep a second name for the file, which `start` is about to replace, and return it."""
        aside = f"{self.path}.damaged"
        with storage_errors(aside):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(aside)
            os.link(self.path, aside)
        return aside

    def append(self, record: dict[str, Any]) -> "asyncio.Future[None]":
        """Record something; the result is there once it is durable. Called in an event loop."""
        return self._queued(encoded(record))

    def barrier(self) -> "asyncio.Future[None]":
        """Return what is there once all that was appended before is durable."""
        return self._queued(b"")

    def close(self) -> None:
        """Record what waits, and let another process have the journal."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._file.close()
        os.close(self._lock)

    def _rewrite(self, *, keeps_damage: bool = True) -> None:
        """Write what is still needed into a new file, with what is damaged, which the next start accounts for."""
        draft = f"{self.path}.new"
        with storage_errors(draft):
            with open(draft, "wb", opener=_private) as file:
                file.truncate()
                for record in self.records():
                    if isinstance(record, DamagedLine):
                        file.write(record + b"\n" if keeps_damage else b"")
                    elif self._needs(record):
                        file.write(encoded(record))
                rest = self._rest()
                # Twice: without it nobody knows what is over. The figures of the second one are not added again.
                file.writelines(encoded({**rest, **figures}) for figures in ({}, _NO_FIGURES))
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self.path)
            self._file.close()
            self._file = self._opened()
            self._grown_at = 2 * self._file.tell() + _GROWN

    def _opened(self) -> FileIO:
        # Without a buffer: what a full disk has refused would be written again when the file is closed.
        file = open(self.path, "ab", buffering=0, opener=_private)  # noqa: SIM115 - it stays open
        descriptor = os.open(os.path.dirname(self.path), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return file

    def _queued(self, line: bytes) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def done(error: SyncdError | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_resolve, future, error)

        with self._changed:
            self._waiting.append((line, done))
            self._changed.notify()
        return future

    def _commit(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                taken, self._waiting = self._waiting, []
            if not taken:
                return
            self._write(b"".join(line for line, _ in taken))
            for _, done in taken:
                done(self.failure)

    def _write(self, data: bytes) -> None:
        """Make lines durable, unless an earlier write failed: the file may end in a torn line."""
        if self.failure is not None or not data:
            return
        try:
            _write(self._file, data)
            if self._file.tell() > self._grown_at:
                self._rewrite()
        except (OSError, SyncdError) as error:
            self.failure = error if isinstance(error, SyncdError) else storage_error(error, self.path)


def _resolve(future: "asyncio.Future[None]", error: SyncdError | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _write(file: FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
    os.fsync(file.fileno())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _PRIVATE)


def _locked(path: str) -> int:
    descriptor = _private(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(
            "another gateway has this journal open",
            path=path,
            hint="give each explorer a --name, and an explorer.gateway.directory, of its own",
        ) from None
    return descriptor
