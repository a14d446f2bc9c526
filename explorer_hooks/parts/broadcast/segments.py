"""Files in this host's shared memory through which weights go to an engine on the same host.

A segment is /dev/shm/syncd-push-<32 hex digits>. The process that makes it holds a lock on it, from before it has a
name until it is removed. The lock ends with the process, however it ends, so whoever can lock a segment may remove it
as a leftover. Only this user can open one.

Imports the standard library alone: vLLM's workers import it too, in their own environment.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
from collections.abc import Iterable
from itertools import count

DIRECTORY = "/dev/shm"  # noqa: S108 - the memory that processes of one host share, by its only name

HEADER = 64  # bytes in front of the tensors: torch counts the users of a shared file there

_USERS = 1 << 20
"""What torch counts from: nobody but the owner is ever the last user, who would remove the file."""

_ALIGNED = 64
_NAME = re.compile(r"syncd-push-[0-9a-f]{32}(\.[0-9]{1,9})?", re.ASCII)


class Segment:
    """Shared memory of this process that others of this user can open; the first `HEADER` bytes are torch's."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._names: list[str] = []
        self._numbers = count(1)
        room = os.statvfs(DIRECTORY)
        if size > room.f_bavail * room.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), DIRECTORY)
        self._descriptor = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, size)
            self.write(0, memoryview(struct.pack("=i", _USERS)))
            self.name = f"syncd-push-{secrets.token_hex(16)}"
            self._link(self.name)
        except BaseException:
            self.remove()
            raise

    def write(self, offset: int, data: memoryview) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            data, offset = data[written:], offset + written

    def reserve(self) -> mmap.mmap:
        """Return the memory, all of it there, so that writing to it cannot fail."""
        os.posix_fallocate(self._descriptor, 0, self.size)
        return mmap.mmap(self._descriptor, self.size)

    def another_name(self) -> str:
        """Return a further name of the segment, for a reader that removes what it has read."""
        name = f"{self.name}.{next(self._numbers)}"
        self._link(name)
        return name

    def remove_names(self) -> None:
        for name in self._names[1:]:
            self._unlink(name)

    def remove(self) -> None:
        """Remove the segment; readers that have opened it keep it until they close it."""
        for name in list(self._names):
            self._unlink(name)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _link(self, name: str) -> None:
        # Only with a directory's descriptor, which the absolute path ignores, does Python follow the link in /proc.
        file = self._descriptor
        os.link(f"/proc/self/fd/{file}", f"{DIRECTORY}/{name}", src_dir_fd=file, follow_symlinks=True)
        self._names.append(name)

    def _unlink(self, name: str) -> None:
        self._names.remove(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{DIRECTORY}/{name}")


def places(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return where tensors of these bytes begin in a segment, and the bytes of the segment."""
    offsets, end = [], HEADER
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    return offsets, end


def open_segment(name: str) -> mmap.mmap:
    """Return the memory of a segment of another process of this user; what is written to it stays in this process."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not the name of a segment")
    descriptor = os.open(f"{DIRECTORY}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError(f"{DIRECTORY}/{name} is not a file of this user")
        return mmap.mmap(
            descriptor, status.st_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    finally:
        os.close(descriptor)


def remove_leftovers() -> int:
    """Remove the segments of processes of this user that have ended; return how many names there were."""
    with contextlib.suppress(OSError):
        return sum(_remove_if_left(name) for name in os.listdir(DIRECTORY) if _NAME.fullmatch(name))
    return 0


def _remove_if_left(name: str) -> bool:
    path = f"{DIRECTORY}/{name}"
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            # Its owner's lock; it was locked before it had a name.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(descriptor)
        return True
    return False
