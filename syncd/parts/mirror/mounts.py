"""Watches what a mirror asks of its mounts: says which call does not return, and ends what was to end meanwhile."""

from collections.abc import Callable

from syncd.errors import StuckError
from syncd.observe import event_names
from syncd.protocol.mount import MountState
from syncd.stall.calls import MOUNT_HINT, PendingCalls, StuckCall
from syncd.stall.verbs import leave


class MountWatch:
    """Looks at the calls that have not returned, in a thread that makes none.

    Once `is_ending`, it ends the mirror by force rather than wait for a mount. `tell` is None if others report them.
    """

    def __init__(
        self,
        calls: PendingCalls,
        is_ending: Callable[[], bool],
        tell: Callable[..., None] | None = None,
    ) -> None:
        self._calls, self._is_ending, self._tell = calls, is_ending, tell
        self._stuck: StuckCall | None = None

    def check(self) -> None:
        """Report a call once it counts as stuck, and again once it has returned."""
        before, stuck = self._stuck, self._calls.stuck()
        self._stuck = stuck
        if stuck is not None and self._is_ending():
            message = f"the mount has not answered for {stuck.seconds:.0f} s ({stuck.call.what})"
            error = StuckError(message, path=stuck.call.path, hint=MOUNT_HINT)
            leave(error, error.exit_code)
        if self._tell is None:
            return
        if stuck is not None and (before is None or stuck.call != before.call):
            self._tell(event_names.MOUNT_STATE_CHANGED, "error", **stuck.fields())
        elif stuck is None and before is not None:
            detail = f"{before.call} has returned"
            self._tell(event_names.MOUNT_STATE_CHANGED, "warning", state=MountState.OK, detail=detail)
