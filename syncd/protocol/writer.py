"""How a step is written: shards, receipts and manifest in a directory of the attempt, which then becomes the step.

Each attempt to write a step has a directory that no other attempt uses, `.global_step_N.ATTEMPT` beside the step.
Sealing is one rename of that directory onto the step's name, which the file system refuses where a sealed step is. So
nothing that another attempt does, however late, changes a sealed step. A crash leaves no step or a whole one.

    writer = StepWriter(job, step=120, world_size=4, attempt=run_id)
    writer.begin()
    shard = writer.write("actor/model-00001-of-00004.safetensors", pieces, tensors=12)
    writer.receipt(1, shards=[shard])
    if writer.seal():
        writer.announce()
"""

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator

from syncd.errors import (
    AlreadySealedError,
    CorruptDataError,
    FencedError,
    SaveLostError,
    SyncdError,
    UsageError,
)
from syncd.protocol.adapter_base import AdapterBase
from syncd.protocol.digest import DEFAULT, Hasher, hasher
from syncd.protocol.disk import (
    MISSING,
    Clock,
    Data,
    DirectoryEntry,
    Disk,
    list_if_there,
    remove_tree,
    temporary_name,
)
from syncd.protocol.layout import (
    ACTOR,
    MANIFEST,
    MAX_STEP,
    SHORTCUT,
    Job,
    check_identity,
    is_relative_name,
    receipt_name,
)
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.manifest import (
    Manifest,
    decode_manifest,
    encode_manifest,
    from_receipts,
    manifest_problem,
    missing_records,
    read_manifest,
    shortcut_problem,
)
from syncd.protocol.probe import Probe
from syncd.protocol.receipt import (
    Changes,
    FileRecord,
    Receipt,
    ShardRoots,
    read_receipts,
    receipts_directory,
    whole_attempt,
    write_receipt,
)
from syncd.protocol.tile_table import SUFFIX, TileRecords, encode_tiles
from syncd.protocol.version import write_marker
from syncd.protocol.write_progress import SUFFIX as PROGRESS
from syncd.protocol.write_progress import ProgressNotes, WriteProgress

_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)
"""What a rename onto a directory that is not empty fails with."""


