"""Checks which keys may change between two starts of one job, and records changes: `JOB/changes.json`."""

import getpass
import socket
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from syncd.errors import SyncdError, UsageError
from syncd.jobfile.model import KEYS
from syncd.jobfile.problems import shown
from syncd.protocol.disk import MISSING, Disk
from syncd.protocol.documents import encode, read_document
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.version import read_marker

RECORD = "changes.json"

UNSOUND = {
    "job.seed": "the order of the samples that a resume continues follows from it",
    "model.path": "weights and optimizer come from the checkpoint, which belongs to that model",
    "model.dtype": "the checkpoint holds weights and optimizer in that dtype",
    "model.lora.rank": "the checkpoint holds adapters of that rank",
    "model.lora.targets": "the checkpoint holds adapters of those layers",
    "model.lora.exclude": "the checkpoint holds adapters of those layers",
    "model.lora.adapter": "adapters come from the checkpoint",
    "engine.name": "the checkpoint holds the training state in that engine's format",
    "engine.strategy": "the checkpoint holds the training state in that strategy's format",
    "algorithm.name": "the state of the samples belongs to it; algorithm.advantage and algorithm.loss may change",
    "algorithm.temperature": "experiences that wait were sampled at the old one",
    "critic.enabled": "the checkpoint holds the training state of a critic, or none",
    "critic.path": "the critic's weights come from the checkpoint, which belongs to that model",
    "data.strategy": "the checkpoint holds the state of that strategy",
    "data.group_size": "groups that wait were made with the old size",
    "data.replay.capacity": "the checkpoint holds a buffer of the old size",
    "data.sft_path": "the checkpoint names a place in the old data set",
    "data.sft_ratio": "the checkpoint's state of the samples is with examples, or without",
    "data.max_length": "the checkpoint names a place in the data set as it was cut",
    "sync.interval": "the ages of experiences that wait are counted in it",
    "sync.dtype": "the engines of explorers hold weights of that dtype",
}
"""Keys that no start may change, each with the reason. `--allow-change` lets the other fixed keys change."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A fixed key with different values in the job and in this start."""

    key: str
    kept: Any
    now: Any
    path: str

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.kept)} in {self.path}, {shown(self.now)} now"


def check_allowed(names: Iterable[str]) -> None:
    for name in names:
        if name not in KEYS.all:
            near = KEYS.nearest(name)
            hint = f"did you mean {near}?" if near else "trainer config docs"
            raise UsageError(f"--allow-change {name}: there is no such key", hint=hint)
        if not KEYS.all[name].fixed:
            raise UsageError(f"--allow-change {name}: it may change anyway", hint="leave the option out")
        if name in UNSOUND:
            hint = "pass --trainer.continue_from_checkpoint false for a new directory"
            raise UsageError(f"--allow-change {name}: it cannot change: {UNSOUND[name]}", hint=hint)


def record_changes(disk: Disk, directory: str, contradictions: Sequence[Contradiction]) -> None:
    """Add changes to the record durably; call it before the configuration is replaced, so that none is lost."""
    if not contradictions:
        return
    who = {
        "at": SystemClock().time(),
        "user": _user(),
        "host": socket.gethostname(),
        "step": _step(directory),
    }
    added = [
        {**who, "key": contradiction.key, "old": contradiction.kept, "new": contradiction.now}
        for contradiction in contradictions
    ]
    changes = [*read_changes(disk, directory), *added]
    disk.replace(f"{directory}/{RECORD}", encode({"protocol": 1, "changes": changes}))


def read_changes(disk: Disk, directory: str) -> list[Any]:
    """Return the changes so far, oldest first."""
    try:
        return list(read_document(disk, f"{directory}/{RECORD}").items("changes"))
    except MISSING:
        return []


def split(
    contradictions: Sequence[Contradiction], allowed: Collection[str]
) -> tuple[list[Contradiction], list[Contradiction]]:
    return [contradiction for contradiction in contradictions if contradiction.key in allowed], [
        contradiction for contradiction in contradictions if contradiction.key not in allowed
    ]


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""  # a user id without a name


def _step(directory: str) -> int | None:
    """Return the newest full checkpoint, from which this start resumes."""
    job = Job.at(directory)
    try:
        return read_marker(job.disk, job.tracker).step
    except (OSError, SyncdError):
        return None
