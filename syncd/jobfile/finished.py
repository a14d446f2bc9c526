"""Whether a job has reached what it was started for: `JOB/finished.json`, or the progress that its files show.

A trainer that has reached `total_steps`, or the last epoch of its data set, leaves the document behind once its last
full checkpoint is durable, and a later start removes it before it trains. If the trainer was killed in between, the
newest full checkpoint shows the end. Presence files say nothing of this: a killed trainer's stays as it was.
"""

import contextlib
from dataclasses import dataclass

from syncd.errors import SyncdError
from syncd.protocol.disk import MISSING
from syncd.protocol.documents import encode, read_document
from syncd.protocol.layout import CONFIG, Job, read_config_file
from syncd.protocol.marker import read_marker
from syncd.protocol.permissions import parse_config

FINISHED = "finished.json"


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a job.

    Args:
        step: Its last step.
        reason: What it has reached.
    """

    step: int
    reason: str


def mark_finished(job: Job, end: Finished) -> None:
    """Mark the job as finished, durably.

    Raises:
        OSError: It cannot be written.
    """
    document = {"protocol": 1, "step": end.step, "reason": end.reason}
    job.disk.replace(f"{job.root}/{FINISHED}", encode(document))


def clear_finished(job: Job) -> None:
    """Remove the mark of an earlier end: training continues.

    Raises:
        OSError: It cannot be removed.
    """
    with contextlib.suppress(*MISSING):
        job.disk.unlink(f"{job.root}/{FINISHED}")


def finished(job: Job) -> Finished | None:
    """Return the end of a job, None while it has not finished or where that cannot be read."""
    return _told(job) or _shown(job)


def _told(job: Job) -> Finished | None:
    try:
        fields = read_document(job.disk, f"{job.root}/{FINISHED}")
        return Finished(fields.integer("step"), fields.text("reason"))
    except (OSError, SyncdError):
        return None


def _shown(job: Job) -> Finished | None:
    """Return the end that the newest full checkpoint shows, by the `total_steps` of the last start."""
    try:
        path = f"{job.root}/{CONFIG}"
        trainer = parse_config(read_config_file(path), path).get("trainer")
        total = trainer.get("total_steps") if isinstance(trainer, dict) else None
        step = read_marker(job.disk, job.tracker).step
    except (OSError, SyncdError):
        return None
    if type(total) is not int or step is None or step < total:
        return None
    return Finished(step, f"total_steps {total} reached")
