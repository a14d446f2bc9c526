"""Where an engine's weights come from if the trainer broadcasts them: before publication, or else from files."""

import time
from collections.abc import Callable, Collection
from functools import partial

import structlog

from explorer_hooks.follower.follower import Follower, TurnOutcome
from explorer_hooks.hook import TensorHook, UntouchedError
from explorer_hooks.proof.judgement import UnprovenError
from explorer_hooks.run.generation import BEFORE_THE_FIRST
from explorer_hooks.run.weight_sources import PIECE, WeightSource
from syncd.errors import SyncdError, TimedOutError
from syncd.parts.broadcast.receive import BroadcastReceiver
from syncd.protocol.version import Pair, engine_label, label_of
from syncd.transports.base import WeightTensors

_GONE = 10.0
"""Seconds that the files of an unpublished step may take once its trainer is gone, has restarted or has moved on."""

_LONGEST_REST = 64  # versions that come through files before a broadcast is tried again, at most

_LOG = structlog.get_logger()


class BroadcastSource(WeightSource):
    """Weights come by broadcasts, which deliver them before they are published, else from files.

    What a broadcast delivers runs at once, under the pair that it will have. Until the daemon publishes it, its
    work is not written, and nothing else is received. If it is never published, its work is dropped.

    Args:
        patience: Seconds in which what was received must be published.
        ready: Seconds that the trainer waits for explorers, at most.
        stop: Once it returns true, nothing is waited for.
    """

    def __init__(
        self,
        follower: Follower,
        receiver: BroadcastReceiver,
        hook: TensorHook,
        *,
        patience: float,
        ready: float,
        stop: Callable[[], bool],
    ) -> None:
        super().__init__(follower)
        self._receiver, self._hook, self._stop = receiver, hook, stop
        self._patience, self._ready = patience, ready
        self._unpublished: Pair | None = None
        self._void: set[Pair] = set()
        self._received_at = self._sender_seen_at = 0.0
        self._failures = self._rest = 0

    @property
    def runs(self) -> Pair | None:
        return self._unpublished or super().runs

    @property
    def is_published(self) -> bool:
        return self._unpublished is None

    def may_work(self) -> bool:
        """Return whether the engine may be given work; what is not published yet is recent enough."""
        return self._unpublished is not None or super().may_work()

    def newest(self) -> Pair | None:
        return self._unpublished or super().newest()

    def update(self, timeout: float, *, ask: bool = False) -> TurnOutcome:
        """Receive from the transport, or load a version from files.

        In every sync style the trainer counts on an ask of each explorer. If `timeout` is 0, there is an ask only
        while the trainer waits for one.
        """
        if self._unpublished is not None:
            return self._await_decision(timeout)
        if self._rest:
            return self._counted(super().update(timeout, ask=ask))
        outcome = super().update(0.0)
        if outcome.kind != "nothing" or not (timeout or self._receiver.is_wanted()):
            return outcome
        weights = self._received(timeout)
        return self._loaded(weights) if weights is not None else super().update(0.0)

    def are_published(self, versions: Collection[Pair]) -> bool:
        if self._unpublished in versions:
            self.wait_until_published()
        unpublished = self._void | ({self._unpublished} if self._unpublished else set())
        # A void version counts as unpublished until here even if its pair was published with other weights meanwhile:
        # work from before and after cannot be told apart.
        self._void = set()
        return super().are_published(versions) and not unpublished.intersection(versions)

    def wait_until_published(self) -> None:
        while self._unpublished is not None and not self._stop():
            self._await_decision(PIECE)

    # --- receiving --------------------------------------------------------------------------------------------

    def _received(self, timeout: float) -> WeightTensors | None:
        """Wait for the transport; None if a version has to be loaded from files, or nothing came."""
        end = time.monotonic() + max(timeout, self._ready)
        came = self._receiver.wait(self._follower.met, timeout or PIECE)
        while came is None and self._receiver.is_wanted() and not self._stop() and time.monotonic() < end:
            came = self._receiver.wait(self._follower.met, PIECE)
        return came if isinstance(came, WeightTensors) else None

    def _loaded(self, weights: WeightTensors) -> TurnOutcome:
        pair = weights.pair
        try:
            self._follower.load_received(weights, partial(self._load, weights))
        except SyncdError as error:
            if isinstance(error, UnprovenError):
                self._hook.drop_label()
                self._follower.confirm_none()
            if self._hook.is_restored_at_once and not isinstance(error, UntouchedError):
                self._follower.recover()
            _LOG.warning("broadcast_receive_failed", version=label_of(pair), reason=str(error))
            self._begin_rest()
            return self._counted(super().update(0.0))  # the step comes through files
        self._unpublished, self._received_at = pair, time.monotonic()
        self._sender_seen_at, self._failures = self._received_at, 0
        _LOG.info("broadcast_received", version=label_of(pair))
        return TurnOutcome("applied", pair)

    def _load(self, weights: WeightTensors) -> None:
        self._hook.load_received(weights, partial(self._receiver.fill, weights))
        self._receiver.report_running(weights)

    def _begin_rest(self) -> None:
        """Leave the transport for a while: the trainer should not send what the engine does not load."""
        self._failures += 1
        self._rest = min(2 ** (self._failures - 1), _LONGEST_REST)
        self._receiver.leave()

    def _counted(self, outcome: TurnOutcome) -> TurnOutcome:
        """Count a version that came through files, and rejoin the transport after enough of them."""
        if outcome.kind == "applied":
            self._rest -= 1
            if not self._rest:
                self._receiver.join()
        return outcome

    # --- publication ------------------------------------------------------------------------------------------

    def _await_decision(self, timeout: float) -> TurnOutcome:
        """Wait until what runs is published, or will not be: then load files."""
        pair = self._unpublished
        assert pair is not None
        try:
            self.client.wait_for(self._is_decided, timeout)
        except TimedOutError:
            return TurnOutcome("nothing", reason="what runs is not published yet")
        self._unpublished = None
        if self._receiver.confirm_published() and self.client.confirmed == pair:
            label = engine_label(pair, self.client.confirmed_digest)
            self._follower.add_label(label)
            self._set_label(label)
            self._follower.adopt(pair)
            return TurnOutcome("applied", pair)
        _LOG.warning("broadcast_discarded", version=label_of(pair), reason="it was not published")
        # Until files are loaded, nobody can name what the engine runs, so it is given no work. Work that began with
        # the start model may have ended with the weights that overwrote it.
        self._void |= {pair, BEFORE_THE_FIRST}
        self._hook.drop_label()
        self._follower.confirm_none()
        return super().update(0.0)

    def _set_label(self, label: str) -> None:
        try:
            self._hook.set_label(label)
        except SyncdError as error:
            # This process knows the version in any case; another process loads the files, which are the same.
            _LOG.warning("version_report_failed", reason=str(error))

    def _is_decided(self) -> bool:
        return self._receiver.confirm_published() or self._receiver.is_void() or self._is_overdue()

    def _is_overdue(self) -> bool:
        now = time.monotonic()
        if self._receiver.sender_is_here():
            self._sender_seen_at = now
        return now - self._sender_seen_at > _GONE or now - self._received_at > self._patience
