"""JSON lines that one process appends and others read: a line that a kill has torn damages no other line."""

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from syncd.safe_open import open_append, open_read

LINE_LIMIT = 1 << 20  # the longest line that is read, in bytes


def append(
    path: str, documents: Iterable[Mapping[str, Any]], adopt: Callable[[str], None] | None = None
) -> None:
    append_lines(path, b"".join(map(_line, documents)), adopt)


def append_lines(path: str, data: bytes, adopt: Callable[[str], None] | None = None) -> None:
    """Append lines with one write; if a killed process left a torn last line, end that line first.

    The file is opened each time: a descriptor that is kept open may go stale on a network mount, and closing makes
    the lines visible to other hosts.
    """
    descriptor = open_append(path, adopt)
    try:
        data = b"\n" + data if _is_torn(descriptor) else data
        if os.write(descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, "only a part was written", path)
    finally:
        os.close(descriptor)


def read(path: str) -> Iterator[dict[str, Any] | None]:
    """Yield the document of each line; None for a line that is not a document: torn, too long, or foreign."""
    with open(open_read(path), "rb") as file:
        whole = True
        while line := file.readline(LINE_LIMIT):
            begins, whole = whole, line.endswith(b"\n")
            # The first part of a line beyond the limit is not a document, and the rest is not a line.
            if begins and line.strip():
                yield document_in(line)


def _line(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _is_torn(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def document_in(line: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
