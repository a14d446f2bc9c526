"""Locks that the processes of one host share: flock on local files, released when the process ends, however it ends.

flock is used on local file systems only, where it is exact, and across containers too, whose process ids say
nothing to each other. Whoever holds a lock exclusively may remove its file; so a lock counts only
while its name still leads to the file that was locked.
"""

import contextlib
import fcntl
import os

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class FileLock:
    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    def share(self) -> bool:
        """Make the lock shared; return False, with the lock closed, if it was lost on the way."""
        if self._descriptor is not None and _lock(self._descriptor, fcntl.LOCK_SH) and self.is_valid():
            return True
        self.close()
        return False

    def is_valid(self) -> bool:
        """Return whether the name still leads to the file that is locked."""
        if self._descriptor is None:
            return False
        try:
            named = os.lstat(self.path)
        except FileNotFoundError:
            return False
        held = os.fstat(self._descriptor)
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

    def remove(self) -> None:
        """Remove the lock file and release the lock. Only for the exclusive holder."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self.close()

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def lock_file(path: str, *, exclusive: bool) -> FileLock | None:
    """Return a lock, None while others hold one that excludes it, or if its directory has gone. Never waits."""
    try:
        descriptor = os.open(path, _FLAGS, 0o600)
    except FileNotFoundError:
        return None
    made = FileLock(path, descriptor)
    try:
        if _lock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) and made.is_valid():
            return made
    except BaseException:
        made.close()
        raise
    made.close()
    return None


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
