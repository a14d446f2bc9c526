"""An explorer's end of a broadcast's own process group, beside whatever `torch.distributed` has."""

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from syncd.protocol.rendezvous import Offer
from syncd.synchronizer import carrying
from syncd.synchronizer.waiting import Deadline

_DIST: Any = torch.distributed
"""Its type stubs lack half of what is there."""

_BROKEN = "a bucket was not received"


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
        rank, left = offer.members.index(identity) + 1, timedelta(seconds=carrying.left(deadline))
        with carrying.told("the group was not formed"):
            own = _own_address(offer.address, offer.port)
            reached = _DIST.TCPStore(offer.address, offer.port, None, False, left, wait_for_workers=False)  # noqa: FBT003
            store = _DIST.PrefixStore(offer.secret, reached)
            self._group: Any = carrying.make_group(
                _DIST, store, rank=rank, world_size=offer.world_size, address=own, deadline=deadline
            )

    def receive(self, bucket: torch.Tensor, deadline: Deadline) -> Any:
        """Begin to receive a bucket; it is not there before `finish`.

        Raises:
            GroupError: The group is broken.
            TimedOutError: The deadline has passed.
        """
        with carrying.told(_BROKEN):
            return carrying.carry(_DIST, self._group, bucket, deadline)

    def abort(self) -> None:
        """Leave the group at once, whatever is under way; what waits in it ends by its own time."""
        group, self._group = self._group, None
        carrying.abort(group)


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
