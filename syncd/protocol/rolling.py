"""The wave: which explorers may load which version now, if a daemon rolls versions out (`.syncd/rolling.json`).

Only the leader writes the file, fenced by its term, and only where rolling updates are configured. An explorer whose
presence has `READS_GATE` in `reads` fetches versions as they come and loads one once the wave admits it; others load
what is published. Without the file nobody waits.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from syncd.errors import CorruptDataError, ProtocolTooNewError
from syncd.protocol.disk import MISSING
from syncd.protocol.documents import (
    SMALL_LIMIT,
    Document,
    Fields,
    as_document,
    decode,
    encode,
    read_document,
    record_from,
    record_in,
)
from syncd.protocol.layout import Job
from syncd.protocol.presence import Presence
from syncd.protocol.version import GoodVersion, Pair, good_version_from

READS_GATE = "gate"  # what an explorer that waits for the wave has in `reads`

GATE = "gate"
"""What the `info` of an explorer's presence holds while it waits at the gate, or loads what it was admitted to."""

ALONE = 60.0  # seconds without another beat of the wave after which an explorer goes on without a leader

IDLE, CANARY, ROLLING, STOPPED = "idle", "canary", "rolling", "stopped"
PHASES = (IDLE, CANARY, ROLLING, STOPPED)

UNITS = ("engine", "host")  # what pauses together: each engine for itself, or all engines of a host


@dataclass(frozen=True, slots=True)
class Admission:
    generation: int
    step: int
    digest: str  # of the version, as in the version file
    since: float = 0.0  # seconds since the epoch on the clock of the daemon that wrote it last
    # Whether it counts nowhere, since the engine runs no version: it holds only while that is so.
    free: bool = False
    incarnation: str = ""  # of the explorer's presence: another one is a process that has read nothing yet

    @property
    def pair(self) -> Pair:
        return self.generation, self.step


@dataclass(frozen=True, slots=True)
class StoppedVersion:
    """A version that canaries answered wrongly or gave up: nobody is admitted to it."""

    generation: int
    step: int
    digest: str
    reason: str = ""

    @property
    def pair(self) -> Pair:
        return self.generation, self.step


@dataclass(frozen=True, slots=True)
class Wave:
    term: int = 0  # the fencing token of the daemon that wrote it
    beat: int = field(default=0, compare=False)  # grows with each write
    phase: str = IDLE  # idle, canary, rolling or stopped
    candidate: GoodVersion | None = None  # only canaries may load it
    approved: GoodVersion | None = (
        None  # the newest version that canaries have shown to be good: all others get it
    )
    by_word: bool = (
        False  # whether canaries only say that they run it, since there was nothing to prove it by
    )
    stopped: tuple[StoppedVersion, ...] = ()
    admitted: Mapping[str, Admission] = field(default_factory=dict)  # by explorer
    # Explorers whose admission was withdrawn, with when: each may have read it before, so it keeps a slot a while.
    leaving: Mapping[str, float] = field(default_factory=dict)
    lost: tuple[str, ...] = ()  # explorers that ended, with their engine, while they tested the candidate
    waiting: tuple[str, ...] = ()  # the explorers that come next, in order
    why: str = ""  # why the first of them waits
    old: tuple[str, ...] = ()  # explorers that do not wait for the wave
    limit: int = 1  # how many units may pause at once
    unit: str = UNITS[0]  # what a unit is
    patience: float = 600.0  # seconds after which a slot no longer counts

    @property
    def stopped_pairs(self) -> frozenset[Pair]:
        return frozenset(version.pair for version in self.stopped)

    def needed(self) -> Mapping[int, str]:
        """Return the digest of each step that explorers are told to load, by step."""
        versions = (*self.admitted.values(), self.candidate, self.approved)
        return {version.step: version.digest for version in versions if version}


@dataclass(frozen=True, slots=True)
class AtGate:
    generation: int
    step: int
    passed: bool  # whether it loads the version now; else it has fetched it and waits
    since: float  # since when, in seconds since the epoch on the explorer's clock

    @property
    def pair(self) -> Pair:
        return self.generation, self.step


def unit_of(explorer: Presence, unit: str) -> str:
    """Return the name of what pauses together with an explorer; the daemon and followers count the same units."""
    return explorer.host if unit == "host" and explorer.host else f"engine {explorer.identity}"


def at_gate(info: Mapping[str, Any]) -> AtGate | None:
    """Return what a presence's `info` says of the gate, None if its explorer is not there."""
    return record_in(AtGate, info, GATE)


def encode_wave(wave: Wave) -> bytes:
    versions = {"candidate": _document(wave.candidate), "approved": _document(wave.approved)}
    admitted = {name: as_document(slot) for name, slot in wave.admitted.items()}
    stopped = [as_document(version) for version in wave.stopped]
    return encode(
        as_document(wave, **versions, admitted=admitted, stopped=stopped, leaving=dict(wave.leaving))
    )


def _document(version: GoodVersion | None) -> Document | None:
    return as_document(version) if version else None


def read_wave(job: Job) -> Wave | None:
    """Return the wave, None if no version is rolled out in this job.

    `CorruptDataError` means that the file is damaged; the leader replaces it soon.
    """
    try:
        return wave_from(read_document(job.disk, job.rolling, SMALL_LIMIT))
    except MISSING:
        return None


def wave_or_closed(data: bytes, path: str) -> Wave:
    """Return the wave in the bytes of its file; one that admits nobody if they are damaged."""
    try:
        return wave_from(decode(data, path))
    except ProtocolTooNewError:
        raise
    except CorruptDataError:
        return Wave()


def wave_from(document: Fields) -> Wave:
    return record_from(
        Wave,
        document,
        "term",
        "beat",
        candidate=good_version_from(document.optional_record("candidate")),
        approved=good_version_from(document.optional_record("approved")),
        stopped=tuple(record_from(StoppedVersion, item) for item in document.records("stopped")),
        admitted=_by_name(document, "admitted"),
        leaving=_times(document.record("leaving")),
        phase=_one_of(document, "phase", PHASES),
        unit=_one_of(document, "unit", UNITS),
    )


def _by_name(document: Fields, key: str) -> Mapping[str, Admission]:
    record = document.record(key)
    return {name: record_from(Admission, record.record(name), "since") for name in record.document}


def _times(record: Fields) -> Mapping[str, float]:
    return {name: record.number(name) for name in record.document}


def _one_of(document: Fields, key: str, values: Iterable[str]) -> str:
    value = document.text(key)
    if value not in values:
        raise document.wrong(key, f"one of {', '.join(values)}")
    return value
