"""The daemon: leads its job or stands by, and takes one tick at a time: scan, plan, act, tell.

`tick` is synchronous and has no threads of its own, so that the simulator drives it; `run` is the loop around it.
"""

import contextlib
import errno
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from syncd.config import DaemonConfig
from syncd.daemon.act import Actor
from syncd.daemon.leases import Dead
from syncd.daemon.leftovers import Leftovers
from syncd.daemon.plan import Answer, Plan, plan, still_holds
from syncd.daemon.policy import Policy, policy_of
from syncd.daemon.report import Message, describe, differences, lag_of, totals
from syncd.daemon.retention import Decision, removable
from syncd.daemon.scan import Scanner
from syncd.daemon.snapshot import Snapshot
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
from syncd.protocol.disk import MISSING, Clock, is_below
from syncd.protocol.layout import Job
from syncd.protocol.leadership import BEAT, Term
from syncd.protocol.mount import CROWDED, MountState, MountTrouble, mount_trouble_of
from syncd.protocol.obstacle import Obstacle, obstacle_to_moving, obstacle_to_reading
from syncd.protocol.owner import check_owner, record_owner
from syncd.protocol.presence import RunningStatus, path_of
from syncd.protocol.process import Process
from syncd.protocol.request import request_path
from syncd.protocol.step import Step, StepState
from syncd.protocol.takeover import Candidate
from syncd.protocol.version import Version

STANDBY_EVERY = 1.0
"""Seconds between two looks of a stand-by at the leader."""

FILLING_EVERY = 0.2
"""Seconds between two looks while a step fills, where events would otherwise be waited for."""

TRASH_EVERY = 5.0

FORGET_AFTER = 86400.0
"""Seconds of silence after which the file of an explorer goes: of those that come and go there would be no end."""

