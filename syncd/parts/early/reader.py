"""Reads steps into the stage while they are written, in front of another reader. Imports no torch.

A thread polls for attempts (`decision.py` says what is done about them) and copies their shard files
(`copy.py`). Once the step is published and leased, `copy` takes the files whose digests are the manifest's, and
has the reader behind it get the rest. Of the followers of a host one copies early, and the others wait for it.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from syncd.errors import SyncdError
from syncd.parts.early.copy import CopiedFile, EarlyCopy
from syncd.parts.early.decision import (
    STILL,
    AttemptKey,
    Begin,
    CopyState,
    Drop,
    EarlySnapshot,
    SeenAttempt,
    decide,
)
from syncd.protocol.disk import MISSING, Disk
from syncd.protocol.layout import ACTOR, Job, attempt_name, parse_attempt_name, parse_step_name
from syncd.protocol.manifest import Manifest, read_manifest
from syncd.protocol.mount import mount_of
from syncd.protocol.receipt import FileRecord
from syncd.protocol.write_progress import WriteProgress, read_progress
from syncd.transports.files.copy_files import is_moved, make_directories
from syncd.transports.files.piece_reader import PieceReader, ReportEvent, WantedFiles
from syncd.transports.files.stage import HostStage

LOCAL_POLL, NETWORK_POLL = 0.02, 0.25
_PART, _COPYING_PART = 20, 4
"""Polls take one part in this many of the time, and while an attempt is copied."""

_PAUSE = 0.5
"""Seconds after which the next poll comes, also where polls take long."""

_PATIENCE = 1.0
"""Seconds without progress after which another process's early copy is no longer waited for."""


@dataclass(slots=True)
class _Attempt:
    """What this process has seen of an attempt."""

    notes: tuple[WriteProgress, ...] | None = None
    changed_at: float | None = None


@dataclass(slots=True)
class _Held:
    key: AttemptKey
    path: str  # of the attempt
    copy: EarlyCopy
    seen_at: float  # when the attempt was there last
    manifest: Manifest | None = None  # of the step of its number, once it is sealed


