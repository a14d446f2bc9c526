"""JSON lines beside each other: one writer a file, and a line is whole or left out."""

import json
import os
from collections.abc import Mapping
from typing import Any

from syncd.errors import StorageError


class Records:
    """A file of JSON lines that one process appends to.

    Args:
        path: The file; its directory is made.

    Raises:
        StorageError: It cannot be written.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._end_half_line()
        except OSError as error:
            raise StorageError(error.strerror or str(error), path=path) from error

    def add(self, record: Mapping[str, Any]) -> None:
        """Append one line.

        Raises:
            StorageError: It cannot be written.
        """
        line = json.dumps(record, allow_nan=False, separators=(", ", ": ")) + "\n"
        try:
            with open(self.path, "a", encoding="ascii") as file:
                file.write(line)
        except OSError as error:
            raise StorageError(error.strerror or str(error), path=self.path) from error

    def all(self) -> list[dict[str, Any]]:
        """Return the records that can be read; what a killed process left half written is none."""
        try:
            with open(self.path, "rb") as file:
                lines = file.read().splitlines()
        except FileNotFoundError:
            return []
        return [found for line in lines if isinstance(found := _parsed(line), dict)]

    def _end_half_line(self) -> None:
        try:
            with open(self.path, "rb+") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - 1, 0))
                if size and file.read(1) != b"\n":
                    file.write(b"\n")
        except FileNotFoundError:
            return


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
