"""The synchronizer by the names that Trinity-RFT's users know: `Client`, with those names on top.

No server and no actor is between processes: each writes its presence, the daemon writes the version, and everybody
reads. `Synchronizer` blocks the calling thread; `AsyncSynchronizer` has the same methods as coroutines.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, Unpack

from syncd.client.aio import AsyncClient, run
from syncd.client.broadcast_control import BroadcastControl
from syncd.client.broadcast_membership import BroadcastMembership
from syncd.client.client import Client, ClientOptions, Role, guarded
from syncd.client.follow import Leased
from syncd.client.own_presence import OwnPresence
from syncd.client.state_dict import (
    StateFile,
    TensorData,
    foreign_shards,
    iterate_state,
    list_tensors,
    read_state,
    state_files,
)
from syncd.client.sync_policy import (
    SyncMethod,
    SyncStyle,
    explorer_needs_sync,
    should_load,
    trainer_needs_sync,
)
from syncd.client.wait import Poller
from syncd.errors import CorruptDataError, TryAgainError, UsageError
from syncd.protocol.disk import MISSING
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.presence import TTL, RunningStatus
from syncd.protocol.rendezvous import Offer, TensorInfo
from syncd.protocol.version import Version
from syncd.transports.files.leased_directory import HeldDirectory, LoadTimings
from syncd.transports.files.receive import FilesReceiver

__all__ = [
    "AsyncSynchronizer",
    "Leased",
    "RunningStatus",
    "SyncMethod",
    "SyncStyle",
    "Synchronizer",
    "TensorData",
    "TensorInfo",
    "explorer_needs_sync",
    "should_load",
    "trainer_needs_sync",
]

T = TypeVar("T")

_ATTEMPTS = 8


class Synchronizer(Client):
    """What trainer and explorers use to follow each other, over the files of a job alone.

    A `Client`, with the method names that users of Trinity-RFT's synchronizer know beside its own.

    Examples:
        A trainer:

            with Synchronizer.open("/ckpt/job", "trainer") as sync:
                sync.set_model_state_dict(state, step)

        An explorer:

            with Synchronizer.open("/ckpt/job", "explorer", "e0") as sync:
                step = sync.wait_new_model_state_dict(step)
                with sync.lease(step) as leased:
                    engine.load(leased.path)
                sync.confirm(step)
    """

    def __init__(
        self, job: Job, role: Role, own: OwnPresence | None, poller: Poller, ttl: float = TTL, fence: str = ""
    ) -> None:
        super().__init__(job, role, own, poller, ttl, fence)
        self._control, self._membership = BroadcastControl(self), BroadcastMembership(self)
        self._receiver: FilesReceiver | None = None
        self._kept: HeldDirectory | None = None

    @classmethod
    def get_actor(
        cls,
        config: Any = None,
        namespace: str | None = None,
        *,
        role: Role = "observer",
        identity: str | None = None,
        **options: Unpack[ClientOptions],
    ) -> Self:
        """Open a connection to a job; the same as `open`. There is no actor, and nothing is started or shared.

        Args:
            config: The job directory, or a configuration that names it as `checkpoint_job_dir`.
            namespace: The job directory, if no configuration is given.
            role: trainer, explorer, or observer, which has no presence and sets no status.
            identity: Its name; see `Client.open`.
            **options: See `ClientOptions`.

        Raises:
            UsageError: Neither names a job directory.
        """
        job_dir = getattr(config, "checkpoint_job_dir", config) or namespace
        if not isinstance(job_dir, str | os.PathLike):
            raise UsageError("no job directory is given", hint="Synchronizer.open(job_dir, role)")
        return cls.open(job_dir, role, identity, **options)

    def close(self) -> None:
        """Publish that this process has stopped, and remove what was made of deltas. A second call does nothing."""
        kept, self._kept = self._kept, None
        receiver, self._receiver = self._receiver, None
        if kept is not None:
            kept.close()
        if receiver is not None:
            receiver.close()
        super().close()

    # --- modules and statuses ----------------------------------------------------------------------------------

    @guarded
    def add_module(self, module_ref: object = None) -> None:
        """Publish this process as a module of the job; `open` has done so already.

        Args:
            module_ref: Ignored. A process is tracked by the presence that it writes, so it can add itself only.
        """
        del module_ref
        if self.role != "observer":
            self.own(None, "add_module").change()

    @property
    def trainer_status(self) -> RunningStatus:
        """Read and return the trainer's status, as `get_trainer_status`."""
        return self.get_trainer_status()

    @property
    def explorer_status_counts(self) -> dict[RunningStatus, int]:
        """Read and return the number of explorers of each status, as `get_explorer_status_counts`."""
        return self.get_explorer_status_counts()

    @guarded
    def set_trainer_status(self, status: RunningStatus) -> None:
        """Publish this trainer's status, and the step that it announced last in the same write."""
        self.own("trainer", "set_trainer_status")
        self.set_status(status)

    @guarded
    def get_trainer_status(self) -> RunningStatus:
        """Return the trainer's status: `STOPPED` too before a trainer is there, and once it has died."""
        statuses = {trainer.status for trainer in self.trainers.read().values()}
        order = (RunningStatus.REQUIRE_SYNC, RunningStatus.RUNNING)
        return next((status for status in order if status in statuses), RunningStatus.STOPPED)

    @guarded
    def set_explorer_status(self, status: RunningStatus, old_status: RunningStatus | None = None) -> None:
        """Publish this explorer's status.

        Raises:
            UsageError: The status is not `old_status` now, or would not change.
        """
        self.own("explorer", "set_explorer_status")
        self.set_status(status, old_status)

    @guarded
    def get_explorer_status_counts(self) -> dict[RunningStatus, int]:
        """Return the number of explorers of each status; a dead one counts as stopped."""
        return self.explorers.counts()

    # --- state dicts -------------------------------------------------------------------------------------------

    @property
    def model_version(self) -> int:
        """Read and return the published step, as `get_latest_model_version`."""
        return self.get_latest_model_version()

    @property
    def model_state_dict(self) -> Mapping[str, TensorData] | str | None:
        """Read and return the published weights, as `get_model_state_dict` does, without their step."""
        return self.get_model_state_dict()[0]

    def set_model_state_dict(
        self, model_state_dict: Mapping[str, Any] | str | None, trainer_step: int, *, rewind: bool = False
    ) -> int:
        """Make a step of a state dict and announce it; see `Client.publish`."""
        return self.publish(model_state_dict, trainer_step, rewind=rewind)

    set_model_state_dict_with_step_num = Client.publish_received
    checkpoint_shard_counter = Client.count_receipts

    @guarded
    def get_model_state_dict(self) -> tuple[Mapping[str, TensorData] | str | None, int]:
        """Return the published weights and their step, every byte checked against the manifest.

        Of a step that another framework wrote headers and lengths are checked: it has no digests.

        Returns:
            The tensors by name, a URI for kind remote, or None with 0 before the first version.

        Raises:
            CorruptDataError: The step is damaged.
            UsageError: Another framework wrote the step in another format than safetensors.
            RefusedError: The version is a delta that cannot be made whole below TMPDIR.
        """
        version = self.latest_version()
        if version is None:
            return None, 0
        if version.kind == "remote":
            return version.path, version.step
        with self._read(
            lambda leased, held: (read_state(self._files(leased, held)), leased.version.step)
        ) as found:
            return found

    def get_model_state_dict_iterator(self) -> Generator[tuple[str, TensorData], None, None]:
        """Yield the published weights tensor by tensor; the step stays leased until this ends or is closed.

        Every byte is checked against the manifest before the first tensor is yielded; see `get_model_state_dict`
        for steps of other frameworks.
        """
        version = self.latest_version()
        if version is None or version.kind == "remote":
            return
        with self._read(lambda leased, held: iterate_state(self._files(leased, held))) as tensors:
            yield from tensors

    @guarded
    def get_state_dict_meta(self) -> list[TensorInfo]:
        """Return name, dtype and shape of each published tensor; none before the first version."""
        version = self.latest_version()
        if version is None or version.kind == "remote":
            return []
        with self._read(lambda leased, held: list_tensors(self._files(leased, held))) as tensors:
            return tensors

    # --- following ---------------------------------------------------------------------------------------------

    wait_new_model_state_dict = Client.wait_for_version
    notify_no_new_model_state_dict = Client.answer_nothing_new

    def get_latest_model_version(self) -> int:
        """Return the published step, 0 before the first."""
        version = self.latest_version()
        return version.step if version else 0

    @guarded
    def get_latest_model_path(self, use_huggingface: bool = False) -> str | None:  # noqa: FBT001, FBT002
        """Return the directory to load, None before the first version; for kind remote its URI.

        Args:
            use_huggingface: Prefer the Hugging Face export beside the weights, if the step has one.

        A delta is made whole below TMPDIR; that directory stays until the next one is made, or `close`.

        Raises:
            RefusedError: The version is a delta that cannot be made whole: it is damaged, or there is no room.
        """
        version = self.latest_version()
        if version is None:
            return None
        if version.kind == "delta":
            with self._read(lambda leased, _: self._keep_whole(leased)) as whole:
                return whole
        path = self.versions.path_of(version)
        if not use_huggingface or version.kind == "remote" or not self.versions.has_huggingface(version):
            return path
        return f"{path}/huggingface"

    # --- broadcasts --------------------------------------------------------------------------------------------

    def ready_to_nccl_sync(
        self, module: str, trainer_step: int | None = None, timeout: float | None = None
    ) -> int | None:
        """Wait until the trainer and every living explorer are ready for a broadcast.

        Args:
            module: `trainer` or `explorer`: what this process is.
            trainer_step: The trainer's step; the one announced last unless given.
            timeout: Seconds to wait; the client's unless given.

        Returns:
            The step that is broadcast; None if there is no broadcast: nobody is there, or not all were ready in
            time.
        """
        if module == "explorer":
            return self._membership.agree(timeout)
        if module != "trainer":
            raise UsageError(f"unknown module {module!r}", hint="trainer or explorer")
        self.own("trainer", "ready_to_nccl_sync('trainer')")
        step = trainer_step if trainer_step is not None else self.announced_step() or 0
        return step if self._control.agree(step, timeout) else None

    def setup_weight_sync_group(
        self,
        master_address: str,
        master_port: int,
        state_dict_meta: Sequence[TensorInfo] | None = None,
    ) -> Offer:
        """Offer a group to all living explorers, as the trainer; see `BroadcastControl.offer_group`."""
        return self._control.offer_group(master_address, master_port, state_dict_meta or ())

    def get_weight_sync_info(self) -> tuple[str, int, list[TensorInfo]] | None:
        """Return address, port and tensors of the group that a living trainer offers, None without one."""
        offer = self._membership.offered()
        return None if offer is None else (offer.address, offer.port, list(offer.tensors))

    def coordinate_weight_sync_setup(self, timeout: float | None = None) -> Offer:
        """Form the group: the trainer waits for all members to join, an explorer joins.

        Raises:
            TimedOutError: Not all came in time; the group is torn down.
            TryAgainError: A member has failed or died; the group is torn down.
        """
        if self.role == "explorer":
            return self._membership.join_group(timeout)
        return self._control.wait_joined(timeout)

    def coordinate_weight_sync_teardown(self, timeout: float | None = None) -> tuple[str, ...]:
        """Leave the group. Explorers leave at once; the trainer after them, without waiting for dead ones.

        Returns:
            The members that had not left when the trainer did.
        """
        if self.role != "explorer":
            return self._control.close_group(timeout)
        self._membership.leave_group()
        return ()

    teardown_weight_sync_group = coordinate_weight_sync_teardown

    def weight_sync_group_is_closing(self) -> bool:
        """Return whether the group that this explorer has joined is to be left."""
        return self._membership.group_is_closing()

    @contextlib.contextmanager
    def _read(self, work: Callable[[Leased, contextlib.ExitStack], T]) -> Iterator[T]:
        """Yield what `work` reads of the newest version, which stays leased, with what `work` adds to the stack.

        If the version is removed before it is read, a newer one is published, and that is read.
        """
        failed: Version | None = None
        for _ in range(_ATTEMPTS):
            version = self.latest_version()
            assert version is not None
            with contextlib.ExitStack() as held:
                try:
                    read = work(held.enter_context(self._held(version)), held)
                except (*MISSING, CorruptDataError, TryAgainError):
                    if failed is not None and failed.pair == version.pair:
                        raise
                    failed = version
                    continue
                yield read
                return
        raise TryAgainError("versions are replaced faster than they can be read", path=self.job.root)

    @contextlib.contextmanager
    def _held(self, version: Version) -> Iterator[Leased]:
        """Lease a version; an observer reads it without a lease."""
        if self.role == "observer":
            yield self.versions.examine(version)
        else:
            with self.lease(version) as leased:
                yield leased

    def _files(self, leased: Leased, held: contextlib.ExitStack) -> Sequence[StateFile]:
        """Return the safetensors files of a version; of a delta, those that it makes, until `held` is closed."""
        version, manifest = leased.version, leased.manifest
        if manifest is None:
            return self._foreign(leased)
        if manifest.kind == "delta":
            made = held.enter_context(contextlib.closing(self._make_whole(leased)))
            return state_files(LocalDisk(), made.directory.path, made.directory.shards)
        return state_files(self.job.disk, self.job.step(version.step), manifest.shards)

    def _foreign(self, leased: Leased) -> list[StateFile]:
        disk, version = self.job.disk, leased.version
        paths = foreign_shards(disk, leased.path)
        if not paths:
            hint = f"trainer republish {self.job.root} --to DIR"
            raise UsageError(
                f"step {version.step} of layout {version.layout} has no safetensors",
                path=leased.path,
                hint=hint,
            )
        return [StateFile(disk, path) for path in paths]

    def _make_whole(self, leased: Leased) -> HeldDirectory:
        self._receiver = self._receiver or FilesReceiver(self)
        held = self._receiver.find(leased, LoadTimings(self.clock))
        assert held is not None, "the job directory has every version"
        return held

    def _keep_whole(self, leased: Leased) -> str:
        """Return the directory of the newest version: it may have become one that is stored whole."""
        if leased.version.kind != "delta":
            return leased.path
        made = self._make_whole(leased)
        before, self._kept = self._kept, made
        if before is not None:
            before.close()
        return made.directory.path


class AsyncSynchronizer(AsyncClient):
    """`Synchronizer` for asyncio: each of its methods as a coroutine."""

    connect: ClassVar[Callable[..., Any]] = Synchronizer.open
    client: Synchronizer

    async def get_model_state_dict_iterator(self) -> AsyncIterator[tuple[str, TensorData]]:
        """Yield the published weights tensor by tensor; close it (`aclose`) if it is not read to its end."""
        tensors = self.client.get_model_state_dict_iterator()
        try:
            while (item := await run(next, tensors, None)) is not None:
                yield item
        finally:
            await run(tensors.close)
