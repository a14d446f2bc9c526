"""A file that says to load balancers whether the engine is to be given work."""

import contextlib
import os


class ReadyFile:
    """There while the engine is ready; a follower that starts removes what a killed one has left.

    Args:
        path: The file; None for no file.

    Raises:
        OSError: It can be neither removed nor made.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._shown: str | None = None
        self._remove()

    def show(self, label: str | None) -> None:
        """Write the file with the version that is served; None takes it away."""
        if self._path is None or label == self._shown:
            return
        if label is None:
            self._remove()
        else:
            temporary = f"{self._path}.{os.getpid()}.tmp"
            with open(temporary, "w", encoding="ascii") as file:
                file.write(f"{label}\n")
            os.replace(temporary, self._path)
        self._shown = label

    def _remove(self) -> None:
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
