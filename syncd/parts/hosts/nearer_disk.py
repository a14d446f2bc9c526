"""The job's file system, read less: with what this host has, or is getting, in the place of some files."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from syncd.protocol.disk import Disk
from syncd.protocol.local_disk import LocalDisk


class LocalFile(NamedTuple):
    """A file of this host that the job has too."""

    path: str
    # Waits until some bytes of it are proven: from the first, so many. Without it all are.
    await_bytes: Callable[[int, int], None] = lambda *_: None


class NearerDisk(LocalDisk):
    """The job's file system, with some files read from this host.

    Args:
        places: What this host has of a file, by where the job has it.
    """

    def __init__(self, disk: Disk, places: Mapping[str, LocalFile]) -> None:
        super().__init__()
        self._origin, self._places = disk, places

    def read_at(self, path: str, offset: int, length: int, *, ahead: bool = True) -> bytes:
        nearer = self._places.get(path)
        if nearer is None:
            return self._origin.read_at(path, offset, length, ahead=ahead)
        nearer.await_bytes(offset, length)
        return super().read_at(nearer.path, offset, length, ahead=ahead)


class HeadsDisk(LocalDisk):
    """The job's file system, which keeps what was read of files from their first byte on.

    A container begins with the table of its frames, which is read to plan, and then once more for the copy.
    """

    def __init__(self, disk: Disk) -> None:
        super().__init__()
        self._origin, self._heads = disk, dict[str, bytearray]()
        self._is_full = False

    def keep_no_more(self) -> None:
        """Keep what was read until now, and nothing of what will be read."""
        self._is_full = True

    def read_at(self, path: str, offset: int, length: int, *, ahead: bool = True) -> bytes:
        head = self._heads.setdefault(path, bytearray())
        if offset + length <= len(head):
            return bytes(head[offset : offset + length])
        data = self._origin.read_at(path, offset, length, ahead=ahead)
        if not self._is_full and offset <= len(head) < offset + len(data):
            head[offset:] = data
        return data
