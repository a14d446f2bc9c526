"""Gets all pieces of one plan: reads what is this host's from the file system, and asks others for the rest."""

import contextlib
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from syncd.errors import RefusedError, TryAgainError
from syncd.parts.hosts.asking import AskError, HostRequest
from syncd.parts.hosts.blame import (
    WINDOW,
    HostProgress,
    budget_of,
    fate_of,
    have_most_delivered,
    is_stuck,
    late_hosts,
    watched_for,
)
from syncd.parts.hosts.order import next_host, order_of
from syncd.parts.hosts.pieces import PiecePlan
from syncd.parts.hosts.pieces_in_work import PiecesInWork, SupersededError
from syncd.parts.hosts.shelf import LivePieces
from syncd.parts.hosts.threads import start_thread
from syncd.protocol.disk import Disk
from syncd.transports.files.piece_reader import PartialFile

RANKS = 3  # hosts that are asked for a piece before the file system is
FROM_ORIGIN = 2  # reads of the file system at once: with more, all pieces of a host come at the end

ALONE_AT_ONCE = 4
_CROWD = 32
"""Hosts beyond which one request at a time goes to each, else two: one is on the wire while the next waits."""

_READ = 1 << 20
_JUDGE = 0.2
_PAUSE = 0.1
_PAUSES = {"absent": 0.1, "busy": 1.0}  # seconds until a host is asked again; hundreds may ask a busy one
_TICK = 1e-6
_TOGETHER = 0.05  # seconds whose answers are noted as one


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
    early: int = 0  # of those, bytes that were read before the step was published
    peers: int = 0  # bytes from other hosts
    wrong: int = 0  # pieces that did not match
    moved: int = 0  # pieces that were asked of another host since one was late
    share: int = 0  # bytes that were this host's to read
    removed: dict[str, str] = field(default_factory=dict)  # hosts that were asked nothing more, and why
    seconds: float = 0.0
    reading: float = 0.0  # seconds until its own share was read
    read: int = 0  # bytes that it read in these

    @property
    def is_over_budget(self) -> bool:
        return self.origin > budget_of(self.share)


