"""The trash: moves steps and attempts there, puts back what somebody reads, and deletes the rest after its grace.

Retention decides which steps go, `removals` in which order. A deposed leader fails on the server. docs/protocol.md
lists every place that deletes in a job.
"""

import contextlib
import errno
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import NamedTuple

from syncd.daemon.leases import Claims, Dead, read_claims
from syncd.daemon.needed_links import Links, links_in_trash, parents_of
from syncd.errors import CorruptDataError, FencedError
from syncd.protocol.disk import MISSING, Clock, Disk, exists, list_if_there, remove_tree
from syncd.protocol.layout import FULL_CHECKPOINT, Job
from syncd.protocol.leadership import Term, is_private, parse_token
from syncd.protocol.manifest import read_manifest
from syncd.protocol.presence import Presences
from syncd.protocol.step import Step
from syncd.protocol.version import read_marker

ReadClaims = Callable[[], Claims]


class Emptied(NamedTuple):
    """What one emptying of the trash did: entries and files that were deleted, and entries that are left."""

    entries: int = 0
    files: int = 0
    left: int = 0


class Trash:
    """The trash of one term.

    Args:
        term: The leadership that fences every move.
        presences: Reads presences; not for another thread.
    """

    def __init__(self, job: Job, term: Term, clock: Clock, presences: Presences) -> None:
        self._job, self._term, self._clock, self._presences = job, term, clock, presences
        self._trashed_at: dict[str, float] = {}
        self.stuck: Mapping[str, Exception] = {}
        """What could not be deleted when the trash was emptied last, by path."""

    def remove(self, steps: Iterable[Step], dead: Dead, links: Links) -> dict[int, str | Exception]:
        """Move steps to the trash, except those that have been leased, pinned or made a full checkpoint meanwhile.

        A step that stays keeps its chain. Deltas that were sealed meanwhile keep theirs: the job is listed once after
        the last rename and after the leases.

        Leases and pins are read once before the first rename and once again after the last: a lease that came in
        between puts its step back, so a reader that wrote its lease and then found the manifest keeps its step. Read
        for each step by itself, the presences of thousands of explorers would take longer than all else.

        Args:
            steps: The steps, each delta before its parent.
            links: Which links must stay; it learns of those of these steps.

        Returns:
            By step: why it was left in place, empty where it was moved; the error where it cannot be moved, or where
            nobody knows who reads it.
        """
        claims = read_claims(self._job, dead, self._presences)
        moved: dict[str, Step] = {}
        outcomes: dict[int, str | Exception] = {}
        try:
            for step in steps:
                outcomes[step.step] = self._move_to_trash(step, claims, links, moved)
                if outcomes[step.step]:
                    links.keep(step)
        finally:
            outcomes.update(self._check_again(moved, dead, links))
        return outcomes

    def _move_to_trash(
        self, step: Step, claims: Claims, links: Links, moved: dict[str, Step]
    ) -> str | Exception:
        name = f"{step.directory}.{step.step}.{uuid.uuid4().hex[:8]}"
        try:
            if step.is_attempt:
                return "" if self.remove_attempt(step) else "it no longer exists"
            path = f"{self._job.root}/{step.directory}"
            if reason := links.why(step.step) or self._claimed(step, path, claims):
                return reason
            self._trashed_at[name] = self._clock.monotonic()
            self._term.move_to_trash(f"{self._job.root}/{step.directory}", name)
        except FencedError:
            raise
        except Exception as error:  # noqa: BLE001 - one step costs itself only
            self._trashed_at.pop(name, None)
            return error
        moved[name] = step
        return ""

    def _check_again(self, moved: Mapping[str, Step], dead: Dead, links: Links) -> dict[int, str | Exception]:
        """Put back what is claimed or needed now, and what may be because that cannot be read."""
        if not moved:
            return {}
        outcomes: dict[int, str | Exception] = {}
        claims: Claims | Exception
        try:
            claims = read_claims(self._job, dead, self._presences)
            links.read_new(moved.values())
        except OSError as error:
            claims = error
        for name, step in moved.items():
            reason = claims if isinstance(claims, Exception) else self._claimed_in_trash(step, name, claims)
            reason = reason or links.why(step.step)
            if reason:
                links.keep(step)
            is_back = bool(reason) and put_back(self._job, f"{self._term.trash}/{name}", step.directory)
            outcomes[step.step] = reason if is_back or isinstance(reason, Exception) else ""
        return outcomes

    def _claimed_in_trash(self, step: Step, name: str, claims: Claims) -> str | Exception:
        try:
            return self._claimed(step, f"{self._term.trash}/{name}", claims)
        except OSError as error:
            return error

    def remove_attempt(self, attempt: Step) -> bool:
        """Move an attempt that nobody will seal to the trash; return whether it was still there.

        Nobody reads one, so it is deleted when the trash is emptied next, without a grace time.
        """
        name = f"attempt-{uuid.uuid4().hex}"
        self._trashed_at[name] = float("-inf")
        try:
            self._term.move_to_trash(f"{self._job.root}/{attempt.directory}", name)
        except OSError as error:
            self._trashed_at.pop(name, None)
            if not isinstance(error, MISSING):
                raise
            return False  # it has become the step, or its writer has removed it
        return True

    def rescue_links(self, parents: Mapping[int, int | None]) -> bool:
        """Put back what steps of the job are stored as changes of; return whether there was anything.

        A delta may have been sealed after the last look, or the leader that moved its parent died before it.
        """
        entries = list_if_there(self._job.disk, self._term.trash)
        return _rescue_links(self._job, [f"{self._term.trash}/{entry.name}" for entry in entries], parents)

    def empty(self, grace: float, dead: Dead) -> Emptied:
        """Delete what has been in the trash for `grace` seconds of this clock; what cannot go yet stays for later.

        A step that somebody reads is put back: the leader that moved it may have died before it looked at the
        leases again. They are read once, after the listing: whoever leases one of these steps later finds it gone.
        """
        claims = cache(partial(read_claims, self._job, dead))
        entries = files = left = 0
        stuck: dict[str, Exception] = {}
        for entry in list_if_there(self._job.disk, self._term.trash):
            path = f"{self._term.trash}/{entry.name}"
            try:
                if not self._is_due(entry.name, path, grace, claims):
                    left += 1
                    continue
                path = self._doomed(path)
                files += remove_tree(self._job.disk, path)
            except Exception as error:  # noqa: BLE001 - one entry costs itself only
                stuck[path], left = error, left + 1
                continue
            entries += 1
            self._trashed_at.pop(path.rpartition("/")[2], None)
        self.stuck = stuck
        return Emptied(entries, files, left)

    def _is_due(self, name: str, path: str, grace: float, claims: ReadClaims) -> bool:
        """Return whether an entry may be deleted now: its grace is over, and nobody reads it."""
        inherited = name not in self._trashed_at
        since = self._trashed_at.setdefault(name, self._clock.monotonic())
        due = self._clock.monotonic() - since >= grace
        return not ((inherited or due) and _is_rescued(self._job, path, claims)) and due

    def _doomed(self, path: str) -> str:
        """Rename an entry so that nobody puts it back, and return its path."""
        doomed = _doomed(self._job.disk, path)
        self._trashed_at.pop(path.rpartition("/")[2], None)
        self._trashed_at[doomed.rpartition("/")[2]] = float("-inf")  # due whenever it is tried again
        return doomed

    def _claimed(self, step: Step, path: str, claims: Claims) -> str:
        return claims.why(step.step) or (self._changed(step, path) if step.is_native else None) or ""

    def _changed(self, step: Step, path: str) -> str | None:
        """Return how a step has changed since it was examined, which may be long ago; None if it has not."""
        if _digest_at(self._job.disk, path) != step.digest:
            return "it has been written again"
        if not step.full and FULL_CHECKPOINT in {entry.name for entry in list_if_there(self._job.disk, path)}:
            return "it has become a full checkpoint"
        if read_marker(self._job.disk, self._job.marker).step == step.step:
            return "the trainer has announced it"
        tracker = read_marker(self._job.disk, self._job.tracker)
        if tracker.step == step.step or (tracker.unreadable and step.full):
            return "the trainer resumes from it, or may do so"
        return None


