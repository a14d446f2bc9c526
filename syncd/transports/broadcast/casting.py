"""Rounds of a broadcast: who takes part, what is sent, who has received what, and whether it counts.

Control plane only. The trainer writes a round into its presence, members post what they have received, and the
trainer writes whether all of them have. Each wait has the deadline of its round.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from syncd.client.base import public
from syncd.client.following import Following, has_caught_up
from syncd.client.sync_policy import NOTHING
from syncd.client.wait import Wait
from syncd.errors import TimedOutError, TryAgainError, UsageError
from syncd.protocol.backend import KEY as GPU
from syncd.protocol.backend import Gpu
from syncd.protocol.presence import Presence, RunningStatus
from syncd.protocol.rendezvous import (
    Acknowledgement,
    Offer,
    clear_offers,
    read_acknowledgements,
    write_acknowledgement,
)
from syncd.protocol.round import (
    AHEAD,
    COMMITTED,
    FAILED,
    KEY,
    OPEN,
    TAKES_PART,
    Ahead,
    Round,
    round_of,
)
from syncd.protocol.version import Pair, Version
from syncd.transports.broadcast.agreeing import agreed_asks
from syncd.transports.broadcast.grouping import GROUP, Grouping

_SOON = 5.0
"""Seconds within which a round follows its agreement; a trainer that takes longer has failed."""


class Casting(Following, Grouping):
    """Control plane of one broadcast after the other."""

    # --- the trainer -------------------------------------------------------------------------------------------

    @public
    def broadcast_members(self, backend: str) -> dict[str, Presence]:
        """Return the living explorers that take part in broadcasts over a backend."""
        living = self.explorers.living().items()
        return {name: one for name, one in living if one.info.get(TAKES_PART) == backend}

    @public
    def agreed_members(self) -> dict[str, int]:
        """Return the asks that the trainer's last agreement names."""
        return agreed_asks(self._as("trainer", "agreed_members").presence)

    @public
    def open_round(self, opened: Round) -> None:
        """Tell the members that a broadcast begins."""
        self._tell(opened)

    @public
    def end_round(self, ended: Round, checksum: str | None) -> None:
        """Tell the members whether it counts: a checksum, or None where it failed.

        A failure is told as well as the file system allows; members come to the same by the deadline.
        """
        if checksum is not None:
            self._tell(replace(ended, state=COMMITTED, checksum=checksum))
            return
        trainer = self._as("trainer", "end_round")
        failed = replace(ended, state=FAILED).document()
        trainer.settle(info={**trainer.presence.info, KEY: failed})

    @public
    def end_group(self) -> None:
        """End the group without waiting for anybody, and remove its documents."""
        trainer = self._as("trainer", "end_group")
        self._dissolve(trainer.presence)
        with contextlib.suppress(OSError):
            clear_offers(self.job, GROUP)

    def confirming(self, sent: Round, offer: Offer, checksum: str, timeout: float) -> Wait[None]:
        """Wait until every member of a round has received what was sent.

        Raises:
            TryAgainError: A member has failed, died, or received something else.
            TimedOutError: Not all have said so in time.
        """
        what = f"waiting for {len(offer.members)} explorers to confirm step {sent.step}"
        look = lambda: self._have_received(sent, offer, checksum) or None  # noqa: E731
        yield from self._until(look, timeout, what)

    def _have_received(self, sent: Round, offer: Offer, checksum: str) -> bool:
        said = read_acknowledgements(self.job, offer.group, offer.epoch)
        received = 0
        for name in offer.members:
            word = said.get(name)
            if word is not None and word.state in {"failed", "left"}:
                raise TryAgainError(f"explorer {name} has failed: {word.message or word.state}")
            if word is not None and word.state == "received" and word.step == sent.step:
                if word.checksum != checksum:
                    raise TryAgainError(f"explorer {name} has received something else")
                received += 1
        if received < len(offer.members):
            self._require_living(offer)
        return received == len(offer.members)

    def _require_living(self, offer: Offer) -> None:
        if lost := set(offer.members) - set(self.explorers.living()):
            raise TryAgainError(f"explorer {min(lost)} has gone")

    def _tell(self, told: Round) -> None:
        trainer = self._as("trainer", "a round")
        trainer.change(info={**trainer.presence.info, KEY: told.document()})

    # --- both --------------------------------------------------------------------------------------------------

    @public
    def take_part(self, backend: str | None, gpu: Gpu | None = None) -> None:
        """Say that this process takes part in broadcasts, or in none any more.

        Args:
            backend: The backend that it takes in any case; None for no part.
            gpu: Where it could take NCCL instead.
        """
        if self._member is None:
            raise UsageError("an observer takes part in no broadcast", hint="open as trainer or explorer")
        said: dict[str, Any] = {} if backend is None else {TAKES_PART: backend}
        if backend is not None and gpu is not None:
            said[GPU] = gpu.document()
        others = {
            key: value for key, value in self._member.presence.info.items() if key not in (TAKES_PART, GPU)
        }
        self._member.change(info=others | said)

    # --- the explorer ------------------------------------------------------------------------------------------

    @public
    def broadcast_wanted(self) -> bool:
        """Say whether a trainer that broadcasts waits for explorers now."""
        living = self.trainers.living().values()
        return any(one.status is RunningStatus.REQUIRE_SYNC and TAKES_PART in one.info for one in living)

    @public
    def set_ahead(self, received: Round) -> None:
        """Say that this explorer runs what it has received, before it is published."""
        explorer = self._as("explorer", "set_ahead")
        self._ahead = Ahead(received.step, received.attempt, received.generation)
        # What runs does not change because it cannot be told at this moment: a heartbeat tells it later.
        explorer.settle(info={**explorer.presence.info, AHEAD: asdict(self._ahead)})

    @public
    def confirm_published(self) -> bool:
        """Confirm what is run once it is published; say whether nothing is left to confirm."""
        if self._ahead is not None:
            self._settle_ahead(self._glance())
        return self._ahead is None

    @public
    def ahead_is_void(self) -> bool:
        """Say whether what a broadcast has brought will not be published.

        Something else is, which is to be loaded; or the trainer says that the files of it have failed.
        """
        ahead = self._ahead
        if ahead is None:
            return False
        sent = self._sent(ahead)
        if sent is not None and sent.state == FAILED:
            return True
        return self._news(ahead.step, self._glance()) is not None

    @public
    def sender_is_here(self) -> bool:
        """Say whether the trainer lives that has sent what is ahead, and has sent nothing since."""
        return self._ahead is not None and self._sent(self._ahead) is not None

    def _sent(self, ahead: Ahead) -> Round | None:
        told = (round_of(trainer.info) for trainer in self.trainers.living().values())
        return next((one for one in told if one is not None and one.attempt == ahead.attempt), None)

    @property
    def confirmed(self) -> Pair | None:
        """Return what this process has confirmed last."""
        return self._member.presence.applied if self._member else None

    @property
    def confirmed_digest(self) -> str:
        """Return the digest of what this process has confirmed last, empty where it is not known."""
        return self._member.presence.applied_digest if self._member else ""

    def waiting_for_round_or_version(
        self, current: int = NOTHING, timeout: float | None = None
    ) -> Wait[Round | Version | None]:
        """Ask for weights, and wait until they come in either way.

        Args:
            current: The step that the explorer runs.
            timeout: Seconds to wait; the default of the synchronizer unless given.

        Returns:
            A round that has begun, or has failed already; a version to load from files; None: there is nothing
            newer, the trainer has gone, or nothing came in time.
        """
        explorer = self._as("explorer", "round_or_version")
        with explorer.asking() as asked:
            try:
                what = f"waiting for weights after {current}"
                came = (yield from self._until(lambda: self._came(current, asked), timeout, what))[0]
            except TimedOutError:
                came = None
        if isinstance(came, Round):
            return came
        # The ask is withdrawn. What the trainer was about to write when it still stood lands within a look.
        yield self.pace.next()
        return (yield from self._late_round(asked)) or came

    def _came(self, current: int, asked: int) -> tuple[Round | Version | None] | None:
        answers = self._answers(asked)
        living = self.trainers.living().values()
        found = self._round_for(asked, living)
        if found is not None:
            return (found,)
        if self._is_agreed(asked, living):
            return None
        # The version is read after the answer: what was announced before the answer is not missed.
        version = self._glance()
        if self._news(current, version) is not None:
            return (version,)
        return (None,) if any(has_caught_up(version, trainer) for trainer in answers) else None

    def _late_round(self, asked: int) -> Wait[Round | None]:
        """Wait for the round of an agreement that names an ask which is withdrawn by now."""
        living = self.trainers.living().values()
        found = self._round_for(asked, living)
        if found is None and self._is_agreed(asked, living):
            with contextlib.suppress(TimedOutError):
                look = lambda: self._round_for(asked, self.trainers.living().values())  # noqa: E731
                return (yield from self._until(look, _SOON, "waiting for the round"))
        return found

    def _round_for(self, asked: int, living: Iterable[Presence]) -> Round | None:
        rounds = [round_of(trainer.info) for trainer in living]
        me = self.identity or ""
        return next((one for one in rounds if one is not None and one.is_of(me, asked)), None)

    def _is_agreed(self, asked: int, living: Iterable[Presence]) -> bool:
        """Say whether the trainer counts on this explorer: its round follows at once."""
        return any(agreed_asks(one).get(self.identity or "") == asked for one in living)

    def _outcome(self, received: Round) -> bool | None:
        for trainer in self.trainers.living().values():
            told = round_of(trainer.info)
            if told is not None and (told.epoch, told.attempt) == (received.epoch, received.attempt):
                return None if told.state == OPEN else told.state == COMMITTED
        return False

    def following_round(self, received: Round, timeout: float | None = None) -> Wait[bool]:
        """Wait until the trainer says whether a round counts; False where it does not say so in time."""
        try:
            look = lambda: self._outcome(received)  # noqa: E731
            return (yield from self._until(look, timeout, "waiting for the trainer's word"))
        except TimedOutError:
            return False

    @public
    def acknowledge_round(self, offer: Offer, received: Round, checksum: str) -> None:
        """Post the checksum of what was received."""
        word = Acknowledgement(self.identity or "", "received", received.step, checksum)
        write_acknowledgement(self.job, offer.group, offer.epoch, word)

    @public
    def refuse_round(self, refused: Round, why: str) -> None:
        """Post that this member cannot take part, unless the trainer has given the round up already."""
        if self.round_goes_on(refused):
            word = Acknowledgement(self.identity or "", "failed", message=why[:500])
            write_acknowledgement(self.job, GROUP, refused.epoch, word)

    @public
    def round_goes_on(self, told: Round) -> bool:
        """Say whether the trainer has not yet said how a round ended."""
        return self._outcome(told) is None
