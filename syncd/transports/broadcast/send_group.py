"""The broadcast's own process group, at its root, beside whatever `torch.distributed` has."""

from collections import deque
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed

from syncd.client.wait import Deadline
from syncd.protocol.rendezvous import Offer
from syncd.transports.broadcast import carrying, groups

_DIST: Any = torch.distributed
"""Its type stubs lack half of what is there."""

UNDER_WAY = 2
"""Buckets that are sent at once: one is packed while the other one is on its way."""

_BROKEN = "a bucket was not sent"


class Root:
    """The trainer's end of a group. Listens from the first moment on, on one address only.

    Args:
        address: The address to listen on.
        timeout: Seconds that the store waits for anything.
        device: Where buckets are.
    """

    def __init__(self, address: str, timeout: float, device: torch.device) -> None:
        self.address, self.device = address, device
        self._under_way: deque[torch.Tensor] = deque(maxlen=UNDER_WAY)
        self._store, self.port = groups.listen(torch, address, timeout)
        self._group: Any = None

    def form(self, offer: Offer, deadline: Deadline) -> None:
        """Connect to all members of an offer.

        Raises:
            GroupError: Not all of them came in time.
        """
        with carrying.told("the group was not formed"):
            self._group = groups.make_group(
                torch,
                _DIST.PrefixStore(offer.secret, self._store),
                backend=offer.backend,
                device=self.device,
                rank=0,
                world_size=offer.world_size,
                address=self.address,
                deadline=deadline,
            )

    def send(self, bucket: torch.Tensor, deadline: Deadline) -> Any:
        """Begin to send a bucket; it must not change before `finish`.

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
        """End the group at once, whatever is under way; what waits in it ends by its own time."""
        held, self._group, self._store = [self._group], None, None
        carrying.abort(held, *self._under_way)


def finish(work: Any, deadline: Deadline) -> None:
    """Wait until a bucket is through.

    Raises:
        GroupError: It will never be.
        TimedOutError: It is not, in time.
    """
    carrying.finish(work, deadline, _BROKEN)
