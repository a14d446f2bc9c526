"""Fetches versions: leases one and asks the receivers in order for its directory: memory, stage, job directory."""

import contextlib
from collections.abc import Callable

from explorer_hooks.follower.policy import FollowOptions
from explorer_hooks.hook import Hook
from syncd.client.client import Client
from syncd.client.lease import Leased
from syncd.errors import ConfigError, SyncdError
from syncd.protocol.version import Pair, Version
from syncd.transports.filesystem.directory import FoundDirectory, HeldDirectory, LoadTimings
from syncd.transports.filesystem.receive import (
    DirectoryOptions,
    FilesystemReceiver,
    ReportEvent,
    Verification,
    refuse_damage,
)
from syncd.transports.filesystem.stage import HostStage
from syncd.transports.memory.receive import MemoryReceiver


class Fetcher:
    """Fetches versions for one hook.

    Args:
        sync: The follower's connection to the job.
        hook: The hook that will load them.
        options: How the follower follows.
        stop: Polled while files are read; once it returns true, the fetch is given up.
        report: Hears events.

    Raises:
        ConfigError: The hook takes no directories, or the stage cannot be used.
    """

    def __init__(
        self,
        sync: Client,
        hook: Hook,
        options: FollowOptions,
        stop: Callable[[], bool],
        report: ReportEvent,
    ) -> None:
        if "directory" not in hook.takes:
            raise ConfigError(f"the hook {hook.name} loads no directories, so it cannot follow versions")
        self._sync = sync
        self._stage = HostStage(options.stage, sync.job.root, sync.clock) if options.stage else None
        verify = Verification(options.verify)
        if verify is Verification.CONTENT and hook.checks_content:
            verify = Verification.HEADER  # the hook itself compares the content while it loads
        wanted = DirectoryOptions(hook.kinds, verify, stop, report)
        self._memory = MemoryReceiver(sync, wanted)
        self._files = FilesystemReceiver(sync, wanted, self._stage)

    def fetch(self, wanted: Version | int, timings: LoadTimings) -> HeldDirectory:
        """Return the directory of a version, checked.

        Raises:
            TryAgainError: The version was removed.
            RefusedError: It is damaged, or of a kind that the hook cannot load.
            SyncdError: The file system failed.
            OSError: The same.
        """
        with contextlib.ExitStack() as lease, refuse_damage():
            leased = lease.enter_context(self._sync.lease(wanted))
            return HeldDirectory(self._find(leased, timings), lease.pop_all())

    def fetch_running(self, pair: Pair) -> HeldDirectory | None:
        """Return the directory of a version that the engine runs already, to restore it later; None if removed."""
        with contextlib.ExitStack() as lease, contextlib.suppress(SyncdError, OSError):
            leased = lease.enter_context(self._sync.lease(pair))
            return HeldDirectory(self._files.find_unchecked(leased), lease.pop_all())
        return None

    def reject(self) -> bool:
        """Never use again the copy that was fetched last; return whether another receiver can be asked instead."""
        return self._memory.reject()

    def sweep(self) -> None:
        """Remove the staged copies that no process of this host uses."""
        if self._stage is not None:
            self._stage.sweep()

    def close(self) -> None:
        """Remove the staged copies that no process of this host uses, and their directory if it is empty."""
        if self._stage is not None:
            self._stage.close()

    def _find(self, leased: Leased, timings: LoadTimings) -> FoundDirectory:
        found = self._memory.find(leased, timings) or self._files.find(leased, timings)
        assert found is not None, "the job directory has every version"
        return found
