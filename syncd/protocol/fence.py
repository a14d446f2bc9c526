"""Fencing: makes every earlier leader unable to publish or delete, and takes over what it left in its trash."""

import contextlib
import uuid

from syncd.errors import StorageError
from syncd.protocol.disk import MISSING, Disk, list_if_there, remove_tree
from syncd.protocol.layout import Job
from syncd.protocol.term import is_private, parse_token

CLAIM, _WITHDRAWN = ".claim-", ".withdrawn-"
_ATTEMPTS = 50


def fence_below(job: Job, highest: int, heir: str) -> None:
    """Make every earlier leader unable to publish or delete, and take over what it left in its trash.

    Args:
        job: The job.
        highest: The token of the new leader.
        heir: The new leader's trash.

    Raises:
        StorageError: A directory of an earlier term would not go.
    """
    # A late claim may still take a place while the first look is worked off; after a clean look none can.
    while below := [
        entry.name for entry in list_if_there(job.disk, job.lock) if _is_below(entry.name, highest)
    ]:
        for name in below:
            remove_surely(job.disk, f"{job.lock}/{_withdrawn(job, name)}")
    # The term's own trash is not made here: whoever is fenced meanwhile must not get back a place to remove
    # to.
    for entry in list_if_there(job.disk, job.trash):
        token = parse_token(entry.name)
        if token and token < highest and entry.kind != "directory":
            # Nobody but a stranger puts a link or a file there: it goes, and what it leads to stays.
            remove_tree(job.disk, f"{job.trash}/{entry.name}")
        elif token and token < highest:
            _empty_surely(job.disk, f"{job.trash}/{entry.name}", heir)


def _is_below(name: str, highest: int) -> bool:
    token = parse_token(name)
    return token < highest if token else name.startswith((CLAIM, _WITHDRAWN))


def _withdrawn(job: Job, name: str) -> str:
    # One rename decides between who prepared a claim and who fences. Emptied in its place, a claim could
    # still be renamed to a token, and over an empty directory the next claim of that token would be renamed
    # as well.
    if not name.startswith(CLAIM):
        return name
    withdrawn = f"{_WITHDRAWN}{uuid.uuid4().hex}"
    with contextlib.suppress(*MISSING):
        job.disk.rename(f"{job.lock}/{name}", f"{job.lock}/{withdrawn}")
    return withdrawn


def remove_surely(disk: Disk, path: str) -> None:
    """Remove a directory that somebody may still be writing to.

    Raises:
        StorageError: It would not go.
    """
    # The old leader may still be creating files in it: until rmdir succeeds it is not fenced.
    for _ in range(_ATTEMPTS):
        try:
            remove_tree(disk, path)
        except OSError:
            continue
        else:
            return
    raise StorageError("an earlier daemon's term cannot be removed", path=path)


def _empty_surely(disk: Disk, path: str, heir: str) -> None:
    for _ in range(_ATTEMPTS):
        for entry in list_if_there(disk, path):
            if is_private(entry):
                _empty_surely(disk, f"{path}/{entry.name}", heir)
                continue
            with contextlib.suppress(*MISSING):  # earlier releases put steps right here
                disk.rename(f"{path}/{entry.name}", f"{heir}/{entry.name}")
        try:
            disk.remove_directory(path)
        except FileNotFoundError:
            return
        except OSError:
            continue
        else:
            return
    raise StorageError("an earlier daemon's trash cannot be taken over", path=path)
