"""Weights by a broadcast, with files underneath: what the loop sees of it is a `Source` like any other.

What a broadcast has brought runs at once, under the pair that it will have, but it is the daemon that publishes it.
Until then nothing that it made is handed out, and no other broadcast is asked for. If it is never published, what it
made is given up with it.
"""

import time
from collections.abc import Callable, Collection

import structlog

from explorer_hooks.explorer.generation import BEFORE_THE_FIRST
from explorer_hooks.explorer.weight_sinks import Taker, label_ahead
from explorer_hooks.explorer.weight_sources import Files
from explorer_hooks.follower.follower import Follower, TurnOutcome
from syncd.errors import SyncdError, TimedOutError
from syncd.protocol.version import Pair, engine_label, label_of
from syncd.transports.broadcast.receive import Received

PIECE = 1.0
"""Seconds of one wait: how long a signal may go unheard."""

_GONE = 10.0
"""Seconds in which is published what a trainer has left behind that went, began anew or went on to another step."""

_LONGEST_REST = 64
"""Versions that come through files before a broadcast is tried again, at most."""

_LOG = structlog.get_logger()


class Broadcasts(Files):
    """Weights come by broadcasts where the trainer sends them, else from files.

    Args:
        follower: Loads files.
        taker: Takes in what broadcasts bring.
        patience: Seconds that what was received has to be published in.
        ready: Seconds that the trainer waits for explorers, at most.
        stop: Once true, nothing is waited for.
    """

    def __init__(
        self,
        follower: Follower,
        taker: Taker,
        *,
        patience: float,
        ready: float,
        stop: Callable[[], bool],
    ) -> None:
        super().__init__(follower)
        self._receiver, self._taker, self._stop = taker.receiver, taker, stop
        self._patience, self._ready = patience, ready
        self._ahead: Pair | None = None
        self._void: set[Pair] = set()
        self._since = self._seen = 0.0
        self._failures = self._rest = 0

    @property
    def runs(self) -> Pair | None:
        """Return what the engine runs, published or not."""
        return self._ahead or super().runs

    @property
    def is_published(self) -> bool:
        """Say whether what runs is published."""
        return self._ahead is None

    def may_work(self) -> bool:
        """Say whether the engine is to be given work: what is ahead of all versions is recent enough."""
        return self._ahead is not None or super().may_work()

    def newest(self) -> Pair | None:
        """Return the newest version that there is, the one that runs here before it is published too."""
        return self._ahead or super().newest()

    def turn(self, timeout: float, *, ask: bool = False) -> TurnOutcome:
        """Take part in a broadcast, or load a version from files.

        The trainer counts on an ask of each member in every style, so there is always one. In a turn of no time it
        is made only while the trainer waits, and stands for as long as that lasts.
        """
        if self._ahead is not None:
            return self._settled(timeout)
        if self._rest:
            return self._rested(super().turn(timeout, ask=ask))
        outcome = super().turn(0.0)
        if outcome.kind != "nothing" or not (timeout or self._receiver.wanted()):
            return outcome
        came = self._awaited(timeout)
        return self._taken(came) if came is not None else super().turn(0.0)

    def vouches(self, versions: Collection[Pair]) -> bool:
        """Say whether each of them is published; the one that runs is waited for."""
        if self._ahead in versions:
            self.settle()
        unpublished = self._void | ({self._ahead} if self._ahead else set())
        # One that is void counts until here even if its pair was published of other weights meanwhile: what was made
        # before and after cannot be told apart.
        self._void = set()
        return not unpublished.intersection(versions)

    def settle(self) -> None:
        """Wait until what runs is published or given up, or until it is told to stop."""
        while self._ahead is not None and not self._stop():
            self._settled(PIECE)

    # --- what comes -------------------------------------------------------------------------------------------

    def _awaited(self, timeout: float) -> Received | None:
        """Wait for a broadcast; None where a version is to be looked for in files, or nothing came."""
        end = time.monotonic() + max(timeout, self._ready)
        came = self._receiver.turn(self._follower.met, timeout or PIECE)
        while came is None and self._receiver.wanted() and not self._stop() and time.monotonic() < end:
            came = self._receiver.turn(self._follower.met, PIECE)
        return came if isinstance(came, Received) else None

    def _taken(self, received: Received) -> TurnOutcome:
        pair = received.round.pair
        self._follower.add_label(label_ahead(received))
        try:
            self._taker.take(received)
        except SyncdError as error:
            _LOG.warning("broadcast_receive_failed", version=label_of(pair), reason=str(error))
            self._begin_rest()
            return self._rested(super().turn(0.0))  # the step comes through files
        self._ahead, self._since = pair, time.monotonic()
        self._seen, self._failures = self._since, 0
        _LOG.info("broadcast_received", version=label_of(pair))
        return TurnOutcome("applied", pair)

    def _begin_rest(self) -> None:
        """Take no part for a while: nobody is to send what the engine does not take."""
        self._failures += 1
        self._rest = min(2 ** (self._failures - 1), _LONGEST_REST)
        self._receiver.leave()

    def _rested(self, outcome: TurnOutcome) -> TurnOutcome:
        """Count a version that came through files."""
        if outcome.kind == "applied":
            self._rest -= 1
            if not self._rest:
                self._receiver.join()
        return outcome

    # --- what becomes of it -----------------------------------------------------------------------------------

    def _settled(self, timeout: float) -> TurnOutcome:
        """Wait for what becomes of what runs: published, it is the version; void, files are loaded."""
        pair = self._ahead
        assert pair is not None
        try:
            self.sync.wait_for(self._is_decided, timeout)
        except TimedOutError:
            return TurnOutcome("nothing", reason="what runs is not published yet")
        self._ahead = None
        if self._receiver.confirm_published() and self.sync.confirmed == pair:
            label = engine_label(pair, self.sync.confirmed_digest)
            self._follower.add_label(label)
            self._taker.own(label)
            self._follower.adopt(pair)
            return TurnOutcome("applied", pair)
        _LOG.warning("broadcast_discarded", version=label_of(pair), reason="it was not published")
        # Until files are loaded nobody can name what the engine runs, so it is given no work. What was begun with the
        # start model may have been ended by what overwrote it.
        self._void |= {pair, BEFORE_THE_FIRST}
        self._taker.disown()
        self._follower.confirm_none()
        return super().turn(0.0)

    def _is_decided(self) -> bool:
        return self._receiver.confirm_published() or self._receiver.is_void() or self._is_overdue()

    def _is_overdue(self) -> bool:
        now = time.monotonic()
        if self._receiver.sender_is_here():
            self._seen = now
        return now - self._seen > _GONE or now - self._since > self._patience
