"""Versions: which one is published, where its files are, wait for a new one, and confirm the one that runs."""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from syncd.client.own_presence import OwnPresence
from syncd.client.peers import Peers
from syncd.client.rhythm import VersionLookout
from syncd.client.sync_policy import NOTHING, is_new
from syncd.client.wait import Poller
from syncd.errors import CorruptDataError, JobMissingError, StorageError, TryAgainError, UsageError
from syncd.protocol.broadcast_round import AHEAD, UnpublishedStep
from syncd.protocol.disk import MISSING, exists, list_if_there
from syncd.protocol.engine_state import engine_report_of
from syncd.protocol.layout import ACTOR, Job, step_name
from syncd.protocol.manifest import Manifest, read_manifest
from syncd.protocol.presence import RECENT, Presence, with_recent
from syncd.protocol.step import NATIVE
from syncd.protocol.version import Pair, Version, read_version, read_version_or_none

T = TypeVar("T")

_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class Leased:
    """A version whose files stay in place while it is leased.

    Args:
        path: The directory to load; the URI for kind remote.
        manifest: The list of its files; None for a step that another framework wrote.
    """

    version: Version
    path: str
    manifest: Manifest | None


class RecentSteps(dict[int, T]):
    """What is known of the steps that were met last."""

    def keep(self, step: int, value: T) -> None:
        """Record what is known of a step, and forget the oldest of too many."""
        self.pop(step, None)
        self[step] = value
        if len(self) > _REMEMBERED:
            del self[next(iter(self))]


class VersionReader:
    """Reads the published version, and other complete steps.

    Args:
        tolerant: Whether a damaged version file does not keep a step from being leased. A trainer leases the step
            that it writes, whatever the version file holds until the daemon replaces it.
        lookout: Learns when versions come; None for nobody.
    """

    def __init__(self, job: Job, *, tolerant: bool, lookout: VersionLookout | None = None) -> None:
        self._job, self._tolerant, self._lookout = job, tolerant, lookout
        self._recent: RecentSteps[Version] = RecentSteps()

    def latest(self) -> Version | None:
        """Return the published version as its server has it now, None before the first."""
        return self._keep(read_version(self._job) if self._refresh() else None)

    def latest_or_none(self) -> Version | None:
        """Return the published version, None before the first or while the file is damaged."""
        return self._keep(read_version_or_none(self._job) if self._refresh() else None)

    def recent(self, step: int) -> Version | None:
        """Return the version that was met under a step last, None if there was none."""
        return self._recent.get(step)

    def resolve(self, version: int | Pair | Version) -> Version:
        if isinstance(version, Version):
            if version.step not in self._recent:
                self._recent.keep(version.step, version)
            return version
        newest = self.latest_or_none() if self._tolerant else self.latest()
        if isinstance(version, int):
            return self._present(version, newest)
        present = self.recent(version[1]) or self._unpublished(version[1], newest)
        if present.pair != version:
            raise _gone(version[1], "another version is published under this step")
        return present

    def examine(self, wanted: Version) -> Leased:
        """Return a version with the path of its files, once it is certain that they are still there."""
        path = self.path_of(wanted)
        if wanted.layout != NATIVE:
            if wanted.kind != "remote" and not list_if_there(self._job.disk, path):
                raise _gone(wanted.step, "its directory is gone")
            return Leased(wanted, path, None)
        manifest = self._manifest(wanted.step)
        if manifest.digest != wanted.digest:
            self._recent.pop(wanted.step, None)
            raise _gone(wanted.step, "it was written again")
        return Leased(wanted, path, manifest)

    def path_of(self, version: Version) -> str:
        """Return the directory of a version's files; its URI for kind remote."""
        return version.path if version.kind == "remote" else f"{self._job.root}/{version.path}"

    def has_huggingface(self, version: Version) -> bool:
        """Return whether a version has a Hugging Face export beside its weights."""
        entries = list_if_there(self._job.disk, self.path_of(version))
        return any(entry.name == "huggingface" and entry.kind == "directory" for entry in entries)

    def attempt_of(self, version: Version) -> str:
        """Return the save that wrote a version, empty if its manifest is not the published one."""
        try:
            self._job.disk.refresh(self._job.root)
            manifest = read_manifest(self._job.disk, self._job.step(version.step))
        except (*MISSING, CorruptDataError):
            return ""
        return manifest.attempt if manifest.digest == version.digest else ""

    def require(self, manifest: Manifest) -> None:
        """Return if a step is still the one whose manifest was read."""
        if self._manifest(manifest.step).digest != manifest.digest:
            raise _gone(manifest.step, "it was written again")

    def _keep(self, version: Version | None) -> Version | None:
        if version is not None:
            good = version.last_good
            if good is not None and (good.step not in self._recent or good.step == version.step):
                self._recent.keep(good.step, good.version())
            self._recent.keep(version.step, version)
            if self._lookout is not None:
                self._lookout.note(version)
        return version

    def _refresh(self) -> bool:
        try:
            self._job.disk.refresh(self._job.state)
        except MISSING:
            if not exists(self._job.disk, self._job.root):
                raise missing_job(self._job.root) from None
            return False
        return True

    def _present(self, step: int, newest: Version | None) -> Version:
        """Return what a step is now: after a rewind it differs from what was published under its number before."""
        cached = self.recent(step)
        if cached is not None and (cached.layout != NATIVE or cached.digest == self._manifest(step).digest):
            return cached
        return self._unpublished(step, newest)

    def _unpublished(self, step: int, newest: Version | None) -> Version:
        """Return the version of a complete step that is not the published one: evaluators read those."""
        manifest = self._manifest(step)
        path = manifest.uri or f"{step_name(step)}/{ACTOR}"
        generation = newest.generation if newest else 0
        version = Version(generation, step, manifest.kind, path, manifest.digest, parent=manifest.parent)
        self._recent.keep(step, version)
        return version

    def _manifest(self, step: int) -> Manifest:
        self._job.disk.refresh(self._job.root)
        try:
            return read_manifest(self._job.disk, self._job.step(step))
        except MISSING:
            self._recent.pop(step, None)
            raise _gone(step, "it is missing") from None


