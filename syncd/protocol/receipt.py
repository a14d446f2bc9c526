"""Receipts: what one writer leaves beside its files once they are durable.

All `world_size` receipts of one attempt make a step that can be sealed. The attempt is a name that the writers of
one save share and no other save has, so that what a crashed save left behind is never mixed into the next one.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from syncd.errors import CorruptDataError
from syncd.protocol import digest
from syncd.protocol.disk import MISSING, Disk
from syncd.protocol.documents import (
    MAX_INTEGER,
    Document,
    Fields,
    as_document,
    list_documents,
    read_document,
    record_from,
    without_none,
    write_document,
)
from syncd.protocol.layout import ACTOR, RECEIPTS, is_relative_name, receipt_name
from syncd.protocol.probe import Probe, probe_document

_ROOT = re.compile(r"[0-9a-f]{32}", re.ASCII)


class FileRecord(NamedTuple):
    """One file of a step. A tuple, since a scan makes tens of thousands."""

    name: str  # path relative to the step's directory
    size: int  # length in bytes
    digest: str  # `name:hex` of its content
    tensors: int = 0  # number of tensors, 0 for what is not a shard

    @staticmethod
    def from_fields(fields: Fields) -> "FileRecord":
        name, content = fields.text("name"), fields.text("digest")
        if not is_relative_name(name):
            raise fields.wrong("name", "a path inside the step")
        digest.name_of(content, fields.path)
        return FileRecord(name, fields.integer("size"), content, fields.integer("tensors"))


def record_chunks(disk: Disk, path: str, record: FileRecord) -> Iterator[bytes]:
    """Yield a file in pieces; raise at its end if its content differs from the record."""
    name = digest.name_of(record.digest, path)
    state, left = digest.hasher(name), record.size
    for chunk in digest.chunks(disk, path):
        left -= len(chunk)
        if left < 0:
            break
        state.update(chunk)
        yield chunk
    if left != 0 or f"{name}:{state.hexdigest()}" != record.digest:
        raise CorruptDataError("content does not match its digest", path=path)


class ShardRoots(NamedTuple):
    """The roots of one shard file (`tile_digests.FileRoot`)."""

    name: str  # path relative to the step's directory
    after: str  # of the file that a full save has, 32 hexadecimal digits
    before: str = ""  # of the same file in the parent; empty if no changes of a parent were stored

    @staticmethod
    def from_fields(fields: Fields) -> "ShardRoots":
        roots = ShardRoots(fields.text("name"), fields.text("after"), fields.text("before", ""))
        if not is_relative_name(roots.name):
            raise fields.wrong("name", "a path inside the step")
        for key, root in (("after", roots.after), ("before", roots.before or roots.after)):
            if not _ROOT.fullmatch(root):
                raise fields.wrong(key, "32 hexadecimal digits")
        return roots


@dataclass(frozen=True, slots=True)
class Changes:
    """One writer's part of a delta, or of the shortcut of a step that is stored whole.

    All writers of an attempt name the same parent and encoding, and each leaves its part, also if it has no shard.
    """

    parent: int  # the step that the changes apply to
    parent_digest: str  # the digest of the parent's manifest
    encoding: str  # name of the encoding of the changed elements
    changed: int  # number of words that changed in this writer's shard files
    elements: int  # number of words of these files
    # Of a delta: the records of the shard files that this writer's container makes.
    shards: tuple[FileRecord, ...] = ()
    # Of a delta: the records of the files beside them in the whole step, whoever stores them.
    files: tuple[FileRecord, ...] = ()
    # Of a shortcut: the records of this writer's containers, below `delta/`.
    containers: tuple[FileRecord, ...] = ()

    @staticmethod
    def from_fields(fields: Fields) -> "Changes":
        lists = file_records(fields) | {"containers": record_list(fields, "containers")}
        return record_from(Changes, fields, **lists)

    def document(self) -> Document:
        containers = [record._asdict() for record in self.containers]
        return as_document(self, containers=containers, **file_documents(self.shards, self.files))


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one writer says: these files of this step are durable."""

    step: int  # the trainer's step
    attempt: str  # the name of the save that all its writers share
    writer: int  # this writer, from 1 to `world_size`
    world_size: int  # number of writers of the step
    shards: tuple[FileRecord, ...]  # the safetensors files it wrote
    files: tuple[FileRecord, ...] = ()  # what else it wrote: configuration, tokenizer, index
    written_at: float = 0.0  # seconds since the epoch on the writer's clock, for people to read
    # What the trainer's model answers with these weights; writer 1 alone leaves one.
    probe: Probe | None = None
    # The roots of the shard files that it wrote, or that its container makes; empty if it computed none.
    roots: tuple[ShardRoots, ...] = ()
    # Its part of a delta or a shortcut; None for a step that is only stored whole.
    changes: Changes | None = None


