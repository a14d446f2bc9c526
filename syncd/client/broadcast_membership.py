"""The explorer's side of broadcasts: ask for weights, join the group, post what was received. Control plane only.

An explorer takes part exactly if the trainer's presence names its present ask. That record outlives the ask: an
explorer that gives up withdraws its ask first and then reads the trainer's presence once more. It joins only a group
that a living trainer names, never one that a dead trainer left behind.
"""

import contextlib
from collections.abc import Iterable

from syncd.client.broadcast_control import WEIGHTS, BroadcastSide
from syncd.client.client import guarded
from syncd.client.follow import has_caught_up
from syncd.client.sync_policy import NOTHING
from syncd.errors import TimedOutError, TryAgainError
from syncd.protocol.broadcast_round import (
    COMMITTED,
    FAILED,
    OPEN,
    TAKES_PART,
    Round,
    UnpublishedStep,
    agreed_asks,
    agreed_step,
    offered_epoch,
    round_of,
)
from syncd.protocol.presence import Presence, RunningStatus
from syncd.protocol.rendezvous import Acknowledgement, Offer, write_acknowledgement
from syncd.protocol.version import Version

_SOON = 5.0  # seconds within which a round follows its agreement; a trainer that takes longer has failed


class BroadcastMembership(BroadcastSide):
    @guarded
    def is_wanted(self) -> bool:
        """Return whether a trainer that broadcasts waits for explorers now."""
        living = self._client.trainers.living().values()
        return any(
            presence.status is RunningStatus.REQUIRE_SYNC and TAKES_PART in presence.info
            for presence in living
        )

    @guarded
    def agree(self, timeout: float | None = None) -> int | None:
        """Ask for a broadcast, and return its step once the trainer agrees; None if there is no broadcast."""
        client, own = self._client, self._client.own("explorer", "an agreement")
        with own.asking() as asked:
            try:
                what = "waiting for the trainer to be ready"
                return client.poller.until(lambda: self._decision(asked), what, timeout)[0]
            except TimedOutError:
                pass
        # The ask is withdrawn. What the trainer was writing until then is there after one poll.
        client.poller.pause()
        return self._agreed_step(asked)

    @guarded
    def wait_for_weights(
        self, current: int = NOTHING, timeout: float | None = None
    ) -> Round | Version | None:
        """Ask for weights newer than the step `current`, and wait until they come by a broadcast or through files.

        Returns:
            A round that has begun, or has failed already; a version to load from files; None if nothing is newer,
            the trainer is gone, or nothing came in time.
        """
        client, own = self._client, self._client.own("explorer", "a wait for weights")
        with own.asking() as asked:
            try:
                what = f"waiting for weights after {current}"
                weights = client.poller.until(lambda: self._weights(current, asked), what, timeout)[0]
            except TimedOutError:
                weights = None
        if isinstance(weights, Round):
            return weights
        # The ask is withdrawn. What the trainer was writing until then is there after one poll.
        client.poller.pause()
        return self._late_round(asked) or weights

    @guarded
    def join_group(self, timeout: float | None = None, opened: Round | None = None) -> Offer:
        """Wait until a living trainer offers a group to this explorer, and join it; `opened` is the round it is for.

        Raises:
            TryAgainError: The trainer has ended that round.
        """
        what = "waiting for the trainer to offer a group"
        offer = self._client.poller.until(lambda: self._offered_for(opened), what, timeout)
        self._post(offer.epoch, "joined")
        self._offer = offer
        return offer

    @guarded
    def leave_group(self) -> None:
        """Leave the group; without one, do nothing."""
        offer, self._offer = self._offer, None
        if offer is not None:
            self._post(offer.epoch, "left")

    @guarded
    def group_is_closing(self) -> bool:
        """Return whether no living trainer offers the joined group any more, so that it is to be left."""
        joined = self._offer
        if joined is None:
            return False
        living = self._client.trainers.living().values()
        return all(offered_epoch(trainer.info, WEIGHTS) != joined.epoch for trainer in living)

    @guarded
    def acknowledge(self, offer: Offer, received: Round, checksum: str) -> None:
        self._post(offer.epoch, "received", step=received.step, checksum=checksum)

    @guarded
    def refuse(self, refused: Round, reason: str) -> None:
        """Post that this member cannot take part, unless the trainer has ended the round already."""
        if self._end_of(refused) is None:
            self._post(refused.epoch, "failed", message=reason[:500])

    @guarded
    def is_open(self, opened: Round) -> bool:
        """Return whether the trainer has not published yet how a round ended."""
        return self._end_of(opened) is None

    @guarded
    def wait_for_end(self, received: Round, timeout: float | None = None) -> bool:
        """Wait until the trainer publishes whether a round counts; False if it does not in time."""
        try:
            what = "waiting for the trainer to end the round"
            return self._client.poller.until(lambda: self._end_of(received), what, timeout)
        except TimedOutError:
            return False

    # --- a step that runs before it is published -----------------------------------------------------------------

    @guarded
    def set_ahead(self, received: Round) -> None:
        """Publish that this explorer runs what it received, before the step is published."""
        self._client.own("explorer", "a broadcast")
        self._client.follower.set_ahead(UnpublishedStep(received.step, received.attempt, received.generation))

    @guarded
    def confirm_published(self) -> bool:
        return self._client.follower.confirm_published()

    @guarded
    def is_void(self) -> bool:
        """Return whether what runs will not be published: another is, or the trainer says that its save failed."""
        sent = self._sent()
        return (sent is not None and sent.state == FAILED) or self._client.follower.is_overruled()

    @guarded
    def sender_is_here(self) -> bool:
        """Return whether the trainer that sent what runs lives, and has sent nothing since."""
        return self._sent() is not None

    def _sent(self) -> Round | None:
        ahead = self._client.follower.ahead
        if ahead is None:
            return None
        rounds = (round_of(trainer.info) for trainer in self._client.trainers.living().values())
        return next(
            (
                candidate
                for candidate in rounds
                if candidate is not None and candidate.attempt == ahead.attempt
            ),
            None,
        )

    def _offered_for(self, opened: Round | None) -> Offer | None:
        offer = self.offered()
        if offer is None and opened is not None and not self.is_open(opened):
            raise TryAgainError("the trainer aborted the broadcast")
        return offer

    def _decision(self, asked: int) -> tuple[int | None] | None:
        """Return the agreed step, (None,) if the trainer is gone, None while neither is known."""
        step = self._agreed_step(asked)
        return (step,) if step is not None or self._client.trainers.departed() is not None else None

    def _agreed_step(self, asked: int) -> int | None:
        self._client.trainers.read()
        trainers = self._client.trainers.last().values()
        return next(
            (agreed_step(trainer.info) for trainer in trainers if self._is_agreed(asked, [trainer])), None
        )

    def _weights(self, current: int, asked: int) -> tuple[Round | Version | None] | None:
        """Return what has come, (None,) if nothing will come, None while neither is known."""
        follower, versions = self._client.follower, self._client.versions
        answers = follower.answers(asked)
        living = self._client.trainers.living().values()
        opened = self._round_for(asked, living)
        if opened is not None:
            return (opened,)
        if self._is_agreed(asked, living):
            return None
        # Read the version after the answer, so that nothing announced before the answer is missed.
        version = versions.latest_or_none()
        if follower.news(current, version) is not None:
            return (version,)
        return (None,) if any(has_caught_up(version, trainer) for trainer in answers) else None

    def _late_round(self, asked: int) -> Round | None:
        """Return the round of an agreement that names an ask which is withdrawn by now."""
        trainers = self._client.trainers
        living = trainers.living().values()
        opened = self._round_for(asked, living)
        if opened is None and self._is_agreed(asked, living):
            with contextlib.suppress(TimedOutError):
                poll = lambda: self._round_for(asked, trainers.living().values())  # noqa: E731
                return self._client.poller.until(poll, "waiting for the round", _SOON)
        return opened

    def _round_for(self, asked: int, trainers: Iterable[Presence]) -> Round | None:
        rounds = [round_of(trainer.info) for trainer in trainers]
        me = self._client.identity or ""
        return next(
            (candidate for candidate in rounds if candidate is not None and candidate.is_of(me, asked)), None
        )

    def _is_agreed(self, asked: int, trainers: Iterable[Presence]) -> bool:
        """Return whether a trainer counts on this explorer: its round follows at once."""
        me = self._client.identity or ""
        return any(agreed_asks(trainer.info).get(me) == asked for trainer in trainers)

    def _end_of(self, opened: Round) -> bool | None:
        """Return whether a round counts, None while it is open."""
        for trainer in self._client.trainers.living().values():
            current = round_of(trainer.info)
            if current is not None and (current.epoch, current.attempt) == (opened.epoch, opened.attempt):
                return None if current.state == OPEN else current.state == COMMITTED
        return False

    def _post(
        self,
        epoch: int,
        state: str,
        *,
        step: int | None = None,
        checksum: str = "",
        message: str = "",
    ) -> None:
        posting = Acknowledgement(self._client.identity or "", state, step, checksum, message)
        write_acknowledgement(self._client.job, WEIGHTS, epoch, posting)
