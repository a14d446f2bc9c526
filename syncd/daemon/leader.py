"""Leading a job or standing by: claims the next term, keeps its heartbeat, and loses it to a newer leader.

`Leftovers` empties the trash of dead leaders where a full disk keeps everybody from leading.
"""

import contextlib
import errno
import uuid
from collections.abc import Callable, Iterator

from syncd.config import DaemonConfig
from syncd.daemon.act import step_in_trash
from syncd.daemon.leases import read_claims
from syncd.daemon.report import EventReporter
from syncd.errors import FencedError, storage_error
from syncd.observe import names
from syncd.protocol.disk import MISSING, Clock, exists, is_below, list_if_there, remove_tree
from syncd.protocol.layout import Job
from syncd.protocol.leadership import Term, is_private, parse_token
from syncd.protocol.owner import check_owner, record_owner
from syncd.protocol.process import Process
from syncd.protocol.takeover import Candidate
from syncd.protocol.version import Pair


class DaemonLeader:
    """This process's part in leading a job: it holds the term, or knows who does.

    Args:
        job: The job.
        config: The configuration at start; a later one changes neither the take-over time nor who may remove.
        clock: This host's clock.
        reporter: Publishes events.
        process: Which process this is, for the lock.
        gone: Returns whether a leader's process has certainly ended.
    """

    def __init__(
        self,
        job: Job,
        config: DaemonConfig,
        clock: Clock,
        reporter: EventReporter,
        process: Process | None = None,
        gone: Callable[[Process], bool] = Process.is_gone,
    ) -> None:
        self._job, self._reporter = job, reporter
        removes = is_below(job.state, job.root) or config.prune_foreign
        self._candidate = Candidate(job, clock, config.takeover, process, gone, removes=removes)
        self._leftovers = Leftovers(job, clock)
        self._was_removed = False
        self.term: Term | None = None
        self.floor: Pair | None = None
        """The highest pair known to be published, as the heartbeat says it."""
        self.standing_by = ""
        """Why another daemon leads, empty while none is known to."""
        self.on_progress: Callable[[], None] = lambda: None

    @property
    def is_surely_led(self) -> bool:
        """Return whether another daemon that leads the job was seen to live."""
        return self._candidate.is_surely_led()

    def claim(self, floor: Pair | None, *, empty_trash_after: float | None) -> tuple[Term, bool] | None:
        """Claim the next term if the leader's place is free; otherwise stand by.

        Args:
            floor: The highest pair known to be published.
            empty_trash_after: On a full disk: the grace after which the trash of dead leaders is deleted first, since
                a claim writes a file. None while there is room.

        Returns:
            The term, and whether somebody has removed the state directory before it; None while another daemon leads.

        Raises:
            LockHeldError: Another daemon was faster.
        """
        job = self._job
        check_owner(job)
        holder = self._candidate.holder()
        if holder is not None:
            self.stand_by(f"{holder.host} (pid {holder.process.pid}) leads")
            return None
        if empty_trash_after is not None:
            with contextlib.suppress(OSError):
                self._leftovers.empty(self._candidate.free_after, empty_trash_after)
        was_removed = self._candidate.found_removed
        term = self._candidate.claim(floor)
        self._was_removed |= was_removed  # known even if the rest fails and is tried again
        for directory in (job.explorers, job.trainers, job.pins, job.requests):
            job.disk.make_directory(directory)
        record_owner(job, term)
        self.term, self.floor, self.standing_by = term, term.floor, ""
        was_removed, self._was_removed = self._was_removed, False
        self._reporter.publish(names.LEADERSHIP_ACQUIRED, "info", term=term.token)
        for obstacle in term.left:
            self._reporter.publish_obstacle(obstacle)
        return term, was_removed

    def stand_by(self, why: str) -> None:
        """Stop leading, since another daemon leads."""
        self.term = None
        if why != self.standing_by:
            self._reporter.publish(names.STANDBY_STARTED, "info", detail=why)
        self.standing_by = why

    def lose(self, error: FencedError) -> None:
        """Stop leading, since a newer leader has fenced this one."""
        self.term = None
        self._reporter.publish(names.LEADERSHIP_LOST, "warning", detail=error.message)

    def release(self) -> None:
        """End the term, so that a standby need not wait."""
        if self.term is not None:
            self.term.release()
            self.term = None

    def beat(self) -> None:
        """Publish the heartbeat if one is due.

        Raises:
            FencedError: A newer leader has taken over.
        """
        if self.term is not None:
            self.term.beat(self.floor)

    def progress(self) -> None:
        """Show the standbys and the service manager that work continues, during work that takes long.

        On a full disk the work that makes room comes first: the server refuses what a deposed leader removes anyway.

        Raises:
            FencedError: A newer leader has taken over.
            StorageError: The lock's directory is missing.
        """
        try:
            self.beat()
        except MISSING as error:
            # The caller must not take it for a missing file of the step that it examines.
            raise storage_error(error, self._job.lock) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        self.on_progress()


