"""Follows the job and writes whole groups, while the gateway answers in another thread."""

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from explorer_hooks.parts.agents.gateway import Gateway
from explorer_hooks.parts.agents.http_thread import HttpThread
from explorer_hooks.parts.agents.progress import RolloutProgress
from explorer_hooks.parts.agents.rows import added_times, experiences_of
from explorer_hooks.parts.agents.run_record import GatewayRun
from explorer_hooks.parts.agents.sessions import EQUAL, SessionGroup
from explorer_hooks.run.curriculum import TaskMean, are_equal, with_dropped
from explorer_hooks.run.engine_gate import EngineGate, EngineVersions
from explorer_hooks.run.held_out import VersionWatcher
from explorer_hooks.run.job_watch import JobWatch
from explorer_hooks.run.open_explorer import FollowedEngine
from explorer_hooks.run.own_files import (
    METRICS,
    KeyedGroup,
    Records,
    batch_figures,
    encoded_parts,
    record_batch,
)
from explorer_hooks.run.tokens import Tokens
from explorer_hooks.stopping import Stop
from explorer_hooks.tasks.order import set_figures
from syncd.client.sync_policy import SyncStyle
from syncd.errors import SyncdError, UsageError
from syncd.experience.model import Experience
from syncd.experience.table import rollouts
from syncd.experience.writer import ExperienceWriter
from syncd.protocol.version import label_of

_TURN = 0.25  # seconds of one wait for a version, and so the longest delay of a batch
_IDLE = 5.0  # seconds between two looks for groups of which nothing was heard

_LOG = structlog.get_logger()


class GroupDemand:
    """How many groups the trainer needs now. The service sets it, and the gateway's thread reads it."""

    groups = 0

    def allows(self, open_groups: int) -> bool:
        return open_groups < self.groups


class Play(Protocol):
    """What plays sessions beside the service, if something does."""

    failure: SyncdError | None
    """Why it cannot go on."""

    def is_over(self) -> bool:
        """Return whether all has been played."""

    @property
    def skipped(self) -> int:
        """Return how many tasks the curriculum left out."""

    def measured(self, rewards: Sequence[TaskMean]) -> None:
        """Record the mean rewards of groups."""


@dataclass(frozen=True, slots=True)
class GatewayParts:
    followed: FollowedEngine  # the engine, which follows the job
    tokens: Tokens  # the model's tokenizer
    versions: EngineVersions  # which version it runs
    demand: GroupDemand  # set to how many groups the trainer needs
    writer: ExperienceWriter  # writes batches
    run: GatewayRun  # names what this gateway writes
    gateway: Gateway  # what it has recorded
    http: HttpThread  # the thread that the gateway runs in
    stop: Stop  # once it returns true, the service ends


