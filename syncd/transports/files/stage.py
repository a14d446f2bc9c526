"""Stages versions: one copy for all followers of a host, in local memory or on a local disk. Imports no torch.

    DIR/<job>.<boot>/<generation>.<step>-<digest>        a whole copy; its users hold a shared lock on
    DIR/<job>.<boot>/<generation>.<step>-<digest>.lock   this file; a copier or remover holds an exclusive one
    DIR/<job>.<boot>/.<...>.tmp                          an unfinished copy; renamed once it is whole
    DIR/<job>.<boot>/.early.<step>-<...>.tmp             files of a step that is not published: the part early

Whoever needs the room of the last kind removes it with its lock. Locks end with their process: if a copier is killed,
the next one takes over, and its unfinished copy is removed.
Nothing is synced to disk: copies of an earlier boot are never used.

A lock keeps nobody from writing, and times of files prove nothing: a write through a mapping of a tmpfs leaves them
as they are. So a process hashes each copy that it did not make itself, every time that it gets one, or while it
loads it.

The newest copy that nobody uses outlives a start: the next version may be stored as changes of it.
"""

import contextlib
import errno
import hashlib
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from syncd.errors import TROUBLESHOOTING, ConfigError, CorruptDataError, StorageError
from syncd.protocol.disk import Clock, Disk, is_temporary, remove_tree, temporary_name
from syncd.protocol.file_lock import FileLock, lock_file
from syncd.protocol.local_disk import LocalDisk, SystemClock
from syncd.protocol.memory_copies import is_private
from syncd.protocol.mount import mount_of
from syncd.protocol.path_trust import weak_level
from syncd.protocol.process import Process
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import Version
from syncd.transports.files.copy_files import check_copy
from syncd.transports.files.piece_reader import ORIGIN, PieceReader, WantedFiles

STALLED = 30.0
"""Seconds without progress after which another process's copy is no longer waited for."""

_POLL = 0.02

_LET_GO = 2.0
"""Seconds in which whoever copies early notices that his room was taken, and closes his files."""

_LOCK = ".lock"
_EARLY = "early."
_BLOCK = 512  # bytes, whatever the file system's own
_EARLY_PART = f".{_EARLY}"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_COPY = re.compile(r"(?P<generation>\d+)\.(?P<step>\d+)-(?P<digest>[0-9a-f]{16})(\+[0-9a-f]{8})?", re.ASCII)
_JOB = re.compile(r".+-[0-9a-f]{8}\.[0-9a-f]{8}", re.ASCII | re.DOTALL)


class StageFullError(StorageError):
    code = "stage_full"


@dataclass(frozen=True, slots=True)
class StageSource:
    """A version that a stage gets, and how: here its files are copied."""

    disk: Disk  # the file system of the job
    version: Version
    directory: str  # the directory that the names of the files are relative to
    records: Sequence[FileRecord]
    reader: PieceReader = field(default=ORIGIN, kw_only=True)  # gets the bytes

    @property
    def key(self) -> str:
        generation, step = self.version.pair
        return f"{generation}.{step}-{_short(self.version.digest)}"

    @property
    def size(self) -> int:
        return sum(record.size for record in self.records)

    def write(self, target: str, stop: Callable[[], bool]) -> None:
        """Write the files into a new directory, every byte of them checked; `stop` is polled."""
        self.reader.copy(self.wanted, target, stop)

    @property
    def wanted(self) -> WantedFiles:
        return WantedFiles(self.disk, self.directory, self.records, self.version.digest)


class StagedCopy:
    """A copy that stays until `close`."""

    def __init__(self, path: str, held: FileLock) -> None:
        self.path, self._held = path, held
        self.is_checked = False  # whether this process has made or hashed it

    @property
    def is_current(self) -> bool:
        """Return whether it has not been discarded, and perhaps made again, since it was found."""
        return self._held.is_valid()

    def close(self) -> None:
        self._held.close()


class EarlyDirectory:
    """A new directory of a stage for files of a step that is not published, until `close`, or its room is needed."""

    def __init__(self, disk: Disk, path: str, held: FileLock) -> None:
        self.path = path
        self._disk, self._held = disk, held
        os.mkdir(path, 0o700)

    def is_valid(self) -> bool:
        return self._held.is_valid()

    def close(self) -> None:
        remove_tree(self._disk, self.path)
        if self._held.is_valid():
            self._held.remove()
        self._held.close()


