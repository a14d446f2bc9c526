"""What an explorer writes down beside its batches: one file a subject, one writer a file."""

import os
from collections.abc import Mapping
from typing import Any

from syncd import jsonl
from syncd.errors import storage_error
from syncd.protocol.disk import Disk
from syncd.protocol.local_disk import LocalDisk


class Records:
    """A file of JSON lines that one process appends to.

    Args:
        path: The file; its directory is made.
        disk: The job's file system.

    Raises:
        StorageError: It cannot be written.
    """

    def __init__(self, path: str, disk: Disk | None = None) -> None:
        self.path, self._disk = path, disk or LocalDisk()
        try:
            self._disk.make_directory(os.path.dirname(os.path.abspath(path)))
        except OSError as error:
            raise storage_error(error, path) from error

    def add(self, record: Mapping[str, Any]) -> None:
        """Append one line.

        Raises:
            StorageError: It cannot be written.
        """
        try:
            jsonl.append(self.path, [record], self._disk.adopt)
        except OSError as error:
            raise storage_error(error, self.path) from error

    def all(self) -> list[dict[str, Any]]:
        """Return the records that can be read; what a killed process left half written is none."""
        try:
            return [found for found in jsonl.read(self.path) if found is not None]
        except FileNotFoundError:
            return []
