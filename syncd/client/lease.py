"""Reading a version: which one is published, where it is, and the lease that keeps it there meanwhile."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from syncd.client.base import Base, reported
from syncd.errors import CorruptDataError, ProtocolTooNewError, TryAgainError, UsageError
from syncd.protocol.disk import MISSING, list_if_there
from syncd.protocol.layout import ACTOR, step_name
from syncd.protocol.manifest import Manifest, read_manifest
from syncd.protocol.version import Pair, Version

NATIVE = "syncd"


@dataclass(frozen=True, slots=True)
class Leased:
    """A version that stays where it is while it is leased.

    Args:
        version: The version.
        path: The directory to load; the URI for kind remote.
        manifest: The list of its files; None for a step that others wrote.
    """

    version: Version
    path: str
    manifest: Manifest | None


class Leasing(Base):
    """Reading the published version, and others that are complete."""

    @contextlib.contextmanager
    def lease(self, version: int | Pair | Version) -> Iterator[Leased]:
        """Keep a version from being removed while an explorer reads it, or a trainer adds files to it.

        Args:
            version: A step, a pair, or what `get_latest_version` returned.

        Raises:
            TryAgainError: The step has gone, or was written again: go to the newest.
        """
        self.check()
        if self._member is None:
            raise UsageError("an observer publishes no leases", hint="open with the role explorer or trainer")
        with reported(self.job.root):
            wanted = self._resolve(version)
        with self._member.leasing(wanted.pair):
            with reported(self.job.root):
                leased = self._examined(wanted)
            yield leased

    def _newest(self) -> Version | None:
        version = self._published()
        if version is not None:
            self._versions.keep(version.step, version)
        return version

    def _glance(self) -> Version | None:
        """Return the published version; a damaged file is one that the daemon is about to replace."""
        try:
            return self._newest()
        except ProtocolTooNewError:
            raise
        except CorruptDataError:
            return None

    def _resolve(self, version: int | Pair | Version) -> Version:
        if isinstance(version, Version):
            return version
        # A trainer leases the step that it writes, whatever the version file holds until the daemon replaces it.
        newest = self._glance() if self.role == "trainer" else self._newest()
        if isinstance(version, int):
            return self._standing(version, newest)
        known = self._versions.get(version[1]) or self._unpublished(version[1], newest)
        if known.pair != version:
            raise _gone(version[1], "another version is published under this step")
        return known

    def _standing(self, step: int, newest: Version | None) -> Version:
        """Return what a step is now: after a rewind it is not what was published under its number before."""
        known = self._versions.get(step)
        if known is not None and (known.layout != NATIVE or known.digest == self._manifest(step).digest):
            return known
        return self._unpublished(step, newest)

    def _unpublished(self, step: int, newest: Version | None) -> Version:
        """Return the version of a complete step that is not the published one: what an evaluator visits."""
        manifest = self._manifest(step)
        path = manifest.uri or f"{step_name(step)}/{ACTOR}"
        generation = newest.generation if newest else 0
        found = Version(generation, step, manifest.kind, path, manifest.digest, parent=manifest.parent)
        self._versions.keep(step, found)
        return found

    def _examined(self, wanted: Version) -> Leased:
        """Look again, under the lease."""
        path = self._path(wanted)
        if wanted.layout != NATIVE:
            if wanted.kind != "remote" and not list_if_there(self.job.disk, path):
                raise _gone(wanted.step, "its directory has gone")
            return Leased(wanted, path, None)
        manifest = self._manifest(wanted.step)
        if manifest.digest != wanted.digest:
            self._versions.pop(wanted.step, None)
            raise _gone(wanted.step, "it was written again")
        return Leased(wanted, path, manifest)

    def _manifest(self, step: int) -> Manifest:
        self.job.disk.refresh(self.job.root)
        try:
            return read_manifest(self.job.disk, self.job.step(step))
        except MISSING:
            self._versions.pop(step, None)
            raise _gone(step, "it is not there") from None

    def _path(self, version: Version) -> str:
        return version.path if version.kind == "remote" else f"{self.job.root}/{version.path}"


def _gone(step: int, why: str) -> TryAgainError:
    return TryAgainError(f"step {step} cannot be read: {why}", hint="go on with the newest version")
