"""Reads a file of the source piece by piece, and compares it with its digest at the end."""

from collections.abc import Iterator

from syncd.errors import CorruptDataError
from syncd.parts.mirror.ends import SourceEnd
from syncd.parts.mirror.links import Link
from syncd.protocol.digest import Hasher, hasher, name_of
from syncd.protocol.receipt import FileRecord


class CheckedFile:
    """A file of the source that is read in order, `piece` bytes at once."""

    def __init__(self, source: SourceEnd, link: Link, record: FileRecord, piece: int) -> None:
        self._source, self._link, self._record, self._piece = source, link, record, piece
        self._kind = name_of(record.digest)
        self.state: Hasher = hasher(self._kind)

    def pieces(self, begin: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield offset and bytes of each piece from a place on; what lies before it was given to `state`."""
        size, offset = self._record.size, begin
        while offset < size:
            length = min(self._piece, size - offset)
            data = self._source.read(self._link, self._record, offset, length)
            if len(data) != length:
                raise CorruptDataError(
                    f"{self._record.name} of step {self._link.step} is shorter than its manifest says"
                )
            self.state.update(data)
            yield offset, data
            offset += length

    def check(self) -> None:
        if f"{self._kind}:{self.state.hexdigest()}" != self._record.digest:
            raise CorruptDataError(
                f"the content of {self._record.name} of step {self._link.step} does not match its digest",
                hint="syncd verify SOURCE STEP --deep",
            )
