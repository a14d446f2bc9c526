"""Publishes the version and moves steps to the trash, in the leader's term: a deposed leader fails on the server.

Nothing else publishes a version or prunes published steps. docs/protocol.md lists every place that deletes in a job.
"""

import contextlib
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from syncd.daemon.leases import Beat, Claims, Dead, read_claims
from syncd.daemon.plan import Answer
from syncd.errors import CorruptDataError, FencedError, SyncdError
from syncd.protocol.disk import (
    MISSING,
    Clock,
    Disk,
    exists,
    is_below,
    is_temporary,
    list_if_there,
    remove_tree,
)
from syncd.protocol.documents import SMALL_LIMIT, read_document
from syncd.protocol.layout import FULL_CHECKPOINT, MARKER, TRACKER, Job
from syncd.protocol.leadership import Term
from syncd.protocol.manifest import read_manifest
from syncd.protocol.presence import Presences, path_of
from syncd.protocol.request import request_path
from syncd.protocol.step import NATIVE, Step
from syncd.protocol.version import Version, encode_version, read_marker, read_version_or_none

_MARKERS = (f".{MARKER}.", f".{TRACKER}.")
"""How the names of the markers' temporary files begin."""


@dataclass(frozen=True, slots=True)
class Emptied:
    """What one emptying of the trash did."""

    entries: int = 0
    files: int = 0
    left: int = 0