def receipts_directory(step_path: str) -> str:
    return f"{step_path}/{ACTOR}/{RECEIPTS}"


def file_documents(shards: Iterable[FileRecord], files: Iterable[FileRecord]) -> dict[str, list[Document]]:
    return {
        "shards": [record._asdict() for record in shards],
        "files": [record._asdict() for record in files],
    }


def write_receipt(disk: Disk, step_path: str, receipt: Receipt) -> None:
    """Leave a receipt, durably. Its files must be durable already."""
    path = f"{receipts_directory(step_path)}/{receipt_name(receipt.writer, receipt.world_size)}"
    probe = receipt.probe and probe_document(receipt.probe)
    more = {
        "probe": probe,
        "roots": [roots._asdict() for roots in receipt.roots] or None,
        "changes": receipt.changes and receipt.changes.document(),
    }
    document = as_document(receipt, **more, **file_documents(receipt.shards, receipt.files))
    write_document(disk, path, without_none(document, *more))


def read_receipt(disk: Disk, path: str) -> Receipt:
    fields = read_document(disk, path)
    writer = fields.integer("writer", least=1)
    roots = tuple(map(ShardRoots.from_fields, fields.records("roots")))
    receipt = record_from(Receipt, fields, "written_at", **written_files(fields), writer=writer, roots=roots)
    if not path.endswith(f"/{receipt_name(receipt.writer, receipt.world_size)}"):
        raise CorruptDataError("a receipt under another writer's name", path=path)
    return receipt


def read_receipts(disk: Disk, step_path: str) -> list[Receipt]:
    """Return the receipts of a step that can be read, by writer; unreadable ones do not count."""
    directory, receipts = receipts_directory(step_path), []
    for _, path in sorted(list_documents(disk, directory)):
        with contextlib.suppress(*MISSING, CorruptDataError):
            receipts.append(read_receipt(disk, path))
    return receipts


def written_files(fields: Fields) -> dict[str, Any]:
    """Return the fields that receipts and manifests share: the number of writers, the shards and the other files."""
    return file_records(fields) | {"world_size": fields.integer("world_size", least=1)}


def file_records(fields: Fields) -> dict[str, Any]:
    """Return the fields `shards` and `files` of an object; each is empty where it is missing."""
    return {key: record_list(fields, key) for key in ("shards", "files")}


def record_list(fields: Fields, key: str) -> tuple[FileRecord, ...]:
    """Return the file records of a list field, each name once."""
    records = tuple(_quickly(item) or FileRecord.from_fields(item) for item in fields.records(key))
    if len({record.name for record in records}) != len(records):
        raise fields.wrong(key, "a list of distinct names")
    return records


_TYPES = [str, int, str, int]


def _quickly(fields: Fields) -> FileRecord | None:
    """Return a record in which nothing is wrong: a scan reads tens of thousands. What is wrong, others say."""
    record = FileRecord._make(map(fields.document.get, FileRecord._fields))
    is_right = (
        list(map(type, record)) == _TYPES
        and 0 <= record.size <= MAX_INTEGER
        and 0 <= record.tensors <= MAX_INTEGER
        and digest.is_digest(record.digest)
        and is_relative_name(record.name)
    )
    return record if is_right else None


def whole_attempt(receipts: list[Receipt]) -> list[Receipt] | None:
    """Return the receipts of the latest attempt that every writer has finished, None while there is none."""
    attempts: dict[tuple[str, int], dict[int, Receipt]] = {}
    for receipt in receipts:
        attempts.setdefault((receipt.attempt, receipt.world_size), {})[receipt.writer] = receipt
    whole = [
        [writers[writer] for writer in sorted(writers)]
        for (_, world_size), writers in attempts.items()
        if sorted(writers) == list(range(1, world_size + 1))
    ]
    return max(whole, key=lambda attempt: max(receipt.written_at for receipt in attempt), default=None)
