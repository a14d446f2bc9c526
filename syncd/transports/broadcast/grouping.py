"""The broadcast group: set up and torn down through rendezvous files. The data plane is not here.

The trainer posts an offer and names its epoch in its presence; an explorer joins only what a living trainer
names, never what a dead one left behind. Explorers leave first, so that nothing is sent to a member that is
going.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from syncd.client.base import Base, public
from syncd.client.wait import Wait
from syncd.errors import TimedOutError, TryAgainError, UsageError
from syncd.protocol.disk import MISSING
from syncd.protocol.presence import Presence, RunningStatus
from syncd.protocol.rendezvous import (
    Acknowledgement,
    Offer,
    TensorMeta,
    clear_offers,
    epoch_path,
    latest_epoch,
    read_acknowledgements,
    read_offer,
    write_acknowledgement,
    write_offer,
)

GROUP = "weights"


class Grouping(Base):
    """Control plane of the broadcast group."""

    @public
    def setup_weight_sync_group(
        self,
        master_address: str,
        master_port: int,
        state_dict_meta: Sequence[TensorMeta] | None = None,
        *,
        group: str = GROUP,
        backend: str = "nccl",
        members: Collection[str] | None = None,
        bucket: int = 0,
        secret: str = "",
    ) -> Offer:
        """Offer a group to all living explorers, as the trainer.

        Args:
            master_address: Where the group's store listens.
            master_port: Its port.
            state_dict_meta: Name, dtype and shape of each tensor, in the order of sending.
            group: Name of the group.
            backend: nccl or gloo.
            members: The explorers that it is offered to, of those that live; all of them unless given.
            bucket: Bytes that are sent at once.
            secret: What the keys in the group's store begin with.

        Raises:
            TryAgainError: No explorer is there.
        """
        trainer = self._as("trainer", "setup_weight_sync_group")
        living = sorted(self.explorers.living())
        chosen = tuple(name for name in living if members is None or name in members)
        if not chosen:
            raise TryAgainError("no explorer is there to form a group with", path=self.job.explorers)
        offer = Offer(
            group,
            (latest_epoch(self.job, group) or 0) + 1,
            master_address,
            master_port,
            backend,
            len(chosen) + 1,
            chosen,
            tuple(state_dict_meta or ()),
            bucket,
            secret,
        )
        write_offer(self.job, offer)
        clear_offers(self.job, group, keep=offer.epoch)
        trainer.change(info={**trainer.presence.info, "group": {"name": group, "epoch": offer.epoch}})
        self._group = offer
        return offer

    @public
    def get_weight_sync_info(self, group: str = GROUP) -> tuple[str, int, list[TensorMeta]] | None:
        """Return address, port and tensors of the group that a living trainer offers, None without one."""
        offer = self._open_offer(group)
        return None if offer is None else (offer.address, offer.port, list(offer.tensors))

    @public
    def weight_sync_group_is_closing(self) -> bool:
        """Say, to an explorer, whether the group that it has joined is to be left."""
        group = self._group
        if group is None:
            return False
        named = [_named(trainer, group.group) for trainer in self.trainers.living().values()]
        return not any(name.get("epoch") == group.epoch and not name.get("closing") for name in named)

    def setting_up(self, timeout: float | None = None, *, group: str = GROUP) -> Wait[Offer]:
        """Form the group: the trainer waits for all members of its offer to join, an explorer joins one.

        Raises:
            TimedOutError: Not all came in time; the group is torn down.
            TryAgainError: A member has failed or died; the group is torn down.
        """
        if self.role == "explorer":
            return (yield from self._join(timeout, group))
        trainer, offer = self._as("trainer", "coordinate_weight_sync_setup"), self._group
        if offer is None:
            raise UsageError("no group is offered", hint="call setup_weight_sync_group first")
        try:
            what = f"waiting for {len(offer.members)} explorers to join the group"
            return (yield from self._until(lambda: offer if self._is_whole(offer) else None, timeout, what))
        except BaseException:
            self._dissolve(trainer.presence)
            raise

    def tearing_down(self, timeout: float | None = None) -> Wait[tuple[str, ...]]:
        """Leave the group. Explorers leave at once; the trainer after them, and it waits for no dead one.

        Returns:
            The members that had not left when the trainer did.
        """
        offer = self._group
        if offer is None:
            return ()
        if self.role == "explorer":
            self._acknowledge(offer, "left")
            self._group = None
            return ()
        trainer = self._as("trainer", "coordinate_weight_sync_teardown")
        closing = {"name": offer.group, "epoch": offer.epoch, "closing": True}
        trainer.settle(info={**trainer.presence.info, "group": closing})
        try:
            look = lambda: None if self._staying(offer) else ()  # noqa: E731
            return (yield from self._until(look, timeout, "waiting for explorers to leave the group"))
        except TimedOutError:
            return self._staying(offer)
        finally:
            self._dissolve(trainer.presence)

    def _join(self, timeout: float | None, group: str) -> Wait[Offer]:
        what = "waiting for the trainer to offer a group"
        offer = yield from self._until(lambda: self._open_offer(group), timeout, what)
        self._acknowledge(offer, "joined")
        self._group = offer
        return offer

    def _acknowledge(self, offer: Offer, state: str) -> None:
        acknowledgement = Acknowledgement(self.identity or "", state)
        write_acknowledgement(self.job, offer.group, offer.epoch, acknowledgement)

    def _open_offer(self, group: str) -> Offer | None:
        for trainer in self.trainers.look().values():
            named = _named(trainer, group)
            if trainer.status is not RunningStatus.STOPPED and not named.get("closing"):
                offer = self._offer_of(group, named.get("epoch"))
                if offer is not None and (self.role != "explorer" or self.identity in offer.members):
                    return offer
        return None

    def _offer_of(self, group: str, epoch: Any) -> Offer | None:
        if type(epoch) is not int:
            return None
        try:
            self.job.disk.refresh(epoch_path(self.job, group, epoch))
        except MISSING:
            return None
        return read_offer(self.job, group, epoch)

    def _is_whole(self, offer: Offer) -> bool:
        states = read_acknowledgements(self.job, offer.group, offer.epoch)
        for name, said in states.items():
            if name in offer.members and said.state in ("failed", "left"):
                raise TryAgainError(f"explorer {name} could not join: {said.message or said.state}")
        living = self.explorers.living()
        for name in offer.members:
            if name not in living:
                raise TryAgainError(f"explorer {name} has gone before it joined")
        return all(name in states for name in offer.members)

    def _staying(self, offer: Offer) -> tuple[str, ...]:
        """Return the living members that have not left, or never came."""
        states = read_acknowledgements(self.job, offer.group, offer.epoch)
        living = self.explorers.living()
        return tuple(m for m in offer.members if m in living and m in states and states[m].state != "left")

    def _dissolve(self, trainer: Presence) -> None:
        self._group = None
        if self._member is not None:
            self._member.settle(info={key: value for key, value in trainer.info.items() if key != "group"})


def _named(trainer: Presence, group: str) -> Mapping[str, Any]:
    """Return what a trainer's presence says of a group, nothing where it says nothing."""
    named = trainer.info.get("group")
    return named if isinstance(named, Mapping) and named.get("name") == group else {}