def open_scratch(job_root: str, clock: Clock) -> "HostStage":
    """Return the stage below TMPDIR that this user's explorers have without a stage of their own, for deltas."""
    directory = _scratch()
    try:
        _private(directory)
    except OSError as error:
        raise ConfigError(f"no directory can be made: {error.strerror}", path=directory) from error
    return HostStage(directory, job_root, clock)


def sweep_scratch(job_root: str, clock: Clock) -> None:
    """Remove what explorers that were killed have left below TMPDIR."""
    if os.path.isdir(_scratch()):
        with contextlib.suppress(ConfigError):
            open_scratch(job_root, clock).close()


def _scratch() -> str:
    return f"{tempfile.gettempdir()}/syncd-{os.getuid()}"


class HostStage:
    """The staged copies of one job on this host.

    Args:
        directory: The directory of all jobs' copies; created with mode 0700. Where another user could change it,
            `.UID` is appended.
        stalled: Seconds for which another process's copy may make no progress.
    """

    def __init__(
        self, directory: str, job_root: str, clock: Clock | None = None, stalled: float = STALLED
    ) -> None:
        self._clock, self._stalled = clock or SystemClock(), stalled
        self._disk = LocalDisk()
        try:
            self._root = _own_root(directory)
            self._own = f"{self._root}/{_job_key(job_root)}.{Process.current().boot[:8] or '00000000'}"
            is_network = mount_of(self._root).is_network
            if not is_network:
                _private(self._own)
        except OSError as error:
            problem = f"no stage can be made: {error.strerror}"
            raise ConfigError(problem, path=directory, hint=f"ls -ld {directory}") from error
        if is_network:
            problem = "a stage must be local to this host"
            hint = f"--stage /dev/shm/syncd  # {TROUBLESHOOTING}#a-stage-must-be-local-to-this-host"
            raise ConfigError(problem, path=directory, hint=hint)
        self._sweep_all(keep=_newest(self._own))

    @property
    def directory(self) -> str:
        """Return the directory of the copies of this job."""
        return self._own

    def provide(
        self,
        source: StageSource,
        stop: Callable[[], bool] = lambda: False,
        report: Callable[..., None] = lambda *_, **__: None,
        *,
        check: bool = True,
    ) -> StagedCopy:
        """Return a whole copy: an existing one, one that another process finishes meanwhile, or a new one.

        This process has made it or hashed it, in this call, unless `check` is false.

        Args:
            report: Hears of an existing copy that is damaged, and removed.
            check: Whether an existing copy is hashed; else its `is_checked` is false.
        """
        seen, since = (-1, 0), self._clock.monotonic()
        while True:
            awaited, now = source.reader.awaited(source.wanted), self._clock.monotonic()
            progress = self._progress(source.key), awaited or 0
            if progress != seen:
                seen, since = progress, now
            if now - since >= self._stalled:
                break
            copy = self.find_whole(source, stop, report) if check else self.find(source)
            if copy is None and awaited is None:
                copy = self._copy_or_none(source.key, source, stop)
            if copy is not None:
                return copy
            if stop():
                break
            self._clock.sleep(_POLL)
        # The process that copies makes no progress: it is stopped, or its mount hangs. Copy alone.
        return self._copy_alone(source, stop)

    def find(self, source: StageSource) -> StagedCopy | None:
        """Return the copy if it exists, unchecked."""
        return self.find_digest(source.version.digest)

    def find_digest(self, digest: str) -> StagedCopy | None:
        """Return a copy of the step whose manifest has a digest, whatever number it was published as; unchecked."""
        for name in _names(self._own):
            match = _COPY.fullmatch(name)
            if match is not None and match["digest"] == _short(digest):
                held = lock_file(f"{self._own}/{name}{_LOCK}", exclusive=False)
                copy = _existing(f"{self._own}/{name}", held) if held is not None else None
                if copy is not None:
                    return copy
        return None

    def has_digest(self, digest: str) -> bool:
        """Return whether there is a copy of the step whose manifest has a digest."""
        matches = (_COPY.fullmatch(name) for name in _names(self._own))
        return any(match is not None and match["digest"] == _short(digest) for match in matches)

    def free(self) -> int:
        return self._disk.free(self._root)

    def open_early(self, step: int, attempt: str) -> EarlyDirectory | None:
        """Return a place for files of an attempt, None if a process has one for it, or another attempt has one."""
        key = _early_key(step, attempt)
        _private(self._own)
        held = lock_file(f"{self._own}/{key}{_LOCK}", exclusive=True)
        if held is None:
            return None
        try:
            self._clear(self._own, key)
            if not any(map(self._is_held, self._early_keys())):
                return EarlyDirectory(self._disk, f"{self._own}/{temporary_name(key)}", held)
        except BaseException:
            held.remove()
            raise
        held.remove()
        return None

    def _early_keys(self) -> set[str]:
        return {_key_of(name) for name in _names(self._own) if name.startswith(_EARLY_PART)}

    def early_bytes(self, step: int) -> int | None:
        """Return the bytes that are written of the early files of a step that a process makes, None if none does."""
        names = [name for name in _names(self._own) if name.startswith(f"{_EARLY_PART}{step}-")]
        made = [name for name in names if self._is_held(_key_of(name))]
        return _BLOCK * sum(_written(f"{self._own}/{name}") for name in made) if made else None

    def _is_held(self, key: str) -> bool:
        held = lock_file(f"{self._own}/{key}{_LOCK}", exclusive=True)
        if held is not None:
            held.close()
        return held is None

    def _revoke_early(self, keep: str | None) -> bool:
        """Take the room of early files, whoever makes them: he notices that his lock is gone.

        Args:
            keep: The directory that keeps its files.

        Returns:
            Whether there were any.
        """
        early = [name for name in _names(self._own) if name.startswith(_EARLY_PART)]
        revoked = [name for name in early if f"{self._own}/{name}" != keep]
        for name in revoked:
            with contextlib.suppress(OSError):
                os.unlink(f"{self._own}/{_key_of(name)}{_LOCK}")
                remove_tree(self._disk, f"{self._own}/{name}")
        return bool(revoked)

    def has_copies(self) -> bool:
        return bool(_newest(self._own))

    def discard(self, copy: StagedCopy) -> None:
        """Remove a copy that is damaged, whoever uses it: nobody finds it again. It is closed."""
        name = os.path.basename(copy.path)
        gone = f"{self._own}/{temporary_name(name)}"
        with contextlib.closing(copy), contextlib.suppress(OSError):
            if copy.is_current:
                # One process alone can rename it, so only that one removes the lock under which it is made again.
                os.rename(copy.path, gone)
                os.unlink(f"{copy.path}{_LOCK}")
                remove_tree(self._disk, gone)

    def sweep(self) -> None:
        """Remove the copies of all jobs that no process uses, and unfinished copies of killed processes."""
        self._sweep_all()

    def _sweep_all(self, keep: str = "") -> None:
        with contextlib.suppress(OSError):
            for entry in self._disk.list(self._root):
                if entry.kind == "directory" and _JOB.fullmatch(entry.name):
                    self._sweep(f"{self._root}/{entry.name}", keep)

    def close(self) -> None:
        self.sweep()
        with contextlib.suppress(OSError):
            os.rmdir(self._own)

    def find_whole(
        self, source: StageSource, stop: Callable[[], bool], report: Callable[..., None]
    ) -> StagedCopy | None:
        """Return the copy if it exists, hashed now; one that is damaged is removed."""
        copy = self.find(source)
        if copy is None:
            return None
        try:
            check_copy(copy.path, source.records, stop)
        except (CorruptDataError, OSError) as error:
            self.discard(copy)
            report("warning", "stage_copy_damaged", path=copy.path, reason=str(error))
            return None
        except BaseException:
            copy.close()
            raise
        copy.is_checked = True
        return copy

    def _copy_or_none(self, key: str, source: StageSource, stop: Callable[[], bool]) -> StagedCopy | None:
        """Return a copy, made now; None while another process copies or removes it, or once one has made it."""
        _private(self._own)
        held = lock_file(f"{self._own}/{key}{_LOCK}", exclusive=True)
        if held is None:
            return None
        path = f"{self._own}/{key}"
        if os.path.isdir(path):
            held.close()
            return None
        try:
            self._copy(path, key, source, stop)
        except BaseException:
            held.remove()
            raise
        copy = _existing(path, held) if held.share() else None
        if copy is not None:
            copy.is_checked = True
        return copy

    def _copy_alone(self, source: StageSource, stop: Callable[[], bool]) -> StagedCopy:
        # No other process knows this name, so the copy is only missing if a person removed it.
        copy = self._copy_or_none(f"{source.key}+{uuid.uuid4().hex[:8]}", source, stop)
        if copy is None:
            raise StorageError("a copy in the stage was removed", path=self._own)
        return copy

    def _copy(self, path: str, key: str, source: StageSource, stop: Callable[[], bool]) -> None:
        self._clear(self._own, key)
        self._make_room(source)
        temporary = f"{self._own}/{temporary_name(key)}"
        try:
            source.write(temporary, stop)
            os.rename(temporary, path)
        except BaseException as error:
            remove_tree(self._disk, temporary)
            if isinstance(error, OSError) and error.errno in _FULL:
                raise self._full(source.size) from error
            raise
        self._sweep(self._own)

    def _make_room(self, source: StageSource) -> None:
        early = source.reader.early_directory(source.wanted)
        if self._has_room(source.size, early):
            return
        seconds = _LET_GO if self._revoke_early(early) else 0.0
        self.sweep()
        until = self._clock.monotonic() + seconds
        while not self._has_room(source.size, early):
            if self._clock.monotonic() >= until:
                raise self._full(source.size)
            self._clock.sleep(_POLL)

    def _has_room(self, size: int, early: str | None) -> bool:
        """Return whether files fit beside all but the early files in a directory, which become these or go."""
        # Asked first: what is written meanwhile then counts twice, not as missing.
        free = self._disk.free(self._own)
        return size <= free + (_BLOCK * _written(early) if early else 0)

    def _full(self, size: int) -> StageFullError:
        free = self._disk.free(self._root)
        return StageFullError(
            f"{size} bytes do not fit, {free} are free", path=self._root, hint=f"df -h {self._root}"
        )

    def _progress(self, key: str) -> int:
        """Return the bytes that are written of an unfinished copy; its files may have their whole sizes at once."""
        return sum(_written(f"{self._own}/{name}") for name in _names(self._own) if _is_part(name, key))

    def _sweep(self, directory: str, keep: str = "") -> None:
        with contextlib.suppress(OSError):
            for key in sorted({_key_of(name) for name in _names(directory)} - {"", keep}):
                self._sweep_key(directory, key)
            if directory != self._own:
                os.rmdir(directory)

    def _sweep_key(self, directory: str, key: str) -> None:
        """Remove a copy that no process uses; one that cannot be removed stays."""
        with contextlib.suppress(OSError):
            held = lock_file(f"{directory}/{key}{_LOCK}", exclusive=True)
            if held is not None:
                with contextlib.closing(held):
                    self._clear(directory, key)
                    remove_tree(self._disk, f"{directory}/{key}")
                    held.remove()

    def _clear(self, directory: str, key: str) -> None:
        """Remove unfinished copies of killed processes. Call it with the exclusive lock."""
        for name in _names(directory):
            if _is_part(name, key):
                remove_tree(self._disk, f"{directory}/{name}")


