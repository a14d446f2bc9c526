"""`events.jsonl`: what the leading daemon decided and why, one JSON line an event, rotated by size.

Only a leader writes: on NFS two hosts that append to one file overwrite each other. A standby keeps what it hears in
memory and writes it if it takes over. A line that cannot be written is dropped and counted, and the gap is reported
once writing works again; nothing here raises.
"""

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from syncd.errors import CorruptDataError
from syncd.jsonl import append_lines, document_in
from syncd.observe import event_names
from syncd.observe.events import Event
from syncd.protocol.documents import Fields
from syncd.safe_open import open_read
from syncd.stall.calls import TrackCall, untracked

KEEP = 3  # rotated files beside the current one: `events.jsonl.1` is the newest of them

MAX_BYTES = 8 << 20
MAX_LINE = 64 << 10

_WAITING = 64
_MOST_READ = 16 << 20
_ENDS = frozenset({event_names.STANDBY_STARTED, event_names.LEADERSHIP_LOST})
_TOO_MANY = frozenset(
    {
        event_names.SCAN_COMPLETED,
        event_names.EXPLORER_LAG_CHANGED,
        event_names.ENGINE_REPORTED,
        event_names.MOUNT_STUCK,
    }
)


class Journal:
    """Appends events to a file while this process leads.

    Args:
        path: The file; its directory comes with the first leader.
        max_bytes: Size beyond which it is rotated.
        adopt: Given the path of a new file: `Disk.adopt` of the job.
        attend: Notes each call of the file system while it runs.
    """

    def __init__(
        self,
        path: str,
        max_bytes: int = MAX_BYTES,
        keep: int = KEEP,
        adopt: Callable[[str], None] | None = None,
        attend: TrackCall = untracked,
    ) -> None:
        self._path, self._max_bytes, self._keep, self._adopt = path, max_bytes, keep, adopt
        self._attend = attend
        self._waiting: deque[bytes] = deque(maxlen=_WAITING)
        self._leads = False
        self.dropped = self._reported = 0

    def observe(self, event: Event) -> None:
        """Append one event, or keep it until this process leads."""
        if event.name in _TOO_MANY:
            return
        if event.name in _ENDS:
            self._leads = False  # from here on another daemon may be writing
        self._waiting.append(encode_event(event))
        self._leads |= event.name == event_names.LEADERSHIP_ACQUIRED
        if self._leads:
            self._flush()

    def _flush(self) -> None:
        while self._waiting:
            line = self._gap() + self._waiting.popleft()
            try:
                with self._attend("write", self._path):
                    if self._is_full(len(line)):
                        self._rotate()
                    append_lines(self._path, line, self._adopt)
            except OSError:
                self.dropped += 1
            else:
                self._reported = self.dropped

    def _gap(self) -> bytes:
        lost = self.dropped - self._reported
        if not lost:
            return b""
        detail = f"{lost} events could not be written here"
        return encode_event(
            Event(event_names.OPERATION_FAILED, "error", time.time(), {"code": "journal", "detail": detail})
        )

    def _is_full(self, more: int) -> bool:
        try:
            return os.lstat(self._path).st_size + more > self._max_bytes
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        for number in range(self._keep, 0, -1):
            older = f"{self._path}.{number}"
            newer = f"{self._path}.{number - 1}" if number > 1 else self._path
            with contextlib.suppress(FileNotFoundError):
                os.replace(newer, older)


def encode_event(event: Event) -> bytes:
    frame = {"at": round(event.at, 6), "event": event.name, "level": event.level}
    fields = {key: value for key, value in event.fields.items() if value is not None}
    line = _line({**frame, **fields, **frame})
    return line if len(line) <= MAX_LINE else _line({**frame, "shortened": True})


def _line(document: dict[str, Any]) -> bytes:
    return json.dumps(document, default=str, separators=(",", ":")).encode() + b"\n"


def read_events(path: str, limit: int) -> list[dict[str, Any]]:
    """Return the last `limit` events, oldest first; torn lines and missing files are skipped."""
    events: list[dict[str, Any]] = []
    for number in range(KEEP + 1):
        name = path if number == 0 else f"{path}.{number}"
        events = [*_read(name, limit - len(events)), *events]
        if len(events) >= limit:
            break
    return events


def first_event_at(path: str) -> float | None:
    """Return when the first event was published, seconds since the epoch on its daemon's clock; None if unknown.

    It is unknown once the journal may have lost its oldest file.
    """
    for number in range(KEEP, -1, -1):
        name = f"{path}.{number}" if number else path
        try:
            with open(open_read(name), "rb") as file:
                document = document_in(file.readline(MAX_LINE))
        except OSError:
            continue
        return _time_of(document or {}) if number < KEEP else None
    return None


def _time_of(document: Mapping[str, Any]) -> float | None:
    try:
        return Fields(document, "events").number("at")
    except CorruptDataError:
        return None


def _read(path: str, limit: int) -> list[dict[str, Any]]:
    events: deque[dict[str, Any]] = deque(maxlen=max(limit, 0))
    for line in _tail(path, limit):
        document = document_in(line)
        if document is not None and isinstance(document.get("event"), str):
            events.append(document)
    return list(events)


def _tail(path: str, limit: int) -> list[bytes]:
    """Return the last lines of a file, reading backwards no further than needed."""
    try:
        with open(open_read(path), "rb") as file:
            return _last_lines(file, limit)
    except OSError:
        return []


def _last_lines(file: BinaryIO, limit: int) -> list[bytes]:
    end, span = file.seek(0, os.SEEK_END), MAX_LINE
    while True:
        start = max(end - span, 0)
        file.seek(start)
        lines = file.read(span).split(b"\n")
        if start == 0 or len(lines) > limit + 1 or span >= _MOST_READ:
            return lines[-limit - 1 :]
        span *= 4
