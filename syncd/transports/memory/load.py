"""Weights in from the memory of this host, where the trainer has left a copy of the very save that is published.

docs/memory.md has the rules. Whatever is wrong with a copy, or with finding one: the version comes from its files.
"""

import contextlib

from syncd.errors import SyncdError
from syncd.protocol.layout import Job
from syncd.protocol.manifest import Manifest
from syncd.protocol.memory import HeldCopy, hold_copy, memory_directory_of
from syncd.protocol.presence import read_presences

_KIND = "weights"


class Copies:
    """Finds the copies that trainers of a job have told of. Used by one thread.

    Args:
        job: The job.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._taken = self._spoilt = ""

    def take(self, manifest: Manifest) -> HeldCopy | None:
        """Hold the copy of what a manifest seals, None where there is none on this host."""
        self._taken = ""
        if manifest.kind != _KIND or manifest.digest == self._spoilt:
            return None
        with contextlib.suppress(SyncdError, OSError):
            for trainer in read_presences(self._job.disk, self._job.trainers)[0].values():
                place = memory_directory_of(trainer.info)
                held = hold_copy(place, manifest) if place is not None else None
                if held is not None:
                    self._taken = manifest.digest
                    return held
        return None

    def spoil(self) -> bool:
        """Note that what was taken last could not be loaded; say whether there is anything of that kind to note."""
        self._spoilt, taken = self._taken or self._spoilt, self._taken
        self._taken = ""
        return bool(taken)
