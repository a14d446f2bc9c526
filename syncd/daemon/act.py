"""The only code that publishes or deletes: inside its term, so that a deposed leader's acts fail on the server."""

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from syncd.daemon.plan import Answer
from syncd.daemon.snapshot import NATIVE, Step
from syncd.errors import CorruptDataError, FencedError, ProtocolTooNewError, SyncdError
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
from syncd.protocol.manifest import read_manifest
from syncd.protocol.marker import read_marker
from syncd.protocol.pin import read_pins
from syncd.protocol.presence import path_of, read_presences
from syncd.protocol.request import request_path
from syncd.protocol.term import Term
from syncd.protocol.version import Version, encode_version, read_version

_MARKERS = (f".{MARKER}.", f".{TRACKER}.")
"""How the names of the markers' temporary files begin."""

Beat = tuple[str, int]
"""(incarnation, beat) of a presence."""


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
    """

    def __init__(self, job: Job, term: Term, clock: Clock) -> None:
        self._job, self._term, self._clock = job, term, clock
        self._trashed_at: dict[str, float] = {}
        self._left_since: dict[str, float] = {}

    def publish(self, version: Version) -> Version:
        """Replace the version file and return what was published.

        Raises:
            FencedError: A newer leader has taken over, or has published this or more.
        """
        stamped = replace(version, term=self._term.token, published_at=self._clock.time())
        current = self._published()
        if current and current.pair >= stamped.pair:
            raise FencedError(f"version {current.generation}.{current.step} is published already")
        if version.layout == NATIVE:
            # Its writer may have died between the rename of the manifest and the sync of that name: what is
            # announced must outlast a power cut that the announcement outlasts.
            self._job.disk.sync_directory(self._job.step(version.step))
        self._term.publish(self._job.version, encode_version(stamped))
        return stamped

    def _published(self) -> Version | None:
        try:
            return read_version(self._job)
        except ProtocolTooNewError:
            raise
        except CorruptDataError:
            return None

    def remove(self, step: Step, dead: Mapping[str, Beat]) -> str | None:
        """Move a step to the trash, unless it has been leased, pinned or made a full checkpoint meanwhile.

        All this is read before the rename and again after it: a lease that came between the two puts the step
        back, so a reader that wrote its lease and then found the manifest keeps its step.

        Args:
            step: The step.
            dead: The explorers and trainers whose leases are void, each with its last heartbeat: one that beats
                again is alive.

        Returns:
            Why it was left in place, None when it was moved.

        Raises:
            FencedError: A newer leader has taken over.
        """
        if reason := self._claimed(step, f"{self._job.root}/{step.directory}", dead):
            return reason
        name = f"{step.directory}.{step.step}.{uuid.uuid4().hex[:8]}"
        self._trashed_at[name] = self._clock.monotonic()
        self._term.take(f"{self._job.root}/{step.directory}", name)
        try:
            reason = self._claimed(step, f"{self._term.trash}/{name}", dead)
        except OSError:
            # Nobody knows whether it is read now: it stays.
            self._put_back(name, step.directory)
            raise
        if reason and self._put_back(name, step.directory):
            return reason
        return None

    def answer(self, answer: Answer) -> None:
        """Take a request away that is done or refused.

        Raises:
            FencedError: A newer leader has taken over; the request is its to answer.
        """
        self._term.discard(request_path(self._job, answer.request.identity))

    def forget(self, name: str, last: Beat) -> bool:
        """Remove the file of an explorer that has been silent for long; say whether it is gone.

        Args:
            name: The explorer.
            last: Its last heartbeat. One that beats again meanwhile gets its file back.

        Raises:
            FencedError: A newer leader has taken over.
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
            for entry in list_if_there(job.disk, directory):
                if entry.kind == "file" and is_temporary(entry.name):
                    yield f"{directory}/{entry.name}"
        if not is_below(job.state, job.root):
            return  # the job directory is not the daemon's to tidy
        for entry in list_if_there(job.disk, job.root):
            if entry.kind == "file" and is_temporary(entry.name) and entry.name.startswith(_MARKERS):
                yield f"{job.root}/{entry.name}"

    def empty_trash(self, grace: float, dead: Mapping[str, Beat]) -> Emptied:
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

    def _is_rescued(self, name: str, dead: Mapping[str, Beat]) -> bool:
        """Put a step of the trash back if it is leased or pinned; say whether it must not be deleted."""
        directory, _, number = name.rpartition(".")[0].rpartition(".")
        place = f"{self._job.root}/{directory}"
        if not directory or not number.isdecimal() or exists(self._job.disk, place):
            return False
        try:
            if self._held(int(number), dead) is None:
                return False
        except OSError:
            return True
        self._put_back(name, directory)
        return True

    def _claimed(self, step: Step, path: str, dead: Mapping[str, Beat]) -> str | None:
        if reason := self._held(step.step, dead):
            return reason
        return self._changed(step, path) if step.is_native else None

    def _held(self, step: int, dead: Mapping[str, Beat]) -> str | None:
        for directory in (self._job.explorers, self._job.trainers):
            presences, unreadable = read_presences(self._job.disk, directory)
            for name, presence in (presences | unreadable).items():
                if dead.get(name) == (presence.incarnation, presence.beat):
                    continue
                if presence.problem:
                    return f"what {name} leases cannot be read"
                if step in presence.leases:
                    return f"leased by {name}"
        return "pinned" if step in read_pins(self._job) else None

    def _changed(self, step: Step, path: str) -> str | None:
        """Say what has become of a step since it was examined, which may be long ago."""
        if _digest_at(self._job.disk, path) != step.digest:
            return "it has been written again"
        if not step.full and FULL_CHECKPOINT in {entry.name for entry in list_if_there(self._job.disk, path)}:
            return "it has become a full checkpoint"
        if read_marker(self._job.disk, self._job.marker).step == step.step:
            return "the trainer has announced it"
        resumes = read_marker(self._job.disk, self._job.tracker).step == step.step
        return "the trainer resumes from it" if resumes else None

    def _put_back(self, name: str, directory: str) -> bool:
        try:
            self._job.disk.rename(f"{self._term.trash}/{name}", f"{self._job.root}/{directory}")
        except (*MISSING, OSError):
            return False
        self._job.disk.sync_directory(self._job.root)
        self._trashed_at.pop(name, None)
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
