"""Leading a job or standing by: claims the next term, beats, publishes, and loses the term to a newer leader."""

import contextlib
import errno
from collections.abc import Callable
from dataclasses import replace

from syncd.config import DaemonConfig
from syncd.daemon.report import EventReporter
from syncd.daemon.trash import DeadLeadersTrash
from syncd.errors import FencedError, storage_error
from syncd.observe import event_names
from syncd.protocol.disk import MISSING, Clock, is_below
from syncd.protocol.layout import Job
from syncd.protocol.leadership import Term
from syncd.protocol.owner import MirrorSource, check_owner, record_owner, refuse_mirrored
from syncd.protocol.process import Process
from syncd.protocol.step import NATIVE
from syncd.protocol.takeover import Candidate
from syncd.protocol.version import Pair, Version, encode_version, read_version_or_none


class DaemonLeader:
    """This process's part in leading a job: it holds the term, or knows who does.

    Args:
        config: The configuration at start; a later one changes neither the take-over time nor who may remove.
        gone: Returns whether a leader's process has certainly ended.
        mirror_of: What a mirror copies into the job, which it leads in place of a daemon; None for a daemon.
    """

    def __init__(
        self,
        job: Job,
        config: DaemonConfig,
        clock: Clock,
        reporter: EventReporter,
        process: Process | None = None,
        gone: Callable[[Process], bool] = Process.is_gone,
        mirror_of: MirrorSource | None = None,
    ) -> None:
        self._job, self._clock, self._reporter = job, clock, reporter
        self._mirror_of = mirror_of
        removes = is_below(job.state, job.root) or config.prune_foreign
        self._candidate = Candidate(job, clock, config.takeover, process, gone, removes=removes)
        self._dead_trash = DeadLeadersTrash(job, clock)
        self._was_removed = False
        self.term: Term | None = None
        self.floor: Pair | None = None  # the highest pair known to be published, as the heartbeat says it
        self.standing_by = ""  # why another daemon leads, empty while none is known to
        self.on_progress: Callable[[], None] = lambda: None

    @property
    def is_surely_led(self) -> bool:
        """Return whether another daemon that leads the job was seen to live."""
        return self._candidate.is_surely_led()

    def claim(self, floor: Pair | None, *, empty_trash_after: float | None) -> tuple[Term, bool] | None:
        """Claim the next term if the leader's place is free; otherwise stand by.

        Args:
            empty_trash_after: On a full disk: the grace after which the trash of dead leaders is deleted first, since
                a claim writes a file. None while there is room.

        Returns:
            The term, and whether somebody has removed the state directory before it; None while another daemon leads.
        """
        job = self._job
        check_owner(job)
        if self._mirror_of is None:
            refuse_mirrored(job, "a daemon of its own")
        holder = self._candidate.holder()
        if holder is not None:
            self.stand_by(f"{holder.host} (pid {holder.process.pid}) leads")
            return None
        if empty_trash_after is not None:
            with contextlib.suppress(OSError):
                self._dead_trash.empty(self._candidate.free_after, empty_trash_after)
        was_removed = self._candidate.found_removed
        term = self._candidate.claim(floor)
        self._was_removed |= was_removed  # known even if the rest fails and is tried again
        for directory in (job.explorers, job.trainers, job.pins, job.requests):
            job.disk.make_directory(directory)
        record_owner(job, term, self._mirror_of)
        self.term, self.floor, self.standing_by = term, term.floor, ""
        was_removed, self._was_removed = self._was_removed, False
        self._reporter.publish(event_names.LEADERSHIP_ACQUIRED, "info", term=term.token)
        for entry_problem in term.left:
            self._reporter.publish_entry_problem(entry_problem)
        return term, was_removed

    def stand_by(self, why: str) -> None:
        self.term = None
        if why != self.standing_by:
            self._reporter.publish(event_names.STANDBY_STARTED, "info", detail=why)
        self.standing_by = why

    def lose(self, error: FencedError) -> None:
        self.term = None
        self._reporter.publish(event_names.LEADERSHIP_LOST, "warning", detail=error.message)

    def release(self) -> None:
        """End the term, so that a standby need not wait."""
        if self.term is not None:
            self.term.release()
            self.term = None

    def publish(self, version: Version) -> Version:
        """Replace the version file and return what was published."""
        assert self.term is not None  # only a leader plans
        stamped = replace(version, term=self.term.token, published_at=self._clock.time())
        current = read_version_or_none(self._job)
        if current and current.pair >= stamped.pair:
            raise FencedError(f"version {current.generation}.{current.step} is published already")
        if version.layout == NATIVE:
            # Its writer may have died between a rename and the sync of that name: what is announced must outlast
            # a power cut that the announcement outlasts.
            for directory in (self._job.step(version.step), self._job.root):
                self._job.disk.sync_directory(directory)
        self.term.publish(self._job.version, encode_version(stamped))
        return stamped

    def amend(self, before: Version, version: Version) -> Version | None:
        """Replace the version file by one of the same pair and content, and return it with its term.

        None if the file no longer holds `before`: the next scan reads it.
        """
        assert self.term is not None  # only a leader plans
        if read_version_or_none(self._job) != before:
            return None
        stamped = replace(version, term=self.term.token)
        self.term.publish(self._job.version, encode_version(stamped))
        return stamped

    def beat(self) -> None:
        """Publish the heartbeat if one is due."""
        if self.term is not None:
            self.term.beat(self.floor)

    def progress(self) -> None:
        """Show the standbys and the service manager that work continues, during work that takes long.

        On a full disk the work that makes room comes first: the server refuses what a deposed leader removes anyway.
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
