"""What both ends of a broadcast do alike with the process group that carries it.

Trainer and explorers know each other through the job directory only, and nothing here imports torch: whoever calls
hands `torch.distributed` in.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from threading import Thread
from typing import Any

from syncd.errors import TimedOutError, TryAgainError
from syncd.synchronizer.waiting import Deadline

_LOOK, _LOOK_FURTHER = 0.0005, 0.25
"""Seconds between two looks whether a bucket is through, and whether the other side has given the round up."""


class GroupError(TryAgainError):
    """The group is broken: a member has gone, or the link."""

    code = "broadcast_failed"


def make_group(dist: Any, store: Any, *, rank: int, world_size: int, address: str, deadline: Deadline) -> Any:
    """Return a gloo group of its own; all its waits end at the deadline.

    Args:
        dist: `torch.distributed`.
        store: Where its members find each other.
        rank: This process's.
        world_size: Of all members.
        address: This host's, on which the group listens.
        deadline: When to give up.

    Raises:
        TimedOutError: The deadline has passed.
    """
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - no other says where it listens
    options._timeout = timedelta(seconds=left(deadline))  # noqa: SLF001
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]  # noqa: SLF001
    return dist.ProcessGroupGloo(store, rank, world_size, options)


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
            if not goes_on():
                raise GroupError("the trainer has given the broadcast up")
            asked = time.monotonic()
        time.sleep(_LOOK)
    with told(what):
        work.wait()


def abort(group: Any) -> None:
    """End a group at once, whatever is under way; what waits in it ends by its own time. None is no group."""
    if group is not None:
        Thread(target=_abort, args=[group], name="broadcast-abort", daemon=True).start()


def left(deadline: Deadline) -> float:
    """Return the seconds that are left.

    Raises:
        TimedOutError: There are none.
    """
    seconds = deadline.left()
    if seconds <= 0:
        raise TimedOutError(f"the broadcast has not ended within {deadline.seconds:g} s")
    return seconds


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


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()
