"""Presences: the file in which an explorer or a trainer publishes its status, its heartbeat and its leases.

Each module has one file, and each file one writer. Each kind of module has a directory, so heartbeats never touch a
directory that is polled for news. Whether a module is alive is judged by its content changing within a time of the
observer's clock (`Liveness`), never by comparing dates of two hosts.
"""

import contextlib
import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from syncd.errors import CorruptDataError
from syncd.protocol.disk import MISSING, Clock, Disk, is_temporary, list_if_there
from syncd.protocol.documents import (
    MAX_INTEGER,
    SMALL_LIMIT,
    Fields,
    as_document,
    decode,
    encode,
    list_documents,
    record_from,
)
from syncd.protocol.entry_problem import required_read_problem
from syncd.protocol.layout import is_identity
from syncd.protocol.version import Pair, pair_document, pair_from

HEARTBEAT = 5.0  # seconds between two heartbeats
TTL = 60.0  # seconds without a change after which a module counts as dead and its leases as void
READS_DELTA = "delta"  # what an explorer that takes versions of kind `delta` has in `reads`
MAX_READS = 16  # the most names in `reads`

_READS = re.compile(r"[a-z][a-z0-9_-]{0,31}", re.ASCII)

RECENT = "recent"
"""The key in `info` of the versions that an engine has run of late, which its explorer keeps there.

A presence is read every few seconds, and an engine may run several versions in between. The list is for people: the
daemon's journal has it (`versions_applied`), and no decision follows from it.
"""

MOST_RECENT = 64  # versions in the list
KEPT_FOR = 30.0  # seconds for which a version stays in the list, counted when the next one comes
_LONGEST = 40  # letters of an engine's state


class RunningStatus(StrEnum):
    """The status of a module, by the names that Trinity-RFT uses."""

    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"
    STOPPED = "stopped"

    @classmethod
    def _missing_(cls, value: object) -> "RunningStatus | None":
        lowered = str(value).lower()
        return next((member for member in cls if member.value == lowered), None)


@dataclass(frozen=True, slots=True)
class Presence:
    identity: str  # the module's name; its file is `<identity>.json`
    status: RunningStatus = RunningStatus.RUNNING
    beat: int = 0  # grows with every write
    incarnation: str = ""  # identifies this run of the module, so that a restart differs from a heartbeat
    applied: Pair | None = None  # the version that it runs, confirmed
    loading: Pair | None = None  # the version that it is loading now
    # The steps that it reads; retention never removes them while the module lives.
    leases: tuple[int, ...] = ()
    asked: int = 0  # grows each time an explorer asks for a sync; a trainer answers with `answered`
    # For a trainer: the highest `asked` of each explorer that it has answered "nothing newer".
    answered: dict[str, int] = field(default_factory=dict)
    step: int | None = None  # for a trainer: its step
    host: str = ""  # the host that it runs on, for people to read
    pid: int = 0  # its process id, for people to read
    updated_at: float = 0.0  # seconds since the epoch on its own clock, for people to read
    info: dict[str, Any] = field(default_factory=dict)  # other facts
    # Why its file cannot be read; the other fields are then unknown, but for changes of the content. Never
    # written.
    problem: str = ""
    applied_digest: str = ""  # the digest of that version, empty if unknown
    # For an explorer: what it reads beside steps that are stored whole, such as `delta`.
    reads: tuple[str, ...] = ()


def path_of(directory: str, identity: str) -> str:
    return f"{directory}/{identity}.json"


def write_presence(disk: Disk, directory: str, presence: Presence, via: str = "") -> None:
    """Publish a presence; `via` is the directory through which it is renamed, if not that of its kind."""
    pairs = {"applied": pair_document(presence.applied), "loading": pair_document(presence.loading)}
    unwritten = ("problem",) if presence.reads else ("problem", "reads")
    document = as_document(presence, *unwritten, **pairs)
    disk.replace(path_of(directory, presence.identity), encode(document), via=via or None)


def read_presence(disk: Disk, path: str) -> Presence:
    return decode_presence(disk.read(path, SMALL_LIMIT), path)


def decode_presence(data: bytes, path: str) -> Presence:
    fields = decode(data, path)
    try:
        status = RunningStatus(fields.text("status"))
    except ValueError:
        raise fields.wrong("status", "running, require_sync or stopped") from None
    pairs = {key: pair_from(fields.optional_record(key)) for key in ("applied", "loading")}
    values = {
        "identity": _identity(fields, path),
        "status": status,
        "problem": "",
        "reads": _reads(fields),
        **pairs,
    }
    return record_from(Presence, fields, "beat", "updated_at", **values)


def read_presences(disk: Disk, directory: str) -> tuple[dict[str, Presence], dict[str, Presence]]:
    """Return all presences of a kind by identity, and separately those whose files cannot be read.

    A file cannot be read if it is damaged, written by a newer protocol, or not permitted to this user. Such a module
    is known to be there and, by its incarnation, when its content changes; its leases are unknown.
    """
    return Presences(disk).read(directory)


