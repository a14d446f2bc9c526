"""The one interface of monitors.

A monitor is registered under the entry point group `trainer.monitors` as a callable that takes a `MonitoredRun`.
It may raise any exception: `trainer.monitors.several.Monitors`, which the loop uses, logs it and continues.
"""

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from syncd.errors import ConfigError, CorruptDataError
from syncd.protocol.local_disk import LocalDisk
from trainer.plugins import unknown_name


@dataclass(frozen=True, slots=True)
class MonitoredRun:
    """What a monitor knows about the run.

    Args:
        group: The name of the group of runs; may be empty.
        config: The resolved configuration as plain data.
        options: What the configuration has for this kind.
        resumed_from: The step that the run resumes from, 0 at the first start. Later steps may be logged again.
    """

    directory: str
    project: str
    group: str
    name: str
    config: Mapping[str, Any]
    options: Mapping[str, Any]
    resumed_from: int = 0


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """One rollout to look at: texts, or token ids as text where there is no tokenizer."""

    prompt: str
    response: str
    reward: float
    generation: int
    step: int
    group: str
    task: str
    explorer: str


class Monitor(Protocol):
    """Takes figures and rollouts."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step."""

    def log_rollouts(self, rollouts: Sequence[RolloutSample], step: int) -> None:
        """Log rollouts that were trained on."""

    def close(self) -> None:
        """Write out what is left."""


_LENGTH = 32  # characters of an id: a UUID in hex


def monitor_directory(directory: str, kind: str) -> str:
    return os.path.join(directory, "monitors", kind)


def job_identity(directory: str) -> str:
    """Return the job's id for services that ask for one, made by the first call; OSError if that fails."""
    disk, path = LocalDisk(), monitor_directory(directory, "id")
    try:
        identity = disk.read(path, limit=64).decode().strip()
    except (FileNotFoundError, CorruptDataError, UnicodeDecodeError):
        identity = ""
    return identity if _is_id(identity) else _make_identity(disk, path)


def _is_id(text: str) -> bool:
    return len(text) == _LENGTH and text.isalnum()


def _make_identity(disk: LocalDisk, path: str) -> str:
    fresh = uuid.uuid4().hex
    disk.make_directory(os.path.dirname(path))
    disk.replace(path, fresh.encode() + b"\n")
    return fresh


def check_options(options: Mapping[str, Any], types: Mapping[str, type], kind: str) -> None:
    """Check the options of a kind; ConfigError if one is not known, or of another type."""
    for name, value in options.items():
        if name not in types:
            raise unknown_name(f"monitor.options.{kind} has no {name!r}", name, types)
        if type(value) is not types[name]:
            raise ConfigError(f"monitor.options.{kind}.{name} = {value!r} is not a {types[name].__name__}")
