"""Threads that read: each takes the next piece, brings it to where it belongs, and hashes what has its turn.

No piece is handed from one thread to another and waited for: that wakes a thread each time, which takes as long as to
copy a megabyte.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from syncd.errors import CorruptDataError
from syncd.protocol.digest import Hasher, name_of
from syncd.transports.filesystem.read_file import OpenFile
from syncd.transports.filesystem.read_plan import Piece
from syncd.transports.filesystem.read_targets import view


class Slot:
    """Memory that pieces pass through.

    Args:
        memory: The memory.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.bytes, self.address = memory, view(memory), memory.data_ptr()
        self.views: list[memoryview] = []
        """What is to be hashed of the piece that it is used for."""


class Reading:
    """One file while its pieces are under way: to their places in any order, into its hash in that of the file.

    Args:
        file: The file.
        state: What hashes it; None where nothing is hashed.
    """

    def __init__(self, file: OpenFile, state: Hasher | None) -> None:
        self.file = file
        self._state = state
        self._lock = threading.Lock()
        self._ready: dict[int, Slot] = {}
        self._turn = 0
        self._count: int | None = None
        self._is_hashing = False

    @property
    def is_hashed(self) -> bool:
        """Say whether the file is hashed: then every byte of it is read."""
        return self._state is not None

    def add(self, number: int, slot: Slot) -> Iterator[Slot]:
        """Take a piece that is where it belongs; yield the slots that are free again.

        Args:
            number: Its place among the pieces of the file.
            slot: Its slot. It is hashed here if its turn has come, else by the thread that hashes the one before it.

        Raises:
            CorruptDataError: That was the last one, and the file's digest is another.
        """
        if self._state is None:
            self._end_turn()  # in any order
            yield slot
            return
        with self._lock:
            self._ready[number] = slot
        while (next_one := self._take_turn()) is not None:
            for one in next_one.views:
                self._state.update(one)
            self._end_turn()
            yield next_one

    def end(self, count: int) -> None:
        """Say how many pieces the file has: with the last of them it is compared with its digest, and closed.

        Raises:
            CorruptDataError: That was the last one, and the digest is another. `add` raises it else.
        """
        with self._lock:
            self._count = count
            is_over = self._turn == count
        if is_over:
            self._finish()

    def _take_turn(self) -> Slot | None:
        with self._lock:
            slot = None if self._is_hashing else self._ready.pop(self._turn, None)
            self._is_hashing |= slot is not None
            return slot

    def _end_turn(self) -> None:
        with self._lock:
            self._turn += 1
            self._is_hashing = False
            is_over = self._turn == self._count
        if is_over:
            self._finish()

    def _finish(self) -> None:
        source = self.file.source
        self.file.close()
        if self._state is None or source.record is None:
            return
        found = f"{name_of(source.record.digest)}:{self._state.hexdigest()}"
        if found != source.record.digest:
            raise CorruptDataError("content does not match its digest", path=source.path)


class Task(NamedTuple):
    """A piece of a file that is read, and its place among them."""

    reading: Reading
    number: int
    piece: Piece


Take = Callable[[OpenFile, Piece, Slot], None]


class Lanes:
    """The threads.

    Args:
        tasks: What is read, in order; asked for by one thread at a time.
        take: Reads a piece and brings it to where it belongs.
        slots: The memory that pieces pass through: more than there are threads, as some wait for their turn.
    """

    def __init__(self, tasks: Iterator[Task], take: Take, slots: list[Slot]) -> None:
        self._tasks, self._take = tasks, take
        self._lock = threading.Lock()
        self._free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        for slot in slots:
            self._free.put(slot)
        self._is_over = False

    def run(self, threads: int) -> None:
        """Read everything; return, or raise what went wrong first, when no thread touches anything any more."""
        with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
            lanes = [pool.submit(self._lane, threads) for _ in range(threads)]
            try:
                for lane in lanes:
                    lane.result()
            finally:
                self._end(threads)

    def _lane(self, threads: int) -> None:
        own: Slot | None = None
        try:
            # A slot first: whoever has a piece can always finish it, so that the turn of each comes.
            while (slot := own or self._free.get()) is not None and (task := self._next()) is not None:
                self._take(task.reading.file, task.piece, slot)
                own = self._kept(task.reading.add(task.number, slot))
        finally:
            self._end(threads)

    def _kept(self, free: Iterator[Slot]) -> Slot | None:
        """Return the last of slots that are free again, whose memory is still in the cache; give the others back."""
        kept: Slot | None = None
        for slot in free:
            slot.views = []
            if kept is not None:
                self._free.put(kept)
            kept = slot
        return kept

    def _next(self) -> Task | None:
        with self._lock:
            return None if self._is_over else next(self._tasks, None)

    def _end(self, threads: int) -> None:
        """Let every lane end with the piece that it has."""
        self._is_over = True
        for _ in range(threads):
            self._free.put(None)
