"""How far explorers may run ahead of the trainer, and what an explorer does next. Pure but for counting batches."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from syncd.client.sync_policy import SyncStyle, explorer_needs_sync
from syncd.experience import batch_paths
from syncd.jobfile.model import JobFile
from syncd.protocol.layout import Job


@dataclass(frozen=True, slots=True)
class Allowance:
    """How many batches the explorers of a job may have written together, counted from some moment."""

    step: int  # the published step at that moment
    written: int  # the batches at that moment
    batches: float  # batches that the trainer takes a step
    ahead: int  # steps for which batches may wait, besides the next one

    def room(self, step: int, written: int) -> int:
        allowed = (step - self.step + 1 + self.ahead) * self.batches
        return max(math.ceil(allowed - (written - self.written)), 0)

    def restarted(self, step: int, written: int) -> "Allowance":
        return replace(self, step=step, written=written)


Next = Literal["end", "engine", "sync", "wait", "work"]
"""What an explorer does next. engine: bring the engine to a version with which work may be done; sync: wait for the
version that is due; wait: for room, and load a version that appears meanwhile."""


def decide(*, is_over: bool, is_ready: bool, is_due: bool, has_room: bool) -> Next:
    if is_over:
        return "end"
    if not is_ready:
        return "engine"
    if is_due:
        return "sync"
    return "work" if has_room else "wait"


def sync_is_due(style: SyncStyle, batches: int, synced_at: int, interval: int, offset: int) -> bool:
    """Return whether an explorer waits for a version now.

    Args:
        batches: The explorer's own step: the batches that it has written.
        synced_at: Its step at the last sync, whether or not that found a version.
        interval: Batches between two syncs.
        offset: Batches that it is ahead.
    """
    if style is SyncStyle.FULLY_ASYNC or batches == synced_at:
        return False
    # A version that was loaded between two syncs, while there was no room, counts as the one that is due.
    last = batches - interval
    return explorer_needs_sync(batches, interval, offset) and synced_at <= max(last, 0)


def ahead_of(file: JobFile) -> int:
    """Return the steps for which batches may wait: the configured number, else what the style needs.

    Between two versions the trainer takes `interval` steps, and explorers are `offset` ahead. Fully asynchronous
    explorers work for the next version's steps while the trainer takes this one's.
    """
    if file.explorer.ahead is not None:
        return file.explorer.ahead
    needed = file.sync.interval - 1 + file.sync.offset
    return needed + (file.sync.interval if file.sync.style is SyncStyle.FULLY_ASYNC else 0)


def written(job: Job) -> int:
    """Return how many batches all explorers of a job have written, including those already used.

    One that was too large for a file counts once: the trainer needs no fewer groups.
    """
    return sum(_written(job, name) for name in batch_paths.explorers(job))


def _written(job: Job, explorer: str) -> int:
    numbers = batch_paths.numbers(job, batch_paths.batches(job, explorer))
    newest = max(numbers | {batch_paths.consumed_through(job, explorer)})
    return newest - batch_paths.rest_files(job, explorer)
