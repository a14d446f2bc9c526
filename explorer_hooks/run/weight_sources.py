"""Where an engine's weights come from: published files. A transport that delivers earlier has a source of its own."""

import contextlib
from collections.abc import Collection, Iterator, Mapping

from explorer_hooks.follower.follower import Follower, TurnOutcome
from explorer_hooks.hook import Unproven
from explorer_hooks.run.generation import BEFORE_THE_FIRST
from syncd.errors import CorruptDataError, JobMissingError, StorageError
from syncd.protocol.version import Pair

PIECE = 1.0  # seconds of one wait, and so the longest delay of a signal


@contextlib.contextmanager
def storage_errors_pass() -> Iterator[None]:
    """Suppress errors of the storage, a heartbeat's too; raise that the job is gone, or another one."""
    try:
        yield
    except JobMissingError:
        raise
    except (StorageError, OSError):
        pass


class WeightSource:
    """Keeps an engine at a version, and reports which one: weights come from files, so whatever runs is published.

    Used by one thread, but for `runs` and `may_work`.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower, self.client = follower, follower.client

    @property
    def runs(self) -> Pair | None:
        """Return the version that the engine runs and that its work carries, None if it runs none."""
        return self._follower.applied

    @property
    def unproven(self) -> Mapping[str, Unproven]:
        return self._follower.unproven

    @property
    def reason(self) -> str:
        """Return why the engine may do no work, or did not load the newest version; empty if nothing is wrong."""
        return self._follower.engine_reason

    @property
    def is_published(self) -> bool:
        return True

    def may_work(self) -> bool:
        """Return whether the engine may be given work: it answers, and is not too far behind."""
        return self._follower.may_work()

    def update(self, timeout: float, *, ask: bool = False) -> TurnOutcome:
        """Wait for weights that are due, and load them.

        Args:
            timeout: Seconds to wait; 0 between two tasks: then only what is there, or is waited for, is loaded.
            ask: Whether the trainer's answer that it has nothing newer ends the wait.
        """
        return self._follower.turn(timeout, ask=ask)

    def are_published(self, versions: Collection[Pair]) -> bool:
        """Return whether work of these versions may be written: each was published when this returns.

        Work of the start model may be written unless the engine was started with another one. Waits, within bounds,
        if one of them is not published yet.
        """
        # Step 0 may be published, too; else nothing tells its work from that of a start model that is not the job's.
        is_start_void = self._follower.started_elsewhere and self.runs != BEFORE_THE_FIRST
        return not (is_start_void and BEFORE_THE_FIRST in versions)

    def wait_until_published(self) -> None:
        """Wait, within bounds, until what runs is published or given up."""

    def newest(self) -> Pair | None:
        # The daemon is about to replace what is damaged.
        with contextlib.suppress(CorruptDataError), storage_errors_pass():
            version = self.client.latest_version()
            return version.pair if version else None
        return None
