"""A file for the node exporter's textfile collector, replaced whole and not too often."""

import contextlib
import os
import time

EVERY = 5.0
"""Seconds between two writes."""


class Textfile:
    """One `.prom` file.

    Args:
        path: Where it is; its directory must exist.
        every: Seconds between two writes.
    """

    def __init__(self, path: str, every: float = EVERY) -> None:
        self._path, self._every = os.path.abspath(path), every
        self._written_at = float("-inf")

    def is_due(self) -> bool:
        """Say whether the last attempt to write was long enough ago."""
        return time.monotonic() - self._written_at >= self._every

    def write(self, data: bytes) -> None:
        """Replace the file.

        Raises:
            OSError: It cannot be written; the old one is still there.
        """
        self._written_at = time.monotonic()
        # The collector reads *.prom only, so this name is never read half written.
        temporary = f"{self._path}.{os.getpid()}.tmp"
        try:
            with open(temporary, "wb") as file:
                file.write(data)
            os.replace(temporary, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
