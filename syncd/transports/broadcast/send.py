"""Weights out by a broadcast to the explorers that take part; the step goes out through files all the same.

    broadcaster = Broadcaster(ranks, client, options, dtype=torch.bfloat16)
    broadcaster.send(step, attempt, engine.export)      # True: every member has it; never raises for a member's sake
    saver.save(step, attempt, engine.export, ...)       # the same attempt

All ranks make the same calls; rank 0 alone sends. docs/broadcast.md has the protocol.
"""

import secrets
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

import structlog
import torch

from syncd.client.client import Client
from syncd.client.peers import is_here
from syncd.client.wait import Deadline
from syncd.errors import ConfigError, CorruptDataError, SyncdError, TryAgainError, UsageError
from syncd.protocol.backend import GLOO, NCCL, BackendChoice, choose_backend, gpu_in
from syncd.protocol.buckets import BucketPlan, plan_buckets
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.presence import Presence, RunningStatus
from syncd.protocol.rendezvous import Offer
from syncd.protocol.round import Round
from syncd.transports.base import Export, SendContext, Sent, WeightSender
from syncd.transports.broadcast import checksums, process_group
from syncd.transports.broadcast.control import BroadcastControl
from syncd.transports.broadcast.packing import Packer
from syncd.transports.broadcast.process_group import CPU, ProcessGroup
from syncd.transports.filesystem.export_walk import AnyExport, ExportWalk
from syncd.transports.filesystem.send import DTYPES
from syncd.transports.ranks import Ranks

BACKEND = GLOO
"""What every member takes; those that can take NCCL say so beside it."""

LOOPBACK = "127.0.0.1"
MOST_SKIPPED = 63
_REMEMBERED = 64

Members = frozenset[tuple[str, str]]
"""Explorers by name and start: one that has started anew is another one."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to broadcast.

    Args:
        address: Where the group's store listens; empty: on loopback, for members on this host.
        bucket: Bytes that are sent at once.
        ready_timeout: Seconds that the trainer waits for all members to be ready.
        timeout: Seconds that everything after that may take.
    """

    address: str = ""
    bucket: int = 256 << 20
    ready_timeout: float = 60.0
    timeout: float = 60.0


@dataclass(frozen=True)
class _Group:
    """A group that is formed, or being formed."""

    process_group: ProcessGroup
    offer: Offer
    plan: BucketPlan
    members: Members


