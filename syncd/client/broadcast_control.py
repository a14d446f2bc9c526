"""The trainer's side of broadcasts: who takes part, the group, and one round after the other. Control plane only.

The trainer decides alone. Once every explorer that takes part asks, it writes the step and each explorer's ask into
its own presence, in one file; an explorer takes part exactly if that record names its present ask. The trainer then
offers a group through rendezvous files, writes the round into its presence, and, once members have posted what they
received, writes whether the round counts. The explorer's side is in `broadcast_membership`.
"""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from syncd.client.client import Client, guarded
from syncd.errors import TimedOutError, TryAgainError, UsageError
from syncd.protocol.backend import KEY as GPU
from syncd.protocol.backend import Gpu
from syncd.protocol.broadcast_round import (
    AGREED,
    COMMITTED,
    FAILED,
    GROUP,
    KEY,
    TAKES_PART,
    Round,
    agreed_asks,
    offered_epoch,
)
from syncd.protocol.disk import MISSING
from syncd.protocol.presence import Presence, RunningStatus
from syncd.protocol.rendezvous import (
    Acknowledgement,
    Offer,
    TensorInfo,
    clear_offers,
    epoch_path,
    latest_epoch,
    read_acknowledgements,
    read_offer,
    write_offer,
)

WEIGHTS = "weights"  # the name of the group


