"""Measurements between two hosts without synchronised clocks: one asks, the other answers, then they swap.

A question and its answer are timed together, on one clock; one way counts as half of that. The time until the partner
sees a change is the time until its answer, minus one way.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from syncd.parts.doctor.events import Listener, listening
from syncd.parts.doctor.names import Kind, lock_held, try_lock
from syncd.parts.doctor.peer import END, PeerLink
from syncd.parts.doctor.probe import errno_name, percentile
from syncd.protocol.documents import Fields, record_from

ROUNDS = 40
_STATS = 3
_LOOK = 0.01
_LONGEST = 600.0
_MARGIN = 60.0

Value = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Direction:
    """How one host sees what the other does."""

    bound_s: float  # how long each single measurement was allowed to take
    rounds: int  # questions that were asked and answered; a tick finds each
    round_trip_p50_ms: float  # time to replace a file and get the answer, including writing and syncing both
    round_trip_p99_ms: float  # the same
    round_trip_max_ms: float  # the same
    write_p50_ms: float  # the part of it that writing and syncing the file took
    stat_ms: float | None  # time until a stat alone shows a replaced file; None: not within the bound
    # Time until a name is found that was looked up before it existed; None: not within the bound.
    new_name_ms: float | None
    events: bool  # whether a change raises an event on the other host
    flock: str  # what a flock that one host holds does to the other: `excludes`, `both acquire` or an errno
    lockf: str  # the same for lockf


@dataclass(frozen=True, slots=True)
class Peer:
    host: str  # the other host
    outward: Direction  # how the other host sees the changes of this one
    inward: Direction  # how this host sees the changes of the other one

    @property
    def slowest_p50_ms(self) -> float:
        return max(self.outward.round_trip_p50_ms, self.inward.round_trip_p50_ms)

    @property
    def slowest_p99_ms(self) -> float:
        return max(self.outward.round_trip_p99_ms, self.inward.round_trip_p99_ms)


def converse(end: PeerLink, seconds: float) -> Peer:
    if end.leads:
        outward = lead(end, seconds)
        inward, host = serve(end)
        end.leave()
    else:
        inward, host = serve(end)
        outward = lead(end, seconds)
    return Peer(host, outward, inward)


def lead(end: PeerLink, seconds: float) -> Direction:
    """Make changes, and measure how soon the partner answers that it saw them."""
    trips, writes = round_trips(end, seconds)
    one_way = percentile(trips, 50) / 2
    direction = Direction(
        bound_s=seconds,
        rounds=len(trips),
        round_trip_p50_ms=_ms(percentile(trips, 50)),
        round_trip_p99_ms=_ms(percentile(trips, 99)),
        round_trip_max_ms=_ms(max(trips, default=0.0)),
        write_p50_ms=_ms(percentile(writes, 50)),
        stat_ms=stat_lag(end, seconds, one_way),
        new_name_ms=new_name_lag(end, seconds, one_way),
        events=raises_events(end),
        flock=lock_scope(end, "flock"),
        lockf=lock_scope(end, "lockf"),
    )
    end.finish(_MARGIN, {"host": socket.gethostname(), "found": asdict(direction)})
    return direction


def round_trips(end: PeerLink, seconds: float) -> tuple[list[float], list[float]]:
    """Return the seconds until each question was answered, and those that asking it took."""
    until, trips, writes = time.monotonic() + seconds, list[float](), list[float]()
    while len(trips) < ROUNDS and (time.monotonic() < until or not trips):
        began = time.monotonic()
        end.ask("ping", seconds + _MARGIN)
        trips.append(time.monotonic() - began)
        writes.append(end.wrote)
    # During the first one caches are cold and the partner may still be starting.
    return trips[1:] or trips, writes


def stat_lag(end: PeerLink, seconds: float, one_way: float) -> float | None:
    """Return the median milliseconds until the partner's stat alone shows a replaced file."""
    until, lags = time.monotonic() + seconds, list[float]()
    while len(lags) < _STATS and (left := until - time.monotonic()) > 0:
        end.ask("stat-before", _MARGIN)
        end.disk.replace(f"{end.own}/stat/word", b"x" * (len(lags) + 1))
        lag = _lag_of(end, "stat-after", left, one_way)
        if lag is None:
            break
        lags.append(lag)
    return _ms(percentile(lags, 50)) if lags else None