def _written(path: str) -> int:
    """Return the blocks that the files below a directory have."""
    size = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += os.lstat(f"{directory}/{name}").st_blocks
    return size


def _existing(path: str, held: FileLock) -> StagedCopy | None:
    # Another process may have removed it between the exclusive and the shared lock.
    if os.path.isdir(path):
        return StagedCopy(path, held)
    held.close()
    return None


def _newest(directory: str) -> str:
    copies = [(match, name) for name in _names(directory) if (match := _COPY.fullmatch(name))]
    pairs = {name: (int(match["generation"]), int(match["step"])) for match, name in copies}
    return max(pairs, key=pairs.__getitem__, default="")


def _short(digest: str) -> str:
    return digest.rpartition(":")[2][:16]


def _job_key(root: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", os.path.basename(root)).lstrip(".")[:60] or "job"
    return f"{name}-{hashlib.sha256(os.fsencode(root)).hexdigest()[:8]}"


def _early_key(step: int, attempt: str) -> str:
    return f"{_EARLY}{step}-{hashlib.sha256(attempt.encode()).hexdigest()[:16]}"


def _key_of(name: str) -> str:
    if is_temporary(name):
        return name.removeprefix(".").rpartition(".tmp")[0].rpartition(".")[0]
    return name.removesuffix(_LOCK)


def _is_part(name: str, key: str) -> bool:
    return is_temporary(name) and _key_of(name) == key


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _own_root(directory: str) -> str:
    """Return a directory, created; if another user could change it, the one of this user beside it."""
    root = os.path.realpath(directory)
    os.makedirs(root, 0o700, exist_ok=True)
    if os.access(root, os.W_OK | os.X_OK, effective_ids=True) and weak_level(root) is None:
        return root
    own = f"{root}.{os.geteuid()}"
    _private(own)
    return own


def _private(path: str) -> None:
    """Create a directory that only this user can use, or check that an existing one is."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if weak := weak_level(os.path.dirname(path)):
        problem = f"another user could replace staged files: {weak.problem}"
        raise ConfigError(problem, path=weak.path, hint=f"{weak.mend}, or another directory: --stage DIR")
    if not is_private(path):
        raise ConfigError("others may use this directory of the stage", path=path, hint=f"rm -r {path}")