class StepWriter:
    """Writes one step as one of its `world_size` writers.

    Args:
        attempt: A name that the writers of this save share and no other save has.
        clock: Dates the receipts.
        fence: A directory through which the seal and the marker are renamed. Whoever removes it makes both fail,
            which is how a trainer that has been replaced is fenced; empty for writers that nobody replaces.
        base: The model that the step's adapter belongs to; the step is of kind `lora` then.
    """

    def __init__(
        self,
        job: Job,
        step: int,
        world_size: int,
        attempt: str,
        clock: Clock | None = None,
        digest: str = DEFAULT,
        fence: str = "",
        base: AdapterBase | None = None,
    ) -> None:
        if not 0 <= step <= MAX_STEP or world_size < 1:
            raise UsageError(f"step {step} with {world_size} writers is out of range")
        self.job, self.step, self.world_size, self.attempt = job, step, world_size, check_identity(attempt)
        self.path = job.attempt(step, attempt)
        """The directory in which this attempt writes."""
        self.sealed_path = job.step(step)
        """The step's directory, which is there once the step is sealed."""
        self._clock = clock or SystemClock()
        self._digest, self._fence, self._base = digest, fence, base
        # From where the attempt is renamed onto the step.
        self._staged = f"{fence}/{attempt}" if fence else self.path

    def begin(self) -> None:
        # This host may remember an absence that is no longer true: an early answer, the rename decides.
        self.job.disk.refresh(self.job.root)
        there = self._entries(self.sealed_path)
        if MANIFEST in {entry.name for entry in there}:
            raise self._already_sealed()
        if there:
            raise UsageError(
                f"files that syncd did not write are in the place of step {self.step}",
                path=self.sealed_path,
                hint=f"ls -la {self.sealed_path}",
            )
        self.job.disk.make_directory(receipts_directory(self.path))

    def write(self, name: str, data: Data, tensors: int = 0) -> FileRecord:
        """Write a file of the step durably, hashed in the same pass; `name` is relative to the step's directory."""
        pieces = _Pieces(data, hasher(self._digest))
        with self._explained():
            self.job.disk.replace(self._path_of(name), pieces)
        return FileRecord(name, pieces.length, f"{self._digest}:{pieces.state.hexdigest()}", tensors)

    def add_file(self, name: str, fill: Callable[[str], tuple[int, str]], tensors: int = 0) -> FileRecord:
        """Give a name, relative to the step's directory, to a file that the caller makes in its own way.

        `fill` makes the temporary file at the path it is given, durably, and returns its size and digest.
        """
        with self._explained():
            disk, path = self.job.disk, self._path_of(name)
            directory, _, last = path.rpartition("/")
            temporary = f"{directory}/{temporary_name(last)}"
            try:
                size, content = fill(temporary)
                disk.adopt(temporary)
                disk.rename(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    disk.unlink(temporary)
                raise
            disk.sync_directory(directory)
        return FileRecord(name, size, content, tensors)

    def tiles(self, writer: int, records: TileRecords) -> None:
        """Leave the table of the tiles of the shard files that this writer wrote whole, before its receipt."""
        with self._explained():
            self._check_there()
            self.job.disk.replace(self._beside_receipt(writer, SUFFIX), encode_tiles(records))

    def progress(self, writer: int, temporary: str, name: str, size: int) -> ProgressNotes:
        """Return what tells readers how far this writer is with `actor/NAME`, at `temporary` until it is whole."""
        last = temporary.rpartition("/")[2]
        begun = WriteProgress(self.attempt, self.world_size, name, last, size, 0)
        return ProgressNotes(self.job.disk, self._clock, self._beside_receipt(writer, PROGRESS), begun)

    def _beside_receipt(self, writer: int, suffix: str) -> str:
        name = receipt_name(writer, self.world_size).removesuffix(".json")
        return f"{receipts_directory(self.path)}/{name}{suffix}"

    def receipt(
        self,
        writer: int,
        shards: Iterable[FileRecord],
        files: Iterable[FileRecord] = (),
        probe: Probe | None = None,
        roots: Iterable[ShardRoots] = (),
        changes: Changes | None = None,
    ) -> Receipt:
        """Leave this writer's receipt: its files are durable. `Receipt` says what the arguments mean.

        The containers of a delta are its shards; those of a shortcut lie below `delta/`. If one writer of an attempt
        leaves a part of either, all do.
        """
        receipt = Receipt(
            self.step,
            self.attempt,
            writer,
            self.world_size,
            tuple(shards),
            tuple(files),
            self._clock.time(),
            probe,
            tuple(roots),
            changes,
        )
        with self._explained():
            self._check_there()
        try:
            write_receipt(self.job.disk, self.path, receipt)
        except MISSING:
            if self._names(self.path):
                raise
            # A writer that saw the receipt at once may seal the step before the receipt's name is synced.
            self.sealed()
        return receipt

    def seal(self, *, kind: str = "", uri: str | None = None) -> Manifest | None:
        """Seal the step and return its manifest, None while receipts are missing; safe to call from all writers.

        Args:
            kind: Of the step; `lora` if the writer was given a base, `delta` if the receipts have parts of one, else
                `weights`.
            uri: Where the payload of a remote step is.
        """
        directory = self._place()
        if directory is None:
            return self.sealed()
        receipts = [
            receipt for receipt in read_receipts(self.job.disk, directory) if receipt.attempt == self.attempt
        ]
        whole = whole_attempt(receipts)
        if whole is None:
            return None
        kind = kind or ("lora" if self._base else "")
        manifest = from_receipts(whole, kind=kind, uri=uri, base=self._base)
        if problem := manifest_problem(manifest) or shortcut_problem(manifest):
            raise UsageError(problem, path=directory)
        try:
            self._write_manifest(directory, manifest, encode_manifest(manifest))
            self._become_step()
        except MISSING:
            self._check_fence()
            return self.sealed()  # another writer of this attempt renamed the directory meanwhile
        return manifest

    def seal_copy(self, data: bytes) -> Manifest:
        """Seal the step with the manifest of another job, whose files this attempt has copied under its own name.

        `data` are the bytes of that manifest; its attempt is this one.
        """
        manifest = decode_manifest(data, self.sealed_path)
        if (manifest.step, manifest.attempt) != (self.step, self.attempt):
            raise UsageError(f"not the manifest of step {self.step} of attempt {self.attempt}")
        directory = self._place()
        if directory is not None:
            try:
                self._write_manifest(directory, manifest, data)
                self._become_step()
            except MISSING:
                self._check_fence()  # another process that copies the same step renamed the directory meanwhile
            else:
                return manifest
        sealed = self.sealed()
        return sealed if sealed is not None else manifest

    def sealed(self) -> Manifest | None:
        """Return the manifest of the step if this attempt has become it, None while the attempt is being written."""
        is_written = self._place() is not None
        # Looked at after the attempt: what is no longer there may have become the step just now.
        self.job.disk.refresh(self.job.root)
        try:
            manifest = read_manifest(self.job.disk, self.sealed_path)
        except MISSING:
            if is_written:
                return None
            raise self._lost() from None
        if manifest.attempt != self.attempt:
            raise self._already_sealed()
        return manifest

    def publish_if_whole(self) -> bool:
        """Seal and announce the step if all receipts are there; return whether they are. Every rank may call it."""
        is_whole = self.seal() is not None
        if is_whole:
            self.announce()
        return is_whole

    def announce(self) -> None:
        """Replace the marker: this step is the newest. The step must be sealed."""
        try:
            write_marker(self.job.disk, self.job.marker, self.step, via=self._fence or None)
        except MISSING:
            self._check_fence()
            raise

    def discard(self) -> None:
        """Remove what this attempt has written and will not seal; what cannot be removed is left for the daemon."""
        with contextlib.suppress(OSError):
            remove_tree(self.job.disk, self.path)

    def _path_of(self, name: str) -> str:
        if not is_relative_name(name):
            raise UsageError(f"not a name inside a step: {name!r}")
        self._check_there()
        path = f"{self.path}/{name}"
        self.job.disk.make_directory(path.rpartition("/")[0])
        return path

    def _write_manifest(self, step_path: str, manifest: Manifest, data: bytes) -> None:
        disk, shortcut = self.job.disk, manifest.shortcut.containers if manifest.shortcut else ()
        if wrong := missing_records(disk, step_path, (*manifest.shards, *manifest.files, *shortcut)):
            disk.list(step_path)  # another writer may have renamed the directory between two of these looks
            raise CorruptDataError(f"step {self.step} cannot be sealed: {wrong[0]}", path=step_path)
        _remove_strays(disk, step_path, manifest)
        # Another writer may have created these and died before it synced their names.
        for directory in (ACTOR, *((SHORTCUT,) if shortcut else ())):
            disk.sync_directory(f"{step_path}/{directory}")
        disk.sync_directory(step_path)
        disk.replace(f"{step_path}/{MANIFEST}", data)

    def _become_step(self) -> None:
        disk = self.job.disk
        if self._fence:
            with contextlib.suppress(*MISSING):  # another writer of this attempt was faster
                disk.rename(self.path, self._staged)
        try:
            disk.rename(self._staged, self.sealed_path)
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise
            raise self._already_sealed() from error
        disk.sync_directory(self.job.root)

    def _place(self) -> str | None:
        """Return where the attempt's directory is, None where it is no longer: it has become the step, or is gone."""
        self.job.disk.refresh(self.job.root)
        return next(
            (directory for directory in dict.fromkeys((self.path, self._staged)) if self._names(directory)),
            None,
        )

    def _names(self, path: str) -> set[str]:
        return {entry.name for entry in self._entries(path)}

    def _entries(self, path: str) -> list[DirectoryEntry]:
        return list_if_there(self.job.disk, path)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say why the attempt's directory is not there, where that is what made an operation fail."""
        try:
            yield
        except MISSING:
            self._check_there()
            raise

    def _check_there(self) -> None:
        if not self._names(self.path):
            self.sealed()
            raise self._already_sealed()

    def _check_fence(self) -> None:
        if not self._fence:
            return
        try:
            self.job.disk.list(self._fence)
        except MISSING:
            raise FencedError(
                "this trainer's lock is gone: another trainer has taken over, or .syncd was removed",
                path=self.job.root,
                hint=f"syncd status {self.job.root}",
            ) from None

    def _lost(self) -> SyncdError:
        self._check_fence()
        return SaveLostError(
            f"the directory of this save of step {self.step} was removed while its writer was paused",
            path=self.path,
            hint=f"syncd ls {self.job.root}",
        )

    def _already_sealed(self) -> AlreadySealedError:
        by = ""
        with contextlib.suppress(*MISSING, CorruptDataError):
            by = f" by another save ({read_manifest(self.job.disk, self.sealed_path).attempt})"
        return AlreadySealedError(
            f"step {self.step} is complete already{by}: this save ({self.attempt}) changes nothing in it",
            path=self.sealed_path,
            hint="publish a higher step",
        )


def _remove_strays(disk: Disk, step_path: str, manifest: Manifest) -> None:
    """Remove what no receipt of the attempt names: an engine that loads the directory would take it too."""
    records = (
        *manifest.shards,
        *manifest.files,
        *(manifest.shortcut.containers if manifest.shortcut else ()),
    )
    named = {record.name for record in records}
    for directory in (ACTOR, SHORTCUT):
        for entry in list_if_there(disk, f"{step_path}/{directory}"):
            name = f"{directory}/{entry.name}"
            if entry.kind != "directory" and name not in named:
                with contextlib.suppress(FileNotFoundError):
                    disk.unlink(f"{step_path}/{name}")


class _Pieces:
    """The pieces of a content, hashed and counted as they pass."""

    def __init__(self, data: Data, state: Hasher) -> None:
        self._data, self.state, self.length = data, state, 0

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for piece in (self._data,) if isinstance(self._data, bytes) else self._data:
            self.state.update(piece)
            self.length += len(piece)
            yield piece
