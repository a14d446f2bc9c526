"""What is published, and which older steps are still there."""

from syncd.protocol.layout import parse_step_name
from syncd.protocol.version import Pair, Version
from syncd.synchronizer import Synchronizer


class Versions:
    """The versions of a job as this process has seen them.

    Args:
        sync: The connection to the job.
    """

    def __init__(self, sync: Synchronizer) -> None:
        self._sync = sync
        self.newest: Version | None = None

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
