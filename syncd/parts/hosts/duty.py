"""What the leader does for hosts that read from each other: it writes their list and their token."""

from typing import Any

from syncd.daemon.leader import DaemonLeader
from syncd.daemon.report import EventReporter
from syncd.daemon.snapshot import Snapshot
from syncd.parts.hosts.members import MEMBERS, TOKEN, encode_members, members_of, new_token, read_token
from syncd.protocol.disk import Clock
from syncd.protocol.layout import Job
from syncd.protocol.leadership import Term


class MembersDuty:
    """Keeps the list of hosts while this daemon leads; without hosts that have peers it writes nothing."""

    every = float("inf")

    def __init__(self, job: Job, leader: DaemonLeader) -> None:
        self._job, self._leader = job, leader
        self._written: list[str] = []

    def begin_term(self) -> None:
        self._written = []

    def act(self, snapshot: Snapshot, options: Any) -> Snapshot:
        """Write the list if it has changed."""
        del options
        alive = (module.presence for module in snapshot.explorers.values() if module.alive)
        members, term = members_of(alive), self._leader.term
        if term is not None and members != self._written and self._has_token(term):
            term.publish(f"{self._job.state}/{MEMBERS}", encode_members(members, term.token))
            self._written = members
        return snapshot

    def _has_token(self, term: Term) -> bool:
        """Write a token if there is none; return whether there is one, False if it cannot be read now."""
        try:
            token = read_token(self._job)
        except OSError:
            return False  # another token would part the hosts that are reading together
        if token is None:
            term.publish(f"{self._job.state}/{TOKEN}", new_token())
        return True


class HostsPart:
    """The part of the daemon. It has no table: hosts join by `--peers` of their followers."""

    def open(self, job: Job, clock: Clock, leader: DaemonLeader, reporter: EventReporter) -> MembersDuty:
        del clock, reporter
        return MembersDuty(job, leader)


PART = HostsPart()
