"""An explorer's end of a broadcast's own process group, beside whatever `torch.distributed` has."""

import socket
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from syncd.client.wait import Deadline
from syncd.protocol.rendezvous import Offer
from syncd.transports.broadcast import carrying, groups

_DIST: Any = torch.distributed
"""Its type stubs lack half of what is there."""

UNDER_WAY = 2
"""Buckets that are received at once: the trainer sends as many."""

_BROKEN = "a bucket was not received"

_CONNECT = 2.0
"""Seconds for which torch tries to connect, twice: a root that has gone meanwhile is not to be sought for long."""


class Member:
    """One explorer in a group.

    Args:
        offer: What the trainer offers.
        identity: The explorer.
        deadline: When to give up.
        device: Where buckets are.
        goes_on: Asked now and then: whether the trainer still takes part.

    Raises:
        GroupError: The group cannot be formed.
        TimedOutError: It is not, in time.
    """

    def __init__(
        self,
        offer: Offer,
        identity: str,
        deadline: Deadline,
        device: torch.device,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self.offer, self.device = offer, device
        self._under_way: deque[torch.Tensor] = deque(maxlen=UNDER_WAY)
        rank = offer.members.index(identity) + 1
        with carrying.told("the group was not formed"):
            make = lambda: _joined(offer, rank, deadline, device)  # noqa: E731
            self._group: Any = carrying.made_in_time(make, deadline, goes_on)

    def receive(self, bucket: torch.Tensor, deadline: Deadline) -> Any:
        """Begin to receive a bucket; it is not there before `finish`.

        Raises:
            GroupError: The group is broken.
            TimedOutError: The deadline has passed.
        """
        with carrying.told(_BROKEN):
            self._under_way.append(bucket)
            return carrying.carry(_DIST, self._group, bucket, deadline)

    def bounded(self, deadline: Deadline) -> AbstractContextManager[None]:
        """Have it all end soon after a deadline (`carrying.bounded`)."""
        return carrying.bounded(self._group, deadline)

    def abort(self) -> None:
        """Leave the group at once, whatever is under way; what waits in it ends by its own time."""
        held, self._group = [self._group], None
        carrying.abort(held, *self._under_way)


def _joined(offer: Offer, rank: int, deadline: Deadline, device: torch.device) -> Any:
    own = _own_address(offer.address, offer.port)
    # The store listens since before it was offered. Where nothing does, torch would try again beyond its time.
    with socket.create_connection((offer.address, offer.port), carrying.left(deadline)):
        pass
    left = timedelta(seconds=min(_CONNECT, carrying.left(deadline)))
    reached = _DIST.TCPStore(offer.address, offer.port, None, False, left, wait_for_workers=False)  # noqa: FBT003
    reached.set_timeout(timedelta(seconds=carrying.left(deadline)))
    return groups.make_group(
        torch,
        _DIST.PrefixStore(offer.secret, reached),
        backend=offer.backend,
        device=device,
        rank=rank,
        world_size=offer.world_size,
        address=own,
        deadline=deadline,
    )


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
    carrying.finish(work, deadline, _BROKEN, goes_on)


def _own_address(address: str, port: int) -> str:
    """Return this host's address on the way to another; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        own: str = probe.getsockname()[0]
        return own
