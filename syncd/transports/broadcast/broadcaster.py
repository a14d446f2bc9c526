"""Broadcasts of steps from the trainer to the explorers that take part. docs/broadcast.md has the protocol.

All ranks make the same calls; rank 0 alone sends.
"""

import secrets
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import structlog
import torch

from syncd.client.client import Client
from syncd.client.peers import is_here
from syncd.client.wait import Deadline
from syncd.errors import ConfigError, CorruptDataError, SyncdError, TryAgainError
from syncd.protocol.backend import GLOO, NCCL, BackendChoice, choose_backend, gpu_in
from syncd.protocol.buckets import BucketPlan, plan_buckets
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.presence import Presence, RunningStatus
from syncd.protocol.probe import Probe
from syncd.protocol.rendezvous import Offer
from syncd.protocol.round import Round
from syncd.transports.base import Export
from syncd.transports.broadcast import packing, process_group
from syncd.transports.broadcast.control import BroadcastControl
from syncd.transports.broadcast.packing import Packer
from syncd.transports.broadcast.process_group import CPU, ProcessGroup
from syncd.transports.filesystem.export_walk import ExportWalk
from syncd.transports.ranks import Ranks

BACKEND = GLOO
"""What every member takes; members that can take NCCL say so beside it."""

LOOPBACK = "127.0.0.1"
MOST_SKIPPED = 63
_REMEMBERED = 64

Members = frozenset[tuple[str, str]]
"""Explorers by name and incarnation: an explorer that has restarted is another one."""


@dataclass(frozen=True, slots=True)
class BroadcastOptions:
    """How to broadcast.

    Args:
        address: Where the group's store listens; empty: on loopback, for explorers on this host.
        bucket: Bytes that are sent at once.
        ready_timeout: Seconds that the trainer waits for all explorers to be ready.
        timeout: Seconds that everything after that may take.
    """

    address: str = ""
    bucket: int = 256 << 20
    ready_timeout: float = 60.0
    timeout: float = 60.0


@dataclass(frozen=True)
class _OfferedGroup:
    """A group that is formed, or being formed."""

    process_group: ProcessGroup
    offer: Offer
    plan: BucketPlan
    members: Members


