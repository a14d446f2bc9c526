"""Weights through a process group of this process and the engine's workers, whose store listens on one address only.

Over gloo the engine's weights may be anywhere, and this process needs no accelerator. Over NCCL this process needs a
GPU that no worker has.
"""

import contextlib
import secrets
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from explorer_hooks.http_client import HttpClient
from explorer_hooks.parts.broadcast.delivery import Delivery, Tensors
from explorer_hooks.parts.broadcast.paired_calls import EngineRequest, wait_for_all
from syncd.client.wait import Deadline
from syncd.errors import LoadFailedError, SyncdError
from syncd.parts.broadcast.group_calls import GroupError, make_in_time, seconds_left
from syncd.parts.broadcast.process_group import CPU, ProcessGroup
from syncd.protocol.backend import GLOO
from syncd.protocol.local_disk import SystemClock

JOINING = 60.0  # seconds that the engine's workers may take to join a group; they are idle
_LAST_ERROR = 2.0  # seconds that an engine may take to report why a group broke
_ENDING = 10.0  # seconds that a request may last after its group has ended
_GROUP_ENDING = 2.0  # seconds that the end of a group may take


@dataclass(frozen=True, slots=True)
class Invitation:
    """What an engine's workers need to join a group."""

    address: str  # where the group's store listens
    port: int
    world_size: int  # members: this process and the workers
    # The name of the group, and a prefix of its keys in the store.
    secret: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)


class GroupDelivery(Delivery):
    backend: ClassVar[str] = GLOO
    greets: ClassVar[bool] = True
    """Whether the engine's workers create NCCL's communicator when they join."""
    prefixes: ClassVar[tuple[str, ...]]
    """What the engine puts before the keys of its group, the outermost first; `{secret}` is replaced."""

    def __init__(self, server: HttpClient, address: str, *, flush_cache: bool = False) -> None:
        super().__init__(server, address, flush_cache=flush_cache)
        self._group: ProcessGroup | None = None
        self._request: EngineRequest | None = None

    @abstractmethod
    def _invite(self, invitation: Invitation) -> None:
        """Ask the engine's workers to join the group."""

    @abstractmethod
    def _update(self, tensors: Tensors, label: str | None) -> None:
        """Request a load of the tensors sent next, in order, and wait; `label` comes with the last bucket."""

    def close(self) -> None:
        group, self._group = self._group, None
        ending = group.abort() if group is not None else None
        if ending is not None:
            ending.join(_GROUP_ENDING)
        if self._request is not None:
            self._request.wait(_ENDING)
        with contextlib.suppress(SyncdError):
            self._leave()

    def _form_group(self, workers: int) -> None:
        """Form the group: the engine is asked to join while this process connects."""
        joining = Deadline(SystemClock(), min(JOINING, max(self._deadline.left(), 0.0)))
        seconds, device = seconds_left(self._deadline), device_for(self.backend)
        self._group = group = ProcessGroup.listen(self._address, seconds, device)
        invitation = Invitation(group.address, group.port, workers + 1)
        named = [prefix.format(secret=invitation.secret) for prefix in self.prefixes]
        self._request = EngineRequest(lambda: self._invite(invitation))
        connecting = EngineRequest(
            lambda: group.connect(named, workers + 1, joining, self.backend, greets=self.greets)
        )
        wait_for_all((self._request, connecting), joining)

    def _carry(self, tensors: Tensors, label: str | None) -> None:
        group = self._group
        if group is None:
            raise LoadFailedError("the engine is in no group")
        self.touched = True
        self._request = request = EngineRequest(lambda: self._update(tensors, label))
        try:
            self._send(group, tensors, request)
        except GroupError:
            # If the engine still answers, its own error says more.
            request.wait(_LAST_ERROR)
            request.is_healthy()
            raise
        wait_for_all((request,), self._deadline)

    def _send(self, group: ProcessGroup, tensors: Tensors, request: EngineRequest) -> None:
        placed = [tensor.to(group.device).contiguous() for tensor in tensors.values()]

        def begin() -> list[Any]:
            return [group.broadcast(tensor, self._deadline) for tensor in placed]

        if self.backend == GLOO:
            works = begin()
        else:  # the first one may create the communicator, and wait for a worker that is gone
            works = make_in_time(begin, self._deadline, request.is_healthy, discard=list.clear)
        with group.aborted_at(self._deadline):
            for work in works:
                group.finish(work, self._deadline, request.is_healthy)


def device_for(backend: str) -> torch.device:
    if backend == GLOO:
        return CPU
    if not torch.cuda.is_available():
        raise LoadFailedError("push=nccl needs a GPU of this process, which no worker has", hint="push=gloo")
    return torch.device("cuda", torch.cuda.current_device())
