"""Versions as directories on this host: leased, checked, and held as long as an engine may need them.

Everything is checked before an engine is touched: engines that meet a wrong shape or a short file are left half
loaded, or crash. Imports no torch.
"""

import contextlib
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from syncd.errors import CorruptDataError, RefusedError, SyncdError, TryAgainError, storage_error
from syncd.protocol.adapter_base import AdapterBase
from syncd.protocol.disk import MISSING, Clock, Disk, is_below
from syncd.protocol.manifest import Manifest, missing_files, read_manifest
from syncd.protocol.probe import Probe
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import Pair, Version
from syncd.transports.base import (
    FILES,
    Announcement,
    ReceiveContext,
    WeightDirectory,
    WeightReceiver,
    find_transport,
    transport_names,
)
from syncd.transports.files.copy_files import check_files
from syncd.transports.tensors import Tensors, first_of, read_tensors, require_tensors

if TYPE_CHECKING:
    from syncd.client.client import Client
    from syncd.client.follow import Leased


class Verification(StrEnum):
    """How closely a version is checked before an engine is given it.

    size: every file is there with its size. header: every safetensors header parses and describes every byte of its
    file. content: every byte is read and matches its digest.
    """

    SIZE = "size"
    HEADER = "header"
    CONTENT = "content"


ReportEvent = Callable[..., None]  # hears an event: its level, its name, and its fields as keywords


@dataclass(frozen=True, slots=True)
class DirectoryOptions:
    kinds: frozenset[str] = frozenset({"weights"})  # the kinds of version that can be loaded
    # How closely a version is checked. Copies in a stage are always checked in full, by this process or its hook.
    verify: Verification = Verification.CONTENT
    # Polled while files are read; once it returns true, the receiver gives up.
    stop: Callable[[], bool] = lambda: False
    report: ReportEvent = lambda *_, **__: None  # hears what the receiver could not use
    # Whether versions that are stored as changes are taken as such where there is no stage.
    changes: bool = False


@contextlib.contextmanager
def refuse_damage() -> Iterator[None]:
    try:
        yield
    except RefusedError:
        raise
    except CorruptDataError as error:
        raise RefusedError(error.message, path=error.path, hint=error.hint) from None


@dataclass(slots=True, eq=False)
class HeldDirectory:
    """A version's directory, which stays on this host until `close`, and what keeps it."""

    directory: WeightDirectory  # the version as hooks get it
    source: str = "files"  # memory, stage or files
    size: int = 0  # its bytes; 0 if no manifest lists them
    # Gives up the claim on the copy in memory or in the stage; a second call does nothing.
    release: Callable[[], None] = lambda: None
    files: WeightDirectory | None = None  # for a copy in memory: the same version in the job directory
    # Compares every byte of the files with their digests; None if that is not wanted.
    check: Callable[[], None] | None = None
    # Closes the lease on the step, which is the caller's before `keep_lease`.
    lease: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    read_from: str = ""  # where its bytes came from, if that says more than `source`: peers

    def keep_lease(self, lease: contextlib.ExitStack) -> Self:
        self.lease = lease.pop_all()
        return self

    @property
    def pair(self) -> Pair:
        return self.directory.version.pair

    @property
    def shown_source(self) -> str:
        """Return where its bytes came from, for people to read."""
        return self.read_from or self.source

    @property
    def staged_at(self) -> str | None:
        return self.directory.path if self.source == "stage" else None

    def is_usable(self) -> bool:
        """Return whether it can still be loaded: the leases of a process that was silent for too long are void.

        Files that this process has not hashed yet are hashed now; a staged copy is hashed again.
        """
        directory = self.directory
        if directory.version.kind != "remote" and not os.path.isdir(directory.path):
            return False
        if self.check is not None and (self.source == "stage" or not directory.verified):
            try:
                self.check()
            except (SyncdError, OSError):
                return False
            self.directory = replace(directory, verified=True)
        return True

    def keep_durable(self) -> None:
        """Keep the version, now that it is loaded, by one thing: the staged copy, else the lease on its files."""
        if self.source == "stage":
            self.lease.close()
        elif self.files is not None:
            self.directory, self.files = self.files, None
            self.release()

    def close(self) -> None:
        self.lease.close()
        self.release()


@dataclass(frozen=True, slots=True)
class PayloadFiles:
    """What a manifest says of the directory that an engine loads; names of files are relative to that directory."""

    shards: tuple[FileRecord, ...] = ()
    files: tuple[FileRecord, ...] = ()
    probe: Probe | None = None
    base: AdapterBase | None = None

    @property
    def records(self) -> tuple[FileRecord, ...]:
        return *self.shards, *self.files

    @property
    def size(self) -> int:
        return sum(record.size for record in self.records)

    def directory(self, version: Version, path: str, tensors: Tensors, **more: Any) -> WeightDirectory:
        """Return them at `path` as a version that hooks load."""
        return WeightDirectory(version, path, self.shards, tensors, probe=self.probe, base=self.base, **more)


