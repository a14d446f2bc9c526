"""Rank 0's side of the choice how a step is stored: what the job says of explorers, the parent and the version."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import structlog

from syncd.errors import CorruptDataError, SyncdError
from syncd.protocol.disk import MISSING
from syncd.protocol.layout import Job
from syncd.protocol.lineage import ancestors
from syncd.protocol.manifest import Manifest, read_manifest
from syncd.protocol.presence import READS_DELTA, Presence
from syncd.transports.filesystem.storage_choice import (
    Parent,
    ShareState,
    Storage,
    StorageFacts,
    choose_storage,
)
from syncd.transports.filesystem.storage_times import ReaderTimes, staged_seconds
from syncd.transports.keyframes import ChainLength

if TYPE_CHECKING:
    from syncd.client.client import Client

_FAILED = "the save before it failed"

_REMEMBERED = 4
"""Steps whose loads are still waited for: explorers may load late."""


class StorageChooser:
    """Chooses how each step is stored, and logs each change of the choice.

    Args:
        job: The job.
        client: The trainer's client.
        every: The most deltas after a keyframe.
        limit: The most bytes of them; 0 for a share of a whole step.
        weighs_time: Whether changes are stored only where explorers have them earlier than whole weights.
    """

    def __init__(
        self, job: Job, client: "Client", every: int, limit: int, *, weighs_time: bool = False
    ) -> None:
        self._job, self._client, self._every, self._limit = job, client, every, limit
        self._weighs_time, self._was_slower = weighs_time, True
        self._forms: dict[int, str] = {}  # of the last steps
        self._told: dict[str, float] = {}  # by form, what the slowest explorer has needed last
        self._log = structlog.get_logger()
        self._has_failed = False
        self._generation: int | None = None
        self._parent: Parent | None = None  # of the last choice
        self._logged: tuple[str, str] | None = None

    def note_failure(self) -> None:
        """Have the next step stored whole: a save has failed."""
        self._has_failed = True

    def next_storage(self, step: int, shares: Sequence[ShareState], must_be_whole: str) -> Storage:
        """Return how a step is stored, and log it if that has changed; whole if the job cannot be read.

        Args:
            step: The step.
            shares: What each rank knows.
            must_be_whole: Why the caller needs it whole; empty if it does not.
        """
        try:
            found = choose_storage(self._facts(shares, must_be_whole))
        except (SyncdError, OSError) as error:
            found = Storage(why=f"the job cannot be read: {error}")
        self._has_failed, self._was_slower = False, found.is_slower
        self._forms = {**dict(list(self._forms.items())[-_REMEMBERED:]), step: found.form}
        if self._logged != (found.form, found.why):
            self._logged = found.form, found.why
            expected = found.times.rounded() if found.times else {}
            self._log.info("storage_chosen", step=step, form=found.form, why=found.why, **expected)
        return found

    def _facts(self, shares: Sequence[ShareState], must_be_whole: str) -> StorageFacts:
        living = self._client.explorers.living()
        readers = {name: one for name, one in living.items() if READS_DELTA in one.reads}
        unable = next((name for name in living if name not in readers), "")
        before, sealed = self._parent, shares[0].sealed
        self._parent, why = self._read_parent(*sealed) if sealed else (None, shares[0].why)
        whole = must_be_whole or (_FAILED if self._has_failed else "") or self._unpublished(before)
        return StorageFacts(
            shares,
            self._parent,
            why,
            whole,
            len(readers),
            unable,
            self._every,
            self._limit,
            self._weighs_time,
            self._readers_times(readers.values()),
            self._was_slower,
        )

    def _readers_times(self, readers: Collection[Presence]) -> ReaderTimes:
        """Return what explorers say that they needed for the last steps, and how many hosts they are on."""
        for step, form in self._forms.items():
            found = [seconds for one in readers if (seconds := staged_seconds(one.info, step)) is not None]
            if found:
                self._told[form] = max(found)
        hosts = {one.host or one.identity for one in readers}
        return ReaderTimes(max(1, len(hosts)), self._told.get("whole"), self._told.get("delta"))

    def _read_parent(self, step: int, attempt: str) -> tuple[Parent | None, str]:
        """Return the last sealed step as the job has it, or why it is none to store changes of."""
        try:
            manifest = read_manifest(self._job.disk, self._job.step(step))
        except (*MISSING, CorruptDataError):
            return None, f"step {step} is no longer there"
        if manifest.attempt != attempt:
            return None, f"step {step} was written again"
        try:
            chain = self._chain(manifest)
        except CorruptDataError as error:
            return None, error.message
        return Parent(step, manifest.digest, manifest.whole_files, chain), ""

    def _chain(self, manifest: Manifest) -> ChainLength:
        """Return the chain of a step; of one that follows the last parent, without reading that chain again."""
        delta, before = manifest.delta, self._parent
        if delta is None:
            return ChainLength(manifest.step)
        if before is not None and (before.step, before.digest) == (delta.parent, delta.parent_digest):
            keyframe, deltas, size = before.chain
            return ChainLength(keyframe, deltas + 1, size + manifest.size)
        *deltas_between, keyframe_manifest = [manifest, *ancestors(self._job, manifest)]
        size = sum(link.size for link in deltas_between)
        return ChainLength(keyframe_manifest.step, len(deltas_between), size)

    def _unpublished(self, before: Parent | None) -> str:
        """Return why explorers may not know what the last choices led to, empty where the daemon published it."""
        version, generation = self._client.latest_version(), self._generation
        self._generation = version.generation if version else generation
        if None not in (generation, self._generation) and generation != self._generation:
            return f"generation {self._generation} has begun"
        if before is not None and (version is None or version.step < before.step):
            return f"the daemon has not published step {before.step}"
        return ""
