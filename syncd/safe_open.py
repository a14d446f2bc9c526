"""Opens regular files to append to or to read; refuses everything else under the same name.

A symbolic link leads elsewhere, a hard link is somebody else's file, and a FIFO or a device may never answer.
"""

import errno
import os
import stat
from collections.abc import Callable

_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_append(path: str, adopt: Callable[[str], None] | None = None) -> int:
    """Return a descriptor that appends to a file; create the file if it is missing.

    Args:
        path: The file.
        adopt: Called with the path of an empty file: `Disk.adopt` of its job.

    Raises:
        OSError: It is not a regular file, has a second name, or the file system refuses.
    """
    descriptor = os.open(path, _APPEND, 0o644)
    try:
        found = _regular(descriptor, path)
        _refuse_second_name(found, path)
        if adopt is not None and found.st_size == 0:
            adopt(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_read(path: str) -> int:
    """Return a descriptor that reads a regular file.

    Raises:
        OSError: It is not a regular file, or the file system refuses.
    """
    descriptor = os.open(path, _READ)
    try:
        _regular(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_second_name(found: os.stat_result, path: str) -> None:
    if found.st_nlink > 1:
        raise OSError(errno.EMLINK, "the file has another name too, perhaps outside of the job", path)


def _regular(descriptor: int, path: str) -> os.stat_result:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return found
