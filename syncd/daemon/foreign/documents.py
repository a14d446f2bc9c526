"""Small files beside the weights: the index of a sharded model, the configuration of an adapter.

Each is bounded before it is parsed, and what it names stays a plain name of its own directory.
"""

import json
from collections.abc import Callable
from typing import Any

from syncd.daemon.foreign.look import Verdict
from syncd.daemon.foreign.weights import FILES_LIMIT
from syncd.daemon.snapshot import State
from syncd.errors import CorruptDataError
from syncd.protocol.disk import Disk
from syncd.protocol.layout import is_relative_name

INDEX_LIMIT = 32 << 20
"""The largest index that is read; that of a model of 1,000,000,000,000 parameters has half of it."""

CONFIG_LIMIT = 4 << 20
NAME_LIMIT = 255
TENSOR_LIMIT = 1 << 20
_NESTING_LIMIT = 64


def whole_index(disk: Disk, path: str, _size: int, _progress: Callable[[], None] = lambda: None) -> Verdict:
    """Say whether an index of shards is whole, and name its shards.

    Raises:
        CorruptDataError: It is too large, no index, or names files outside of its directory.
    """
    data = disk.read(path, INDEX_LIMIT)
    # Only objects within objects make a parsed document much larger than its text, and an index has three.
    if data.count(b"{") + data.count(b"[") > _NESTING_LIMIT or data.count(b":") > TENSOR_LIMIT:
        raise CorruptDataError("it is not an index of shards", path=path)
    document = _parsed(data)
    if document is None:
        return Verdict(State.FILLING, "it cannot be parsed yet")
    return Verdict(names=_shards(document, path))


def whole_object(disk: Disk, path: str, _size: int, _progress: Callable[[], None] = lambda: None) -> Verdict:
    """Say whether a configuration file is whole: one JSON object.

    Raises:
        CorruptDataError: It is too large, or JSON but no object.
    """
    document = _parsed(disk.read(path, CONFIG_LIMIT))
    if document is None:
        return Verdict(State.FILLING, "it cannot be parsed yet")
    if type(document) is not dict:
        raise CorruptDataError("it is not a JSON object", path=path)
    return Verdict()


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _shards(document: Any, path: str) -> dict[str, int]:
    shards = document.get("weight_map") if type(document) is dict else None
    if type(shards) is not dict or not shards or not all(type(name) is str for name in shards.values()):
        raise CorruptDataError("it is not an index of shards", path=path)
    names = dict.fromkeys(shards.values(), 0)
    if len(names) > FILES_LIMIT:
        raise CorruptDataError(f"it names more than {FILES_LIMIT} files", path=path)
    for name in names:
        if "/" in name or len(name) > NAME_LIMIT or not is_relative_name(name):
            raise CorruptDataError(f"it names {name[:80]!a}, which is not a file beside it", path=path)
    return names
