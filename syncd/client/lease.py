"""Reading versions: which one is published, where its files are, and whether a leased one is still the same."""

from dataclasses import dataclass
from typing import TypeVar

from syncd.errors import CorruptDataError, JobMissingError, TryAgainError
from syncd.protocol.disk import MISSING, exists, list_if_there
from syncd.protocol.layout import ACTOR, Job, step_name
from syncd.protocol.manifest import Manifest, read_manifest
from syncd.protocol.version import Pair, Version, read_version, read_version_or_none

T = TypeVar("T")

NATIVE = "syncd"
_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class Leased:
    """A version whose files stay in place while it is leased.

    Args:
        version: The version.
        path: The directory to load; the URI for kind remote.
        manifest: The list of its files; None for a step that another framework wrote.
    """

    version: Version
    path: str
    manifest: Manifest | None


class RecentSteps(dict[int, T]):
    """What is known of the steps that were met last."""

    def keep(self, step: int, known: T) -> None:
        """Record what is known of a step, and forget the oldest of too many."""
        self.pop(step, None)
        self[step] = known
        if len(self) > _REMEMBERED:
            del self[next(iter(self))]


class VersionReader:
    """Reads the published version, and other complete steps.

    Args:
        job: The job.
        tolerant: Whether a damaged version file does not keep a step from being leased. A trainer leases the step
            that it writes, whatever the version file holds until the daemon replaces it.
    """

    def __init__(self, job: Job, *, tolerant: bool) -> None:
        self._job, self._tolerant = job, tolerant
        self._known: RecentSteps[Version] = RecentSteps()

    def latest(self) -> Version | None:
        """Return the published version as its server has it now, None before the first.

        Raises:
            JobMissingError: The job directory is missing.
            CorruptDataError: The version file is damaged.
        """
        return self._keep(read_version(self._job) if self._refresh() else None)

    def latest_or_none(self) -> Version | None:
        """Return the published version, None before the first or while the file is damaged."""
        return self._keep(read_version_or_none(self._job) if self._refresh() else None)

    def known(self, step: int) -> Version | None:
        """Return the version that was met under a step last, None if there was none."""
        return self._known.get(step)

    def resolve(self, version: int | Pair | Version) -> Version:
        """Return the version that a caller names.

        Raises:
            TryAgainError: The step is gone, or was written again.
        """
        if isinstance(version, Version):
            return version
        newest = self.latest_or_none() if self._tolerant else self.latest()
        if isinstance(version, int):
            return self._present(version, newest)
        known = self.known(version[1]) or self._unpublished(version[1], newest)
        if known.pair != version:
            raise _gone(version[1], "another version is published under this step")
        return known

    def examine(self, wanted: Version) -> Leased:
        """Return a version with the path of its files, once it is certain that they are still there.

        Raises:
            TryAgainError: The step is gone, or was written again.
        """
        path = self.path_of(wanted)
        if wanted.layout != NATIVE:
            if wanted.kind != "remote" and not list_if_there(self._job.disk, path):
                raise _gone(wanted.step, "its directory is gone")
            return Leased(wanted, path, None)
        manifest = self._manifest(wanted.step)
        if manifest.digest != wanted.digest:
            self._known.pop(wanted.step, None)
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

    def _keep(self, version: Version | None) -> Version | None:
        if version is not None:
            self._known.keep(version.step, version)
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
        known = self.known(step)
        if known is not None and (known.layout != NATIVE or known.digest == self._manifest(step).digest):
            return known
        return self._unpublished(step, newest)

    def _unpublished(self, step: int, newest: Version | None) -> Version:
        """Return the version of a complete step that is not the published one: evaluators read those."""
        manifest = self._manifest(step)
        path = manifest.uri or f"{step_name(step)}/{ACTOR}"
        generation = newest.generation if newest else 0
        found = Version(generation, step, manifest.kind, path, manifest.digest, parent=manifest.parent)
        self._known.keep(step, found)
        return found

    def _manifest(self, step: int) -> Manifest:
        self._job.disk.refresh(self._job.root)
        try:
            return read_manifest(self._job.disk, self._job.step(step))
        except MISSING:
            self._known.pop(step, None)
            raise _gone(step, "it is missing") from None


def missing_job(root: str) -> JobMissingError:
    """Return the error for a missing job directory: nothing is created in what may be unmounted."""
    return JobMissingError("the job directory is not there", path=root, hint=f"mkdir -p {root}")


def _gone(step: int, why: str) -> TryAgainError:
    return TryAgainError(f"step {step} cannot be read: {why}", hint="read the newest version instead")
