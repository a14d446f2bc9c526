"""The memory that saves copy weights into, and the copies: aligned, touched, kept between saves, pinned for CUDA.

Pages that were never touched come from the kernel at about 1 GB/s, a tenth of what a copy into old ones reaches.
"""

import contextlib
import ctypes
import mmap
import weakref
from collections import deque
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from syncd.errors import UsageError
from syncd.protocol.safetensors import ALIGN, aligned
from syncd.transports.files.export_walk import ShardLayout
from syncd.transports.host_memory import HostMemory
from syncd.transports.torch_tensors import copy_tensor

_POPULATE_WRITE = 23  # since Linux 5.14
_LIBC = ctypes.CDLL(None, use_errno=True)

_WORTH_A_THREAD = 1 << 20  # bytes: a tenth of a millisecond, several times what a thread takes to wake
_UNDER_WAY = 4
"""Copies that the helper has queued at most. It never runs dry, so that it need not be woken for each."""

_BUFFER = "the buffer for weights"
_SEALED = "the weights of the step before, for deltas"

_SCRATCH = 320 << 20
"""Bytes that encoding takes at most: streams that are kept until they are written, and a few tiles."""


class PinnedBuffer:
    """One anonymous mapping that grows to the largest share met and stays; `pinned` for devices that copy into it."""

    def __init__(self, size: int = ALIGN, *, pinned: bool = False) -> None:
        self._grown = False
        self._pinned: weakref.finalize[Any, Any] | None = None
        self._map = _mapped(size)
        self._adopt(0)
        if pinned:
            self._pin()

    @property
    def capacity(self) -> int:
        return self.bytes.numel()

    def piece(self, start: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """Return a contiguous tensor at byte `start`, a multiple of the size of its elements.

        It has a storage of its own; `reserve` and `close` void it.
        """
        count = shape.numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(shape)

    def reserve(self, size: int) -> None:
        """Make room for `size` bytes, keeping what is there; views taken before are void if it grows.

        It grows by an eighth at least: a first save learns its size on the way, and should move few times.
        """
        old = self.capacity
        if size <= old:
            return
        self._unpin()
        self._map.resize(aligned(max(size, old + old // 8)))
        self._grown = True
        self._adopt(old)

    def renew(self, size: int) -> None:
        """Replace memory that has grown by one empty piece of `size` bytes, pinned where there is CUDA.

        A mapping that has moved is of small pages, and copying into them takes a fifth longer.
        """
        if self._grown:
            self._unpin()
            self.bytes = torch.empty(0, dtype=torch.uint8)
            self._map = _mapped(ALIGN)  # give the old memory back before as much again is mapped
            self._map = _mapped(size)
            self._adopt(0)
            self._pin()
            self._grown = False

    def close(self) -> None:
        """Give the memory back once nothing refers to it."""
        self._unpin()
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def _adopt(self, touched: int) -> None:
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        _advise(self.bytes, mmap.MADV_HUGEPAGE)  # if it is refused, copies are only slower
        if not _advise(self.bytes[touched:], _POPULATE_WRITE):
            self.bytes[touched:].zero_()

    def _pin(self) -> None:
        if torch.cuda.is_available() and _register(self.bytes):
            # Memory that is given back while it is pinned fails whatever CUDA allocates at its address later.
            self._pinned = weakref.finalize(self, _unregister, self.bytes.data_ptr())
            self._pinned.atexit = False

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._pinned()
            self._pinned = None


class TensorCopies:
    """Copies tensors, half of each large one by `helper`, an idle thread. All are done when the `with` block ends."""

    def __init__(self, helper: Executor) -> None:
        self._helper = helper
        self._under_way: deque[Future[None]] = deque()
        self._device = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception) if error is not None else contextlib.nullcontext():
            self.finish()

    def add(self, target: torch.Tensor, source: torch.Tensor, *, lasts: bool = False) -> None:
        """Copy a tensor over a contiguous one of the same shape in main memory; the copy is complete after `finish`.

        Unless the source `lasts` (stays valid) until `finish`, it is copied when this returns. A copy from a device
        is only begun in either case: the device's stream keeps the memory.
        """
        if source.is_cuda:
            self._device = True
            target.copy_(source, non_blocking=True)
        elif target.nbytes < _WORTH_A_THREAD or not source.is_contiguous():
            copy_tensor(target, source)
        else:
            self._halve(target.view(-1), source.view(-1))
            if not lasts:
                self._wait(0)

    def finish(self) -> None:
        self._wait(0)
        if self._device:
            torch.cuda.synchronize()

    def _halve(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._wait(_UNDER_WAY - 1)
        half = target.numel() // 2 // ALIGN * ALIGN
        self._under_way.append(self._helper.submit(copy_tensor, target[half:], source[half:]))
        copy_tensor(target[:half], source[:half])

    def _wait(self, most: int) -> None:
        """Wait until at most so many are under way. If one fails, wait for all, then raise its error."""
        failed: list[BaseException] = []
        while len(self._under_way) > most:
            error = self._under_way.popleft().exception()
            failed += [] if error is None else [error]
        if failed:
            self._wait(0)
            raise failed[0]


@dataclass(frozen=True, slots=True)
class Share:
    layout: ShardLayout  # of its shard
    buffer: PinnedBuffer  # the memory that begins with the data of the shard

    @property
    def data(self) -> torch.Tensor:
        """Return the memory as bytes: void once it grows or is renewed."""
        return self.buffer.bytes


class SealedShare(NamedTuple):
    step: int
    attempt: str  # the save that became it
    share: Share


class SaveBuffers:
    """The buffers of one rank's saves; for deltas one of them holds the share of the last sealed step.

    While deltas are wanted there are two buffers. A save copies into the one that holds no sealed share, and they
    change places only once its step is sealed: a save that fails changes nothing.
    """

    def __init__(self, memory: HostMemory, helper: Executor) -> None:
        self._memory, self._helper = memory, helper
        self._ahead: Future[PinnedBuffer] | None = None
        self._next: PinnedBuffer | None = None
        self._spare: PinnedBuffer | None = None
        self.sealed: SealedShare | None = None  # the share of the last sealed step, None while there is none
        self.refused = ""  # why the budget had no room to keep the last one, empty if it had

    @property
    def is_allocated(self) -> bool:
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
        """Prepare for the next save of `size` bytes, once nothing reads or writes what the last one has copied."""
        self.refused = ""
        if not keeps:
            self._forget()
            self.next().renew(size)
        elif self.sealed is None and self._spare is None:
            self.refused = self._memory.take(_SEALED, size + min(size, _SCRATCH))
            self._spare = None if self.refused else PinnedBuffer(size, pinned=True)

    def keep(self, step: int, attempt: str, share: Share) -> None:
        """Keep what the last save has copied, if that is wanted and there is room: its step is sealed."""
        free = self.sealed.share.buffer if self.sealed else self._spare
        if free is not None:
            self.sealed = SealedShare(step, attempt, share)
            self._next, self._spare = free, None
            free.renew(share.layout.data_size)

    def close(self) -> None:
        self._forget()
        if self.is_allocated:
            self.next().close()
        self._next = None
        self._memory.take(_BUFFER, 0)

    def _forget(self) -> None:
        for buffer in (self._spare, self.sealed.share.buffer if self.sealed else None):
            if buffer is not None:
                buffer.close()
        self._spare = self.sealed = None
        self._memory.take(_SEALED, 0)


def _mapped(size: int) -> mmap.mmap:
    return mmap.mmap(-1, max(ALIGN, aligned(size)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _advise(memory: torch.Tensor, advice: int) -> bool:
    """Call madvise without Python's lock, which `mmap.madvise` would keep for as long as it takes."""
    address, length = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
    return bool(_LIBC.madvise(address, length, advice) == 0)


def _register(memory: torch.Tensor) -> bool:
    """Pin memory; return whether CUDA did it. If it is refused, copies are only slower."""
    if int(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # raises, and so clears, what CUDA would tell the next kernel
    return False


def _unregister(address: int) -> None:
    torch.cuda.synchronize()  # a copy may still be on its way to where the memory is now
    _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