class Presences:
    """Reads directories of presences again and again, and parses only what has changed.

    Each reading lists the directory and opens, reads and closes each file in it, as on a network mount it must be to
    see what other hosts have closed. So a lease that was written before a reading began is in what it returns. Only
    the parsing is saved, and only for a file whose bytes are the same as before: no inode, date or size is trusted,
    which a file system may give again to the next file of that name within one tick of its clock.

    Args:
        progress: Called before each file: thousands on a slow mount take long.
    """

    def __init__(self, disk: Disk, progress: Callable[[], None] = lambda: None) -> None:
        self._disk, self._progress = disk, progress
        self._parsed: dict[str, dict[str, tuple[bytes, Presence]]] = {}

    def read(self, directory: str) -> tuple[dict[str, Presence], dict[str, Presence]]:
        """Return what `read_presences` returns."""
        presences: dict[str, Presence] = {}
        problems: dict[str, Presence] = {}
        before, now = self._parsed.get(directory, {}), {}
        for identity, path in list_documents(self._disk, directory):
            if not is_identity(identity):
                continue
            self._progress()
            try:
                data = self._disk.read(path, SMALL_LIMIT)
                earlier = before.get(identity)
                presence = earlier[1] if earlier and earlier[0] == data else decode_presence(data, path)
            except MISSING:
                continue
            except CorruptDataError as error:
                problems[identity] = _unreadable(self._disk, path, identity, error.message)
            except Exception as error:  # noqa: BLE001 - one file costs itself only
                entry_problem = required_read_problem(error, path)
                problems[identity] = _unreadable(self._disk, path, identity, str(entry_problem))
            else:
                presences[identity], now[identity] = presence, (data, presence)
        self._parsed[directory] = now
        return presences, problems


def _unreadable(disk: Disk, path: str, identity: str, problem: str) -> Presence:
    try:
        file = disk.stat(path)
    except MISSING:
        content = ""
    else:
        content = f"{file.kind} {file.inode} {file.size} {file.mtime_ns}"
    return Presence(identity, incarnation=content, problem=problem)


def _identity(fields: Fields, path: str) -> str:
    identity = fields.text("identity")
    if not is_identity(identity) or not path.endswith(f"/{identity}.json"):
        raise fields.wrong("identity", "the name of its file")
    return identity


def _reads(fields: Fields) -> tuple[str, ...]:
    names = fields.texts("reads")
    if len(names) > MAX_READS or not all(map(_READS.fullmatch, names)):
        raise fields.wrong("reads", f"a list of at most {MAX_READS} names such as {READS_DELTA!r}")
    return names


class Publisher:
    """The one writer of one module's presence file; nothing is written before the first `update`."""

    def __init__(self, disk: Disk, clock: Clock, directory: str, presence: Presence, via: str = "") -> None:
        self._disk, self._clock, self._directory, self._via = disk, clock, directory, via
        self.presence = presence

    def prepare(self) -> None:
        """Create the directory, and remove temporary files that an earlier process of this name left."""
        self._disk.make_directory(self._directory)
        mine = f".{self.presence.identity}.json."
        for entry in list_if_there(self._disk, self._directory):
            if entry.name.startswith(mine) and is_temporary(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    self._disk.unlink(f"{self._directory}/{entry.name}")

    def update(self, **changes: Any) -> Presence:
        """Change fields and publish them with a new beat; if the write fails, the fields stay as they were."""
        # A write that fails may still have reached the file: its number is never given to another content.
        self.presence = replace(self.presence, beat=self.presence.beat + 1)
        changed = replace(self.presence, **changes, updated_at=self._clock.time())
        write_presence(self._disk, self._directory, changed, self._via)
        self.presence = changed
        return changed


class Liveness:
    """Judges which modules are alive, by when their content was last seen to change on this host's clock.

    An observer that has just started gives every module a whole `ttl`.
    """

    def __init__(self, ttl: float = TTL) -> None:
        self.ttl = ttl
        self._seen: dict[str, tuple[Hashable, float]] = {}

    def observe(self, now: float, contents: Iterable[tuple[str, Hashable]]) -> None:
        """Record the present content of each module; forget modules that are not among them."""
        before, self._seen = self._seen, {}
        for name, content in contents:
            earlier = before.get(name)
            self._seen[name] = earlier if earlier and earlier[0] == content else (content, now)

    def silent_for(self, name: str, now: float) -> float:
        """Return the seconds since the content was last seen to change."""
        return now - self._seen[name][1] if name in self._seen else float("inf")

    def is_alive(self, name: str, now: float) -> bool:
        return self.silent_for(name, now) < self.ttl


class RecentVersion(NamedTuple):
    generation: int
    step: int
    at: float  # when it was confirmed: seconds since the epoch on the explorer's clock
    state: str | None  # the engine's state then, None if the explorer reports none


def with_recent(before: Presence, pair: Pair | None, at: float, state: str | None) -> list[RecentVersion]:
    """Return the list with a version that is confirmed now; one that runs already is not new."""
    recent = recent_of(before)
    if pair is None or pair == before.applied:
        return recent
    kept = [version for version in recent if 0 <= at - version.at <= KEPT_FOR]
    return [*kept, RecentVersion(*pair, round(at, 3), state)][-MOST_RECENT:]


def recent_of(presence: Presence) -> list[RecentVersion]:
    """Return the list of a presence, oldest first; entries that are none are left out."""
    entries = presence.info.get(RECENT)
    listed = entries[-MOST_RECENT:] if isinstance(entries, list) else []
    return [version for entry in listed if (version := _version(entry)) is not None]


def _version(entry: Any) -> RecentVersion | None:
    match entry:
        case [int(generation), int(step), int() | float() as at, str() | None as state] if (
            max(abs(generation), abs(step), abs(at)) <= MAX_INTEGER
        ):
            return RecentVersion(generation, step, float(at), state and state[:_LONGEST])
    return None
