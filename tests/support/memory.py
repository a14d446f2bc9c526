"""A disk and a clock in memory, for tests that look at thousands of documents."""

from syncd.errors import CorruptDataError
from syncd.protocol.disk import DOCUMENT_LIMIT, Data, DirectoryEntry, FileStat
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk


class MemoryDisk(LocalDisk):
    """Whole files by path; a directory is there as soon as something is in it."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = files if files is not None else {}

    def read(self, path: str, limit: int = DOCUMENT_LIMIT) -> bytes:
        if len(self._there(path)) > limit:
            raise CorruptDataError("too large", path=path)
        return self.files[path]

    def read_at(self, path: str, offset: int, length: int, *, ahead: bool = True) -> bytes:
        del ahead
        return self._there(path)[offset : offset + length]

    def stat(self, path: str) -> FileStat:
        if any(name.startswith(f"{path}/") for name in self.files):
            return FileStat("directory", 0, 0, 0)
        return FileStat("file", len(self._there(path)), 0, 0)

    def list(self, path: str) -> list[DirectoryEntry]:
        below = {name.removeprefix(f"{path}/") for name in self.files if name.startswith(f"{path}/")}
        if not below:
            raise FileNotFoundError(path)
        return [DirectoryEntry(name, "file") for name in below if "/" not in name] + [
            DirectoryEntry(name, "directory")
            for name in {name.split("/")[0] for name in below if "/" in name}
        ]

    def replace(self, path: str, data: Data, *, via: str | None = None, private: bool = False) -> None:
        self.files[path] = data if isinstance(data, bytes) else b"".join(bytes(part) for part in data)

    def make_directory(self, path: str) -> None:
        pass

    def unlink(self, path: str) -> None:
        self._there(path)
        del self.files[path]

    def _there(self, path: str) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]


class HandClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1.7e9 + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def memory_job(files: dict[str, bytes] | None = None) -> Job:
    """Return a job whose files are in memory."""
    return Job("/job", "/job/.syncd", MemoryDisk(files))
