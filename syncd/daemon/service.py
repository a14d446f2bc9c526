"""The daemon: it leads its job or stands by, and works in ticks: scan, plan, act, report.

`tick` is synchronous and has no threads of its own, so that the simulator drives it; `run` is the loop around it.
"""

import contextlib
import errno
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from syncd.config import DaemonConfig
from syncd.daemon.differences import describe
from syncd.daemon.examine import VerifyLevel, problems_of, shortcut_problem_of
from syncd.daemon.leader import DaemonLeader
from syncd.daemon.parts import DaemonParts
from syncd.daemon.plan import Mirrored, Plan, plan, still_holds
from syncd.daemon.removals import Removals
from syncd.daemon.report import EventReporter, change_fields, totals
from syncd.daemon.scan import Scanner
from syncd.daemon.snapshot import Snapshot, lag_of
from syncd.errors import (
    FencedError,
    JobMissingError,
    LockHeldError,
    StorageError,
    SyncdError,
    storage_error,
    unexpected,
)
from syncd.observe import event_names
from syncd.observe.events import Level, Observer
from syncd.protocol.disk import Clock, is_below
from syncd.protocol.entry_problem import read_problem
from syncd.protocol.layout import Job
from syncd.protocol.leadership import BEAT
from syncd.protocol.mount import CROWDED, MountTrouble, mount_trouble_of
from syncd.protocol.owner import MirrorSource, check_owner
from syncd.protocol.presence import RunningStatus
from syncd.protocol.process import Process
from syncd.protocol.step import Step, StepState
from syncd.protocol.version import Version

STANDBY_EVERY = 1.0  # seconds between two ticks of a standby

FILLING_EVERY = 0.2
"""Seconds between two scans while a step fills; at other times the daemon waits for events."""

_RETRY_LEAST, _RETRY_MOST = 0.25, 5.0
_VERIFY_ROUNDS = 8