class EarlyReader(PieceReader):
    """Gets files from `behind`, and what it can before they are published.

    `poll` is the seconds between two polls; by the kind of mount unless given.
    """

    def __init__(
        self, behind: PieceReader, job: Job, stage: HostStage, report: ReportEvent, poll: float | None = None
    ) -> None:
        self._behind, self._job, self._stage, self._report = behind, job, stage, report
        self.is_shared = behind.is_shared
        is_network = mount_of(job.root).is_network
        self._poll = poll if poll is not None else NETWORK_POLL if is_network else LOCAL_POLL
        self._attempts: dict[AttemptKey, _Attempt] = {}
        self._has_looked = False
        self._held: _Held | None = None
        self._tried = set[AttemptKey]()
        self._wasted = 0
        self._awaiting: tuple[int, int, float] = (-1, 0, 0.0)  # the step, its bytes, since when
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="early", daemon=True)
        self._thread.start()

    def copy(self, wanted: WantedFiles, target: str, stop: Callable[[], bool]) -> None:
        self._wasted = 0
        held = self._take(_step_of(wanted))
        if held is None:
            self._behind.copy(wanted, target, stop)
        elif self.is_shared:
            self._copy_with_parts(held, wanted, target, stop)
        else:
            self._copy_rest(held, wanted, target, stop)

    def _copy_with_parts(
        self, held: _Held, wanted: WantedFiles, target: str, stop: Callable[[], bool]
    ) -> None:
        with contextlib.closing(held.copy):
            partial = held.copy.finish_partial(stop)
            size = sum(file.copied for file in partial.values())
            self._behind.add_unused(held.copy.copied - size)
            self._report("debug", "early_copy_used", step=held.key.step, bytes=size)
            self._behind.copy(replace(wanted, partial=partial), target, stop)

    def _copy_rest(self, held: _Held, wanted: WantedFiles, target: str, stop: Callable[[], bool]) -> None:
        # What can be used is moved first: afterwards nobody takes its room, and the room of all else is free.
        with contextlib.closing(held.copy):
            make_directories(target, wanted.records)
            whole = held.copy.finish(stop)
            same = [record for record in wanted.records if _is_same(record, whole.get(record.name))]
            early = {
                record for record in same if is_moved(whole[record.name].path, f"{target}/{record.name}")
            }
        rest = [record for record in wanted.records if record not in early]
        self._behind.copy(replace(wanted, records=rest), target, stop)
        size, left = (sum(record.size for record in records) for records in (early, rest))
        self._report("debug", "early_copy_used", step=held.key.step, bytes=size, left=left)

    def copy_made(
        self, manifest: Manifest, wanted: WantedFiles, target: str, stop: Callable[[], bool]
    ) -> bool:
        return self._behind.copy_made(manifest, wanted, target, stop)

    @contextlib.contextmanager
    def nearer(self, links: Sequence[Manifest], stop: Callable[[], bool]) -> Iterator[Disk | None]:
        with self._behind.nearer(links, stop) as disk:
            yield disk

    def early_directory(self, wanted: WantedFiles) -> str | None:
        held = self._held
        return held.copy.directory.path if held is not None and held.key.step == _step_of(wanted) else None

    def awaited(self, wanted: WantedFiles) -> int | None:
        if self.early_directory(wanted) is not None:
            return None
        step = _step_of(wanted)
        size = self._stage.early_bytes(step)
        if size is None:
            return None
        now = time.monotonic()
        if self._awaiting[:2] != (step, size):
            self._awaiting = step, size, now
        return size if now - self._awaiting[2] < _PATIENCE else None

    def bytes_by_source(self) -> Mapping[str, int]:
        return self._behind.bytes_by_source()

    def close(self) -> None:
        self._over.set()
        self._thread.join(_PATIENCE)  # one that waits for a mount ends with the process
        if (held := self._held) is not None and self._give_up(held):
            held.copy.close()
        self._behind.close()

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            begun = time.monotonic()
            with contextlib.suppress(OSError, SyncdError):
                self._iterate()
            least, part = (self._poll, _PART) if self._held is None else (LOCAL_POLL, _COPYING_PART)
            took = time.monotonic() - begun
            pause = max(least, min(part * took, max(_PAUSE, took)))

    def _iterate(self) -> None:
        self._look(time.monotonic())
        held, now = self._held, time.monotonic()
        action = decide(self._snapshot(held, now))
        if isinstance(action, Begin):
            self._begin(action.key)
        elif held is not None and isinstance(action, Drop):
            self._drop(held, action)
        elif held is not None:
            self._follow(held)

    def _look(self, now: float) -> None:
        names = [entry.name for entry in self._job.disk.list(self._job.root) if entry.kind == "directory"]
        keys = {key for name in names if (key := _key_of(name)) is not None}
        for gone in self._attempts.keys() - keys:
            del self._attempts[gone]
        for key in keys:
            attempt = self._attempts.get(key)
            if attempt is None:
                # Of what was there before this process, only what changes is being written.
                attempt = self._attempts[key] = _Attempt(changed_at=now if self._has_looked else None)
            with contextlib.suppress(OSError, SyncdError):  # it costs itself alone
                self._read(key, attempt, now)
        self._tried &= keys
        self._has_looked = True

    def _read(self, key: AttemptKey, attempt: _Attempt, now: float) -> None:
        if attempt.notes and attempt.changed_at is not None and now - attempt.changed_at > STILL:
            return
        notes = read_progress(self._job.disk, self._job.attempt(*key))
        notes_of_it = tuple(note for note in notes if note.attempt == key.attempt)
        if notes_of_it != attempt.notes:
            is_first = attempt.notes is None
            attempt.notes = notes_of_it
            attempt.changed_at = attempt.changed_at if is_first else now

    def _snapshot(self, held: _Held | None, now: float) -> EarlySnapshot:
        attempts = tuple(
            SeenAttempt(key, seen.notes or (), None if seen.changed_at is None else now - seen.changed_at)
            for key, seen in self._attempts.items()
        )
        free = self._stage.free() if attempts and held is None else 0
        held_now = self._held_now(held, now) if held else None
        return EarlySnapshot(attempts, held_now, self._tried, self._wasted, free)

    def _held_now(self, held: _Held, now: float) -> CopyState:
        attempt, is_revoked = self._attempts.get(held.key), held.copy.is_revoked
        if attempt is not None:
            held.seen_at = now
            changed_ago = now - (attempt.changed_at or now)
            return CopyState(held.key, changed_ago=changed_ago, is_revoked=is_revoked)
        manifest = held.manifest = held.manifest or self._sealed(held.key.step)
        gone_for = now - held.seen_at
        if manifest is None:
            return CopyState(held.key, gone_for=gone_for, is_revoked=is_revoked)
        return CopyState(
            held.key,
            gone_for=gone_for,
            is_sealed=True,
            is_other=manifest.attempt != held.key.attempt or _differs(held.copy, manifest),
            is_staged=self._stage.has_digest(manifest.digest),
            is_revoked=is_revoked,
        )

    def _sealed(self, step: int) -> Manifest | None:
        self._job.disk.refresh(self._job.root)
        try:
            return read_manifest(self._job.disk, self._job.step(step))
        except (*MISSING, SyncdError):
            return None

    def _begin(self, key: AttemptKey) -> None:
        self._tried.add(key)
        directory = self._stage.open_early(*key)
        if directory is not None:
            copy = EarlyCopy(directory, self._behind.share if self.is_shared else None)
            held = self._held = _Held(key, self._job.attempt(*key), copy, time.monotonic())
            self._follow(held)

    def _follow(self, held: _Held) -> None:
        attempt = self._attempts.get(held.key)
        if attempt is not None:
            held.copy.follow(held.path, attempt.notes or ())
        elif held.manifest is not None:
            held.copy.end()

    def _drop(self, held: _Held, drop: Drop) -> None:
        if self._give_up(held):
            held.copy.close()
            self._behind.add_unused(held.copy.copied)
            self._wasted += drop.is_waste
            self._report("debug", "early_copy_dropped", step=held.key.step, reason=drop.reason)

    def _give_up(self, held: _Held) -> bool:
        """Return whether a copy was this reader's until now: of two threads one may use or close it."""
        with self._lock:
            is_own = self._held is held
            if is_own:
                self._held = None
        return is_own

    def _take(self, step: int) -> _Held | None:
        held = self._held
        return held if held is not None and held.key.step == step and self._give_up(held) else None


def _is_same(record: FileRecord, copied: CopiedFile | None) -> bool:
    return copied is not None and (copied.size, copied.digest) == (record.size, record.digest)


def _differs(copy: EarlyCopy, manifest: Manifest) -> bool:
    digests = {record.name: record.digest for record in manifest.shards}
    return any(digests.get(f"{ACTOR}/{file.name}") != file.digest for file in copy.whole())


def _step_of(wanted: WantedFiles) -> int:
    step = parse_step_name(os.path.basename(os.path.dirname(wanted.directory)))
    return -1 if step is None else step


def _key_of(name: str) -> AttemptKey | None:
    step = parse_attempt_name(name)
    if step is None:
        return None
    return AttemptKey(step, name.removeprefix(attempt_name(step, "")))
