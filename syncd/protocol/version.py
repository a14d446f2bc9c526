"""The version file, which explorers follow, and the marker. Only the daemon writes the version, by atomic replace.

The pair `(generation, step)` grows with every publish, across restarts, fail-over and the trainer's resume.
The generation grows when explorers must go to a step that is not later than the last one. A label is what an engine
calls the version that it runs.

The marker is a trainer's hint which step is newest; the manifest is the truth. A reader must expect anything: no
file, half a number, a step that does not exist yet, or a lower one than before. `MarkerReading.text` differs from
one state to the next, so that each is logged once.
"""

import contextlib
import hashlib
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from syncd.errors import CorruptDataError, ProtocolTooNewError
from syncd.protocol.disk import MISSING, Disk
from syncd.protocol.documents import Fields, encode, read_document, record_from
from syncd.protocol.entry_problem import read_problem
from syncd.protocol.layout import MAX_STEP, Job, is_relative_name

Pair = tuple[int, int]
"""(generation, step); ordered as tuples are."""

MAX_GENERATION = 3 << 51
"""The highest generation that is read: what is above it was never published by counting."""

BELIEVED_GENERATION = 1 << 52
"""The highest generation that is taken over from an explorer: generations counted up from it can still be read."""


class Quarantined(NamedTuple):
    """A step that is put aside: it stays readable, and nobody loads it unasked."""

    step: int
    digest: str
    reason: str


@dataclass(frozen=True, slots=True)
class GoodVersion:
    """A published version that an engine has shown to run; the fields are those of `Version`."""

    generation: int
    step: int
    kind: str
    path: str
    digest: str
    layout: str = "syncd"
    parent: int | None = None

    @property
    def pair(self) -> Pair:
        """Return (generation, step)."""
        return self.generation, self.step

    def version(self) -> "Version":
        """Return it as a version that can be leased."""
        return Version(**asdict(self))


@dataclass(frozen=True, slots=True)
class Version:
    """One published version.

    Args:
        generation: Grows when the trainer, or a person, goes back.
        kind: weights, delta, lora or remote.
        path: The directory to load, relative to the job directory; the URI for kind remote.
        digest: The digest of the step's manifest, or the fingerprint of a foreign step.
        layout: Who wrote the step: `syncd`, or the name of a foreign layout.
        parent: For a delta, the step it changes.
        published_at: Seconds since the epoch on the daemon's clock, for people to read.
        previous: The pair published before, whose step is kept too.
        held_marker: After a rollback: what the marker said then, empty without a marker. Until it changes, nothing
            that it announces is published; what needs no marker is published if it was not there at the rollback.
        held_tracker: After a rollback without a marker: the step that the tracker named then. Until the tracker
            changes, it brings no abandoned step back.
        request: The last request that was carried out, so that none is carried out twice.
        carried_out: Requests carried out before that one whose files could not be removed.
        abandoned: Steps of earlier generations that are no longer newest, `(step, digest)`.
        quarantine: The steps that were put aside.
        released: Steps that a person has taken out of quarantine, `(step, digest)`.
        last_good: The newest published version that an engine has shown to run.
        term: The fencing token of the daemon that wrote the file.
    """

    generation: int
    step: int
    kind: str
    path: str
    digest: str
    layout: str = "syncd"
    parent: int | None = None
    published_at: float = 0.0
    previous: Pair | None = None
    held_marker: str | None = None
    held_tracker: int | None = None
    request: str | None = None
    carried_out: tuple[str, ...] = ()
    abandoned: tuple[tuple[int, str], ...] = field(default=())
    quarantine: tuple[Quarantined, ...] = ()
    released: tuple[tuple[int, str], ...] = ()
    last_good: GoodVersion | None = None
    term: int = 0

    @property
    def pair(self) -> Pair:
        """Return (generation, step)."""
        return self.generation, self.step

    @property
    def quarantined(self) -> frozenset[tuple[int, str]]:
        """Return the steps in quarantine, `(step, digest)`."""
        return frozenset((entry.step, entry.digest) for entry in self.quarantine)


def encode_version(version: Version) -> bytes:
    """Return the bytes of the version file."""
    # `asdict` would copy each value deeply, while explorers wait for the version.
    document = {field.name: getattr(version, field.name) for field in fields(version)}
    document |= {"last_good": asdict(version.last_good) if version.last_good else None}
    return encode({**document, "previous": pair_document(version.previous)})


def read_version(job: Job) -> Version | None:
    """Return the published version, None before the first.

    Raises:
        CorruptDataError: The file is damaged; the daemon replaces it at its next publish.
    """
    with contextlib.suppress(*MISSING):
        return version_from(read_document(job.disk, job.version))
    # Whoever asked before the first publish remembers that absence; the open directory tells better.
    try:
        job.disk.refresh(job.state)
        return version_from(read_document(job.disk, job.version))
    except MISSING:
        return None


def read_version_or_none(job: Job) -> Version | None:
    """Return the published version, None before the first or while the file is damaged.

    The daemon replaces a damaged file at its next publish, so callers that poll read it again.

    Raises:
        ProtocolTooNewError: A newer major version of the protocol wrote the file.
    """
    try:
        return read_version(job)
    except ProtocolTooNewError:
        raise
    except CorruptDataError:
        return None