def payload_of(manifest: Manifest | None) -> PayloadFiles:
    """Return what a manifest says of the directory that an engine loads; no files if the payload is elsewhere.

    The files of a delta are those that it makes.
    """
    if manifest is None:
        return PayloadFiles()
    if manifest.kind == "remote":
        return PayloadFiles(probe=manifest.probe)
    prefix = f"{manifest.payload}/"
    files = _below(manifest.whole_shards, prefix), _below(manifest.whole_files, prefix)
    return PayloadFiles(*files, manifest.probe, manifest.base)


def _below(records: Iterable[FileRecord], prefix: str) -> tuple[FileRecord, ...]:
    inside = (record for record in records if record.name.startswith(prefix))
    return tuple(record._replace(name=record.name.removeprefix(prefix)) for record in inside)


class LoadTimings(dict[str, float]):
    """Seconds of each part of a load, by the name of the part."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure one part, also if it fails."""
        begin = self._clock.monotonic()
        try:
            yield
        finally:
            self[name] = round(self.get(name, 0.0) + self._clock.monotonic() - begin, 6)


class DirectoryReceiver(WeightReceiver):
    """The explorer's end of a transport that yields directories."""

    def __init__(self, client: "Client", options: DirectoryOptions | None = None) -> None:
        self._client, self._options = client, options or DirectoryOptions()
        self._disk = client.job.disk
        self._received: HeldDirectory | None = None

    @classmethod
    def open(cls, context: ReceiveContext) -> Self:
        return cls(context.client, DirectoryOptions(stop=context.stop))

    def receive(self, announcement: Announcement, timeout: float) -> WeightDirectory | None:
        """Return the directory of a published version. It is valid until the next call or `close`."""
        del timeout
        DirectoryReceiver.close(self)
        if not isinstance(announcement, Version):
            return None
        with contextlib.ExitStack() as lease, refuse_damage():
            leased = lease.enter_context(self._client.lease(announcement))
            source = self.find(leased, LoadTimings(self._client.clock))
            if source is None:
                return None
            self._received = source.keep_lease(lease)
        return self._received.directory

    def close(self) -> None:
        received, self._received = self._received, None
        if received is not None:
            received.close()

    def reject(self) -> bool:
        """Never use again what was found last; return whether another receiver can be asked instead."""
        return False

    def find(self, leased: "Leased", timings: LoadTimings) -> HeldDirectory | None:
        """Return the directory of a leased version, checked; None if this transport does not have it here."""
        try:
            return self._find(leased, timings)
        except MISSING as error:
            raise self._missing(leased, error) from None

    @abstractmethod
    def _find(self, leased: "Leased", timings: LoadTimings) -> HeldDirectory | None:
        """Return the directory of a leased version, checked; None if this transport does not have it here."""

    def _require_sizes(self, leased: "Leased", manifest: Manifest) -> None:
        """Return if each file of a step is there with its size; nothing is read."""
        step = self._client.job.step(leased.version.step)
        if wrong := missing_files(self._disk, step, manifest):
            raise RefusedError(first_of(wrong), path=step)

    def _checked(self, version: Version, disk: Disk, path: str, payload: PayloadFiles) -> WeightDirectory:
        """Return files as a version that hooks load, checked as closely as is asked for."""
        require_tensors(payload.shards, path)
        if self._options.verify is Verification.SIZE:
            return payload.directory(version, path, {})
        tensors = read_tensors(disk, path, payload.shards)
        check = self._content_check(disk, path, payload, self._options.stop)
        if check is not None:
            self._options.report("debug", "hash_started", step=version.step, path=path, bytes=payload.size)
            check()
        return payload.directory(version, path, tensors, verified=check is not None)

    def _content_check(
        self, disk: Disk, path: str, payload: PayloadFiles, stop: Callable[[], bool]
    ) -> Callable[[], None] | None:
        if self._options.verify is not Verification.CONTENT:
            return None
        return lambda: check_files(disk, path, payload.records, stop)

    def _missing(self, leased: "Leased", error: OSError) -> SyncdError:
        """Return the error for a missing file: the step was removed or is damaged, or it is a copy on this host."""
        step, path = leased.version.step, str(error.filename)
        try:
            read_manifest(self._disk, self._client.job.step(step))
        except MISSING:
            return TryAgainError(f"step {step} was removed", hint="load the newest version")
        of_step = self._client.job.root, leased.path
        if os.path.isabs(path) and not any(is_below(path, directory) for directory in of_step):
            return storage_error(error, path)  # of a copy on this host, which can be made again
        return RefusedError(f"a file of step {step} is missing", path=error.filename)


def open_nearer_receivers(client: "Client", options: DirectoryOptions) -> list[DirectoryReceiver]:
    """Return the receivers of transports that may have a version nearer than the job directory, as in memory."""
    transports = (find_transport(name) for name in transport_names() if name != FILES)
    classes = [transport.receiver_class() for transport in transports if not transport.source]
    return [receiver(client, options) for receiver in classes if issubclass(receiver, DirectoryReceiver)]
