"""Memory that is there before it is needed: aligned, touched, kept from save to save, pinned for CUDA.

Pages that were never touched come from the kernel at about 1 GB/s, a tenth of what a copy into old ones
reaches.
"""

import ctypes
import mmap
from concurrent.futures import Executor, Future
from typing import Any

import torch

from syncd.transports.filesystem.layout import ALIGN, aligned

_POPULATE_WRITE = 23  # since Linux 5.14
_LIBC = ctypes.CDLL(None, use_errno=True)


class Arena:
    """One anonymous mapping that grows to the largest share met and then stays.

    Args:
        size: Bytes to begin with.
        pinned: Whether devices copy into it: then it is pinned where there is CUDA.
    """

    def __init__(self, size: int = ALIGN, *, pinned: bool = False) -> None:
        self._grown = self._pinned = False
        self._map = _mapped(size)
        self._adopt(0)
        if pinned:
            self._pin()

    @property
    def capacity(self) -> int:
        """Return its size in bytes."""
        return self.bytes.numel()

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
            self._map = _mapped(ALIGN)  # what is there goes before as much again comes
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
        _advise(self.bytes, mmap.MADV_HUGEPAGE)  # a kindness, not a need
        if not _advise(self.bytes[touched:], _POPULATE_WRITE):
            self.bytes[touched:].zero_()

    def _pin(self) -> None:
        if torch.cuda.is_available():  # refused, it is only slower
            self._pinned = int(_cudart().cudaHostRegister(self.bytes.data_ptr(), self.capacity, 0)) == 0

    def _unpin(self) -> None:
        if self._pinned:
            torch.cuda.synchronize()  # a copy may still be on its way to where the memory is now
            _cudart().cudaHostUnregister(self.bytes.data_ptr())
            self._pinned = False


class Kept:
    """The arena that all saves share: made ahead by a thread, or on first use."""

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._ahead: Future[Arena] | None = None

    @property
    def begun(self) -> bool:
        """Say whether there is one, or one is on its way."""
        return self._arena is not None or self._ahead is not None

    def begin(self, size: int, thread: Executor) -> None:
        """Have one of `size` bytes made, pinned where there is CUDA."""
        self._ahead = thread.submit(Arena, size, pinned=True)

    def arena(self) -> Arena:
        """Return it, waiting for the thread that makes it."""
        ahead, self._ahead = self._ahead, None
        self._arena = self._arena or (ahead.result() if ahead else Arena())
        return self._arena

    def close(self) -> None:
        """Give the memory back."""
        if self.begun:
            self.arena().close()
            self._arena = None


def _mapped(size: int) -> mmap.mmap:
    return mmap.mmap(-1, max(ALIGN, aligned(size)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _advise(memory: torch.Tensor, advice: int) -> bool:
    """Call madvise without Python's lock, which `mmap.madvise` would keep for as long as it takes."""
    address, length = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
    return bool(_LIBC.madvise(address, length, advice) == 0)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor in main memory; the tensor must outlive it."""
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
