"""Gets all pieces of one plan: reads what is this host's from the file system, and asks others for the rest."""

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from syncd.errors import RefusedError, TryAgainError
from syncd.parts.hosts.asking import AskError, HostRequest
from syncd.parts.hosts.judgement import (
    WINDOW,
    HostProgress,
    budget_of,
    fate_of,
    have_most_delivered,
    is_stuck,
    late_hosts,
)
from syncd.parts.hosts.order import next_host, order_of
from syncd.parts.hosts.pieces import PiecePlan
from syncd.parts.hosts.pieces_in_work import PiecesInWork, SupersededError
from syncd.parts.hosts.shelf import LivePieces
from syncd.protocol.disk import Disk

RANKS = 3  # hosts that are asked for a piece before the file system is
FROM_ORIGIN = 2  # reads of the file system at once: with more, all pieces of a host come at the end

ALONE_AT_ONCE = 4
_CROWD = 32
"""Hosts beyond which one request at a time goes to each, else two: one is on the wire while the next waits."""

_READ = 1 << 20
_JUDGE = 0.2
_PAUSE = 0.1
_END = 5.0


@dataclass(frozen=True, slots=True)
class Together:
    """Who gets a plan together."""

    members: Sequence[
        str
    ]  # the hosts that pieces are asked of, sorted; this one among them if it reads a share
    me: str  # this host's address
    token: str
    path: str  # of the step, in requests: kind and digest


@dataclass(slots=True)
class Tally:
    """What a gather did."""

    origin: int = 0  # bytes from the file system
    peers: int = 0  # bytes from other hosts
    wrong: int = 0  # pieces that did not match
    moved: int = 0  # pieces that were asked of another host since one was late
    share: int = 0  # bytes that were this host's to read
    removed: dict[str, str] = field(default_factory=dict)  # hosts that were asked nothing more, and why
    seconds: float = 0.0
    reading: float = 0.0  # seconds until its own share was read

    @property
    def is_over_budget(self) -> bool:
        return self.origin > budget_of(self.share)


