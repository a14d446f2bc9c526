"""The seam under a stage: where the bytes of a step come from. Alone it is the origin, the file system of the job.

Parts register ways to get them from nearer places (`syncd.piece_readers`), and before a step is published
(`syncd.early_readers`).
Imports no torch.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from syncd.errors import ConfigError
from syncd.protocol.disk import Disk
from syncd.protocol.manifest import Manifest
from syncd.protocol.receipt import FileRecord
from syncd.protocol.safetensors import Header
from syncd.registered import registered
from syncd.transports.files.copy_files import copy_files

if TYPE_CHECKING:
    from syncd.client.client import Client
    from syncd.protocol.layout import Job
    from syncd.transports.files.stage import HostStage

GROUP = "syncd.piece_readers"
EARLY_GROUP = "syncd.early_readers"

ReportEvent = Callable[..., None]
"""Hears an event: its level, its name, and its fields as keywords."""


class ByteSpan(NamedTuple):
    """Bytes of a file that follow each other."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class PartialFile(NamedTuple):
    """A file of the stage that has some of its bytes."""

    path: str
    digests: Mapping[ByteSpan, str]  # of the spans that it has

    @property
    def copied(self) -> int:
        """Return how many bytes it has."""
        return sum(span.length for span in self.digests)


@dataclass(frozen=True, slots=True)
class WantedFiles:
    """The files of one step that a stage wants."""

    disk: Disk  # the file system of the job
    directory: str  # the directory there that the names of the files are relative to
    records: Sequence[FileRecord]
    digest: str  # of the step's manifest, which identifies the step on every host
    # What this host copied before the step was published, by the name of the file; the reader may move it.
    partial: Mapping[str, PartialFile] = field(default_factory=dict)


class PieceReader(ABC):
    """Gets the files of a step; a follower has one."""

    is_shared: bool = False
    """Whether hosts divide what they read among them: a keyframe that a chain begins with is then staged first."""

    @abstractmethod
    def copy(self, wanted: WantedFiles, target: str, stop: Callable[[], bool]) -> None:
        """Write files that the job stores into a directory, every byte of them checked; `stop` is polled.

        The directory is made unless it is there. If it is, none of the files is in it yet.
        """

    def copy_made(
        self, manifest: Manifest, wanted: WantedFiles, target: str, stop: Callable[[], bool]
    ) -> bool:
        """Write the files that a chain makes, from where they are whole already.

        Args:
            manifest: Of the step, which has changes of an earlier one.

        Returns:
            Whether they were written, and checked; False leaves nothing behind.
        """
        del manifest, wanted, target, stop
        return False

    @contextlib.contextmanager
    def nearer(self, links: Sequence[Manifest], stop: Callable[[], bool]) -> Iterator[Disk | None]:
        """Have the containers of steps nearer while the block lasts.

        Yields:
            The file system to read them from instead of that of the job, None for that of the job.
        """
        del links, stop
        yield None

    def share(self, headers: Mapping[str, Header]) -> dict[str, Sequence[ByteSpan]]:
        """Return what this host copies of shard files before their step is published, if `is_shared`.

        Args:
            headers: Of all shard files of the step, by their names.
        """
        del headers
        return {}

    def add_unused(self, size: int) -> None:
        """Count bytes that were copied from the file system before their step was published, and are of no use."""
        del size

    def awaited(self, wanted: WantedFiles) -> int | None:
        """Return what another process of this host has copied of files before they were published.

        Returns:
            A number that grows while it comes along; None once nothing is to be waited for.
        """
        del wanted
        return None

    def early_directory(self, wanted: WantedFiles) -> str | None:
        """Return where in the stage this process itself has copied of files before they were published, if it has.

        `copy` moves them from there, or removes them.
        """
        del wanted
        return None

    def bytes_by_source(self) -> Mapping[str, int]:
        """Return the bytes that were read since the start, by where they came from; empty if nothing counts them."""
        return {}

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give up what the reader holds."""


class OriginReader(PieceReader):
    """Reads everything from the file system of the job."""

    def copy(self, wanted: WantedFiles, target: str, stop: Callable[[], bool]) -> None:
        copy_files(wanted.disk, wanted.directory, target, wanted.records, stop)


ORIGIN = OriginReader()


@dataclass(frozen=True, slots=True)
class ReaderContext:
    """What a registered reader is opened with."""

    address: str  # what the user gave, without the name of the reader
    client: "Client"
    stage: str  # the directory of the copies of this job on this host
    report: ReportEvent


def open_reader(text: str, context: Callable[[str], ReaderContext]) -> PieceReader:
    """Return the reader that `[NAME=]ADDRESS` names; without a name it is `http`."""
    name, separator, address = text.partition("=")
    if not separator:
        name, address = "http", text
    readers = registered(GROUP)
    if name not in readers:
        there = ", ".join(readers)
        hint = f"--peers HOST:PORT, or NAME=ADDRESS with one of {there}" if there else "leave --peers out"
        raise ConfigError(f"no reader of other hosts is called {name[:80]!r}", hint=hint)
    reader: PieceReader = readers[name].load()(context(address))
    return reader


def early_reader(behind: PieceReader, job: "Job", stage: "HostStage", report: ReportEvent) -> PieceReader:
    """Return the reader that gets files before their step is published, and the rest from the one behind it."""
    point = next(iter(registered(EARLY_GROUP).values()), None)
    if point is None:
        raise ConfigError("this installation of syncd copies no step early", hint="leave --early out")
    reader: PieceReader = point.load()(behind, job, stage, report)
    return reader
