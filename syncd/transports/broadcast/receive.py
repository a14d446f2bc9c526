"""Weights in by a broadcast from the trainer: received beside the parameters, and theirs only once it counts.

    receiver = Receiver(sync, model.state_dict())
    came = receiver.turn(step, timeout=60)
    if isinstance(came, Received):
        receiver.load(came)
    elif came is not None:
        ...                             # a version: lease, load from files, confirm

docs/broadcast.md has the protocol.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog
import torch

from syncd.client.client import Client
from syncd.client.wait import Deadline
from syncd.errors import RefusedError, SyncdError, TryAgainError
from syncd.protocol.backend import GLOO, NCCL
from syncd.protocol.buckets import BucketPlan, plan_buckets
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.rendezvous import Offer
from syncd.protocol.round import OPEN, Round
from syncd.protocol.version import Version
from syncd.transports.broadcast import checksums, process_group
from syncd.transports.broadcast.membership import BroadcastMembership
from syncd.transports.broadcast.process_group import CPU, UNDER_WAY, ProcessGroup
from syncd.transports.dtypes import TO_TORCH
from syncd.transports.filesystem.read_targets import target_tensors
from syncd.transports.tensors import TensorMeta, compare, require_fit

BACKEND = GLOO
"""What every explorer takes; one whose parameters are on a GPU says beside it that it could take NCCL."""


@dataclass(frozen=True)
class Received:
    """A step that every member has received whole.

    Args:
        round: The round that has brought it.
        tensors: Views of the receiver's memory by name: they hold until its next turn.
    """

    round: Round
    tensors: Mapping[str, torch.Tensor] = field(repr=False)

    @property
    def step(self) -> int:
        """Return the trainer's step."""
        return self.round.step


