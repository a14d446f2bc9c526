"""What manifests say of changes: the header of a delta, and the shortcut of a step that is stored whole.

Both follow from the parts that the writers leave in their receipts (`receipt.Changes`). docs/delta-format.md
describes them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from syncd.errors import CorruptDataError
from syncd.protocol.delta import Target
from syncd.protocol.documents import Document, Fields, as_document, record_from
from syncd.protocol.receipt import Changes, FileRecord, Receipt, file_documents, file_records, record_list
from syncd.protocol.tile_digests import step_root


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """What a reader must know before it opens the payload."""

    parent: int  # the step that the changes apply to; lower than the step itself
    parent_digest: str  # the digest of the parent's manifest, so that a rewritten parent is noticed
    encoding: str  # name of the encoding of the changed elements
    changed: int  # number of changed words, the elements of tensors
    elements: int  # number of words of all shard files that it makes
    root_before: str = ""  # the root of the parent's shard files (`tile_digests.step_root`)
    root_after: str = ""
    shards: tuple[FileRecord, ...] = ()  # the records of the shard files that it makes
    # The records of the files beside them. What this step does not store, it has from its parent.
    files: tuple[FileRecord, ...] = ()

    @staticmethod
    def from_fields(fields: Fields) -> "DeltaHeader":
        header = record_from(DeltaHeader, fields, **file_records(fields))
        if header.changed > header.elements:
            raise fields.wrong("changed", "at most `elements`")
        return header

    def document(self) -> Document:
        return as_document(self, **file_documents(self.shards, self.files))


@dataclass(frozen=True, slots=True)
class Shortcut:
    """What a step of kind weights stores beside its shards: the changes that make them from an earlier step's.

    Readers that have the parent's files read the containers instead of the shards.
    """

    parent: int  # the step that the changes apply to; lower than the step itself
    parent_digest: str  # the digest of the parent's manifest
    encoding: str  # name of the encoding of the changed elements
    changed: int  # number of changed words, the elements of tensors
    elements: int  # number of words of all shard files
    # The root of the parent's shard files. The root of those that it makes is the manifest's.
    root_before: str
    containers: tuple[FileRecord, ...]  # the records of the containers, below `delta/`

    @staticmethod
    def from_fields(fields: Fields) -> "Shortcut":
        return record_from(Shortcut, fields, containers=record_list(fields, "containers"))

    def document(self) -> Document:
        return as_document(self, containers=[record._asdict() for record in self.containers])


class Described(NamedTuple):
    """What the receipts of an attempt say of changes and roots: fields of its manifest."""

    delta: DeltaHeader | None = None
    shortcut: Shortcut | None = None
    root: str | None = None


def describe_changes(receipts: Sequence[Receipt], shards: Sequence[FileRecord]) -> Described:
    """Return what the manifest of a whole attempt says of changes and roots.

    Args:
        receipts: Of all its writers.
        shards: The records of all shards in them: of a delta, its containers.
    """
    changes = _joined(receipts)
    made = changes.shards if changes and changes.shards else shards
    after = _root(made, {roots.name: roots.after for receipt in receipts for roots in receipt.roots})
    if changes is None:
        return Described(root=after)
    before = _root(made, {roots.name: roots.before for receipt in receipts for roots in receipt.roots})
    same = changes.parent, changes.parent_digest, changes.encoding, changes.changed, changes.elements
    if changes.shards:
        return Described(DeltaHeader(*same, before or "", after or "", changes.shards, changes.files))
    return Described(shortcut=Shortcut(*same, before or "", changes.containers), root=after)


def _joined(receipts: Sequence[Receipt]) -> Changes | None:
    parts = [receipt.changes for receipt in receipts if receipt.changes]
    if not parts:
        return None
    origins = {(part.parent, part.parent_digest, part.encoding) for part in parts}
    step = receipts[0].step
    if len(parts) != len(receipts) or len(origins) != 1:
        raise CorruptDataError(f"the writers of step {step} stored changes of different parents")
    changed, elements = sum(part.changed for part in parts), sum(part.elements for part in parts)
    shards, files = _all(part.shards for part in parts), _all(part.files for part in parts)
    containers = _all(part.containers for part in parts)
    if bool(shards) == bool(containers):
        raise CorruptDataError(f"the changes of step {step} are neither those of a delta nor of a shortcut")
    return Changes(*origins.pop(), changed, elements, shards, tuple(dict.fromkeys(files)), containers)


def _all(parts: Iterable[tuple[FileRecord, ...]]) -> tuple[FileRecord, ...]:
    return tuple(record for part in parts for record in part)


def _root(records: Sequence[FileRecord], roots: dict[str, str]) -> str | None:
    """Return the root of shard files, None where one of them has none."""
    if not records or not all(roots.get(record.name) for record in records):
        return None
    return step_root({Target(record.name, record.size): roots[record.name] for record in records})
