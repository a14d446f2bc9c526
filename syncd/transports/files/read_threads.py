"""Threads that read: each takes the next piece, brings it to its tensors, and hashes whatever is next in its file.

No thread hands a piece to another and waits: waking a thread takes as long as copying a megabyte.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from syncd.errors import CorruptDataError
from syncd.protocol.digest import Hasher, name_of
from syncd.transports.files.read_file import OpenFile, ReadPiece
from syncd.transports.torch_tensors import view


class Slot:
    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.bytes, self.address = memory, view(memory), memory.data_ptr()
        self.views: list[memoryview] = []  # the bytes of the current piece that are to be hashed


class FileInFlight:
    """One file while its pieces are read in any order and, if there is a `state`, hashed in that of the file."""

    def __init__(self, file: OpenFile, state: Hasher | None) -> None:
        self.file = file
        self._state = state
        self._lock = threading.Lock()
        self._waiting: dict[int, Slot] = {}
        self._turn = 0
        self._count: int | None = None
        self._is_hashing = False

    @property
    def is_hashed(self) -> bool:
        return self._state is not None

    def add(self, number: int, slot: Slot) -> Iterator[Slot]:
        """Accept piece `number` of the file, which was read; yield the slots that are free again.

        A piece is hashed here if it is next, else by the thread that hashes the piece before it.
        """
        if self._state is None:
            self._end_turn()  # in any order
            yield slot
            return
        with self._lock:
            self._waiting[number] = slot
        while (ready := self._begin_turn()) is not None:
            for content in ready.views:
                self._state.update(content)
            self._end_turn()
            yield ready

    def end(self, count: int) -> None:
        """Set how many pieces the file has: after the last one its digest is compared and the file is closed."""
        with self._lock:
            self._count = count
            is_over = self._turn == count
        if is_over:
            self._finish()

    def _begin_turn(self) -> Slot | None:
        with self._lock:
            slot = None if self._is_hashing else self._waiting.pop(self._turn, None)
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
        digest = f"{name_of(source.record.digest)}:{self._state.hexdigest()}"
        if digest != source.record.digest:
            raise CorruptDataError("content does not match its digest", path=source.path)


class ReadTask(NamedTuple):
    file: FileInFlight
    number: int
    piece: ReadPiece


ReadOne = Callable[[OpenFile, ReadPiece, Slot], None]  # reads a piece and brings it to its tensors


class ReadThreads:
    """The threads of one load; one at a time asks `tasks`, which are in order, for the next.

    `slots` is the memory that pieces pass through: more than there are threads, since some wait to be hashed.
    """

    def __init__(self, tasks: Iterator[ReadTask], read: ReadOne, slots: list[Slot]) -> None:
        self._tasks, self._read = tasks, read
        self._lock = threading.Lock()
        self._free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        for slot in slots:
            self._free.put(slot)
        self._is_over = False

    def run(self, threads: int) -> None:
        """Read everything; return, or raise the first error, once no thread touches anything any more."""
        with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
            running = [pool.submit(self._run_one, threads) for _ in range(threads)]
            try:
                for future in running:
                    future.result()
            finally:
                self._stop(threads)

    def _run_one(self, threads: int) -> None:
        own: Slot | None = None
        try:
            # A slot first: a thread that has a piece can then always finish it, so each piece gets its turn.
            while (slot := own or self._free.get()) is not None and (task := self._next_task()) is not None:
                self._read(task.file.file, task.piece, slot)
                own = self._reuse(task.file.add(task.number, slot))
        finally:
            self._stop(threads)

    def _reuse(self, free: Iterator[Slot]) -> Slot | None:
        """Return the last of the free slots, whose memory is still in the CPU cache; give the others back."""
        kept: Slot | None = None
        for slot in free:
            slot.views = []
            if kept is not None:
                self._free.put(kept)
            kept = slot
        return kept

    def _next_task(self) -> ReadTask | None:
        with self._lock:
            return None if self._is_over else next(self._tasks, None)

    def _stop(self, threads: int) -> None:
        self._is_over = True
        for _ in range(threads):
            self._free.put(None)
