"""Opens files that this process appends to or reads line by line: regular files, never what else may lie there.

A link would lead elsewhere, a hard link is another's file under our name, and a FIFO or a device may never answer.
"""

import errno
import os
import stat
from collections.abc import Callable

_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_append(path: str, adopt: Callable[[str], None] | None = None) -> int:
    """Return a descriptor that appends to a file, which is made where it is missing.

    Args:
        path: The file.
        adopt: Given the path of a file that is empty: `Disk.adopt` of the job that it belongs to.

    Raises:
        OSError: It is no regular file or has a second name, or the file system refuses.
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
        OSError: It is none, or the file system refuses.
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
