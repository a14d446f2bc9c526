"""What is looked at: one frozen record, so that judging it is a pure function."""

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from syncd.protocol.mount import UNKNOWN_MOUNT, Mount

Role = Literal["job", "parent", "state", "file", "step", "secret", "appended", "config"]
"""job: the job directory. parent: one above it. state: a directory of `.syncd/`. file: something in one that is read.
step: a step's directory. secret: holds a secret. appended: a log. config: `config.toml`."""


@dataclass(frozen=True, slots=True)
class Right:
    """One entry of an access control list: who, beside owner, group and others, may do what.

    Args:
        kind: `user` or `group`.
        number: Their number.
        bits: 4 to read, 2 to write, 1 to enter; what the mask leaves of it.
        default: Whether it is what new files get.
    """

    kind: str
    number: int
    bits: int
    default: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One name and who may do what with it.

    Args:
        path: Absolute.
        role: What it is to the job.
        mode: As `lstat` has it, with the kind.
        uid: Its owner.
        gid: Its group.
        links: Number of names of the file.
        rights: Its access control list.
    """

    path: str
    role: Role
    mode: int
    uid: int
    gid: int
    links: int = 1
    rights: tuple[Right, ...] = ()

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.mode)

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of systemd on this host, its drop-ins included.

    Args:
        path: Its file.
        settings: The last value of each key of `[Service]`.
    """

    path: str
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Seen:
    """A snapshot of who may do what.

    Args:
        directory: The job directory, absolute.
        user: Number of the user that looks.
        umask: Its umask.
        entries: Everything that was looked at.
        mount: The mount that holds the job.
        permissions: The policy of the job's configuration.
        group: Number of the policy's group, None where there is none.
        policy_problem: Why the policy cannot be told, empty when it can.
        secrets: Keys in `config.toml` that hold what looks like a secret.
        units: The units of this host.
        unread: Paths that could not be looked at, each with the reason.
    """

    directory: str
    user: int
    umask: int
    entries: tuple[Entry, ...] = ()
    mount: Mount = UNKNOWN_MOUNT
    permissions: str = "umask"
    group: int | None = None
    policy_problem: str = ""
    secrets: tuple[str, ...] = ()
    units: tuple[Unit, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
