"""Claims on what a host's processes share: locks on local files that end with their process, however it ends.

flock is used on local file systems only, where it is exact, and across containers too, whose process ids say
nothing to each other. A lock file may be removed by whoever holds it exclusively; so a lock counts only while
its name still leads to the file that was locked.
"""

import contextlib
import fcntl
import os

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Claim:
    """A lock that is held.

    Args:
        path: The lock file.
        descriptor: The open file that holds the lock.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    def share(self) -> bool:
        """Let others claim it too; False if it was lost on the way, then it is closed."""
        if self._descriptor is not None and _lock(self._descriptor, fcntl.LOCK_SH) and self.is_valid():
            return True
        self.close()
        return False

    def is_valid(self) -> bool:
        """Say whether the name still leads to the file that is locked."""
        if self._descriptor is None:
            return False
        try:
            named = os.lstat(self.path)
        except FileNotFoundError:
            return False
        held = os.fstat(self._descriptor)
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

    def remove(self) -> None:
        """Remove the lock file and let go. Only for who holds it exclusively."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self.close()

    def close(self) -> None:
        """Let go; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def claim(path: str, *, exclusive: bool) -> Claim | None:
    """Return a claim, None while others hold one that excludes it, or its directory has gone. Never waits."""
    try:
        descriptor = os.open(path, _FLAGS, 0o600)
    except FileNotFoundError:
        return None
    made = Claim(path, descriptor)
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
