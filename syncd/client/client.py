"""All of it together: one process's connection to a job, its waits still as generators."""

import contextlib
import os
import re
import socket
from collections.abc import Callable
from typing import Self, TypedDict, Unpack

from syncd.client.base import Role, missing_job, reported
from syncd.client.own_presence import Heartbeat, Member, claim, held, left_by
from syncd.client.peers import Roster
from syncd.client.publish import Publishing
from syncd.client.state_dict import States
from syncd.client.status import Statuses
from syncd.client.wait import Deadline, Pace, T, Wait
from syncd.errors import UsageError
from syncd.protocol.disk import Clock, Disk, exists
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.owner import check_owner, is_own
from syncd.protocol.presence import TTL, Presence, read_presences
from syncd.transports.broadcast.agreeing import Agreeing, agreed_asks
from syncd.transports.broadcast.casting import Casting

_TICK = 1.0
"""Seconds between two looks of the heartbeat thread, on a local mount."""

_TRAINER = "trainer"


class Options(TypedDict, total=False):
    """How to open a job.

    Args:
        state_dir: Where the daemon keeps its state, if not in the job directory.
        timeout: Seconds that each wait lasts unless it is told otherwise; an hour unless given.
        poll: Seconds between two looks; by the kind of mount unless given.
        heartbeat: Whether a thread keeps the presence alive; without it, call `beat` often.
        disk: The file system.
        clock: This host's clock.
        ttl: Seconds of silence after which others count as dead.
    """

    state_dir: str | os.PathLike[str] | None
    timeout: float
    poll: float | None
    heartbeat: bool
    disk: Disk | None
    clock: Clock | None
    ttl: float


class Client(Publishing, Statuses, States, Agreeing, Casting):
    """One process's connection to a job."""

    _heartbeat: Heartbeat | None = None

    @classmethod
    def opening(
        cls,
        job_dir: str | os.PathLike[str],
        role: Role = "observer",
        identity: str | None = None,
        **options: Unpack[Options],
    ) -> Wait[Self]:
        """Connect to a job; see `Synchronizer.open`."""
        if role not in {"trainer", "explorer", "observer"}:
            raise UsageError(f"no role is called {role!r}", hint="trainer, explorer or observer")
        clock = options.get("clock") or SystemClock()
        timeout = Deadline(clock, options.get("timeout", 3600.0)).seconds
        job = Job.at(job_dir, options.get("state_dir"), options.get("disk"))
        pace, ttl = Pace(job.state, options.get("poll")), options.get("ttl", TTL)
        with reported(job.root):
            if not exists(job.disk, job.root):
                raise missing_job(job.root)
            if not is_own(job):
                check_owner(job)
            member = None if role == "observer" else (yield from _joining(job, role, identity, clock, pace))
        rosters = Roster(job, job.trainers, clock, ttl), Roster(job, job.explorers, clock, ttl)
        made = cls(job, role, member, clock=clock, pace=pace, timeout=timeout, rosters=rosters)
        made.beat()
        if options.get("heartbeat", True):
            made.start_heartbeat()
        return made

    def waiting_for(self, predicate: Callable[[], T], timeout: float | None = None) -> Wait[T]:
        """Wait until a predicate returns something true, and return that.

        Raises:
            TimedOutError: It never did.
        """
        look = lambda: (found,) if (found := predicate()) else None  # noqa: E731
        return (yield from self._until(look, timeout, "waiting for a condition"))[0]

    def start_heartbeat(self) -> None:
        """Keep the presence alive, and know who else is there, by a thread."""
        self._heartbeat = Heartbeat(self.beat, max(_TICK, 20 * self.pace.seconds))

    def beat(self) -> None:
        """Publish a heartbeat if one is due, and see who else is there. Never raises: the next call does."""
        if self._member is None:
            self._look_around()
        else:
            self._member.beat()
            self._member.attempt(self._look_around)

    def close(self) -> None:
        """Publish that this process has stopped, and end its heartbeat. A second call does nothing."""
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
        if self._member is not None and not self._member.closed:
            with reported(self.job.root):
                self._member.close(**(self._position() if self.role == _TRAINER else {}))

    def _look_around(self) -> None:
        # A look that fails here is one that the next wait makes itself, and reports.
        with contextlib.suppress(OSError):
            self.trainers.look()
            if self.role == _TRAINER:
                self.explorers.look()


def _joining(job: Job, role: Role, identity: str | None, clock: Clock, pace: Pace) -> Wait[Member]:
    directory = job.trainers if role == _TRAINER else job.explorers
    name = identity or (_TRAINER if role == _TRAINER else _default_identity())
    before = yield from claim(job.disk, clock, directory, name, pace)
    member = Member(job.disk, clock, directory, name, asked=_asked_before(job, name, before))
    member.join()
    try:
        # Of two processes that claim a free name at once, the one whose file stays has it.
        yield pace.next()
        after = left_by(job.disk, directory, name)
    except BaseException:
        member.close()
        raise
    if after is not None and after.incarnation != member.presence.incarnation:
        raise held(name, directory)
    return member


def _asked_before(job: Job, name: str, before: Presence | None) -> int:
    """Return the highest ask that anybody can know of this explorer, so that no old answer fits a new ask."""
    trainers = read_presences(job.disk, job.trainers)[0].values()
    answered = [max(one.answered.get(name, 0), agreed_asks(one).get(name, 0)) for one in trainers]
    return max([before.asked if before else 0, *answered])


def _default_identity() -> str:
    host = re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname()).lstrip(".-")[:80]
    return f"{host or 'host'}-{os.getpid()}"
