"""How much of a file is in the page cache: cachestat where the kernel has it (6.5), else trying without waiting."""

import ctypes
import os

_CACHESTAT = 451
_SAMPLES = 16
_LIBC = ctypes.CDLL(None, use_errno=True)


def cached_share(descriptor: int, size: int) -> float:
    """Return the share of an open file that can be read without its device; 1 where nobody can tell.

    Args:
        descriptor: Of the file.
        size: Its length in bytes.
    """
    if not size:
        return 1.0
    pages = _cachestat(descriptor)
    if pages is not None:
        return min(1.0, pages * os.sysconf("SC_PAGE_SIZE") / size)
    return _sampled(descriptor, size)


def _cachestat(descriptor: int) -> int | None:
    """Return how many pages of a file are cached, None where the kernel or the file system does not say."""
    whole = (ctypes.c_uint64 * 2)(0, 0)
    found = (ctypes.c_uint64 * 5)()
    done = _LIBC.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_uint(descriptor), whole, found, ctypes.c_uint(0))
    return int(found[0]) if done == 0 else None


def _sampled(descriptor: int, size: int) -> float:
    places = range(0, size, max(1, size // _SAMPLES))
    try:
        return sum(_is_cached(descriptor, place) for place in places) / len(places)
    except OSError:
        return 1.0


def _is_cached(descriptor: int, offset: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