class Receiver:
    """An explorer's side of broadcasts. While it is open, the trainer counts on its turns.

    Args:
        client: The explorer's connection to the job.
        parameters: What the model holds by name: `model.state_dict()`; several names may share memory.
    """

    def __init__(
        self,
        client: Client,
        parameters: Mapping[str, torch.Tensor],
    ) -> None:
        self._identity, self._parameters = client.identity or "", dict(parameters)
        self._membership = BroadcastMembership(client)
        self._clock = SystemClock()
        self._log = structlog.get_logger()
        self._member: ProcessGroup | None = None
        self._offer: Offer | None = None
        self._plan: BucketPlan | None = None
        self._memory: torch.Tensor | None = None
        self._device = _device_of(self._parameters)
        self.join()

    def turn(self, current: int, timeout: float) -> Received | Version | None:
        """Wait for newer weights, whichever way they come.

        Args:
            current: The step that the model has; -1 for none.
            timeout: Seconds to wait; a broadcast that has begun by then may take its own time on top.

        Returns:
            What was received; a version to load from files; None: there is nothing newer, or nothing came.

        Raises:
            SyncdError: The job cannot be read.
        """
        deadline = Deadline(self._clock, timeout)
        while True:
            came = self._membership.wait_for_weights(current, max(deadline.left(), 0.0))
            if not isinstance(came, Round):
                return came
            received = self._receive(came) if came.state == OPEN else None
            if received is not None or deadline.left() <= 0:
                return received

    def wanted(self) -> bool:
        """Say whether the trainer waits for this explorer's turn."""
        return self._membership.is_wanted()

    def load(self, received: Received) -> None:
        """Copy what was received into the parameters, and say in the presence that this is what runs."""
        with torch.no_grad():
            for name, tensor in received.tensors.items():
                self._parameters[name].copy_(tensor)
        self.tell(received)

    def tell(self, received: Received) -> None:
        """Say in the presence that what was received is what runs."""
        self._membership.set_ahead(received.round)

    def sender_is_here(self) -> bool:
        """Return whether the trainer that sent what runs lives, and has sent nothing since."""
        return self._membership.sender_is_here()

    def confirm_published(self) -> bool:
        """Confirm what a broadcast has brought once it is published; say whether nothing is left to confirm."""
        return self._membership.confirm_published()

    def is_void(self) -> bool:
        """Say whether what a broadcast has brought will not be published, so that files are to be loaded."""
        return self._membership.ahead_is_void()

    def join(self) -> None:
        """Take part, from the beginning on or after `leave`."""
        self._membership.take_part(BACKEND, process_group.gpu_of(self._device))

    def leave(self) -> None:
        """Take part no more, until `join`; the trainer waits for this explorer no longer. The group is kept."""
        self._membership.take_part(None)

    def close(self) -> None:
        """Take part no more, and leave the group."""
        self._drop()
        self._memory = None
        with contextlib.suppress(SyncdError):
            self.leave()

    def check_fit(self, plan: BucketPlan) -> None:
        """Compare what is offered with the model.

        Raises:
            RefusedError: It does not fit.
        """
        model = target_tensors(self._parameters)
        offered = {place.name: TensorMeta(place.dtype, place.shape) for place in plan.slots}
        require_fit(compare(model.metas, model.aliases, offered, cast=True), "it does not fit the model")

    def _receive(self, told: Round) -> Received | None:
        deadline = Deadline(self._clock, told.timeout)
        try:
            member = self._joined(told, deadline)
            tensors, checksum = self._pour(member, told, deadline)
            assert self._offer is not None
            self._membership.acknowledge(self._offer, told, checksum)
            if not self._membership.wait_for_end(told, max(deadline.left(), 0.0)):
                raise TryAgainError("the trainer has given the broadcast up, or says nothing")  # noqa: TRY301
            return Received(told, tensors)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step comes through files
            self._give_up(told, error)
        return None

    def _joined(self, told: Round, deadline: Deadline) -> ProcessGroup:
        """Return this explorer's place in the group of a round."""
        if self._member is None or self._offer is None or self._offer.epoch != told.epoch:
            self._drop()
            offer = self._membership.join_group(max(deadline.left(), 0.0))
            if offer.epoch != told.epoch:
                raise TryAgainError("the trainer offers another group by now")
            self._offer, self._plan = offer, self._fitting(offer, told)
            device = self._device if offer.backend == NCCL else CPU
            self._member = ProcessGroup.join(
                offer, self._identity, deadline, device, lambda: self._membership.is_open(told)
            )
        if self._plan is None or self._plan.digest != told.digest:
            raise RefusedError("the round has other tensors than its group")
        return self._member

    def _fitting(self, offer: Offer, told: Round) -> BucketPlan:
        """Return the layout of what is offered, once it fits the model.

        Raises:
            RefusedError: It does not.
        """
        plan = plan_buckets(offer.tensors, offer.bucket)
        if plan.digest != told.digest:
            raise RefusedError("the round has other tensors than its group")
        if unknown := [place.name for place in plan.slots if place.dtype not in TO_TORCH]:
            raise RefusedError(f"torch has no dtype for tensor {unknown[0]!r}")
        self.check_fit(plan)
        return plan

    def _pour(
        self, member: ProcessGroup, told: Round, deadline: Deadline
    ) -> tuple[Mapping[str, torch.Tensor], str]:
        """Receive all buckets; return views of the tensors and the checksum of all bytes."""
        assert self._plan is not None
        plan, memory = self._plan, self._room(self._plan.total, member.device)
        goes_on = lambda: self._membership.is_open(told)  # noqa: E731
        checksum, under_way = checksums.make_checksum(member.device), []
        with member.aborted_at(deadline):
            for start, end in plan.buckets():
                under_way.append((memory[start:end], member.broadcast(memory[start:end], deadline)))
                if len(under_way) == UNDER_WAY:
                    bucket, work = under_way.pop(0)
                    member.finish(work, deadline, goes_on)
                    checksum.add(bucket)
            for bucket, work in under_way:
                member.finish(work, deadline, goes_on)
                checksum.add(bucket)
            found = checksum.text()
        views = {
            place.name: memory[place.start : place.end].view(TO_TORCH[place.dtype]).view(place.shape)
            for place in plan.slots
        }
        return views, found

    def _room(self, size: int, device: torch.device) -> torch.Tensor:
        held = self._memory
        if held is None or held.numel() != size or held.device != device:
            held = self._memory = None
            held = self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        return held

    def _give_up(self, told: Round, error: BaseException) -> None:
        reason = str(error) if isinstance(error, SyncdError) else f"{type(error).__name__}: {error}"
        self._log.warning("broadcast_failed", step=told.step, reason=reason)
        self._drop()
        self._memory = None  # a device may write into it until the group has ended
        with contextlib.suppress(SyncdError):
            self._membership.refuse(told, reason)

    def _drop(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            member.abort()


def _device_of(parameters: Mapping[str, torch.Tensor]) -> torch.device:
    """Return the one device of all parameters; main memory where they are on several."""
    devices = {held.device for held in parameters.values()}
    return devices.pop() if len(devices) == 1 else CPU
