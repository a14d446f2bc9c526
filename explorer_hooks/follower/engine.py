"""What an engine says of itself, and what of that is believed."""

from collections.abc import Callable

from explorer_hooks.hook import Hook, Running
from syncd.errors import EngineDeadError, EngineUnreachableError
from syncd.protocol.disk import Clock
from syncd.protocol.version import Pair

_SOONEST = 0.2
"""Seconds before an engine that did not answer is asked again; twice as long each time, up to the usual interval."""


class Engine:
    """One engine behind its hook.

    Args:
        hook: The hook.
        clock: This host's clock.
        every: Seconds between two questions.
        named: Returns the version of the job that a label names, None where it names none.
    """

    def __init__(
        self, hook: Hook, clock: Clock, every: float, named: Callable[[str | None], Pair | None]
    ) -> None:
        self.hook, self._clock, self._every, self._named = hook, clock, every, named
        self.applied: Pair | None = None
        self.label: str | None = None
        self.is_reachable = False
        self.is_suspect = False
        """Whether it may be half loaded: it was left paused, or went away during a load."""
        self.reason = ""
        self.dead: EngineDeadError | None = None
        self._next, self._pause = float("-inf"), _SOONEST

    def is_due(self) -> bool:
        """Say whether it is to be asked again."""
        return self._clock.monotonic() >= self._next

    @property
    def is_known(self) -> bool:
        """Say whether it runs a version of the job, or what it was started with."""
        return self.applied is not None or self.label is None

    def ask(self) -> None:
        """Ask it what it runs."""
        try:
            running = self.hook.current_version()
        except EngineUnreachableError as error:
            self.lose(error)
        else:
            self.believe(running)

    def believe(self, running: Running) -> None:
        """Take over what it has said."""
        if self.dead is not None and running.label != self.label:
            self.dead = None  # it was restarted
        self.label, self.reason, self.is_reachable = running.label, "", True
        self.applied = self._named(running.label) if self.dead is None else None
        self.is_suspect = self.is_suspect or running.paused
        self._next, self._pause = self._clock.monotonic() + self._every, _SOONEST

    def lose(self, error: EngineUnreachableError) -> None:
        """Note that it does not answer: nothing is known of it until it does."""
        self.applied, self.is_reachable, self.reason = None, False, str(error)
        self.dead = None  # whatever comes back is another process, or is asked anew
        self._next = self._clock.monotonic() + min(self._pause, self._every)
        self._pause *= 2

    def die(self, error: EngineDeadError) -> None:
        """Note that it cannot be brought back."""
        error.hint = error.hint or "restart the engine"
        self.applied, self.reason, self.dead = None, str(error), error