class Actor:
    """Acts for one term.

    Args:
        job: The job.
        term: The leadership that fences every act.
        clock: This host's clock.
        presences: Reads presences; not for another thread.
    """

    def __init__(self, job: Job, term: Term, clock: Clock, presences: Presences) -> None:
        self._job, self._term, self._clock, self._presences = job, term, clock, presences
        self._trashed_at: dict[str, float] = {}
        self._left_since: dict[str, float] = {}

    def publish(self, version: Version) -> Version:
        """Replace the version file and return what was published.

        Raises:
            FencedError: A newer leader has moved over, or has published this or more.
        """
        stamped = replace(version, term=self._term.token, published_at=self._clock.time())
        current = read_version_or_none(self._job)
        if current and current.pair >= stamped.pair:
            raise FencedError(f"version {current.generation}.{current.step} is published already")
        if version.layout == NATIVE:
            # Its writer may have died between a rename and the sync of that name: what is announced must outlast
            # a power cut that the announcement outlasts.
            for directory in (self._job.step(version.step), self._job.root):
                self._job.disk.sync_directory(directory)
        self._term.publish(self._job.version, encode_version(stamped))
        return stamped

    def remove(self, steps: Iterable[Step], dead: Dead) -> dict[int, str | OSError]:
        """Move steps to the trash, except those that have been leased, pinned or made a full checkpoint meanwhile.

        Leases and pins are read once before the first rename and once again after the last: a lease that came in
        between puts its step back, so a reader that wrote its lease and then found the manifest keeps its step. The
        second reading begins after every rename of this call, which is all that it has to; read for each step by
        itself, the presences of thousands of explorers would take longer than all else.

        Args:
            steps: The steps.
            dead: Whose leases are void. One that beats again is alive.

        Returns:
            By step: why it was left in place, empty where it was moved; the error where it cannot be moved, or where
            nobody knows who reads it.

        Raises:
            FencedError: A newer leader has moved over.
            OSError: Nobody knows who reads what; nothing was moved.
        """
        claims = read_claims(self._job, dead, self._presences)
        moved: dict[str, Step] = {}
        found: dict[int, str | OSError] = {}
        try:
            for step in steps:
                found[step.step] = self._move_to_trash(step, claims, moved)
        finally:
            found.update(self._check_again(moved, dead))
        return found

    def _move_to_trash(self, step: Step, claims: Claims, moved: dict[str, Step]) -> str | OSError:
        name = f"{step.directory}.{step.step}.{uuid.uuid4().hex[:8]}"
        try:
            if step.is_attempt:
                return "" if self.remove_attempt(step) else "it is there no longer"
            if reason := self._claimed(step, f"{self._job.root}/{step.directory}", claims):
                return reason
            self._trashed_at[name] = self._clock.monotonic()
            self._term.move_to_trash(f"{self._job.root}/{step.directory}", name)
        except OSError as error:
            self._trashed_at.pop(name, None)
            return error
        moved[name] = step
        return ""

    def _check_again(self, moved: Mapping[str, Step], dead: Dead) -> dict[int, str | OSError]:
        """Put back what is claimed now, and what may be claimed because the claims cannot be read."""
        if not moved:
            return {}
        found: dict[int, str | OSError] = {}
        claims: Claims | OSError
        try:
            claims = read_claims(self._job, dead, self._presences)
        except OSError as error:
            claims = error
        for name, step in moved.items():
            reason = claims if isinstance(claims, OSError) else self._claimed_in_trash(step, name, claims)
            is_back = bool(reason) and self._put_back(name, step.directory)
            found[step.step] = reason if is_back or isinstance(reason, OSError) else ""
        return found

    def _claimed_in_trash(self, step: Step, name: str, claims: Claims) -> str | OSError:
        try:
            return self._claimed(step, f"{self._term.trash}/{name}", claims)
        except OSError as error:
            return error

    def remove_attempt(self, attempt: Step) -> bool:
        """Move an attempt that nobody will seal to the trash; return whether it was still there.

        Nobody reads one, so it is deleted when the trash is emptied next, without a grace time.

        Raises:
            FencedError: A newer leader has moved over.
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

    def answer(self, answer: Answer) -> None:
        """Remove a request that is completed or refused.

        Raises:
            FencedError: A newer leader has moved over; the request is its to answer.
        """
        self._term.discard(request_path(self._job, answer.request.identity))

    def forget(self, name: str, last: Beat) -> bool:
        """Remove the presence of an explorer that has been silent for long; return whether it is removed.

        Args:
            name: The explorer.
            last: Its last heartbeat. One that beats again meanwhile gets its file back.

        Raises:
            FencedError: A newer leader has moved over.
        """
        path, disk = path_of(self._job.explorers, name), self._job.disk
        aside = self._term.set_aside(path)
        if aside is None:
            return False
        if _beat_at(disk, aside) != last and not exists(disk, path):
            disk.rename(aside, path)
            return False
        with contextlib.suppress(OSError):
            disk.unlink(aside)
        return True

    def sweep(self, grace: float) -> int:
        """Remove the temporary files that writers killed in mid-write have left, and return how many.

        Only names that this protocol gives, in places that this protocol writes, and only what has been there for
        `grace` seconds of this clock: what is younger may be about to be renamed.

        Args:
            grace: Seconds that a temporary file must have been seen.
        """
        there, left = list(self._temporaries()), self._left_since
        now = self._clock.monotonic()  # after the listing: nothing is older than the first look that saw it
        self._left_since = {path: left.get(path, now) for path in there}
        old = [path for path, since in self._left_since.items() if now - since >= grace]
        for path in old:
            with contextlib.suppress(OSError):
                self._job.disk.unlink(path)
        return len(old)

    def _temporaries(self) -> Iterator[str]:
        job = self._job
        for directory in (job.explorers, job.trainers, job.pins, job.requests):
            # The scanner reports a directory that cannot be listed; here only its files are left.
            with contextlib.suppress(PermissionError):
                for entry in list_if_there(job.disk, directory):
                    if entry.kind == "file" and is_temporary(entry.name):
                        yield f"{directory}/{entry.name}"
        if not is_below(job.state, job.root):
            return  # the daemon must not remove files of this job directory
        for entry in list_if_there(job.disk, job.root):
            if entry.kind == "file" and is_temporary(entry.name) and entry.name.startswith(_MARKERS):
                yield f"{job.root}/{entry.name}"

    def empty_trash(self, grace: float, dead: Dead) -> Emptied:
        """Delete what has been in the trash for `grace` seconds of this clock; what cannot go yet stays for later.

        A step that somebody reads is put back: the leader that moved it may have died before it looked at the
        leases again.

        Args:
            grace: Seconds that removed steps stay.
            dead: As for `remove`.
        """
        entries = files = left = 0
        for entry in list_if_there(self._job.disk, self._term.trash):
            inherited = entry.name not in self._trashed_at
            since = self._trashed_at.setdefault(entry.name, self._clock.monotonic())
            due = self._clock.monotonic() - since >= grace
            if ((inherited or due) and self._is_rescued(entry.name, dead)) or not due:
                left += 1
                continue
            try:
                files += remove_tree(self._job.disk, f"{self._term.trash}/{entry.name}")
            except OSError:
                left += 1  # a reader on this host holds a file open, or the mount is in trouble
            else:
                entries += 1
                self._trashed_at.pop(entry.name, None)
        return Emptied(entries, files, left)

    def _is_rescued(self, name: str, dead: Dead) -> bool:
        """Put a step of the trash back if it is leased or pinned; return whether it must not be deleted."""
        found = step_in_trash(name)
        if found is None or exists(self._job.disk, f"{self._job.root}/{found[0]}"):
            return False
        directory, step = found
        try:
            if read_claims(self._job, dead).why(step) is None:
                return False
        except OSError:
            return True
        self._put_back(name, directory)
        return True

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

    def _put_back(self, name: str, directory: str) -> bool:
        try:
            self._job.disk.rename(f"{self._term.trash}/{name}", f"{self._job.root}/{directory}")
        except (*MISSING, OSError):
            return False
        self._trashed_at.pop(name, None)
        with contextlib.suppress(
            OSError
        ):  # after a power cut the next leader finds it in the trash, and leased
            self._job.disk.sync_directory(self._job.root)
        return True


def _beat_at(disk: Disk, path: str) -> Beat | None:
    """Return what a presence file that was moved says of its last heartbeat, None where it does not say."""
    try:
        fields = read_document(disk, path, SMALL_LIMIT)
        return fields.text("incarnation", ""), fields.integer("beat")
    except (*MISSING, SyncdError):
        return None


def _digest_at(disk: Disk, path: str) -> str:
    """Return the digest of the manifest in a step's directory, empty where there is none that can be read."""
    try:
        disk.refresh(path)
        return read_manifest(disk, path).digest
    except (*MISSING, CorruptDataError):
        return ""


def step_in_trash(name: str) -> tuple[str, int] | None:
    """Return directory and step of a trash entry by its name, None where it is not a step."""
    directory, _, number = name.rpartition(".")[0].rpartition(".")
    return (directory, int(number)) if directory and number.isdecimal() else None
