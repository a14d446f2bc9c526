"""The memory that one rank's saves copy weights into; for deltas also the weights of the last sealed step.

While deltas are wanted there are two pieces of memory. One holds this rank's share of the last sealed step. A save
copies into the other one, and they change places only once its step is sealed: a save that fails changes nothing.
"""

from concurrent.futures import Executor, Future
from typing import NamedTuple

from syncd.errors import UsageError
from syncd.transports.files.export_walk import ShardLayout
from syncd.transports.files.pinned_buffer import PinnedBuffer
from syncd.transports.host_memory import HostMemory

_BUFFER = "the buffer for weights"
_SEALED = "the weights of the step before, for deltas"

_SCRATCH = 320 << 20
"""Bytes that encoding takes at most: streams that are kept until they are written, and a few tiles."""


class SealedShare(NamedTuple):
    """One rank's share of a sealed step."""

    step: int
    attempt: str  # the save that became it
    layout: ShardLayout  # of its shard
    buffer: PinnedBuffer  # the memory that begins with the data of the shard


class Arenas:
    """The buffers of one rank's saves.

    Args:
        memory: The budget that they are taken from.
    """

    def __init__(self, memory: HostMemory, helper: Executor) -> None:
        self._memory, self._helper = memory, helper
        self._ahead: Future[PinnedBuffer] | None = None
        self._next: PinnedBuffer | None = None
        self._spare: PinnedBuffer | None = None
        self.sealed: SealedShare | None = None
        """The share of the last sealed step, None while there is none."""
        self.refused = ""
        """Why the budget had no room to keep the last one, empty if it had."""

    @property
    def is_allocated(self) -> bool:
        """Return whether memory was allocated, or is being allocated."""
        return bool(self._next or self._ahead)

    def prepare(self, size: int) -> str:
        """Begin to allocate the buffer; return why the budget has no room for it, empty if it has."""
        if self.is_allocated:
            raise UsageError("memory is allocated once, before the first save")
        refused = self._memory.take(_BUFFER, size)
        if not refused:
            self._ahead = self._helper.submit(PinnedBuffer, size, pinned=True)
        return refused

    def next(self) -> PinnedBuffer:
        """Return the buffer for the next save; wait for the thread that allocates it, if one does."""
        ahead, self._ahead = self._ahead, None
        self._next = self._next or (ahead.result() if ahead else PinnedBuffer())
        return self._next

    def record_growth(self) -> None:
        """Count what the buffer for the next save takes now: it is not there twice, so it is never refused."""
        self._memory.record(_BUFFER, self.next().capacity)

    def tidy(self, size: int, *, keeps: bool) -> None:
        """Prepare for the next save of `size` bytes, once nothing reads or writes what the last one has copied.

        Args:
            size: Bytes of the share.
            keeps: Whether the share that was copied last is to be kept.
        """
        self.refused = ""
        if not keeps:
            self._forget()
            self.next().renew(size)
        elif self.sealed is None and self._spare is None:
            self.refused = self._memory.take(_SEALED, size + min(size, _SCRATCH))
            self._spare = None if self.refused else PinnedBuffer(size, pinned=True)

    def keep(self, step: int, attempt: str, layout: ShardLayout) -> None:
        """Keep what the last save has copied, if that is wanted and there is room: its step is sealed."""
        free = self.sealed.buffer if self.sealed else self._spare
        if free is not None:
            self.sealed = SealedShare(step, attempt, layout, self.next())
            self._next, self._spare = free, None
            free.renew(layout.data_size)

    def close(self) -> None:
        """Give all memory back."""
        self._forget()
        if self.is_allocated:
            self.next().close()
        self._next = None
        self._memory.take(_BUFFER, 0)

    def _forget(self) -> None:
        for buffer in (self._spare, self.sealed.buffer if self.sealed else None):
            if buffer is not None:
                buffer.close()
        self._spare = self.sealed = None
        self._memory.take(_SEALED, 0)
