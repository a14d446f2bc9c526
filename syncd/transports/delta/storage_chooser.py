"""Rank 0's side of the choice how a step is stored: what the job says of explorers, the parent and the version."""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import structlog

from syncd.errors import CorruptDataError, StorageError, SyncdError, UsageError
from syncd.protocol.disk import MISSING
from syncd.protocol.layout import Job
from syncd.protocol.lineage import read_chain
from syncd.protocol.manifest import missing_files
from syncd.protocol.presence import READS_DELTA, Presence
from syncd.transports.delta.storage_choice import ReaderTimes, StorageFacts, choose_storage, reader_seconds
from syncd.transports.files.storage import ChainLength, Parent, ShareState, Storage

if TYPE_CHECKING:
    from syncd.client.client import Client

_FAILED = "the save before it failed"

_REMEMBERED = 4  # steps whose loads are still waited for: explorers may load late


class _JobState(NamedTuple):
    parent: Parent | None  # the leased parent; None if there is none
    why: str  # why there is none
    problem: str  # why explorers may not know the parent; empty if they do
    readers: Mapping[str, Presence]  # explorers that read deltas, by name
    unable: str  # one that does not; empty if all do


class StorageChooser:
    """Chooses how each step is stored, and logs each change of the choice.

    A parent is leased before its chain is read, until `release`: no link is pruned while changes of it are written.
    To write the lease and to read the chain takes milliseconds, on a slow mount more: `begin` does it in a thread.

    Args:
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
        self._reader_seconds: dict[str, float] = {}  # by form, what the slowest explorer has needed last
        self._log = structlog.get_logger()
        self._has_failed = False
        self._generation: int | None = None
        self._parent: Parent | None = None  # of the last choice
        self._lease = ExitStack()
        self._logged: tuple[str, str, str] | None = None
        self._helper = ThreadPoolExecutor(1, "storage")
        self._ahead: Future[_JobState] | None = None

    def begin(self, share: ShareState) -> None:
        """Begin, while no save is in flight, to read the job in a thread, for a choice once all shares are copied."""
        self._ahead = self._helper.submit(self._read_job, share)

    def note_failure(self) -> None:
        self._has_failed = True
        self.release()

    def release(self) -> None:
        """End the lease on the parent: what was stored as its changes is announced, or will never be."""
        ahead, self._ahead = self._ahead, None
        wait([ahead] if ahead else [])
        self._lease.close()

    def close(self) -> None:
        self.release()
        self._helper.shutdown()

    def next_storage(self, step: int, shares: Sequence[ShareState], must_be_whole: str) -> Storage:
        """Return how a step is stored; log a change. `must_be_whole`: why the caller needs it whole, if it does."""
        try:
            storage = choose_storage(self._facts(shares, must_be_whole))
        except (SyncdError, OSError) as error:
            keeps = shares[0].sealed is not None
            storage = Storage(keeps=keeps, why=f"the job cannot be read or written: {error}")
        if storage.parent is None:
            self.release()
        self._has_failed, self._was_slower = False, storage.is_slower
        self._forms = {**dict(list(self._forms.items())[-_REMEMBERED:]), step: storage.form}
        self._log_change(step, storage)
        return storage

    def _log_change(self, step: int, storage: Storage) -> None:
        if self._logged != (storage.form, storage.why, storage.hint):
            self._logged = storage.form, storage.why, storage.hint
            expected = storage.times.rounded() if storage.times else {}
            hint = {"hint": storage.hint} if storage.hint else {}
            self._log.info(
                "storage_chosen", step=step, form=storage.form, why=storage.why, **hint, **expected
            )

    def _facts(self, shares: Sequence[ShareState], must_be_whole: str) -> StorageFacts:
        job = self._job_state(shares[0])
        self._parent = job.parent
        return StorageFacts(
            shares,
            job.parent,
            job.why,
            must_be_whole or (_FAILED if self._has_failed else "") or job.problem,
            len(job.readers),
            job.unable,
            self._every,
            self._limit,
            self._weighs_time,
            self._readers_times(job.readers.values()),
            self._was_slower,
        )

    def _job_state(self, share: ShareState) -> _JobState:
        """Return what was read ahead, or read it now: a save was in flight before the share was copied."""
        ahead, self._ahead = self._ahead, None
        return ahead.result() if ahead else self._read_job(share)

    def _read_job(self, share: ShareState) -> _JobState:
        explorers = self._client.explorers
        living = explorers.living()
        readers = {name: presence for name, presence in living.items() if READS_DELTA in presence.reads}
        for name, problem in explorers.unreadable().items() if not readers else ():
            raise StorageError(f"what explorer {name} reads is not known: {problem}")
        unable = next((name for name in living if name not in readers), "")
        parent, why = self._read_parent(*share.sealed) if share.sealed and readers else (None, share.why)
        return _JobState(parent, why, self._unpublished(self._parent), readers, unable)

    def _readers_times(self, readers: Collection[Presence]) -> ReaderTimes:
        """Return what explorers say that they needed for the last steps, and how many hosts they are on."""
        for step, form in self._forms.items():
            times = [
                seconds for reader in readers if (seconds := reader_seconds(reader.info, step)) is not None
            ]
            if times:
                self._reader_seconds[form] = max(times)
        hosts = {reader.host or reader.identity for reader in readers}
        return ReaderTimes(
            max(1, len(hosts)), self._reader_seconds.get("whole"), self._reader_seconds.get("delta")
        )

    def _read_parent(self, step: int, attempt: str) -> tuple[Parent | None, str]:
        """Lease the last sealed step, and return it as the job has it; or why it is none to store changes of."""
        self._lease.close()
        own = self._client.own("trainer", "a lease on the parent of a delta")
        self._lease.enter_context(own.leasing([step], ends_later=True))
        self._job.disk.refresh(self._job.root)
        try:
            chain = read_chain(self._job, step)
            wrong = missing_files(self._job.disk, self._job.step(step), chain[0])
        except (*MISSING, UsageError):
            return None, f"step {step} is no longer there"
        except CorruptDataError as error:
            return None, error.message
        if wrong:
            return None, f"step {step} is damaged: {wrong[0]}"
        if chain[0].attempt != attempt:
            return None, f"step {step} was written again"
        *deltas, keyframe = chain
        length = ChainLength(keyframe.step, len(deltas), sum(link.size for link in deltas))
        return Parent(step, chain[0].digest, chain[0].whole_files, length), ""

    def _unpublished(self, before: Parent | None) -> str:
        """Return why explorers may not know what the last choices led to, empty where the daemon published it."""
        version, generation = self._client.latest_version(), self._generation
        self._generation = version.generation if version else generation
        if None not in (generation, self._generation) and generation != self._generation:
            return f"generation {self._generation} has begun"
        if before is not None and (version is None or version.step < before.step):
            return f"the daemon has not published step {before.step}"
        return ""
