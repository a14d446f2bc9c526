"""Fencing: makes every earlier leader unable to publish or delete, and takes over what it left in its trash."""

import contextlib
import uuid
from collections.abc import Callable

from syncd.errors import StorageError, SyncdError
from syncd.protocol.disk import MISSING, Disk, list_if_there, remove_tree
from syncd.protocol.layout import Job
from syncd.protocol.obstacle import Obstacle, obstacle_to_moving
from syncd.protocol.process import Process
from syncd.protocol.term import is_private, parse_token, read_leader

CLAIM, _WITHDRAWN = ".claim-", ".withdrawn-"
_ATTEMPTS = 50


def fence_below(
    job: Job, highest: int, heir: str, gone: Callable[[Process], bool] = Process.is_gone
) -> tuple[Obstacle, ...]:
    """Make every earlier leader unable to publish or delete, and take over what it left in its trash.

    Args:
        job: The job.
        highest: The token of the new leader.
        heir: The new leader's trash.
        gone: Says whether a leader's process has certainly ended.

    Returns:
        What would not go of leaders that have ended: they need not be fenced.

    Raises:
        StorageError: A directory of a term would not go whose leader may live.
    """
    fence = _Fence(job, highest, gone)
    # A late claim may still take a place while the first look is worked off; after a clean look none can.
    while below := [entry.name for entry in list_if_there(job.disk, job.lock) if fence.concerns(entry.name)]:
        for name in below:
            fence.shut(name)
    # The term's own trash is not made here: whoever is fenced meanwhile must not get back a place to remove
    # to.
    for entry in list_if_there(job.disk, job.trash):
        token = parse_token(entry.name)
        if token and token < highest and entry.kind != "directory":
            # Nobody but a stranger puts a link or a file there: it goes, and what it leads to stays.
            remove_tree(job.disk, f"{job.trash}/{entry.name}")
        elif token and token < highest:
            fence.take_over(token, f"{job.trash}/{entry.name}", heir)
    return tuple(fence.left.values())


class _Fence:
    """One fencing of all terms below one, and what it had to leave."""

    def __init__(self, job: Job, highest: int, gone: Callable[[Process], bool]) -> None:
        self._job, self._highest, self._gone = job, highest, gone
        self._ended: dict[int, bool] = {}
        self.left: dict[str, Obstacle] = {}

    def concerns(self, name: str) -> bool:
        """Say whether a name in the lock is of an earlier term, and not left already."""
        return _is_below(name, self._highest) and f"{self._job.lock}/{name}" not in self.left

    def shut(self, name: str) -> None:
        """Remove the directory of a term, or of a claim."""
        token, path = parse_token(name), f"{self._job.lock}/{_withdrawn(self._job, name)}"
        if token:
            self._ended[token] = self._has_ended(token)
        try:
            remove_surely(self._job.disk, path)
        except StorageError as error:
            self._leave(token, path, error)

    def take_over(self, token: int, path: str, heir: str) -> None:
        """Empty the trash of a term into another one."""
        try:
            _empty_surely(self._job.disk, path, heir)
        except StorageError as error:
            self._leave(token, path, error)

    def _leave(self, token: int | None, path: str, error: StorageError) -> None:
        cause = error.__cause__
        # Any other error than a lack of permission means that somebody still writes there, or passes.
        denied = PermissionError(cause.errno, cause.strerror) if isinstance(cause, PermissionError) else None
        obstacle = obstacle_to_moving(denied, path) if denied else None
        if obstacle is None:
            raise error
        if not self._ended.get(token or 0, False):
            # Its leader may wake up: until its directories are gone it could publish and delete.
            raise StorageError(
                f"{error.message}: {obstacle.message} ({obstacle.owner})", path=path, hint=obstacle.hint
            )
        self.left[path] = obstacle

    def _has_ended(self, token: int) -> bool:
        try:
            leader = read_leader(self._job, token)
        except (OSError, SyncdError):
            return False
        return leader.released or self._gone(leader.process)


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
    last: OSError | None = None
    for _ in range(_ATTEMPTS):
        try:
            remove_tree(disk, path)
        except OSError as error:
            last = error
        else:
            return
    raise StorageError("an earlier daemon's term cannot be removed", path=path) from last


def _empty_surely(disk: Disk, path: str, heir: str) -> None:
    last: OSError | None = None
    for _ in range(_ATTEMPTS):
        try:
            for entry in list_if_there(disk, path):
                if is_private(entry):
                    _empty_surely(disk, f"{path}/{entry.name}", heir)
                    continue
                with contextlib.suppress(*MISSING):  # earlier releases put steps right here
                    disk.rename(f"{path}/{entry.name}", f"{heir}/{entry.name}")
            disk.remove_directory(path)
        except FileNotFoundError:
            return
        except OSError as error:
            last = error
        else:
            return
    raise StorageError("an earlier daemon's trash cannot be taken over", path=path) from last
