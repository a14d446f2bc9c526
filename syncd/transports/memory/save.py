"""Weights out through the memory of this host too: each save leaves a copy of its files in a tmpfs directory.

    memory = Memory(job, Options("/dev/shm"))
    problem = memory.open()                             # by one rank; "" if copies can be made
    problem = memory.make_room(step, attempt, size)     # by that rank, before each save
    saver.save(..., copy=memory.copy(step, attempt))    # by all ranks

A copy is of no use before the files of the very same save are published, so nothing that goes wrong with one is more
than a reason to have none. docs/memory.md has the rules.
"""

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncd.errors import SyncdError
from syncd.protocol.disk import Clock
from syncd.protocol.layout import ACTOR, Job
from syncd.protocol.local_disk import LocalDisk, SystemClock
from syncd.protocol.memory import (
    MemoryDirectory,
    clear_all,
    clear_directory,
    discard,
    is_private,
    lock_directory,
)
from syncd.protocol.receipt import FileRecord, Receipt, receipts_directory, write_receipt
from syncd.transports.filesystem.direct_io import PIECE, NewFile, Way
from syncd.transports.memory.room import capacity, is_memory, look, refusal

if TYPE_CHECKING:
    from syncd.protocol.file_lock import FileLock

SLACK = 1 << 20
"""Bytes for what lies beside the weights, and for headers."""

_KEPT = 1
"""Copies that stay while the next one is made, besides those that are read."""

_PATIENCE = 2.0
"""Seconds for which a reader may tidy up after the trainer before this one."""

_BUFFERED = Way("memory", limit=PIECE)


@dataclass(frozen=True, slots=True)
class Options:
    """Where copies are, and how many.

    Args:
        root: A directory in memory.
        limit: Bytes that all copies may take together; 0 for half of what the file system can take.
    """

    root: str = "/dev/shm"  # noqa: S108 - what is made below is private to this user
    limit: int = 0


class Memory:
    """The copies of one job on this host.

    Args:
        job: The job.
        options: Where, and how many.
        clock: Time.
    """

    def __init__(self, job: Job, options: Options, clock: Clock | None = None) -> None:
        self.place = MemoryDirectory.here(options.root, job.root)
        self._options, self._clock = options, clock or SystemClock()
        self._owner: FileLock | None = None
        self._made: list[str] = []

    def open(self) -> str:
        """Take the place over, and clear away what trainers that were killed have left.

        Returns:
            Why no copies can be made, empty if they can.
        """
        try:
            return self._open()
        except (OSError, SyncdError) as error:
            return str(error)

    def make_room(self, step: int, attempt: str, size: int) -> str:
        """Remove what is not needed any more, and make the directory of the next copy.

        Args:
            step: The trainer's step.
            attempt: The save that the copy is of.
            size: Bytes of its tensors.

        Returns:
            Why there is no room, empty if there is.
        """
        try:
            return self._make_room(self.place.copy(step, attempt), size + SLACK)
        except (OSError, SyncdError) as error:
            return str(error)

    def copy(self, step: int, attempt: str, world_size: int, fail: Callable[[str], None]) -> "Copy":
        """Return this rank's side of a copy that there is room for."""
        return Copy(self.place.copy(step, attempt), step, attempt, world_size, fail)

    def close(self) -> None:
        """Remove all copies but those that are read; the last of their readers removes them."""
        atexit.unregister(self.close)
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.close()
            clear_directory(self.place.directory)

    def _open(self) -> str:
        root = os.path.dirname(self.place.directory)
        if not is_memory(root):
            return f"{root} is not in memory"
        clear_all(root)
        atexit.register(self.close)  # a run that ends by an error must not keep the host's memory
        return self._own()

    def _own(self) -> str:
        if self._owner is not None and self._owner.is_valid():
            return ""
        directory, end = self.place.directory, self._clock.monotonic() + _PATIENCE
        while True:
            if not os.path.lexists(directory):
                os.mkdir(directory, 0o700)
            if not is_private(directory):
                return f"{directory} is not this user's alone"
            self._owner = lock_directory(directory)
            if self._owner is not None:
                return ""
            if self._clock.monotonic() > end:
                return f"another trainer holds {directory}"
            self._clock.sleep(0.02)

    def _make_room(self, path: str, size: int) -> str:
        if problem := self._own():
            return problem
        directory = self.place.directory
        limit = self._options.limit or capacity(directory) // 2
        used = discard(directory, keep=self._made[-_KEPT:])
        if refusal(look(directory), size, used, limit):
            used = discard(
                directory
            )  # the one before may still be taken by those who come late, if there is room
        if problem := refusal(look(directory), size, used, limit):
            return problem
        os.makedirs(receipts_directory(path), 0o700)
        self._made = [*self._made[-_KEPT:], os.path.basename(path)]
        return ""


class Copy:
    """One rank's side of one copy. What goes wrong is told once; then the copy is never whole, and nothing raises.

    Args:
        path: Its directory.
        step: The trainer's step.
        attempt: The save.
        world_size: Number of ranks.
        fail: Told why there will be no copy.
    """

    def __init__(
        self, path: str, step: int, attempt: str, world_size: int, fail: Callable[[str], None]
    ) -> None:
        self._path, self._step, self._attempt, self._world_size = path, step, attempt, world_size
        self._fail, self._disk = fail, LocalDisk()
        self._file: NewFile | None = None
        self.failed = False

    def begin(self, name: str, size: int) -> None:
        """Begin this rank's shard, and have its memory at once."""

        def begun() -> None:
            self._file = NewFile(f"{self._path}/{ACTOR}/{name}", size, _BUFFERED)

        self._tried(begun)

    def put(self, piece: memoryview, offset: int) -> None:
        """Write a piece of the shard."""
        file = self._file
        if file is not None:
            self._tried(lambda: file.write(piece, offset))

    def finish(self) -> None:
        """Give the shard its length."""
        file = self._file
        if file is not None:
            self._tried(file.finish)
        self.close()

    def close(self) -> None:
        """Close what is open."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def write(self, name: str, content: bytes) -> None:
        """Write a file beside the weights."""
        self._tried(lambda: self._disk.replace(f"{self._path}/{ACTOR}/{name}", content))

    def seal(self, writer: int, shard: FileRecord, files: list[FileRecord]) -> None:
        """Say that this rank's files are whole, by the records that its receipt in the step will have."""
        receipt = Receipt(self._step, self._attempt, writer, self._world_size, (shard,), tuple(files))
        self._tried(lambda: write_receipt(self._disk, self._path, receipt))

    def _tried(self, work: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            work()
        except (OSError, SyncdError) as error:
            self.failed = True
            self.close()
            self._fail(str(error))
