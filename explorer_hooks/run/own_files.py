"""The files that an explorer keeps in JOB/explorers/<identity>/: which tasks are done, and records of its work.

Each group is written once. Before a batch is written, state.json names two positions in the tasks: the one without
the batch, and the one once the batch is visible, with the batch's number. Numbers of batches are never used again, so
a restart sees from the next free number whether the batch was written, whenever the process was killed.
"""

import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import structlog

from explorer_hooks.run.weight_sources import storage_errors_pass
from syncd import jsonl
from syncd.client.client import Client
from syncd.errors import ConfigError, UsageError, storage_errors
from syncd.experience.model import Experience
from syncd.experience.table import encode_batch
from syncd.experience.writer import ExperienceWriter
from syncd.protocol.disk import MISSING, Disk
from syncd.protocol.documents import encode, read_document, record_from
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk

Key = TypeVar("Key")
KeyedGroup = tuple[Key, Sequence[Experience]]
"""The rows of a group, and what names it."""
EncodedPart = tuple[Sequence[KeyedGroup[Key]], bytes | UsageError]
"""Groups with the bytes of their batch, or of one group why it alone is too large."""

STATE, METRICS, EVALUATIONS = "state.json", "metrics.jsonl", "evaluations.jsonl"
"""How far the tasks are done; a line for each batch; a line for each evaluation."""


def own_path(job: Job, explorer: str, name: str) -> str:
    return f"{job.root}/explorers/{explorer}/{name}"


class Records:
    """A file of JSON lines to which one process appends."""

    def __init__(self, path: str, disk: Disk | None = None) -> None:
        self.path, self._disk = path, disk or LocalDisk()
        with storage_errors(path):
            self._disk.make_directory(os.path.dirname(os.path.abspath(path)))

    @classmethod
    def own(cls, job: Job, explorer: str, name: str) -> "Records":
        return cls(own_path(job, explorer, name), job.disk)

    def add(self, record: Mapping[str, Any]) -> None:
        with storage_errors(self.path):
            jsonl.append(self.path, [record], self._disk.adopt)

    def all(self) -> list[dict[str, Any]]:
        """Return the records, without a line that a killed process left incomplete."""
        try:
            return [record for record in jsonl.read(self.path) if record is not None]
        except FileNotFoundError:
            return []


def batch_figures(rewards: Sequence[float], tokens: int, seconds: float) -> dict[str, Any]:
    return {
        "at": time.time(),
        "rollouts": len(rewards),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "rollouts_per_s": round(len(rewards) / max(seconds, 1e-6), 3),
        "tokens_per_s": round(tokens / max(seconds, 1e-6), 3),
        "reward_mean": sum(rewards) / len(rewards),
    }


def record_batch(metrics: Records, client: Client, path: str, line: Mapping[str, Any]) -> None:
    metrics.add(line)
    shown = {key: value for key, value in line.items() if key != "at"}
    with storage_errors_pass():
        client.describe({"explorer": shown}, now=False)
    structlog.get_logger().info("batch_written", path=path, **shown)


def encoded_parts(groups: Sequence[KeyedGroup[Key]]) -> Iterator[EncodedPart[Key]]:
    """Yield groups with the bytes of their batch: all of them, or halves where that would be too large."""
    try:
        encoded: bytes | UsageError = encode_batch([row for _, rows in groups for row in rows])
    except UsageError as error:
        if len(groups) > 1:
            hint = "a smaller explorer.groups"
            structlog.get_logger().warning("batch_split", groups=len(groups), problem=str(error), hint=hint)
            half = len(groups) // 2
            yield from encoded_parts(groups[:half])
            yield from encoded_parts(groups[half:])
            return
        encoded = error
    yield groups, encoded


@dataclass(frozen=True, slots=True)
class TaskCursor:
    epoch: int  # the epoch, from 0
    position: int  # the index in its order of the next task
    batches: int  # batches written before this position

    def behind(self, epoch: int, position: int, *, batch: bool) -> "TaskCursor":
        return TaskCursor(epoch, position + 1, self.batches + batch)

    @property
    def seed_text(self) -> str:
        """Return the part of a seed that is new at each position; any change of this text changes all draws."""
        return f"Cursor(epoch={self.epoch}, position={self.position}, batches={self.batches})"


_START = TaskCursor(0, 0, 0)


@dataclass(frozen=True, slots=True)
class LedgerState:
    run: str  # keeps ids of groups apart from those of any other run of this identity
    tasks: str  # the digest of the tasks
    seed: str  # the seed of their order
    cursor: TaskCursor = _START  # the position unless batch `pending` exists
    pending: int = 0  # the number of the batch that is being written; 0 for none
    then: TaskCursor = _START  # the position once that batch exists

    def resumed(self, upcoming: int) -> "LedgerState":
        """Return the state of a restarted explorer whose next batch would have this number."""
        if 0 < self.pending < upcoming:
            return replace(self, cursor=self.then, pending=0)
        return replace(self, pending=0)


class TaskLedger:
    """Writes batches together with the position in the tasks behind them."""

    def __init__(self, writer: ExperienceWriter, state: LedgerState) -> None:
        self.writer, self.state = writer, state
        self._path = own_path(writer.job, writer.explorer, STATE)

    @classmethod
    def open(cls, writer: ExperienceWriter, tasks: str, seed: str) -> "TaskLedger":
        """Return the ledger of an explorer, at the position where an earlier process of its identity stopped."""
        path = own_path(writer.job, writer.explorer, STATE)
        try:
            fields = read_document(writer.job.disk, path)
            state = record_from(LedgerState, fields, "cursor", "pending", "then").resumed(writer.upcoming)
        except MISSING:
            state = LedgerState(uuid.uuid4().hex[:8], tasks, seed)
        if (state.tasks, state.seed) != (tasks, seed):
            what = "the tasks have changed" if state.tasks != tasks else "the order of the tasks has changed"
            raise ConfigError(
                f"{what} since explorer {writer.explorer} began",
                path=path,
                hint=f"give another --name, or start over: rm {path}",
            )
        return cls(writer, state)

    @property
    def cursor(self) -> TaskCursor:
        return self.state.cursor

    def group(self, epoch: int, position: int) -> str:
        """Return the id of a task's group, unique in the job."""
        return f"{self.writer.explorer}-{self.state.run}/{epoch}.{position}"

    def write(self, encoded: bytes, then: TaskCursor, *, is_rest: bool = False) -> str:
        """Write a batch, or the rest of one, durably, advance the cursor, and return the batch's path."""
        self._save(replace(self.state, pending=self.writer.upcoming, then=then))
        path = self.writer.write_encoded(encoded, is_rest=is_rest)
        self.state = replace(self.state, cursor=then)
        return path

    def move(self, cursor: TaskCursor) -> None:
        """Advance the cursor without a batch: none of these tasks could be used."""
        moved = replace(self.state, cursor=cursor)
        self._save(moved)
        self.state = moved

    def _save(self, state: LedgerState) -> None:
        self.writer.replace(self._path, encode(asdict(state)))
