"""The manifest: the sealed list of a step's files, written last. A step with a valid manifest is complete.

Its bytes follow from the receipts alone, so two processes that seal the same step write the same file.

A delta is a step stored as the changed elements of an earlier one, its parent. A chain leads from a delta through its
parents to a keyframe, a step stored whole. docs/delta-format.md describes them.
"""

import errno
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from syncd.errors import CorruptDataError
from syncd.protocol.adapter_base import AdapterBase
from syncd.protocol.delta_header import DeltaHeader, Described, Shortcut, describe_changes
from syncd.protocol.digest import digest_file, is_digest, name_of
from syncd.protocol.disk import MISSING, Disk, FileStat, is_directory
from syncd.protocol.documents import (
    Fields,
    as_document,
    check_seal,
    decode,
    encode,
    record_from,
    seal,
    without_none,
)
from syncd.protocol.layout import ACTOR, MANIFEST, SHORTCUT
from syncd.protocol.probe import Probe, probe_document
from syncd.protocol.receipt import FileRecord, Receipt, file_documents, written_files

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:.+|/.*", re.ASCII)
_URI_LIMIT = 4096

KINDS = ("weights", "delta", "lora", "remote")
"""weights: whole tensors. delta: changes of an earlier step. lora: adapters. remote: the payload is a URI."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a complete step consists of.

    Args:
        world_size: Number of writers.
        attempt: The name of the save.
        shards: Safetensors files.
        files: What lies beside them: configuration, tokenizer, index.
        kind: One of `KINDS`.
        delta: The header of a delta: its parent and its encoding.
        uri: Where the payload of a remote step is.
        written_at: When the last writer was done, on its own clock, for people to read.
        probe: What the trainer's model answers with these weights; None if writer 1 left none.
        base: For adapters, the model that they belong to; None if it is not known.
        root: For weights, the root of the shard files, with which a delta of them is compared; None if it was not
            computed.
        shortcut: For weights, the changes that make the shards from an earlier step's.
        shortcut_problem: Why its shortcut cannot be used, and is None here; empty if nothing is wrong with it.
        digest: The manifest's own digest; empty until sealed.
    """

    step: int
    world_size: int
    attempt: str
    shards: tuple[FileRecord, ...]
    files: tuple[FileRecord, ...] = ()
    kind: str = "weights"
    delta: DeltaHeader | None = None
    uri: str | None = None
    written_at: float = 0.0
    probe: Probe | None = None
    base: AdapterBase | None = None
    root: str | None = None
    shortcut: Shortcut | None = None
    shortcut_problem: str = field(default="", compare=False)
    digest: str = field(default="", compare=False)

    @property
    def size(self) -> int:
        """Return the bytes of all its files, those of its shortcut too."""
        shortcut = self.shortcut.containers if self.shortcut else ()
        return sum(record.size for record in (*self.shards, *self.files, *shortcut))

    @property
    def whole_shards(self) -> tuple[FileRecord, ...]:
        """Return the shard files that it stands for: those that a delta makes, else its own."""
        return self.delta.shards if self.delta else self.shards

    @property
    def whole_files(self) -> tuple[FileRecord, ...]:
        """Return the files beside them."""
        return self.delta.files if self.delta else self.files

    @property
    def whole_size(self) -> int:
        """Return the bytes of the files that it stands for."""
        return sum(record.size for record in (*self.whole_shards, *self.whole_files))

    @property
    def changes(self) -> DeltaHeader | None:
        """Return how the step is made from an earlier one: its delta, or its shortcut in the same form."""
        if self.shortcut is None:
            return self.delta
        shortcut = self.shortcut
        origin = (
            shortcut.parent,
            shortcut.parent_digest,
            shortcut.encoding,
            shortcut.changed,
            shortcut.elements,
        )
        return DeltaHeader(*origin, shortcut.root_before, self.root or "", self.shards, self.files)

    @property
    def containers(self) -> tuple[FileRecord, ...]:
        """Return the files that hold these changes."""
        if self.shortcut is not None:
            return self.shortcut.containers
        return self.shards if self.delta else ()

    @property
    def parent(self) -> int | None:
        """Return the step that a delta or an adapter changes, None if that is none of this job."""
        if self.base is not None:
            return self.base.step
        return self.delta.parent if self.delta else None

    @property
    def payload(self) -> str:
        """Return the directory that an engine loads, relative to the step's directory."""
        return ACTOR