class Gather:
    """Gets a plan once; `run` returns when every piece is proven.

    Args:
        disk: The file system of the job.
        target: The directory that the files are written into.
        live: Shows other processes what is proven.
        partial: Files that this host has copied in part, by name.
    """

    def __init__(
        self,
        plan: PiecePlan,
        together: Together,
        disk: Disk,
        target: str,
        live: LivePieces,
        partial: Mapping[str, PartialFile],
    ) -> None:
        self._plan, self._together, self._disk = plan, together, disk
        self._work = PiecesInWork(plan, target, live, self._note_proven, partial)
        self._changed = threading.Condition()
        missing = [piece.length for number, piece in enumerate(plan.pieces) if not self._work.has(number)]
        self._left, self._size = len(missing), sum(missing)
        self._queues: dict[str, deque[int]] = {host: deque() for host in (*together.members, together.me)}
        self._vain: defaultdict[int, set[str]] = defaultdict(set)  # hosts that were asked for a piece
        self._reading: set[int] = set()
        self._flying: dict[str, dict[int, HostRequest]] = {host: {} for host in together.members}
        self._recent: dict[str, deque[tuple[float, int]]] = {host: deque() for host in self._queues}
        self._asked_at: dict[str, float] = {}
        self._strikes: Counter[str] = Counter()
        self._made_at = time.monotonic()
        self._over = self._is_unshared_read = False
        self._is_own_begun = False  # whether every piece of its own share is read or being read
        self._spans: dict[int, list[tuple[int, int, int]]] = {}
        self._error: Exception | None = None
        early = sum(file.copied for file in partial.values())
        self.tally = Tally(origin=early, early=early)

    def run(self, stop: Callable[[], bool]) -> Tally:
        """Get everything; `stop` is polled."""
        begun = self._begun = self._moved_on = time.monotonic()
        try:
            self._give_up_if(stop)
            self._begin()
            self._wait(stop)
        except Exception as error:
            self._error = self._error or error  # raised by `await_bytes` too
            raise
        finally:
            self.end()
        self.tally.seconds = time.monotonic() - begun
        return self.tally

    def end(self) -> None:
        """Get nothing more."""
        with self._changed:
            self._over = True
            flying = list(self._requests())
            self._changed.notify_all()
        for request in flying:
            request.end()
        self._work.close()  # threads that wait for an answer, or for a file system that hangs, write no more

    def _requests(self) -> Iterator[HostRequest]:
        """Yield the requests in flight."""
        for requests in self._flying.values():
            yield from requests.values()

    def _share(self) -> int:
        """Return the bytes that this host reads from the file system if nothing is wrong."""
        me, members, pieces = self._together.me, self._together.members, self._plan.pieces
        owned = (piece.length for number, piece in enumerate(pieces) if order_of(number, members)[:1] == [me])
        own = sum(length for _, _, length in self._plan.own)
        return own + max(sum(owned), self._plan.size // max(len(members), 1))

    def await_piece(self, number: int, seconds: float) -> bool:
        """Wait until a piece is proven, for another host."""
        if number >= len(self._plan.pieces):
            return False
        with self._changed:
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

    def _begin(self) -> None:
        self.tally.share = self._share()
        for number in range(len(self._plan.pieces)):
            if not self._work.has(number):
                self._enqueue(number)
        if self.tally.early:
            self._note_own_read()
        for work in self._workers():
            start_thread(partial(self._guarded, work), "pieces")

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
                self._changed.wait_for(lambda: self._error or self._is_done, _PAUSE)
                if self._error is not None:
                    raise self._error
                if self._is_done:
                    return
            self._give_up_if(stop)
            if time.monotonic() - judged >= _JUDGE:
                judged = time.monotonic()
                self._judge()

    def _give_up_if(self, stop: Callable[[], bool]) -> None:
        if stop():
            raise TryAgainError("reading it was given up: told to stop", path=self._plan.files[0].path)

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
    def _is_done(self) -> bool:
        return not self._left and not self._unread

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
                self._note_recent(self._together.me, len(data))
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
            except SupersededError:
                pass
            except AskError as error:
                self._fail(host, number, error)
            finally:
                with self._changed:
                    if self._flying[host].get(number) is request:  # else another asks it again by now
                        del self._flying[host][number]

    def _ask(self, host: str, number: int, request: HostRequest) -> None:
        piece, claim = self._plan.pieces[number], self._work.claim(number)
        with self._changed:
            self._flying[host][number] = request

        def take(chunk: memoryview) -> None:
            claim.write(chunk)
            self._note_received(host, len(chunk))

        path = f"/piece/{self._together.path}/{number}/{piece.file}/{piece.offset}/{piece.length}"
        request.get(path, piece.length, take)
        if not claim.finish():
            raise AskError("wrong")

    def _next_of(self, host: str) -> int | None:
        queue = self._queues[host]
        with self._changed:
            while not self._over and self._left and host not in self.tally.removed:
                while queue:
                    number = queue.popleft()
                    # What this host reads meanwhile comes sooner than from a host that was silent for long.
                    if not self._work.has(number) and number not in self._reading:
                        return number
                self._changed.wait(1.0)
        return None

    def _note_received(self, host: str, count: int) -> None:
        with self._changed:
            self.tally.peers += count
            self._note_recent(host, count)

    def _note_recent(self, host: str, count: int) -> None:
        recent, now = self._recent[host], time.monotonic()
        self._moved_on = now
        if recent and now - recent[-1][0] < _TOGETHER:
            now, more = recent.pop()
            count += more
        recent.append((now, count))
        while recent[0][0] < now - WINDOW:
            recent.popleft()

    def _fail(self, host: str, number: int, error: AskError) -> None:
        now, failure = time.monotonic(), error.failure
        with self._changed:
            if self._over or self._flying[host].pop(number, None) is None:  # it was asked elsewhere meanwhile
                return
            if host in self.tally.removed:  # by another request meanwhile: nobody looks at its queue any more
                self._remove(host, number, failure)
                return
            self._strikes[host] += failure in ("late", "lost")
            self.tally.wrong += failure == "wrong"
            # All deltas of a chain were begun at once, whenever this one had its turn.
            fate = fate_of(failure, self._strikes[host], now - self._made_at)
            if fate == "remove":
                self._remove(host, number, failure)
            elif fate == "move":
                self._move(host, number)
            else:
                self._queues[host].append(number)
        if fate == "wait":
            time.sleep(_PAUSES[failure])

    def _move(self, host: str, number: int) -> None:
        """Ask the next host of its order for a piece.

        That one reads it once it finds itself that the first is late: one wrong verdict reads nothing twice.
        """
        self.tally.moved += 1
        self._vain[number].add(host)
        self._enqueue(number)

    def _remove(self, host: str, number: int, why: str) -> None:
        """Ask nothing more of a host; what was its own is asked of the next in order."""
        self.tally.removed.setdefault(host, why)
        todo = [number, *self._queues[host], *self._flying[host]]
        self._queues[host].clear()
        self._flying[host].clear()
        for piece in todo:
            if not self._work.has(piece):
                self._enqueue(piece)

    def _enqueue(self, number: int) -> None:
        members, removed = self._together.members, self.tally.removed.keys()
        host = next_host(number, members, removed, self._vain[number], RANKS) or self._together.me
        with self._changed:
            self._queues[host].append(number)
            self._asked_at[host] = time.monotonic()
            self._changed.notify_all()

    def _judge(self) -> None:
        now = time.monotonic()
        with self._changed:
            is_coarse = self._plan.has_whole_files
            if is_stuck(now - self._moved_on, is_coarse=is_coarse):
                self._moved_on = now
                self._read_rest()
            ended = [request for request in self._requests() if request.is_overdue]
            progress = self._progress(now)
            if self._is_own_begun and have_most_delivered(progress.values()):
                late = late_hosts(progress, self._size, now - self._begun, is_coarse=is_coarse)
                ended += (request for host, keep in late.items() for request in self._take_from(host, keep))
        for request in ended:
            request.end()

    def _read_rest(self) -> None:
        """Read all that is missing from the file system: nothing came from anywhere."""
        own = self._queues[self._together.me]
        missing = (number for number in range(len(self._plan.pieces)) if not self._work.has(number))
        own.extend(number for number in missing if number not in self._reading and number not in own)
        self._changed.notify_all()

    def _progress(self, now: float) -> dict[str, HostProgress]:
        """Return how far all hosts are that read a share."""
        me, removed = self._together.me, self.tally.removed
        # What this one reads of a late host's share after its own does not count: else they would delay each other.
        left = {
            host: 0 if host == me else self._left_of(host) for host in self._flying if host not in removed
        }
        since = now - watched_for(sum(left.values()), self._size, now - self._begun)
        return {
            host: HostProgress(
                left[host],
                sum(count for at, count in self._recent[host] if at >= since),
                now - self._asked_at.get(host, self._begun),
            )
            for host in left
        }

    def _left_of(self, host: str) -> int:
        flying = self._flying[host]
        missing = (number for number in {*self._queues[host], *flying} if not self._work.has(number))
        left = sum(self._plan.pieces[number].length for number in missing)
        return max(left - sum(request.received for request in flying.values()), 0)

    def _take_from(self, host: str, keep: int) -> list[HostRequest]:
        """Move what a late host would not deliver in time; return the requests that are to be ended."""
        queue, kept, flying = self._queues[host], deque[int](), self._flying[host]
        pieces = self._plan.pieces
        room = keep - sum(pieces[number].length - request.received for number, request in flying.items())
        ended = dict(flying) if room < 0 else {}
        for number in ended:  # at once: a request that waits for its connection ends late
            del flying[number]
            self._move(host, number)
        self._queues[host] = kept
        for number in queue:
            room -= pieces[number].length
            if room >= 0:
                kept.append(number)
            elif not self._work.has(number):
                self._move(host, number)
        return list(ended.values())

    def _note_proven(self, number: int) -> None:
        with self._changed:
            self._left -= 1
            self._reading.discard(number)
            self._note_own_read()
            self._changed.notify_all()

    def _note_own_read(self) -> None:
        """Note when this host's own share was read: at once if it was copied early."""
        if self._queues[self._together.me]:
            return
        self._is_own_begun = True
        if not self._reading and not self.tally.reading:
            self.tally.reading = max(time.monotonic() - self._begun, _TICK)
            self.tally.read = self.tally.origin - self.tally.early


def _spans_of(plan: PiecePlan, file: int) -> list[tuple[int, int, int]]:
    """Return the first byte, the end and the number of each piece of a file."""
    return [
        (piece.offset, piece.offset + piece.length, number)
        for number, piece in enumerate(plan.pieces)
        if piece.file == file
    ]
