"""Takeover by the rules of `leadership`: watch the leader, claim the next term, fence every earlier leader."""

import contextlib
import shlex
import uuid
from collections.abc import Callable, Iterator
from functools import partial

from syncd.errors import (
    CorruptDataError,
    FencedError,
    LockHeldError,
    ProtocolTooNewError,
    StorageError,
    SyncdError,
    TermLostError,
)
from syncd.protocol.disk import MISSING, Clock, Disk, list_if_there, remove_tree
from syncd.protocol.entry_problem import EntryProblem, move_problem
from syncd.protocol.layout import Job
from syncd.protocol.leadership import (
    LEADER,
    MAX_TOKEN,
    TIMEOUT,
    Leader,
    Term,
    encode_leader,
    is_private,
    latest_token,
    parse_token,
    read_leader,
    token_name,
)
from syncd.protocol.presence import Liveness
from syncd.protocol.process import Process
from syncd.protocol.version import Pair

CLAIM, _WITHDRAWN = ".claim-", ".withdrawn-"
_ATTEMPTS = 50


class Candidate:
    """A process that wants to lead: it watches the leader and claims the next term when the leader's place is free.

    Args:
        timeout: Seconds without a heartbeat after which the leader is replaced.
        gone: Returns whether a leader's process has certainly ended.
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
        self.free_after = self._highest = 0
        """The highest term as last read; where `holder` found none, its place and all before are free."""
        self._floor: Pair | None = None
        self._own: set[str] = set()
        self._last: tuple[int, Leader] | None = None
        self._beats = False
        self.found_removed = False
        """Whether terms that were there had gone when read again: somebody has removed the state directory."""

    def is_surely_led(self) -> bool:
        """Return whether the leader was seen to live: to beat. A process that is there may be stopped, or hang."""
        return self._last is not None and self._beats

    def holder(self) -> Leader | None:
        """Read the terms once and return the leader, None where its place is free."""
        token = self.free_after = latest_token(self._job)
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
            raise  # it may be alive, and what it says of that cannot be read
        except (*MISSING, CorruptDataError):
            return Leader("unknown", "unknown", Process("", "", 0, 0))
        self._floor = max(filter(None, (self._floor, leader.floor)), default=None)
        return leader

    def claim(self, floor: Pair | None = None) -> Term:
        """Claim the term after the one that `holder` found free, and fence all earlier ones.

        `floor` is the highest pair known to be published. Terms that were seen count although somebody has removed
        them, and so do those that left a trash, which need not lie in the state directory.
        """
        job = self._job
        if self.free_after:
            self._read(self.free_after)
        floors = [pair for pair in (self._floor, floor) if pair is not None]
        leader = Leader(
            uuid.uuid4().hex, process=self._process or Process.current(), floor=max(floors, default=None)
        )
        token = self._next_token()
        self._own.add(leader.identity)
        term = Term(
            job, self._clock, token, leader, removes=self._removes or bool(list_if_there(job.disk, job.trash))
        )
        self._make_term(term, leader)
        try:
            term.left = fence_below(job, term.token, term.trash, self._gone)
        except StorageError:
            # Whoever is fenced meanwhile loses the places to which it moves what earlier terms have left.
            self._check_highest(token)
            raise
        self._highest, self.found_removed = token, False
        return term

    def _next_token(self) -> int:
        token = 1 + max(self.free_after, self._highest, latest_token(self._job, self._job.trash))
        if token > MAX_TOKEN:
            places = " ".join(shlex.quote(directory) for directory in (self._job.lock, self._job.trash))
            raise StorageError(
                f"no term can follow term {token - 1}, which no daemon has counted up to",
                path=self._job.lock,
                hint=f"stop every daemon of this job, then: rm -r {places}",
            )
        return token

    def _make_term(self, term: Term, leader: Leader) -> None:
        disk, prepared = self._job.disk, f"{self._job.lock}/{CLAIM}{term.identity}"
        try:
            disk.make_directory(f"{prepared}/{term.identity}")
            # A look that comes after the directory was prepared: whoever leads a later term either shows in
            # it, or finds the prepared directory and removes it. So no token that was fenced is ever taken
            # again.
            self._check_highest(self.free_after)
            disk.replace(f"{prepared}/{LEADER}", encode_leader(leader))
            self._rename_claim(prepared, term.token)
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

    def _rename_claim(self, prepared: str, token: int) -> None:
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
            self._remove_claim(term, is_there=not isinstance(error, TermLostError))
            raise LockHeldError(error.message, path=self._job.root) from error

    def _remove_claim(self, term: Term, *, is_there: bool) -> None:
        # What lies under this token may be another's if somebody has removed the terms meanwhile.
        if is_there:
            remove_surely(self._job.disk, term.directory)
        remove_surely(self._job.disk, term.trash)
        with contextlib.suppress(OSError):
            self._job.disk.remove_directory(term.trash.rpartition("/")[0])


def fence_below(
    job: Job, highest: int, heir: str, gone: Callable[[Process], bool] = Process.is_gone
) -> tuple[EntryProblem, ...]:
    """Make every leader below term `highest` unable to publish or delete, and take over what it left in its trash.

    What could not be removed of leaders that have ended is returned: they need not be fenced.
    """
    fence = _Fence(job, highest, gone)
    # A late claim may still make a term during the first pass; after a listing without any, none can.
    while below := [entry.name for entry in list_if_there(job.disk, job.lock) if fence.concerns(entry.name)]:
        for name in below:
            fence.remove_term(name)
    # The term's own trash is not made here: a leader fenced meanwhile must not get back a place to remove to.
    for entry in list_if_there(job.disk, job.trash):
        token = parse_token(entry.name)
        if token and token < highest and entry.kind != "directory":
            # syncd puts no link or file there: it is removed, and what it leads to stays.
            remove_tree(job.disk, f"{job.trash}/{entry.name}")
        elif token and token < highest:
            fence.empty_trash(token, f"{job.trash}/{entry.name}", heir)
    return tuple(fence.left.values())


class _Fence:
    """One fencing of all terms below one, and what it had to leave."""

    def __init__(self, job: Job, highest: int, gone: Callable[[Process], bool]) -> None:
        self._job, self._highest, self._gone = job, highest, gone
        self._ended: dict[int, bool] = {}
        self.left: dict[str, EntryProblem] = {}

    def concerns(self, name: str) -> bool:
        """Return whether a name in the lock is of an earlier term, and not left already."""
        token = parse_token(name)
        is_below = token < self._highest if token else name.startswith((CLAIM, _WITHDRAWN))
        return is_below and f"{self._job.lock}/{name}" not in self.left

    def remove_term(self, name: str) -> None:
        token, path = parse_token(name), f"{self._job.lock}/{_withdrawn(self._job, name)}"
        if token:
            self._ended[token] = self._has_ended(token)
        with self._leaving(token, path):
            remove_surely(self._job.disk, path)

    def empty_trash(self, token: int, path: str, heir: str) -> None:
        with self._leaving(token, path):
            _retry(partial(_empty, self._job.disk, path, heir), _NOT_TAKEN_OVER, path)

    @contextlib.contextmanager
    def _leaving(self, token: int | None, path: str) -> Iterator[None]:
        """Leave a directory of an ended leader that cannot be removed; raise any other error of the block."""
        try:
            yield
        except StorageError as error:
            self.left[path] = self._entry_problem(token, path, error)

    def _entry_problem(self, token: int | None, path: str, error: StorageError) -> EntryProblem:
        cause = error.__cause__
        # Any other error than a lack of permission means that somebody still writes there, or passes.
        denied = PermissionError(cause.errno, cause.strerror) if isinstance(cause, PermissionError) else None
        entry_problem = move_problem(denied, path) if denied else None
        if entry_problem is None:
            raise error
        if not self._ended.get(token or 0, False):
            # Its leader may wake up: until its directories are gone it could publish and delete.
            raise StorageError(
                f"{error.message}: {entry_problem.message} ({entry_problem.owner})",
                path=path,
                hint=entry_problem.hint,
            )
        return entry_problem

    def _has_ended(self, token: int) -> bool:
        try:
            leader = read_leader(self._job, token)
        except (OSError, SyncdError):
            return False
        return leader.released or self._gone(leader.process)


def _withdrawn(job: Job, name: str) -> str:
    # One rename decides between who prepared a claim and who fences. Emptied in its place, a claim could
    # still be renamed to a token, and over an empty directory the next claim of that token would be renamed
    # as well.
    if not name.startswith(CLAIM):
        return name
    withdrawn = f"{_WITHDRAWN}{uuid.uuid4().hex}"
    with contextlib.suppress(*MISSING):
        job.disk.rename(f"{job.lock}/{name}", f"{job.lock}/{withdrawn}")
    return withdrawn


_NOT_TAKEN_OVER = "an earlier daemon's trash cannot be taken over"


def remove_surely(disk: Disk, path: str) -> None:
    """Remove a directory that somebody may still be writing to."""
    # The old leader may still be creating files in it: until rmdir succeeds it is not fenced.
    _retry(partial(remove_tree, disk, path), "an earlier daemon's term cannot be removed", path)


def _empty(disk: Disk, path: str, heir: str, *, is_term: bool = True) -> None:
    for entry in list_if_there(disk, path):
        if is_term and is_private(entry):  # only a term's own directory has those of claims
            claims = f"{path}/{entry.name}"
            _retry(partial(_empty, disk, claims, heir, is_term=False), _NOT_TAKEN_OVER, claims)
            continue
        with contextlib.suppress(*MISSING):
            disk.rename(f"{path}/{entry.name}", f"{heir}/{entry.name}")
    with contextlib.suppress(FileNotFoundError):
        disk.remove_directory(path)


def _retry(work: Callable[[], object], problem: str, path: str) -> None:
    last: OSError | None = None
    for _ in range(_ATTEMPTS):
        try:
            work()
        except OSError as error:
            last = error
        else:
            return
    raise StorageError(problem, path=path) from last
