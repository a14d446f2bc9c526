"""What the leader removes besides publishing: steps, attempts, answered requests, old presences, the trash.

`plan` and `retention` decide, `trash` moves and deletes steps; here is the order, and what is reported about it. An
entry that cannot be moved costs only itself: it is reported once and tried again after each full scan.
"""

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from syncd.config import DaemonConfig
from syncd.daemon.differences import describe
from syncd.daemon.leader import DaemonLeader
from syncd.daemon.leases import Beat, Dead
from syncd.daemon.needed_links import NEEDED, Links
from syncd.daemon.plan import Answer, Plan
from syncd.daemon.report import EventReporter
from syncd.daemon.retention import Decision, removable
from syncd.daemon.scan import Scanner
from syncd.daemon.snapshot import Module, Snapshot
from syncd.daemon.trash import Trash
from syncd.errors import SyncdError, unexpected
from syncd.observe import event_names
from syncd.protocol.disk import MISSING, Clock, Disk, exists, is_below, is_temporary, list_if_there
from syncd.protocol.documents import SMALL_LIMIT, read_document
from syncd.protocol.entry_problem import EntryProblem, move_problem
from syncd.protocol.layout import MARKER, TRACKER, Job
from syncd.protocol.leadership import Term
from syncd.protocol.presence import path_of
from syncd.protocol.request import request_path
from syncd.protocol.step import Step

TRASH_EVERY = 5.0

FORGET_AFTER = 86400.0
"""Seconds of silence after which the presence of a dead explorer is removed: new ones come and go without end."""

_BATCH = 8  # steps that are removed, and old presences that are looked at, between two heartbeats
_MARKERS = (f".{MARKER}.", f".{TRACKER}.")  # how the names of the markers' temporary files begin


