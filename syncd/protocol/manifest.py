"""The manifest: the sealed list of a step's files, written last. A step with a valid manifest is complete.

Its bytes follow from the receipts alone, so two processes that seal the same step write the same file.

A delta is a step stored as the changed elements of an earlier one, its parent. A chain leads from a delta through its
parents to a keyframe, a step stored whole. docs/delta.md describes them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from syncd.errors import CorruptDataError
from syncd.protocol.adapter_base import AdapterBase
from syncd.protocol.digest import digest_file, name_of
from syncd.protocol.disk import MISSING, Disk, is_directory
from syncd.protocol.documents import (
    Document,
    Fields,
    as_document,
    check_seal,
    decode,
    encode,
    record_from,
    seal,
    without_none,
)
from syncd.protocol.layout import ACTOR, MANIFEST
from syncd.protocol.probe import Probe, probe_document
from syncd.protocol.receipt import FileRecord, Receipt, file_documents, file_records, written_files

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:.+|/.*", re.ASCII)
_URI_LIMIT = 4096

KINDS = ("weights", "delta", "lora", "remote")
"""weights: whole tensors. delta: changes of an earlier step. lora: adapters. remote: the payload is a URI."""


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """What a reader must know before it opens the payload.

    Args:
        parent: The step that the changes apply to; lower than the step itself.
        parent_digest: The digest of the parent's manifest, so that a rewritten parent is noticed.
        encoding: Name of the encoding of the changed elements.
        changed: Number of changed words, the elements of tensors.
        elements: Number of words of all shard files that it makes.
        root_before: The root of the parent's shard files (`roots.step_root`).
        root_after: The root of those that it makes.
        shards: The records of the shard files that it makes.
        files: The records of the files beside them. What this step does not store, it has from its parent.
    """

    parent: int
    parent_digest: str
    encoding: str
    changed: int
    elements: int
    root_before: str = ""
    root_after: str = ""
    shards: tuple[FileRecord, ...] = ()
    files: tuple[FileRecord, ...] = ()

    @staticmethod
    def from_fields(fields: Fields) -> "DeltaHeader":
        """Return the header of one JSON object, checked."""
        header = record_from(DeltaHeader, fields, **file_records(fields))
        if header.changed > header.elements:
            raise fields.wrong("changed", "at most `elements`")
        return header

    def document(self) -> Document:
        """Return the header as a JSON object."""
        return as_document(self, **file_documents(self.shards, self.files))


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a complete step consists of.

    Args:
        step: The trainer's step.
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
    digest: str = field(default="", compare=False)

    @property
    def size(self) -> int:
        """Return the bytes of all its files."""
        return sum(record.size for record in (*self.shards, *self.files))

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
    receipts: list[Receipt],
    *,
    kind: str = "weights",
    delta: DeltaHeader | None = None,
    uri: str | None = None,
    base: AdapterBase | None = None,
    root: str | None = None,
) -> Manifest:
    """Return the manifest of a whole attempt (`receipt.whole_attempt`).

    Raises:
        CorruptDataError: Two writers claim one file.
    """
    first = receipts[0]
    shards = tuple(record for receipt in receipts for record in receipt.shards)
    files = tuple(record for receipt in receipts for record in receipt.files)
    names = [record.name for record in (*shards, *files)]
    if len(set(names)) != len(names):
        raise CorruptDataError(f"two writers of step {first.step} claim one file")
    written_at = max(receipt.written_at for receipt in receipts)
    return Manifest(
        first.step,
        first.world_size,
        first.attempt,
        shards,
        files,
        kind,
        delta,
        uri,
        written_at,
        first.probe,
        base,
        root,
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the sealed bytes of a manifest."""
    more = {
        "delta": manifest.delta and manifest.delta.document(),
        "probe": manifest.probe and probe_document(manifest.probe),
        "base": manifest.base and manifest.base.document(),
    }
    body = as_document(manifest, "digest", **more, **file_documents(manifest.shards, manifest.files))
    return encode(seal(without_none(body, "probe", "base", "root")))


def decode_manifest(data: bytes, path: str) -> Manifest:
    """Parse and check a manifest.

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
        digest=own,
    )
    if problem := manifest_problem(manifest):
        raise CorruptDataError(problem, path=path)
    return manifest


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
    """Read the manifest of a step; `FileNotFoundError` while there is none."""
    path = f"{step_path}/{MANIFEST}"
    return decode_manifest(disk.read(path), path)


def missing_files(disk: Disk, step_path: str, manifest: Manifest) -> list[str]:
    """Return what keeps a step from being complete: each file that is absent, replaced or of another size."""
    wrong = [
        f"{name}: not a directory"
        for name in _directories(manifest)
        if not is_directory(disk, f"{step_path}/{name}")
    ]
    if wrong:
        return wrong
    for record in (*manifest.shards, *manifest.files):
        try:
            found = disk.stat(f"{step_path}/{record.name}")
        except MISSING:
            wrong.append(f"{record.name}: missing")
            continue
        if found.kind != "file" or found.size != record.size:
            wrong.append(f"{record.name}: {found.size} bytes of {record.size}")
    return wrong


def damaged_files(
    disk: Disk, step_path: str, manifest: Manifest, progress: Callable[[], None] = lambda: None
) -> list[str]:
    """Return each file whose content does not match its digest; `progress` is called often, every byte read."""
    wrong = []
    for record in (*manifest.shards, *manifest.files):
        try:
            content, size = digest_file(disk, f"{step_path}/{record.name}", name_of(record.digest), progress)
        except MISSING:
            wrong.append(f"{record.name}: missing")
            continue
        if (content, size) != (record.digest, record.size):
            wrong.append(f"{record.name}: content does not match its digest")
    return wrong


def _directories(manifest: Manifest) -> set[str]:
    parents = {record.name.rpartition("/")[0] for record in (*manifest.shards, *manifest.files)}
    names = [parent.split("/") for parent in parents - {""}]
    return {"/".join(parts[: depth + 1]) for parts in names for depth in range(len(parts))}
