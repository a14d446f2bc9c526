"""The explorer's end of a broadcast: weights are received beside the parameters, which get them once they count.

    receiver = BroadcastReceiver(sync, model.state_dict(keep_vars=True))
    came = receiver.wait(step, timeout=60)
    if isinstance(came, WeightTensors):
        receiver.load(came)
    elif came is not None:
        ...                             # a version: lease it, load its files, confirm it

The package has the protocol.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Self

import structlog
import torch

from syncd.client.broadcast_membership import BroadcastMembership
from syncd.client.client import Client
from syncd.client.wait import Deadline
from syncd.errors import RefusedError, SyncdError, TryAgainError
from syncd.parts.broadcast import process_group
from syncd.parts.broadcast.packing import receive_buckets
from syncd.parts.broadcast.process_group import CPU, FormedGroup, ProcessGroup
from syncd.protocol.backend import GLOO, NCCL
from syncd.protocol.broadcast_round import OPEN, Round
from syncd.protocol.buckets import BucketPlan, plan_buckets
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.version import Version
from syncd.transports.base import Announcement, ReceiveContext, WeightReceiver, WeightTensors
from syncd.transports.tensors import TensorMeta, compare, require_fit
from syncd.transports.torch_tensors import TO_TORCH, assign, release_free_memory, target_tensors

BACKEND = GLOO
"""What every explorer takes; one whose parameters are on a GPU also says that it could take NCCL."""


class BroadcastReceiver(BroadcastMembership, WeightReceiver):
    """Receives broadcasts. While it is open, the trainer counts on calls of `wait`.

    Args:
        parameters: What the model holds by name; several names may share memory. With
            `model.state_dict(keep_vars=True)` parameters in main memory take over what was received without a copy.
        check_fit: Raises RefusedError if the engine cannot load such tensors; None to compare with `parameters`.
        allocate: Returns so many bytes of main memory to receive into.
    """

    name = "nccl"

    def __init__(
        self,
        client: Client,
        parameters: Mapping[str, torch.Tensor],
        check_fit: Callable[[Mapping[str, TensorMeta]], None] | None = None,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        super().__init__(client)
        self._allocate = allocate or _main_memory
        self._parameters = dict(parameters)
        self._check_fit = check_fit or self._check_parameters
        self._log = structlog.get_logger()
        self._group: FormedGroup | None = None
        self._memory: torch.Tensor | None = None  # for the next weights
        self._in_use: torch.Tensor | None = None  # the parameters are views of it
        self._received: Round | None = None
        self._device = _device_of(self._parameters)
        self.join()

    @classmethod
    def open(cls, context: ReceiveContext) -> Self:
        """Return a receiver; a broadcast that has begun is received to its end, whatever `stop` returns."""
        return cls(context.client, context.parameters or {}, context.check_fit, context.allocate)

    def wait(self, current: int, timeout: float) -> WeightTensors | Version | None:
        """Wait for newer weights: tensors that were broadcast, a version to load from files, or None if none came.

        Args:
            current: The step that the engine runs; -1 for none.
            timeout: Seconds to wait; a broadcast that has begun by then may take its own time on top.
        """
        deadline = Deadline(SystemClock(), timeout)
        while True:
            came = self.wait_for_weights(current, max(deadline.left(), 0.0))
            if not isinstance(came, Round):
                return came
            received = self.receive(came, timeout)
            if received is not None or deadline.left() <= 0:
                return received

    def receive(self, announcement: Announcement, timeout: float) -> WeightTensors | None:
        """Take part in a broadcast, which has its own time-out; None for a version, or if it failed."""
        del timeout
        if not isinstance(announcement, Round) or announcement.state != OPEN:
            return None
        deadline = Deadline(SystemClock(), announcement.timeout)
        try:
            return self._receive(announcement, deadline)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step arrives through files
            self._give_up(announcement, error)
            return None

    def load(self, weights: WeightTensors) -> None:
        self.fill(weights)
        self.report_running(weights)

    def fill(self, weights: WeightTensors) -> None:
        if assign(self._parameters, weights.tensors):
            if self._in_use is None:
                release_free_memory()  # the parameters have left the memory that they began with
            # The next weights go into what the parameters used before.
            self._memory, self._in_use = self._in_use, self._memory

    def report_running(self, weights: WeightTensors) -> None:
        """Report in the presence that the engine runs what was received last."""
        assert self._received is not None
        assert self._received.attempt == weights.attempt
        self.set_ahead(self._received)

    def join(self) -> None:
        """Take part, from the start or after `leave`."""
        self.take_part(BACKEND, process_group.gpu_of(self._device))

    def leave(self) -> None:
        """Take no part until `join`: the trainer does not wait for this explorer. The group is kept."""
        self.take_part(None)

    def close(self) -> None:
        self._abort_group()
        self._memory = None
        with contextlib.suppress(SyncdError):
            self.leave()

    def _receive(self, opened: Round, deadline: Deadline) -> WeightTensors:
        group = self._joined(opened, deadline)
        tensors, checksum = self._receive_buckets(group, opened, deadline)
        self.acknowledge(group.offer, opened, checksum)
        if not self.wait_for_end(opened, max(deadline.left(), 0.0)):
            raise TryAgainError("the trainer aborted the broadcast, or does not answer")
        self._received = opened
        return WeightTensors(opened.pair, opened.attempt, tensors, opened.probe)

    def _joined(self, opened: Round, deadline: Deadline) -> FormedGroup:
        """Return the group of a round; this explorer joins it unless it is a member already."""
        group = self._group
        if group is None or group.offer.epoch != opened.epoch:
            self._abort_group()
            group = self._group = self._join(opened, deadline)
        _require_same_layout(group.plan, opened)
        return group

    def _join(self, opened: Round, deadline: Deadline) -> FormedGroup:
        offer = self.join_group(max(deadline.left(), 0.0), opened)
        if offer.epoch != opened.epoch:
            raise TryAgainError("the trainer offers another group now")
        plan = plan_buckets(offer.tensors, offer.bucket)
        _require_same_layout(plan, opened)
        self._require_loadable(plan)
        device = self._device if offer.backend == NCCL else CPU
        is_open = lambda: self.is_open(opened)  # noqa: E731
        joined = ProcessGroup.join(offer, self._client.identity or "", deadline, device, is_open)
        return FormedGroup(joined, offer, plan)

    def _require_loadable(self, plan: BucketPlan) -> None:
        if unknown := [slot.name for slot in plan.slots if slot.dtype not in TO_TORCH]:
            raise RefusedError(f"torch has no dtype for tensor {unknown[0]!r}")
        self._check_fit({slot.name: TensorMeta(slot.dtype, slot.shape) for slot in plan.slots})

    def _check_parameters(self, offered: Mapping[str, TensorMeta]) -> None:
        model = target_tensors(self._parameters)
        require_fit(compare(model.metas, model.aliases, offered, cast=True), "it does not fit the model")

    def _receive_buckets(
        self, joined: FormedGroup, opened: Round, deadline: Deadline
    ) -> tuple[Mapping[str, torch.Tensor], str]:
        """Receive all buckets; return views of the tensors, and the checksum of all bytes."""
        group, _, plan = joined
        memory = self._allocated(plan.total, group.device)
        buckets = (memory[start:end] for start, end in plan.buckets())
        checksum = receive_buckets(group, buckets, deadline, lambda: self.is_open(opened))
        views = {
            slot.name: memory[slot.start : slot.end].view(TO_TORCH[slot.dtype]).view(slot.shape)
            for slot in plan.slots
        }
        return views, checksum

    def _allocated(self, size: int, device: torch.device) -> torch.Tensor:
        memory = self._memory
        if memory is None or memory.numel() != size or memory.device != device:
            memory = self._memory = None  # the old memory is freed first
            is_main = device.type == "cpu"
            memory = self._allocate(size) if is_main else torch.empty(size, dtype=torch.uint8, device=device)
            self._memory = memory
        return memory

    def _give_up(self, failed: Round, error: BaseException) -> None:
        reason = str(error) if isinstance(error, SyncdError) else f"{type(error).__name__}: {error}"
        self._log.warning("broadcast_failed", step=failed.step, reason=reason)
        self._abort_group()
        self._memory = None  # a device may write to it until the group has ended
        with contextlib.suppress(SyncdError):
            self.refuse(failed, reason)

    def _abort_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.process_group.abort()


def _require_same_layout(plan: BucketPlan, opened: Round) -> None:
    if plan.digest != opened.digest:
        raise RefusedError("the round has other tensors than its group")


def _main_memory(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _device_of(parameters: Mapping[str, torch.Tensor]) -> torch.device:
    """Return the one device of all parameters; main memory if they are on several."""
    devices = {held.device for held in parameters.values()}
    return devices.pop() if len(devices) == 1 else CPU
