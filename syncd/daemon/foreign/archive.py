"""Is a file of `torch.save` whole? Told by the end of its zip archive alone: nothing is unpickled.

A zip archive ends in a record that says where its central directory is, and the directory comes after all
data. So an archive whose last bytes are such a record, with the directory right before it, was written to
its end.
"""

import struct
from collections.abc import Callable

from syncd.daemon.foreign.look import Verdict
from syncd.daemon.snapshot import State
from syncd.errors import CorruptDataError
from syncd.protocol.disk import Disk

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
    """Say whether a file is one whole torch archive.

    Raises:
        CorruptDataError: It is no archive, or the parts of its end contradict each other.
    """
    first = disk.read_at(path, 0, len(_LOCAL))
    if _is_unwritten(first):
        return _filling(size)
    if first != _LOCAL:
        raise CorruptDataError("not an archive of torch.save", path=path)
    return _ended(disk, path, size)


def _is_unwritten(first: bytes) -> bool:
    return len(first) < len(_LOCAL) or not any(first)


def _filling(size: int) -> Verdict:
    return Verdict(State.FILLING, f"{_UNFINISHED} ({size} bytes)")


def _ended(disk: Disk, path: str, size: int) -> Verdict:
    tail = disk.read_at(path, max(0, size - _TAIL), _TAIL)
    if len(tail) < min(size, _TAIL) or (found := _directory(tail, size)) is None:
        return _filling(size)
    start, stated = found
    if start < 0 or start != stated:
        raise CorruptDataError("its central directory is not where its end says", path=path)
    first = disk.read_at(path, start, len(_CENTRAL))
    if _is_unwritten(first):
        return _filling(size)
    if first != _CENTRAL:
        raise CorruptDataError("it has no central directory", path=path)
    return Verdict()


def _directory(tail: bytes, size: int) -> tuple[int, int] | None:
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
