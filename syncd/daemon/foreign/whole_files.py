"""Checks whether one file is whole: a torch archive, safetensors, JSON, the metadata of a distributed checkpoint.

Nothing is unpickled, every read is bounded, and the names that a file gives stay plain names of its own directory.
"""

import json
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

from syncd.daemon.foreign.directory import Verdict
from syncd.daemon.foreign.weights import FILES_LIMIT
from syncd.errors import CorruptDataError
from syncd.protocol.delta import require_weights
from syncd.protocol.disk import Disk
from syncd.protocol.layout import is_relative_name
from syncd.protocol.safetensors import HEADER_LIMIT, parse_header, read_header
from syncd.protocol.step import StepState

_LOCAL, _CENTRAL = b"PK\x03\x04", b"PK\x01\x02"
_END = struct.Struct("<4s4H2LH")
_END_SIGNATURE = b"PK\x05\x06"
# What torch writes before the end record, so that archives of more than 4 GiB have room for their numbers.
_LOCATOR = struct.Struct("<4sLQL")
_LOCATOR_SIGNATURE = b"PK\x06\x07"
_WIDE_END = struct.Struct("<4sQ2H2L4Q")
_WIDE_END_SIGNATURE = b"PK\x06\x06"
_TAIL = _WIDE_END.size + _LOCATOR.size + _END.size
_UNFINISHED = "it is not written to its end"


def whole_archive(disk: Disk, path: str, size: int, _progress: Callable[[], None] = lambda: None) -> Verdict:
    """Return whether a file is one whole archive of `torch.save`.

    A zip archive ends in a record that says where its central directory is, and the directory comes after all data.
    So an archive whose last bytes are such a record, with the directory right before it, was written to its end.
    """
    first = disk.read_at(path, 0, len(_LOCAL))
    if _is_unwritten(first):
        return _unfinished_archive(size)
    if first != _LOCAL:
        raise CorruptDataError("not an archive of torch.save", path=path)
    return _archive_end(disk, path, size)


def _is_unwritten(first: bytes) -> bool:
    return len(first) < len(_LOCAL) or not any(first)


def _unfinished_archive(size: int) -> Verdict:
    return Verdict(StepState.FILLING, f"{_UNFINISHED} ({size} bytes)")


def _archive_end(disk: Disk, path: str, size: int) -> Verdict:
    tail = disk.read_at(path, max(0, size - _TAIL), _TAIL)
    if len(tail) < min(size, _TAIL) or (directory := _central_directory(tail, size)) is None:
        return _unfinished_archive(size)
    start, stated = directory
    if start < 0 or start != stated:
        raise CorruptDataError("its central directory is not where its end says", path=path)
    first = disk.read_at(path, start, len(_CENTRAL))
    if _is_unwritten(first):
        return _unfinished_archive(size)
    if first != _CENTRAL:
        raise CorruptDataError("it has no central directory", path=path)
    return Verdict()


def _central_directory(tail: bytes, size: int) -> tuple[int, int] | None:
    """Return where the central directory must begin for its size, and where the end record says it begins."""
    if len(tail) < _END.size or tail[-_END.size :][: len(_END_SIGNATURE)] != _END_SIGNATURE:
        return None
    *_, length, offset, comment = _END.unpack(tail[-_END.size :])
    end = size - _END.size
    if comment:
        return None
    locator = tail[-_END.size - _LOCATOR.size : -_END.size]
    if len(tail) == _TAIL and locator.startswith(_LOCATOR_SIGNATURE) and tail.startswith(_WIDE_END_SIGNATURE):
        *_, length, offset = _WIDE_END.unpack(tail[: _WIDE_END.size])
        end = size - _TAIL
    return end - length, offset


_PREFIX = 8
_OFFSETS_END = re.compile(rb'"data_offsets"\s*:\s*\[\s*[0-9]{1,19}\s*,\s*([0-9]{1,19})\s*\]')
_NO_HEADER = Verdict(StepState.FILLING, "its header is not written yet")


def whole_tensors(disk: Disk, path: str, size: int, progress: Callable[[], None] = lambda: None) -> Verdict:
    """Return whether a safetensors file is whole: its header parses and describes exactly the bytes that are there.

    The header tells a file that is still being written from a damaged one: as long as what can be read of it is sound
    and asks for more bytes than there are, more may come. A header of zeros is not written yet: Trinity's streaming
    writer leaves room for it and fills it in last, and a network may show a hole there.
    """
    try:
        header = read_header(disk, path, progress)
    except CorruptDataError:
        return _unfinished_tensors(disk, path, size, progress)
    require_weights(header, path)
    return Verdict() if header.tensors else Verdict(StepState.FILLING, "it holds no tensor")


def _unfinished_tensors(disk: Disk, path: str, size: int, progress: Callable[[], None]) -> Verdict:
    prefix = disk.read_at(path, 0, _PREFIX)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < _PREFIX or length == 0:
        return _NO_HEADER
    if length > HEADER_LIMIT:
        raise CorruptDataError(f"safetensors header of {length} bytes is over {HEADER_LIMIT}", path=path)
    header = disk.read_at(path, _PREFIX, length)
    if len(header) < length or b"\0" in header:
        return _NO_HEADER
    return _short_tensors(prefix + header, size, path, progress)


