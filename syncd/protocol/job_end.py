"""`JOB/finished.json`: the end of a job.

A trainer that has reached `total_steps`, or the last epoch of its data set, leaves it once its last full checkpoint
is durable, and a later start removes it before it trains. If the trainer was killed in between, the newest full
checkpoint shows the end. Presence files do not show it: a killed trainer cannot update its own.
"""

import contextlib
from dataclasses import asdict, dataclass

from syncd.errors import SyncdError
from syncd.protocol.disk import MISSING
from syncd.protocol.documents import encode, read_document, record_from
from syncd.protocol.layout import CONFIG, Job
from syncd.protocol.permissions import parse_config
from syncd.protocol.version import Pair, read_marker

FINISHED = "finished.json"
LAST = 30.0  # seconds in which a restarting engine may still load the last version, and a daemon publish it
_CONFIG_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class JobEnd:
    step: int  # its last step
    reason: str  # why it ended


class LastVersion:
    """Waits, for `LAST` seconds, for the version of a finished job's last step: it may still be on its way."""

    def __init__(self) -> None:
        self._ended_at: float | None = None  # when the job was first seen to have finished

    def has_come(self, end: JobEnd | None, newest: Pair | None, now: float) -> bool:
        """Return whether a job has ended and its last version is there or given up; `now` is of a monotonic clock."""
        if end is None:
            self._ended_at = None
            return False
        if self._ended_at is None:
            self._ended_at = now
        is_there = newest is not None and newest[1] >= end.step
        return is_there or now - self._ended_at >= LAST


def mark_finished(job: Job, end: JobEnd) -> None:
    """Mark the job as finished, durably."""
    job.disk.replace(f"{job.root}/{FINISHED}", encode(asdict(end)))


def clear_finished(job: Job) -> None:
    """Remove the mark of an earlier end: training continues."""
    with contextlib.suppress(*MISSING):
        job.disk.unlink(f"{job.root}/{FINISHED}")


def read_end(job: Job) -> JobEnd | None:
    """Return the end of a job, None if it has not finished or its end cannot be read."""
    return _marked_end(job) or _checkpointed_end(job)


def _marked_end(job: Job) -> JobEnd | None:
    try:
        return record_from(JobEnd, read_document(job.disk, f"{job.root}/{FINISHED}"))
    except (OSError, SyncdError):
        return None


def _checkpointed_end(job: Job) -> JobEnd | None:
    """Return the end that the newest full checkpoint shows, by the `total_steps` of the last start."""
    try:
        path = f"{job.root}/{CONFIG}"
        trainer = parse_config(job.disk.read(path, _CONFIG_LIMIT), path).get("trainer")
        total = trainer.get("total_steps") if isinstance(trainer, dict) else None
        step = read_marker(job.disk, job.tracker).step
    except (OSError, SyncdError):
        return None
    if type(total) is not int or step is None or step < total:
        return None
    return JobEnd(step, f"total_steps {total} reached")
