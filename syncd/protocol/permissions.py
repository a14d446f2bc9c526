"""Permissions of what is made in a job: the policy as modes and a group, and where `config.toml` sets it.

`permissions` and `group`, in `[daemon]` or else in `[job]`, say who may read and write what is made in the job. Every
program of a job reads them at one place, so that all follow one policy.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from syncd.errors import ConfigError

Permissions = Literal["umask", "private", "group"]
"""umask: as the umask of each process says. private: the user alone. group: the user and one group, with writing."""

POLICIES: tuple[str, ...] = get_args(Permissions)

_NO_GROUP = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Modes:
    file: int = 0o644  # mode of a file
    directory: int = 0o777  # mode of a directory
    unix_group: int | None = None  # the group's number, None for the one that the system gives
    exact: bool = False  # whether these modes hold whatever the umask; otherwise the umask is applied to them


UMASK = Modes()
PRIVATE = Modes(0o600, 0o700, exact=True)


def modes_of(permissions: str, unix_group: str = "") -> Modes:
    """Return what one of `POLICIES` means here, for this user; the policy `group` takes a group's name or number."""
    if problem := policy_problem(permissions, unix_group):
        raise ConfigError(problem, hint='permissions = "group" and group = "NAME"')
    if permissions == "group":
        return Modes(0o660, 0o2770, _unix_group(unix_group), exact=True)
    return PRIVATE if permissions == "private" else UMASK


def policy_problem(permissions: str, unix_group: str) -> str:
    """Return what is wrong with a policy on every host, empty when nothing is."""
    if permissions not in POLICIES:
        return f"permissions = {permissions!r} is not one of {', '.join(POLICIES)}"
    if (permissions == "group") == bool(unix_group):
        return ""
    problem = (
        "needs a group" if permissions == "group" else f"and group = {unix_group!r} contradict each other"
    )
    return f"permissions = {permissions!r} {problem}"


def policy_in(document: Mapping[str, Any], path: str) -> tuple[str, str]:
    """Return `permissions` and `group` of a job's configuration: `[daemon]` counts before `[job]`."""
    tables = [table for name in ("daemon", "job") if isinstance(table := document.get(name), dict)]
    table_of_policy = next((table for table in tables if "permissions" in table), {})
    policy = table_of_policy.get("permissions", "umask"), table_of_policy.get("group", "")
    if not all(isinstance(value, str) for value in policy):
        raise ConfigError("permissions and group are text", path=path)
    return policy


def modes_in(document: Mapping[str, Any], path: str) -> Modes:
    try:
        return modes_of(*policy_in(document, path))
    except ConfigError as error:
        error.path = path
        raise


def parse_config(data: bytes, path: str) -> dict[str, Any]:
    import tomllib  # noqa: PLC0415 - most commands read no configuration, and must start at once

    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not TOML: {error}", path=path, hint=f"less {path}") from error


def apply_to_file(descriptor: int, modes: Modes) -> None:
    """Give an open file that this user owns the mode and group of the policy."""
    if modes.exact:
        _change(descriptor, modes.file, modes.unix_group, os.fstat(descriptor))


def apply_to_path(path: str, modes: Modes) -> None:
    """Give the file or directory at `path` the mode and group of the policy, unless another user owns it."""
    if not modes.exact:
        return
    status = os.lstat(path)
    if status.st_uid != os.geteuid() or stat.S_ISLNK(status.st_mode):
        return
    _change(path, modes.directory if stat.S_ISDIR(status.st_mode) else modes.file, modes.unix_group, status)


def _change(file: int | str, mode: int, unix_group: int | None, status: os.stat_result) -> None:
    changes_unix_group = unix_group is not None and status.st_gid != unix_group
    if changes_unix_group:
        os.chown(file, -1, unix_group if unix_group is not None else -1)
    if changes_unix_group or stat.S_IMODE(status.st_mode) != mode:
        _chmod(file, mode)


def _chmod(file: int | str, mode: int) -> None:
    try:
        os.chmod(file, mode)
    except PermissionError:
        # RestrictSUIDSGID= of systemd forbids the bit. All that syncd makes is given to the group without it, too.
        if not mode & stat.S_ISGID:
            raise
        os.chmod(file, mode & ~stat.S_ISGID)


def _unix_group(name: str) -> int:
    number = _group_number(name)
    if os.geteuid() != 0 and number not in {os.getegid(), *os.getgroups()}:
        raise ConfigError(f"this user is not in the group {name!r}", hint="id; then log in again, or: newgrp")
    return number


def _group_number(name: str) -> int:
    import grp  # noqa: PLC0415 - only where a group is named

    # A number needs no name on this host: containers often have no names for the groups of the cluster.
    if name.isascii() and name.isdecimal() and int(name) < _NO_GROUP:
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"there is no group {name!r} on this host", hint=f"getent group {name}") from None
