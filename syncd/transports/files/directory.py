"""Directories of versions on this host: the files that an engine loads, and what keeps them. Imports no torch."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Self

from syncd.errors import SyncdError
from syncd.protocol.adapter_base import AdapterBase
from syncd.protocol.disk import Clock
from syncd.protocol.manifest import Manifest
from syncd.protocol.probe import Probe
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import Pair
from syncd.transports.base import WeightDirectory


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

    def keep_lease(self, lease: contextlib.ExitStack) -> Self:
        """Take the lease over from the caller, and return this directory."""
        self.lease = lease.pop_all()
        return self

    @property
    def pair(self) -> Pair:
        return self.directory.version.pair

    @property
    def staged_at(self) -> str | None:
        """Return the directory of the staged copy, None if it is not staged."""
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
