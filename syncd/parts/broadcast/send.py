"""The trainer's end of a broadcast: it broadcasts each step, and saves it to files, whether or not that worked.

All ranks make the same calls; rank 0 alone sends. The package has the protocol.
"""

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Self

import structlog

from syncd.client.broadcast_control import BroadcastControl
from syncd.client.peers import is_here
from syncd.client.wait import Deadline
from syncd.errors import ConfigError, CorruptDataError, SyncdError, TryAgainError, UsageError
from syncd.parts.broadcast import process_group
from syncd.parts.broadcast.packing import Packer, send_buckets
from syncd.parts.broadcast.process_group import CPU, FormedGroup, ProcessGroup
from syncd.protocol.backend import GLOO, NCCL, BackendChoice, choose_backend, gpu_in
from syncd.protocol.broadcast_round import Round
from syncd.protocol.buckets import BucketPlan, plan_buckets
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.presence import Presence, RunningStatus
from syncd.protocol.probe import Probe
from syncd.transports.base import Export, SendContext, Sent, StepContent, WeightSender
from syncd.transports.files.export_walk import ExportWalk
from syncd.transports.files.send import DTYPES

BACKEND = GLOO  # what every member takes; members that can take NCCL say so beside it

LOOPBACK = "127.0.0.1"
MOST_SKIPPED = 63
_REMEMBERED = 64

Members = frozenset[tuple[str, str]]
"""Explorers by name and incarnation: an explorer that has restarted is another one."""


class _Begun(NamedTuple):
    control: BroadcastControl
    group: FormedGroup
    round: Round
    deadline: Deadline