def version_from(fields: Fields) -> Version:
    """Return the version of a decoded document, checked."""
    _check_path(fields)
    return record_from(
        Version,
        fields,
        "published_at",
        generation=fields.integer("generation", most=MAX_GENERATION),
        previous=pair_from(fields.optional_record("previous")),
        abandoned=_step_lists(fields, "abandoned", int, str),
        quarantine=tuple(Quarantined(*item) for item in _step_lists(fields, "quarantine", int, str, str)),
        released=_step_lists(fields, "released", int, str),
        last_good=good_version_from(fields.optional_record("last_good")),
    )


def _check_path(fields: Fields) -> None:
    if fields.text("kind") != "remote" and not is_relative_name(fields.text("path")):
        raise fields.wrong("path", "a path inside the job")


def good_version_from(fields: Fields | None) -> GoodVersion | None:
    """Return the version of a JSON object, checked; None of None."""
    if fields is None:
        return None
    _check_path(fields)
    return record_from(GoodVersion, fields, generation=fields.integer("generation", most=MAX_GENERATION))


def pair_document(pair: Pair | None) -> dict[str, int] | None:
    """Return the JSON form of a pair."""
    return None if pair is None else {"generation": pair[0], "step": pair[1]}


def pair_from(fields: Fields | None) -> Pair | None:
    """Return the pair of a JSON object, None of None."""
    if fields is None:
        return None
    return fields.integer("generation", most=MAX_GENERATION), fields.integer("step")


def _step_lists(fields: Fields, key: str, *types: type) -> tuple[Any, ...]:
    """Return a list of short lists that begin with a step and a digest."""
    items = fields.items(key)
    for item in items:
        if type(item) is not list or [type(part) for part in item] != [*types]:
            raise fields.wrong(key, "a list of lists of step and digest")
    return tuple(map(tuple, items))


UNKNOWN_LABEL = "unknown"
"""The label of weights that are neither a version nor the ones that the engine started with."""

_CONTENT = re.compile(r"[0-9a-f]{16}", re.ASCII)
_LABEL = re.compile(r"(0|[1-9][0-9]{0,15})\.(0|[1-9][0-9]{0,15})(?:\.[0-9a-f]{16}|\+[!-~]+)", re.ASCII)


def label_of(pair: Pair) -> str:
    """Return a pair as people read it, such as 2.120."""
    return f"{pair[0]}.{pair[1]}"


def engine_label(pair: Pair, digest: str) -> str:
    """Return a version as engines are told it, such as 2.120.0f1e2d3c4b5a6978: the pair and its content.

    Args:
        digest: The digest of its manifest, or the fingerprint of a step that others wrote.
    """
    content = digest.rpartition(":")[2][:16]
    if not _CONTENT.fullmatch(content):
        content = hashlib.sha256(digest.encode()).hexdigest()[:16]
    return f"{label_of(pair)}.{content}"


def unpublished_label(pair: Pair, attempt: str) -> str:
    """Return what engines are told of weights that came by a broadcast, until their version is published.

    They have no manifest yet, so the attempt of the save that writes them to files names the content.
    """
    return f"{label_of(pair)}+{attempt}"


def is_unpublished(label: str) -> bool:
    """Return whether a label is of weights that came by a broadcast and were not published yet."""
    return "+" in label and pair_of(label) is not None


def pair_of(label: str | None) -> Pair | None:
    """Return the pair of a label that names content, None of anything else: of a bare 2.120 too."""
    match = _LABEL.fullmatch(label or "")
    return (int(match[1]), int(match[2])) if match else None


_MARKER_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class MarkerReading:
    """What the marker said when it was read once.

    Args:
        step: The step it names, None when it names none.
        text: What it holds, shortened; empty when there is no marker.
        problem: Why it names no step: empty, missing, not a number, out of range, or what keeps it from being read.
        unreadable: This user may not read it, so it may name any step.
    """

    step: int | None
    text: str = ""
    problem: str = ""
    unreadable: bool = False


MISSING_MARKER = MarkerReading(None, problem="missing")


def parse_marker(data: bytes) -> MarkerReading:
    """Return what the bytes of a marker say; never raises."""
    text = data.strip(b" \t\r\n")
    shown = ascii(text[:40].decode("ascii", "replace"))[1:-1]
    if not text:
        return MarkerReading(None, shown, "empty")
    if not text.isdigit():
        return MarkerReading(
            None, shown, "negative" if text[:1] == b"-" and text[1:].isdigit() else "not a number"
        )
    if len(text) > len(str(MAX_STEP)) or int(text) > MAX_STEP:
        return MarkerReading(None, shown, "out of range")
    return MarkerReading(int(text), shown)


def read_marker(disk: Disk, path: str) -> MarkerReading:
    """Read the marker; what cannot be read is a reading with a problem.

    Raises:
        OSError: The file system itself fails, other than by absence.
    """
    try:
        return parse_marker(disk.read(path, _MARKER_LIMIT))
    except MISSING:
        return MISSING_MARKER
    except CorruptDataError as error:
        return MarkerReading(None, problem=error.message)
    except PermissionError as error:
        return MarkerReading(None, problem=str(read_problem(error, path)), unreadable=True)


def write_marker(disk: Disk, path: str, step: int, *, via: str | None = None) -> None:
    """Replace the marker, durably; the temporary file is in the directory `via`, as `Disk.replace` has it."""
    disk.replace(path, f"{step}".encode("ascii"), via=via)
