"""Finds the checkpoint that a run resumes from, and rolls back explorers that were ahead of it."""

import structlog

from syncd.client.client import Client
from syncd.errors import CorruptDataError, StorageError, SyncdError, storage_errors
from syncd.protocol.disk import MISSING, Clock, list_if_there
from syncd.protocol.layout import MANIFEST, Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.probe import Probe, read_base_probe
from syncd.protocol.version import parse_marker, read_marker
from trainer.checkpoints import TrainerState, full_checkpoints, read_state
from trainer.waiting import DAEMON

FRESH = TrainerState(step=0, generation=0, world_size=1)  # the state of a run without a checkpoint

_PATIENCE, _PAUSE = 60.0, 1.0  # seconds for which what cannot be read is read again, and between two tries


def find_state(job: Job, clock: Clock | None = None) -> TrainerState:
    """Return the loop's state of the checkpoint to resume from: the tracker's, or an older one if that is damaged.

    Raises:
        CorruptDataError: There are checkpoints, and none is whole.
        StorageError: The storage refuses to say; nothing is given up for that.
    """
    clock = clock or SystemClock()
    end = clock.monotonic() + _PATIENCE
    while True:
        try:
            with storage_errors(job.root):
                return _newest_state(job)
        except StorageError as error:
            if clock.monotonic() >= end:
                raise
            structlog.get_logger().warning("checkpoint_unreadable", reason=str(error))
            clock.sleep(_PAUSE)


def _newest_state(job: Job) -> TrainerState:
    named, steps = _tracked(job), full_checkpoints(job)
    # Steps above the tracker were rolled back, or the run was killed before the tracker was written.
    candidates = [step for step in steps if named is None or step <= named]
    for step in reversed(candidates):
        try:
            return read_state(job, step)
        except SyncdError as error:
            if isinstance(error, StorageError) and not isinstance(error.__cause__, MISSING):
                raise
            structlog.get_logger().warning("checkpoint_skipped", step=step, reason=str(error))
    if candidates or named:
        raise CorruptDataError(
            "no full checkpoint is complete",
            path=job.root,
            hint=f"syncd ls {job.root}, or --trainer.continue_from_checkpoint false for a new directory",
        )
    return FRESH


def roll_back_explorers(client: Client, step: int, base: str) -> None:
    """Roll back explorers that are ahead of the step; the generation grows. Step 0 has the weights of `base`."""
    job = client.job
    marker = read_marker(job.disk, job.marker).step
    if marker is None or marker <= step:
        return
    structlog.get_logger().info("marker_rewound", marker=marker, step=step)
    sealed = MANIFEST in {entry.name for entry in list_if_there(job.disk, job.step(step))}
    if sealed:
        client.publish(None, step, rewind=True)
    else:
        client.publish(base, step, rewind=True, probe=_baseline(job))
    what = f"waiting for step {step} to be published again"
    client.wait_for(
        lambda: (version := client.latest_version()) is not None and version.step == step, DAEMON, what
    )


def _baseline(job: Job) -> Probe | None:
    try:
        return read_base_probe(job)
    except CorruptDataError:
        return None


def _tracked(job: Job) -> int | None:
    try:
        return parse_marker(job.disk.read(job.tracker, 4096)).step
    except (*MISSING, CorruptDataError):
        return None
