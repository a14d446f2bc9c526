"""The metadata of a distributed checkpoint: which data files it has, and how long each must be.

It is a pickle, and it is not loaded: its operations are only walked through, which runs nothing, and each
piece of data is recognised by the three fields of torch's storage record. A pickle that is cut short has
no end.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from syncd.daemon.foreign.look import Verdict
from syncd.daemon.foreign.weights import FILES_LIMIT
from syncd.daemon.snapshot import State
from syncd.errors import CorruptDataError
from syncd.protocol.disk import Disk

METADATA_LIMIT = 32 << 20
"""The largest metadata that is read, enough for 150,000 pieces of tensors."""

OPERATION_LIMIT = 1 << 24
"""The most operations that are walked through, a few seconds."""

DATA_SUFFIX = ".distcp"
_NAME = re.compile(r"__[0-9]{1,6}_[0-9]{1,6}\.distcp", re.ASCII)
_FIELDS = ["relative_path", "offset", "length"]
_GETS = frozenset({"BINGET", "LONG_BINGET"})
_SILENT = frozenset({"PROTO", "FRAME"})
_SETS = frozenset({"SETITEM", "SETITEMS"})


def whole_metadata(
    disk: Disk, path: str, _size: int, _progress: Callable[[], None] = lambda: None
) -> Verdict:
    """Say whether the metadata is whole, and name the data files with their lengths.

    Raises:
        CorruptDataError: It is too large, or names too many files.
    """
    data = disk.read(path, METADATA_LIMIT)
    try:
        lengths = _lengths(data, path)
    except (ValueError, IndexError, KeyError, OverflowError):
        return Verdict(State.FILLING, "it is not written to its end")
    if len(lengths) > FILES_LIMIT:
        raise CorruptDataError(f"it names more than {FILES_LIMIT} files", path=path)
    return Verdict(names=lengths) if lengths else Verdict(State.FILLING, "it names no data file")


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
