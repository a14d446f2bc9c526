"""Receives versions from this host's memory, if the trainer left a copy there of the very save that is published.

The package has the rules. If a copy cannot be found or used, the version comes from its files. Imports no torch.
"""

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from syncd.errors import CorruptDataError, SyncdError
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.manifest import Manifest
from syncd.protocol.memory_copies import HeldCopy, hold_copy, memory_directory_of
from syncd.protocol.presence import read_presences
from syncd.transports.files.leased_directory import (
    DirectoryOptions,
    DirectoryReceiver,
    HeldDirectory,
    LoadTimings,
    payload_of,
)

if TYPE_CHECKING:
    from syncd.client.client import Client
    from syncd.client.follow import Leased

_KIND = "weights"


class MemoryReceiver(DirectoryReceiver):
    """Finds the copies that trainers of a job name in their presences."""

    name = "memory"

    def __init__(self, client: "Client", options: DirectoryOptions | None = None) -> None:
        super().__init__(client, options)
        self._digest = self._rejected = ""

    def reject(self) -> bool:
        """Never use again the copy that was found last; return whether there was one."""
        self._rejected, digest = self._digest or self._rejected, self._digest
        self._digest = ""
        return bool(digest)

    def _find(self, leased: "Leased", timings: LoadTimings) -> HeldDirectory | None:
        self._digest = ""
        manifest = leased.manifest
        if manifest is None or manifest.kind != _KIND or _KIND not in self._options.kinds:
            return None
        if manifest.digest == self._rejected:
            return None
        with timings.part("verify"):
            copy = self._copy_of(manifest)
            return None if copy is None else self._check_copy(leased, manifest, copy)

    def _copy_of(self, manifest: Manifest) -> HeldCopy | None:
        job = self._client.job
        with contextlib.suppress(SyncdError, OSError):
            for trainer in read_presences(job.disk, job.trainers)[0].values():
                directory = memory_directory_of(trainer.info)
                if directory is not None and (copy := hold_copy(directory, manifest)) is not None:
                    return copy
        return None

    def _check_copy(self, leased: "Leased", manifest: Manifest, copy: HeldCopy) -> HeldDirectory | None:
        """Return a copy, checked as files are; None if it cannot be used."""
        with contextlib.ExitStack() as undo:
            undo.callback(copy.close)
            self._require_sizes(leased, manifest)
            try:
                directory = self._describe(leased, manifest, copy)
            except (CorruptDataError, OSError) as error:
                self._rejected = self._rejected if isinstance(error, OSError) else manifest.digest
                self._options.report("warning", "memory_copy_refused", reason=str(error))
                return None
            self._digest = manifest.digest
            undo.pop_all()
            return directory

    def _describe(self, leased: "Leased", manifest: Manifest, copy: HeldCopy) -> HeldDirectory:
        payload = payload_of(manifest)
        path = f"{copy.path}/{manifest.payload}"
        directory = self._checked(leased.version, LocalDisk(), path, payload)
        files = replace(directory, path=leased.path, verified=False)
        check = self._content_check(self._disk, leased.path, payload, lambda: False)
        return HeldDirectory(directory, "memory", payload.size, copy.close, files, check)
