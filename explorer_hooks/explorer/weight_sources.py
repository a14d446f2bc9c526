"""Where weights come from next: the seam between the explorer's loop and the ways by which versions come."""

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from explorer_hooks.follower.follower import Follower, TurnOutcome
from syncd.errors import CorruptDataError

if TYPE_CHECKING:
    from collections.abc import Collection

    from syncd.client.client import Client
    from syncd.protocol.version import Pair


class Source(ABC):
    """Keeps an engine at a version, and says which one. Used by one thread, but for `runs` and `may_work`."""

    @property
    @abstractmethod
    def sync(self) -> "Client":
        """Return the connection to the job."""

    @property
    @abstractmethod
    def runs(self) -> "Pair | None":
        """Return the version that the engine runs and that work of it carries, None where it runs none."""

    @property
    @abstractmethod
    def is_published(self) -> bool:
        """Say whether what runs is published, so that what it made may be handed out."""

    @abstractmethod
    def may_work(self) -> bool:
        """Say whether the engine is to be given work."""

    @abstractmethod
    def turn(self, timeout: float, *, ask: bool = False) -> TurnOutcome:
        """Wait for weights that are due, and take them.

        Args:
            timeout: Seconds to wait; 0 between two tasks: only what is there already, or is waited for, is taken.
            ask: Whether the trainer's answer that there is nothing newer ends the wait.

        Raises:
            EngineDeadError: The engine can neither load nor go back.
            StorageError: The job directory could not be read for half a minute.
        """

    @abstractmethod
    def vouches(self, versions: "Collection[Pair]") -> bool:
        """Say whether work of these versions may be handed out: each is published, and was when this returns.

        Waits, within bounds, where one of them is not published yet.
        """

    @abstractmethod
    def settle(self) -> None:
        """Wait, within bounds, until what runs is published or given up."""

    def newest(self) -> "Pair | None":
        """Return the newest version that there is, None before the first.

        Raises:
            SyncdError: The job cannot be read.
        """
        with contextlib.suppress(CorruptDataError):  # the daemon is about to replace it
            version = self.sync.latest_version()
            return version.pair if version else None
        return None


class Files(Source):
    """Weights come from files alone, so all that runs is published.

    Args:
        follower: Loads them.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    @property
    def sync(self) -> "Client":
        """Return the connection to the job."""
        return self._follower.sync

    @property
    def runs(self) -> "Pair | None":
        """Return what the engine has confirmed."""
        return self._follower.applied

    @property
    def is_published(self) -> bool:
        """Say that it is."""
        return True

    def may_work(self) -> bool:
        """Say whether the engine answers, and is not too far behind."""
        return self._follower.may_work()

    def turn(self, timeout: float, *, ask: bool = False) -> TurnOutcome:
        """Wait for a version, and load it."""
        return self._follower.turn(timeout, ask=ask)

    def vouches(self, versions: "Collection[Pair]") -> bool:
        """Say that it may."""
        del versions
        return True

    def settle(self) -> None:
        """Do nothing."""
