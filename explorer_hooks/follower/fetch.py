"""From a version to what an engine can load from this host: leased, checked, in memory or staged where it can be."""

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from explorer_hooks.follower import checks
from explorer_hooks.follower.timing import Timings
from explorer_hooks.hook import Hook
from syncd.errors import CorruptDataError, RefusedError, SyncdError, TryAgainError
from syncd.protocol.disk import MISSING, Disk
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.manifest import Manifest, read_manifest
from syncd.protocol.memory import HeldCopy
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import Pair, Version
from syncd.synchronizer import Leased, Synchronizer
from syncd.transports.base import WeightDirectory
from syncd.transports.filesystem.copy_files import check_files
from syncd.transports.filesystem.stage import Source, Stage, Staged, StageFullError
from syncd.transports.memory.load import Copies


class Placed:
    """A version that stays on this host until it is closed.

    Args:
        found: What is loaded.
        lease: What keeps it in the job directory.
    """

    def __init__(self, found: "_Found", lease: contextlib.ExitStack) -> None:
        self.target, self.size, self._staged = found.target, found.size, found.staged
        self._copy, self._behind, self._check = found.copy, found.behind, found.check
        self._lease = lease

    @property
    def pair(self) -> Pair:
        """Return the pair of the version."""
        return self.target.version.pair

    @property
    def staged_at(self) -> str | None:
        """Return the directory of the copy."""
        return self._staged.path if self._staged else None

    @property
    def source(self) -> str:
        """Return where it is loaded from: memory, stage or files."""
        return "memory" if self._copy is not None else "stage" if self._staged is not None else "files"

    def is_usable(self) -> bool:
        """Say whether it can still be loaded: the leases of who was silent for too long are void.

        Files that have not been hashed since this process knows of them are hashed now.
        """
        target, check = self.target, self._check
        if target.version.kind != "remote" and not os.path.isdir(target.path):
            return False
        if check is not None and not target.verified:
            try:
                check()
            except (SyncdError, OSError):
                return False
            self.target = replace(target, verified=True)
        return True

    def settle(self) -> None:
        """Keep the loaded version by one thing alone: a staged copy, else the lease on its files, never by memory."""
        if self._staged is not None:
            self._lease.close()
        self._let_go()

    def close(self) -> None:
        """Let go of the version."""
        self._let_go()
        self._lease.close()
        if self._staged is not None:
            self._staged.close()

    def _let_go(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None and self._behind is not None:
            self.target = self._behind
            copy.close()


@dataclass(frozen=True, slots=True)
class Placing:
    """Puts versions where the engine can load them.

    Args:
        sync: The follower's connection to the job.
        hook: What loads versions.
        verify: How closely a version is looked at.
        stage: The copies of this host; None to load from the job directory.
        copies: Those that the trainer leaves in this host's memory.
        tell: Hears that the stage could not be used.
        stop: Asked while files are read; once true it is given up.
    """

    sync: Synchronizer
    hook: Hook
    verify: checks.Verify
    stage: Stage | None
    copies: Copies
    tell: Callable[..., None]
    stop: Callable[[], bool]

    def place(self, wanted: Version | int, timings: Timings) -> Placed:
        """Lease a version, check it, and stage it.

        Raises:
            TryAgainError: It has gone.
            RefusedError: It is damaged, or of a kind that the hook cannot load.
            SyncdError: The file system failed.
            OSError: The same.
        """
        with contextlib.ExitStack() as lease:
            try:
                leased = lease.enter_context(self.sync.lease(wanted))
                found = self._found(leased, timings)
            except CorruptDataError as error:
                raise _refused(error) from None
            return Placed(found, lease.pop_all())

    def adopt(self, pair: Pair) -> Placed | None:
        """Keep what an engine runs already, so that a failed load can go back to it; None if it has gone."""
        with contextlib.ExitStack() as lease, contextlib.suppress(SyncdError, OSError):
            leased = lease.enter_context(self.sync.lease(pair))
            payload = payload_of(leased.manifest)
            staged = (
                self.stage.find(self._source(leased, payload)) if self.stage and leased.manifest else None
            )
            path = staged.path if staged else leased.path
            disk = LocalDisk() if staged else self.sync.job.disk
            shards = payload.shards
            tensors = checks.read_tensors(disk, path, shards)
            version = self._loadable(leased)
            target = WeightDirectory(version, path, shards, tensors, verified=staged is not None)
            check = self._content_check(disk, path, payload, _never) if leased.manifest else None
            return Placed(_Found(target, payload.size, staged, check=check), lease.pop_all())
        return None

    def tidy(self) -> None:
        """Remove the copies that nobody on this host uses any more."""
        if self.stage is not None:
            self.stage.sweep()

    def _found(self, leased: Leased, timings: Timings) -> "_Found":
        try:
            return self._examined(leased, timings)
        except MISSING as error:
            raise self._lost(leased, error) from None

    def _examined(self, leased: Leased, timings: Timings) -> "_Found":
        version, disk = self._loadable(leased), self.sync.job.disk
        checks.check_kind(version, self.hook.kinds)
        if leased.version.kind == "remote":
            checks.check_uri(leased.version)
        if version is not leased.version:
            with timings.part("verify"):
                checks.read_foreign(disk, version, leased.path, self.hook.kinds)
            # Nothing is said of its dtypes: a start model often has wider ones than what is published of it.
            return _Found(WeightDirectory(version, leased.path))
        if version.kind == "remote":
            return _Found(WeightDirectory(version, leased.path))
        if leased.manifest is None:
            with timings.part("verify"):
                tensors = checks.read_foreign(disk, version, leased.path, self.hook.kinds)
            return _Found(WeightDirectory(version, leased.path, (), tensors))
        with timings.part("verify"):
            checks.check_sizes(disk, self.sync.job.step(version.step), leased.manifest)
        return self._native(leased, leased.manifest, timings)

    def _loadable(self, leased: Leased) -> Version:
        """Return the version as the hook is given it.

        A remote version that is a directory here, such as the model that a run began with, is weights to
        hooks that know nothing of remote ones.
        """
        version = leased.version
        is_directory = version.kind == "remote" and os.path.isabs(leased.path) and os.path.isdir(leased.path)
        if is_directory and "remote" not in self.hook.kinds and "weights" in self.hook.kinds:
            return replace(version, kind="weights", layout="huggingface")
        return version

    def _native(self, leased: Leased, manifest: Manifest, timings: Timings) -> "_Found":
        payload = payload_of(leased.manifest)
        if (found := self._in_memory(leased, manifest, payload, timings)) is not None:
            return found
        staged = self._staged(self._source(leased, payload), timings)
        try:
            with timings.part("verify"):
                target = self._checked(leased, payload, staged)
        except BaseException:
            if staged is not None:
                staged.close()
            raise
        return _Found(target, payload.size, staged)

    def _in_memory(
        self, leased: Leased, manifest: Manifest, payload: "_Payload", timings: Timings
    ) -> "_Found | None":
        """Return the copy in this host's memory, checked as files are; None where there is none that passes."""
        with timings.part("verify"):
            held = self.copies.take(manifest)
            if held is None:
                return None
            try:
                return self._held(leased, manifest, payload, held)
            except CorruptDataError as error:
                self.copies.spoil()
                self.tell("warning", "memory_copy_refused", reason=str(error))
            except OSError as error:
                self.tell("warning", "memory_copy_refused", reason=str(error))
            except BaseException:
                held.close()
                raise
            held.close()
            return None

    def _held(self, leased: Leased, manifest: Manifest, payload: "_Payload", held: HeldCopy) -> "_Found":
        target = self._looked_at(leased.version, LocalDisk(), f"{held.path}/{manifest.payload}", payload)
        behind = replace(target, path=leased.path, verified=False)
        check = self._content_check(self.sync.job.disk, leased.path, payload, _never)
        return _Found(target, payload.size, copy=held, behind=behind, check=check)

    def _checked(self, leased: Leased, payload: "_Payload", staged: Staged | None) -> WeightDirectory:
        version, disk = leased.version, self.sync.job.disk
        if staged is not None:
            tensors = checks.read_tensors(LocalDisk(), staged.path, payload.shards)
            return WeightDirectory(version, staged.path, payload.shards, tensors, verified=True)
        return self._looked_at(version, disk, leased.path, payload)

    def _looked_at(self, version: Version, disk: Disk, path: str, payload: "_Payload") -> WeightDirectory:
        """Return files as a target, checked as closely as this follower checks."""
        checks.check_payload(payload.shards, path)
        if self.verify is checks.Verify.SIZE:
            return WeightDirectory(version, path, payload.shards)
        tensors = checks.read_tensors(disk, path, payload.shards)
        check = self._content_check(disk, path, payload, self.stop)
        if check is not None:
            self.tell("debug", "hash_started", step=version.step, path=path, bytes=payload.size)
            check()
        return WeightDirectory(version, path, payload.shards, tensors, verified=check is not None)

    def _content_check(
        self, disk: Disk, path: str, payload: "_Payload", stop: Callable[[], bool]
    ) -> Callable[[], None] | None:
        """Return what compares every byte with its digest, None where nobody asks for it or the hook does it."""
        if self.verify is not checks.Verify.CONTENT or self.hook.checks_content:
            return None
        return lambda: check_files(disk, path, (*payload.shards, *payload.files), stop)

    def _source(self, leased: Leased, payload: "_Payload") -> Source:
        return Source(self.sync.job.disk, leased.version, leased.path, (*payload.shards, *payload.files))

    def _staged(self, source: Source, timings: Timings) -> Staged | None:
        if self.stage is None:
            return None
        with timings.part("stage"):
            try:
                return self.stage.take(source, self.stop)
            except StageFullError as error:
                self.tell("warning", "stage_write_failed", reason=str(error), hint=error.hint)
                return None

    def _lost(self, leased: Leased, error: OSError) -> SyncdError:
        """Return what a missing file means: the whole step has gone, or the step is damaged."""
        step = leased.version.step
        try:
            read_manifest(self.sync.job.disk, self.sync.job.step(step))
        except MISSING:
            return TryAgainError(f"step {step} has gone", hint="go on with the newest version")
        return RefusedError(f"a file of step {step} is missing", path=error.filename)


@dataclass(frozen=True, slots=True)
class _Found:
    """What is loaded, its bytes, and its copy on this host; of one in memory also what is behind it in files.

    `check` compares every byte with its digest, where that has not been done yet.
    """

    target: WeightDirectory
    size: int = 0
    staged: Staged | None = None
    copy: HeldCopy | None = None
    behind: WeightDirectory | None = None
    check: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class _Payload:
    """What an engine loads of a step; names are relative to the directory that it loads."""

    shards: tuple[FileRecord, ...] = ()
    files: tuple[FileRecord, ...] = ()

    @property
    def size(self) -> int:
        return sum(record.size for record in self.records)

    @property
    def records(self) -> tuple[FileRecord, ...]:
        """Return all files; their names are relative to the directory that the engine loads."""
        return *self.shards, *self.files


def _never() -> bool:
    """Say no: what is checked for the way back is not given up."""
    return False


def payload_of(manifest: Manifest | None) -> _Payload:
    """Return the files that an engine loads of a step, none of a step whose payload is elsewhere."""
    if manifest is None or manifest.kind == "remote":
        return _Payload()
    prefix = f"{manifest.payload}/"
    return _Payload(_below(manifest.shards, prefix), _below(manifest.files, prefix))


def _below(records: Iterable[FileRecord], prefix: str) -> tuple[FileRecord, ...]:
    return tuple(
        FileRecord(record.name.removeprefix(prefix), record.size, record.digest, record.tensors)
        for record in records
        if record.name.startswith(prefix)
    )


def _refused(error: CorruptDataError) -> RefusedError:
    if isinstance(error, RefusedError):
        return error
    return RefusedError(error.message, path=error.path, hint=error.hint)
