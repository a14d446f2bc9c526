"""The host's memory: the budget of one rank's buffers and copies, and what is free here and in its control groups."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from syncd.protocol.mount import mount_of

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

        Return why they exceed the budget, in which case nothing changes; empty if they do not.
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


RESERVE = 20
"""A copy must leave free this fraction (1 / RESERVE) of the host's memory and of each control group's limit."""

_UNLIMITED = 1 << 60
_V1, _V2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"


class MemoryLeft(NamedTuple):
    """What is left of some memory, in bytes."""

    left: int  # what can be allocated without swapping
    total: int


@dataclass(frozen=True, slots=True)
class FreeMemory:
    host: MemoryLeft
    control_group: MemoryLeft | None  # of the tightest control group; None without a limit
    free: int  # bytes that are free in the file system


def refusal(memory_left: FreeMemory, size: int, used: int, limit: int) -> str:
    """Return why `size` bytes more do not fit, else an empty text; copies that stay take `used` of `limit` bytes."""
    if used + size > limit:
        return f"copies may take {limit} bytes, {used} are taken, and this one is {size}"
    if size > memory_left.free:
        return f"the file system has {memory_left.free} bytes free, the copy is {size}"
    for what, memory in (("the host", memory_left.host), ("its control group", memory_left.control_group)):
        if memory is not None and memory.left - size < memory.total // RESERVE:
            least = memory.total // RESERVE
            return f"{what} has {memory.left} bytes of memory left; a copy of {size} must leave {least}"
    return ""


def read_free_memory(directory: str) -> FreeMemory:
    status = os.statvfs(directory)
    return FreeMemory(_host(), min(_groups(), default=None), status.f_bavail * status.f_frsize)


def free_memory() -> int:
    """Return the bytes that this host and the tightest control group of this process have left."""
    return min((_host().left, *(group.left for group in _groups())))


def capacity(directory: str) -> int:
    status = os.statvfs(directory)
    return status.f_blocks * status.f_frsize


def is_tmpfs(directory: str) -> bool:
    # A ramfs is memory too, but does not tell how much it may take.
    return mount_of(directory).type == "tmpfs"


def _host() -> MemoryLeft:
    meminfo = _figures(Path("/proc/meminfo"))
    return MemoryLeft(meminfo.get("MemAvailable:", 0) << 10, meminfo.get("MemTotal:", 0) << 10)


def _groups() -> Iterator[MemoryLeft]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                yield from _left(_V2, path, ("memory.max", "memory.current", "inactive_file"))
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                yield from _left(_V1, path, names)


def _left(root: str, path: str, names: tuple[str, str, str]) -> Iterator[MemoryLeft]:
    """Yield what each group from `path` up to the root has left; a group that cannot be read has no limit."""
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        group = Path(root, *parts[:depth])
        with contextlib.suppress(OSError, ValueError):
            limit = int((group / names[0]).read_text(encoding="ascii"))
            used = int((group / names[1]).read_text(encoding="ascii"))
            if limit < _UNLIMITED:
                yield MemoryLeft(limit - used + _figures(group / "memory.stat").get(names[2], 0), limit)


def _figures(path: Path) -> dict[str, int]:
    rows = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
