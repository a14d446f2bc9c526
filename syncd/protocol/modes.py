"""Who may read and write what is made in a job: a policy as modes and a group."""

import os
import stat
from dataclasses import dataclass
from typing import Literal, get_args

from syncd.errors import ConfigError

Permissions = Literal["umask", "private", "group"]
"""umask: as the umask of each process says. private: the user alone. group: the user and one group, with writing."""

POLICIES: tuple[str, ...] = get_args(Permissions)


_NO_GROUP = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Modes:
    """How files and directories are made.

    Args:
        file: Mode of a file.
        directory: Mode of a directory.
        group: The group's number, None for the one that the system gives.
        exact: Whether this holds whatever the umask; otherwise the umask takes its part away.
    """

    file: int = 0o644
    directory: int = 0o777
    group: int | None = None
    exact: bool = False


UMASK = Modes()
PRIVATE = Modes(0o600, 0o700, exact=True)


def modes_of(permissions: str, group: str = "") -> Modes:
    """Return what a policy means on this host, for this user.

    Args:
        permissions: One of `POLICIES`.
        group: Name or number of the group, for the policy `group`.

    Raises:
        ConfigError: There is no such policy or group, the user is not in it, or one is missing.
    """
    if problem := contradiction(permissions, group):
        raise ConfigError(problem, hint='permissions = "group" and group = "NAME"')
    if permissions == "group":
        return Modes(0o660, 0o2770, _group(group), exact=True)
    return PRIVATE if permissions == "private" else UMASK


def contradiction(permissions: str, group: str) -> str:
    """Return what is wrong with a policy on every host, empty when nothing is."""
    if permissions not in POLICIES:
        return f"permissions = {permissions!r} is not one of {', '.join(POLICIES)}"
    if (permissions == "group") == bool(group):
        return ""
    problem = "needs a group" if permissions == "group" else f"and group = {group!r} contradict each other"
    return f"permissions = {permissions!r} {problem}"


def settle_file(descriptor: int, modes: Modes) -> None:
    """Give an open file that this user owns the mode and group of the policy."""
    if modes.exact:
        _own(descriptor, modes.file, modes.group, os.fstat(descriptor))


def settle(path: str, modes: Modes) -> None:
    """Give the file or directory at `path` the mode and group of the policy, unless somebody else owns it."""
    if not modes.exact:
        return
    found = os.lstat(path)
    if found.st_uid != os.geteuid() or stat.S_ISLNK(found.st_mode):
        return
    _own(path, modes.directory if stat.S_ISDIR(found.st_mode) else modes.file, modes.group, found)


def _own(place: int | str, mode: int, group: int | None, found: os.stat_result) -> None:
    taken = group is not None and found.st_gid != group
    if taken:
        os.chown(place, -1, group if group is not None else -1)
    if taken or stat.S_IMODE(found.st_mode) != mode:
        _chmod(place, mode)


def _chmod(place: int | str, mode: int) -> None:
    try:
        os.chmod(place, mode)
    except PermissionError:
        # RestrictSUIDSGID= of systemd forbids the bit. All that syncd makes is given to the group without it, too.
        if not mode & stat.S_ISGID:
            raise
        os.chmod(place, mode & ~stat.S_ISGID)


def _group(name: str) -> int:
    number = _number(name)
    if os.geteuid() != 0 and number not in {os.getegid(), *os.getgroups()}:
        raise ConfigError(f"this user is not in the group {name!r}", hint="id; then log in anew, or: newgrp")
    return number


def _number(name: str) -> int:
    import grp  # noqa: PLC0415 - only where a group is named

    # A number needs no name on this host: containers often have no names for the groups of the cluster.
    if name.isascii() and name.isdecimal() and int(name) < _NO_GROUP:
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"there is no group {name!r} on this host", hint=f"getent group {name}") from None
