"""The mount of a job: which file system it is, whether it raises events, and what is wrong with it."""

import errno
import os
import re
import shlex
from dataclasses import dataclass
from enum import StrEnum

from syncd.errors import JobMissingError, JobReplacedError, StorageError, SyncdError
from syncd.protocol.disk import is_below

NETWORK = frozenset(
    {
        "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "afs", "ocfs2", "gfs2",
        "orangefs", "pvfs2", "wekafs", "panfs", "daos", "virtiofs", "hostfs", "glusterfs",
    }
)  # fmt: skip
"""File systems on which another host's changes raise no inotify event here."""

_MOUNTINFO = "/proc/self/mountinfo"
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    point: str  # where it is mounted
    type: str  # its type as the kernel names it; a FUSE file system may carry its own name (`fuse.sshfs`)
    options: tuple[str, ...] = ()  # its options, those of the mount and those of the file system
    source: str = ""  # the device or server

    @property
    def is_network(self) -> bool:
        """Return whether other hosts may change it unseen by this kernel. FUSE counts: nothing better is known."""
        return self.type in NETWORK or self.type == "fuse" or self.type.startswith("fuse.")

    @property
    def has_delegations(self) -> bool:
        """Return whether its server promises readers of a file to ask before the file is replaced."""
        return self.type == "nfs4"

    def option(self, name: str) -> str | None:
        """Return the value of an option `name=value`, empty for a plain `name`, None without it."""
        for option in self.options:
            key, _, value = option.partition("=")
            if key == name:
                return value
        return None


UNKNOWN_MOUNT = Mount("/", "unknown")


def mount_of(path: str) -> Mount:
    """Return the mount that holds a path, `UNKNOWN_MOUNT` where the kernel does not say."""
    return mount_of_resolved(os.path.realpath(path))


def mount_of_resolved(path: str) -> Mount:
    """Return the mount that holds an absolute path without links. No call goes to the mount itself."""
    try:
        with open(_MOUNTINFO, encoding="utf-8", errors="surrogateescape") as file:
            return find_mount(path, file.read())
    except OSError:
        return UNKNOWN_MOUNT


def find_mount(path: str, mountinfo: str) -> Mount:
    """Return the innermost mount of an absolute path by the text of `/proc/self/mountinfo`."""
    best = UNKNOWN_MOUNT
    for line in mountinfo.splitlines():
        mount = _parse(line)
        # Of two mounts on one point the later one is on top.
        if mount and is_below(path, mount.point) and len(mount.point) >= len(best.point):
            best = mount
    return best


def _parse(line: str) -> Mount | None:
    left, separator, right = line.partition(" - ")
    fields, system = left.split(" "), right.split(" ")
    if not separator or len(fields) < 6 or len(system) < 3:  # noqa: PLR2004 - the fixed columns of proc(5)
        return None
    options = tuple(dict.fromkeys([*fields[5].split(","), *system[2].split(",")]))
    return Mount(_unescape(fields[4]), system[0], options, _unescape(system[1]))


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


class MountState(StrEnum):
    """How the file system of a job is. docs/storage.md says what the daemon does in each state."""

    OK = "ok"
    STUCK = "stuck"
    MISSING = "missing"
    REPLACED = "replaced"
    STALE = "stale"
    READ_ONLY = "read_only"
    FULL = "full"
    NO_INODES = "no_inodes"
    QUOTA = "quota"
    FAILING = "failing"


CROWDED = frozenset({MountState.FULL, MountState.NO_INODES, MountState.QUOTA})
"""The states that end when something is deleted."""

PATIENT = CROWDED | {MountState.STUCK, MountState.MISSING, MountState.STALE, MountState.READ_ONLY}
"""The states that a restart of the daemon does not end: it waits and reports."""


@dataclass(frozen=True, slots=True)
class MountTrouble:
    state: MountState  # which state, never `ok`
    message: str  # what it is and what it prevents, in one sentence without a full stop
    hint: str  # what to run or to do


_STATES = {
    errno.ESTALE: MountState.STALE,
    errno.EROFS: MountState.READ_ONLY,
    errno.ENOSPC: MountState.FULL,
    errno.EDQUOT: MountState.QUOTA,
}

_TEXTS = {
    MountState.STUCK: (
        "the mount does not answer; work resumes by itself when it does",
        "findmnt; dmesg | tail  # is its server up? A command that touches the mount hangs, too",
    ),
    MountState.MISSING: (
        "the job directory does not exist; the daemon publishes and removes nothing until it does",
        "findmnt -T {root}; mount it again, or for a new job: mkdir -p {root}",
    ),
    MountState.REPLACED: (
        "another directory is in the place of the job, which may be unmounted; the daemon does not touch it",
        "findmnt -T {root}; mount the job again, or restart the daemon if this directory is the right one",
    ),
    MountState.STALE: (
        "the mount's handle of the job directory is stale: the server has replaced the directory",
        "findmnt -T {root}; umount and mount it again",
    ),
    MountState.READ_ONLY: (
        "the file system is read-only; the daemon publishes and removes nothing until it is writable",
        "findmnt -T {root}; dmesg | tail; repair the cause, then: mount -o remount,rw",
    ),
    MountState.FULL: (
        "the file system is full; the daemon publishes nothing until space is free",
        "df -h {root}; du -xsh {root}/*  # delete other files, or keep fewer steps: keep_last, max_bytes",
    ),
    MountState.NO_INODES: (
        "the file system has no free inode: it has space, and cannot create a file",
        "df -i {root}; du --inodes -xs {root}/* | sort -n  # delete many small files",
    ),
    MountState.QUOTA: (
        "the quota is used up; the daemon publishes nothing until space is free",
        "quota -s; lfs quota -h {root}; btrfs qgroup show {root}  # delete other files, or ask for more",
    ),
    MountState.FAILING: ("the file system fails", "findmnt -T {root}; ls -ld {root}; dmesg | tail"),
}


def mount_trouble(state: MountState, root: str, detail: str = "") -> MountTrouble:
    """Return the message and hint of a state other than `ok`; `detail` is what is known beyond the state."""
    message, hint = _TEXTS[state]
    return MountTrouble(
        state, f"{message} ({detail})" if detail else message, hint.format(root=shlex.quote(root))
    )


def mount_trouble_of(error: SyncdError, root: str, inodes: int | None = None) -> MountTrouble | None:
    """Return what an error says about the file system, None when it says nothing about it.

    `inodes` is how many files may still be made there, None where that is not known or not bounded.
    """
    if not isinstance(error, StorageError):
        return None
    return mount_trouble(_state(error, inodes), root, str(error))


def _state(error: StorageError, inodes: int | None) -> MountState:
    if isinstance(error, JobReplacedError):
        return MountState.REPLACED
    if isinstance(error, JobMissingError):
        return MountState.MISSING
    state = _STATES.get(error.errno or 0, MountState.FAILING)
    return MountState.NO_INODES if state is MountState.FULL and inodes == 0 else state
