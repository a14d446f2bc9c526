"""A job as the target of a mirror, which leads it: the daemon of this process publishes what the source published.

Files are copied into the directory of the attempt that wrote them at the source, so whoever copies later goes on
where this process was killed. A file has its name there only once it is whole, durable and compared with its digest;
until then it lies beside it and grows piece by piece.
"""

import os
import time
from collections.abc import Callable, Collection

from syncd.client.announce import StepAnnouncer
from syncd.client.wait import Pace, Poller
from syncd.daemon.plan import Mirrored
from syncd.daemon.service import Daemon
from syncd.errors import AlreadySealedError, FencedError, SyncdError, TryAgainError
from syncd.parts.mirror.ends import SourceEnd
from syncd.parts.mirror.job_source import PIECE, Seat
from syncd.parts.mirror.links import Link, find_way
from syncd.parts.mirror.meter import Meter
from syncd.parts.mirror.transfer import CheckedFile
from syncd.protocol.digest import CHUNK
from syncd.protocol.disk import MISSING, Clock, exists
from syncd.protocol.job_end import JobEnd, clear_finished, mark_finished, read_end
from syncd.protocol.layout import Job, step_name
from syncd.protocol.leadership import Term
from syncd.protocol.local_disk import write_all_at
from syncd.protocol.manifest import missing_files, read_manifest
from syncd.protocol.mirror_report import MirrorReport
from syncd.protocol.receipt import FileRecord
from syncd.protocol.step import StepState
from syncd.protocol.version import Pair, Version, label_of, write_marker
from syncd.protocol.writer import StepWriter
from syncd.stall.calls import SLOWEST, PendingCalls
from syncd.transports.files.copy_files import several_at_once

PUBLISHED_WITHIN = 10.0
"""Seconds in which the daemon of this process must publish a version whose steps are sealed."""

VACATED_WITHIN = 20.0
_LOOK = 0.005


