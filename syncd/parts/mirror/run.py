"""Runs a mirror: its two ends, the threads that copy, and the daemon of a job that it leads."""

import contextlib
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from syncd import __version__
from syncd.cli import options
from syncd.cli.watch import daemon_loop, open_log_and_metrics
from syncd.client.heartbeat import Heartbeat
from syncd.config import DaemonConfig
from syncd.errors import LockHeldError, SyncdError, UsageError, storage_errors
from syncd.observe import event_names
from syncd.observe.events import Event
from syncd.observe.sd_notify import Notifier
from syncd.parts.mirror.job_source import JobSource
from syncd.parts.mirror.job_target import JobTarget
from syncd.parts.mirror.meter import Meter
from syncd.parts.mirror.mirror import Mirror
from syncd.parts.mirror.mounts import MountWatch
from syncd.parts.mirror.objects import Objects
from syncd.parts.mirror.places import check_target, is_store, open_objects, shown
from syncd.parts.mirror.store import StoreRetention, StoreSource, StoreTarget
from syncd.parts.mirror.worker import Work, Worker
from syncd.protocol import owner
from syncd.protocol.layout import Job
from syncd.protocol.leadership import BEAT
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.mirror_report import MirrorReport
from syncd.protocol.mount import mount_of
from syncd.protocol.owner import MirrorSource, identity_of
from syncd.protocol.takeover import Candidate
from syncd.stall.calls import STUCK_AFTER, PendingCalls, tracked
from syncd.stall.worker import StallGuard

if TYPE_CHECKING:
    from syncd.daemon.service import Daemon
    from syncd.parts.mirror.batches import BatchMover

POLL, LOCAL_POLL = 0.25, 0.05
"""Seconds between two looks at a store or a network mount, and at a local disk, where a look costs nothing."""

LISTING_EVERY = 1.0
"""Seconds between two looks for experiences: in an object store each is a listing."""

_JOIN = 10.0
_LOOK = 0.05
_WATCH_EVERY = 0.25

Tell = Callable[..., None]


@dataclass(frozen=True, slots=True)
class MirrorOptions:
    once: bool = False
    poll: float | None = None  # seconds between two looks at the source; by its place unless given
    rate: int = 0  # bytes a second on average, 0 for any
    experiences: bool = False  # pass experiences back to the source
    retention: StoreRetention = field(default_factory=StoreRetention)
    daemon: Mapping[str, Any] = field(default_factory=dict)  # options of `[daemon]`


class Threads:
    """The workers of a mirror, each in its own thread until `stop` is set or, with `once`, it has nothing left to do.

    `ended` is called when the last of them has ended.
    """

    def __init__(
        self, stop: threading.Event, *, once: bool, ended: Callable[[], None] = lambda: None
    ) -> None:
        self._stop, self._once, self._ended = stop, once, ended
        self._threads: list[threading.Thread] = []
        self._errors: list[SyncdError] = []

    def start(self, workers: Sequence[Worker]) -> None:
        left = list(workers)

        def run(worker: Worker) -> None:
            try:
                worker.run_once() if self._once else worker.run()
            except SyncdError as error:
                self._errors.append(error)
            finally:
                left.remove(worker)
                if not left:
                    self._ended()

        self._threads = [
            threading.Thread(target=run, args=(worker,), name="mirror", daemon=True) for worker in workers
        ]
        for thread in self._threads:
            thread.start()

    def is_running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        """End the workers. One that waits for a mount or a store that does not answer ends with the process."""
        self._stop.set()
        for thread in self._threads:
            thread.join(_JOIN)
        if self._errors:
            raise self._errors[0]


def run_mirror(source: str, target: str, choices: MirrorOptions) -> None:
    """Mirror until a signal asks to stop; with `once`, until the target has the newest version."""
    run = _run_to_store if is_store(target) else _run_to_job
    run(source, target, choices, PendingCalls(SystemClock()))


# --- into an object store -----------------------------------------------------------------------------------------


