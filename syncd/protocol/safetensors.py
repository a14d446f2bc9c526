"""Headers of safetensors files: written in one form, read as what anybody may have written.

A file is a length N of 8 bytes (little-endian), N bytes of JSON that name each tensor's dtype, shape and
place, and the data. Whatever passes here is accepted by the safetensors library too. What the library lets
through and this parser does not: white space before the header, a name given twice, fields beside the three
of a tensor or in another form than the format describes, null metadata, and what is beyond the bounds below,
which keep a hostile header from costing more than a large one.

A million tensors take seconds: `progress` is called all the while, for heartbeats.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from syncd.errors import CorruptDataError
from syncd.protocol.disk import Disk

DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

HEADER_LIMIT = 100_000_000  # the longest header in bytes; the library has the same bound
TENSOR_LIMIT = 1 << 20  # the most tensors of one file
METADATA_LIMIT = 1 << 16  # the most entries of the metadata of one file
RECORD_LIMIT = 4096  # the longest description of one tensor, in characters
METADATA = "__metadata__"  # the one name in a header that is no tensor's

ALIGN = 4096
"""The data of what is written here begins at a multiple of this: what O_DIRECT asks on every file system known."""

_ELEMENT_LIMIT = 1 << 56
_PREFIX = 8
# One read of this many bytes holds the header of a usual shard, so that it costs one trip to the server.
_FIRST_READ = 1 << 16

_DECODER = json.JSONDecoder()
_OPEN = re.compile(r'\{[ \t\n\r]*+(?:(?=")|(\}))')
_COLON = re.compile(r"[ \t\n\r]*+:[ \t\n\r]*+")
_USUAL = re.compile(
    r'"([^"\\\x00-\x1f]*+)" ?: ?\{"dtype" ?: ?"([A-Z0-9_]+)" ?, ?"shape" ?: ?\[([0-9, ]*+)\] ?, ?'
    r'"data_offsets" ?: ?\[(0|[1-9][0-9]{0,17}) ?, ?(0|[1-9][0-9]{0,17})\]\} ?(?:, ?(?=")|(\}))'
)
"""A tensor as writers write it, whole and with what follows."""

_PROGRESS_EVERY = 1 << 14
_SHAPES_KEPT = 4096
_READ = 4 << 20
_NEXT = re.compile(r'[ \t\n\r]*+(?:,[ \t\n\r]*+(?=")|(\}))')


class Tensor(NamedTuple):
    """One tensor of a file or of a broadcast; `start` and `end` are bytes from the beginning of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    tensors: Mapping[str, Tensor]  # its tensors by name, in the order of their data
    metadata: Mapping[str, str]  # free text by name
    data_offset: int  # where the data begins, in bytes from the start of the file
    size: int  # length of the whole file in bytes


Progress = Callable[[], None]
_Shape = tuple[tuple[int, ...], int]


def _nothing() -> None:
    """Do nothing."""


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """Return the beginning of a file: the length, the JSON, and spaces up to a multiple of `ALIGN`.

    `tensors` has name, dtype, shape and bytes of each tensor, in the order of their data.
    """
    document: dict[str, object] = {METADATA: {"format": "pt"}}
    start = 0
    for name, dtype, shape, size in tensors:
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(document, separators=(",", ":")).encode()
    text = text.ljust(aligned(_PREFIX + len(text)) - _PREFIX)
    return len(text).to_bytes(_PREFIX, "little") + text


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


Signature = Mapping[str, tuple[str, tuple[int, ...]]]  # the (dtype, shape) of each tensor by name


def read_header(disk: Disk, path: str, progress: Progress = _nothing) -> Header:
    """Read and check the header of a file, and its length against the file's."""
    size = disk.stat(path).size
    prefix = disk.read_at(path, 0, _FIRST_READ)
    end = _data_offset(prefix, size, path)
    if end > len(prefix) == _FIRST_READ:
        prefix = _rest(disk, path, prefix, end, progress)
    return parse_header(prefix, size, path, progress)


def _rest(disk: Disk, path: str, prefix: bytes, end: int, progress: Progress) -> bytes:
    parts, position = [prefix], len(prefix)
    while position < end and (part := disk.read_at(path, position, min(_READ, end - position))):
        progress()
        parts.append(part)
        position += len(part)
    return b"".join(parts)


