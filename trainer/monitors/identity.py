"""One name for a job directory in all services: kept in it, so that it moves with it and goes with it."""

import os
import uuid

from syncd.errors import CorruptDataError
from syncd.protocol.local_disk import LocalDisk

_LENGTH = 32
"""Characters of an id: a UUID in hex."""


def place(directory: str, kind: str) -> str:
    """Return the directory below the job where a kind of monitor keeps its files."""
    return os.path.join(directory, "monitors", kind)


def identity(directory: str) -> str:
    """Return the job's id for services that ask for one; the first call makes it.

    Raises:
        OSError: It can be neither read nor written.
    """
    disk, path = LocalDisk(), place(directory, "id")
    try:
        found = disk.read(path, limit=64).decode().strip()
    except (FileNotFoundError, CorruptDataError, UnicodeDecodeError):
        found = ""
    return found if _is_id(found) else _make(disk, path)


def _is_id(text: str) -> bool:
    return len(text) == _LENGTH and text.isalnum()


def _make(disk: LocalDisk, path: str) -> str:
    fresh = uuid.uuid4().hex
    disk.make_directory(os.path.dirname(path))
    disk.replace(path, fresh.encode() + b"\n")
    return fresh
