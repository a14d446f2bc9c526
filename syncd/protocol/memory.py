"""Copies of steps in the memory of the trainer's host: where they are, what each holds, and who keeps it there.

    DIR/syncd.<job>.<boot>/owner.lock                 the trainer that writes there holds it
    DIR/syncd.<job>.<boot>/<step>-<attempt>/          a copy: the files of one save, and the receipts of its writers
    DIR/syncd.<job>.<boot>/<step>-<attempt>.lock      readers hold it shared, whoever removes the copy exclusively

A copy is never announced: the version is, as ever, and who follows it may read the copy instead of the files if it
is one of that very save. Locks end with their process, so whatever a killed one leaves can be removed by others.
"""

import contextlib
import hashlib
import os
import re
import stat as stat_module
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from syncd.errors import CorruptDataError, SyncdError
from syncd.protocol.claims import Claim, claim
from syncd.protocol.disk import LocalDisk, remove_tree
from syncd.protocol.layout import is_identity
from syncd.protocol.manifest import Manifest, from_receipts, missing_files
from syncd.protocol.process import Process
from syncd.protocol.receipt import read_receipts, whole_attempt

TOLD = "memory"
"""Where a trainer's presence says where its copies are."""

OWNER = "owner.lock"
_LOCK = ".lock"
_PLACE = re.compile(r"syncd\.[A-Za-z0-9_-][A-Za-z0-9._-]*-[0-9a-f]{8}\.[0-9a-f]{8}", re.ASCII)
_COPY = re.compile(r"(0|[1-9][0-9]{0,15})-[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the copies of one job are on one host.

    Args:
        directory: Their directory.
        boot: The boot of the host: memory does not outlive it.
    """

    directory: str
    boot: str

    @staticmethod
    def here(root: str, job_root: str) -> "Place":
        """Return the place of a job below a directory of this host."""
        boot = Process.current().boot
        name = re.sub(r"[^A-Za-z0-9_-]", "_", os.path.basename(job_root))[:60] or "job"
        key = hashlib.sha256(os.fsencode(job_root)).hexdigest()[:8]
        return Place(f"{os.path.realpath(root)}/syncd.{name}-{key}.{boot[:8] or '00000000'}", boot)

    def document(self) -> dict[str, str]:
        """Return what a trainer's presence says of it."""
        return {"directory": self.directory, "boot": self.boot}

    def copy(self, step: int, attempt: str) -> str:
        """Return the directory of a copy."""
        return f"{self.directory}/{step}-{attempt}"


def place_of(info: Mapping[str, Any]) -> Place | None:
    """Return the place that a presence's `info` names, None where it names none on this host and boot."""
    found = info.get(TOLD)
    if not isinstance(found, Mapping):
        return None
    directory, boot = found.get("directory"), found.get("boot")
    if not isinstance(directory, str) or not boot or boot != Process.current().boot:
        return None
    # Who may write into the job must not have other directories of this user looked into, or tidied up.
    is_one = os.path.isabs(directory) and _PLACE.fullmatch(os.path.basename(directory)) is not None
    return Place(directory, boot) if is_one else None


class Held:
    """A copy that stays while it is held.

    Args:
        path: Its directory, laid out as the step's.
        place: Where it is.
        held: The reader's claim.
    """

    def __init__(self, path: str, place: Place, held: Claim) -> None:
        self.path, self._place, self._held = path, place, held

    def close(self) -> None:
        """Let go; a second call does nothing. The last reader of a trainer that has gone removes what it left."""
        self._held.close()
        with contextlib.suppress(OSError, SyncdError):
            clear(self._place.directory)


def take(place: Place, manifest: Manifest) -> Held | None:
    """Hold the copy of the save that a manifest seals; None where there is none, or none that is whole."""
    if not is_identity(manifest.attempt) or not is_private(place.directory):
        return None
    path = place.copy(manifest.step, manifest.attempt)
    if not os.path.isdir(path):
        return None
    held = claim(f"{path}{_LOCK}", exclusive=False)
    if held is None:
        return None
    with contextlib.suppress(OSError, CorruptDataError):
        # Under the claim: until now it may have been about to be removed.
        if holds(path, manifest):
            return Held(path, place, held)
    held.close()
    return None


def holds(path: str, manifest: Manifest) -> bool:
    """Say whether a directory has just the files of a manifest: names, sizes, and the digests of what was written."""
    disk = LocalDisk()
    whole = whole_attempt([one for one in read_receipts(disk, path) if one.attempt == manifest.attempt])
    if whole is None:
        return False
    found = from_receipts(whole)
    same = (found.step, found.shards, found.files) == (manifest.step, manifest.shards, manifest.files)
    return same and not missing_files(disk, path, manifest)


def is_private(path: str) -> bool:
    """Say whether a path is a directory, no link, that only this user can use."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat_module.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def owned(directory: str) -> Claim | None:
    """Claim a place as the one that writes and removes there; None while a trainer has it, or if it is not there."""
    return claim(f"{directory}/{OWNER}", exclusive=True)


def copies(directory: str) -> list[str]:
    """Return the names of the copies in a place, and of what is left of some."""
    try:
        names = {name.removesuffix(_LOCK) for name in os.listdir(directory)}
    except FileNotFoundError:
        return []
    return sorted(name for name in names if _COPY.fullmatch(name))


def discard(directory: str, keep: Collection[str] = ()) -> int:
    """Remove the copies of a place that nobody reads; return the bytes that those left take. For its owner."""
    left = 0
    for name in copies(directory):
        if name in keep or not _removed(directory, name):
            left += size_of(f"{directory}/{name}")
    return left


def clear(directory: str) -> None:
    """Remove a place whose trainer has gone, but for the copies that are read."""
    while is_private(directory) and (owner := owned(directory)) is not None:
        try:
            discard(directory)
            if not copies(directory):
                owner.remove()
                with contextlib.suppress(OSError):
                    os.rmdir(directory)
        finally:
            owner.close()
        # A reader that let go meanwhile could not clear, because this did.
        if all(_is_held(directory, name) for name in copies(directory)):
            return


def clear_all(root: str) -> None:
    """Remove what trainers of this user that have gone left below a directory, of all jobs and boots."""
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            if _PLACE.fullmatch(name):
                clear(f"{root}/{name}")


def size_of(path: str) -> int:
    """Return the bytes of all files below a directory."""
    return sum(_sizes(path))


def _sizes(path: str) -> Iterator[int]:
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.lstat(f"{directory}/{name}").st_size


def _is_held(directory: str, name: str) -> bool:
    held = claim(f"{directory}/{name}{_LOCK}", exclusive=True)
    if held is None:
        return True
    held.close()
    return False


def _removed(directory: str, name: str) -> bool:
    held = claim(f"{directory}/{name}{_LOCK}", exclusive=True)
    if held is None:
        return False
    try:
        remove_tree(LocalDisk(), f"{directory}/{name}")
        held.remove()
    finally:
        held.close()
    return True
