"""The versions of a job: the published one, older ones, those that are not tried now, and how one is fetched."""

import contextlib
from collections.abc import Callable

from explorer_hooks.follower.policy import FollowOptions
from explorer_hooks.hook import ChangesHook, Hook
from syncd.client.client import Client
from syncd.client.follow import Leased
from syncd.errors import ConfigError, SyncdError
from syncd.protocol.disk import MISSING, Clock
from syncd.protocol.layout import parse_step_name
from syncd.protocol.manifest import read_manifest
from syncd.protocol.tile_table import READS_TILES
from syncd.protocol.version import Pair, Version, engine_label, is_unpublished, pair_of
from syncd.protocol.write_progress import READS_EARLY
from syncd.transports.files.leased_directory import (
    DirectoryOptions,
    HeldDirectory,
    LoadTimings,
    ReportEvent,
    Verification,
    open_nearer_receivers,
    refuse_damage,
)
from syncd.transports.files.piece_reader import ORIGIN, PieceReader, ReaderContext, early_reader, open_reader
from syncd.transports.files.receive import FilesReceiver
from syncd.transports.files.stage import HostStage

_LONGEST_BACKOFF, _DOUBLINGS = 60.0, 30
_MISSING_PAUSE = 0.25
"""Seconds until a missing step is tried again: its successor is published within that time."""

_REMEMBERED = 256


