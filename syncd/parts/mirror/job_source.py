"""A job as the source of a mirror: it leases what it reads, and the job's daemon shows how far it is."""

import contextlib
from collections.abc import Collection

from syncd.client.heartbeat import reading
from syncd.client.own_presence import OwnPresence
from syncd.errors import CorruptDataError
from syncd.parts.mirror.links import Link, decoded_link
from syncd.protocol.disk import MISSING, FileStat
from syncd.protocol.job_end import JobEnd, read_end
from syncd.protocol.layout import MANIFEST, Job
from syncd.protocol.mirror_report import KEY, MirrorReport
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import Version, read_version_or_none

PIECE = 8 << 20
_REMEMBERED = 4096


class Seat:
    """The presence of a mirror in a job, made when it is first needed: its leases and its report."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._ends = contextlib.ExitStack()
        self._own: OwnPresence | None = None
        self._held, self._steps = contextlib.ExitStack(), frozenset[int]()

    def hold(self, steps: Collection[int]) -> None:
        """Lease these steps and no longer those of before."""
        wanted = frozenset(steps)
        if wanted == self._steps:
            return
        held = contextlib.ExitStack()
        if wanted:
            held.enter_context(self._presence().leasing(wanted, ends_later=True))
        self._held.close()
        self._held, self._steps = held, wanted

    def report(self, report: MirrorReport) -> None:
        """Show a report; a heartbeat writes it."""
        own = self._presence()
        own.change_later(info={**own.info, KEY: report.document()})

    def close(self) -> None:
        self._held.close()
        self._ends.close()
        self._own = None

    def _presence(self) -> OwnPresence:
        if self._own is None:
            self._own = self._ends.enter_context(reading(self._job, "mirror"))
        return self._own


class JobSource:
    """A job that a trainer writes, or another mirror."""

    piece = PIECE

    def __init__(self, job: Job) -> None:
        self._job, self._seat = job, Seat(job)
        self._links: dict[int, tuple[FileStat, Link]] = {}

    def newest(self) -> Version | None:
        """Return the published version; steps of other frameworks have no manifest to be copied by."""
        self._job.disk.refresh(self._job.root)
        with contextlib.suppress(*MISSING):  # before the first daemon there is no state directory
            self._job.disk.refresh(self._job.state)
        version = read_version_or_none(self._job)
        if version is not None and version.layout != "syncd":
            raise CorruptDataError(
                f"step {version.step} was written by {version.layout}, and has no manifest to copy it by",
                path=self._job.root,
                hint="trainer republish --help",
            )
        return version

    def link(self, step: int, digest: str) -> Link | None:
        path = f"{self._job.step(step)}/{MANIFEST}"
        try:
            stat = self._job.disk.stat(path)
            remembered = self._links.get(step)
            if remembered is None or remembered[0] != stat:
                remembered = stat, decoded_link(self._job.disk.read(path), path, step)
                self._remember(step, remembered)
        except MISSING:
            return None
        return remembered[1] if digest in ("", remembered[1].manifest.digest) else None

    def hold(self, steps: Collection[int]) -> None:
        self._seat.hold(steps)

    def read(self, link: Link, record: FileRecord, offset: int, length: int) -> bytes:
        return self._job.disk.read_at(f"{self._job.step(link.step)}/{record.name}", offset, length)

    def baseline(self) -> bytes | None:
        """Return the baseline that the trainer or `syncd publish` has recorded."""
        with contextlib.suppress(*MISSING):
            return self._job.disk.read(self._job.base_probe)
        return None

    def end(self) -> JobEnd | None:
        return read_end(self._job)

    def report(self, report: MirrorReport) -> None:
        self._seat.report(report)

    def close(self) -> None:
        self._seat.close()

    def _remember(self, step: int, link: tuple[FileStat, Link]) -> None:
        if len(self._links) >= _REMEMBERED:
            self._links.clear()
        self._links[step] = link