def _run_to_store(source: str, target: str, choices: MirrorOptions, calls: PendingCalls) -> None:
    clock, stop = SystemClock(), threading.Event()
    bounded = StallGuard(calls, clock, STUCK_AFTER)
    job, config = bounded(lambda: _opened(source, choices, calls))
    objects = open_objects(target)
    # The limit is of what goes to the other site; the experiences that come back have their own.
    meter, report = Meter(clock, choices.rate, stop), MirrorReport(shown(source), shown(target))
    # The job's journal is its daemon's.
    with open_log_and_metrics(job, config) as observers:

        def tell(name: str, level: Any, **fields: Any) -> None:
            observers.observe(Event(name, level, clock.time(), fields))

        identity = bounded(lambda: identity_of(job)) or ""
        _watch_mounts(MountWatch(calls, _ending(choices, stop), tell))
        end = StoreTarget(objects, identity, choices.retention, clock, meter, tell)
        mover = _mover(objects, job, None, Meter(clock, 0, stop), tell) if choices.experiences else None
        with contextlib.closing(JobSource(job)) as begin:
            mirror = Mirror(begin, end, clock, report, tell)
            _tell_started(tell, report)
            threads = Threads(stop, once=choices.once)
            threads.start(_workers(mirror, mover, choices, tell, stop, job))
            _wait_for_signal(stop, threads)
            threads.join()


def _opened(name: str, choices: MirrorOptions, calls: PendingCalls) -> tuple[Job, DaemonConfig]:
    """Return a job that is the source, and its configuration."""
    job = options.open_job(name, None, calls)
    with calls("read", f"{job.root}/config.toml"):
        config = options.read_config(job, choices.daemon)
    return tracked(options.with_policy(job, config), calls), config


