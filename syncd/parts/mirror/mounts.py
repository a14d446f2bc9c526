"""Watches what a mirror asks of its mounts: says which call does not return, and ends what was to end meanwhile."""

from collections.abc import Callable

from syncd.errors import StuckError
from syncd.observe import event_names
from syncd.protocol.disk import Clock
from syncd.protocol.mount import MountState, mount_trouble
from syncd.stall.calls import MOUNT_HINT, STUCK_AFTER, DiskCall, PendingCalls
from syncd.stall.verbs import leave


class MountWatch:
    """Looks at the calls that have not returned, in a thread that makes none.

    Args:
        is_ending: Returns whether the mirror is to end: it then ends by force rather than wait for a mount.
        tell: Hears events; None if somebody else reports the mounts.
    """

    def __init__(
        self,
        calls: PendingCalls,
        clock: Clock,
        is_ending: Callable[[], bool],
        tell: Callable[..., None] | None = None,
    ) -> None:
        self._calls, self._clock, self._is_ending, self._tell = calls, clock, is_ending, tell
        self._stuck: DiskCall | None = None

    def check(self) -> None:
        """Report a call once it counts as stuck, and again once it has returned."""
        call = self._calls.oldest()
        if call is not None and self._calls.age(call) - call.allowance < STUCK_AFTER:
            call = None
        if call is not None and self._is_ending():
            message = f"the mount has not answered for {self._calls.age(call):.0f} s ({call.what})"
            error = StuckError(message, path=call.path, hint=MOUNT_HINT)
            leave(error, error.exit_code)
        if self._tell is not None and call != self._stuck:
            self._report(call)
        self._stuck = call

    def _report(self, call: DiskCall | None) -> None:
        assert self._tell is not None  # asked before
        if call is None:
            detail = f"{self._stuck} has returned"
            self._tell(event_names.MOUNT_STATE_CHANGED, "warning", state=MountState.OK, detail=detail)
            return
        detail = f"{call} has not returned for {self._calls.age(call):.0f} s"
        trouble = mount_trouble(MountState.STUCK, call.path, detail)
        fields = {"state": trouble.state, "detail": trouble.message, "hint": trouble.hint}
        self._tell(event_names.MOUNT_STATE_CHANGED, "error", **fields)
