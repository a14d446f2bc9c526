"""What this host can give to others: copies of its stage, containers, and proven pieces of what it is getting.

All processes of a host share it, since one of them alone listens. In the directory of a job's copies:

    <generation>.<step>-<digest>       a whole copy, of the stage
    containers-<digest>/               the containers of a step
    live-<kind>-<digest>               what is being got: a line of JSON (where, and the names), then a byte for each
                                       piece, 1 once it is proven

Each has a lock beside it, as copies have, so the stage removes what a killed process leaves.
"""

import contextlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from syncd.protocol.documents import parse_json
from syncd.protocol.file_lock import FileLock, lock_file

KINDS = ("copy", "containers")
_COPY = re.compile(r"\d+\.\d+-([0-9a-f]{16})", re.ASCII)


def key_of(digest: str) -> str:
    """Return how the digest of a manifest is shortened in names."""
    return digest.rpartition(":")[2][:16]


@dataclass(slots=True)
class Holding:
    """What the host has of one step while it is used: `close` it."""

    path: str
    names: Sequence[str]  # of the files, sorted
    held: FileLock | None
    marks: bytes | None = None  # which pieces are proven, None if all are

    def has(self, number: int) -> bool:
        return self.marks is None or (number < len(self.marks) and self.marks[number] == 1)

    def close(self) -> None:
        if self.held is not None:
            self.held.close()


class LivePieces:
    """The marks of what is being got, which other processes of the host read.

    Args:
        shelf: The directory of the job's copies.
        target: Where the files are being written.
    """

    def __init__(
        self, shelf: str, kind: str, digest: str, target: str, names: Sequence[str], count: int
    ) -> None:
        self.marks = bytearray(count)
        self._path = f"{shelf}/live-{kind}-{key_of(digest)}"
        head = json.dumps({"path": target, "names": list(names)}).encode() + b"\n"
        self._at, self._descriptor = len(head), -1
        self._held = lock_file(f"{self._path}.lock", exclusive=True)
        if self._held is None:  # another process of this host gets it too, and shows its own
            return
        try:
            with open(f"{self._path}.new", "wb") as file:
                file.write(head + bytes(count))
            os.rename(f"{self._path}.new", self._path)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        except BaseException:
            self._held.remove()
            raise

    def mark(self, number: int) -> None:
        """Show that a piece is proven and written."""
        self.marks[number] = 1
        if self._held is not None:
            os.pwrite(self._descriptor, b"\1", self._at + number)

    def close(self) -> None:
        if self._held is not None:
            os.close(self._descriptor)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._held.remove()
            self._held = None


class Shelf:
    """What this host has of one job's steps."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def find(self, kind: str, digest: str) -> Holding | None:
        """Return what the host has of a step, None if it has nothing of it."""
        return self._live(kind, digest) or self._whole(kind, digest) or self._live(kind, digest)

    def _whole(self, kind: str, digest: str) -> Holding | None:
        for name in _names(self.directory):
            match = _COPY.fullmatch(name)
            is_it = (
                match is not None and match[1] == digest if kind == "copy" else name == f"containers-{digest}"
            )
            path = f"{self.directory}/{name}"
            if is_it and (held := lock_file(f"{path}.lock", exclusive=False)) is not None:
                if os.path.isdir(path):
                    return Holding(path, files_below(path), held)
                held.close()
        return None

    def _live(self, kind: str, digest: str) -> Holding | None:
        try:
            with open(f"{self.directory}/live-{kind}-{digest}", "rb") as file:
                head = parse_json(file.readline())
                if os.path.isdir(head["path"]):
                    return Holding(head["path"], head["names"], None, file.read())
        except (OSError, ValueError, KeyError):
            pass
        return None


def files_below(path: str) -> list[str]:
    """Return the names of the files below a directory, sorted."""
    return sorted(
        os.path.relpath(f"{directory}/{name}", path)
        for directory, _, names in os.walk(path)
        for name in names
    )


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
