"""An explorer's end of a broadcast's own process group, beside whatever `torch.distributed` has."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed

from syncd.errors import TimedOutError, TryAgainError
from syncd.protocol.rendezvous import Offer
from syncd.synchronizer.waiting import Deadline

_DIST: Any = torch.distributed
"""Its type stubs lack half of what is there."""

_LOOK, _LOOK_FURTHER = 0.0005, 0.25
"""Seconds between two looks whether a bucket is there, and whether the trainer has given the round up."""


class GroupError(TryAgainError):
    """The group is broken: the trainer has gone, or another member, or the link."""

    code = "broadcast_failed"


class Member:
    """One explorer in a group.

    Args:
        offer: What the trainer offers.
        identity: The explorer.
        deadline: When to give up.

    Raises:
        GroupError: The group was not formed in time.
    """

    def __init__(self, offer: Offer, identity: str, deadline: Deadline) -> None:
        self.offer = offer
        rank, left = offer.members.index(identity) + 1, timedelta(seconds=_left(deadline))
        with _told("the group was not formed"):
            own = _own_address(offer.address, offer.port)
            reached = _DIST.TCPStore(offer.address, offer.port, None, False, left, wait_for_workers=False)  # noqa: FBT003
            store = _DIST.PrefixStore(offer.secret, reached)
            self._group: Any = _make_group(store, rank, offer.world_size, own, left)

    def receive(self, bucket: torch.Tensor, deadline: Deadline) -> Any:
        """Begin to receive a bucket; it is not there before `finish`.

        Raises:
            GroupError: The group is broken.
            TimedOutError: The deadline has passed.
        """
        options = _DIST.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=_left(deadline))
        with _told("a bucket was not received"):
            return self._group.broadcast([bucket], options)

    def abort(self) -> None:
        """Leave the group at once, whatever is under way; what waits in it ends by its own time."""
        group, self._group = self._group, None
        if group is not None:
            Thread(target=_abort, args=[group], name="broadcast-abort", daemon=True).start()


def finish(work: Any, deadline: Deadline, goes_on: Callable[[], bool]) -> None:
    """Wait until a bucket is there.

    Args:
        work: What `receive` returned.
        deadline: When to give up.
        goes_on: Asked now and then: whether the trainer still sends.

    Raises:
        GroupError: It will never be.
        TimedOutError: It is not, in time.
    """
    asked = time.monotonic()
    while not work.is_completed():
        _left(deadline)
        if time.monotonic() - asked > _LOOK_FURTHER:
            if not goes_on():
                raise GroupError("the trainer has given the broadcast up")
            asked = time.monotonic()
        time.sleep(_LOOK)
    with _told("a bucket was not received"):
        work.wait()


def _make_group(store: Any, rank: int, size: int, address: str, left: timedelta) -> Any:
    options = _DIST.ProcessGroupGloo._Options()  # noqa: SLF001 - no other says where it listens
    options._timeout = left  # noqa: SLF001
    options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=address)]  # noqa: SLF001
    return _DIST.ProcessGroupGloo(store, rank, size, options)


def _own_address(address: str, port: int) -> str:
    """Return this host's address on the way to another; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        own: str = probe.getsockname()[0]
        return own


def _left(deadline: Deadline) -> float:
    left = deadline.left()
    if left <= 0:
        raise TimedOutError(f"the broadcast has not ended within {deadline.seconds:g} s")
    return left


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise GroupError(f"{what}: {(str(error).splitlines() or [''])[0]}") from error