def new_name_lag(end: PeerLink, seconds: float, one_way: float) -> float | None:
    """Return the milliseconds until the partner finds a name that it looked up before it existed."""
    end.ask("name-before", _MARGIN)
    os.close(os.open(f"{end.own}/names/new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    lag = _lag_of(end, "name-after", seconds, one_way)
    return None if lag is None else _ms(lag)


def _lag_of(end: PeerLink, topic: str, seconds: float, one_way: float) -> float | None:
    began = time.monotonic()
    seen = end.ask(topic, seconds + _MARGIN, {"seconds": seconds}).flag("seen")
    return max(0.0, time.monotonic() - began - one_way) if seen else None


def raises_events(end: PeerLink) -> bool:
    """Return whether a file that is replaced here raises an event there."""
    if not end.ask("watch", _MARGIN).flag("armed"):
        return False
    end.disk.replace(f"{end.own}/events/word", b"x")
    return end.ask("watched", _MARGIN).flag("seen")


def lock_scope(end: PeerLink, kind: Kind) -> str:
    """Return how a lock ends that the partner tries while this host holds it.

    Each kind has its own file: NFS makes one kind of both, and may release the first.
    """
    try:
        with lock_held(f"{end.own}/locks/{kind}", kind):
            return end.ask("lock", _MARGIN, {"kind": kind}).text("became")
    except OSError as error:
        return errno_name(error)


def serve(end: PeerLink) -> tuple[Direction, str]:
    """Answer until the partner has no more questions; return what it found, and its name."""
    with contextlib.ExitStack() as stack:
        witness = PeerObserver(end.other, stack)
        while (question := end.asked(_MARGIN)).text("topic") != END:
            end.answer(witness.answer(question.text("topic"), question.record("value")))
        end.answer({})
    value = question.record("value")
    return record_from(Direction, value.record("found")), value.text("host")


class PeerObserver:
    """Observes the changes of the partner in the ways in which programs do."""

    def __init__(self, other: str, stack: contextlib.ExitStack) -> None:
        self._other, self._stack = other, stack
        self._before: tuple[int, ...] = ()
        self._listener: Listener | None = None

    def answer(self, topic: str, value: Fields) -> Value:
        """Return the answer to a question; to an unknown one, that nothing was seen."""
        answers: dict[str, Callable[[Fields], Value]] = {
            "stat-before": self._stat_before,
            "stat-after": lambda value: self._wait(value, lambda: self._stat() != self._before),
            "name-before": lambda _: {"seen": self._there()},
            "name-after": lambda value: self._wait(value, self._there),
            "watch": self._watch,
            "watched": lambda _: {"seen": self._listener is not None and self._listener.wait()},
            "lock": self._lock,
        }
        return answers[topic](value) if topic in answers else {"seen": False}

    def _wait(self, value: Fields, seen: Callable[[], bool]) -> Value:
        end = time.monotonic() + min(value.number("seconds"), _LONGEST)
        while not seen():
            if time.monotonic() > end:
                return {"seen": False}
            time.sleep(_LOOK)
        return {"seen": True}

    def _stat_before(self, _: Fields) -> Value:
        self._before = self._stat()
        return {"seen": True}

    def _stat(self) -> tuple[int, ...]:
        try:
            status = os.stat(f"{self._other}/stat/word")
        except OSError:
            return self._before
        return (status.st_ino, status.st_size, status.st_mtime_ns)

    def _there(self) -> bool:
        return os.path.lexists(f"{self._other}/names/new")

    def _watch(self, _: Fields) -> Value:
        try:
            self._listener = self._stack.enter_context(listening(f"{self._other}/events/word"))
        except OSError:
            return {"armed": False}
        self._listener.arm()
        return {"armed": True}

    def _lock(self, value: Fields) -> Value:
        kind: Kind = "flock" if value.text("kind") == "flock" else "lockf"
        return {"became": try_lock(f"{self._other}/locks/{kind}", kind)}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)