def missing_job(root: str) -> JobMissingError:
    """Return the error for a missing job directory: nothing is created in what may be unmounted."""
    return JobMissingError("the job directory does not exist", path=root, hint=f"mkdir -p {root}")


def _gone(step: int, why: str) -> TryAgainError:
    return TryAgainError(f"step {step} cannot be read: {why}", hint="read the newest version instead")


_POLLS_PER_TRAINER = 4
"""The version is read this many times as often as the trainers' presences: it is what a wait is for."""


class VersionFollower:
    """Knows which version an explorer runs, and which is news to it; `own` is None for an observer."""

    def __init__(
        self, versions: VersionReader, trainers: Peers, own: OwnPresence | None, poller: Poller
    ) -> None:
        self._versions, self._trainers, self._own, self._poller = versions, trainers, own, poller
        self._offered: RecentSteps[Pair] = RecentSteps()
        self.ahead: UnpublishedStep | None = None
        """The step that runs before it is published, None if what runs is published."""
        self._trainers_read_at = float("-inf")

    def wait(
        self,
        current: int = NOTHING,
        no_wait: bool = False,  # noqa: FBT001, FBT002
        timeout: float | None = None,
    ) -> int:
        """Wait for a version that the explorer does not have; see `Client.wait_for_version`."""
        with contextlib.nullcontext() if no_wait else contextlib.suppress(OSError, StorageError):
            news = self.news(current, self._versions.latest_or_none())
            if news is not None or no_wait:
                return current if news is None else news
        with self._own.asking() if self._own else contextlib.nullcontext(0) as asked:
            what = f"waiting for a version after {current}"
            return self._poller.until(lambda: self._poll(current, asked), what, timeout)

    def answers(self, asked: int) -> Sequence[Presence]:
        """Return the trainers that have answered an ask with "nothing newer", or have all departed."""
        now = self._poller.clock.monotonic()
        if now - self._trainers_read_at >= _POLLS_PER_TRAINER * self._poller.pace.seconds:
            self._trainers.read()
            self._trainers_read_at = now
        me = self._own.identity if self._own else ""
        answers = [
            trainer
            for trainer in self._trainers.last().values()
            if asked and trainer.answered.get(me, 0) >= asked
        ]
        return answers or self._trainers.departed() or ()

    def news(self, current: int, version: Version | None) -> int | None:
        """Return the step of a published version if an explorer at `current` must load it, else None."""
        if version is None or self._is_ahead_of(version):
            return None
        # If other weights than those that run are published under the same step, they are news.
        replaced = self.ahead is not None and version.step == self.ahead.step
        if not replaced and not is_new(current, self._pair_at(current), version.pair):
            return None
        self._offered.keep(version.step, version.pair)
        return version.step

    def confirm(self, version: int | Pair | Version | None) -> None:
        """Publish which version runs; see `Client.confirm`."""
        pair = None if version is None else self._pair_of(version)
        if pair is not None:
            self._offered.keep(pair[1], pair)
        self._publish_applied(pair, version.digest if isinstance(version, Version) else self._digest_of(pair))

    def set_ahead(self, ahead: UnpublishedStep) -> None:
        own = self._require_own()
        self.ahead = ahead
        # The step runs whether or not this can be written now: a heartbeat repeats a write that fails.
        own.try_change(info={**own.info, AHEAD: asdict(ahead)})

    def confirm_published(self) -> bool:
        """Confirm the step that runs ahead if it is published by now; return whether nothing runs ahead."""
        if self.ahead is not None:
            version = self._versions.latest_or_none()
            if version is not None:
                self._is_ahead_of(version)
        return self.ahead is None

    def is_overruled(self) -> bool:
        """Return whether another version than the step that runs ahead must be loaded."""
        ahead = self.ahead
        return ahead is not None and self.news(ahead.step, self._versions.latest_or_none()) is not None

    def _poll(self, current: int, asked: int) -> int | None:
        answers = self.answers(asked)
        # Read the version after the answer, so that nothing announced before the answer is missed.
        version = self._versions.latest_or_none()
        news = self.news(current, version)
        if news is None and any(has_caught_up(version, trainer) for trainer in answers):
            return current
        return news

    def _is_ahead_of(self, version: Version) -> bool:
        """Return whether a published version is the step that runs ahead, which this confirms, or an older one."""
        ahead = self.ahead
        if ahead is None:
            return False
        if version.step == ahead.step and self._versions.attempt_of(version) == ahead.attempt != "":
            self._offered.keep(version.step, version.pair)
            self._publish_applied(version.pair, version.digest)
            return True
        return version.generation == max(ahead.generation, 1) and version.step < ahead.step

    def _publish_applied(self, pair: Pair | None, digest: str) -> None:
        own = self._require_own()
        info = {key: value for key, value in own.info.items() if key != AHEAD}
        engine = engine_report_of(info)
        state = engine.state.value if engine else None
        if recent := with_recent(own.presence, pair, self._poller.clock.time(), state):
            info[RECENT] = recent
        loading = None if own.presence.loading == pair else own.presence.loading
        own.change(applied=pair, applied_digest=digest, info=info, loading=loading)
        self.ahead = None

    def _digest_of(self, pair: Pair | None) -> str:
        version = self._versions.recent(pair[1]) if pair else None
        return version.digest if version is not None and version.pair == pair else ""

    def _pair_at(self, current: int) -> Pair | None:
        applied = self._own.presence.applied if self._own else None
        return applied if applied and applied[1] == current else self._offered.get(current)

    def _pair_of(self, version: int | Pair | Version) -> Pair:
        if isinstance(version, Version):
            return version.pair
        if isinstance(version, tuple):
            return version
        cached = self._versions.recent(version)
        pair = self._offered.get(version) or (cached.pair if cached else None)
        if pair is None:
            raise UsageError(f"step {version} was never offered to this explorer")
        return pair

    def _require_own(self) -> OwnPresence:
        if self._own is None:
            raise UsageError("an observer runs no version", hint="open with the role explorer")
        return self._own


def has_caught_up(version: Version | None, trainer: Presence) -> bool:
    """Return whether the published version is the one that a trainer had announced when it wrote its presence."""
    if trainer.step is None:
        return True
    if version is None:
        return False
    if version.held_marker == str(trainer.step):
        # A user rolled back from that step, and it stays unpublished until the trainer announces another one.
        return True
    digest = trainer.info.get("announced")
    return version.step == trainer.step and digest in (None, version.digest)