class JobTarget:
    """A job whose daemon leads it, or stands by, in another thread of this process; `wake` has it tick now.

    `calls` notes calls of the file system; what the job's own disk does is noted by that.
    """

    def __init__(
        self,
        job: Job,
        daemon: Daemon,
        wake: Callable[[], None],
        clock: Clock,
        meter: Meter,
        calls: PendingCalls | None = None,
    ) -> None:
        self._calls = calls or PendingCalls(clock)
        self._job, self._daemon, self._wake = job, daemon, wake
        self._clock, self._meter, self._seat = clock, meter, Seat(job)

    def is_ready(self) -> bool:
        """Return whether the daemon leads, and has scanned the job."""
        return self._daemon.knows_job

    def published(self) -> Pair | None:
        """Return the highest pair that anybody knows to be published."""
        snapshot = self._daemon.snapshot
        pairs = (snapshot.version.pair if snapshot.version else None, snapshot.floor)
        return max((pair for pair in pairs if pair is not None), default=None)

    def has(self, step: int, digest: str) -> bool:
        """Return whether the step lies there with this content; its chain came before it."""
        there = self._digest_at(step)
        return bool(there) and digest in ("", there)

    def is_sealed(self, link: Link) -> bool:  # noqa: ARG002 - what is sealed in a job, `has` knows
        return False

    def make_way(self, version: Version, links: Collection[Link], source: SourceEnd) -> bool:
        """Remove steps of the same numbers with another content: their trainer went back and wrote them again."""
        others = sorted(
            link.step for link in links if self._digest_at(link.step) not in (None, link.manifest.digest)
        )
        if not others:
            return False
        self._seat.hold(())
        self._go_below(others[0], version, source)
        for step in others:
            self._announcer().vacate(step, VACATED_WITHIN)
        return True

    def hold(self, steps: Collection[int]) -> None:
        """Lease what was copied for a version until that is published."""
        self._seat.hold(steps)

    def copy(self, link: Link, source: SourceEnd) -> int:
        """Copy the files into the attempt's directory, and seal it by one rename."""
        writer = StepWriter(
            self._job, link.step, link.manifest.world_size, link.manifest.attempt, self._clock
        )
        try:
            writer.begin()
        except AlreadySealedError:
            if self._digest_at(link.step) == link.manifest.digest:
                return 0  # by another process that copies the same step
            raise
        sent: list[int] = []

        def copy_record(record: FileRecord, stop: Callable[[], bool]) -> None:
            sent.append(self._copy_file(writer.path, link, record, source, stop))

        several_at_once(link.records, copy_record, self._meter.is_stopped)
        for directory in {os.path.dirname(record.name) for record in link.records}:
            self._job.disk.sync_directory(f"{writer.path}/{directory}")
        self._meter.check()
        self._term().confirm()
        writer.seal_copy(link.data)
        self._wake()
        return sum(sent)

    def publish(self, version: Version, links: Collection[Link]) -> None:  # noqa: ARG002 - the daemon reads them
        """Move the marker, have the daemon publish the version, and wait for it."""
        self._announce(version.step)
        self._daemon.mirrored = Mirrored(version)
        ends = self._clock.monotonic() + PUBLISHED_WITHIN
        self._wake()
        while (published := self.published()) is None or published < version.pair:
            if not self._daemon.leads or self._clock.monotonic() >= ends:
                raise TryAgainError(
                    self._why_not(version), path=self._job.root, hint=f"syncd ls {self._job.root}"
                )
            self._meter.check()
            time.sleep(_LOOK)

    def keep_baseline(self, data: bytes) -> None:
        if not exists(self._job.disk, self._job.base_probe):
            self._term().publish(self._job.base_probe, data)

    def end(self) -> JobEnd | None:
        return read_end(self._job)

    def finish(self, end: JobEnd | None) -> None:
        self._term().confirm()
        if end is None:
            clear_finished(self._job)
        else:
            mark_finished(self._job, end)

    def tidy(self) -> None:
        """Do nothing: the daemon of this process applies retention."""

    def report(self, report: MirrorReport) -> None:
        self._seat.report(report)

    def close(self) -> None:
        self._seat.close()

    # --- steps ----------------------------------------------------------------------------------------------------

    def _digest_at(self, step: int) -> str | None:
        """Return the digest of a complete step, "" of another thing in its place, None of nothing."""
        path = self._job.step(step)
        self._job.disk.refresh(self._job.root)
        try:
            manifest = read_manifest(self._job.disk, path)
            return "" if missing_files(self._job.disk, path, manifest) else manifest.digest
        except MISSING:
            return None
        except SyncdError:
            return ""

    def _copy_file(
        self, attempt: str, link: Link, record: FileRecord, source: SourceEnd, stop: Callable[[], bool]
    ) -> int:
        """Copy one file of an attempt, from where it was left; return the bytes that were not there yet."""
        disk, path = self._job.disk, f"{attempt}/{record.name}"
        directory, _, name = path.rpartition("/")
        if self._size(path) == record.size:
            return 0  # it has its name once it is whole
        disk.make_directory(directory)
        grown = f"{directory}/.{name}.mirror"
        file = CheckedFile(source, link, record, self._piece(source))
        sent = self._grow(grown, file, record.size, stop)
        try:
            file.check()
        except SyncdError:
            disk.unlink(grown)
            raise
        disk.adopt(grown)
        disk.rename(grown, path)
        return sent

    def _grow(self, path: str, file: CheckedFile, size: int, stop: Callable[[], bool]) -> int:
        """Append what is missing of a file. Every byte has one place, so two processes do not disturb each other."""
        with self._calls("open", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            there = min(os.fstat(descriptor).st_size, size)
            for begin in range(0, there, CHUNK):
                self._meter.check()
                with self._calls("read", path):
                    file.state.update(os.pread(descriptor, min(CHUNK, there - begin), begin))
            for offset, data in file.pieces(there):
                self._meter.check()
                if stop():
                    raise TryAgainError("the copy was given up: another file of the step failed")
                self._meter.spend(len(data))
                with self._calls("write", path):
                    write_all_at(descriptor, data, offset)
            with self._calls("sync", path):
                self._calls.renew("sync", path, size / SLOWEST)
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return size - there

    def _size(self, path: str) -> int:
        try:
            return self._job.disk.stat(path).size
        except MISSING:
            return -1

    def _piece(self, source: SourceEnd) -> int:
        """Return the bytes to read at once: under a limit no more than a second's."""
        return (
            min(source.piece, PIECE, max(self._meter.rate, 64 << 10))
            if self._meter.rate
            else min(source.piece, PIECE)
        )

    # --- versions -------------------------------------------------------------------------------------------------

    def _announce(self, step: int) -> None:
        write_marker(self._job.disk, self._job.marker, step, via=self._term().staging)

    def _go_below(self, step: int, version: Version, source: SourceEnd) -> None:
        """Have nobody need the steps from a number on: the newest version, or else the marker, goes below it."""
        snapshot = self._daemon.snapshot
        if self._go_to_previous(step, version, source):
            return
        common = self._common_below(step, source)
        if (
            snapshot.version is None
            or snapshot.version.step < step
            or snapshot.version.generation == version.generation
        ):
            self._announce(common if common is not None else max(step - 1, 0))
            return
        if common is None:
            raise TryAgainError(
                f"step {step} was written again at the source, and no older step is the same on both sides",
                path=self._job.root,
                hint="mirror it into another directory",
            )
        link = source.link(common, snapshot.steps[common].digest)
        if link is not None:
            self.publish(_version_of((version.generation, common), link), ())

    def _go_to_previous(self, step: int, version: Version, source: SourceEnd) -> bool:
        """Publish the source's version before a version if that lies below a step; return whether it does."""
        pair, published = version.previous, self.published()
        if pair is None or pair[1] >= step or published is None or pair <= published:
            return False
        link = source.link(pair[1], "")
        if link is None:
            return False
        before = _version_of(pair, link)
        source.hold([*self._numbers(before, source), pair[1]])
        way = find_way(before, self.has, source.link, self.is_sealed)
        if any(self._digest_at(each.step) is not None for each in way.links):
            return False  # it needs steps whose numbers others have here
        for each in way.links:
            self.copy(each, source)
        self.publish(before, way.links)
        return True

    def _numbers(self, version: Version, source: SourceEnd) -> list[int]:
        return find_way(version, self.has, source.link, self.is_sealed).steps

    def _common_below(self, step: int, source: SourceEnd) -> int | None:
        """Return the newest step below a number that both sides have with the same content."""
        for number, there in sorted(self._daemon.snapshot.steps.items(), reverse=True):
            if number < step and there.state is StepState.COMPLETE and source.link(number, there.digest):
                return number
        return None

    def _why_not(self, version: Version) -> str:
        """Return why a version whose steps are sealed was not published."""
        daemon, label = self._daemon, label_of(version.pair)
        step = daemon.snapshot.steps.get(version.step)
        if not daemon.leads:
            return (
                f"{label} was not published: {daemon.leader.standing_by or 'another mirror has taken over'}"
            )
        if daemon.error is not None:
            return f"{label} was not published: {daemon.error}"
        problem = step.problem if step else "its step is not there"
        return f"{label} was not published within {PUBLISHED_WITHIN:g} s: {problem or 'it is still being checked'}"

    def _term(self) -> Term:
        term = self._daemon.leader.term
        if term is None:
            raise FencedError("this mirror no longer leads its target", path=self._job.root)
        return term

    def _announcer(self) -> StepAnnouncer:
        pace = Pace(self._job.state)
        return StepAnnouncer(
            self._job, None, Poller(self._clock, pace, VACATED_WITHIN, f"syncd status {self._job.root}")
        )


def _version_of(pair: Pair, link: Link) -> Version:
    manifest = link.manifest
    path = manifest.uri or f"{step_name(link.step)}/{manifest.payload}"
    return Version(*pair, manifest.kind, path, manifest.digest, parent=manifest.parent)