def from_receipts(
    receipts: list[Receipt], *, kind: str = "", uri: str | None = None, base: AdapterBase | None = None
) -> Manifest:
    """Return the manifest of a whole attempt (`receipt.whole_attempt`).

    Args:
        receipts: Of all writers, by writer.
        kind: Of the step; `delta` if the writers stored one, else `weights`, unless given.
        uri: Where the payload of a remote step is.
        base: For adapters, the model that they belong to.

    Raises:
        CorruptDataError: Two writers claim one file, or their parts of a delta do not fit each other.
    """
    first = receipts[0]
    shards = tuple(record for receipt in receipts for record in receipt.shards)
    files = tuple(record for receipt in receipts for record in receipt.files)
    has_changes = any(receipt.changes or receipt.roots for receipt in receipts)
    description = describe_changes(receipts, shards) if has_changes else Described()
    more = description.shortcut.containers if description.shortcut else ()
    names = [record.name for record in (*shards, *files, *more)]
    if len(set(names)) != len(names):
        raise CorruptDataError(f"two writers of step {first.step} claim one file")
    written_at = max(receipt.written_at for receipt in receipts)
    kind = kind or ("delta" if description.delta else "weights")
    return Manifest(
        first.step,
        first.world_size,
        first.attempt,
        shards,
        files,
        kind,
        description.delta,
        uri,
        written_at,
        first.probe,
        base,
        description.root,
        description.shortcut,
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the sealed bytes of a manifest."""
    more = {
        "delta": manifest.delta and manifest.delta.document(),
        "probe": manifest.probe and probe_document(manifest.probe),
        "base": manifest.base and manifest.base.document(),
        "shortcut": manifest.shortcut and manifest.shortcut.document(),
    }
    files = file_documents(manifest.shards, manifest.files)
    body = as_document(manifest, "digest", "shortcut_problem", **more, **files)
    return encode(seal(without_none(body, "probe", "base", "root", "shortcut")))


def decode_manifest(data: bytes, path: str) -> Manifest:
    """Parse and check a manifest.

    A shortcut that cannot be used does not damage the step: `shortcut_problem` says what is wrong with it.

    Raises:
        CorruptDataError: It is torn, damaged, not a manifest, or the manifest of a step that nobody can load.
    """
    fields = decode(data, path)
    own = check_seal(fields)
    kind = fields.text("kind")
    if kind not in KINDS:
        raise fields.wrong("kind", f"one of {', '.join(KINDS)}")
    manifest = record_from(
        Manifest,
        fields,
        "written_at",
        **written_files(fields),
        kind=kind,
        shortcut=None,
        shortcut_problem="",
        digest=own,
    )
    if problem := manifest_problem(manifest):
        raise CorruptDataError(problem, path=path)
    return _with_shortcut(manifest, fields)


def _with_shortcut(manifest: Manifest, fields: Fields) -> Manifest:
    if fields.document.get("shortcut") is None:
        return manifest
    try:
        whole = replace(manifest, shortcut=Shortcut.from_fields(fields.record("shortcut")))
        problem = shortcut_problem(whole)
    except CorruptDataError as error:
        problem = error.message
    return replace(manifest, shortcut_problem=problem) if problem else whole


def shortcut_problem(manifest: Manifest) -> str:
    """Return what in the shortcut of a manifest contradicts the step, empty when nothing does or there is none."""
    shortcut = manifest.shortcut
    if shortcut is None:
        return ""
    if manifest.kind != "weights":
        return f"a step of kind {manifest.kind} has no shortcut"
    if shortcut.parent >= manifest.step:
        return f"its parent is a later step, {shortcut.parent}"
    if not (shortcut.changed <= shortcut.elements and manifest.root and is_digest(manifest.root)):
        return "it changes more than there is, or the step has no root"
    is_inside = all(record.name.startswith(f"{SHORTCUT}/") for record in shortcut.containers)
    return "" if shortcut.containers and is_inside else f"it has no container below {SHORTCUT}/"


def manifest_problem(manifest: Manifest) -> str:
    """Return what in a manifest contradicts itself or is incomplete, empty when nothing is."""
    if (manifest.kind == "delta") != (manifest.delta is not None):
        return (
            f"a step of kind {manifest.kind} {'with' if manifest.delta else 'without'} the header of a delta"
        )
    if manifest.base and manifest.kind != "lora":
        return f"a step of kind {manifest.kind} with the base of an adapter"
    if manifest.parent is not None and manifest.parent >= manifest.step:
        what = "a delta" if manifest.delta else "an adapter"
        return f"step {manifest.step} is {what} of a later step, {manifest.parent}"
    if (manifest.kind == "remote") != (manifest.uri is not None):
        return f"a step of kind {manifest.kind} {'with' if manifest.uri else 'without'} a URI"
    if manifest.uri is not None:
        return uri_problem(manifest.uri)
    return incompleteness(manifest.kind, manifest.shards, manifest.delta)


def incompleteness(kind: str, shards: Sequence[FileRecord], delta: DeltaHeader | None = None) -> str:
    """Return why an engine could not load the shards of a step, empty when it could.

    One answer for all who seal, publish, verify and load. A delta in which nothing changed may be empty; the payload
    of a remote step is elsewhere. `safetensors.signature` checks that no tensor is in two shards.

    Args:
        kind: The kind of the step: weights, delta, lora or remote.
        shards: The records of its shards.
        delta: The header of a delta.
    """
    if kind == "remote":
        return ""
    outside = next((shard.name for shard in shards if not shard.name.startswith(f"{ACTOR}/")), None)
    if outside is not None:
        return f"shard {outside} is outside of {ACTOR}/, the directory that engines load"
    if delta is not None and delta.changed == 0:
        return ""
    if not shards:
        return "the step has no shard"
    return "" if any(shard.tensors for shard in shards) else "the shards of the step hold no tensor"


def uri_problem(uri: str) -> str:
    """Return what is wrong with the URI of a remote step, empty when nothing is.

    It has a scheme, or is the absolute path of a directory; so no program that is given it takes it for an option.
    """
    if len(uri) > _URI_LIMIT or not uri.isprintable():
        return "the URI of the payload is too long, or has characters that cannot be printed"
    if not _URI.fullmatch(uri):
        return f"the payload is at {uri[:80]!r}, which is neither a URI with a scheme nor an absolute path"
    return ""


def read_manifest(disk: Disk, step_path: str) -> Manifest:
    """Read the manifest of a step; `FileNotFoundError` while there is none.

    A link to a directory is no step: nothing lists, leases or keeps what it leads to.
    """
    if not is_directory(disk, step_path):
        raise FileNotFoundError(errno.ENOENT, "no step directory", step_path)
    path = f"{step_path}/{MANIFEST}"
    return decode_manifest(disk.read(path), path)


def missing_files(disk: Disk, step_path: str, manifest: Manifest) -> list[str]:
    """Return what keeps a step from being complete: each file that is absent, replaced or of another size."""
    return missing_records(disk, step_path, (*manifest.shards, *manifest.files))


def missing_records(disk: Disk, step_path: str, records: Sequence[FileRecord]) -> list[str]:
    """Return each of some files of a step that is absent, replaced or of another size."""
    wrong = [
        f"{name}: not a directory"
        for name in sorted(_directories(records))
        if not is_directory(disk, f"{step_path}/{name}")
    ]
    if wrong:
        return wrong
    for record in records:
        try:
            file = _stat(disk, f"{step_path}/{record.name}", record.size)
        except MISSING:
            wrong.append(f"{record.name}: missing")
            continue
        if file.kind != "file" or file.size != record.size:
            wrong.append(f"{record.name}: {file.size} bytes of {record.size}")
    return wrong


def _stat(disk: Disk, path: str, size: int) -> FileStat:
    """Return what a file is. A client may remember its size of when it was written: an open asks the server again."""
    file = disk.stat(path)
    if file.kind != "file" or file.size == size:
        return file
    disk.read_at(path, 0, 1)
    return disk.stat(path)


def damaged_files(
    disk: Disk, step_path: str, manifest: Manifest, progress: Callable[[], None] = lambda: None
) -> list[str]:
    """Return each file whose content does not match its digest; `progress` is called often, every byte read."""
    return damaged_records(disk, step_path, (*manifest.shards, *manifest.files), progress)


def damaged_records(
    disk: Disk, step_path: str, records: Sequence[FileRecord], progress: Callable[[], None] = lambda: None
) -> list[str]:
    """Return each of some files of a step whose content does not match its digest."""
    wrong = []
    for record in records:
        try:
            content, size = digest_file(disk, f"{step_path}/{record.name}", name_of(record.digest), progress)
        except MISSING:
            wrong.append(f"{record.name}: missing")
            continue
        if (content, size) != (record.digest, record.size):
            wrong.append(f"{record.name}: content does not match its digest")
    return wrong


def _directories(records: Sequence[FileRecord]) -> set[str]:
    parents = {record.name.rpartition("/")[0] for record in records}
    names = [parent.split("/") for parent in parents - {""}]
    return {"/".join(parts[: depth + 1]) for parts in names for depth in range(len(parts))}
