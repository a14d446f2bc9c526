"""Calls of a process group that may block, each with a deadline; nothing here imports torch."""

import atexit
import contextlib
import time
from collections.abc import Callable, Iterator
from threading import Lock, Thread, Timer
from typing import Any
from weakref import WeakSet

from syncd.client.wait import Deadline
from syncd.errors import TimedOutError, TryAgainError, first_line

POLL, POLL_PEER = 0.0005, 0.25
"""Seconds between two polls of a broadcast, and of whether the other side still takes part."""

_GRACE = 1.0
"""Seconds after a deadline in which a thread notices it by itself, unless it waits for the device."""

_ENDING = 5.0
"""Seconds that a process waits at its exit for groups to end: torch crashes if its threads are cut short."""

_endings: WeakSet[Thread] = WeakSet()  # threads that end a group; the process waits for them when it exits


class GroupError(TryAgainError):
    """The process group is broken: a member is gone, or the link."""

    code = "broadcast_failed"


class Failure:
    """The error of a thread, kept until it is raised once in the thread that waits for it.

    A raised error refers to the frames that it passed, and so to this object: a reference cycle, in which the
    connections of a group would stay open until the next collection. So the error is dropped when it is raised.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def keep(self, error: BaseException | None) -> None:
        self._error = error

    def raise_once(self) -> None:
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error


def always() -> bool:
    return True


def make_in_time(
    make: Callable[[], Any],
    deadline: Deadline,
    takes_part: Callable[[], bool] = always,
    discard: Callable[[Any], object] | None = None,
) -> Any:
    """Return what `make` returns, a group unless `discard` is given, or leave `make` to a thread that is left behind.

    Torch's store waits without a time-out for an answer of a stopped process, whose kernel accepts connections.
    `takes_part` is asked now and then: whether the other side still takes part. `discard` is called with what `make`
    returns too late; None to abort it.
    """
    making = _Making(make, discard or (lambda made: abort([made])))
    making.start()
    try:
        making.join(min(POLL_PEER, seconds_left(deadline)))
        while making.is_alive():
            require(takes_part)
            making.join(min(POLL_PEER, seconds_left(deadline)))
    except BaseException:
        making.give_up()
        raise
    return making.result()


class _Making(Thread):
    """Creates a group. It drops what it holds as soon as it can: a store keeps its connection for as long."""

    def __init__(self, make: Callable[[], Any], discard: Callable[[Any], object]) -> None:
        super().__init__(name="broadcast-join", daemon=True)
        self._make, self._discard = make, discard
        self._group: Any = None
        self._failure = Failure()
        self._lock, self._given_up = Lock(), False

    def run(self) -> None:
        group: Any = None
        failed: BaseException | None = None
        try:
            group = self._make()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            failed = error
        with self._lock:
            if self._given_up:
                self._discard(group)
            else:
                self._group = group
                self._failure.keep(failed)
        del group, failed

    def give_up(self) -> None:
        """Discard the group, now or as soon as it exists."""
        with self._lock:
            self._given_up = True
            _endings.add(self)
            self._failure.keep(None)
            if self._group is not None:
                self._discard(self._group)
                self._group = None

    def result(self) -> Any:
        self._failure.raise_once()
        return self._group


def finish_broadcast(
    work: Any, deadline: Deadline, what: str, takes_part: Callable[[], bool] = always
) -> None:
    """Wait until what `start_broadcast` returned is complete; ask now and then if the other side `takes_part`."""
    asked = time.monotonic()
    while not work.is_completed():
        seconds_left(deadline)
        if time.monotonic() - asked > POLL_PEER:
            require(takes_part)
            asked = time.monotonic()
        time.sleep(POLL)
    with as_group_error(what):
        work.wait()


@contextlib.contextmanager
def aborted_at(group: Any, deadline: Deadline) -> Iterator[None]:
    """Abort a group soon after a deadline, whatever this thread waits for at that time.

    The thread may wait for the device (an allocation is enough), and the device for a member that is gone.
    """
    timer = Timer(max(deadline.left(), 0.0) + _GRACE, _abort, [[group], ()])
    timer.daemon = True
    timer.start()
    try:
        yield
        seconds_left(deadline)
    finally:
        timer.cancel()


def abort(held: list[Any], *kept: Any) -> Thread | None:
    """Abort a group in a thread and return that thread; None if there is no group.

    Args:
        held: The group alone. Whoever drops the last reference to a group waits for its pending work, so the thread
            takes the group out of this list, and nobody else should refer to it.
        kept: Tensors that may be under way: a device writes to them until the group has ended.
    """
    if held == [None]:
        return None
    thread = Thread(target=_abort, args=[held, kept], name="broadcast-abort", daemon=True)
    _endings.add(thread)
    thread.start()
    return thread


def seconds_left(deadline: Deadline) -> float:
    seconds = deadline.left()
    if seconds <= 0:
        raise TimedOutError(f"the broadcast did not finish within {deadline.seconds:g} s")
    return seconds


def require(takes_part: Callable[[], bool]) -> None:
    if not takes_part():
        raise GroupError("the trainer aborted the broadcast")


@contextlib.contextmanager
def as_group_error(what: str) -> Iterator[None]:
    """Turn what torch and the operating system raise in the body into a `GroupError`."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise GroupError(f"{what}: {first_line(error)}") from error


def _abort(held: list[Any], _kept: Any) -> None:
    group = held.pop()
    with contextlib.suppress(RuntimeError):
        group.abort()


@atexit.register
def _await_endings() -> None:
    end = time.monotonic() + _ENDING
    for thread in list(_endings):
        thread.join(max(end - time.monotonic(), 0.0))
