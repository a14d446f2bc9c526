"""What a mirror asks of its two ends. Jobs and object stores are both."""

from collections.abc import Collection
from typing import Protocol

from syncd.errors import TryAgainError
from syncd.parts.mirror.links import Link
from syncd.protocol.job_end import JobEnd
from syncd.protocol.mirror_report import MirrorReport
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import Pair, Version


class OvertakenError(TryAgainError):
    """Another mirror was faster: what was decided is decided anew, and nothing has failed."""


class SourceEnd(Protocol):
    @property
    def piece(self) -> int:
        """Return the bytes that are read at once."""

    def newest(self) -> Version | None:
        """Return the published version, None before the first."""

    def link(self, step: int, digest: str) -> Link | None:
        """Return a step with this content; with no digest given, the one that is there, None if none is."""

    def hold(self, steps: Collection[int]) -> None:
        """Have these steps stay and no longer those of before; what had gone earlier stays away."""

    def read(self, link: Link, record: FileRecord, offset: int, length: int) -> bytes:
        """Return bytes of a file of a step; fewer than asked for only if the file is shorter."""

    def baseline(self) -> bytes | None:
        """Return the file of the baseline that engines are calibrated by, None while there is none."""

    def end(self) -> JobEnd | None:
        """Return the end of the job, None while it goes on."""

    def report(self, report: MirrorReport) -> None:
        """Show people who look at this end how far the mirror is."""

    def close(self) -> None:
        """Release everything that it holds."""


class TargetEnd(Protocol):
    def is_ready(self) -> bool:
        """Return whether this process may write there now."""

    def published(self) -> Pair | None:
        """Return the highest pair that was published there, None before the first."""

    def has(self, step: int, digest: str) -> bool:
        """Return whether it has a step with this content, and all that it is stored as changes of."""

    def is_sealed(self, link: Link) -> bool:
        """Return whether a step is whole there although no version names it yet."""

    def make_way(self, version: Version, links: Collection[Link], source: SourceEnd) -> bool:
        """Remove what is in the way of these steps, all or a part of it; return whether anything was."""

    def hold(self, steps: Collection[int]) -> None:
        """Have these steps stay there, and no longer those of before."""

    def copy(self, link: Link, source: SourceEnd) -> int:
        """Copy and seal one step whose parents are there; return the bytes that were not there yet."""

    def publish(self, version: Version, links: Collection[Link]) -> None:
        """Publish a version whose steps are all sealed there; `links` are those that `has` does not know."""

    def keep_baseline(self, data: bytes) -> None:
        """Have the baseline there, unless there is one."""

    def end(self) -> JobEnd | None:
        """Return the end of the job as it is there."""

    def finish(self, end: JobEnd | None) -> None:
        """Mark the job there as finished, or, with no end given, as one that goes on."""

    def tidy(self) -> None:
        """Remove what retention does not keep, after a version was published."""

    def report(self, report: MirrorReport) -> None:
        """Show people who look at this end how far the mirror is."""

    def close(self) -> None:
        """Release everything that it holds."""