class Daemon:
    """One process's part in leading a job.

    Args:
        background: Runs slow work that nothing waits for: emptying the trash.
        mirror_of: What a mirror copies into the job: the daemon then publishes what `mirrored` names, and decides
            nothing itself.
    """

    def __init__(
        self,
        job: Job,
        config: DaemonConfig,
        clock: Clock,
        observer: Observer,
        background: Callable[[Callable[[], None]], None] = lambda work: work(),
        process: Process | None = None,
        gone: Callable[[Process], bool] = Process.is_gone,
        mirror_of: MirrorSource | None = None,
    ) -> None:
        self.job, self.config = job, config
        self.mirrored = Mirrored() if mirror_of else None
        """Which version of its source a mirrored job may publish now; None of a job that a trainer writes."""
        self._clock, self._reporter = clock, EventReporter(observer, clock)
        self.leader = DaemonLeader(job, config, clock, self._reporter, process, gone, mirror_of)
        self._scanner = Scanner(job, clock, config.ttl, self.leader.progress)
        self.removals = Removals(job, clock, self.leader, self._scanner, self._reporter, background)
        self.parts = DaemonParts(job, clock, self.leader, self._reporter)
        self.error: SyncdError | None = None
        self.trouble: MountTrouble | None = None
        self._retry = _RETRY_LEAST
        self._reconciled = float("-inf")
        self._had_modules = False
        self.snapshot = Snapshot()
        self.plan = plan(self.snapshot, config)
        self._planned: tuple[Snapshot, DaemonConfig, Mirrored | None] | None = None
        self.found_news = False

    @property
    def leads(self) -> bool:
        return self.leader.term is not None

    @property
    def knows_job(self) -> bool:
        """Return whether this daemon leads the job and has scanned it since it does."""
        return self.leads and self._reconciled > float("-inf")

    @property
    def lag(self) -> int:
        """Return how many steps the slowest live explorer is behind."""
        modules = self.snapshot.explorers.values()
        return max((lag_of(self.snapshot, module) or 0 for module in modules if module.alive), default=0)

    @property
    def is_left(self) -> bool:
        """Return whether all explorers and trainers that were here have left or died."""
        modules = (*self.snapshot.explorers.values(), *self.snapshot.trainers.values())
        here = any(module.alive and module.presence.status is not RunningStatus.STOPPED for module in modules)
        self._had_modules |= here
        return self._had_modules and not here

    def on_progress(self, call: Callable[[], None]) -> None:
        """Call something after each heartbeat and each tick, to show that work continues."""
        self.leader.on_progress = call

    def tick(self, *, woken: bool = False) -> float:
        """Scan the job once and act on it; return the seconds after which the next tick is due at the latest."""
        try:
            seconds = self._tick(woken=woken)
        except FencedError as error:
            self.leader.lose(error)
            return STANDBY_EVERY
        except LockHeldError as error:
            self.leader.stand_by(error.message)
            self._recover()
            return STANDBY_EVERY
        except SyncdError as error:
            return self._fail(error)
        except OSError as error:
            return self._fail(_with_hint(storage_error(error, self.job.root), error))
        except Exception as error:  # noqa: BLE001 - the next tick may succeed, and standbys see no heartbeat until then
            return self._fail(unexpected(error))
        self._recover()
        return seconds

    def reload(self, config: DaemonConfig) -> None:
        """Use another configuration from now on; what only a start can change stays as it was."""
        self.config = config
        self.report(event_names.CONFIG_RELOADED, "info")

    def close(self) -> None:
        self.leader.release()
        self.report(event_names.DAEMON_STOPPED, "info")

    def report(self, name: str, level: Level, **fields: Any) -> None:
        self._reporter.publish(name, level, **fields)

    # --- one tick -----------------------------------------------------------------------------------------------

    def _tick(self, *, woken: bool) -> float:
        # First of all: the daemon must not write to a job that is not mounted, nor take it for empty.
        self._scanner.check_root()
        if not self.leads:
            self._lead()
        if not self.leads:
            return STANDBY_EVERY
        before = self.snapshot
        self._scan(woken=woken)
        self.found_news = self.snapshot.marker != before.marker
        self._run_parts()
        self._act()
        self.parts.require_written()
        self.leader.beat()
        self.leader.on_progress()
        return self._interval()

    def _lead(self) -> None:
        self._reconciled = float("-inf")
        grace = self.config.trash_grace if self._is_crowded else None
        claimed = self.leader.claim(self._scanner.floor, empty_trash_after=grace)
        if claimed is None:
            return
        term, was_removed = claimed
        if was_removed:
            self.removals.pause(self.config.ttl)
        self._scanner.reset(term.floor)
        self.removals.begin_term(term)
        self.parts.begin_term()
        self._reporter.begin_term()

    @property
    def _is_crowded(self) -> bool:
        return self.trouble is not None and self.trouble.state in CROWDED

    def _scan(self, *, woken: bool) -> None:
        started = self._clock.monotonic()
        due = started - self._reconciled >= self.config.reconcile
        if due:
            check_owner(self.job)
        snapshot = self._scanner.reconcile() if due else self._scanner.scan(woken=woken)
        if self.removals.rescue_links(snapshot, again=due):
            snapshot = self._scanner.reconcile()
        self.leader.floor = self._scanner.floor
        self.snapshot = replace(snapshot, crowded=self._is_crowded)
        if due:
            self._reconciled = started
            self.removals.begin_round(started)
        seconds = self._clock.monotonic() - started
        counts = totals(self.snapshot) if due else {"steps": len(self.snapshot.steps)}
        put_aside = len(self.snapshot.put_aside)
        self.report(
            event_names.SCAN_COMPLETED, "debug", seconds=seconds, full=due, quarantined=put_aside, **counts
        )

    def _act(self) -> None:
        """Publish first, report then: nothing that explorers need not wait for comes before the version."""
        removals, reporter = self.removals, self._reporter
        self.plan = self._current_plan()
        self.snapshot = removals.remove_steps(self.plan.first, self.snapshot)
        scanned, published = self.snapshot, None
        if self.plan.publish is not None:
            published = self._publish(self.plan.publish)
        elif self.plan.amend is not None:
            self._amend(self.plan.amend)
        reporter.publish_differences(scanned)
        if published is not None:
            self._run_parts()
            self._report_published(published, scanned)
            reporter.publish_differences(self.snapshot)  # explorers lag behind it
            self.leader.progress()
            self._prove_shortcut(scanned.steps[published.step])
        reporter.publish_quarantine(scanned.version, self.snapshot.version)
        reporter.publish_problems(self.plan.problems)
        for answer in self.plan.answers:
            removals.answer(answer)
        self.snapshot = removals.prune(self.plan, self.snapshot)
        removals.remove_attempts(self.plan.lost)
        removals.forget_explorers(self.snapshot)
        removals.empty_trash(self.snapshot, self.config)

    def _run_parts(self) -> None:
        """Let parts work: before the plan, which may depend on it, and again once a version is published."""
        self.snapshot = self.parts.act(self.snapshot, self.config)
        self._scanner.note_wave(self.snapshot.wave, self.parts.every)

    def _interval(self) -> float:
        """Return the seconds after which to scan again without an event."""
        waits = [BEAT, self.parts.every]
        if any(step.state is StepState.FILLING for step in self.snapshot.steps.values()):
            waits.append(FILLING_EVERY)
        if self.plan.due_in is not None:
            waits.append(max(self.plan.due_in, 0.02))
        return min(waits)

    # --- planning and publishing --------------------------------------------------------------------------------

    def _current_plan(self) -> Plan:
        """Return the last plan where it still holds: with thousands of steps planning is the cost of an idle tick."""
        policy, planned, mirrored = self.config, self._planned, self.mirrored
        is_same = planned is not None and planned[1:] == (policy, mirrored)
        if planned and is_same and still_holds(self.plan, planned[0], self.snapshot, policy):
            return self.plan
        decided = self._verified_plan(policy, mirrored)
        self._planned = self.snapshot, policy, mirrored
        return decided

    def _verified_plan(self, policy: DaemonConfig, mirrored: Mirrored | None) -> Plan:
        """Plan, and plan again without each step that turns out to be damaged."""
        level = VerifyLevel(self.config.verify)
        decided = plan(self.snapshot, policy, mirrored)
        for _ in range(_VERIFY_ROUNDS):
            version = decided.publish
            damaged = self._rejected(self.snapshot.steps[version.step], level) if version else None
            if damaged is None:
                return decided
            self.report(event_names.STEP_DAMAGED, "error", **describe(damaged))
            self.snapshot = replace(self.snapshot, steps={**self.snapshot.steps, damaged.step: damaged})
            decided = plan(self.snapshot, policy, mirrored)
        return replace(decided, publish=None, reason="")

    def _rejected(self, step: Step, level: VerifyLevel) -> Step | None:
        """Verify a step before it is published; return it as damaged, None when it is good."""
        path, progress = f"{self.job.root}/{step.directory}", self.leader.progress
        try:
            # Read twice: what a read returns may be damaged where the file is not.
            wrong = problems_of(self.job, step, level, progress) and problems_of(
                self.job, step, level, progress
            )
        except Exception as error:
            entry_problem = read_problem(error, path)
            if entry_problem is None or not is_below(entry_problem.path, path):
                raise
            if not isinstance(error, OSError):
                return self._scanner.steps.reject(step, str(entry_problem), is_retried=True)
            return self._scanner.steps.reject(step, str(entry_problem), unread=entry_problem.path)
        return self._scanner.steps.reject(step, wrong[0]) if wrong else None

    def _prove_shortcut(self, step: Step) -> None:
        """Prove the shortcut of a published step; the next scan reports one that is unusable."""
        level, progress = VerifyLevel(self.config.verify), self.leader.progress
        path = f"{self.job.root}/{step.directory}"
        try:
            # Read twice, as a step is before it is rejected.
            problem = shortcut_problem_of(self.job, step, level, progress) and shortcut_problem_of(
                self.job, step, level, progress
            )
        except Exception as error:
            entry_problem = read_problem(error, path)
            if entry_problem is None:
                raise
            problem = str(entry_problem)
        if problem:
            self._scanner.steps.reject_shortcut(step, problem)

    def _publish(self, version: Version) -> Version:
        published = self.leader.publish(version)
        floor = max(self._scanner.floor or published.pair, published.pair)
        self._scanner.floor = self.leader.floor = floor
        self.snapshot = replace(self.snapshot, version=published, floor=floor)
        return published

    def _amend(self, version: Version) -> None:
        before = self.snapshot.version
        amended = self.leader.amend(before, version) if before else None
        if amended is None:
            # Somebody else has written the file: what was decided by the new content must not be removed.
            self.plan = replace(self.plan, decisions=())
            return
        self.snapshot = replace(self.snapshot, version=amended)

    def _report_published(self, version: Version, scanned: Snapshot) -> None:
        reason = self.plan.reason
        if reason in ("rewind", "rollback", "rewritten") and scanned.version:
            before = scanned.version.step
            self.report(
                event_names.VERSION_REWOUND, "warning", reason=reason, step=version.step, before=before
            )
        self.report(
            event_names.VERSION_PUBLISHED,
            "info",
            generation=version.generation,
            step=version.step,
            kind=version.kind,
            reason=reason,
            bytes=scanned.steps[version.step].size,
            **change_fields(scanned, version.step),
            **self._latency(version),
        )

    def _latency(self, version: Version) -> dict[str, float]:
        """Return the seconds from the marker's date, which its server gives, to the publish by this clock."""
        if self.snapshot.marker.step != version.step:
            return {}
        try:
            written = self.job.disk.stat(self.job.marker).mtime_ns / 1e9
        except OSError:
            return {}
        return {"latency": round(max(version.published_at - written, 0.0), 6)}

    # --- failures -----------------------------------------------------------------------------------------------

    def _fail(self, error: SyncdError) -> float:
        trouble = mount_trouble_of(error, self.job.root, self._inodes(error))
        if self._is_news(error, trouble):
            missing = isinstance(error, JobMissingError)
            name = event_names.JOB_DISAPPEARED if missing else event_names.OPERATION_FAILED
            hint = error.hint or (trouble.hint if trouble else None)
            self._reporter.publish_mount(self.trouble, trouble)
            self._reporter.publish_failure(error, hint, name)
        self.error, self.trouble = error, trouble
        if self._is_crowded and self.leads:
            # Nothing can be written, but what is due in the trash can still be deleted.
            with contextlib.suppress(OSError, SyncdError):
                self.removals.empty_trash(self.snapshot, self.config)
        self._retry = min(self._retry * 2, _RETRY_MOST)
        return self._retry

    def _is_news(self, error: SyncdError, trouble: MountTrouble | None) -> bool:
        """Return whether an error is new. While a state lasts only the name of a temporary file changes."""
        if self.trouble and trouble:
            return self.trouble.state is not trouble.state
        return str(self.error) != str(error)

    def _inodes(self, error: SyncdError) -> int | None:
        """Return how many files can still be created, where a full disk may mean that no inode is left."""
        if not isinstance(error, StorageError) or error.errno != errno.ENOSPC:
            return None
        try:
            return self.job.disk.inodes(self.job.root)
        except OSError:
            return None

    def _recover(self) -> None:
        if self.error is not None:
            self._reporter.publish_mount(self.trouble, None)
            self.report(event_names.JOB_RECOVERED, "info", after=str(self.error))
        self.error, self.trouble, self._retry = None, None, _RETRY_LEAST


def _with_hint(storage: StorageError, error: OSError) -> StorageError:
    """Return an error with the command that permits what was denied; other errors have the hint of their mount."""
    entry_problem = read_problem(error, str(storage.path)) if isinstance(error, PermissionError) else None
    storage.hint = entry_problem.hint if entry_problem else storage.hint
    return storage
