"""Entry problems: what is wrong with one file or directory of a job, where the rest of its file system works.

Another user's file that cannot be read, a directory that cannot be moved, or an entry that meets a bug of this code
must affect nothing else. Errors of the whole file system (it is full, stale, read-only, or does not answer) are no
entry problems: `mount` has those. Nor is what ends the work of this process: a fence, the loss of its lock.
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
class EntryProblem:
    """One file or directory with which something could not be done."""

    path: str
    message: str  # what the operating system says
    owner: str  # its user, number and mode, for people to read; empty where that is unknown
    hint: str  # a command to run

    def __str__(self) -> str:
        owner = f" ({self.owner})" if self.owner else ""
        return f"{self.path}: {self.message}{owner}; {self.hint}"


def read_problem(error: Exception, path: str) -> EntryProblem | None:
    """Return what keeps one entry from being read, None where that is the whole file system."""
    return _entry_problem(error, path, "sudo chmod -R a+rX {path}")


def required_read_problem(error: Exception, path: str) -> EntryProblem:
    """Return what keeps one entry from being read; raise any error that is not of one entry."""
    entry_problem = read_problem(error, path)
    if entry_problem is None:
        raise error
    return entry_problem


def move_problem(error: Exception, path: str) -> EntryProblem | None:
    """Return what keeps one entry from being moved or removed, None where that is the whole file system."""
    # To be moved, a directory must be writable itself; no mode of a file or directory stops root.
    command = (
        f"sudo chown -R {os.geteuid()} {{path}}"
        if os.geteuid()
        else "lsattr -d {path}; sudo chattr -i {path}"
    )
    return _entry_problem(error, path, command)


def _entry_problem(error: Exception, path: str, permit: str) -> EntryProblem | None:
    if isinstance(error, FencedError | StorageError | LockHeldError):
        return None
    if not isinstance(error, OSError):
        problem = unexpected(error)
        return EntryProblem(
            path, problem.message, _owner(path), problem.hint or f"ls -ld {shlex.quote(path)}"
        )
    if error.errno not in _OF_ONE_ENTRY:
        return None
    blocked = _in_the_way(os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else path)
    command = (
        permit
        if error.errno in _DENIED
        else _OTHER_HINTS.get(error.errno or 0, "ls -ld {path}; dmesg | tail")
    )
    who = f" for uid {os.geteuid()}" if error.errno in _DENIED else ""
    message = f"{error.strerror or error}{who}"
    return EntryProblem(blocked, message, _owner(blocked), command.format(path=shlex.quote(blocked)))


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
        status = os.lstat(path)
    except OSError:
        return ""
    kind = "directory" if stat.S_ISDIR(status.st_mode) else "file"
    return f"{kind} of {_user(status.st_uid)}, mode {stat.S_IMODE(status.st_mode):04o}"


@functools.lru_cache(maxsize=64)
def _user(uid: int) -> str:
    import pwd  # noqa: PLC0415 - the start of every verb need not wait for it

    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