def _digest_at(disk: Disk, path: str) -> str:
    try:
        disk.refresh(path)
        return read_manifest(disk, path).digest
    except (*MISSING, CorruptDataError):
        return ""


class DeadLeadersTrash:
    """Empties the trash of dead leaders whose place is free, on a full disk, before the claim that needs room.

    A candidate that empties it leads nothing and fences nobody, so it must do no harm to a leader that was only
    silent:

    - It deletes nothing that it has not seen in the trash for the whole grace time.
    - It puts back a step that anybody leases or pins, as a leader does. Whoever has a presence counts as alive.
    - It renames an entry before it deletes it, if there is room for that. A leader that wakes up and wants to put
      that step back no longer finds it, so no half-deleted step is put back.
    """

    def __init__(self, job: Job, clock: Clock) -> None:
        self._job, self._clock = job, clock
        self._since: dict[str, float] = {}

    def empty(self, highest: int, grace: float) -> int:
        """Delete what earlier leaders have left, and return how many files; what must wait stays for later.

        Args:
            highest: The highest term whose place was seen to be free.
        """
        there = self._entries(highest)
        now = self._clock.monotonic()  # after the listing: no entry is older than its first sighting
        self._since = {path: self._since.get(path, now) for path in there}
        due = [path for path in there if now - self._since[path] >= grace]
        if due:
            _rescue_links(self._job, there, parents_of(self._job))
        claims = cache(partial(read_claims, self._job, {}))
        return sum(self._delete(path, claims) for path in due)

    def _entries(self, highest: int) -> list[str]:
        trash = self._job.trash
        terms = [entry.name for entry in list_if_there(self._job.disk, trash) if entry.kind == "directory"]
        old = [name for name in terms if 0 < (parse_token(name) or 0) <= highest]
        return [path for name in old for path in self._in_trash(f"{trash}/{name}")]

    def _in_trash(self, trash: str) -> Iterator[str]:
        """Yield the entries of a term's trash, which are those of its claims."""
        disk = self._job.disk
        for claim in filter(is_private, list_if_there(disk, trash)):
            yield from (
                f"{trash}/{claim.name}/{entry.name}" for entry in list_if_there(disk, f"{trash}/{claim.name}")
            )

    def _delete(self, path: str, claims: ReadClaims) -> int:
        try:
            if _is_rescued(self._job, path, claims):
                return 0
            return remove_tree(self._job.disk, _doomed(self._job.disk, path))
        except Exception:  # noqa: BLE001 - somebody else was faster, or it cannot be deleted: the claim must not wait
            return 0


