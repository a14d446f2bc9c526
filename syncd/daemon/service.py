"""The daemon: leads its job or stands by, and takes one tick at a time: scan, plan, act, tell.

`tick` is synchronous and has no threads of its own, so that the simulator drives it; `run` is the loop around it.
"""

import contextlib
import errno
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from syncd.config import DaemonConfig
from syncd.daemon.act import Actor, Beat
from syncd.daemon.plan import Answer, Plan, plan, still_holds
from syncd.daemon.policy import Policy, policy_of
from syncd.daemon.report import Message, describe, differences, lag_of, totals
from syncd.daemon.retention import Decision, removable
from syncd.daemon.scan import Scanner
from syncd.daemon.snapshot import Snapshot, State
from syncd.daemon.verify import Verify, problems_of
from syncd.errors import (
    FencedError,
    JobMissingError,
    LockHeldError,
    StorageError,
    SyncdError,
    storage_error,
)
from syncd.observe import names
from syncd.observe.events import Event, Level, Observer
from syncd.protocol.candidate import Candidate
from syncd.protocol.disk import MISSING, Clock, is_below
from syncd.protocol.layout import Job
from syncd.protocol.owner import check_owner, record_owner
from syncd.protocol.presence import RunningStatus
from syncd.protocol.process import Process
from syncd.protocol.term import BEAT, Term
from syncd.protocol.trouble import CROWDED, MountState, Trouble, trouble_of
from syncd.protocol.version import Version

STANDBY_EVERY = 1.0
"""Seconds between two looks of a stand-by at the leader."""

FILLING_EVERY = 0.2
"""Seconds between two looks while a step fills, where events would otherwise be waited for."""

TRASH_EVERY = 5.0

FORGET_AFTER = 86400.0
"""Seconds of silence after which the file of an explorer goes: of those that come and go there would be no end."""

_PROBLEMS = {
    "marker": names.MARKER_PROBLEM,
    "version": names.VERSION_PROBLEM,
    "document": names.DOCUMENT_PROBLEM,
}
_INFO: Level = "info"
_WARNING: Level = "warning"
_RETRY_LEAST, _RETRY_MOST = 0.25, 5.0
_VERIFY_ROUNDS = 8


def _inline(work: Callable[[], None]) -> None:
    work()


