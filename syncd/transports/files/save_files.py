"""What one rank writes of one save: its shard or the changes of it, the files beside the weights, and its receipt."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pkgutil import resolve_name

from syncd.errors import StorageError
from syncd.protocol.adapter_base import AdapterBase
from syncd.protocol.delta import ENCODING, DeltaTable, Target
from syncd.protocol.digest import digest_bytes
from syncd.protocol.disk import Clock
from syncd.protocol.layout import ACTOR, ADAPTER, SHORTCUT, delta_name, shard_name
from syncd.protocol.probe import Probe
from syncd.protocol.receipt import Changes, FileRecord, ShardRoots
from syncd.protocol.tile_digests import shard_roots
from syncd.protocol.write_progress import ProgressNotes
from syncd.protocol.writer import StepWriter
from syncd.transports.files.buffers import SealedShare, Share
from syncd.transports.files.export_walk import ExportWalk, ShardLayout, encode_index
from syncd.transports.files.memory_copy import MemoryCopy
from syncd.transports.files.shard import (
    BUFFERED,
    PIECE,
    THREADS,
    ShardDigest,
    ShardWriter,
    WriteMode,
    find_write_mode,
    put_all,
)
from syncd.transports.files.storage import WHOLE, ShardChanges, ShareTimes, Storage, TimedBytes
from syncd.transports.torch_tensors import view

INDEX = "model.safetensors.index.json"

_ENCODE = "syncd.transports.delta.share:encode_shard"
"""Imported when changes are stored first: it needs the extra `delta`."""


@dataclass(slots=True)
class StepSave:
    writer: StepWriter  # of the step
    walk: ExportWalk  # over the weights
    companions: Mapping[str, bytes] = field(default_factory=dict)  # the files beside the weights by name
    copy: MemoryCopy | None = None  # gets the same files as this rank's part of the step
    probe: Probe | None = None  # what the model answers with these weights
    begun: float = 0.0  # when it began
    share: Share | None = None  # what this rank has copied; None if the weights are streamed
    has_changes: bool = False  # whether the step is stored as changes, or has a shortcut
    leaves_notes: bool = True  # whether somebody may want to know how far this rank's shard is
    notes: ProgressNotes | None = None  # tell that
    has_tiles: bool = False  # whether a step that is stored whole has the tables of its tiles in any case


@dataclass(frozen=True, slots=True)
class EncodedShare:
    container: ShardChanges
    seconds: float


class SaveFiles:
    """Writes the files of saves; `base` is an adapter's model, and `write_mode` is found by trying unless given."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        clock: Clock,
        *,
        base: AdapterBase | None,
        check: bool,
        write_mode: WriteMode | None,
    ) -> None:
        self._rank, self._world_size, self._clock, self._base = rank, world_size, clock, base
        self._check, self._write_mode = check, write_mode
        self._number = rank + 1
        self._writers = ThreadPoolExecutor(THREADS, "save-write")
        # One more than encodes tiles: it hands them out, and waits for them.
        self._encoders = ThreadPoolExecutor(THREADS + 1, "save-encode")
        self.times = ShareTimes()
        """What was measured last."""
        self.why_no_changes = ""
        """Why this host could not hold the last changes, empty if it could."""

    def close(self) -> None:
        self._writers.shutdown()
        self._encoders.shutdown()

    def write_streamed(self, save: StepSave, layout: ShardLayout, put: Callable[[ShardWriter], None]) -> bool:
        """Write a step whole while its tensors are walked; return whether it is sealed and announced."""
        save.writer.begin()
        shards, roots = self._write_with_root(save, layout, put, has_root=save.has_tiles)
        return self._seal(save, shards, self._companions(save)[0], roots=roots)

    def write(
        self, save: StepSave, share: Share, sealed: SealedShare | None = None, storage: Storage = WHOLE
    ) -> bool:
        """Write a share, whole or as changes of `sealed`; return whether the step is sealed and announced."""
        save.writer.begin()
        save.has_changes = sealed is not None and storage.parent is not None
        if sealed is None or storage.parent is None:
            return self._write_whole(save, share, has_root=storage.keeps or save.has_tiles)
        with self._encoding(share, sealed.share) as encoding:
            work = self._write_delta if storage.is_delta else self._write_with_shortcut
            return work(save, share, storage, encoding)

    def _write_whole(self, save: StepSave, share: Share, *, has_root: bool) -> bool:
        shards, roots = self._write_copied(save, share, has_root=has_root)
        return self._seal(save, shards, self._companions(save)[0], roots=roots)

    def _write_with_shortcut(
        self,
        save: StepSave,
        share: Share,
        storage: Storage,
        encoding: "Future[EncodedShare]",
    ) -> bool:
        shards, _ = self._write_copied(save, share, has_root=False)
        files, _ = self._companions(save)
        container, record = self._write_container(save, share, encoding, SHORTCUT)
        changes = self._changes(storage, container, containers=(record,))
        return self._seal(save, shards, files, _roots(self._target(share), container), changes)

    def _write_delta(
        self,
        save: StepSave,
        share: Share,
        storage: Storage,
        encoding: "Future[EncodedShare]",
    ) -> bool:
        digest = ShardDigest(share.layout, check=self._check)
        for start in range(0, share.layout.data_size, PIECE):
            digest.add(share.data[start : min(start + PIECE, share.layout.data_size)], start)
        made = FileRecord(self._shard_path(), share.layout.size, digest.text, len(share.layout.specs))
        container, record = self._write_container(save, share, encoding, ACTOR)
        stored, files = self._companions(save, storage)
        changes = self._changes(storage, container, shards=(made,), files=tuple(files))
        return self._seal(save, [record], stored, _roots(self._target(share), container), changes)

    def _seal(
        self,
        save: StepSave,
        shards: list[FileRecord],
        files: list[FileRecord],
        roots: list[ShardRoots] | None = None,
        changes: Changes | None = None,
    ) -> bool:
        if save.copy is not None:
            save.copy.seal(self._number, shards, files)  # first: once the step is whole, its copy is too
        if save.notes is not None:
            save.notes.remove()
        probe = save.probe if self._rank == 0 else None
        save.writer.receipt(self._number, shards, files, probe, roots or (), changes)
        return save.writer.publish_if_whole()

    def _write_copied(
        self, save: StepSave, share: Share, *, has_root: bool
    ) -> tuple[list[FileRecord], list[ShardRoots]]:
        begun = self._clock.monotonic()
        put = partial(put_all, share.data, share.layout.data_size)
        written = self._write_with_root(save, share.layout, put, has_root=has_root)
        whole = TimedBytes(share.layout.size, self._clock.monotonic() - begun)
        self.times = self.times._replace(whole=whole)
        return written

    def _write_with_root(
        self, save: StepSave, layout: ShardLayout, put: Callable[[ShardWriter], None], *, has_root: bool
    ) -> tuple[list[FileRecord], list[ShardRoots]]:
        digest = ShardDigest(layout, check=self._check, has_root=has_root)
        shards = self._write_shard(save, layout, put, digest)
        roots = [ShardRoots(record.name, digest.root) for record in shards if digest.root]
        if roots:
            save.writer.tiles(self._number, {shard.name: digest.tile_records for shard in roots})
        return shards, roots

    def _write_shard(
        self, save: StepSave, layout: ShardLayout, put: Callable[[ShardWriter], None], digest: ShardDigest
    ) -> list[FileRecord]:
        if not (name := self._shard_path()):
            return []
        fill = partial(self._fill, save, layout, put, digest, name.removeprefix(f"{ACTOR}/"))
        return [save.writer.add_file(name, fill, tensors=len(layout.specs))]

    def _fill(
        self,
        save: StepSave,
        layout: ShardLayout,
        put: Callable[[ShardWriter], None],
        digest: ShardDigest,
        name: str,
        path: str,
    ) -> tuple[int, str]:
        # While the disk is full no mode can be tried: then the next save tries them again.
        self._write_mode = self._write_mode or find_write_mode(os.path.dirname(path), name=name)
        mode = self._write_mode or BUFFERED
        with ExitStack() as closing:
            if save.copy is not None:
                closing.callback(save.copy.close)
                save.copy.begin(name, layout.size)
            note = self._note(save, path, name, layout.size)
            writer = ShardWriter(path, layout, mode, self._writers, digest, save.copy, note)
            put(closing.enter_context(writer))
            return writer.finish()

    def _note(self, save: StepSave, path: str, name: str, size: int) -> Callable[[int], None]:
        """Return what hears how far a file is; nobody where few bytes of it are read: of an adapter, or changes."""
        if self._base is not None or save.has_changes or not save.leaves_notes:
            return lambda _: None
        save.notes = save.writer.progress(self._number, path, name, size)
        return save.notes.note

    def _shard_path(self) -> str:
        """Return the shard that this rank writes, relative to the step; empty if it writes none."""
        if self._base is None:
            return f"{ACTOR}/{shard_name(self._number, self._world_size)}"
        return f"{ACTOR}/{ADAPTER}" if self._rank == 0 else ""

    def _target(self, share: Share) -> Target:
        return Target(self._shard_path(), share.layout.size)

    def _companions(
        self, save: StepSave, storage: Storage = WHOLE
    ) -> tuple[list[FileRecord], list[FileRecord]]:
        """Write the files beside the weights that a delta does not inherit; return their records, and all records."""
        if self._rank != 0:
            return [], []
        files = dict(save.companions)
        if self._base is None:
            files[INDEX] = encode_index(save.walk.weight_map, save.walk.total_size)
        if save.copy is not None:
            for name, content in files.items():
                save.copy.write(name, content)
        inherited = storage.parent.files if storage.parent and storage.is_delta else ()
        contents = {_record(f"{ACTOR}/{name}", content): content for name, content in files.items()}
        stored = [
            save.writer.write(record.name, content)
            for record, content in contents.items()
            if record not in inherited
        ]
        return stored, list(contents)

    @contextmanager
    def _encoding(self, share: Share, before: Share) -> Iterator["Future[EncodedShare]"]:
        """Begin to encode a share; at the end nothing reads its memory, and what was encoded is given up."""
        future = self._encoders.submit(self._encode, share, before)
        try:
            yield future
        finally:
            if future.exception() is None:
                future.result().container.close()

    def _encode(self, share: Share, before: Share) -> EncodedShare:
        begun, layout = self._clock.monotonic(), share.layout
        target, size = self._target(share), layout.data_size
        old, new = view(before.data[:size]), view(share.data[:size])
        try:
            container = resolve_name(_ENCODE)(target, layout.header, old, new, self._number, self._encoders)
        except (StorageError, OSError) as error:
            self.why_no_changes = str(error)
            raise
        self.why_no_changes = ""
        return EncodedShare(container, self._clock.monotonic() - begun)

    def _write_container(
        self, save: StepSave, share: Share, encoding: "Future[EncodedShare]", directory: str
    ) -> tuple[ShardChanges, FileRecord]:
        encoded, begun = encoding.result(), self._clock.monotonic()
        name = f"{directory}/{delta_name(self._number, self._world_size)}"
        record = save.writer.write(name, encoded.container.pieces(), tensors=3)
        self.times = self.times._replace(
            encoded=TimedBytes(share.layout.size, encoded.seconds),
            container=TimedBytes(record.size, self._clock.monotonic() - begun),
        )
        return encoded.container, record

    def _changes(
        self,
        storage: Storage,
        container: ShardChanges,
        shards: tuple[FileRecord, ...] = (),
        files: tuple[FileRecord, ...] = (),
        containers: tuple[FileRecord, ...] = (),
    ) -> Changes:
        assert storage.parent is not None, "changes have a parent"
        frames = container.frames
        counts = sum(frame.changed for frame in frames), sum(frame.words for frame in frames)
        origin = storage.parent.step, storage.parent.digest, ENCODING
        return Changes(*origin, *counts, shards, files, containers)


def _record(name: str, content: bytes) -> FileRecord:
    return FileRecord(name, len(content), digest_bytes(content))


def _roots(target: Target, container: ShardChanges) -> list[ShardRoots]:
    return list(shard_roots([DeltaTable((target,), tuple(container.frames), 0)]).values())