class Broadcaster:
    """Sends steps to explorers.

    Args:
        ranks: The trainer's ranks.
        client: The trainer's connection to the job; None on the other ranks.
        options: How.
        dtype: What floating-point tensors are cast to; None keeps each as it is.
        tied: Names of tensors to leave out.
        check_finite: Whether NaN and infinity are refused.
    """

    def __init__(
        self,
        ranks: Ranks,
        client: Client | None,
        options: Options,
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
        self._group: _Group | None = None
        self._without_nccl: deque[Members] = deque(maxlen=_REMEMBERED)
        self._failures = self._skip = 0
        self._late: set[str] = set()
        self._sent: Round | None = None
        if self._control is not None:
            self._control.drop_group()  # what an earlier start left
            self._control.take_part(BACKEND)

    def send(self, step: int, attempt: str, export: AnyExport) -> bool:
        """Send a step to the explorers that take part, and say whether all of them have it.

        Args:
            step: The trainer's step.
            attempt: The save that writes the same weights to files.
            export: What the engine exports; it can be walked twice.
        """
        try:
            plan = self._planned(export)
        except CorruptDataError as error:  # on all ranks
            self._log.warning("broadcast_skipped", step=step, reason=str(error))
            return False
        opened = self._open(step, attempt, plan) if self._control is not None else None
        if not self._ranks.broadcast(opened is not None):
            return False
        walk = ExportWalk(export, 0, 1, self._dtype, self._tied)
        sent = False
        if opened is not None:
            sent = self._carry_out(opened, walk)
        walk.finish()
        if not self._ranks.broadcast(sent):
            self._plan = None  # tensors may have changed; all ranks plan at once, for it may be a collective
            return False
        return True

    @property
    def size(self) -> int:
        """Return the bytes of one broadcast, 0 before the first."""
        return self._plan.total if self._plan else 0

    def withdraw(self, attempt: str) -> None:
        """Tell members that hold a step already that the files of that attempt have failed; rank 0 does."""
        sent, self._sent = self._sent, None
        if self._control is not None and sent is not None and sent.attempt == attempt:
            self._control.end_round(sent, None)

    def close(self) -> None:
        """End the group."""
        self._drop()
        if self._control is not None:
            self._control.drop_group()

    def _planned(self, export: AnyExport) -> BucketPlan:
        """Return the layout of the weights, made once by a walk that looks at none of them."""
        if self._plan is None:
            walk = ExportWalk(export, 0, 1, self._dtype, self._tied)
            walk.plan()
            metas = [(spec.name, spec.dtype, spec.shape) for spec in walk.specs]
            self._plan, self._device = plan_buckets(metas, self._options.bucket), walk.device
        return self._plan

    def _open(self, step: int, attempt: str, plan: BucketPlan) -> tuple[Round, Deadline] | None:
        """Agree with the members on a round and form their group; None where there will be none."""
        assert self._control is not None
        if self._skip:
            self._skip -= 1
            return None
        opened: list[Round] = []
        try:
            return self._begin(self._control, step, attempt, plan, opened)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step goes out through files
            self._fail(step, opened[0] if opened else None, error)
            return None

    def _begin(
        self, control: BroadcastControl, step: int, attempt: str, plan: BucketPlan, opened: list[Round]
    ) -> tuple[Round, Deadline] | None:
        members = self._expected(control)
        if not members:
            self._drop()
            return None
        address, wait = self._address(members), self._options.ready_timeout
        asks = control.agree(step, wait, members=set(members))
        if not asks:
            self._late = {name for name, one in self._living(control).items() if not _asks(one)}
            self._log.info("broadcast_postponed", step=step, late=sorted(self._late))
            return None
        deadline = Deadline(self._clock, self._options.timeout)
        agreed = {name: members[name] for name in asks}
        chosen = self._chosen(agreed)
        kept = self._keeps(asks, plan, chosen.backend)
        if not kept:
            self._offer(control, agreed, plan, address, chosen)
        assert self._group is not None
        assert self._client is not None
        version, epoch = self._client.latest_version(), self._group.offer.epoch
        generation = version.generation if version else 0
        opened.append(Round(step, attempt, generation, epoch, plan.digest, self._options.timeout, asks))
        control.open_round(opened[0])
        if not kept:
            self._form(control, self._group, deadline)
        return opened[0], deadline

    def _living(self, control: BroadcastControl) -> dict[str, Presence]:
        return control.members(BACKEND)

    def _expected(self, control: BroadcastControl) -> dict[str, Presence]:
        """Return the explorers that are waited for: not those that were late, until they ask."""
        living = self._living(control)
        self._late = {name for name in self._late if name in living and not _asks(living[name])}
        return {name: one for name, one in living.items() if name not in self._late}

    def _chosen(self, members: Mapping[str, Presence]) -> BackendChoice:
        """Return what carries a broadcast to members."""
        gpus = {name: gpu_in(one.info) for name, one in members.items()}
        has_failed = _members(members) in self._without_nccl
        return choose_backend(process_group.gpu_of(self._device), gpus, has_failed=has_failed)

    def _keeps(self, asks: Mapping[str, int], plan: BucketPlan, backend: str) -> bool:
        group = self._group
        return (
            group is not None
            and set(group.offer.members) == set(asks)
            and group.plan.digest == plan.digest
            and group.offer.backend == backend
        )

    def _offer(
        self,
        control: BroadcastControl,
        members: Mapping[str, Presence],
        plan: BucketPlan,
        address: str,
        chosen: BackendChoice,
    ) -> None:
        self._drop()
        self._log.info(
            "broadcast_group_formed", backend=chosen.backend, reason=chosen.reason, members=len(members)
        )
        device = self._device if chosen.backend == NCCL else CPU
        root, secret = ProcessGroup.listen(address, self._options.timeout, device), secrets.token_hex(16)
        metas = [(place.name, place.dtype, place.shape) for place in plan.slots]
        offer = control.offer_group(
            address,
            root.port,
            metas,
            backend=chosen.backend,
            members=set(members),
            bucket=plan.bucket,
            secret=secret,
        )
        self._group = _Group(root, offer, plan, _members(members))
        if set(offer.members) != set(members):
            raise TryAgainError("an explorer has gone")

    def _form(self, control: BroadcastControl, group: _Group, deadline: Deadline) -> None:
        control.wait_joined(max(deadline.left(), 0.0))
        offer = group.offer
        group.process_group.connect([offer.secret], offer.world_size, deadline, offer.backend)

    def _address(self, members: Mapping[str, Presence]) -> str:
        if self._options.address:
            return self._options.address
        if all(is_here(member) for member in members.values()):
            return LOOPBACK
        raise ConfigError(
            "explorers on other hosts cannot take part", hint="sync.address is the trainer's for them"
        )

    def _carry_out(self, opened: tuple[Round, Deadline], walk: ExportWalk) -> bool:
        told, deadline = opened
        control, group = self._control, self._group
        assert control is not None
        assert group is not None
        try:
            checksum = self._pour(group, walk, deadline)
            control.wait_received(told, group.offer, checksum, max(deadline.left(), 0.0))
            control.end_round(told, checksum)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step goes out through files
            self._fail(told.step, told, error)
            return False
        self._failures, self._sent = 0, told
        return True

    def _pour(self, group: _Group, walk: ExportWalk, deadline: Deadline) -> str:
        """Send all buckets, each packed while the one before it is under way; return their checksum."""
        root, pending = group.process_group, None
        checksum = checksums.make_checksum(root.device)
        with root.aborted_at(deadline):
            for bucket in self._packer.buckets(group.plan, walk, root.device):
                work = root.broadcast(bucket, deadline)
                checksum.add(bucket)
                if pending is not None:
                    root.finish(pending, deadline)
                pending = work
            root.finish(pending, deadline)
            return checksum.text()

    def _fail(self, step: int, told: Round | None, error: BaseException) -> None:
        """Give the group up, tell the members, and leave the fast path alone for a while."""
        assert self._control is not None
        self._failures += 1
        self._skip = min(2 ** (self._failures - 1) - 1, MOST_SKIPPED)
        reason = str(error) if isinstance(error, SyncdError) else f"{type(error).__name__}: {error}"
        self._log.warning("broadcast_failed", step=step, reason=reason, skipped_next=self._skip)
        if self._group is not None and self._group.offer.backend == NCCL:
            self._without_nccl.append(self._group.members)
        self._drop()
        self._packer.drop()
        try:
            if told is not None:
                self._control.end_round(told, None)
            self._control.drop_group()
        except SyncdError as worse:
            self._log.warning("broadcast_end_failed", step=step, reason=str(worse))

    def _drop(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.process_group.abort()


class BroadcastSender(WeightSender):
    """Broadcasts each step to the explorers that take part, then sends it through files too.

    Args:
        files: Writes the steps.
        broadcaster: Sends to explorers.
        sync: The trainer's connection to the job; None on all ranks but the first.
    """

    name = "nccl"

    def __init__(self, files: WeightSender, broadcaster: Broadcaster, sync: Client | None) -> None:
        self._files, self._broadcaster, self._sync = files, broadcaster, sync
        self._attempt = ""
        self._sent: Sent | None = None

    @classmethod
    def open(cls, context: SendContext) -> Self:
        """Return a sender; its group is formed by the first send."""
        settings, sync = context.settings, context.client
        if context.files is None:
            raise UsageError("transport nccl needs the sender of transport checkpoint")
        assert sync is None or isinstance(sync, Client)
        options = Options(
            settings.address, settings.bucket_mib << 20, settings.ready_timeout, settings.broadcast_timeout
        )
        broadcaster = Broadcaster(
            context.ranks,
            sync,
            options,
            dtype=DTYPES[settings.dtype],
            tied=context.tied,
            check_finite=settings.check_finite,
        )
        return cls(context.files, broadcaster, sync)

    def prepare(self, export: Export) -> None:
        """Prepare the sender through files."""
        self._files.prepare(export)

    def send(self, step: int, attempt: str, export: Export, files: Mapping[str, bytes]) -> None:
        """Broadcast a step, then begin to write it. If the broadcast fails, the step goes out through files alone."""
        self._attempt, start = attempt, time.perf_counter()
        is_done = self._broadcaster.send(step, attempt, export)
        seconds, size = time.perf_counter() - start, self._broadcaster.size
        self._sent = Sent(self.name, step, size, seconds, is_done, is_received=True)
        try:
            self._files.send(step, attempt, export, files)
        except SyncdError:
            self._broadcaster.withdraw(attempt)
            raise

    def wait(self) -> None:
        """Return once the step is whole and announced; if it fails, tell explorers that have its weights."""
        try:
            self._files.wait()
        except SyncdError:
            self._broadcaster.withdraw(self._attempt)
            raise

    @property
    def sent(self) -> Sent | None:
        """Return the result of the last broadcast."""
        return self._sent

    @property
    def has_failed(self) -> bool:
        """Return whether this rank's part of the save in flight has failed."""
        return self._files.has_failed

    def unavailable(self) -> str:
        """Return why nobody would receive a broadcast."""
        is_expected = self._sync is not None and BroadcastControl(self._sync).members(BACKEND)
        return "" if is_expected else "no explorer takes part"

    def close(self) -> None:
        """End the group, and finish the save in flight."""
        try:
            self._broadcaster.close()
        finally:
            self._files.close()


def _asks(explorer: Presence) -> bool:
    return explorer.status is RunningStatus.REQUIRE_SYNC


def _members(members: Mapping[str, Presence]) -> Members:
    return frozenset((name, one.incarnation) for name, one in members.items())
