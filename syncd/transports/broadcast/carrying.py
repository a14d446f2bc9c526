"""What both ends of a broadcast do alike with the process group that carries it.

Trainer and explorers know each other through the job directory only, and nothing here imports torch: whoever calls
hands `torch.distributed` in.
"""

import atexit
import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from threading import Lock, Thread, Timer
from typing import Any
from weakref import WeakSet

from syncd.client.wait import Deadline
from syncd.errors import TimedOutError, TryAgainError
from syncd.transports.broadcast.failing import Failure

_LOOK, _LOOK_FURTHER = 0.0005, 0.25
"""Seconds between two looks whether a bucket is through, and whether the other side has given the round up."""

_GRACE = 1.0
"""Seconds after its deadline in which whoever carries something has noticed it, unless the device keeps it."""


_ENDING = 5.0
"""Seconds that a process waits for its groups to end before it ends itself: torch does not stand to be cut short."""

_endings: WeakSet[Thread] = WeakSet()


class GroupError(TryAgainError):
    """The group is broken: a member has gone, or the link."""

    code = "broadcast_failed"


def made_in_time(
    make: Callable[[], Any], deadline: Deadline, goes_on: Callable[[], bool] = lambda: True
) -> Any:
    """Return the group that is made, or leave it to a thread that is left behind.

    Torch's store waits without end for an answer of a process that stands still: its system takes connections.

    Args:
        make: Makes it. What it makes too late is aborted.
        deadline: When to give up.
        goes_on: Asked now and then: whether the other side still takes part.

    Raises:
        GroupError: The other side takes part no more.
        TimedOutError: The deadline has passed.
    """
    making = _Making(make)
    making.start()
    try:
        making.join(min(_LOOK_FURTHER, left(deadline)))
        while making.is_alive():
            require(goes_on)
            making.join(min(_LOOK_FURTHER, left(deadline)))
    except BaseException:
        making.give_up()
        raise
    return making.made()


class _Making(Thread):
    """Makes a group. What a failure refers to is let go at once: a store keeps its connection for as long."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(name="broadcast-join", daemon=True)
        self._make = make
        self._group: Any = None
        self._failure = Failure()
        self._lock, self._given_up = Lock(), False

    def run(self) -> None:
        """Make it; nobody may wait for it any more when it is there."""
        group: Any = None
        failed: BaseException | None = None
        try:
            group = self._make()
        except BaseException as error:  # noqa: BLE001 - raised again in who waits for it
            failed = error
        with self._lock:
            if self._given_up:
                abort([group])
            else:
                self._group = group
                self._failure.keep(failed)
        del group, failed

    def give_up(self) -> None:
        """Have it aborted, now or when it is there."""
        with self._lock:
            self._given_up = True
            _endings.add(self)
            held, self._group = [self._group], None
            self._failure.keep(None)
        abort(held)

    def made(self) -> Any:
        """Return it once the thread has ended, or raise what that has ended with."""
        self._failure.tell()
        return self._group


def carry(dist: Any, group: Any, bucket: Any, deadline: Deadline) -> Any:
    """Begin to carry a bucket from rank 0 to all others; it is through after `finish`.

    Raises:
        TimedOutError: The deadline has passed.
    """
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    options.timeout = timedelta(seconds=left(deadline))
    return group.broadcast([bucket], options)


def finish(work: Any, deadline: Deadline, what: str, goes_on: Callable[[], bool] = lambda: True) -> None:
    """Wait until a bucket is through.

    Args:
        work: What `carry` returned.
        deadline: When to give up.
        what: What has gone wrong where it will never be.
        goes_on: Asked now and then: whether the other side still takes part.

    Raises:
        GroupError: It will never be.
        TimedOutError: It is not, in time.
    """
    asked = time.monotonic()
    while not work.is_completed():
        left(deadline)
        if time.monotonic() - asked > _LOOK_FURTHER:
            require(goes_on)
            asked = time.monotonic()
        time.sleep(_LOOK)
    with told(what):
        work.wait()


@contextlib.contextmanager
def bounded(group: Any, deadline: Deadline) -> Iterator[None]:
    """Have a group aborted soon after a deadline, whatever this thread waits for then.

    It may wait for the device (to allocate memory is enough), and the device for a member that has gone.

    Raises:
        TimedOutError: What was done inside has taken longer.
    """
    timer = Timer(max(deadline.left(), 0.0) + _GRACE, _abort, [[group], ()])
    timer.daemon = True
    timer.start()
    try:
        yield
        left(deadline)
    finally:
        timer.cancel()


def abort(held: list[Any], *kept: Any) -> Thread | None:
    """End a group at once, whatever is under way; what waits in it ends by its own time. None is no group.

    Args:
        held: The group alone. Who lets go of a group last waits for what is under way in it, so the thread that ends
            it takes it out of here, and nobody else should hold it.
        kept: Memory that may be under way: a device writes into it until the group has ended.

    Returns:
        The thread that ends it.
    """
    if held == [None]:
        return None
    thread = Thread(target=_abort, args=[held, kept], name="broadcast-abort", daemon=True)
    _endings.add(thread)
    thread.start()
    return thread


def left(deadline: Deadline) -> float:
    """Return the seconds that are left.

    Raises:
        TimedOutError: There are none.
    """
    seconds = deadline.left()
    if seconds <= 0:
        raise TimedOutError(f"the broadcast has not ended within {deadline.seconds:g} s")
    return seconds


def require(goes_on: Callable[[], bool]) -> None:
    """Raise where the other side takes part no more.

    Raises:
        GroupError: It does not.
    """
    if not goes_on():
        raise GroupError("the trainer has given the broadcast up")


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Turn what torch and the operating system raise into a broken group.

    Raises:
        GroupError: Something was raised inside.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise GroupError(f"{what}: {(str(error).splitlines() or [''])[0]}") from error


def _abort(held: list[Any], _kept: Any) -> None:
    group = held.pop()
    with contextlib.suppress(RuntimeError):
        group.abort()


@atexit.register
def _await_endings() -> None:
    end = time.monotonic() + _ENDING
    for thread in list(_endings):
        thread.join(max(end - time.monotonic(), 0.0))