class Gather:
    """Gets a plan once; `run` returns when every piece is proven.

    Args:
        disk: The file system of the job.
        target: The directory that the files are written into.
        live: Shows other processes what is proven.
    """

    def __init__(
        self, plan: PiecePlan, together: Together, disk: Disk, target: str, live: LivePieces
    ) -> None:
        self._plan, self._together, self._disk = plan, together, disk
        self._work = PiecesInWork(plan, target, live, self._note_proven)
        self._changed = threading.Condition()
        self._left = len(plan.pieces)
        self._queues: dict[str, deque[int]] = {host: deque() for host in (*together.members, together.me)}
        self._asked: Counter[int] = Counter()
        self._through: set[int] = set()
        self._reading: set[int] = set()
        self._flying: dict[str, dict[int, HostRequest]] = {host: {} for host in together.members}
        self._recent: dict[str, deque[tuple[float, int]]] = {host: deque() for host in together.members}
        self._strikes: Counter[str] = Counter()
        self._absent: dict[str, float] = {}
        self._over = self._is_unshared_read = False
        self._spans: dict[int, list[tuple[int, int, int]]] = {}
        self._calm_since = 0.0
        self._origin_rate: float | None = None
        self._largest = max((piece.length for piece in plan.pieces), default=0)
        self._error: Exception | None = None
        self.tally = Tally()

    def run(self, stop: Callable[[], bool]) -> Tally:
        """Get everything; `stop` is polled."""
        begun = self._begun = self._moved_on = time.monotonic()
        self.tally.share = self._share()
        for number in range(len(self._plan.pieces)):
            self._enqueue(number)
        threads = [
            threading.Thread(target=self._guarded, args=(work,), name="pieces", daemon=True)
            for work in self._workers()
        ]
        for thread in threads:
            thread.start()
        try:
            self._wait(stop)
        finally:
            self._end(threads)
        self.tally.seconds = time.monotonic() - begun
        return self.tally

    def _share(self) -> int:
        """Return the bytes that this host reads from the file system if nothing is wrong."""
        me, members, pieces = self._together.me, self._together.members, self._plan.pieces
        owned = (piece.length for number, piece in enumerate(pieces) if order_of(number, members)[:1] == [me])
        own = sum(length for _, _, length in self._plan.own)
        return own + max(sum(owned), self._plan.size // max(len(members), 1))

    def await_piece(self, number: int, seconds: float, *, read: bool) -> bool:
        """Wait until a piece is proven, for another host; `read` has this host read it if nobody gets it."""
        if number >= len(self._plan.pieces):
            return False
        with self._changed:
            own = self._queues[self._together.me]
            if read and not self._work.has(number) and number not in self._reading and number not in own:
                own.appendleft(number)
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._over or self._work.has(number), seconds)
            return self._work.has(number)

    def await_bytes(self, file: int, offset: int, length: int) -> None:
        """Wait until bytes of a file are proven, for the one who builds a version of them meanwhile."""
        spans = self._spans.get(file)
        if spans is None:
            spans = self._spans[file] = _spans_of(self._plan, file)
        wanted = [number for begin, end, number in spans if begin < offset + length and end > offset]

        def has_all() -> bool:
            return not self._unread and all(self._work.has(number) for number in wanted)

        with self._changed:
            self._changed.wait_for(lambda: has_all() or self._over)
            if not has_all():
                raise self._error or TryAgainError(
                    "reading it was given up", path=self._plan.files[file].path
                )

    # --- work ---------------------------------------------------------------------------------------------------

    def _workers(self) -> list[Callable[[], None]]:
        others = [host for host in self._together.members if host != self._together.me]
        at_once = 1 if len(others) > _CROWD else 2
        return [
            self._read_unshared,
            *(partial(self._read_own, is_spare=number >= FROM_ORIGIN) for number in range(ALONE_AT_ONCE)),
            *(partial(self._ask_all, host) for host in others for _ in range(at_once)),
        ]

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised by `run`
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _wait(self, stop: Callable[[], bool]) -> None:
        judged = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait(_PAUSE)
                if self._error is not None:
                    raise self._error
                if not self._left and not self._unread:
                    return
            if stop():
                raise TryAgainError("reading it was given up: told to stop", path=self._plan.files[0].path)
            if time.monotonic() - judged >= _JUDGE:
                judged = time.monotonic()
                self._judge()

    def _end(self, threads: list[threading.Thread]) -> None:
        with self._changed:
            self._over = True
            flying = [request for requests in self._flying.values() for request in requests.values()]
            self._changed.notify_all()
        for request in flying:
            request.end()
        deadline = time.monotonic() + _END
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
        if not any(thread.is_alive() for thread in threads):
            self._work.close()  # else a read that hangs may still come back: its files stay open

    # --- the file system ----------------------------------------------------------------------------------------

    def _read_unshared(self) -> None:
        with contextlib.suppress(SupersededError):
            for file, offset, length in self._plan.own:
                for at, chunk in self._chunks(file, offset, length):
                    self._work.write_own(file, chunk, at)
        with self._changed:
            self._is_unshared_read = True
            self._changed.notify_all()

    @property
    def _unread(self) -> bool:
        return bool(self._plan.own) and not self._is_unshared_read

    def _read_own(self, *, is_spare: bool) -> None:
        while (number := self._next_own(is_spare=is_spare)) is not None:
            piece = self._plan.pieces[number]
            try:
                claim = self._work.claim(number)
                for _, chunk in self._chunks(piece.file, piece.offset, piece.length):
                    claim.write(chunk)
                if not claim.finish():
                    raise self._mismatch(piece.file)
            except SupersededError:
                pass
            finally:
                with self._changed:
                    self._reading.discard(number)

    def _next_own(self, *, is_spare: bool) -> int | None:
        """Return the next piece to read from the file system; None at the end. The spare ones help a lonely host."""
        queue, me = self._queues[self._together.me], self._together.me
        with self._changed:
            while not self._over and self._left:
                is_lonely = set(self._together.members) <= {me, *self.tally.removed}
                while queue and (is_lonely or not is_spare):
                    number = queue.popleft()
                    if not self._work.has(number) and number not in self._reading:
                        self._reading.add(number)
                        return number
                self._changed.wait(1.0)
        return None

    def _chunks(self, file: int, offset: int, length: int) -> Iterator[tuple[int, memoryview]]:
        end, path = offset + length, self._plan.files[file].path
        while offset < end and not self._over:
            data = self._disk.read_at(path, offset, min(_READ, end - offset), ahead=False)
            if not data:
                raise RefusedError(f"{offset} bytes where more were written", path=path)
            with self._changed:
                self.tally.origin += len(data)
                self._moved_on = time.monotonic()
            yield offset, memoryview(data)
            offset += len(data)
        if self._over:
            raise SupersededError

    def _mismatch(self, file: int) -> RefusedError:
        return RefusedError(
            "content does not match its digest",
            path=self._plan.files[file].path,
            hint="syncd verify JOB STEP --deep",
        )

    # --- other hosts --------------------------------------------------------------------------------------------

    def _ask_all(self, host: str) -> None:
        while (number := self._next_of(host)) is not None:
            request = HostRequest(host, self._together.token)
            try:
                self._ask(host, number, request)
                self._strikes[host] = 0
                self._absent.pop(host, None)
            except SupersededError:
                pass
            except AskError as error:
                self._fail(host, number, error, is_ended=request.is_ended)
            finally:
                with self._changed:
                    self._flying[host].pop(number, None)

    def _ask(self, host: str, number: int, request: HostRequest) -> None:
        piece, claim = self._plan.pieces[number], self._work.claim(number)
        with self._changed:
            self._flying[host][number] = request

        def take(chunk: memoryview) -> None:
            claim.write(chunk)
            self._note_received(host, len(chunk))

        path = f"/piece/{self._together.path}/{number}/{piece.file}/{piece.offset}/{piece.length}"
        request.get(path, piece.length, take, read=number in self._through)
        if not claim.finish():
            raise AskError("wrong")

    def _next_of(self, host: str) -> int | None:
        queue = self._queues[host]
        with self._changed:
            while not self._over and self._left and host not in self.tally.removed:
                while queue:
                    number = queue.popleft()
                    # What this host reads for others meanwhile comes sooner than from a host that has been late.
                    if not self._work.has(number) and number not in self._reading:
                        return number
                self._changed.wait(1.0)
        return None

    def _note_received(self, host: str, count: int) -> None:
        with self._changed:
            self.tally.peers += count
            recent, now = self._recent[host], time.monotonic()
            self._moved_on = now
            recent.append((now, count))
            while recent[0][0] < now - WINDOW:
                recent.popleft()

    def _fail(self, host: str, number: int, error: AskError, *, is_ended: bool) -> None:
        if self._over:
            return
        now, failure = time.monotonic(), error.failure
        with self._changed:
            if is_ended:
                self._move(number)
                return
            if host in self.tally.removed:  # by another request meanwhile: nobody looks at its queue any more
                self._remove(host, number, failure)
                return
            self._strikes[host] += failure in ("late", "lost")
            self.tally.wrong += failure == "wrong"
            absent_for = now - self._absent.setdefault(host, now) if failure == "absent" else 0.0
            fate = fate_of(failure, self._strikes[host], absent_for)
            if fate == "remove":
                self._remove(host, number, failure)
            elif fate == "move":
                self._move(number)
            else:
                self._queues[host].append(number)
        if fate == "wait":
            time.sleep(_PAUSE)

    def _move(self, number: int) -> None:
        """Ask the next host of its order for a piece, which reads it if it does not have it."""
        self.tally.moved += 1
        self._asked[number] += 1
        self._through.add(number)
        self._enqueue(number)

    def _remove(self, host: str, number: int, why: str) -> None:
        """Ask nothing more of a host; what was its own is asked of the next in order."""
        self.tally.removed.setdefault(host, why)
        todo = [number, *self._queues[host], *self._flying[host]]
        self._queues[host].clear()
        for piece in todo:
            if not self._work.has(piece):
                self._through.add(piece)
                self._enqueue(piece)

    def _enqueue(self, number: int) -> None:
        members, removed = self._together.members, self.tally.removed.keys()
        host = next_host(number, members, set(removed), self._asked[number], RANKS)
        with self._changed:
            self._queues[host or self._together.me].append(number)
            self._changed.notify_all()

    def _judge(self) -> None:
        now = time.monotonic()
        with self._changed:
            me, removed = self._together.me, self.tally.removed
            others = [host for host in self._together.members if host != me and host not in removed]
            progress = {host: self._progress_of(host, now) for host in others}
            # What it reads for others after its own share changes nothing: else they would delay each other.
            has_share = me in self._together.members
            is_calm = self.tally.reading > 0 and have_most_delivered(progress.values(), has_share=has_share)
            self._calm_since = (self._calm_since or now) if is_calm else 0.0
            calm_for = now - self._calm_since if is_calm else 0.0
            is_coarse = self._plan.has_whole_files
            late = late_hosts(
                progress,
                now - self._begun,
                calm_for,
                self._largest,
                is_coarse=is_coarse,
                origin=self._origin_rate,
            )
            if is_stuck(now - self._moved_on, is_coarse=is_coarse):
                self._moved_on = now
                self._read_rest()
            ended = [request for host, keep in late.items() for request in self._take_from(host, keep)]
        for request in ended:
            request.end()

    def _read_rest(self) -> None:
        """Read all that is missing from the file system: nothing came from anywhere."""
        own = self._queues[self._together.me]
        missing = (number for number in range(len(self._plan.pieces)) if not self._work.has(number))
        own.extend(number for number in missing if number not in self._reading and number not in own)
        self._changed.notify_all()

    def _progress_of(self, host: str, now: float) -> HostProgress:
        pieces, flying = self._plan.pieces, self._flying[host]
        left = sum(
            pieces[number].length for number in {*self._queues[host], *flying} if not self._work.has(number)
        )
        left -= sum(request.received for request in flying.values())
        since = max(now - WINDOW, self._calm_since)
        return HostProgress(max(left, 0), sum(count for at, count in self._recent[host] if at >= since))

    def _take_from(self, host: str, keep: int) -> list[HostRequest]:
        """Move what a late host would not deliver in time; return the requests that are to be ended."""
        queue, kept, flying = self._queues[host], deque[int](), self._flying[host]
        pieces = self._plan.pieces
        room = keep - sum(pieces[number].length - request.received for number, request in flying.items())
        ended = list(flying.values()) if room < 0 else []  # `_fail` moves what they are for
        self._queues[host] = kept
        for number in queue:
            room -= pieces[number].length
            if room >= 0:
                kept.append(number)
            elif not self._work.has(number):
                self._move(number)
        return ended

    def _note_proven(self, number: int) -> None:
        del number
        with self._changed:
            self._left -= 1
            if not self._queues[self._together.me] and not self.tally.reading:
                self.tally.reading = time.monotonic() - self._begun
                readers = len(self._together.members) if self._together.me in self._together.members else 0
                self._origin_rate = readers * self.tally.origin / self.tally.reading or None
            self._changed.notify_all()


def _spans_of(plan: PiecePlan, file: int) -> list[tuple[int, int, int]]:
    """Return the first byte, the end and the number of each piece of a file."""
    return [
        (piece.offset, piece.offset + piece.length, number)
        for number, piece in enumerate(plan.pieces)
        if piece.file == file
    ]
