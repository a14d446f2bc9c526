"""One process's connection to a job: publish, follow, lease, wait.

All calls block the thread that makes them; `syncd.client.aio` has them for asyncio.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, Self, TypedDict, TypeVar, Unpack

from syncd.client.announce import StepAnnouncer
from syncd.client.follow import Leased, VersionFollower, VersionReader, missing_job
from syncd.client.heartbeat import Heartbeat
from syncd.client.own_presence import OwnPresence, join
from syncd.client.peers import Peers
from syncd.client.rhythm import VersionLookout
from syncd.client.sync_policy import NOTHING
from syncd.client.wait import Pace, Poller, T
from syncd.context import Closing
from syncd.errors import UsageError, storage_errors
from syncd.protocol.broadcast_round import agreed_asks
from syncd.protocol.disk import Clock, Disk, exists, is_below
from syncd.protocol.documents import SMALL_LIMIT, encode
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.manifest import Manifest
from syncd.protocol.memory_copies import MEMORY_KEY, MemoryDirectory
from syncd.protocol.owner import check_owner, is_own
from syncd.protocol.presence import TTL, RunningStatus
from syncd.protocol.probe import Probe
from syncd.protocol.version import Pair, Version

Role = Literal["trainer", "explorer", "observer"]
"""An observer has no presence: a script, an evaluator, a rank that only writes shards."""

TICK = 1.0
"""Seconds between two turns of the heartbeat thread, on a local mount."""

_MOST_INFO = SMALL_LIMIT // 2  # bytes; the rest is for the other fields of a presence

P = ParamSpec("P")


class Guarded(Protocol):
    """An object whose public methods run under a guard."""

    def guard(self) -> contextlib.AbstractContextManager[None]:
        """Raise background errors first, and file system errors as errors of this project."""


G = TypeVar("G", bound=Guarded)


def guarded(method: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:

    @functools.wraps(method)
    def call(self: G, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.guard():
            return method(self, *args, **kwargs)

    return call


class ClientOptions(TypedDict, total=False):
    """How to open a job.

    Args:
        state_dir: Where the daemon keeps its state, if not in the job directory.
        timeout: Seconds that each wait lasts unless the call says otherwise; an hour unless given.
        poll: Seconds between two polls; by the kind of mount unless given.
        heartbeat: Whether a thread keeps the presence alive; without it, call `beat` often.
        ttl: Seconds of silence after which others count as dead.
        fence: A directory through which steps are announced and the presence is written: a trainer that loses it can
            do neither.
        on_wait: Called at each poll of a wait with what it is for and its seconds; what it raises ends the wait.
    """

    state_dir: str | os.PathLike[str] | None
    timeout: float
    poll: float | None
    heartbeat: bool
    disk: Disk | None
    clock: Clock | None
    ttl: float
    fence: str
    on_wait: Callable[[str, float], None] | None


class Client(Closing):
    """One process's connection to a job; `open` makes it.

    Every wait has a deadline, and ends early within `cancelled_by`. However a wait ends, the status of the process is
    then what it was before.
    """

    def __init__(
        self, job: Job, role: Role, own: OwnPresence | None, poller: Poller, ttl: float = TTL, fence: str = ""
    ) -> None:
        """Connect a process; `own` is its presence, None for an observer. See `ClientOptions` for the rest."""
        self.job, self.role, self.poller, self.clock = job, role, poller, poller.clock
        self.identity = own.identity if own else None
        """The name of this process in the job; None for an observer."""
        self.timeout = poller.timeout
        self.trainers = Peers(job, job.trainers, poller.clock, ttl)
        self.explorers = Peers(job, job.explorers, poller.clock, ttl)
        self.versions = VersionReader(job, tolerant=role == "trainer", lookout=poller.lookout)
        self.follower = VersionFollower(self.versions, self.trainers, own, poller)
        self.fence = fence
        self._announcer = StepAnnouncer(job, own if role == "trainer" else None, poller, fence)
        self._own = own
        self._heartbeat: Heartbeat | None = None

    @classmethod
    def open(
        cls,
        job_dir: str | os.PathLike[str],
        role: Role = "observer",
        identity: str | None = None,
        **options: Unpack[ClientOptions],
    ) -> Self:
        """Connect to a job and publish this process in it.

        Args:
            identity: Its name, unique among living processes; `trainer`, or host and process unless given.
            **options: See `ClientOptions`.

        Raises:
            UsageError: Another living process holds the identity.
            JobMissingError: The job directory is missing.
        """
        if role not in {"trainer", "explorer", "observer"}:
            raise UsageError(f"unknown role {role!r}", hint="trainer, explorer or observer")
        job = Job.at(job_dir, options.get("state_dir"), options.get("disk"))
        clock, pace = options.get("clock") or SystemClock(), Pace(job.state, options.get("poll"))
        lookout = VersionLookout(job, clock) if pace.looks else None
        hint, timeout = f"syncd watch {job.root}", options.get("timeout", 3600.0)
        poller = Poller(clock, pace, timeout, hint, lookout, options.get("on_wait"))
        with storage_errors(job.root):
            if not exists(job.disk, job.root):
                raise missing_job(job.root)
            if not is_own(job):
                check_owner(job)
            fence = options.get("fence", "")
            # Nothing can be renamed from one file system to another.
            near = fence if is_below(job.state, job.root) else ""
            own = None if role == "observer" else join(job, role, identity, poller, near)
        client = cls(job, role, own, poller, options.get("ttl", TTL), fence)
        client.beat()
        if options.get("heartbeat", True):
            client.start_heartbeat()
        return client

    # --- this process ------------------------------------------------------------------------------------------

    @property
    def confirmed(self) -> Pair | None:
        """Return the version that this process confirmed last."""
        return self._own.presence.applied if self._own else None

    @property
    def confirmed_digest(self) -> str:
        """Return the digest of the version that this process confirmed last, empty if unknown."""
        return self._own.presence.applied_digest if self._own else ""

    def own(self, role: Role | None, what: str) -> OwnPresence:
        """Return this process's presence; `UsageError` if it has another role. None allows all but an observer."""
        if self._own is None or role not in {None, self.role}:
            wanted = role or "trainer or explorer"
            raise UsageError(f"{what} is for the role {wanted}; this one is {self.role}")
        return self._own

    def check(self) -> None:
        """Raise what went wrong in the background since the last call."""
        if self._own is not None:
            self._own.check()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        self.check()
        with storage_errors(self.job.root):
            yield

    def start_heartbeat(self) -> None:
        self._heartbeat = Heartbeat(self.beat, max(TICK, 20 * self.poller.pace.seconds))

    def beat(self) -> None:
        """Publish a heartbeat if one is due, and read who else is in the job. Never raises: the next call does."""
        if self._own is None:
            self._read_peers()
        else:
            self._own.beat()
            self._own.attempt(self._read_peers)

    def close(self) -> None:
        """Publish that this process has stopped, and end its heartbeat. A second call does nothing."""
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
        if self._own is not None and not self._own.closed:
            with storage_errors(self.job.root):
                self._own.close(**(self._announcer.position() if self.role == "trainer" else {}))

    @guarded
    def describe(self, fields: Mapping[str, Any], *, now: bool = True) -> None:
        """Publish other facts about this explorer or trainer, in the `info` of its presence.

        Args:
            fields: JSON values by name; None removes a field. Other fields stay.
            now: Whether to write at once; else the next write publishes them, at the latest a heartbeat.

        Raises:
            UsageError: They are no JSON values, or too large for a presence. Nothing is changed.
        """
        own = self.own(None, "describe")
        info = {name: value for name, value in {**own.info, **fields}.items() if value is not None}
        if info != own.info:
            _require_readable(info)
            (own.change if now else own.change_later)(info=info)

    def publish_reads(self, names: Sequence[str]) -> None:
        """Publish what this explorer reads beside whole steps (`READS_DELTA`); a heartbeat repeats a failed write."""
        own = self.own("explorer", "publish_reads")
        if own.presence.reads != tuple(names):
            own.try_change(reads=tuple(names))

    # --- statuses ----------------------------------------------------------------------------------------------

    @guarded
    def set_status(self, status: RunningStatus, old_status: RunningStatus | None = None) -> None:
        """Publish the status of this process; a trainer's step announced last goes out in the same write.

        Raises:
            UsageError: The status is not `old_status` now, or would not change.
        """
        own, old = self.own(None, "a status"), None if old_status is None else RunningStatus(old_status)
        position = self._announcer.position() if self.role == "trainer" else {}
        own.set_status(RunningStatus(status), old, **position)

    @guarded
    def trainer_requires_weight_sync(self) -> bool | None:
        """Return whether the trainer asks for a sync; None once the trainer that was there is gone."""
        statuses = [trainer.status for trainer in self.trainers.read().values()]
        if self.trainers.departed() is not None:
            return None
        return RunningStatus.REQUIRE_SYNC in statuses

    @guarded
    def explorer_requires_sync(self) -> bool:
        """Return whether any explorer asks for a sync and has no answer yet."""
        own = self._own.presence if self._own else None
        answered = {} if own is None else {**own.answered, **agreed_asks(own.info)}
        return any(
            explorer.status is RunningStatus.REQUIRE_SYNC and explorer.asked > answered.get(name, 0)
            for name, explorer in self.explorers.read().items()
        )

    @guarded
    def answer_nothing_new(self) -> None:
        """Answer the explorers that ask now: nothing is newer than the step announced last.

        The answer names that step, so an explorer accepts it only once that step is the published one.
        """
        own = self.own("trainer", "an answer")
        # Read the asks first: a step announced after this moment is news to those who ask later.
        asks = {
            name: explorer.asked
            for name, explorer in self.explorers.living().items()
            if explorer.status is RunningStatus.REQUIRE_SYNC
        }
        explorers, before = self.explorers.last(), own.presence
        kept = {name: asked for name, asked in before.answered.items() if name in explorers}
        changes = {"answered": {**kept, **asks}, **self._announcer.position()}
        if any(getattr(before, name) != value for name, value in changes.items()):
            own.change(**changes)

    # --- publish -----------------------------------------------------------------------------------------------

    @guarded
    def publish(
        self,
        state: Mapping[str, Any] | str | None,
        step: int,
        *,
        rewind: bool = False,
        probe: Probe | None = None,
    ) -> int:
        """Make a step of a state dict and announce it.

        Args:
            state: Tensors by name (numpy arrays, torch tensors, or (dtype, shape, bytes)); the URI of weights that
                are elsewhere; None for a step that is complete already.
            rewind: Whether explorers shall go back to a step below the one announced last. Without it an older
                step becomes complete and is not announced: saves may finish in another order.
            probe: What the model answers with these weights, for engines to be compared with.

        Returns:
            The step that is announced now.

        Raises:
            UsageError: The step is complete already and is passed again, or is given a probe; or the state dict
                holds no tensor.
            NotReadyError: The step is not complete, and None is passed.
        """
        self._require_publisher()
        return self._announcer.publish(state, step, rewind=rewind, probe=probe)

    @guarded
    def publish_received(self, step_num: int | None = None, world_size: int | None = None) -> int:
        """Seal and announce a step once all its writers have left receipts. Any of them may call this.

        Args:
            step_num: The step; the newest that has a directory unless given.
            world_size: The number of writers; the one in the receipts unless given.

        Returns:
            The step that is announced now, 0 before the first.
        """
        self._require_publisher()
        return self._announcer.publish_received(step_num, world_size)

    @guarded
    def count_receipts(self, step: int) -> int:
        """Return the number of writers of the newest save of a step that are done."""
        return self._announcer.count_receipts(step)

    @guarded
    def announced_step(self) -> int | None:
        """Return the step that is announced, None before the first."""
        return self._announcer.announced_step()

    @guarded
    def publish_copies(self, directory: MemoryDirectory | None) -> None:
        """Publish where this trainer keeps copies of steps in its host's memory; None for nowhere."""
        self.own("trainer", "publish_copies")
        self.describe({MEMORY_KEY: directory and asdict(directory)})

    @guarded
    def vacate(self, step: int, timeout: float | None = None) -> None:
        """Have the daemon remove a complete step, so that it can be written again after a rewind.

        The marker must name an earlier step by then (`publish(None, earlier, rewind=True)`).

        Raises:
            TryAgainError: The daemon keeps the step.
            TimedOutError: The daemon has not removed it, or no daemon runs.
        """
        self.own("trainer", "vacate")
        self._announcer.vacate(step, timeout)

    # --- follow ------------------------------------------------------------------------------------------------

    @guarded
    def latest_version(self) -> Version | None:
        """Return the published version with its generation, None before the first."""
        return self.versions.latest()

    @guarded
    def wait_for_version(
        self,
        current_version: int = NOTHING,
        no_wait: bool = False,  # noqa: FBT001, FBT002
        timeout: float | None = None,
    ) -> int:
        """Wait until a version is published that this explorer does not have, and return its step.

        Returns `current_version` earlier if the trainer answers that nothing is newer, or if the trainer that was
        there has stopped or died.

        Args:
            current_version: The step that the explorer has; -1 for none.
            no_wait: Return at once.
            timeout: Seconds to wait; the client's unless given.

        Raises:
            TimedOutError: No version came.
        """
        return self.follower.wait(current_version, no_wait, timeout)

    @guarded
    def confirm(self, version: int | Pair | Version | None) -> None:
        """Publish that this explorer runs a version. Call it after the load, never before.

        Args:
            version: What runs; None if no version of this job runs, as after a restart of the engine.

        Raises:
            UsageError: The step was never offered to this explorer.
        """
        self.own("explorer", "confirm")
        self.follower.confirm(version)

    # --- lease -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lease(self, version: int | Pair | Version) -> Iterator[Leased]:
        """Keep a version from being removed while an explorer reads it, or a trainer adds files to it.

        Raises:
            TryAgainError: The step is gone, or was written again: read the newest version instead.
        """
        with self.guard():
            own = self.own(None, "a lease")
            wanted = self.versions.resolve(version)
        with own.leasing([wanted.step], wanted.pair):
            with storage_errors(self.job.root):
                leased = self.versions.examine(wanted)
            yield leased

    @contextlib.contextmanager
    def lease_links(self, links: Sequence[Manifest]) -> Iterator[None]:
        """Keep the steps that a leased version is stored as changes of, while they are read.

        Args:
            links: Their manifests, as they were read. An observer leases nothing.

        Raises:
            TryAgainError: One of them has been removed or written again by now.
        """
        steps = [link.step for link in links]
        with self._own.leasing(steps) if self._own and steps else contextlib.nullcontext():
            for link in links:
                self.versions.require(link)
            yield

    # --- wait --------------------------------------------------------------------------------------------------

    @guarded
    def wait_for(
        self,
        predicate: Callable[[], T],
        timeout: float | None = None,
        what: str = "waiting for a condition",
    ) -> T:
        """Wait until a predicate returns something true, and return that; an error says `what` the wait was for."""
        poll = lambda: (value,) if (value := predicate()) else None  # noqa: E731
        return self.poller.until(poll, what, timeout)[0]

    def _require_publisher(self) -> None:
        if self.role == "explorer":
            raise UsageError("an explorer publishes no steps")

    def _read_peers(self) -> None:
        # The next wait repeats a read that fails here, and reports its error.
        with contextlib.suppress(OSError):
            self.trainers.read()
            if self.role == "trainer":
                self.explorers.read()


def _require_readable(info: Mapping[str, Any]) -> None:
    """Refuse what each later heartbeat would fail at, or what no reader of the presence takes."""
    try:
        size = len(encode(info))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"facts of a presence are JSON values: {error}") from error
    if size > _MOST_INFO:
        raise UsageError(f"facts of a presence may have {_MOST_INFO} bytes as JSON, these have {size}")