def _rescue_links(job: Job, paths: Iterable[str], parents: Mapping[int, int | None]) -> bool:
    """Put back the entries of a trash that steps of the job are stored as changes of; return whether any is back."""
    is_back = False
    entries = {path: _entry(path) for path in paths}
    steps = {path: entry[1] for path, entry in entries.items() if entry}
    for path in links_in_trash(job, parents, steps):
        if (entry := entries[path]) and not exists(job.disk, f"{job.root}/{entry[0]}"):
            is_back |= put_back(job, path, entry[0])
    return is_back


def _doomed(disk: Disk, path: str) -> str:
    """Return the path of an entry that is to be deleted under a name that is no step's: no half of it comes back.

    Where a full disk or a quota refuses the rename it keeps its name. ZFS at its quota refuses all renames until
    something was deleted, which may be in the trash alone. Putting a step back is a rename, too: a half of it can
    come back only if this process dies on the way, once there is room again.
    """
    if _entry(path) is None:
        return path
    doomed = f"{path}.being.deleted"
    try:
        disk.rename(path, doomed)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return path
    return doomed


def _entry(path: str) -> tuple[str, int] | None:
    """Return the directory and the number of the step that an entry of the trash was, None if it is no whole step."""
    directory, _, number = path.rpartition("/")[2].rpartition(".")[0].rpartition(".")
    return (directory, int(number)) if directory and number.isdecimal() else None


def _is_rescued(job: Job, path: str, claims: ReadClaims) -> bool:
    """Put back an entry that somebody leases or pins; return whether it is back, or its readers are unknown."""
    entry = _entry(path)
    if entry is None or exists(job.disk, f"{job.root}/{entry[0]}"):
        return False
    directory, number = entry
    try:
        if claims().why(number) is None:
            return False
    except OSError:
        return True
    put_back(job, path, directory)
    return True


def put_back(job: Job, path: str, directory: str) -> bool:
    try:
        job.disk.rename(path, f"{job.root}/{directory}")
    except OSError:
        return False
    with contextlib.suppress(OSError):  # after a power cut the next leader finds it in the trash, and leased
        job.disk.sync_directory(job.root)
    return True
