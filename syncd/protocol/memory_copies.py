"""Copies of steps in the memory of the trainer's host: where they are, what each holds, and who holds it.

    DIR/syncd.<job>.<boot>/owner.lock                 the trainer that writes there holds it
    DIR/syncd.<job>.<boot>/<step>-<attempt>/          a copy: the files of one save, and the receipts of its writers
    DIR/syncd.<job>.<boot>/<step>-<attempt>.lock      readers hold it shared, whoever removes the copy exclusively

A copy is never announced. A follower of the version may read the copy instead of the files if it is of the same save.
Locks end with their process, so others can remove what a killed process leaves.
"""

import contextlib
import hashlib
import os
import re
import stat as stat_module
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from syncd.errors import CorruptDataError, SyncdError
from syncd.protocol.disk import remove_tree, tree_stats
from syncd.protocol.documents import record_in
from syncd.protocol.file_lock import FileLock, lock_file
from syncd.protocol.layout import is_identity
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.manifest import Manifest, from_receipts, missing_files
from syncd.protocol.path_trust import weak_level
from syncd.protocol.process import Process
from syncd.protocol.receipt import read_receipts, whole_attempt

MEMORY_KEY = "memory"  # the key of a trainer's presence that says where its copies are

OWNER = "owner.lock"
_LOCK = ".lock"
_PLACE = re.compile(r"syncd\.[A-Za-z0-9_-][A-Za-z0-9._-]*-[0-9a-f]{8}\.[0-9a-f]{8}", re.ASCII)
_COPY = re.compile(r"(0|[1-9][0-9]{0,15})-[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", re.ASCII)


@dataclass(frozen=True, slots=True)
class MemoryDirectory:
    """Where the copies of one job are on one host."""

    directory: str
    boot: str  # the boot of the host: memory does not outlive it

    @staticmethod
    def here(root: str, job_root: str) -> "MemoryDirectory":
        """Return the place of a job below a directory of this host."""
        boot = Process.current().boot
        name = re.sub(r"[^A-Za-z0-9_-]", "_", os.path.basename(job_root))[:60] or "job"
        key = hashlib.sha256(os.fsencode(job_root)).hexdigest()[:8]
        return MemoryDirectory(f"{os.path.realpath(root)}/syncd.{name}-{key}.{boot[:8] or '00000000'}", boot)

    def copy(self, step: int, attempt: str) -> str:
        return f"{self.directory}/{step}-{attempt}"


def memory_directory_of(info: Mapping[str, Any]) -> MemoryDirectory | None:
    """Return the place that a presence's `info` names, None where it names none on this host and boot."""
    memory = record_in(MemoryDirectory, info, MEMORY_KEY)
    if memory is None or not memory.boot or memory.boot != Process.current().boot:
        return None
    # A presence, which others may write, must not make this process read or delete other directories of this user.
    is_one = (
        os.path.isabs(memory.directory) and _PLACE.fullmatch(os.path.basename(memory.directory)) is not None
    )
    return memory if is_one else None


class HeldCopy:
    """A copy that no one removes while it is held. Its directory, `path`, is laid out as the step's."""

    def __init__(self, path: str, memory: MemoryDirectory, held: FileLock) -> None:
        self.path, self._memory, self._held = path, memory, held

    def close(self) -> None:
        """Release the copy; a second call does nothing. The last reader of an ended trainer removes what it left."""
        self._held.close()
        clear_directory(self._memory.directory)


def hold_copy(memory: MemoryDirectory, manifest: Manifest) -> HeldCopy | None:
    """Return the copy of the save that a manifest seals, held; None if there is none, or none that is whole."""
    if not is_identity(manifest.attempt) or not is_private(memory.directory):
        return None
    path = memory.copy(manifest.step, manifest.attempt)
    if not os.path.isdir(path):
        return None
    held = lock_file(f"{path}{_LOCK}", exclusive=False)
    if held is None:
        return None
    with contextlib.suppress(OSError, CorruptDataError):
        # Under the lock: until now somebody may have been about to remove it.
        if is_copy_of(path, manifest):
            return HeldCopy(path, memory, held)
    held.close()
    return None


def is_copy_of(path: str, manifest: Manifest) -> bool:
    """Return whether a directory has just the files of a manifest: names, sizes, digests of what was written."""
    disk = LocalDisk()
    whole = whole_attempt(
        [receipt for receipt in read_receipts(disk, path) if receipt.attempt == manifest.attempt]
    )
    if whole is None:
        return False
    written = from_receipts(whole)
    same = (written.step, written.shards, written.files) == (manifest.step, manifest.shards, manifest.files)
    return same and not missing_files(disk, path, manifest)


def is_private(path: str) -> bool:
    """Return whether a path is a directory, no link, that only this user can use, and nobody else can replace."""
    try:
        status = os.lstat(path)
        is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        return stat_module.S_ISDIR(status.st_mode) and is_own and weak_level(path) is None
    except OSError:
        return False


def lock_directory(directory: str) -> FileLock | None:
    """Return the exclusive lock of a directory of copies; None while a trainer has it, or if it does not exist."""
    return lock_file(f"{directory}/{OWNER}", exclusive=True)


def copies_in(directory: str) -> list[str]:
    """Return the names of the copies in a directory, and of what is left of some."""
    try:
        names = {name.removesuffix(_LOCK) for name in os.listdir(directory)}
    except FileNotFoundError:
        return []
    return sorted(name for name in names if _COPY.fullmatch(name))


def discard(directory: str, keep: Collection[str] = ()) -> int:
    """Remove the copies that nobody reads; return the bytes of those that stay. For the directory's owner."""
    left = 0
    for name in copies_in(directory):
        if name in keep or not _removed(directory, name):
            left += size_of(f"{directory}/{name}")
    return left


def clear_directory(directory: str) -> None:
    """Remove the directory of a trainer that has ended, except copies that are read; what cannot be removed stays."""
    with contextlib.suppress(OSError, SyncdError):
        while is_private(directory) and (owner := lock_directory(directory)) is not None:
            try:
                discard(directory)
                if not copies_in(directory):
                    owner.remove()
                    os.rmdir(directory)
            finally:
                owner.close()
            # A reader that released its copy meanwhile could not clear: this process held the lock.
            if all(_is_held(directory, name) for name in copies_in(directory)):
                return


def clear_all(root: str) -> None:
    """Remove what ended trainers of this user left below a directory, of all jobs and boots."""
    with contextlib.suppress(OSError):
        for name in filter(_PLACE.fullmatch, os.listdir(root)):
            clear_directory(f"{root}/{name}")


def size_of(path: str) -> int:
    size = 0
    with contextlib.suppress(OSError):
        for file in tree_stats(LocalDisk(), path):
            size += 0 if file.kind == "directory" else file.size
    return size


def _is_held(directory: str, name: str) -> bool:
    held = lock_file(f"{directory}/{name}{_LOCK}", exclusive=True)
    if held is None:
        return True
    held.close()
    return False


def _removed(directory: str, name: str) -> bool:
    held = lock_file(f"{directory}/{name}{_LOCK}", exclusive=True)
    if held is None:
        return False
    try:
        remove_tree(LocalDisk(), f"{directory}/{name}")
        held.remove()
    finally:
        held.close()
    return True