class BroadcastSide:
    """What both sides of a broadcast have in common."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._offer: Offer | None = None

    def guard(self) -> contextlib.AbstractContextManager[None]:
        return self._client.guard()

    @guarded
    def take_part(self, backend: str | None, gpu: Gpu | None = None) -> None:
        """Publish whether this process takes part in broadcasts.

        `backend` is what it always supports, None to take no part; `gpu` is where it supports NCCL too.
        """
        own = self._client.own(None, "a broadcast")
        others = {key: value for key, value in own.info.items() if key not in (TAKES_PART, GPU)}
        taken: dict[str, Any] = {} if backend is None else {TAKES_PART: backend}
        if backend is not None and gpu is not None:
            taken[GPU] = asdict(gpu)
        own.change(info=others | taken)

    @guarded
    def offered(self) -> Offer | None:
        """Return the group that a living trainer offers, to this process if it is an explorer; None without one."""
        job, client = self._client.job, self._client
        for trainer in client.trainers.living().values():
            epoch = offered_epoch(trainer.info, WEIGHTS)
            if epoch is None:
                continue
            with contextlib.suppress(*MISSING):
                job.disk.refresh(epoch_path(job, WEIGHTS, epoch))
                offer = read_offer(job, WEIGHTS, epoch)
                if offer is not None and (client.role != "explorer" or client.identity in offer.members):
                    return offer
        return None


class BroadcastControl(BroadcastSide):
    @guarded
    def members(self, backend: str) -> dict[str, Presence]:
        """Return the living explorers that take part in broadcasts over a backend."""
        living = self._client.explorers.living().items()
        return {name: presence for name, presence in living if presence.info.get(TAKES_PART) == backend}

    @guarded
    def agree(
        self,
        step: int,
        timeout: float | None = None,
        *,
        members: Collection[str] | None = None,
    ) -> dict[str, int]:
        """Wait until the living explorers, or those among `members`, are ready for a broadcast; record the agreement.

        Returns:
            The ask of each explorer that takes part; empty if there is no broadcast: no explorer is there, or not
            all were ready in time.
        """
        own = self._client.own("trainer", "an agreement")
        with own.asking():
            try:
                what = "waiting for all explorers to be ready"
                asks = self._client.poller.until(lambda: self._asks(members), what, timeout)
            except TimedOutError:
                asks = self._asks(members) or {}
            if asks:
                self._record({"step": step, "members": asks})
        return asks

    @guarded
    def withdraw_agreement(self) -> None:
        """Have nobody wait for the round of the agreement that was recorded last: there will be none."""
        own = self._client.own("trainer", "an agreement")
        own.try_change(info={key: value for key, value in own.info.items() if key != AGREED})

    @guarded
    def offer_group(
        self,
        address: str,
        port: int,
        tensors: Sequence[TensorInfo] = (),
        *,
        backend: str = "nccl",
        members: Collection[str] | None = None,
        bucket: int = 0,
        secret: str = "",
    ) -> Offer:
        """Offer a group to the living explorers, or those among `members`; `Offer` says what the arguments mean."""
        job, own = self._client.job, self._client.own("trainer", "a group")
        living = sorted(self._client.explorers.living())
        chosen = tuple(name for name in living if members is None or name in members)
        if not chosen:
            raise TryAgainError("there is no explorer to form a group with", path=job.explorers)
        epoch, size = (latest_epoch(job, WEIGHTS) or 0) + 1, len(chosen) + 1
        offer = Offer(WEIGHTS, epoch, address, port, backend, size, chosen, tuple(tensors), bucket, secret)
        write_offer(job, offer)
        clear_offers(job, WEIGHTS, keep=epoch)
        own.change(info={**own.info, GROUP: {"name": WEIGHTS, "epoch": epoch}})
        self._offer = offer
        return offer

    @guarded
    def wait_joined(self, timeout: float | None = None) -> Offer:
        """Wait until all members of the offered group have joined."""
        self._client.own("trainer", "a group")
        offer = self._offer
        if offer is None:
            raise UsageError("no group is offered", hint="offer one first")
        try:
            what = f"waiting for {len(offer.members)} explorers to join the group"
            self._client.poller.until(lambda: self._is_whole(offer) or None, what, timeout)
        except BaseException:
            self._withdraw_group()
            raise
        return offer

    @guarded
    def close_group(self, timeout: float | None = None) -> tuple[str, ...]:
        """End the group once all living members have left it, so that nothing is sent to one that is leaving.

        Those that had not left in time are returned.
        """
        offer = self._offer
        if offer is None:
            return ()
        own = self._client.own("trainer", "a group")
        own.try_change(info={**own.info, GROUP: {"name": offer.group, "epoch": offer.epoch, "closing": True}})
        try:
            what = "waiting for explorers to leave the group"
            self._client.poller.until(lambda: not self._staying(offer) or None, what, timeout)
        except TimedOutError:
            return self._staying(offer)
        finally:
            self._withdraw_group()
        return ()

    @guarded
    def drop_group(self) -> None:
        """End the group without waiting for anybody, and remove its documents."""
        self._client.own("trainer", "a group")
        self._withdraw_group()
        with contextlib.suppress(OSError):
            clear_offers(self._client.job, WEIGHTS)

    @guarded
    def open_round(self, opened: Round) -> None:
        own = self._client.own("trainer", "a round")
        own.change(info={**own.info, KEY: opened.document()})

    @guarded
    def wait_received(
        self,
        sent: Round,
        offer: Offer,
        checksum: str,
        timeout: float,
    ) -> None:
        """Wait until every member has posted that it received what was sent."""
        what = f"waiting for {len(offer.members)} explorers to confirm step {sent.step}"
        self._client.poller.until(lambda: self._is_received(sent, offer, checksum) or None, what, timeout)

    @guarded
    def end_round(self, ended: Round, checksum: str | None) -> None:
        """Publish whether a round counts: its checksum, or None if it failed.

        That it failed is published if the file system allows; else members conclude it from the deadline.
        """
        own = self._client.own("trainer", "a round")
        if checksum is not None:
            ended = replace(ended, state=COMMITTED, checksum=checksum)
            own.change(info={**own.info, KEY: ended.document()})
        else:
            own.try_change(info={**own.info, KEY: replace(ended, state=FAILED).document()})

    def _asks(self, only: Collection[str] | None) -> dict[str, int] | None:
        """Return the ask of each living explorer, None while one of them does not ask."""
        before = agreed_asks(self._client.own("trainer", "an agreement").info)
        explorers = self._client.explorers.living().items()
        living = {name: presence for name, presence in explorers if only is None or name in only}
        if any(
            presence.status is not RunningStatus.REQUIRE_SYNC or presence.asked <= before.get(name, 0)
            for name, presence in living.items()
        ):
            return None
        return {name: presence.asked for name, presence in living.items()}

    def _record(self, agreement: Mapping[str, Any]) -> None:
        own = self._client.own("trainer", "an agreement")
        before = own.info
        try:
            own.change(info={**before, AGREED: agreement})
        except BaseException:
            own.try_change(info=before)  # a later heartbeat must not publish an agreement that nobody keeps
            raise

    def _is_whole(self, offer: Offer) -> bool:
        posted = self._posted(offer, "could not join")
        self._require_living(offer)
        return all(name in posted for name in offer.members)

    def _is_received(self, sent: Round, offer: Offer, checksum: str) -> bool:
        received = [
            posting
            for posting in self._posted(offer, "has failed").values()
            if posting.state == "received" and posting.step == sent.step
        ]
        for posting in received:
            if posting.checksum != checksum:
                raise TryAgainError(f"explorer {posting.member} has received something else")
        if len(received) < len(offer.members):
            self._require_living(offer)
        return len(received) == len(offer.members)

    def _posted(self, offer: Offer, problem: str) -> dict[str, Acknowledgement]:
        posted = read_acknowledgements(self._client.job, offer.group, offer.epoch)
        members = {name: posted[name] for name in offer.members if name in posted}
        for name, posting in members.items():
            if posting.state in {"failed", "left"}:
                raise TryAgainError(f"explorer {name} {problem}: {posting.message or posting.state}")
        return members

    def _require_living(self, offer: Offer) -> None:
        if gone := set(offer.members) - set(self._client.explorers.living()):
            raise TryAgainError(f"explorer {min(gone)} is gone")

    def _staying(self, offer: Offer) -> tuple[str, ...]:
        """Return the living members that have joined and not left."""
        posted = read_acknowledgements(self._client.job, offer.group, offer.epoch)
        living = self._client.explorers.living()
        return tuple(m for m in offer.members if m in living and m in posted and posted[m].state != "left")

    def _withdraw_group(self) -> None:
        self._offer = None
        own = self._client.own("trainer", "a group")
        own.try_change(info={key: value for key, value in own.info.items() if key != GROUP})