def _short_tensors(prefix: bytes, size: int, path: str, progress: Callable[[], None]) -> Verdict:
    wanted = len(prefix) + max((int(end) for end in _OFFSETS_END.findall(prefix)), default=0)
    parse_header(prefix, wanted, path, progress)
    if size > wanted:
        raise CorruptDataError(f"{size} bytes where its header describes {wanted}", path=path)
    return Verdict(StepState.FILLING, f"{size} of {wanted} bytes")


INDEX_LIMIT = 32 << 20
"""The largest index that is read; that of a model of 1,000,000,000,000 parameters has half of it."""

CONFIG_LIMIT = 4 << 20
NAME_LIMIT = 255
TENSOR_LIMIT = 1 << 20
_NESTING_LIMIT = 64


def whole_index(disk: Disk, path: str, _size: int, _progress: Callable[[], None] = lambda: None) -> Verdict:
    data = disk.read(path, INDEX_LIMIT)
    # Only objects within objects make a parsed document much larger than its text, and an index has three.
    if data.count(b"{") + data.count(b"[") > _NESTING_LIMIT or data.count(b":") > TENSOR_LIMIT:
        raise CorruptDataError("it is not an index of shards", path=path)
    document = _parsed(data)
    if document is None:
        return Verdict(StepState.FILLING, "it cannot be parsed yet")
    return Verdict(names=_shards_of(document, path))


def whole_object(disk: Disk, path: str, _size: int, _progress: Callable[[], None] = lambda: None) -> Verdict:
    document = _parsed(disk.read(path, CONFIG_LIMIT))
    if document is None:
        return Verdict(StepState.FILLING, "it cannot be parsed yet")
    if type(document) is not dict:
        raise CorruptDataError("it is not a JSON object", path=path)
    return Verdict()


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _shards_of(document: Any, path: str) -> dict[str, int]:
    shards = document.get("weight_map") if type(document) is dict else None
    if type(shards) is not dict or not shards or not all(type(name) is str for name in shards.values()):
        raise CorruptDataError("it is not an index of shards", path=path)
    names = dict.fromkeys(shards.values(), 0)
    if len(names) > FILES_LIMIT:
        raise CorruptDataError(f"it names more than {FILES_LIMIT} files", path=path)
    for name in names:
        if "/" in name or len(name) > NAME_LIMIT or not is_relative_name(name):
            raise CorruptDataError(
                f"it names {name[:80]!a}, which is not a file in this directory", path=path
            )
    return names


METADATA_LIMIT = 32 << 20  # the largest metadata that is read, enough for 150,000 pieces of tensors
OPERATION_LIMIT = 1 << 24  # the most operations that are walked through, a few seconds

DATA_SUFFIX = ".distcp"
_NAME = re.compile(r"__[0-9]{1,6}_[0-9]{1,6}\.distcp", re.ASCII)
_FIELDS = ["relative_path", "offset", "length"]
_GETS = frozenset({"BINGET", "LONG_BINGET"})
_SILENT = frozenset({"PROTO", "FRAME"})
_SETS = frozenset({"SETITEM", "SETITEMS"})


def whole_metadata(
    disk: Disk, path: str, _size: int, _progress: Callable[[], None] = lambda: None
) -> Verdict:
    """Return whether the metadata of a distributed checkpoint is whole, with its data files and their lengths.

    It is a pickle, and it is not loaded: its operations are only walked through, which runs nothing, and each piece
    of data is recognised by the three fields of torch's storage record. A truncated pickle has no end.
    """
    data = disk.read(path, METADATA_LIMIT)
    try:
        lengths = _lengths(data, path)
    except (ValueError, IndexError, KeyError, OverflowError):
        return Verdict(StepState.FILLING, "it is not written to its end")
    if len(lengths) > FILES_LIMIT:
        raise CorruptDataError(f"it names more than {FILES_LIMIT} files", path=path)
    return Verdict(names=lengths) if lengths else Verdict(StepState.FILLING, "it names no data file")


def _lengths(data: bytes, path: str) -> dict[str, int]:
    """Return the length of each data file: where its last piece ends."""
    lengths: dict[str, int] = {}
    for name, end in _pieces(data, path):
        if _NAME.fullmatch(name):
            lengths[name] = max(end, lengths.get(name, 0))
    return lengths


def _pieces(data: bytes, path: str) -> Iterator[tuple[str, int]]:
    """Yield the file of each piece and where the piece ends in it."""
    from pickletools import genops  # noqa: PLC0415 - large, and only jobs of others need it

    remembered: list[Any] = []
    values: list[Any] = []
    end = 0
    for count, (operation, argument, position) in enumerate(genops(data)):
        if count >= OPERATION_LIMIT or position is None:
            raise CorruptDataError("it has more parts than are read", path=path)
        end, name = position + 1, operation.name
        if name == "MARK":
            values = []
        elif name == "MEMOIZE":
            remembered.append(values[-1] if values else None)
        elif name in _SETS:
            yield from _piece(values)
            values = []
        elif name not in _SILENT:
            values.append(remembered[int(argument or 0)] if name in _GETS else argument)
    if end != len(data):
        raise ValueError("something follows the pickle")


def _piece(values: list[Any]) -> Iterator[tuple[str, int]]:
    if values[:6:2] == _FIELDS and [type(value) for value in values[1:6:2]] == [str, int, int]:
        name, offset, length = values[1:6:2]
        yield name, offset + length
