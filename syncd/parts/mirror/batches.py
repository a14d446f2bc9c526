"""Experiences on their way back: from the far job, over an object store or directly, into the job of the trainer.

Each end works in order and remembers nothing of its own. A batch leaves one place only after it is durable in the
next, and each place knows which numbers it has had, so a batch that is passed on twice after a kill counts once.
"""

import shlex
from collections.abc import Callable
from typing import Protocol

from syncd.errors import CorruptDataError
from syncd.experience import batch_paths
from syncd.experience.rejected import set_aside
from syncd.experience.table import MAX_BYTES
from syncd.experience.writer import ExperienceWriter
from syncd.observe import event_names
from syncd.parts.mirror.meter import Meter
from syncd.parts.mirror.objects import Objects
from syncd.protocol.digest import digest_bytes
from syncd.protocol.disk import MISSING, Clock
from syncd.protocol.layout import Job
from syncd.protocol.owner import identity_of

PREFIX = "experiences/"

_SITE = 8
_NAME_LIMIT = 100


class BatchSource(Protocol):
    def waiting(self) -> dict[str, list[int]]:
        """Return the numbers of the batches that wait, in order, by the name of their explorer."""

    def read(self, explorer: str, seq: int) -> bytes:
        """Return a batch.

        Raises:
            CorruptDataError: It is none. It was set aside, and those behind it can go on.
        """

    def release(self, explorer: str, seq: int) -> None:
        """Remove a batch that is durable elsewhere."""


class BatchTarget(Protocol):
    def take(self, explorer: str, seq: int, data: bytes) -> None:
        """Make a batch durable, unless this place has had it."""


class JobBatches:
    """The batches of the far job's explorers. Their names get a prefix of that job, so that no two sites collide."""

    def __init__(self, job: Job, clock: Clock) -> None:
        self._job, self._clock = job, clock
        self._own: dict[str, str] = {}

    def waiting(self) -> dict[str, list[int]]:
        site = (identity_of(self._job) or "")[:_SITE]
        if not site:
            return {}
        self._own = {site_name(site, name): name for name in batch_paths.explorers(self._job)}
        return {
            name: sorted(batch_paths.numbers(self._job, batch_paths.batches(self._job, own)))
            for name, own in self._own.items()
        }

    def read(self, explorer: str, seq: int) -> bytes:
        own = self._own[explorer]
        try:
            return self._job.disk.read(batch_paths.batch(self._job, own, seq), MAX_BYTES)
        except CorruptDataError as error:
            name = f"{seq}{batch_paths.SUFFIX}"
            set_aside(self._job, self._clock, own, name, error.message)
            error.message = f"batch {name} of explorer {own} was set aside: {error.message}"
            error.hint = f"ls {shlex.quote(batch_paths.rejected(self._job, own))}"
            raise

    def release(self, explorer: str, seq: int) -> None:
        """Note that the number was used, then remove the batch."""
        own = self._own[explorer]
        batch_paths.mark_consumed(self._job, own, max(seq, batch_paths.consumed_through(self._job, own)))
        self._job.disk.unlink(batch_paths.batch(self._job, own, seq))


class StoreBatches:
    """The batches on their way in an object store."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def waiting(self) -> dict[str, list[int]]:
        seqs_of: dict[str, list[int]] = {}
        for item in self._objects.list(PREFIX):
            explorer, _, name = item.name.removeprefix(PREFIX).partition("/")
            if (seq := batch_paths.parse_batch(name)) is not None:
                seqs_of.setdefault(explorer, []).append(seq)
        return {explorer: sorted(seqs) for explorer, seqs in sorted(seqs_of.items())}

    def read(self, explorer: str, seq: int) -> bytes:
        return self._objects.get(_object(explorer, seq)).data

    def release(self, explorer: str, seq: int) -> None:
        self._objects.delete([_object(explorer, seq)])

    def take(self, explorer: str, seq: int, data: bytes) -> None:
        self._objects.create(_object(explorer, seq), data)


class JobIntake:
    """The experiences of the trainer's job, into which batches of other sites go by its own writers."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._writers: dict[str, ExperienceWriter] = {}

    def take(self, explorer: str, seq: int, data: bytes) -> None:
        """Write a batch under its number, unless the job has had that number."""
        writer = self._writers.pop(explorer, None) or ExperienceWriter(self._job, explorer)
        if seq >= writer.upcoming:
            # Numbers before it that never come are numbers that its explorer never used.
            writer.upcoming = seq
            writer.write_encoded(data)
        self._writers[explorer] = (
            writer  # one whose write failed is made anew: a later process may have fenced it
        )


class BatchMover:
    """Passes batches on, those of each explorer in order; `tell` hears events."""

    def __init__(
        self, source: BatchSource, target: BatchTarget, meter: Meter, tell: Callable[..., None]
    ) -> None:
        self._source, self._target, self._meter, self._tell = source, target, meter, tell

    def turn(self) -> bool:
        """Pass on what waits; return whether there was anything.

        What a file system refuses holds up the batches of one explorer alone, and is raised at the end.
        """
        waiting, errors = self._source.waiting(), list[OSError]()
        for explorer, seqs in waiting.items():
            try:
                for seq in seqs:
                    self._move(explorer, seq)
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return any(waiting.values())

    def _move(self, explorer: str, seq: int) -> None:
        try:
            data = self._source.read(explorer, seq)
        except MISSING:
            return  # another mirror was faster
        except CorruptDataError as error:
            fields = {"explorer": explorer, "seq": seq, "detail": error.message, "hint": error.hint}
            self._tell(event_names.MIRROR_BATCH_REJECTED, "warning", **fields)
            return
        self._meter.spend(len(data))
        self._target.take(explorer, seq, data)
        self._source.release(explorer, seq)
        self._tell(event_names.MIRROR_BATCH_COPIED, "debug", explorer=explorer, seq=seq, bytes=len(data))


def site_name(site: str, explorer: str) -> str:
    """Return the name of an explorer of another site, such as 0f1e2d3c.host-4711; it is a name of the protocol."""
    name = f"{site}.{explorer}"
    if len(name) <= _NAME_LIMIT:
        return name
    return f"{site}.{digest_bytes(explorer.encode()).rpartition(':')[2]}"


def _object(explorer: str, seq: int) -> str:
    return f"{PREFIX}{explorer}/{seq}{batch_paths.SUFFIX}"
