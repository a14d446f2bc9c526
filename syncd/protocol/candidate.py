"""Who wants to lead: watches the leader, claims the next term when its place is free (the rules are in `term`)."""

import contextlib
import uuid
from collections.abc import Callable

from syncd.errors import CorruptDataError, LockHeldError, StorageError
from syncd.protocol.disk import MISSING, Clock, list_if_there, remove_tree
from syncd.protocol.fence import CLAIM, fence_below, remove_surely
from syncd.protocol.layout import Job
from syncd.protocol.presence import Liveness
from syncd.protocol.process import Process
from syncd.protocol.term import (
    LEADER,
    TIMEOUT,
    Leader,
    Term,
    encode_leader,
    latest_token,
    read_leader,
    token_name,
)
from syncd.protocol.version import Pair


class Candidate:
    """One who wants to lead: it watches the leader and claims the next term when that one is free.

    Args:
        job: The job.
        clock: This host's clock.
        timeout: Seconds without a heartbeat after which the leader is replaced.
        process: Who claims.
        gone: Says whether a leader's process has certainly ended.
        removes: Whether the term may move things of the job into a trash; it needs a place there for that.
    """

    def __init__(
        self,
        job: Job,
        clock: Clock,
        timeout: float = TIMEOUT,
        process: Process | None = None,
        gone: Callable[[Process], bool] = Process.is_gone,
        *,
        removes: bool = True,
    ) -> None:
        self._job, self._clock, self._removes = job, clock, removes
        self._liveness = Liveness(timeout)
        self._process = process
        self._gone = gone
        self._free_after = 0
        self._last: tuple[int, Leader] | None = None
        self._beats = False

    def is_surely_led(self) -> bool:
        """Say whether the leader of the last look was seen to live; one that is silent may be dead all the same."""
        return self._last is not None and (self._beats or self._last[1].process.is_here())

    @property
    def free_after(self) -> int:
        """Return the highest term at the last look; where `holder` found none, its place is free, and all before."""
        return self._free_after

    def holder(self) -> Leader | None:
        """Look once: return the leader in office, None where its place is free."""
        token = self._free_after = latest_token(self._job)
        if token == 0:
            return None
        try:
            leader = read_leader(self._job, token)
        except (*MISSING, CorruptDataError):
            leader = Leader("unknown", "unknown", Process("", "", 0, 0))
        self._beats |= self._last not in (None, (token, leader))
        self._last, now = (token, leader), self._clock.monotonic()
        self._liveness.observe(now, [(str(token), (leader.identity, leader.beat, leader.released))])
        if leader.released or self._gone(leader.process) or not self._liveness.is_alive(str(token), now):
            return None
        return leader

    def claim(self, floor: Pair | None = None) -> Term:
        """Claim the term after the one that `holder` found free, and fence all earlier ones.

        Args:
            floor: The highest pair known to be published.

        Raises:
            LockHeldError: Another one was faster.
            StorageError: Earlier terms could not be fenced.
        """
        job, disk = self._job, self._job.disk
        token = self._free_after + 1
        known = [pair for pair in (self._floor_of(token - 1), floor) if pair is not None]
        leader = Leader(
            uuid.uuid4().hex, process=self._process or Process.current(), floor=max(known) if known else None
        )
        prepared = f"{job.lock}/{CLAIM}{leader.identity}"
        disk.make_directory(prepared)
        try:
            # A look that comes after the directory was prepared: whoever leads a later term either shows in
            # it, or finds the prepared directory and removes it. So no token that was fenced is ever taken
            # again.
            self._check_highest(token - 1)
            disk.replace(f"{prepared}/{LEADER}", encode_leader(leader))
            self._take_place(prepared, token)
        except MISSING as error:
            # Nobody but a leader who fences removes what a claim has prepared.
            raise LockHeldError("another daemon removed this claim", path=job.root) from error
        except BaseException:
            with contextlib.suppress(OSError):
                remove_tree(disk, prepared)
            raise
        disk.sync_directory(job.lock)
        term = Term(job, self._clock, token, leader)
        if self._removes or list_if_there(disk, job.trash):
            disk.make_directory(term.trash)
        # Only a term that is still the highest after its last directory was made is sure to be fenced later.
        self._check_still_highest(token)
        try:
            term.left = fence_below(job, term.token, term.trash, self._gone)
        except StorageError:
            # Whoever is fenced meanwhile loses the places to which it moves what earlier terms have left.
            self._check_highest(token)
            raise
        return term

    def _take_place(self, prepared: str, token: int) -> None:
        try:
            self._job.disk.rename(prepared, f"{self._job.lock}/{token_name(token)}")
        except OSError as error:
            # Only a term that is there says that another one was faster: a full disk does not.
            if latest_token(self._job) < token:
                raise
            raise LockHeldError("another daemon claimed this job first", path=self._job.root) from error
        self._check_still_highest(token)

    def _check_highest(self, token: int) -> None:
        newest = latest_token(self._job)
        if newest != token:
            raise LockHeldError(f"the daemon of term {newest} leads this job", path=self._job.root)

    def _check_still_highest(self, token: int) -> None:
        try:
            self._check_highest(token)
        except LockHeldError:
            for place in (self._job.lock, self._job.trash):
                remove_surely(self._job.disk, f"{place}/{token_name(token)}")
            raise

    def _floor_of(self, token: int) -> Pair | None:
        try:
            return read_leader(self._job, token).floor if token else None
        except (*MISSING, CorruptDataError):
            return None
