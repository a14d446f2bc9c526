"""Whether other users could change what a path leads to, checked as sshd checks `~/.ssh`.

Each directory from `/` down, each symbolic link on the way and the last file must belong to this user or to root, and
nobody else may write to it: neither everybody nor a group, nor by an access control list, whose mask the group's bits
show. A sticky directory passes, because others cannot rename or remove what this user or root has in it.

Once a level has passed, nobody else can put something else in its place: the next is looked up in what was checked.
"""

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

_MOST_LINKS = 40
_ROOT = 0


@dataclass(frozen=True, slots=True)
class WeakLevel:
    """A level of a path at which another user could change what the path leads to."""

    path: str  # the level
    problem: str  # who could
    mend: str  # the command that closes it

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


def weak_level(path: str, opened: os.stat_result | None = None, *, gains: bool = False) -> WeakLevel | None:
    """Return the first level of a path that another user could change, None if only this user and root could.

    Args:
        opened: What `os.fstat` says of the file that was read by this path, which must be what it leads to.
        gains: Whether a new name in the last directory matters as well, as where modules are looked for: then the
            directory may not be a sticky one that others write to.
    """
    level, status = "/", os.lstat("/")
    for level, status in _levels(path):
        if weak := _weakness(level, status):
            return weak
    if gains and status.st_mode & stat.S_ISVTX:
        return _weakness(level, status, sticky_passes=False)
    if opened is not None and not os.path.samestat(opened, status):
        return WeakLevel(level, "it was replaced while it was read", f"ls -l {level}")
    return None


def _weakness(level: str, status: os.stat_result, *, sticky_passes: bool = True) -> WeakLevel | None:
    if status.st_uid not in (_ROOT, os.geteuid()):
        return WeakLevel(level, f"it belongs to user {status.st_uid}", f"ls -ld {level}")
    is_sticky = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)
    if stat.S_ISLNK(status.st_mode) or (is_sticky and sticky_passes):
        return None
    if status.st_mode & stat.S_IWOTH:
        return WeakLevel(level, "everybody can write to it", f"chmod go-w {level}")
    if status.st_mode & stat.S_IWGRP:
        return WeakLevel(level, f"group {status.st_gid} can write to it", f"chmod g-w {level}")
    return None


def _levels(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every directory, link and file by which a path is found, with its status, from `/` on."""
    names, directory, links = os.path.join(os.getcwd(), path).split("/")[::-1], "", 0
    yield "/", os.lstat("/")
    while names:
        name = names.pop()
        if name == "..":
            directory = directory.rpartition("/")[0]
        if name in ("", ".", ".."):
            continue
        level = f"{directory}/{name}"
        status = os.lstat(level)
        yield level, status
        if not stat.S_ISLNK(status.st_mode):
            directory = level
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(level)
        names += target.split("/")[::-1]
        directory = "" if target.startswith("/") else directory
