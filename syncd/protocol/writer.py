"""How a step is written: shards, receipt, manifest, marker, in this order and each one durable before the next.

A crash at any instant leaves either no step or a whole one. Several writers share one step; whoever finds all their
receipts seals it.

    writer = StepWriter(job, step=120, world_size=4, attempt=run_id)
    writer.begin()
    shard = writer.write("actor/model-00001-of-00004.safetensors", pieces, tensors=12)
    writer.receipt(1, shards=[shard])
    if writer.seal():
        writer.announce()
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

from syncd.errors import CorruptDataError, UsageError
from syncd.protocol.delta import DeltaHeader
from syncd.protocol.digest import DEFAULT, Hasher, hasher
from syncd.protocol.disk import MISSING, Clock, Data, SystemClock, list_if_there, temporary_name
from syncd.protocol.layout import ACTOR, MANIFEST, MAX_STEP, Job, is_relative_name
from syncd.protocol.manifest import (
    Manifest,
    contradiction,
    decode_manifest,
    encode_manifest,
    from_receipts,
    missing_files,
)
from syncd.protocol.marker import write_marker
from syncd.protocol.receipt import (
    FileRecord,
    Receipt,
    read_receipts,
    receipts_directory,
    whole_attempt,
    write_receipt,
)


class StepWriter:
    """Writes one step as one of its `world_size` writers.

    Args:
        job: The job.
        step: The trainer's step.
        world_size: Number of writers of the step.
        attempt: A name that the writers of this save share and no other save has.
        clock: Dates the receipts.
        digest: Name of the digest of the files.

    Raises:
        UsageError: The step or the world size is out of range.
    """

    def __init__(
        self,
        job: Job,
        step: int,
        world_size: int,
        attempt: str,
        clock: Clock | None = None,
        digest: str = DEFAULT,
    ) -> None:
        if not 0 <= step <= MAX_STEP or world_size < 1:
            raise UsageError(f"step {step} with {world_size} writers is out of range")
        self.job, self.step, self.world_size, self.attempt = job, step, world_size, attempt
        self._clock = clock or SystemClock()
        self._digest = digest

    @property
    def path(self) -> str:
        """Return the step's directory."""
        return self.job.step(self.step)

    def begin(self) -> None:
        """Create the step's directory.

        Raises:
            UsageError: The step is sealed already; what is sealed never changes.
            StorageError: The job directory is not there.
        """
        # This host may remember an absence that is no longer true, or the directory that was here before: a stat
        # is not enough to know that nothing sealed would be written over.
        self.job.disk.refresh(self.job.root)
        self._check_unsealed()
        # Their directory comes first: by it the step is known as one of this protocol from the first byte on.
        self.job.disk.make_directory(receipts_directory(self.path))
        # A step that was being removed may have been put back meanwhile. Now that the directory is not empty,
        # none is any more.
        self._check_unsealed()

    def _check_unsealed(self) -> None:
        if MANIFEST in {entry.name for entry in list_if_there(self.job.disk, self.path)}:
            raise UsageError(
                f"step {self.step} is complete already", path=self.path, hint="publish a higher step"
            )

    def write(self, name: str, data: Data, tensors: int = 0) -> FileRecord:
        """Write one file of the step durably, hashing it in the same pass.

        Args:
            name: Path relative to the step's directory.
            data: Its content, or the pieces of it.
            tensors: Number of tensors in it.

        Raises:
            UsageError: The name leaves the step's directory.
        """
        path = self._path_of(name)
        pieces = _Pieces(data, hasher(self._digest))
        self.job.disk.replace(path, pieces)
        return FileRecord(name, pieces.length, f"{self._digest}:{pieces.state.hexdigest()}", tensors)

    def place(self, name: str, fill: Callable[[str], tuple[int, str]], tensors: int = 0) -> FileRecord:
        """Give a name to a file that the caller makes in its own way.

        Args:
            name: Path relative to the step's directory.
            fill: Makes the temporary file at the path it is given, durably, and returns its size and digest.
            tensors: Number of tensors in it.

        Raises:
            UsageError: The name leaves the step's directory.
        """
        path, disk = self._path_of(name), self.job.disk
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

    def receipt(self, writer: int, shards: Iterable[FileRecord], files: Iterable[FileRecord] = ()) -> Receipt:
        """Leave this writer's receipt: its files are durable. Writers count from 1."""
        receipt = Receipt(
            self.step, self.attempt, writer, self.world_size, tuple(shards), tuple(files), self._clock.time()
        )
        write_receipt(self.job.disk, self.path, receipt)
        return receipt

    def seal(
        self, *, kind: str = "weights", delta: DeltaHeader | None = None, uri: str | None = None
    ) -> Manifest | None:
        """Write the manifest if all writers of this attempt have left their receipts; safe to call from all of them.

        Returns:
            The manifest, or None while receipts are missing.

        Raises:
            CorruptDataError: A file is not what its receipt says, or the step is sealed with other content.
            UsageError: The kind, the delta header and the URI contradict each other.
        """
        receipts = [
            receipt for receipt in read_receipts(self.job.disk, self.path) if receipt.attempt == self.attempt
        ]
        whole = whole_attempt(receipts)
        if whole is None:
            return None
        manifest = from_receipts(whole, kind=kind, delta=delta, uri=uri)
        if problem := contradiction(manifest):
            raise UsageError(problem, path=self.path)
        if wrong := missing_files(self.job.disk, self.path, manifest):
            raise CorruptDataError(f"step {self.step} cannot be sealed: {wrong[0]}", path=self.path)
        self._write_manifest(manifest)
        return manifest

    def announce(self) -> None:
        """Replace the marker: this step is the newest. The step must be sealed."""
        write_marker(self.job.disk, self.job.marker, self.step)

    def _path_of(self, name: str) -> str:
        if not is_relative_name(name):
            raise UsageError(f"not a name inside a step: {name!r}")
        path = f"{self.path}/{name}"
        self.job.disk.make_directory(path.rpartition("/")[0])
        return path

    def _write_manifest(self, manifest: Manifest) -> None:
        path, disk = f"{self.path}/{MANIFEST}", self.job.disk
        # Another writer may have created these and died before it synced their names.
        for directory in (f"{self.path}/{ACTOR}", self.path, self.job.root):
            disk.sync_directory(directory)
        try:
            sealed = decode_manifest(disk.read(path), path)
        except MISSING:
            self._remove_strays(manifest)
            disk.replace(path, encode_manifest(manifest))
        else:
            if sealed != manifest:
                raise CorruptDataError(f"step {self.step} is sealed with other content", path=path)

    def _remove_strays(self, manifest: Manifest) -> None:
        """Remove the shards that a crashed save left: an engine that loads the directory would take them too."""
        named = {record.name for record in (*manifest.shards, *manifest.files)}
        for entry in self.job.disk.list(f"{self.path}/{ACTOR}"):
            name = f"{ACTOR}/{entry.name}"
            if entry.kind == "file" and name not in named and _is_loaded(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    self.job.disk.unlink(f"{self.path}/{name}")


def _is_loaded(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json"))


class _Pieces:
    """The pieces of a content, hashed and counted as they pass."""

    def __init__(self, data: Data, state: Hasher) -> None:
        self._data, self.state, self.length = data, state, 0

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for piece in (self._data,) if isinstance(self._data, bytes) else self._data:
            self.state.update(piece)
            self.length += len(piece)
            yield piece