class Broadcaster:
    """Broadcasts steps to explorers. A failure never raises: the explorers load the step from files.

    Args:
        ranks: The trainer's ranks.
        client: The trainer's client; None on the other ranks.
        options: How to broadcast.
        dtype: What floating-point tensors are cast to; None keeps each as it is.
        tied: Names of tensors to leave out.
        check_finite: Whether to refuse NaN and infinity.
    """

    def __init__(
        self,
        ranks: Ranks,
        client: Client | None,
        options: BroadcastOptions,
        *,
        dtype: torch.dtype | None = torch.bfloat16,
        tied: Collection[str] = (),
        check_finite: bool = True,
    ) -> None:
        self._ranks, self._client, self._options = ranks, client, options
        self._control = BroadcastControl(client) if client is not None else None
        self._dtype, self._tied = dtype, tied
        self._clock, self._log = SystemClock(), structlog.get_logger()
        self._packer = Packer(check_finite=check_finite)
        self._plan: BucketPlan | None = None
        self._device = CPU
        self._group: _OfferedGroup | None = None
        self._without_nccl: deque[Members] = deque(maxlen=_REMEMBERED)
        self._failures = self._skip = 0
        self._late: set[str] = set()
        self._round: Round | None = None
        if self._control is not None:
            self._control.drop_group()  # what an earlier start left behind
            self._control.take_part(BACKEND)

    def send(self, step: int, attempt: str, export: Export, probe: Probe | None = None) -> bool:
        """Broadcast a step and return whether all explorers that take part have received it.

        Args:
            step: The trainer's step.
            attempt: The save that writes the same weights to files.
            export: The weights; they can be walked twice.
            probe: What the model answers with these weights; explorers get it with them.
        """
        try:
            plan = self._planned(export)
        except CorruptDataError as error:  # on all ranks
            self._log.warning("broadcast_skipped", step=step, reason=str(error))
            return False
        deadline = self._open(step, attempt, plan, probe)
        if not self._ranks.broadcast(deadline is not None):
            return False
        walk = ExportWalk(export, 0, 1, self._dtype, self._tied)
        is_done = deadline is not None and self._carry(step, walk, deadline)
        walk.finish()
        is_done = self._ranks.broadcast(is_done)
        if not is_done:
            self._plan = None  # tensors may have changed; all ranks plan at once: a walk may be a collective
        return is_done

    @property
    def size(self) -> int:
        """Return the bytes of the weights, 0 before the first broadcast."""
        return sum(place.end - place.start for place in self._plan.slots) if self._plan else 0

    def has_members(self) -> bool:
        """Return whether an explorer takes part. Rank 0 is asked."""
        return self._control is not None and bool(self._control.members(BACKEND))

    def withdraw(self, attempt: str) -> None:
        """Tell explorers that received a step that its files have failed. Rank 0 does."""
        sent, self._round = self._round, None
        if self._control is not None and sent is not None and sent.attempt == attempt:
            self._control.end_round(sent, None)

    def close(self) -> None:
        """End the group."""
        self._abort_group()
        if self._control is not None:
            self._control.drop_group()

    def _planned(self, export: Export) -> BucketPlan:
        """Return the layout of the weights; the first call walks over shapes and dtypes."""
        if self._plan is None:
            walk = ExportWalk(export, 0, 1, self._dtype, self._tied)
            walk.plan()
            metas = [(spec.name, spec.dtype, spec.shape) for spec in walk.specs]
            self._plan, self._device = plan_buckets(metas, self._options.bucket), walk.device
        return self._plan

    def _open(self, step: int, attempt: str, plan: BucketPlan, probe: Probe | None) -> Deadline | None:
        """Open a round, with its group formed, and return its deadline; None if there is none, or on other ranks."""
        self._round = None
        if self._control is None:
            return None
        if self._skip:
            self._skip -= 1
            return None
        try:
            return self._open_round(self._control, step, attempt, plan, probe)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step reaches explorers through files
            self._fail(step, error)
            return None

    def _open_round(
        self, control: BroadcastControl, step: int, attempt: str, plan: BucketPlan, probe: Probe | None
    ) -> Deadline | None:
        assert self._client is not None
        members = self._expected(control)
        if not members:
            self._abort_group()
            return None
        address, wait = self._address(members), self._options.ready_timeout
        asks = control.agree(step, wait, members=set(members))
        if not asks:
            self._late = {name for name, one in control.members(BACKEND).items() if not _asks(one)}
            self._log.info("broadcast_postponed", step=step, late=sorted(self._late))
            return None
        deadline = Deadline(self._clock, self._options.timeout)
        agreed = {name: members[name] for name in asks}
        chosen = self._chosen(agreed)
        group = self._kept_group(asks, plan, chosen.backend)
        is_new = group is None
        if group is None:
            group = self._offer_group(control, agreed, plan, address, chosen)
        version = self._client.latest_version()
        generation, timeout = version.generation if version else 0, self._options.timeout
        epoch = group.offer.epoch
        self._round = Round(step, attempt, generation, epoch, plan.digest, timeout, asks, probe=probe)
        control.open_round(self._round)
        if is_new:
            control.wait_joined(max(deadline.left(), 0.0))
            offer = group.offer
            group.process_group.connect([offer.secret], offer.world_size, deadline, offer.backend)
        return deadline

    def _expected(self, control: BroadcastControl) -> dict[str, Presence]:
        """Return the explorers to wait for: without those that were late, until they ask."""
        living = control.members(BACKEND)
        self._late = {name for name in self._late if name in living and not _asks(living[name])}
        return {name: one for name, one in living.items() if name not in self._late}

    def _address(self, members: Mapping[str, Presence]) -> str:
        if self._options.address:
            return self._options.address
        if all(is_here(member) for member in members.values()):
            return LOOPBACK
        raise ConfigError(
            "explorers on other hosts cannot take part",
            hint="set sync.address to an address of the trainer that they reach",
        )

    def _chosen(self, members: Mapping[str, Presence]) -> BackendChoice:
        """Return the backend that carries a broadcast to these members."""
        gpus = {name: gpu_in(one.info) for name, one in members.items()}
        has_failed = _members(members) in self._without_nccl
        return choose_backend(process_group.gpu_of(self._device), gpus, has_failed=has_failed)

    def _kept_group(self, asks: Mapping[str, int], plan: BucketPlan, backend: str) -> _OfferedGroup | None:
        """Return the group of the last broadcast if it serves for this one."""
        group = self._group
        wanted = set(asks), plan.digest, backend
        if group is None or (set(group.offer.members), group.plan.digest, group.offer.backend) != wanted:
            return None
        return group

    def _offer_group(
        self,
        control: BroadcastControl,
        members: Mapping[str, Presence],
        plan: BucketPlan,
        address: str,
        chosen: BackendChoice,
    ) -> _OfferedGroup:
        self._abort_group()
        self._log.info(
            "broadcast_group_formed", backend=chosen.backend, reason=chosen.reason, members=len(members)
        )
        device = self._device if chosen.backend == NCCL else CPU
        listening = ProcessGroup.listen(address, self._options.timeout, device)
        offer = control.offer_group(
            address,
            listening.port,
            [(place.name, place.dtype, place.shape) for place in plan.slots],
            backend=chosen.backend,
            members=set(members),
            bucket=plan.bucket,
            secret=secrets.token_hex(16),
        )
        self._group = _OfferedGroup(listening, offer, plan, _members(members))
        if set(offer.members) != set(members):
            raise TryAgainError("an explorer is gone")
        return self._group

    def _carry(self, step: int, walk: ExportWalk, deadline: Deadline) -> bool:
        """Send the weights and confirm that all members have received them; return whether that worked."""
        control, group, sent = self._control, self._group, self._round
        assert control is not None
        assert group is not None
        assert sent is not None
        try:
            checksum = self._send_buckets(group, walk, deadline)
            control.wait_received(sent, group.offer, checksum, max(deadline.left(), 0.0))
            control.end_round(sent, checksum)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step reaches explorers through files
            self._fail(step, error)
            return False
        self._failures = 0
        return True

    def _send_buckets(self, offered: _OfferedGroup, walk: ExportWalk, deadline: Deadline) -> str:
        """Send all buckets, each packed while the one before it is under way; return their checksum."""
        group, pending = offered.process_group, None
        checksum = packing.make_checksum(group.device)
        with group.aborted_at(deadline):
            for bucket in self._packer.buckets(offered.plan, walk, group.device):
                work = group.broadcast(bucket, deadline)
                checksum.add(bucket)
                if pending is not None:
                    group.finish(pending, deadline)
                pending = work
            group.finish(pending, deadline)
            return checksum.text()

    def _fail(self, step: int, error: BaseException) -> None:
        """Abort the group, tell its members, and skip the next broadcasts."""
        assert self._control is not None
        self._failures += 1
        self._skip = min(2 ** (self._failures - 1) - 1, MOST_SKIPPED)
        reason = str(error) if isinstance(error, SyncdError) else f"{type(error).__name__}: {error}"
        self._log.warning("broadcast_failed", step=step, reason=reason, skipped_next=self._skip)
        if self._group is not None and self._group.offer.backend == NCCL:
            self._without_nccl.append(self._group.members)
        self._abort_group()
        self._packer.drop()
        failed, self._round = self._round, None
        try:
            if failed is not None:
                self._control.end_round(failed, None)
            self._control.drop_group()
        except SyncdError as worse:
            self._log.warning("broadcast_end_failed", step=step, reason=str(worse))

    def _abort_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.process_group.abort()


def _asks(explorer: Presence) -> bool:
    return explorer.status is RunningStatus.REQUIRE_SYNC


def _members(members: Mapping[str, Presence]) -> Members:
    return frozenset((name, one.incarnation) for name, one in members.items())
