"""Opens regular files to append to or to read; refuses everything else under the same name.

A symbolic link leads elsewhere, a hard link is somebody else's file, and a FIFO or a device may never answer.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator

_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_append(path: str, adopt: Callable[[str], None] | None = None) -> int:
    """Return a descriptor that appends to a file; create the file if it is missing.

    Args:
        adopt: Called with the path of an empty file: `Disk.adopt` of its job.
    """
    with _opened(path, _APPEND) as (descriptor, status):
        if status.st_nlink > 1:
            raise OSError(errno.EMLINK, "the file has another name too, perhaps outside of the job", path)
        if adopt is not None and status.st_size == 0:
            adopt(path)
    return descriptor


def open_read(path: str) -> int:
    with _opened(path, _READ) as (descriptor, _):
        return descriptor


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[tuple[int, os.stat_result]]:
    """Open a regular file, for its descriptor and stat; close it only if the block raises."""
    descriptor = os.open(path, flags, 0o644)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        yield descriptor, status
        stack.pop_all()
