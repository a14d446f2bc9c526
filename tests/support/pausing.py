"""A process that is paused at an exact place: its disk stops before one call, and others go first."""

from syncd.protocol.local_disk import LocalDisk


class Pausing(LocalDisk):
    """A disk that lets others go first, before its k-th call."""

    def __init__(self, at, meanwhile):
        super().__init__()
        self.calls, self._at, self._meanwhile = 0, at, meanwhile

    def _count(self):
        self.calls += 1
        if self.calls == self._at:
            self._meanwhile()

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name in {
            "read",
            "stat",
            "list",
            "refresh",
            "replace",
            "rename",
            "make_directory",
            "unlink",
            "sync_directory",
        }:
            self._count()
        return found
