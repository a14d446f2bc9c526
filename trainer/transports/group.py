"""The broadcast's own process group, at its root, beside whatever `torch.distributed` has. It is gloo's."""

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from syncd.synchronizer import carrying
from syncd.synchronizer.waiting import Deadline

_DIST: Any = torch.distributed
"""Its type stubs lack half of what is there."""

_BACKLOG = 128
_BROKEN = "a bucket was not sent"


class Root:
    """The trainer's end of a group. Listens from the first moment on, on one address only.

    Args:
        address: The address to listen on.
        timeout: Seconds that the store waits for anything.
    """

    def __init__(self, address: str, timeout: float) -> None:
        self.address = address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with (
            carrying.told(f"cannot listen on {address}"),
            socket.socket(family, socket.SOCK_STREAM) as listening,
        ):
            listening.bind((address, 0))
            listening.listen(_BACKLOG)
            self.port: int = listening.getsockname()[1]
            self._store: Any = _DIST.TCPStore(
                address,
                self.port,
                None,
                is_master=True,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        self._group: Any = None

    def form(self, world_size: int, secret: str, deadline: Deadline) -> None:
        """Connect to all members.

        Raises:
            GroupError: Not all of them came in time.
        """
        with carrying.told("the group was not formed"):
            store = _DIST.PrefixStore(secret, self._store)
            self._group = carrying.make_group(
                _DIST, store, rank=0, world_size=world_size, address=self.address, deadline=deadline
            )

    def send(self, bucket: torch.Tensor, deadline: Deadline) -> Any:
        """Begin to send a bucket; it must not change before `finish`.

        Raises:
            GroupError: The group is broken.
            TimedOutError: The deadline has passed.
        """
        with carrying.told(_BROKEN):
            return carrying.carry(_DIST, self._group, bucket, deadline)

    def abort(self) -> None:
        """End the group at once, whatever is under way; what waits in it ends by its own time."""
        group, self._group, self._store = self._group, None, None
        carrying.abort(group)


def finish(work: Any, deadline: Deadline) -> None:
    """Wait until a bucket is through.

    Raises:
        GroupError: It will never be.
        TimedOutError: It is not, in time.
    """
    carrying.finish(work, deadline, _BROKEN)