class KnownVersions:
    """The versions of a job that this process has read."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.newest: Version | None = None
        self._labels: set[str] = set()
        self._wanted: Version | None = None

    @property
    def pair(self) -> Pair | None:
        return self.newest.pair if self.newest else None

    def read(self) -> None:
        latest = self._client.latest_version()
        # A mount may return a cached, older file: pairs only grow.
        if latest is not None and (self.newest is None or latest.pair >= self.newest.pair):
            self.newest = latest

    @property
    def last_good(self) -> Pair | None:
        good = self.newest.last_good if self.newest else None
        return good.pair if good else None

    @property
    def quarantined(self) -> frozenset[int]:
        newest = self.newest
        if newest is None:
            return frozenset()
        is_put_aside = (newest.step, newest.digest) in newest.quarantined
        older = {entry.step for entry in newest.quarantine} - {newest.step}
        return frozenset(older | {newest.step} if is_put_aside else older)

    def note_wanted(self, version: Version) -> None:
        """Note the version that is loaded now, which need not be the published one."""
        self._wanted = version

    def digest_of(self, pair: Pair) -> str:
        """Return the digest of the published version or the one that was wanted last, empty of any other."""
        versions = (self.newest, self._wanted)
        return next((version.digest for version in versions if version and version.pair == pair), "")

    def add_label(self, label: str) -> None:
        self._labels.add(label)

    def has_label(self, label: str | None) -> bool:
        """Return whether a label is known as one of this job; nothing is read. Any thread may call this."""
        return label in self._labels

    def pair_of_label(self, label: str | None) -> Pair | None:
        """Return the pair of the published version that a label names, None if it is not of this job or unknown.

        Numbers prove nothing: two jobs have the same ones. If this process has not read the version yet, it compares
        the label with the manifest of the step.
        """
        pair = pair_of(label)
        if label is None or pair is None or is_unpublished(label):
            return None
        if label not in self._labels and label == self._label_in_job(pair):
            self.add_label(label)
        return pair if label in self._labels else None

    def _label_in_job(self, pair: Pair) -> str | None:
        newest = self.newest
        if newest is None or pair > newest.pair:
            return None
        if pair == newest.pair:
            return engine_label(pair, newest.digest)
        good = newest.last_good
        if good is not None and pair == good.pair:
            return engine_label(pair, good.digest)
        job = self._client.job
        try:
            return engine_label(pair, read_manifest(job.disk, job.step(pair[1])).digest)
        except (*MISSING, SyncdError, OSError):
            return None

    def to_lease(self, pair: Pair) -> Version | int:
        """Return what is leased for a pair: the published or the last good version, or the step of an older one."""
        newest = self.newest
        if newest is not None and newest.pair == pair:
            return newest
        good = newest.last_good if newest else None
        return good.version() if good is not None and good.pair == pair else pair[1]

    def older_steps(self) -> tuple[int, ...]:
        """Return the steps below the published one that have a directory and were not abandoned."""
        if self.newest is None:
            return ()
        entries = self._client.job.disk.list(self._client.job.root)
        steps = {parse_step_name(entry.name) for entry in entries if entry.kind == "directory"}
        left = steps - {step for step, _ in self.newest.abandoned}
        return tuple(sorted(step for step in left if step and step < self.newest.step))


class FailedVersions:
    """The versions that could not be loaded, and when they are tried again."""

    def __init__(self, clock: Clock, retries: int, backoff: float) -> None:
        self._clock, self._retries, self._backoff = clock, retries, backoff
        self._failures: dict[Pair, int] = {}
        self._interruptions: dict[Pair, int] = {}
        self._paused: dict[Pair, float] = {}
        self._given_up: dict[Pair, None] = {}

    def fail(self, pair: Pair) -> bool:
        """Note a failure; return whether the version will be retried."""
        failures = self._failures[pair] = self._failures.get(pair, 0) + 1
        if failures > self._retries:
            self.give_up(pair)
            return False
        self._pause(pair, failures)
        return True

    def interrupt(self, pair: Pair) -> bool:
        """Note that a load was interrupted, which says nothing about the version; return that it will be retried."""
        self._interruptions[pair] = self._interruptions.get(pair, 0) + 1
        self._pause(pair, self._interruptions[pair])
        return True

    def _pause(self, pair: Pair, times: int) -> None:
        seconds = min(self._backoff * 2 ** min(times - 1, _DOUBLINGS), _LONGEST_BACKOFF)
        self._paused[pair] = self._clock.monotonic() + seconds

    def miss(self, pair: Pair) -> None:
        self._paused[pair] = self._clock.monotonic() + _MISSING_PAUSE

    def give_up(self, pair: Pair) -> None:
        self._failures.pop(pair, None)
        self._interruptions.pop(pair, None)
        self._paused.pop(pair, None)
        self._given_up[pair] = None
        if len(self._given_up) > _REMEMBERED:
            del self._given_up[next(iter(self._given_up))]

    def clear(self) -> None:
        self._failures.clear()
        self._interruptions.clear()
        self._paused.clear()

    @property
    def given_up(self) -> frozenset[Pair]:
        return frozenset(self._given_up)

    @property
    def paused(self) -> frozenset[Pair]:
        now = self._clock.monotonic()
        self._paused = {pair: until for pair, until in self._paused.items() if until > now}
        return frozenset(self._paused)


class Fetcher:
    """Fetches versions for one hook: leases one and looks in memory, in the stage, then in the job directory.

    Args:
        stop: Polled while files are read; once it returns true, the fetch is given up.
        gates: What it has in `reads` beside what it can read: the gates that it waits for.
    """

    def __init__(
        self,
        client: Client,
        hook: Hook,
        options: FollowOptions,
        stop: Callable[[], bool],
        report: ReportEvent,
        gates: tuple[str, ...] = (),
    ) -> None:
        if "directory" not in hook.takes:
            raise ConfigError(f"the hook {hook.name} loads no directories, so it cannot follow versions")
        self._client, self._checks_content = client, hook.checks_content
        self._stage = HostStage(options.stage, client.job.root, client.clock) if options.stage else None
        self._reader = _open_reader(options, client, self._stage, report)
        of_reader = {READS_EARLY: options.early, READS_TILES: self._reader.is_shared}
        self._also_reads = (*gates, *(name for name, is_read in of_reader.items() if is_read))
        verify = Verification(options.verify)
        if verify is Verification.CONTENT and hook.checks_content:
            verify = Verification.HEADER  # the hook itself compares the content while it loads
        self._hook = hook if isinstance(hook, ChangesHook) and hook.reads_changes else None
        wanted = DirectoryOptions(hook.kinds, verify, stop, report, changes=self._hook is not None)
        self._nearer = open_nearer_receivers(client, wanted)
        self._files = FilesReceiver(client, wanted, self._stage, self._reader)
        self._publish_reads()

    def fetch(
        self, wanted: Version | int, timings: LoadTimings, *, can_go_back: bool = False
    ) -> HeldDirectory:
        """Return a version's files; `can_go_back`: the engine has another one if damage shows while it loads this."""
        self._files.begin(hook_checks=self._checks_content and can_go_back)
        with contextlib.ExitStack() as lease, refuse_damage():
            leased = lease.enter_context(self._client.lease(wanted))
            try:
                return self._find(leased, timings).keep_lease(lease)
            finally:
                self._publish_reads()

    def fetch_running(self, pair: Pair) -> HeldDirectory | None:
        """Return the directory of a version that the engine runs already, to restore it later; None if removed."""
        with contextlib.ExitStack() as lease, contextlib.suppress(SyncdError, OSError):
            leased = lease.enter_context(self._client.lease(pair))
            return self._files.find_unchecked(leased).keep_lease(lease)
        return None

    def reject(self) -> bool:
        """Never use again the copy that was fetched last; return whether another receiver can be asked instead."""
        return any(receiver.reject() for receiver in (*self._nearer, self._files))

    def sweep(self) -> None:
        self._files.sweep()

    def close(self) -> None:
        """Remove the staged copies that no process of this host uses, and their directory if it is empty."""
        self._files.close()
        self._reader.close()
        if self._stage is not None:
            self._stage.close()

    def _publish_reads(self) -> None:
        """Have the trainer know whether deltas can be read here: not while the stage is full."""
        is_slow = self._stage is None and self._hook is not None and not self._hook.takes_changes()
        self._client.publish_reads((*(() if is_slow else self._files.reads()), *self._also_reads))

    def _find(self, leased: Leased, timings: LoadTimings) -> HeldDirectory:
        for receiver in self._nearer:
            if (nearer := receiver.find(leased, timings)) is not None:
                return nearer
        directory = self._files.find(leased, timings)
        assert directory is not None, "the job directory has every version"
        return directory


def _open_reader(
    options: FollowOptions, client: Client, stage: HostStage | None, report: ReportEvent
) -> PieceReader:
    if stage is None:
        return ORIGIN
    reader: PieceReader = ORIGIN
    if options.peers:
        directory = stage.directory
        reader = open_reader(options.peers, lambda address: ReaderContext(address, client, directory, report))
    return early_reader(reader, client.job, stage, report) if options.early else reader
