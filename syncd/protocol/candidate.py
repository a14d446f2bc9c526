"""Who wants to lead: watches the leader, claims the next term when its place is free (the rules are in `term`)."""

import contextlib
import shlex
import uuid
from collections.abc import Callable

from syncd.errors import (
    CorruptDataError,
    FencedError,
    LockHeldError,
    ProtocolTooNewError,
    StorageError,
    TermLostError,
)
from syncd.protocol.disk import MISSING, Clock, list_if_there, remove_tree
from syncd.protocol.fence import CLAIM, fence_below, remove_surely
from syncd.protocol.layout import Job
from syncd.protocol.presence import Liveness
from syncd.protocol.process import Process
from syncd.protocol.term import (
    LEADER,
    MAX_TOKEN,
    TIMEOUT,
    Leader,
    Term,
    encode_leader,
    latest_token,
    latest_trash,
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
        self._seen = self._highest = 0
        self._floor: Pair | None = None
        self._own: set[str] = set()
        self._last: tuple[int, Leader] | None = None
        self._beats = False
        self.found_removed = False
        """Whether terms that were there had gone at a later look: somebody has removed the state directory."""

    def is_surely_led(self) -> bool:
        """Say whether the leader of the last look was seen to live; one that is silent may be dead all the same."""
        return self._last is not None and (self._beats or self._last[1].process.is_here())

    @property
    def free_after(self) -> int:
        """Return the highest term at the last look; where `holder` found none, its place is free, and all before."""
        return self._seen

    def holder(self) -> Leader | None:
        """Look once: return the leader in office, None where its place is free."""
        token = self._seen = latest_token(self._job)
        self.found_removed |= token < self._highest
        self._highest = max(self._highest, token)
        if token == 0:
            self._last = None
            return None
        leader = self._read(token)
        self._beats |= self._last not in (None, (token, leader))
        self._last, now = (token, leader), self._clock.monotonic()
        self._liveness.observe(now, [(str(token), (leader.identity, leader.beat, leader.released))])
        is_silent = not self._liveness.is_alive(str(token), now)
        # Whoever leads does not ask: a claim that this candidate made and that is still there was lost.
        if leader.released or leader.identity in self._own or is_silent or self._gone(leader.process):
            return None
        return leader

    def _read(self, token: int) -> Leader:
        try:
            leader = read_leader(self._job, token)
        except ProtocolTooNewError:
            raise  # it may well live, and what it says of that cannot be read
        except (*MISSING, CorruptDataError):
            return Leader("unknown", "unknown", Process("", "", 0, 0))
        self._floor = max(filter(None, (self._floor, leader.floor)), default=None)
        return leader

    def claim(self, floor: Pair | None = None) -> Term:
        """Claim the term after the one that `holder` found free, and fence all earlier ones.

        Terms that were seen count although somebody has removed them, and so do those that left a trash, which need
        not lie in the state directory.

        Args:
            floor: The highest pair known to be published.

        Raises:
            LockHeldError: Another one was faster.
            StorageError: Earlier terms could not be fenced, or a stranger has left a term that none can follow.
        """
        job = self._job
        if self._seen:
            self._read(self._seen)
        known = [pair for pair in (self._floor, floor) if pair is not None]
        leader = Leader(
            uuid.uuid4().hex, process=self._process or Process.current(), floor=max(known, default=None)
        )
        token = self._next_token()
        self._own.add(leader.identity)
        term = Term(
            job, self._clock, token, leader, removes=self._removes or bool(list_if_there(job.disk, job.trash))
        )
        self._take_office(term, leader)
        try:
            term.left = fence_below(job, term.token, term.trash, self._gone)
        except StorageError:
            # Whoever is fenced meanwhile loses the places to which it moves what earlier terms have left.
            self._check_highest(token)
            raise
        self._highest, self.found_removed = token, False
        return term

    def _next_token(self) -> int:
        token = 1 + max(self._seen, self._highest, latest_trash(self._job))
        if token > MAX_TOKEN:
            places = " ".join(shlex.quote(place) for place in (self._job.lock, self._job.trash))
            raise StorageError(
                f"no term can follow term {token - 1}, which no daemon has counted up to",
                path=self._job.lock,
                hint=f"stop every daemon of this job, then: rm -r {places}",
            )
        return token

    def _take_office(self, term: Term, leader: Leader) -> None:
        disk, prepared = self._job.disk, f"{self._job.lock}/{CLAIM}{term.identity}"
        try:
            disk.make_directory(f"{prepared}/{term.identity}")
            # A look that comes after the directory was prepared: whoever leads a later term either shows in
            # it, or finds the prepared directory and removes it. So no token that was fenced is ever taken
            # again.
            self._check_highest(self._seen)
            disk.replace(f"{prepared}/{LEADER}", encode_leader(leader))
            self._take_place(prepared, term.token)
        except MISSING as error:
            # Nobody but a leader who fences removes what a claim has prepared.
            raise LockHeldError("another daemon removed this claim", path=self._job.root) from error
        except BaseException:
            with contextlib.suppress(OSError):
                remove_tree(disk, prepared)
            raise
        self._check_still_highest(term)
        disk.sync_directory(self._job.lock)
        try:
            if term.removes:
                disk.make_directory(term.trash)
        except MISSING:
            self._check_still_highest(term)
            raise
        # Only a term that is still the highest after its last directory was made is sure to be fenced later.
        self._check_still_highest(term)

    def _take_place(self, prepared: str, token: int) -> None:
        try:
            self._job.disk.rename(prepared, f"{self._job.lock}/{token_name(token)}")
        except OSError as error:
            # Only a term that is there says that another one was faster: a full disk does not.
            if latest_token(self._job) < token:
                raise
            raise LockHeldError("another daemon claimed this job first", path=self._job.root) from error

    def _check_highest(self, token: int) -> None:
        newest = latest_token(self._job)
        if newest != token:
            raise LockHeldError(f"the daemon of term {newest} leads this job", path=self._job.root)

    def _check_still_highest(self, term: Term) -> None:
        try:
            term.confirm()
        except FencedError as error:
            self._withdraw(term, is_there=not isinstance(error, TermLostError))
            raise LockHeldError(error.message, path=self._job.root) from error

    def _withdraw(self, term: Term, *, is_there: bool) -> None:
        # What lies under this token may be another's if somebody has removed the terms meanwhile.
        if is_there:
            remove_surely(self._job.disk, term.directory)
        remove_surely(self._job.disk, term.trash)
        with contextlib.suppress(OSError):
            self._job.disk.remove_directory(term.trash.rpartition("/")[0])
