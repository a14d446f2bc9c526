"""What a follower says of itself: in its presence, to whoever listens, and by its ready file."""

from collections.abc import Callable
from typing import Any

from explorer_hooks.follower.options import Tell
from explorer_hooks.follower.ready import ReadyFile
from syncd.errors import StorageError
from syncd.protocol.version import Pair, label_of
from syncd.synchronizer import Synchronizer


class Telling:
    """Tells what happens.

    A presence that cannot be written is no reason to touch the engine: what it should say is kept, and the
    heartbeat writes it later.

    Args:
        sync: The follower's connection to the job.
        tell: Hears each event; None for nobody.
        ready: The ready file.
    """

    def __init__(self, sync: Synchronizer, tell: Tell | None, ready: ReadyFile) -> None:
        self._sync, self._tell, self.ready = sync, tell, ready
        self.state = ""
        self.applied: Pair | None = None
        """What the presence says that the engine runs."""

    def say(self, state: str, *, now: bool = True, **fields: Any) -> None:
        """Publish the state and other fields of the presence; None takes a field away."""
        self.state = state
        self._published(lambda: self._sync.describe({"state": state, **fields}, now=now))

    def confirm(self, pair: Pair | None) -> None:
        """Publish what the engine has confirmed."""
        self.applied = pair
        self._published(lambda: self._sync.confirm(pair))

    def event(self, level: str, name: str, **fields: Any) -> None:
        """Tell whoever listens."""
        if self._tell is not None:
            self._tell(level, name, fields)

    def _published(self, work: Callable[[], None]) -> None:
        # The first call may only raise what went wrong in the background before; it is told, and done again.
        for _ in range(2):
            try:
                work()
            except StorageError as error:
                self.event("warning", "presence_write_failed", reason=str(error))
            else:
                return


def record_of(pair: Pair, reason: str) -> dict[str, str]:
    """Return a version and what is wrong with it, for the presence."""
    return {"version": label_of(pair), "reason": reason}