def parse_header(prefix: bytes, file_size: int, path: str = "", progress: Progress = _nothing) -> Header:
    """Parse the first `8 + N` bytes, or more, of a file that has `file_size` bytes."""
    end = _data_offset(prefix, file_size, path)
    if len(prefix) < end:
        raise CorruptDataError(f"safetensors header cut short: {len(prefix)} bytes of {end}", path=path)
    try:
        text = prefix[_PREFIX:end].decode()
    except UnicodeDecodeError:
        raise CorruptDataError("safetensors header is not UTF-8", path=path) from None
    tensors, metadata = _Scanner(text, file_size - end, path, progress).header()
    progress()
    return Header(_in_order(tensors, file_size - end, path), metadata, end, file_size)


def signature(headers: Iterable[Header]) -> Signature:
    """Return the dtype and shape of each tensor of a model, by name, from the headers of all its shards."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for header in headers:
        for tensor in header.tensors.values():
            if tensor.name in shapes:
                raise CorruptDataError(f"two shards hold tensor {_shown(tensor.name)}")
            shapes[tensor.name] = tensor.dtype, tensor.shape
    return shapes


def _data_offset(prefix: bytes, file_size: int, path: str) -> int:
    if len(prefix) < _PREFIX or file_size < _PREFIX:
        raise CorruptDataError("too short for a safetensors file", path=path)
    length = int.from_bytes(prefix[:_PREFIX], "little")
    if length > HEADER_LIMIT:
        raise CorruptDataError(f"safetensors header of {length} bytes is over {HEADER_LIMIT}", path=path)
    if length > file_size - _PREFIX:
        raise CorruptDataError(f"safetensors header of {length} bytes in a file of {file_size}", path=path)
    return _PREFIX + length


def _in_order(tensors: list[Tensor], data_size: int, path: str) -> dict[str, Tensor]:
    """Return the tensors by name in the order of their data, which must cover the data section exactly."""
    tensors.sort(key=itemgetter(3, 4))
    position = 0
    for tensor in tensors:
        if tensor.start != position:
            problem = "overlaps" if tensor.start < position else "leaves a hole after"
            raise CorruptDataError(f"tensor {_shown(tensor.name)} {problem} the one before it", path=path)
        position = tensor.end
    if position != data_size:
        raise CorruptDataError(f"{data_size} bytes of data where {position} are described", path=path)
    return {tensor.name: tensor for tensor in tensors}


class _Scanner:
    """Walks through the JSON of a header and checks each tensor before it reads the next.

    `json.loads` would build whatever the text asks for, fifty times its size in memory, and check nothing.
    """

    __slots__ = ("_data_size", "_path", "_position", "_progress", "_shapes", "_text")

    def __init__(self, text: str, data_size: int, path: str, progress: Progress) -> None:
        self._text, self._data_size, self._path, self._progress = text, data_size, path, progress
        self._position = 0
        self._shapes: dict[str, _Shape] = {}

    def header(self) -> tuple[list[Tensor], dict[str, str]]:
        """Return the tensors in the order of the text, and the metadata."""
        tensors: list[Tensor] = []
        metadata: dict[str, str] = {}
        seen: set[str] = set()
        more = self._take(_OPEN)[1] is None
        while more and (more := self._usual(tensors, seen)):
            name = self._name(seen, TENSOR_LIMIT + 1)
            if name == METADATA:
                metadata = {key: self._string() for key in self._names(METADATA_LIMIT)}
            else:
                tensors.append(self._tensor(name))
            more = self._take(_NEXT)[1] is None
            if len(seen) % _PROGRESS_EVERY == 0:
                self._progress()
        if self._text[self._position :].strip(" \t\n\r"):
            raise self._wrong("goes on after its end")
        return tensors, metadata

    def _usual(self, tensors: list[Tensor], seen: set[str]) -> bool:
        """Take tensors as long as they are good and written as usual; say whether something else follows.

        What is wrong with one, the slow way finds out and says.
        """
        text, position, match = self._text, self._position, _USUAL.match
        while record := match(text, position):
            tensor = self._usual_tensor(record)
            if tensor is None or tensor.name in seen or len(seen) > TENSOR_LIMIT:
                break
            seen.add(tensor.name)
            tensors.append(tensor)
            position = record.end()
            if len(seen) % _PROGRESS_EVERY == 0:
                self._progress()
            if record[6]:
                self._position = position
                return False
        self._position = position
        return True

    def _usual_tensor(self, record: re.Match[str]) -> Tensor | None:
        name, dtype, shape_text, first, last, _ = record.groups()
        shape, bits = self._shapes.get(shape_text) or self._shape(shape_text), DTYPE_BITS.get(dtype)
        if shape is None or bits is None or name == METADATA or record.end() - record.end(1) > RECORD_LIMIT:
            return None
        start, end = int(first), int(last)
        if not start <= end <= self._data_size or (end - start) * 8 != shape[1] * bits:
            return None
        return Tensor(name, dtype, shape[0], start, end)

    def _shape(self, text: str) -> "_Shape | None":
        """Return the lengths of a shape and their product. A model has few shapes, and many tensors of each."""
        try:
            lengths = tuple(_DECODER.decode(f"[{text}]"))
        except ValueError:
            return None
        elements = math.prod(lengths)
        if (elements or math.prod(filter(None, lengths))) >= _ELEMENT_LIMIT:
            return None
        if len(self._shapes) < _SHAPES_KEPT:
            self._shapes[text] = lengths, elements
        return lengths, elements

    def _names(self, limit: int) -> Iterator[str]:
        # Whoever takes a name moves on past its value before asking for the next.
        seen: set[str] = set()
        more = self._take(_OPEN)[1] is None
        while more:
            yield self._name(seen, limit)
            more = self._take(_NEXT)[1] is None

    def _name(self, seen: set[str], limit: int) -> str:
        name = self._string()
        if name in seen or len(seen) == limit:
            problem = f"names {_shown(name)} twice" if name in seen else "has too many entries"
            raise self._wrong(problem)
        seen.add(name)
        self._take(_COLON)
        return name

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str]:
        token = pattern.match(self._text, self._position)
        if token is None:
            raise self._wrong("is not a JSON object of tensors")
        self._position = token.end()
        return token

    def _string(self) -> str:
        if not self._text.startswith('"', self._position):
            raise self._wrong("has something else where a string must be")
        try:
            value, self._position = _DECODER.raw_decode(self._text, self._position)
            if not value.isascii():
                value.encode()  # an escape can spell half a surrogate pair, which is no text
        except ValueError:
            raise self._wrong("holds a string that is not one") from None
        assert isinstance(value, str)
        return value

    def _tensor(self, name: str) -> Tensor:
        start = self._position
        end = self._text.find("}", start, start + RECORD_LIMIT) + 1
        self._position = end
        record = self._text[start:end]
        # The three fields of a tensor need no more colons and no sign; so no field can be there twice.
        if not record.startswith("{") or record.count(":") != 3 or "-" in record:  # noqa: PLR2004
            raise self._bad(name, "is not described by dtype, shape and data_offsets")
        try:
            return self._checked(name, **_DECODER.raw_decode(record)[0])
        except (TypeError, ValueError, RecursionError):
            raise self._bad(name, "is not described by dtype, shape and data_offsets") from None

    def _checked(self, name: str, *, dtype: Any, shape: Any, data_offsets: Any) -> Tensor:
        bits = DTYPE_BITS.get(dtype) if type(dtype) is str else None
        if bits is None:
            raise self._bad(name, "has an unknown dtype")
        start, end = data_offsets
        if type(shape) is not list or type(data_offsets) is not list or not _all_integers(*shape, start, end):
            raise self._bad(name, "has a shape or offsets that are not lists of integers")
        elements = math.prod(shape)
        if not start <= end <= self._data_size:
            raise self._bad(name, f"has offsets outside of the {self._data_size} bytes of data")
        # A zero anywhere hides what overflows in readers that multiply one by one.
        if (elements or math.prod(filter(None, shape))) >= _ELEMENT_LIMIT:
            raise self._bad(name, "has a shape that is too large")
        if (end - start) * 8 != elements * bits:
            raise self._bad(name, f"takes {elements * bits} bits and is given {(end - start) * 8}")
        return Tensor(name, dtype, tuple(shape), start, end)

    def _bad(self, name: str, problem: str) -> CorruptDataError:
        return CorruptDataError(f"tensor {_shown(name)} {problem}", path=self._path)

    def _wrong(self, problem: str) -> CorruptDataError:
        where = f"at character {self._position}"
        return CorruptDataError(f"safetensors header {problem} ({where})", path=self._path)


def _all_integers(*values: object) -> bool:
    return set(map(type, values)) == {int}


def _shown(name: str) -> str:
    return ascii(name if len(name) <= 80 else f"{name[:77]}...")  # noqa: PLR2004 - what fits a line
