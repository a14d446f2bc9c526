"""A group of this process and the workers of one engine, for as long as one version is handed over.

It is gloo's, over the address that it is told to listen on, so the engine's weights may be anywhere and this process
needs no accelerator.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed

from syncd.client.wait import Deadline
from syncd.protocol.backend import GLOO
from syncd.transports.broadcast import carrying, groups

BACKEND = GLOO

_DIST: Any = torch.distributed
"""Its type stubs lack half of what is there."""

_ENDING = 2.0
"""Seconds that the end of a group may be waited for."""

_BROKEN = "a tensor was not handed to the engine"


class LocalGroup:
    """This process, as rank 0, and the workers of an engine. Listens from the first moment on, on one address only.

    Args:
        address: The address to listen on.
        workers: How many workers the engine has.
        deadline: When to give up, whatever is under way.

    Raises:
        GroupError: It cannot listen there.
        TimedOutError: The deadline has passed.
    """

    def __init__(self, address: str, workers: int, deadline: Deadline) -> None:
        self.address, self.world_size = address, workers + 1
        self.secret = secrets.token_hex(16)
        self._deadline = deadline
        self._group: Any = None
        self._store, self.port = groups.listen(torch, address, carrying.left(deadline))

    def form(self, prefixes: Sequence[str], deadline: Deadline) -> None:
        """Connect to all workers, which are told meanwhile to come.

        Args:
            prefixes: What the engine puts before the keys of its group in the store, the outermost first.
            deadline: Until when they have to be there.

        Raises:
            GroupError: Not all of them came.
            TimedOutError: The deadline has passed.
        """
        with carrying.told("the engine's workers did not come"):
            store = self._store
            for prefix in prefixes:
                store = _DIST.PrefixStore(prefix, store)
            self._group = groups.make_group(
                torch,
                store,
                backend=BACKEND,
                device=torch.device("cpu"),
                rank=0,
                world_size=self.world_size,
                address=self.address,
                deadline=deadline,
            )

    def send(self, tensor: torch.Tensor) -> Any:
        """Begin to send a tensor to all workers.

        Raises:
            GroupError: The group is broken.
            TimedOutError: The deadline has passed.
        """
        with carrying.told(_BROKEN):
            return carrying.carry(_DIST, self._group, tensor.detach().cpu().contiguous(), self._deadline)

    def finish(self, work: Any, goes_on: Callable[[], bool]) -> None:
        """Wait until a tensor is through.

        Args:
            work: What `send` returned.
            goes_on: Asked now and then; it raises where the engine has said no meanwhile.

        Raises:
            GroupError: It will never be.
            TimedOutError: It is not, in time.
        """
        carrying.finish(work, self._deadline, _BROKEN, goes_on)

    def abort(self) -> None:
        """End the group at once, whatever is under way: workers that wait in it are told by their connection."""
        held, self._group, self._store = [self._group], None, None
        ending = carrying.abort(held)
        if ending is not None:
            ending.join(_ENDING)
