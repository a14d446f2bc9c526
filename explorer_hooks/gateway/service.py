"""Follows the job and writes whole groups, while the gateway answers in another thread."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from explorer_hooks.explorer.engine_gate import EngineGate, EngineVersions
from explorer_hooks.explorer.job_watch import JobWatch
from explorer_hooks.explorer.opening import FollowedEngine
from explorer_hooks.explorer.own_files import METRICS, Records, own_path
from explorer_hooks.gateway.gateway import Gateway
from explorer_hooks.gateway.http_thread import HttpThread
from explorer_hooks.gateway.rows import experiences_of
from explorer_hooks.gateway.run_record import GatewayRun
from explorer_hooks.gateway.sessions import SessionGroup
from explorer_hooks.stopping import Stop
from syncd.client.sync_policy import SyncStyle
from syncd.errors import SyncdError, UsageError
from syncd.experience.model import Experience
from syncd.experience.writer import ExperienceWriter
from syncd.protocol.version import label_of

_TURN = 0.25
"""Seconds of one wait for a version, and so the longest delay of a batch."""

_IDLE = 5.0
"""Seconds between two looks for groups of which nothing was heard."""

_LOG = structlog.get_logger()


class Room:
    """How many groups the trainer needs now. The service sets it, and the gateway's thread reads it."""

    groups = 0

    def has(self, open_groups: int) -> bool:
        """Return whether another group may begin besides those that are open."""
        return open_groups < self.groups


class Play(Protocol):
    """What plays sessions beside the service, if something does."""

    failure: SyncdError | None
    """Why it cannot go on."""

    def is_over(self) -> bool:
        """Return whether all has been played."""


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """What a service consists of.

    Args:
        followed: The engine, which follows the job.
        versions: Which version it runs.
        room: Set to how many groups the trainer needs.
        writer: Writes batches.
        run: Names what this gateway writes.
        gateway: What it has recorded.
        http: The thread that the gateway runs in.
        stop: Once it returns true, the service ends.
    """

    followed: FollowedEngine
    versions: EngineVersions
    room: Room
    writer: ExperienceWriter
    run: GatewayRun
    gateway: Gateway
    http: HttpThread
    stop: Stop


class GatewayService:
    """Follows the job and writes whole groups.

    Args:
        parts: What it consists of.
    """

    def __init__(self, parts: GatewayParts) -> None:
        writer = parts.writer
        self._versions, self._room, self._writer, self._run = parts.versions, parts.room, writer, parts.run
        self._gateway, self._http, self._stop = parts.gateway, parts.http, parts.stop
        self._file, self._source = parts.followed.file, parts.followed.source
        self._gate = EngineGate(parts.versions, None, self._file.sync, parts.stop)
        self._metrics = Records(own_path(writer.job, writer.explorer, METRICS), writer.job.disk)
        self._began = self._looked_at = time.monotonic()

    def run(self, play: Play | None = None) -> str:
        """Follow the job and write groups, and return why that ended.

        Args:
            play: What plays sessions; None if others do.

        Raises:
            SyncdError: The engine is dead, no trainer came, or nothing can be recorded or written.
        """
        watch = JobWatch(self._source, self._file.sync.timeout)
        self._gate.update(0.0)
        while not (reason := self._reason_to_end(watch)):
            failure = self._gateway.failure or (play.failure if play is not None else None)
            if failure is not None:
                raise failure
            if not self._versions.is_ready():
                self._gate.wait_until_usable()
            self._measure_room()
            self._versions.update(_TURN, ask=self._asks())
            self._renew_allowance()
            is_over = play is not None and play.is_over()
            self._write(self._file.groups)
            if is_over and not self._write(1):
                return "all tasks are done"
            self._drop_idle()
        return reason

    def _drop_idle(self) -> None:
        if time.monotonic() - self._looked_at > _IDLE:
            self._looked_at = time.monotonic()
            self._http.call(self._gateway.drop_idle())

    def _asks(self) -> bool:
        """Return whether the trainer is asked for a version: none is needed while groups may begin."""
        is_full = not self._room.has(len(self._gateway.sessions.groups))
        return is_full and self._file.sync.style is SyncStyle.EXPLORER_DRIVEN

    def _measure_room(self) -> None:
        self._room.groups = self._versions.room() * self._file.groups

    def _reason_to_end(self, watch: JobWatch) -> str:
        if self._stop():
            return "told to stop"
        most = self._file.explorer.max_batches
        if most is not None and self._writer.upcoming > most:
            return "max_batches"
        return watch.reason()

    def _renew_allowance(self) -> None:
        """Allow further batches: a living trainer that publishes no version dropped some, and waits for others."""
        if time.monotonic() - self._versions.progressed_at > self._file.explorer.patience:
            self._versions.progressed_at = time.monotonic()
            self._versions.restart_allowance()

    def _write(self, least: int) -> bool:
        """Write a batch if there are so many whole groups, and return whether there were.

        Groups that cannot be written are dropped.
        """
        groups = self._http.call(self._gateway.whole_groups(least, self._file.groups))
        found = {group.name: self._rows(group) for group in groups}
        self._drop([name for name, rows in found.items() if not rows], "experience")
        batch = [row for rows in found.values() for row in rows]
        if not batch or not all(found.values()):
            return bool(groups)
        if not self._source.are_published(set().union(*(row.versions for row in batch))):
            self._drop(found, "unpublished")
            return True
        self._http.call(self._gateway.begin_batch(self._writer.upcoming, list(found)))
        try:
            path = self._writer.write(batch)
        except UsageError as error:
            _LOG.warning("batch_unusable", groups=list(found), problem=str(error))
            self._http.call(self._gateway.end_batch([]))
            self._drop(found, "experience")
            return True
        self._measure_room()
        self._record(path, batch, self._http.call(self._gateway.end_batch(list(found))))
        return True

    def _drop(self, groups: Iterable[str], why: str) -> None:
        for name in groups:
            self._http.call(self._gateway.drop(name, why))

    def _rows(self, group: SessionGroup) -> list[Experience]:
        """Return the rows of a group, none if one of them cannot be stored."""
        try:
            return experiences_of(group, self._run.group(group.name), time.time())
        except UsageError as error:
            _LOG.warning("group_unusable", group=group.name, problem=str(error))
            return []

    def _record(self, path: str, batch: Sequence[Experience], dropped: dict[str, int]) -> None:
        seconds, self._began = time.monotonic() - self._began, time.monotonic()
        rollouts = [row for row in batch if row.segment == 0]
        tokens = sum(sum(row.action_mask) for row in batch)
        line: dict[str, Any] = {
            "batch": self._writer.upcoming - 1,
            "at": time.time(),
            "rollouts": len(rollouts),
            "segments": len(batch),
            "tokens": tokens,
            "seconds": round(seconds, 3),
            "rollouts_per_s": round(len(rollouts) / max(seconds, 1e-6), 3),
            "tokens_per_s": round(tokens / max(seconds, 1e-6), 3),
            "reward_mean": sum(row.reward for row in rollouts) / len(rollouts),
            "versions": dict(Counter(label_of((row.generation, row.step)) for row in rollouts)),
            "unproven_tokens": sum(sum(row.unproven or ()) for row in batch),
            "dropped": dropped,
        }
        self._metrics.add(line)
        shown = {key: value for key, value in line.items() if key != "at"}
        self._source.sync.describe({"explorer": shown}, now=False)
        _LOG.info("batch_written", path=path, **shown)
