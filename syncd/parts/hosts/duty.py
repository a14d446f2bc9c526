"""What the leader does for hosts that read from each other: it writes their list and their token."""

from typing import Any

from syncd.daemon.leader import DaemonLeader
from syncd.daemon.snapshot import Snapshot
from syncd.parts.hosts.members import MEMBERS, TOKEN, encode_members, members_of, new_token, read_token
from syncd.protocol.layout import Job


class MembersDuty:
    """Keeps the list of hosts while this daemon leads."""

    def __init__(self, job: Job, leader: DaemonLeader) -> None:
        self._job, self._leader = job, leader
        self._written: list[str] | None = None

    def act(self, snapshot: Snapshot) -> None:
        term = self._leader.term
        alive = (module.presence for module in snapshot.explorers.values() if module.alive)
        members = members_of(alive)
        if term is None or members == self._written or (self._written is None and not members):
            return
        if read_token(self._job) is None:
            term.publish(f"{self._job.state}/{TOKEN}", new_token())
        term.publish(f"{self._job.state}/{MEMBERS}", encode_members(members, term.token))
        self._written = members

    def begin_term(self) -> None:
        self._written = None


PART: Any = None
