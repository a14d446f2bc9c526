"""The budget for the memory of the host that one rank's buffers and copies may take together."""

from threading import Lock

_MIB = 1 << 20


class HostMemory:
    """What takes how many bytes of a rank's budget. Any thread may use it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken: dict[str, int] = {}
        self._lock = Lock()

    @property
    def used(self) -> int:
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
                free = max(self.limit - others, 0) // _MIB
                return f"no room for {what}: {-(-size // _MIB)} MiB where {free} of {self.limit // _MIB} are free"
            self._taken[what] = size
            return ""

    def record(self, what: str, size: int) -> None:
        """Have something take so many bytes even if they exceed the budget: it is not there twice, or cannot wait."""
        with self._lock:
            self._taken[what] = size


def unlimited() -> HostMemory:
    return HostMemory(1 << 62)
