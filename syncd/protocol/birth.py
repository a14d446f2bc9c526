"""When a file system made a directory: tells it from a later one that was given the same inode number."""

import ctypes
import functools
import os
from collections.abc import Callable

_AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW = 0x100
_STATX_BTIME = 0x800
_SIZE = 256
_MASK, _SECONDS, _NANOSECONDS = slice(0, 4), slice(80, 88), slice(88, 92)
"""Where `struct statx` has what it filled in, and the time of birth."""


def born_at(path: str) -> int:
    """Return when the file or directory at a path was made, in nanoseconds since the epoch by its file system.

    Returns:
        0 where the file system does not say, or nothing is there.
    """
    statx, found = _statx(), ctypes.create_string_buffer(_SIZE)
    if statx is None or statx(_AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW, _STATX_BTIME, found) != 0:
        return 0
    data = found.raw
    if not int.from_bytes(data[_MASK], "little") & _STATX_BTIME:
        return 0
    seconds = int.from_bytes(data[_SECONDS], "little", signed=True)
    return seconds * 10**9 + int.from_bytes(data[_NANOSECONDS], "little")


@functools.cache
def _statx() -> Callable[..., int] | None:
    # Python has no call for it before 3.15.
    return getattr(ctypes.CDLL(None), "statx", None)