def _wait_for_signal(stop: threading.Event, threads: Threads) -> None:
    """Wait until a signal asks to stop, or all work is done; tell the service manager that the process lives."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    manager = Notifier()
    manager.ready("mirroring")
    while not stop.wait(_LOOK) and threads.is_running():
        manager.alive("mirroring")
    manager.stopping()


# --- into a job ---------------------------------------------------------------------------------------------------


def _run_to_job(source: str, target: str, choices: MirrorOptions, calls: PendingCalls) -> None:
    clock, stop = SystemClock(), threading.Event()
    bounded = StallGuard(calls, clock, STUCK_AFTER)
    meter, report = Meter(clock, choices.rate, stop), MirrorReport(shown(source), shown(target))
    objects = open_objects(source) if is_store(source) else None
    near = None if objects else bounded(lambda: options.open_job(source, None, calls))
    job = bounded(lambda: options.open_job(target, None, calls))
    identity = bounded(lambda: _identity(objects, near, job, report.source))
    mirror_of = bounded(lambda: check_target(job, MirrorSource(report.source, identity)))
    with (
        daemon_loop(target, None, choices.daemon, mirror_of, calls) as (daemon, loop),
        contextlib.ExitStack() as ends,
    ):
        tell: Tell = daemon.report
        _tell_started(tell, report)
        begin = JobSource(near) if near else StoreSource(_required(objects), mirror_of.identity)
        end = JobTarget(daemon.job, daemon, loop.wake, clock, meter, calls)
        ends.callback(begin.close)
        ends.callback(end.close)
        ends.callback(stop.set)
        _watch_mounts(MountWatch(calls, _ending(choices, stop)))  # the daemon reports them
        mirror = Mirror(begin, end, clock, report, tell)
        mover = _mover(objects, near, daemon.job, meter, tell) if choices.experiences else None
        lead = partial(_await_lead, daemon, clock) if choices.once else None
        threads = Threads(stop, once=choices.once, ended=loop.stop)
        threads.start(_workers(mirror, mover, choices, tell, stop, near, job, end.is_ready, lead))
        loop.run()
        threads.join()


def _await_lead(daemon: "Daemon", clock: SystemClock) -> None:
    """Wait until the daemon leads, no longer than it takes to learn whether a silent leader lives."""
    ends = clock.monotonic() + daemon.config.takeover + BEAT
    while not daemon.knows_job:
        if daemon.leader.is_surely_led or clock.monotonic() >= ends:
            raise LockHeldError(
                f"the job is led already: {daemon.leader.standing_by}",
                path=daemon.job.root,
                hint=f"syncd status {daemon.job.root}",
            )
        clock.sleep(_LOOK)


def _identity(objects: Objects | None, near: Job | None, far: Job, name: str) -> str:
    """Return the identity of the source's job, empty while it is not known.

    A store that does not answer at the start of a service is waited for, if the far job says what it is a mirror of.
    """
    if objects is None:
        return identity_of(near) or "" if near else ""
    source = StoreSource(objects)
    try:
        source.newest()
    except SyncdError:
        before = owner.mirrored_from(far)
        if before is None or before.source != name:
            raise
        return before.identity
    return source.job


def _required(objects: Objects | None) -> Objects:
    assert objects is not None  # a source that is no job is a store
    return objects


# --- both ---------------------------------------------------------------------------------------------------------


def _tell_started(tell: Tell, report: MirrorReport) -> None:
    ends = {"source": report.source, "target": report.target}
    tell(event_names.MIRROR_STARTED, "info", **ends, version=__version__)


def _workers(
    mirror: Mirror,
    mover: "BatchMover | None",
    choices: MirrorOptions,
    tell: Tell,
    stop: threading.Event,
    near: Job | None,
    far: Job | None = None,
    is_ready: Callable[[], bool] = lambda: True,
    lead: Callable[[], None] | None = None,
) -> list[Worker]:
    """Return what runs: the copying of versions, and the passing on of experiences.

    `is_ready` returns whether this process may write to the far job now; `lead` waits until it may.
    """

    def led(turn: Callable[[], bool]) -> bool:
        if lead is not None:
            lead()
        return turn()

    def failed(detail: str) -> None:
        # What cannot be shown in the jobs is in the log.
        with contextlib.suppress(SyncdError, OSError):
            mirror.show(state="failing", detail=detail)

    roots = tuple(job.root for job in (near, far) if job)
    poll = choices.poll or _poll_of(near)
    workers = [Worker(Work("versions", partial(led, mirror.turn), poll, failed, roots), tell, stop)]
    if mover is not None:
        move = mover.turn

        def moved() -> bool:
            return is_ready() and move()

        every = max(poll, LISTING_EVERY)
        workers.append(Worker(Work("experiences", partial(led, moved), every, roots=roots), tell, stop))
    return workers


def _poll_of(near: Job | None) -> float:
    return POLL if near is None or mount_of(near.root).is_network else LOCAL_POLL


def _ending(choices: MirrorOptions, stop: threading.Event) -> Callable[[], bool]:
    return lambda: choices.once or stop.is_set()


def _watch_mounts(watch: MountWatch) -> None:
    Heartbeat(watch.check, _WATCH_EVERY)


def _mover(
    objects: Objects | None, near: Job | None, far: Job | None, meter: Meter, tell: Tell
) -> "BatchMover":
    """Return what passes experiences on from the far end of this process to its near one."""
    from syncd.parts.mirror import batches  # noqa: PLC0415 - it needs pyarrow

    source = batches.JobBatches(far, SystemClock()) if far else batches.StoreBatches(_required(objects))
    target = batches.JobIntake(near) if near else batches.StoreBatches(_required(objects))
    return batches.BatchMover(source, target, meter, tell)


def detach(name: str) -> None:
    """Make a job that a mirror led a job of its own; the mirror must have ended."""
    clock = SystemClock()
    calls = PendingCalls(clock)
    StallGuard(calls, clock, STUCK_AFTER)(lambda: _detach(options.open_job(name, None, calls), clock))


def _detach(job: Job, clock: SystemClock) -> None:
    if owner.mirrored_from(job) is None:
        raise UsageError("the job is no mirror of another one", path=job.root)
    candidate = Candidate(job, clock, options.read_config(job, {}).takeover)
    with storage_errors(job.root):
        while (holder := candidate.holder()) is not None:
            if candidate.is_surely_led():
                raise LockHeldError(
                    f"its mirror runs on {holder.host} (pid {holder.process.pid})",
                    path=job.root,
                    hint="stop it first, then run this again",
                )
            clock.sleep(0.25)
        term = candidate.claim()
        # It is of the source's start model; who trains here may begin with another one.
        term.discard(job.base_probe)
        owner.detach(job, term)
        term.release()