class BroadcastSender(WeightSender):
    """Broadcasts each step to the explorers that take part, and saves it to files, whether or not that worked.

    A broadcast that fails never raises: the explorers load the step from files.
    """

    name = "nccl"

    def __init__(self, context: SendContext, files: WeightSender) -> None:
        self._files, self._ranks, self._client = files, context.ranks, context.client
        self._settings, self._bucket = context.settings, context.settings.bucket_mib << 20
        self._dtype, self._tied = DTYPES[context.settings.dtype], context.tied
        self._control = BroadcastControl(context.client) if context.client is not None else None
        self._clock, self._log = SystemClock(), structlog.get_logger()
        self._packer = Packer(check_finite=context.settings.check_finite)
        self._plan: BucketPlan | None = None
        self._device = CPU
        self._group: FormedGroup | None = None
        self._group_members: Members = frozenset()
        self._without_nccl: deque[Members] = deque(maxlen=_REMEMBERED)
        self._failures = self._skip = 0
        self._late: dict[str, int] = {}  # by explorer, for how many syncs it is not waited for
        self._times_late: dict[str, int] = {}  # in a row
        self._round: Round | None = None
        self._attempt = ""
        self._sent: Sent | None = None
        if self._control is not None:
            context.memory.record("the buckets of the broadcast", 2 * self._bucket)
            self._control.drop_group()  # what an earlier start left behind
            self._control.take_part(BACKEND)

    @classmethod
    def open(cls, context: SendContext) -> Self:
        if context.files is None:
            raise UsageError("transport nccl needs the sender of transport checkpoint")
        return cls(context, context.files)

    def prepare(self, export: Export) -> None:
        self._files.prepare(export)

    def send(self, step: int, attempt: str, content: StepContent) -> None:
        self._attempt, start = attempt, time.perf_counter()
        is_done = self.broadcast(step, attempt, content.export, content.probe)
        seconds = time.perf_counter() - start
        size = sum(slot.end - slot.start for slot in self._plan.slots) if self._plan else 0
        self._sent = Sent(self.name, step, size, seconds, is_done, is_received=True)
        with self._withdrawn_on_error():
            self._files.send(step, attempt, content)

    def wait(self) -> None:
        """Wait for the files; if they fail, explorers that run the step already are told."""
        with self._withdrawn_on_error():
            self._files.wait()

    @property
    def sent(self) -> Sent | None:
        return self._sent

    @property
    def has_failed(self) -> bool:
        return self._files.has_failed

    def unavailable(self) -> str:
        has_members = self._control is not None and self._control.members(BACKEND)
        return "" if has_members else "no explorer takes part"

    def close(self) -> None:
        try:
            self._abort_group()
            if self._control is not None:
                self._control.drop_group()
        finally:
            self._files.close()

    @contextlib.contextmanager
    def _withdrawn_on_error(self) -> Iterator[None]:
        """If the files fail, tell explorers that received the step."""
        try:
            yield
        except SyncdError:
            self._sent, sent, self._round = None, self._round, None
            if self._control is not None and sent is not None and sent.attempt == self._attempt:
                self._control.end_round(sent, None)
            raise

    # --- the broadcast -----------------------------------------------------------------------------------------

    def broadcast(self, step: int, attempt: str, export: Export, probe: Probe | None = None) -> bool:
        """Broadcast a step and return whether all explorers that take part have received it.

        `attempt` is the save that writes the same weights to files. `probe`, what the model answers, goes with them.
        """
        try:
            plan = self._planned(export)
        except CorruptDataError as error:  # on all ranks
            self._log.warning("broadcast_skipped", step=step, reason=str(error))
            return False
        begun = self._begin(step, attempt, plan, probe)
        if not self._ranks.broadcast(begun is not None):
            return False
        walk = self._walk(export)
        is_done = begun is not None and self._carry(begun, walk)
        walk.finish()
        is_done = self._ranks.broadcast(is_done)
        if not is_done:
            self._plan = None  # tensors may have changed; all ranks plan at once: a walk may be a collective
        return is_done

    def _walk(self, export: Export) -> ExportWalk:
        return ExportWalk(export, 0, 1, self._dtype, self._tied)

    def _planned(self, export: Export) -> BucketPlan:
        """Return the layout of the weights; the first call walks over shapes and dtypes."""
        if self._plan is None:
            walk = self._walk(export)
            walk.plan()
            metas = [(spec.name, spec.dtype, spec.shape) for spec in walk.specs]
            self._plan, self._device = plan_buckets(metas, self._bucket), walk.device
        return self._plan

    def _begin(self, step: int, attempt: str, plan: BucketPlan, probe: Probe | None) -> _Begun | None:
        """Open a round, with its group formed; return None if there is none, or on other ranks."""
        self._round = None
        if self._control is None:
            return None
        if self._skip:
            self._skip -= 1
            return None
        try:
            return self._open_round(self._control, step, attempt, plan, probe)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step reaches explorers through files
            self._fail(self._control, step, error)
            return None

    def _open_round(
        self, control: BroadcastControl, step: int, attempt: str, plan: BucketPlan, probe: Probe | None
    ) -> _Begun | None:
        members = self._expected(control)
        if not members:
            self._abort_group()
            return None
        address = self._address(members)
        asks = control.agree(step, self._settings.ready_timeout, members=set(members))
        if not asks:
            late = [name for name, presence in control.members(BACKEND).items() if not _asks(presence)]
            self._note_late(name for name in late if name in members)
            self._log.info("broadcast_postponed", step=step, late=sorted(late))
            return None
        self._times_late = {name: times for name, times in self._times_late.items() if name not in asks}
        timeout = self._settings.broadcast_timeout
        deadline = Deadline(self._clock, timeout)
        agreed = {name: members[name] for name in asks}
        chosen = self._chosen(agreed)
        kept = self._kept_group(agreed, plan, chosen.backend)
        group = kept or self._offer_group(control, agreed, plan, address, chosen)
        offer = group.offer
        assert self._client is not None
        version = self._client.latest_version()
        generation = version.generation if version else 0
        self._round = Round(step, attempt, generation, offer.epoch, plan.digest, timeout, asks, probe=probe)
        control.open_round(self._round)
        if kept is None:
            control.wait_joined(max(deadline.left(), 0.0))
            group.process_group.connect([offer.secret], offer.world_size, deadline, offer.backend)
        return _Begun(control, group, self._round, deadline)

    def _expected(self, control: BroadcastControl) -> dict[str, Presence]:
        """Return the explorers to wait for: without those that were late, until they ask.

        Some ask only while the trainer waits for them. So it waits for them again, ever more rarely.
        """
        living = control.members(BACKEND)
        self._times_late = {name: times for name, times in self._times_late.items() if name in living}
        self._late = {
            name: rest - 1
            for name, rest in self._late.items()
            if rest and name in living and not _asks(living[name])
        }
        return {name: presence for name, presence in living.items() if name not in self._late}

    def _note_late(self, names: Iterable[str]) -> None:
        for name in names:
            self._times_late[name] = self._times_late.get(name, 0) + 1
            self._late[name] = _skipped_after(self._times_late[name] + 1)

    def _address(self, members: Mapping[str, Presence]) -> str:
        if self._settings.address:
            return self._settings.address
        if all(is_here(member) for member in members.values()):
            return LOOPBACK
        raise ConfigError(
            "explorers on other hosts cannot take part",
            hint="set sync.address to an address of the trainer that they reach",
        )

    def _chosen(self, members: Mapping[str, Presence]) -> BackendChoice:
        gpus = {name: gpu_in(presence.info) for name, presence in members.items()}
        has_failed = _members(members) in self._without_nccl
        return choose_backend(process_group.gpu_of(self._device), gpus, has_failed=has_failed)

    def _kept_group(
        self, members: Mapping[str, Presence], plan: BucketPlan, backend: str
    ) -> FormedGroup | None:
        """Return the group of the last broadcast if it serves for this one."""
        group = self._group
        wanted = _members(members), plan.digest, backend
        if group is None or (self._group_members, group.plan.digest, group.offer.backend) != wanted:
            return None
        return group

    def _offer_group(
        self,
        control: BroadcastControl,
        members: Mapping[str, Presence],
        plan: BucketPlan,
        address: str,
        chosen: BackendChoice,
    ) -> FormedGroup:
        self._abort_group()
        self._log.info(
            "broadcast_group_formed", backend=chosen.backend, reason=chosen.reason, members=len(members)
        )
        device = self._device if chosen.backend == NCCL else CPU
        listening = ProcessGroup.listen(address, self._settings.broadcast_timeout, device)
        offer = control.offer_group(
            address,
            listening.port,
            [(slot.name, slot.dtype, slot.shape) for slot in plan.slots],
            backend=chosen.backend,
            members=set(members),
            bucket=plan.bucket,
            secret=secrets.token_hex(16),
        )
        self._group, self._group_members = FormedGroup(listening, offer, plan), _members(members)
        if set(offer.members) != set(members):
            raise TryAgainError("an explorer is gone")
        return self._group

    def _carry(self, begun: _Begun, walk: ExportWalk) -> bool:
        """Send the weights and confirm that all members have received them; return whether that worked."""
        control, (group, offer, plan), sent, deadline = begun
        try:
            buckets = self._packer.buckets(plan, walk, group.device)
            checksum = send_buckets(group, buckets, deadline)
            control.wait_received(sent, offer, checksum, max(deadline.left(), 0.0))
            control.end_round(sent, checksum)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step reaches explorers through files
            self._fail(control, sent.step, error)
            return False
        self._failures = 0
        return True

    def _fail(self, control: BroadcastControl, step: int, error: BaseException) -> None:
        """Abort the group, tell its members, and skip the next broadcasts."""
        self._failures += 1
        self._skip = _skipped_after(self._failures)
        reason = str(error) if isinstance(error, SyncdError) else f"{type(error).__name__}: {error}"
        self._log.warning("broadcast_failed", step=step, reason=reason, skipped_next=self._skip)
        if self._group is not None and self._group.offer.backend == NCCL:
            self._without_nccl.append(self._group_members)
        self._abort_group()
        self._packer.drop()
        failed, self._round = self._round, None
        try:
            if failed is not None:
                control.end_round(failed, None)
            else:
                control.withdraw_agreement()
            control.drop_group()
        except SyncdError as worse:
            self._log.warning("broadcast_end_failed", step=step, reason=str(worse))

    def _abort_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.process_group.abort()


def _asks(explorer: Presence) -> bool:
    return explorer.status is RunningStatus.REQUIRE_SYNC


def _skipped_after(times: int) -> int:
    """Return how many syncs go through files alone after something has failed so many times in a row."""
    return min((1 << (times - 1)) - 1, MOST_SKIPPED)


def _members(members: Mapping[str, Presence]) -> Members:
    return frozenset((name, presence.incarnation) for name, presence in members.items())