class Removals:
    """Removes for one leader what a plan says.

    Args:
        leader: Its heartbeat continues during long removals.
        background: Runs slow work that nothing waits for: emptying the trash.
    """

    def __init__(
        self,
        job: Job,
        clock: Clock,
        leader: DaemonLeader,
        scanner: Scanner,
        reporter: EventReporter,
        background: Callable[[Callable[[], None]], None],
    ) -> None:
        self._job, self._clock, self._leader, self._scanner = job, clock, leader, scanner
        self._reporter, self._background = reporter, background
        self._scanned = self._emptied = self._swept = self._forgot = float("-inf")
        self._not_before = float("-inf")
        self._blocked: dict[str, tuple[float, EntryProblem]] = {}
        self._decisions: dict[int, tuple[bool, str]] = {}
        self._noted: tuple[Decision, ...] = ()
        self._left_since: dict[str, float] = {}
        self._searched: Mapping[int, Step] | None = None
        self._broken: set[int] = set()
        self._stuck: Mapping[str, EntryProblem] = {}
        self._failure = ""
        self.trash_left = 0

    @property
    def entry_problem(self) -> EntryProblem | None:
        """Return the first entry that should have been moved or removed and could not be."""
        moves = (entry_problem for _, entry_problem in self._blocked.values())
        return next(iter((*moves, *self._stuck.values())), None)

    def begin_term(self, term: Term) -> None:
        self._term = term
        self._trash = Trash(self._job, term, self._clock, self._scanner.presences)
        self._left_since = {}

    def begin_round(self, scanned: float) -> None:
        """Try again what could not be moved: a full scan has just begun, at `scanned` on this host's clock."""
        self._scanned = scanned

    def rescue_links(self, snapshot: Snapshot, *, again: bool) -> bool:
        """Put back from the trash what steps are stored as changes of; return whether there was anything.

        With `again` look also for what could not be put back before.
        """
        if snapshot.steps is self._searched and not again:
            return False
        self._searched = snapshot.steps
        parents = {number: step.parent for number, step in snapshot.steps.items()}
        lost = {number for number, parent in parents.items() if parent is not None and parent not in parents}
        is_news, self._broken = not lost <= self._broken, lost
        return (is_news or again) and bool(lost) and self._trash.rescue_links(parents)

    def pause(self, seconds: float) -> None:
        """Remove no step for some seconds: the presences were removed with the state directory, and come back."""
        self._not_before = self._clock.monotonic() + seconds

    # --- requests -----------------------------------------------------------------------------------------------

    def answer(self, answer: Answer) -> None:
        """Remove a request that is completed or refused."""
        path = request_path(self._job, answer.request.identity)
        is_known = path in self._blocked
        self._unless_blocked(path, partial(self._term.discard, path))
        if is_known:
            return
        request = answer.request
        fields = {"kind": request.kind, "step": request.step, "detail": answer.detail}
        if answer.done:
            self._reporter.publish(event_names.REQUEST_COMPLETED, "info", **fields)
        else:
            self._reporter.publish(event_names.REQUEST_REFUSED, "warning", **fields)

    # --- steps and attempts -------------------------------------------------------------------------------------

    def prune(self, plan: Plan, snapshot: Snapshot) -> Snapshot:
        if self._noted is not plan.decisions:
            self._noted = plan.decisions
            for decision in self._noted:
                self._note_rule(decision)
        return self.remove_steps(removable(plan.decisions, snapshot.steps), snapshot)

    def remove_steps(self, decisions: Iterable[Decision], snapshot: Snapshot) -> Snapshot:
        """Move steps to the trash, and return the snapshot without them."""
        if self._clock.monotonic() < self._not_before:
            return snapshot
        doomed = [
            decision
            for decision in decisions
            if decision.step in snapshot.steps
            and self._may_be_tried(self._path(snapshot.steps[decision.step]))
        ]
        if not doomed:
            return snapshot
        dead, links = self._dead(snapshot), Links(self._job, snapshot.steps)
        for first in range(0, len(doomed), _BATCH):
            snapshot = self._remove_some(doomed[first : first + _BATCH], dead, links, snapshot)
        return snapshot

    def _remove_some(
        self, decisions: list[Decision], dead: Dead, links: Links, snapshot: Snapshot
    ) -> Snapshot:
        self._leader.progress()
        steps = snapshot.steps
        outcomes = self._trash.remove([steps[decision.step] for decision in decisions], dead, links)
        removed = {step for step, outcome in outcomes.items() if outcome == ""}
        self._scanner.steps.forget(removed)
        # What failed comes last: an error of the whole file system ends this.
        for decision in sorted(
            decisions, key=lambda decision: isinstance(outcomes[decision.step], Exception)
        ):
            self._report_removal(decision, steps[decision.step], outcomes[decision.step])
        self._leader.progress()
        return replace(
            snapshot, steps={number: step for number, step in steps.items() if number not in removed}
        )

    def _report_removal(self, decision: Decision, step: Step, outcome: str | Exception) -> None:
        path = self._path(step)
        if isinstance(outcome, Exception):
            self._note_entry_problem(path, outcome)
            return
        self._blocked.pop(path, None)
        if outcome:
            self._scanner.steps.doubt(step.step)
            rule = "chain" if outcome.endswith(NEEDED) else "leased"
            self._reporter.publish(event_names.STEP_KEPT, "info", step=step.step, rule=rule, detail=outcome)
            return
        fields = {"step": step.step, "rule": decision.rule, "detail": decision.detail, "bytes": step.size}
        self._reporter.publish(event_names.STEP_PRUNED, "info", **fields)

    def _note_rule(self, decision: Decision) -> None:
        """Report why a step is kept whenever the rule that keeps it changes."""
        noted = self._decisions.get(decision.step)
        if decision.keep and noted != (decision.keep, decision.rule):
            fields = {"step": decision.step, "rule": decision.rule, "detail": decision.detail}
            self._reporter.publish(event_names.STEP_KEPT, "debug", **fields)
        self._decisions[decision.step] = (decision.keep, decision.rule)
        if len(self._decisions) > 2 * len(self._noted) + 100:
            self._decisions = {item.step: (item.keep, item.rule) for item in self._noted}

    def remove_attempts(self, lost: Iterable[Step]) -> None:
        """Move the attempts to the trash that will not become their step."""
        for attempt in lost:
            self._leader.progress()
            self._unless_blocked(self._path(attempt), partial(self._remove_attempt, attempt))

    def _remove_attempt(self, attempt: Step) -> None:
        if self._trash.remove_attempt(attempt):
            self._reporter.publish(
                event_names.ATTEMPT_PRUNED, "info", **describe(attempt), path=attempt.directory
            )

    def _path(self, step: Step) -> str:
        return f"{self._job.root}/{step.directory}"

    # --- presences ----------------------------------------------------------------------------------------------

    def forget_explorers(self, snapshot: Snapshot) -> None:
        """Remove the presences of explorers that ended long ago, after each full scan."""
        if self._forgot >= self._scanned:
            return
        self._forgot = self._scanned
        dead = [(name, module) for name, module in snapshot.explorers.items() if not module.alive]
        for place, (name, module) in enumerate(dead):
            if place % _BATCH == 0:
                self._leader.progress()
            if not module.presence.problem:
                path = path_of(self._job.explorers, name)
                self._unless_blocked(path, partial(self._forget_if_old, path, module))

    def _forget_if_old(self, path: str, module: Module) -> None:
        if module.silent_for >= FORGET_AFTER or self._age(path) >= FORGET_AFTER:
            self._forget(path, (module.presence.incarnation, module.presence.beat))

    def _age(self, path: str) -> float:
        """Return for how many seconds a file has not changed, by the clock of its server; 0 if it is not there.

        No daemon may ever lead for a whole day. The date of this leader's heartbeat is that server's too.
        """
        disk = self._job.disk
        with contextlib.suppress(*MISSING):
            return (disk.stat(self._term.record).mtime_ns - disk.stat(path).mtime_ns) / 1e9
        return 0.0

    def _forget(self, path: str, last: Beat) -> None:
        """Remove a presence with this last heartbeat; one that beats again meanwhile gets its file back."""
        disk = self._job.disk
        aside = self._term.set_aside(path)
        if aside is None:
            return
        if _beat_at(disk, aside) != last and not exists(disk, path):
            disk.rename(aside, path)
            return
        with contextlib.suppress(OSError):
            disk.unlink(aside)

    def _dead(self, snapshot: Snapshot) -> Dead:
        kinds = ((self._job.explorers, snapshot.explorers), (self._job.trainers, snapshot.trainers))
        return {
            path_of(directory, name): (module.presence.incarnation, module.presence.beat)
            for directory, modules in kinds
            for name, module in modules.items()
            if not module.alive
        }

    # --- the trash ----------------------------------------------------------------------------------------------

    def empty_trash(self, snapshot: Snapshot, config: DaemonConfig) -> None:
        now = self._clock.monotonic()
        if now - self._emptied < min(TRASH_EVERY, max(config.trash_grace, 0.1)):
            return
        self._emptied = now
        self._background(partial(self._empty, self._trash, config, self._dead(snapshot)))

    def _empty(self, trash: Trash, config: DaemonConfig, dead: Dead) -> None:
        """Sweep and empty; report what nobody thought of, and let it come again. No one else hears this thread."""
        failure = ""
        for work in (
            partial(self._sweep, config.partial_grace),
            partial(self._delete_due, trash, config, dead),
        ):
            try:
                work()
            except OSError:
                continue  # a failing file system shows in the ticks, and this work comes again
            except Exception as error:  # noqa: BLE001
                problem = unexpected(error)
                failure = str(problem)
                if failure != self._failure:
                    self._reporter.publish_failure(problem)
        self._failure = failure

    def _delete_due(self, trash: Trash, config: DaemonConfig, dead: Dead) -> None:
        emptied = trash.empty(config.trash_grace, dead)
        self.trash_left = emptied.left
        if emptied.entries:
            self._reporter.publish(event_names.TRASH_EMPTIED, "info", **emptied._asdict())
        before, stuck = self._stuck, dict[str, EntryProblem]()
        for path, error in trash.stuck.items():
            # A reader on this host may hold a file open, which keeps its directory on NFS: that ends by itself.
            is_open = isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EBUSY)
            if not is_open and (entry_problem := move_problem(error, path)) is not None:
                stuck[path] = entry_problem
                if before.get(path) != entry_problem:
                    self._reporter.publish_entry_problem(entry_problem)
        self._stuck = stuck

    def _sweep(self, grace: float) -> None:
        """Remove the temporary files that writers killed in mid-write have left, once after each full scan.

        Only names that this protocol gives, in places that this protocol writes, and only what has been there for
        `grace` seconds of this clock: what is younger may be about to be renamed.
        """
        if self._swept >= self._scanned:
            return
        self._swept = self._scanned
        there, left = list(self._temporaries()), self._left_since
        now = self._clock.monotonic()  # after the listing: nothing is older than the first look that saw it
        self._left_since = {path: left.get(path, now) for path in there}
        for path, since in self._left_since.items():
            if now - since >= grace:
                with contextlib.suppress(OSError):
                    self._job.disk.unlink(path)

    def _temporaries(self) -> Iterator[str]:
        job = self._job
        for directory in (job.explorers, job.trainers, job.pins, job.requests):
            # The scanner reports a directory that cannot be listed; here only its files are left.
            with contextlib.suppress(PermissionError):
                for entry in list_if_there(job.disk, directory):
                    if entry.kind == "file" and is_temporary(entry.name):
                        yield f"{directory}/{entry.name}"
        if not is_below(job.state, job.root):
            return  # the daemon must not remove files of this job directory
        for entry in list_if_there(job.disk, job.root):
            if entry.kind == "file" and is_temporary(entry.name) and entry.name.startswith(_MARKERS):
                yield f"{job.root}/{entry.name}"

    # --- entries that cannot be moved -----------------------------------------------------------------------------

    def _unless_blocked(self, path: str, work: Callable[[], object]) -> None:
        """Change one entry of the job; report one that cannot be changed."""
        if not self._may_be_tried(path):
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - one entry costs itself only; a fence is raised again
            self._note_entry_problem(path, error)
        else:
            self._blocked.pop(path, None)

    def _may_be_tried(self, path: str) -> bool:
        """Return whether an entry may be changed now: one that could not be waits for the next full scan."""
        noted = self._blocked.get(path)
        return noted is None or noted[0] != self._scanned

    def _note_entry_problem(self, path: str, error: Exception) -> None:
        entry_problem, noted = move_problem(error, path), self._blocked.get(path)
        if entry_problem is None:
            raise error
        if noted is None or noted[1] != entry_problem:
            self._reporter.publish_entry_problem(entry_problem)
        self._blocked[path] = (self._scanned, entry_problem)


def _beat_at(disk: Disk, path: str) -> Beat | None:
    """Return what a presence file that was moved says of its last heartbeat, None where it does not say."""
    try:
        fields = read_document(disk, path, SMALL_LIMIT)
        return fields.text("incarnation", ""), fields.integer("beat")
    except (*MISSING, SyncdError):
        return None
