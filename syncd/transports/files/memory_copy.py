"""A second copy of a step in the memory of the trainer's host, which gets the same bytes as the step."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from syncd.errors import SyncdError
from syncd.protocol.layout import ACTOR
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.receipt import FileRecord, Receipt, write_receipt
from syncd.transports.files.shard import IN_MEMORY, NewFile

P = ParamSpec("P")
T = TypeVar("T")


class MemoryCopy:
    """One rank's side of a second copy of a step, in memory.

    A failure is never raised: `report_failure` gets the reason once, and the copy is then never whole.
    """

    def __init__(
        self, path: str, step: int, attempt: str, world_size: int, report_failure: Callable[[str], None]
    ) -> None:
        self._path, self._step, self._attempt, self._world_size = path, step, attempt, world_size
        self._report_failure, self._disk = report_failure, LocalDisk()
        self._file: NewFile | None = None
        self.failed = False

    def begin(self, name: str, size: int) -> None:
        """Begin this rank's shard, and allocate its memory at once."""
        self._file = self._tried(NewFile, f"{self._path}/{ACTOR}/{name}", size, IN_MEMORY)

    def put(self, piece: memoryview, offset: int) -> None:
        if self._file is not None:
            self._tried(self._file.write, piece, offset)

    def finish(self) -> None:
        if self._file is not None:
            self._tried(self._file.finish)
        self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def write(self, name: str, content: bytes) -> None:
        self._tried(self._disk.replace, f"{self._path}/{ACTOR}/{name}", content)

    def seal(self, writer: int, shards: list[FileRecord], files: list[FileRecord]) -> None:
        """Confirm that this rank's files are whole, by the records of its receipt in the step."""
        receipt = Receipt(self._step, self._attempt, writer, self._world_size, tuple(shards), tuple(files))
        self._tried(write_receipt, self._disk, self._path, receipt)

    def _tried(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        if self.failed:
            return None
        try:
            return work(*args, **kwargs)
        except (OSError, SyncdError) as error:
            self.failed = True
            self.close()
            self._report_failure(str(error))
            return None
