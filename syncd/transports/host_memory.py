"""The budget for the memory of the host that one rank's buffers and copies may take together."""

from threading import Lock


class HostMemory:
    """What takes how much of a rank's budget. Any thread may use it.

    Args:
        limit: Bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken: dict[str, int] = {}
        self._lock = Lock()

    @property
    def used(self) -> int:
        """Return the bytes that are taken."""
        with self._lock:
            return sum(self._taken.values())

    def take(self, what: str, size: int) -> str:
        """Have something take so many bytes instead of what it took before; 0 gives all back.

        Returns:
            Why they exceed the budget, in which case nothing changes; empty if they do not.
        """
        with self._lock:
            others = sum(taken for name, taken in self._taken.items() if name != what)
            if size and others + size > self.limit:
                used = f", and {others >> 20} are taken" if others else ""
                return f"{what} needs {size >> 20} MiB; a rank may take {self.limit >> 20}{used}"
            self._taken[what] = size
            return ""

    def record(self, what: str, size: int) -> None:
        """Have something take so many bytes even if they exceed the budget: it is not there twice, or cannot wait."""
        with self._lock:
            self._taken[what] = size


def unlimited() -> HostMemory:
    """Return a budget that nothing exceeds."""
    return HostMemory(1 << 62)