class GatewayService:
    """Follows the job and writes whole groups; `evaluation`, if any, measures versions as they are loaded."""

    def __init__(self, parts: GatewayParts, evaluation: VersionWatcher | None = None) -> None:
        writer = parts.writer
        self._versions, self._demand, self._writer, self._run = (
            parts.versions,
            parts.demand,
            writer,
            parts.run,
        )
        self._gateway, self._http, self._stop = parts.gateway, parts.http, parts.stop
        self._file, self._source = parts.followed.file, parts.followed.source
        self._gate = EngineGate(parts.versions, evaluation, self._file.sync, parts.stop)
        self._metrics = Records.own(writer.job, writer.explorer, METRICS)
        self._began = self._looked_at = time.monotonic()
        self._evaluates = evaluation is not None
        self._play: Play | None = None
        rollouts = self._file.explorer_groups * self._file.data.group_size
        self._progress = RolloutProgress(parts.gateway, parts.http, rollouts)
        self._equal_dropped = self._skipped_before = 0

    def run(self, play: Play | None = None) -> str:
        """Follow the job and write groups, and return why that ended; `play` is None if others play sessions."""
        self._play = play
        watch = JobWatch(self._source, self._file.sync.timeout)
        self._gate.update(0.0)
        while not (reason := self._reason_to_end(watch)):
            failure = self._gateway.failure or (play.failure if play is not None else None)
            if failure is not None:
                raise failure
            if not self._versions.is_ready():
                self._gate.wait_until_usable()
            self._measure_room()
            self._gate.update(_TURN, ask=self._asks())
            self._gate.evaluate()
            self._versions.renew_allowance(self._file.explorer.patience)
            is_over = play is not None and play.is_over()
            self._write(self._file.explorer_groups)
            self._run.note(len(self._gateway.sessions.groups))
            if is_over and not self._write(1):
                reason = "all tasks are done"
                break
            self._drop_idle()
            if play is not None:
                self._progress.show()
        if self._evaluates:
            self._gate.finish()
        return reason

    def _drop_idle(self) -> None:
        if time.monotonic() - self._looked_at > _IDLE:
            self._looked_at = time.monotonic()
            self._http.call(self._gateway.drop_idle())

    def _asks(self) -> bool:
        """Return whether the trainer is asked for a version: none is needed while groups may begin."""
        is_full = not self._demand.allows(len(self._gateway.sessions.groups))
        return is_full and self._file.sync.style is SyncStyle.EXPLORER_DRIVEN

    def _measure_room(self) -> None:
        self._demand.groups = self._versions.room() * self._file.explorer_groups

    def _reason_to_end(self, watch: JobWatch) -> str:
        if self._stop():
            return "told to stop"
        most = self._file.explorer.max_batches
        if most is not None and self._writer.written >= most:
            return "max_batches"
        return watch.reason()

    def _write(self, least: int) -> bool:
        """Write a batch if there are so many whole groups, drop unusable ones, and return whether there were."""
        groups = self._http.call(
            self._gateway.whole_groups(least, self._file.explorer_groups, self._source.unproven)
        )
        equal = [group for group in groups if are_equal(group.rewards)]
        if equal and self._drop_equal(equal):
            return True
        made = [(group, self._rows(group)) for group in groups]
        unusable = [group.name for group, rows in made if not rows]
        self._drop(unusable, "experience")
        if unusable or not made:
            return bool(groups)
        if self._source.are_published({pair for _, rows in made for row in rows for pair in row.versions}):
            self._write_groups(made)
        else:
            self._drop([group.name for group in groups], "unpublished")
        return True

    def _write_groups(self, groups: Sequence[KeyedGroup[SessionGroup]]) -> None:
        """Write groups, in several files if one would be too large; drop one that alone is too large."""
        dropped, path = self._gateway.sessions.dropped[EQUAL], ""
        written: list[KeyedGroup[SessionGroup]] = []
        for part, encoded in encoded_parts(with_dropped(groups, dropped, self._file.explorer.reward)):
            names = [group.name for group, _ in part]
            if isinstance(encoded, UsageError):
                _LOG.warning("group_unusable", group=names[0], problem=str(encoded))
                self._drop(names, "experience")
            elif self._http.call(self._gateway.begin_batch(self._writer.upcoming, names)):
                path = self._writer.write_encoded(encoded, is_rest=bool(path))
                written += part
        if written:
            self._end_batch(path, written)

    def _end_batch(self, path: str, written: Sequence[KeyedGroup[SessionGroup]]) -> None:
        groups = [group for group, _ in written]
        self._measure_room()
        self._measured(groups)
        self._equal_dropped = 0
        figures = self._http.call(self._gateway.end_batch([group.name for group in groups]))
        self._record(path, [row for _, rows in written for row in rows], figures, groups)

    def _drop_equal(self, groups: Sequence[SessionGroup]) -> bool:
        """Drop groups of equal rewards, as many as may be dropped for one batch; return whether any was."""
        reward = self._file.explorer.reward
        most = reward.most_equal * self._file.explorer_groups if reward.equal_groups == "drop" else 0
        chosen = groups[: max(most - self._equal_dropped, 0)]
        self._equal_dropped += len(chosen)
        self._drop([group.name for group in chosen], EQUAL)
        self._measured(chosen)
        return bool(chosen)

    def _measured(self, groups: Iterable[SessionGroup]) -> None:
        if self._play is not None:
            self._play.measured([(group.task, statistics.fmean(group.rewards)) for group in groups])

    def _drop(self, groups: Iterable[str], why: str) -> None:
        for name in groups:
            self._http.call(self._gateway.drop(name, why))

    def _rows(self, group: SessionGroup) -> list[Experience]:
        try:
            name, segments = self._run.group(group.name), self._gateway.limits.segments
            return experiences_of(group, name, time.time(), segments)
        except UsageError as error:
            _LOG.warning("group_unusable", group=group.name, problem=str(error))
            return []

    def _task_sets(self, groups: Sequence[SessionGroup]) -> dict[str, dict[str, float]]:
        rewards: dict[str, list[float]] = {}
        for group in groups if len(self._file.explorer.training_sets) > 1 else ():
            # The ids of several sets begin with the set's name.
            rewards.setdefault(group.task.partition("/")[0], []).append(statistics.fmean(group.rewards))
        return set_figures(rewards)

    def _skipped(self) -> int:
        before, self._skipped_before = (
            self._skipped_before,
            self._play.skipped if self._play is not None else 0,
        )
        return self._skipped_before - before

    def _record(
        self,
        path: str,
        batch: Sequence[Experience],
        figures: dict[str, dict[str, int]],
        groups: Sequence[SessionGroup],
    ) -> None:
        seconds, self._began = time.monotonic() - self._began, time.monotonic()
        segments = list(rollouts(batch))
        firsts = [rows[0] for rows in segments]
        oldest = [min(min(row.versions) for row in rows) for rows in segments]
        tokens = sum(sum(row.action_mask) for row in batch)
        line = {
            "batch": self._writer.written,
            **batch_figures([row.reward for row in firsts], tokens, seconds),
            "segments": len(batch),
            "versions": dict(Counter(map(label_of, oldest))),
            "untrained_turns": sum(row.info.get("untrained_turns", 0) for row in batch),
            "unproven_tokens": sum(row.doubted for row in batch),
            "tools": _tools(firsts),
            "equal_groups": sum(are_equal(group.rewards) for group in groups),
            "skipped": self._skipped(),
            "task_sets": self._task_sets(groups),
            **figures,
        }
        self._progress.restart()
        self._run.note(len(self._gateway.sessions.groups), now=True)
        record_batch(self._metrics, self._source.client, path, line)


def _tools(rollouts: Sequence[Experience]) -> dict[str, dict[str, float]]:
    """Return of each tool how often its time is known, and its mean in seconds."""
    times = added_times(item for row in rollouts for item in row.info.get("tools", {}).items())
    return {
        name: {"calls": count, "seconds": round(seconds / count, 6)}
        for name, (count, seconds) in times.items()
    }
