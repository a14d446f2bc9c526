"""How far a batch is that agents are playing: a line in the log every so often."""

import time
from collections.abc import Callable

import structlog

from explorer_hooks.parts.agents.gateway import Gateway
from explorer_hooks.parts.agents.http_thread import HttpThread
from explorer_hooks.parts.agents.sessions import Sessions

EVERY = 15.0  # seconds without another line of progress, or a batch, after which there is one

_LOG = structlog.get_logger()


class RolloutProgress:
    """Says how many rollouts have ended; `http` is the thread that changes them, `clock` gives monotonic seconds."""

    def __init__(
        self,
        gateway: Gateway,
        http: HttpThread,
        needed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway, self._http, self._needed, self._clock = gateway, http, needed, clock
        self._said_at = clock()

    def restart(self) -> None:
        self._said_at = self._clock()

    def show(self) -> None:
        if self._clock() - self._said_at >= EVERY:
            self.restart()
            figures = self._http.call(_figures(self._gateway.sessions))
            _LOG.info("rollouts_played", needed=self._needed, **figures)


async def _figures(sessions: Sessions) -> dict[str, int]:
    """Return figures of what is not written yet; in the event loop, which alone changes sessions."""
    states = [session for group in sessions.groups.values() for session in group.rollouts.values()]
    playing = [session for session in states if session.state == "open"]
    return {
        "ended": sum(session.state == "rewarded" for session in states),
        "playing": len(playing),
        "turns": sum(len(session.turns) for session in playing),
        "dropped_groups": sum(sessions.dropped.values()),
    }
