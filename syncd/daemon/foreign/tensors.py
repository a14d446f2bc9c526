"""Is a safetensors file whole? Its header parses and describes exactly the bytes that are there.

A file that is still being written is told from a damaged one by its header: as long as what can be read of it
is sound and asks for more bytes than there are, more may come. A header of zeros is one that is not written
yet: Trinity's streaming writer leaves room for it and comes back to it last, and a network may show
a hole there.
"""

import re
from collections.abc import Callable

from syncd.daemon.foreign.look import Verdict
from syncd.daemon.snapshot import State
from syncd.errors import CorruptDataError
from syncd.protocol.disk import Disk
from syncd.protocol.safetensors import HEADER_LIMIT, parse_header, read_header

_PREFIX = 8
_END = re.compile(rb'"data_offsets"\s*:\s*\[\s*[0-9]{1,19}\s*,\s*([0-9]{1,19})\s*\]')
_NO_HEADER = Verdict(State.FILLING, "its header is not written yet")


def whole_tensors(disk: Disk, path: str, size: int, progress: Callable[[], None] = lambda: None) -> Verdict:
    """Say whether a safetensors file is whole.

    Raises:
        CorruptDataError: Its header is wrong whatever may follow.
    """
    try:
        header = read_header(disk, path, progress)
    except CorruptDataError:
        return _unfinished(disk, path, size, progress)
    return Verdict() if header.tensors else Verdict(State.FILLING, "it holds no tensor")


def _unfinished(disk: Disk, path: str, size: int, progress: Callable[[], None]) -> Verdict:
    prefix = disk.read_at(path, 0, _PREFIX)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < _PREFIX or length == 0:
        return _NO_HEADER
    if length > HEADER_LIMIT:
        raise CorruptDataError(f"safetensors header of {length} bytes is over {HEADER_LIMIT}", path=path)
    header = disk.read_at(path, _PREFIX, length)
    if len(header) < length or b"\0" in header:
        return _NO_HEADER
    return _short(prefix + header, size, path, progress)


def _short(prefix: bytes, size: int, path: str, progress: Callable[[], None]) -> Verdict:
    wanted = len(prefix) + max((int(end) for end in _END.findall(prefix)), default=0)
    parse_header(prefix, wanted, path, progress)
    if size > wanted:
        raise CorruptDataError(f"{size} bytes where its header describes {wanted}", path=path)
    return Verdict(State.FILLING, f"{size} of {wanted} bytes")