_PROBLEMS = {
    "marker": names.MARKER_REJECTED,
    "version": names.VERSION_FILE_REJECTED,
    "unreadable_presence": names.ENTRY_READ_FAILED,
    "unreadable_directory": names.ENTRY_READ_FAILED,
    "tracker": names.ENTRY_READ_FAILED,
    "obstacle": names.ENTRY_READ_FAILED,
    "document": names.DOCUMENT_REJECTED,
}
_INFO: Level = "info"
_WARNING: Level = "warning"
_RETRY_LEAST, _RETRY_MOST = 0.25, 5.0
_VERIFY_ROUNDS = 8
_REMOVED_AT_ONCE = 8


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
        self._leftovers = Leftovers(job, clock)
        self._term: Term | None = None
        self._actor: Actor | None = None
        self._telling = threading.Lock()
        self._said: set[tuple[str, str]] = set()
        self.error: SyncdError | None = None
        self.trouble: MountTrouble | None = None
        self.standing_by = ""
        self._retry = _RETRY_LEAST
        self._reconciled = self._emptied = self._swept = self._forgot = float("-inf")
        self._leases_known_at = float("-inf")
        self._had_modules = False
        self._obstructed: dict[str, tuple[float, Obstacle]] = {}
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
    def obstacle(self) -> Obstacle | None:
        """Return the first thing that should have been moved or removed and could not be."""
        return next((obstacle for _, obstacle in self._obstructed.values()), None)

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
        self._publish_beat()
        self.on_progress()
        return self._interval()

    def _beat(self) -> None:
        """Show the stand-bys and the service manager that work continues, in the midst of what takes its time.

        On a full disk the work that makes room comes first: what a deposed leader removes, the server refuses anyway.
        """
        try:
            self._publish_beat()
        except MISSING as error:
            # It must not pass for a file that is missing in the step that is being looked at.
            raise storage_error(error, self.job.lock) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        self.on_progress()

    def _publish_beat(self) -> None:
        if self._term is not None:
            self._term.beat(self._scanner.floor)

    @property
    def _is_crowded(self) -> bool:
        return self.trouble is not None and self.trouble.state in CROWDED

    def _look(self, *, woken: bool) -> None:
        started = self._clock.monotonic()
        due = started - self._reconciled >= self.config.reconcile
        if due:
            check_owner(self.job)
        found = self._scanner.reconcile() if due else self._scanner.look(woken=woken)
        self.snapshot = replace(found, crowded=self._is_crowded)
        if due:
            self._reconciled = started
        seconds = self._clock.monotonic() - started
        counts = totals(self.snapshot) if due else {"steps": len(self.snapshot.steps)}
        self.tell(names.SCAN_COMPLETED, "debug", seconds=seconds, full=due, **counts)

    def _act(self, actor: Actor, before: Snapshot) -> None:
        """Publish first, tell then: between marker and version stands nothing that explorers need not wait for."""
        self.plan = self._current_plan()
        self._remove_all(actor, self.plan.first)
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
        self._remove_attempts(actor)
        self._forget(actor)
        self._empty_trash(actor)

    def _answer(self, actor: Actor, answer: Answer) -> None:
        path = request_path(self.job, answer.request.identity)
        is_known = path in self._obstructed
        self._unless_obstructed(path, lambda: actor.answer(answer))
        if is_known:
            return
        name, level = (names.REQUEST_COMPLETED, _INFO) if answer.done else (names.REQUEST_REFUSED, _WARNING)
        self.tell(name, level, kind=answer.request.kind, step=answer.request.step, detail=answer.detail)

    def _unless_obstructed(self, place: str, work: Callable[[], object]) -> None:
        """Change one entry of the job; one that does not let itself be changed is told.

        Args:
            place: The file or directory.
            work: Moves or removes it.
        """
        if not self._may_be_tried(place):
            return
        try:
            work()
        except OSError as error:
            self._note_obstacle(place, error)
        else:
            self._obstructed.pop(place, None)

    def _may_be_tried(self, place: str) -> bool:
        """Say whether an entry is to be changed now: one that could not be waits for the next look at everything."""
        known = self._obstructed.get(place)
        return known is None or known[0] != self._reconciled

    def _note_obstacle(self, place: str, error: OSError) -> None:
        obstacle, known = obstacle_to_moving(error, place), self._obstructed.get(place)
        if obstacle is None:
            raise error
        if known is None or known[1] != obstacle:
            self._tell_obstacle(obstacle)
        self._obstructed[place] = (self._reconciled, obstacle)

    def _tell_obstacle(self, obstacle: Obstacle) -> None:
        self.tell(
            names.ENTRY_MOVE_FAILED,
            "error",
            code=StorageError.code,
            path=obstacle.path,
            detail=f"it cannot be moved or removed: {obstacle.message}",
            owner=obstacle.owner,
            hint=obstacle.hint,
        )

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
            damaged = self._rejected(self.snapshot.steps[version.step], level) if version else None
            if damaged is None:
                return decided
            self.tell(names.STEP_DAMAGED, "error", **describe(damaged))
            self.snapshot = replace(self.snapshot, steps={**self.snapshot.steps, damaged.step: damaged})
            decided = plan(self.snapshot, policy)
        return replace(decided, publish=None, reason="")

    def _rejected(self, step: Step, level: Verify) -> Step | None:
        """Look closely at a step that is to be published; return it as damaged, None when it is good."""
        try:
            # Read twice: what a read returns may be damaged where the file is not.
            wrong = problems_of(self.job, step, level, self._beat) and problems_of(
                self.job, step, level, self._beat
            )
        except OSError as error:
            obstacle = obstacle_to_reading(error, f"{self.job.root}/{step.directory}")
            if obstacle is None or not is_below(obstacle.path, f"{self.job.root}/{step.directory}"):
                raise
            return self._scanner.reject(step, str(obstacle), unread=obstacle.path)
        return self._scanner.reject(step, wrong[0]) if wrong else None

    def _publish(self, actor: Actor, version: Version) -> Version:
        published = actor.publish(version)
        self._scanner.floor = max(self._scanner.floor or published.pair, published.pair)
        self.snapshot = replace(self.snapshot, version=published, floor=self._scanner.floor)
        return published

    def _tell_published(self, version: Version, looked: Snapshot) -> None:
        if self.plan.reason in ("rewind", "rollback", "rewritten") and looked.version:
            before = looked.version.step
            self.tell(
                names.VERSION_REWOUND, "warning", reason=self.plan.reason, step=version.step, before=before
            )
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
        self._remove_all(actor, removable(self.plan.decisions))

    def _remove_all(self, actor: Actor, decisions: Iterable[Decision]) -> None:
        if self._clock.monotonic() < self._leases_known_at:
            return  # explorers whose presences went with the state directory write them again before this
        doomed = [decision for decision in decisions if decision.step in self.snapshot.steps]
        doomed = [decision for decision in doomed if self._may_be_tried(self._place_of(decision))]
        dead = self._dead() if doomed else {}
        for first in range(0, len(doomed), _REMOVED_AT_ONCE):
            self._remove_some(actor, doomed[first : first + _REMOVED_AT_ONCE], dead)

    def _place_of(self, decision: Decision) -> str:
        return f"{self.job.root}/{self.snapshot.steps[decision.step].directory}"

    def _remove_some(self, actor: Actor, decisions: list[Decision], dead: Dead) -> None:
        self._beat()
        steps = self.snapshot.steps
        found = actor.remove([steps[decision.step] for decision in decisions], dead)
        removed = {step for step, outcome in found.items() if outcome == ""}
        self._scanner.forget(removed)
        self.snapshot = replace(
            self.snapshot, steps={number: step for number, step in steps.items() if number not in removed}
        )
        # What failed comes last: an error of the whole file system ends this.
        for decision in sorted(decisions, key=lambda decision: isinstance(found[decision.step], OSError)):
            self._tell_removal(decision, steps[decision.step], found[decision.step])
        self._beat()

    def _tell_removal(self, decision: Decision, step: Step, outcome: str | OSError) -> None:
        place = f"{self.job.root}/{step.directory}"
        if isinstance(outcome, OSError):
            self._note_obstacle(place, outcome)
            return
        self._obstructed.pop(place, None)
        if outcome:
            self._scanner.look_again(step.step)
            self.tell(names.STEP_KEPT, "info", step=step.step, rule="leased", detail=outcome)
            return
        self.tell(
            names.STEP_PRUNED,
            "info",
            step=step.step,
            rule=decision.rule,
            detail=decision.detail,
            bytes=step.size,
        )

    def _remove_attempts(self, actor: Actor) -> None:
        for attempt in self.plan.lost:
            self._beat()
            self._unless_obstructed(
                f"{self.job.root}/{attempt.directory}", partial(self._remove_attempt, actor, attempt)
            )

    def _remove_attempt(self, actor: Actor, attempt: Step) -> None:
        if actor.remove_attempt(attempt):
            self.tell(names.ATTEMPT_PRUNED, _INFO, **describe(attempt), path=attempt.directory)

    def _dead(self) -> Dead:
        """Return the modules whose leases are void, each with its last heartbeat."""
        kinds = ((self.job.explorers, self.snapshot.explorers), (self.job.trainers, self.snapshot.trainers))
        return {
            path_of(directory, name): (module.presence.incarnation, module.presence.beat)
            for directory, modules in kinds
            for name, module in modules.items()
            if not module.alive
        }

    def _forget(self, actor: Actor) -> None:
        """Remove the files of explorers that have gone long ago, after each examination of everything."""
        if self._forgot >= self._reconciled:
            return
        self._forgot = self._reconciled
        for name, module in self.snapshot.explorers.items():
            if module.silent_for >= FORGET_AFTER and not module.presence.problem:
                self._beat()
                last = module.presence.incarnation, module.presence.beat
                path = path_of(self.job.explorers, name)
                self._unless_obstructed(path, partial(actor.forget, name, last))

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

    def _empty(self, actor: Actor, dead: Dead) -> None:
        if self._swept < self._reconciled:
            self._swept = self._reconciled
            actor.sweep(self.config.partial_grace)
        emptied = actor.empty_trash(self.config.trash_grace, dead)
        self.trash_left = emptied.left
        if emptied.entries:
            self.tell(
                names.TRASH_EMPTIED, "info", entries=emptied.entries, files=emptied.files, left=emptied.left
            )

    def _tell_problem(self, event: str, detail: str) -> None:
        if event == names.ENTRY_READ_FAILED:
            self.tell(event, "error", code=StorageError.code, detail=detail)
        else:
            self.tell(event, "warning", detail=detail)

    def _interval(self) -> float:
        """Return when to look again without an event."""
        waits = [BEAT]
        if any(step.state is StepState.FILLING for step in self.snapshot.steps.values()):
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
        if self._is_crowded:
            # The claim found no room. What the terms before have left in their trash is in the way.
            with contextlib.suppress(OSError):
                self._leftovers.empty(self._candidate.free_after, self.config.trash_grace)
        was_removed = self._candidate.found_removed
        term = self._candidate.claim(self._scanner.floor)
        if was_removed:
            self._leases_known_at = self._clock.monotonic() + self.config.ttl
        for directory in (self.job.explorers, self.job.trainers, self.job.pins, self.job.requests):
            self.job.disk.make_directory(directory)
        record_owner(self.job, term)
        self._scanner.start_anew(term.floor)
        self._term, self._actor = term, Actor(self.job, term, self._clock, self._scanner.presences)
        self._reconciled, self.standing_by = float("-inf"), ""
        self.tell(names.LEADERSHIP_ACQUIRED, "info", term=term.token)
        for obstacle in term.left:
            self._tell_obstacle(obstacle)

    def _stand_by(self, why: str) -> None:
        self._term = self._actor = None
        if why != self.standing_by:
            self.tell(names.STANDBY_STARTED, "info", detail=why)
        self.standing_by = why

    def _depose(self, error: FencedError) -> None:
        self._term = self._actor = None
        self.tell(names.LEADERSHIP_LOST, "warning", detail=error.message)

    def _fail(self, error: SyncdError) -> float:
        trouble = mount_trouble_of(error, self.job.root, self._inodes(error))
        if _differs((self.error, self.trouble), (error, trouble)):
            name = names.JOB_DISAPPEARED if isinstance(error, JobMissingError) else names.OPERATION_FAILED
            hint = error.hint or (trouble.hint if trouble else None)
            self._tell_state(trouble)
            self.tell(name, "error", code=error.code, detail=str(error), hint=hint)
        self.error, self.trouble = error, trouble
        if self._is_crowded:
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
            self.tell(names.JOB_RECOVERED, "info", after=str(self.error))
        self.error, self.trouble, self._retry = None, None, _RETRY_LEAST

    def _tell_state(self, trouble: MountTrouble | None) -> None:
        """Tell in which state the file system is now, if that has changed."""
        before = self.trouble.state if self.trouble else MountState.OK
        if trouble is not None and trouble.state is not before:
            self.tell(
                names.MOUNT_STATE_CHANGED,
                "error",
                state=trouble.state,
                detail=trouble.message,
                hint=trouble.hint,
            )
        elif trouble is None and before is not MountState.OK:
            self.tell(names.MOUNT_STATE_CHANGED, "info", state=MountState.OK, detail=f"it was {before}")

    def _say(self, message: Message) -> None:
        self.tell(message.name, message.level, **message.fields)

    def _tell_problems(self) -> None:
        """Tell each problem when it begins, and not again while it lasts."""
        for name, detail in self.plan.problems:
            if (name, detail) not in self._said:
                self._tell_problem(_PROBLEMS.get(name, names.STEP_DAMAGED), detail)
        self._said = set(self.plan.problems)


def _differs(
    before: tuple[SyncdError | None, MountTrouble | None], now: tuple[SyncdError | None, MountTrouble | None]
) -> bool:
    """Say whether an error is news. While a state lasts only the name of a temporary file changes."""
    if before[1] and now[1]:
        return before[1].state is not now[1].state
    return str(before[0]) != str(now[0])
