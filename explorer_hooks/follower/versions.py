"""What is published, which older steps are still there, and which labels name content of the job."""

from syncd.errors import SyncdError
from syncd.protocol.disk import MISSING
from syncd.protocol.layout import parse_step_name
from syncd.protocol.manifest import read_manifest
from syncd.protocol.version import Pair, Version, engine_label, is_unpublished, pair_of
from syncd.synchronizer import Synchronizer


class Versions:
    """The versions of a job as this process has seen them.

    Args:
        sync: The connection to the job.
    """

    def __init__(self, sync: Synchronizer) -> None:
        self._sync = sync
        self.newest: Version | None = None
        self._labels: set[str] = set()

    @property
    def pair(self) -> Pair | None:
        """Return the published pair, None before the first."""
        return self.newest.pair if self.newest else None

    def read(self) -> None:
        """Look which version is published.

        Raises:
            SyncdError: It cannot be read.
            OSError: The same.
        """
        found = self._sync.get_latest_version()
        # A look that a mount has cached must not lead back: pairs only grow.
        if found is not None and (self.newest is None or found.pair >= self.newest.pair):
            self.newest = found

    def know(self, label: str) -> None:
        """Remember a label as one that names content of this job."""
        self._labels.add(label)

    def is_known(self, label: str | None) -> bool:
        """Say whether a label was met as one of this job; nothing is read. Any thread may ask."""
        return label in self._labels

    def named(self, label: str | None) -> Pair | None:
        """Return the published version that a label names, None where it is not of this job or nobody can tell.

        Numbers alone prove nothing: two jobs have the same ones. A version that this process has not met is looked up
        by the manifest of its step.
        """
        pair = pair_of(label)
        if label is None or pair is None or is_unpublished(label):
            return None
        if label not in self._labels and label == self._label_in_job(pair):
            self.know(label)
        return pair if label in self._labels else None

    def _label_in_job(self, pair: Pair) -> str | None:
        newest = self.newest
        if newest is None or pair > newest.pair:
            return None
        if pair == newest.pair:
            return engine_label(pair, newest.digest)
        job = self._sync.job
        try:
            return engine_label(pair, read_manifest(job.disk, job.step(pair[1])).digest)
        except (*MISSING, SyncdError, OSError):
            return None

    def find(self, pair: Pair) -> Version | int:
        """Return what is leased for a pair: the published version, or the step of an older one."""
        return self.newest if self.newest is not None and self.newest.pair == pair else pair[1]

    def older(self) -> tuple[int, ...]:
        """Return the steps below the published one whose directories are there and that were not abandoned."""
        if self.newest is None:
            return ()
        entries = self._sync.job.disk.list(self._sync.job.root)
        steps = {parse_step_name(entry.name) for entry in entries if entry.kind == "directory"}
        left = steps - {step for step, _ in self.newest.abandoned}
        return tuple(sorted(step for step in left if step and step < self.newest.step))