class Daemon:
    """One process's part in leading a job.

    Args:
        job: The job.
        config: What to do.
        clock: This host's clock.
        observer: Hears every event.
        background: Runs slow work that nothing waits for: emptying the trash.
        process: Who this is, for the lock.
        gone: Says whether a leader's process has certainly ended.
    """

    def __init__(
        self,
        job: Job,
        config: DaemonConfig,
        clock: Clock,
        observer: Observer,
        background: Callable[[Callable[[], None]], None] = _inline,
        process: Process | None = None,
        gone: Callable[[Process], bool] = Process.is_gone,
    ) -> None:
        self.job, self.config = job, config
        self._clock, self._observer, self._background = clock, observer, background
        self._candidate = Candidate(
            job,
            clock,
            config.takeover,
            process,
            gone,
            removes=is_below(job.state, job.root) or config.prune_foreign,
        )
        self._scanner = Scanner(job, clock, config.ttl, self._beat)
        self._term: Term | None = None
        self._actor: Actor | None = None
        self._telling = threading.Lock()
        self._said: set[tuple[str, str]] = set()
        self.error: SyncdError | None = None
        self.trouble: Trouble | None = None
        self.standing_by = ""
        self._retry = _RETRY_LEAST
        self._reconciled = self._emptied = self._swept = self._forgot = float("-inf")
        self._leases_known_at = float("-inf")
        self._had_modules = False
        self._decisions: dict[int, tuple[bool, str]] = {}
        self.snapshot = Snapshot()
        self.plan = plan(self.snapshot, policy_of(config))
        self._planned: tuple[Snapshot, Policy] | None = None
        self._noted: tuple[Decision, ...] = ()
        self.found_news = False
        self.trash_left = 0
        self.on_progress: Callable[[], None] = lambda: None

    @property
    def leads(self) -> bool:
        """Say whether this process leads the job."""
        return self._term is not None

    @property
    def is_surely_led(self) -> bool:
        """Say whether another daemon that leads the job was seen to live."""
        return self._candidate.is_surely_led()

    @property
    def lag(self) -> int:
        """Return how many steps the slowest live explorer is behind."""
        modules = self.snapshot.explorers.values()
        return max((lag_of(self.snapshot, module) or 0 for module in modules if module.alive), default=0)

    @property
    def is_left(self) -> bool:
        """Say whether all explorers and trainers that were there have left or died."""
        modules = (*self.snapshot.explorers.values(), *self.snapshot.trainers.values())
        here = any(module.alive and module.presence.status is not RunningStatus.STOPPED for module in modules)
        self._had_modules |= here
        return self._had_modules and not here

    def tick(self, *, woken: bool = False) -> float:
        """Take one look and act on it; return the seconds after which the next look is due at the latest.

        Args:
            woken: Something happened in the job directory.
        """
        try:
            seconds = self._tick(woken=woken)
        except FencedError as error:
            self._depose(error)
            return STANDBY_EVERY
        except LockHeldError as error:
            self._stand_by(error.message)
            self._recover()
            return STANDBY_EVERY
        except SyncdError as error:
            return self._fail(error)
        except OSError as error:
            return self._fail(storage_error(error, self.job.root))
        self._recover()
        return seconds

    def reload(self, config: DaemonConfig) -> None:
        """Go on with another configuration; what only a start can change stays as it was."""
        self.config = config
        self.tell(names.CONFIG_RELOADED, "info")

    def close(self) -> None:
        """Release the lead, so that a stand-by need not wait."""
        if self._term is not None:
            self._term.release()
            self._term = self._actor = None
        self.tell(names.DAEMON_STOPPED, "info")

    def tell(self, name: str, level: Level, **fields: Any) -> None:
        """Hand an event to the observers."""
        with self._telling:  # the trash is emptied by another thread
            self._observer.observe(Event(name, level, self._clock.time(), fields))

    # --- one tick ---------------------------------------------------------------------------------------------

    def _tick(self, *, woken: bool) -> float:
        # First of all: what is not mounted must not be written to, and not be taken for empty.
        self._scanner.check_root()
        if self._term is None:
            self._lead()
        if self._actor is None:
            return STANDBY_EVERY
        before = self.snapshot
        self._look(woken=woken)
        self.found_news = self.snapshot.marker != before.marker
        self._act(self._actor, before)
        self._beat()
        return self._interval()

    def _beat(self) -> None:
        """Show the stand-bys and the service manager that work goes on, in the midst of what takes its time."""
        try:
            if self._term is not None:
                self._term.beat(self._scanner.floor)
        except MISSING as error:
            # It must not pass for a file that is missing in the step that is being looked at.
            raise storage_error(error, self.job.lock) from error
        self.on_progress()

    def _look(self, *, woken: bool) -> None:
        started = self._clock.monotonic()
        due = started - self._reconciled >= self.config.reconcile
        if due:
            check_owner(self.job)
        self.snapshot = self._scanner.reconcile() if due else self._scanner.look(woken=woken)
        if due:
            self._reconciled = started
        seconds = self._clock.monotonic() - started
        found = totals(self.snapshot) if due else {"steps": len(self.snapshot.steps)}
        self.tell(names.SCAN_DONE, "debug", seconds=seconds, full=due, **found)

    def _act(self, actor: Actor, before: Snapshot) -> None:
        """Publish first, tell then: between marker and version stands nothing that explorers need not wait for."""
        self.plan = self._current_plan()
        looked, published = self.snapshot, None
        if self.plan.publish is not None:
            published = self._publish(actor, self.plan.publish)
        for message in differences(before, looked):
            self._say(message)
        if published is not None:
            self._tell_published(published, looked)
            self._beat()
        self._tell_problems()
        for answer in self.plan.answers:
            self._answer(actor, answer)
        self._prune(actor)
        self._forget(actor)
        self._empty_trash(actor)

    def _answer(self, actor: Actor, answer: Answer) -> None:
        actor.answer(answer)
        name, level = (names.REQUEST_DONE, _INFO) if answer.done else (names.REQUEST_REFUSED, _WARNING)
        self.tell(name, level, kind=answer.request.kind, step=answer.request.step, detail=answer.detail)

    def _current_plan(self) -> Plan:
        """Return the plan of the last look where it holds: with thousands of steps it is what an idle look costs."""
        policy, planned = policy_of(self.config), self._planned
        if planned and planned[1] == policy and still_holds(self.plan, planned[0], self.snapshot, policy):
            return self.plan
        decided = self._verified_plan(policy)
        self._planned = self.snapshot, policy
        return decided

    def _verified_plan(self, policy: Policy) -> Plan:
        """Plan, and plan again without each step that turns out not to be what it says."""
        level = Verify(self.config.verify)
        decided = plan(self.snapshot, policy)
        for _ in range(_VERIFY_ROUNDS):
            version = decided.publish
            wrong = (
                problems_of(self.job, self.snapshot.steps[version.step], level, self._beat) if version else []
            )
            if not version or not wrong:
                return decided
            step = self.snapshot.steps[version.step]
            self._scanner.reject(step, wrong[0])
            damaged = replace(step, state=State.DAMAGED, problem=wrong[0])
            self.tell(names.STEP_DAMAGED, "error", **describe(damaged))
            self.snapshot = replace(self.snapshot, steps={**self.snapshot.steps, step.step: damaged})
            decided = plan(self.snapshot, policy)
        return replace(decided, publish=None, reason="")

    def _publish(self, actor: Actor, version: Version) -> Version:
        published = actor.publish(version)
        self._scanner.floor = max(self._scanner.floor or published.pair, published.pair)
        self.snapshot = replace(self.snapshot, version=published, floor=self._scanner.floor)
        return published

    def _tell_published(self, version: Version, looked: Snapshot) -> None:
        if self.plan.reason in ("rewind", "rollback", "rewritten") and looked.version:
            before = looked.version.step
            self.tell(names.REWIND, "warning", reason=self.plan.reason, step=version.step, before=before)
        self.tell(
            names.VERSION_PUBLISHED,
            "info",
            generation=version.generation,
            step=version.step,
            kind=version.kind,
            reason=self.plan.reason,
            bytes=looked.steps[version.step].size,
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

    def _prune(self, actor: Actor) -> None:
        if self._noted is not self.plan.decisions:
            self._noted = self.plan.decisions
            for decision in self._noted:
                self._note(decision)
        doomed = removable(self.plan.decisions)
        # Explorers whose presences went with the state directory write them again before this.
        if not doomed or self._clock.monotonic() < self._leases_known_at:
            return
        dead = self._dead()
        removed = [decision.step for decision in doomed if self._remove(actor, decision, dead)]
        self._scanner.forget(removed)
        self.snapshot = replace(
            self.snapshot, steps={n: step for n, step in self.snapshot.steps.items() if n not in set(removed)}
        )

    def _dead(self) -> dict[str, Beat]:
        """Return the modules whose leases are void, each with its last heartbeat."""
        modules = (*self.snapshot.trainers.items(), *self.snapshot.explorers.items())
        return {
            name: (module.presence.incarnation, module.presence.beat)
            for name, module in modules
            if not module.alive
        }

    def _remove(self, actor: Actor, decision: Decision, dead: dict[str, Beat]) -> bool:
        self._beat()
        step = self.snapshot.steps[decision.step]
        kept = actor.remove(step, dead)
        if kept is not None:
            self._scanner.look_again(step.step)
            self.tell(names.STEP_KEPT, "info", step=step.step, rule="leased", detail=kept)
            return False
        self.tell(
            names.STEP_REMOVED,
            "info",
            step=step.step,
            rule=decision.rule,
            detail=decision.detail,
            bytes=step.size,
        )
        return True

    def _forget(self, actor: Actor) -> None:
        """Remove the files of explorers that have gone long ago, after each examination of everything."""
        if self._forgot >= self._reconciled:
            return
        self._forgot = self._reconciled
        for name, module in self.snapshot.explorers.items():
            if module.silent_for >= FORGET_AFTER and not module.presence.problem:
                self._beat()
                actor.forget(name, (module.presence.incarnation, module.presence.beat))

    def _note(self, decision: Decision) -> None:
        """Tell why a step is kept whenever the rule that keeps it changes."""
        known = self._decisions.get(decision.step)
        if decision.keep and known != (decision.keep, decision.rule):
            self.tell(
                names.STEP_KEPT, "debug", step=decision.step, rule=decision.rule, detail=decision.detail
            )
        self._decisions[decision.step] = (decision.keep, decision.rule)
        if len(self._decisions) > 2 * len(self.plan.decisions) + 100:
            self._decisions = {item.step: (item.keep, item.rule) for item in self.plan.decisions}

    def _empty_trash(self, actor: Actor) -> None:
        now = self._clock.monotonic()
        if now - self._emptied < min(TRASH_EVERY, max(self.config.trash_grace, 0.1)):
            return
        self._emptied = now
        dead = self._dead()
        self._background(lambda: self._empty(actor, dead))

    def _empty(self, actor: Actor, dead: dict[str, Beat]) -> None:
        if self._swept < self._reconciled:
            self._swept = self._reconciled
            actor.sweep(self.config.partial_grace)
        emptied = actor.empty_trash(self.config.trash_grace, dead)
        self.trash_left = emptied.left
        if emptied.entries:
            self.tell(
                names.TRASH_EMPTIED, "info", entries=emptied.entries, files=emptied.files, left=emptied.left
            )

    def _interval(self) -> float:
        """Return when to look again without an event."""
        waits = [BEAT]
        if any(step.state is State.FILLING for step in self.snapshot.steps.values()):
            waits.append(FILLING_EVERY)
        if self.plan.due_in is not None:
            waits.append(max(self.plan.due_in, 0.02))
        return min(waits)

    # --- leading, standing by, failing ------------------------------------------------------------------------

    def _lead(self) -> None:
        check_owner(self.job)
        holder = self._candidate.holder()
        if holder is not None:
            self._stand_by(f"{holder.host} (pid {holder.process.pid}) leads")
            return
        was_removed = self._candidate.found_removed
        term = self._candidate.claim(self._scanner.floor)
        if was_removed:
            self._leases_known_at = self._clock.monotonic() + self.config.ttl
        for directory in (self.job.explorers, self.job.trainers, self.job.pins, self.job.requests):
            self.job.disk.make_directory(directory)
        record_owner(self.job, term)
        self._scanner.start_anew(term.floor)
        self._term, self._actor = term, Actor(self.job, term, self._clock)
        self._reconciled, self.standing_by = float("-inf"), ""
        self.tell(names.LEADING, "info", term=term.token)

    def _stand_by(self, why: str) -> None:
        self._term = self._actor = None
        if why != self.standing_by:
            self.tell(names.STANDING_BY, "info", detail=why)
        self.standing_by = why

    def _depose(self, error: FencedError) -> None:
        self._term = self._actor = None
        self.tell(names.FENCED, "warning", detail=error.message)

    def _fail(self, error: SyncdError) -> float:
        trouble = trouble_of(error, self.job.root, self._inodes(error))
        if _differs((self.error, self.trouble), (error, trouble)):
            name = names.JOB_MISSING if isinstance(error, JobMissingError) else names.ERROR
            hint = error.hint or (trouble.hint if trouble else None)
            self._tell_state(trouble)
            self.tell(name, "error", code=error.code, detail=str(error), hint=hint)
        self.error, self.trouble = error, trouble
        if trouble is not None and trouble.state in CROWDED:
            self._make_room()
        self._retry = min(self._retry * 2, _RETRY_MOST)
        return self._retry

    def _inodes(self, error: SyncdError) -> int | None:
        """Return how many files may still be made, where a full disk may mean that there is no more of them."""
        if not isinstance(error, StorageError) or error.errno != errno.ENOSPC:
            return None
        try:
            return self.job.disk.inodes(self.job.root)
        except OSError:
            return None

    def _make_room(self) -> None:
        """Delete what is due in the trash: where nothing can be written, that can still be done."""
        if self._actor is not None:
            with contextlib.suppress(OSError, SyncdError):
                self._empty_trash(self._actor)

    def _recover(self) -> None:
        if self.error is not None:
            self._tell_state(None)
            self.tell(names.JOB_BACK, "info", after=str(self.error))
        self.error, self.trouble, self._retry = None, None, _RETRY_LEAST

    def _tell_state(self, trouble: Trouble | None) -> None:
        """Tell in which state the file system is now, if that has changed."""
        before = self.trouble.state if self.trouble else MountState.OK
        if trouble is not None and trouble.state is not before:
            self.tell(
                names.MOUNT_STATE, "error", state=trouble.state, detail=trouble.message, hint=trouble.hint
            )
        elif trouble is None and before is not MountState.OK:
            self.tell(names.MOUNT_STATE, "info", state=MountState.OK, detail=f"it was {before}")

    def _say(self, message: Message) -> None:
        self.tell(message.name, message.level, **message.fields)

    def _tell_problems(self) -> None:
        """Tell each problem when it begins, and not again while it lasts."""
        for name, detail in self.plan.problems:
            if (name, detail) not in self._said:
                self.tell(_PROBLEMS.get(name, names.STEP_DAMAGED), "warning", detail=detail)
        self._said = set(self.plan.problems)


def _differs(
    before: tuple[SyncdError | None, Trouble | None], now: tuple[SyncdError | None, Trouble | None]
) -> bool:
    """Say whether an error is news. While a state lasts only the name of a temporary file changes."""
    if before[1] and now[1]:
        return before[1].state is not now[1].state
    return str(before[0]) != str(now[0])