class Leftovers:
    """Empties the trash of dead leaders whose place is free, on a full disk, before the claim that needs room.

    A candidate that empties it leads nothing and fences nobody, so it must do no harm to a leader that was only
    silent:

    - It deletes nothing that it has not seen in the trash for the whole grace time.
    - It puts back a step that anybody leases or pins, as a leader does. Whoever has a presence counts as alive.
    - It renames an entry before it deletes it. A leader that wakes up and wants to put that step back no longer finds
      it, so no half-deleted step is ever put back.

    Args:
        job: The job.
        clock: This host's clock.
    """

    def __init__(self, job: Job, clock: Clock) -> None:
        self._job, self._clock = job, clock
        self._since: dict[str, float] = {}

    def empty(self, highest: int, grace: float) -> int:
        """Delete what earlier leaders have left, and return how many files; what must wait stays for later.

        Args:
            highest: The highest term whose place was seen to be free.
            grace: Seconds that removed steps stay, from when this process sees them first.
        """
        there = self._entries(highest)
        now = self._clock.monotonic()  # after the listing: no entry is older than its first sighting
        self._since = {path: self._since.get(path, now) for path in there}
        return sum(self._delete(path) for path in there if now - self._since[path] >= grace)

    def _entries(self, highest: int) -> list[str]:
        trash = self._job.trash
        terms = [entry.name for entry in list_if_there(self._job.disk, trash) if entry.kind == "directory"]
        old = [name for name in terms if 0 < (parse_token(name) or 0) <= highest]
        return [path for name in old for path in self._in_trash(f"{trash}/{name}")]

    def _in_trash(self, trash: str) -> Iterator[str]:
        """Yield the entries of a term's trash: those of its claim, and those that earlier releases put beside it."""
        for entry in list_if_there(self._job.disk, trash):
            if is_private(entry):
                yield from self._in_trash(f"{trash}/{entry.name}")
            else:
                yield f"{trash}/{entry.name}"

    def _delete(self, path: str) -> int:
        try:
            if self._is_rescued(path):
                return 0
            mine = f"{path.rpartition('/')[0]}/dead-{uuid.uuid4().hex[:8]}"
            self._job.disk.rename(path, mine)
            return remove_tree(self._job.disk, mine)
        except OSError:
            return 0  # somebody else was faster, or it cannot be deleted yet

    def _is_rescued(self, path: str) -> bool:
        """Put a step back if it is leased or pinned, and return whether it must not be deleted."""
        found = step_in_trash(path.rpartition("/")[2])
        if found is None:
            return False
        directory, step = found
        place = f"{self._job.root}/{directory}"
        if exists(self._job.disk, place) or read_claims(self._job, {}).why(step) is None:
            return False
        with contextlib.suppress(OSError):
            self._job.disk.rename(path, place)
            self._job.disk.sync_directory(self._job.root)
        return True
