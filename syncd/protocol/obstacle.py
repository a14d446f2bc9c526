"""Obstacles: what is wrong with one file or directory of a job, where the rest of its file system works.

Another user's file that cannot be read, a directory that cannot be moved, or an entry that meets a bug of this code
must affect nothing else. Errors of the whole file system (it is full, stale, read-only, or does not answer) are no
obstacles: `mount` has those. Nor is what ends the work of this process: a fence, the loss of its lock.
"""

import errno
import functools
import os
import shlex
import stat
from dataclasses import dataclass

from syncd.errors import FencedError, LockHeldError, StorageError, unexpected

_DENIED = frozenset({errno.EACCES, errno.EPERM})
_OF_ONE_ENTRY = _DENIED | {
    errno.EBUSY,
    errno.EEXIST,
    errno.EIO,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOTEMPTY,
    errno.EUCLEAN,
    errno.EXDEV,
}


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One file or directory with which something could not be done."""

    path: str
    message: str  # what the operating system says
    owner: str  # its user, number and mode, for people to read; empty where that is unknown
    hint: str  # a command to run

    def __str__(self) -> str:
        owner = f" ({self.owner})" if self.owner else ""
        return f"{self.path}: {self.message}{owner}; {self.hint}"


def obstacle_to_reading(error: Exception, path: str) -> Obstacle | None:
    """Return what keeps one entry from being read, None where that is the whole file system."""
    return _obstacle(error, path, "sudo chmod -R a+rX {path}")


def required_obstacle(error: Exception, path: str) -> Obstacle:
    """Return what keeps one entry from being read."""
    obstacle = obstacle_to_reading(error, path)
    if obstacle is None:
        raise error
    return obstacle


def obstacle_to_moving(error: Exception, path: str) -> Obstacle | None:
    """Return what keeps one entry from being moved or removed, None where that is the whole file system."""
    # To be moved, a directory must be writable itself; no mode of a file or directory stops root.
    command = (
        f"sudo chown -R {os.geteuid()} {{path}}"
        if os.geteuid()
        else "lsattr -d {path}; sudo chattr -i {path}"
    )
    return _obstacle(error, path, command)


def _obstacle(error: Exception, path: str, permit: str) -> Obstacle | None:
    if isinstance(error, FencedError | StorageError | LockHeldError):
        return None
    if not isinstance(error, OSError):
        problem = unexpected(error)
        return Obstacle(path, problem.message, _owner(path), problem.hint or f"ls -ld {shlex.quote(path)}")
    if error.errno not in _OF_ONE_ENTRY:
        return None
    place = _in_the_way(os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else path)
    command = (
        permit
        if error.errno in _DENIED
        else _OTHER_HINTS.get(error.errno or 0, "ls -ld {path}; dmesg | tail")
    )
    who = f" for uid {os.geteuid()}" if error.errno in _DENIED else ""
    message = f"{error.strerror or error}{who}"
    return Obstacle(place, message, _owner(place), command.format(path=shlex.quote(place)))


_OTHER_HINTS = {errno.EBUSY: "findmnt {path}; sudo umount {path}"}


def _in_the_way(path: str) -> str:
    """Return the path, or the directory above it that keeps this user from looking at it."""
    # Not through the seam: this is only for people to read, and the path has just answered.
    while (parent := os.path.dirname(path)) != path:
        try:
            os.lstat(path)
        except PermissionError:
            path = parent
        except OSError:
            return path
        else:
            return path
    return path


def _owner(path: str) -> str:
    try:
        found = os.lstat(path)
    except OSError:
        return ""
    kind = "directory" if stat.S_ISDIR(found.st_mode) else "file"
    return f"{kind} of {_user(found.st_uid)}, mode {stat.S_IMODE(found.st_mode):04o}"


@functools.lru_cache(maxsize=64)
def _user(uid: int) -> str:
    import pwd  # noqa: PLC0415 - the start of every verb need not wait for it

    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
