"""What is wrong with the file system of a job: one state, what it means, and what to do about it."""

import errno
import shlex
from dataclasses import dataclass
from enum import StrEnum

from syncd.errors import JobMissingError, JobReplacedError, StorageError, SyncdError


class MountState(StrEnum):
    """How the file system of a job is. docs/mounts.md says what the daemon does in each state."""

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
"""The states that a new start of the daemon does not end: it waits and reports."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong.

    Args:
        state: Which state, never `ok`.
        message: What it is and what it keeps from being done, in one sentence without a full stop.
        hint: What to run or to do.
    """

    state: MountState
    message: str
    hint: str


_STATES = {
    errno.ESTALE: MountState.STALE,
    errno.EROFS: MountState.READ_ONLY,
    errno.ENOSPC: MountState.FULL,
    errno.EDQUOT: MountState.QUOTA,
}

_TEXTS = {
    MountState.STUCK: (
        "the mount does not answer; work goes on by itself when it does",
        "findmnt; dmesg | tail  # is its server up? What asks the mount itself will hang, too",
    ),
    MountState.MISSING: (
        "the job directory is not there; nothing is published and nothing removed until it is",
        "findmnt -T {root}; mount it again, or for a new job: mkdir -p {root}",
    ),
    MountState.REPLACED: (
        "another directory is in the place of the job, perhaps unmounted; nothing of it is touched",
        "findmnt -T {root}; mount it again, or start the daemon anew if this one is meant",
    ),
    MountState.STALE: (
        "the mount's handle of the job directory is stale: its server has another one in its place",
        "findmnt -T {root}; umount and mount it again",
    ),
    MountState.READ_ONLY: (
        "the file system is read-only; nothing is published and nothing removed until it can be written",
        "findmnt -T {root}; dmesg | tail; mount -o remount,rw, after what made it read-only is mended",
    ),
    MountState.FULL: (
        "the file system is full; nothing is published until there is room",
        "df -h {root}; du -xsh {root}/*  # delete what is no step of the job; see keep_last and max_bytes",
    ),
    MountState.NO_INODES: (
        "the file system has no inode left: it has room, and no new file can be made",
        "df -i {root}; du --inodes -xs {root}/* | sort -n  # delete many small files",
    ),
    MountState.QUOTA: (
        "the quota is used up; nothing is published until there is room",
        "quota -s; lfs quota -h {root}; btrfs qgroup show {root}  # delete what is no step of the job",
    ),
    MountState.FAILING: ("the file system fails", "findmnt -T {root}; ls -ld {root}; dmesg | tail"),
}


def trouble(state: MountState, root: str, detail: str = "") -> Trouble:
    """Return what is said of a state.

    Args:
        state: Which, not `ok`.
        root: The job directory.
        detail: What is known beyond the state.
    """
    message, hint = _TEXTS[state]
    return Trouble(state, f"{message} ({detail})" if detail else message, hint.format(root=shlex.quote(root)))


def trouble_of(error: SyncdError, root: str, inodes: int | None = None) -> Trouble | None:
    """Return what an error says of the file system, None when it says nothing of it.

    Args:
        error: What an operation on the job ended with.
        root: The job directory.
        inodes: How many files may still be made on its file system, None where that is not known or not bounded.
    """
    if not isinstance(error, StorageError):
        return None
    return trouble(_state(error, inodes), root, str(error))


def _state(error: StorageError, inodes: int | None) -> MountState:
    if isinstance(error, JobReplacedError):
        return MountState.REPLACED
    if isinstance(error, JobMissingError):
        return MountState.MISSING
    state = _STATES.get(error.errno or 0, MountState.FAILING)
    return MountState.NO_INODES if state is MountState.FULL and inodes == 0 else state
