"""Agreeing on the moment of a broadcast, with any number of explorers. Control plane only.

The trainer decides alone: once every living explorer asks, it writes who takes part and with which ask into
its own presence, in one file. An explorer takes part exactly if that record names its present ask, so all
sides follow one writer. The record outlives the wait: whoever gives up withdraws its ask first and then looks
once more.
"""

from collections.abc import Collection, Mapping
from typing import Any

from syncd.client.base import Base
from syncd.client.own_presence import Member
from syncd.client.wait import Wait
from syncd.errors import TimedOutError, UsageError
from syncd.protocol.marker import read_marker
from syncd.protocol.presence import Presence, RunningStatus


class Agreeing(Base):
    """Agreement on a broadcast."""

    def agreeing(
        self,
        module: str,
        trainer_step: int | None = None,
        timeout: float | None = None,
        *,
        members: Collection[str] | None = None,
    ) -> Wait[int | None]:
        """Wait until the trainer and every living explorer are ready for a broadcast.

        Args:
            module: `trainer` or `explorer`: what this process is.
            trainer_step: The trainer's step; the one announced last unless given.
            timeout: Seconds to wait; the default of the synchronizer unless given.
            members: The explorers that are asked, of those that live; all of them unless given.

        Returns:
            The step that is broadcast; None where it will not happen: nobody is there, or not all came in
            time.
        """
        if module == "trainer":
            return (yield from self._lead(trainer_step, timeout, members))
        if module == "explorer":
            return (yield from self._take_part(timeout))
        raise UsageError(f"no module is called {module!r}", hint="trainer or explorer")

    def _lead(
        self, trainer_step: int | None, timeout: float | None, only: Collection[str] | None
    ) -> Wait[int | None]:
        trainer = self._as("trainer", "ready_to_nccl_sync('trainer')")
        step = (
            trainer_step
            if trainer_step is not None
            else read_marker(self.job.disk, self.job.marker).step or 0
        )
        members: dict[str, int] | None = None
        with trainer.asking():
            try:
                members = yield from self._until(
                    lambda: self._ready(only), timeout, "waiting for all explorers to be ready"
                )
            except TimedOutError:
                members = self._ready(only)
            if members:
                self._record(trainer, {"step": step, "members": members})
        return step if members else None

    def _record(self, trainer: Member, record: Mapping[str, Any]) -> None:
        before = trainer.presence.info
        try:
            trainer.change(info={**before, "agreed": record})
        except BaseException:
            trainer.settle(info=before)  # a later heartbeat must not announce what will not happen
            raise

    def _ready(self, only: Collection[str] | None) -> dict[str, int] | None:
        """Return the ask of each living explorer, None while one of them does not ask."""
        before = agreed_asks(self._member.presence) if self._member else {}
        living = {name: one for name, one in self.explorers.living().items() if only is None or name in only}
        if any(not _asks(explorer, before.get(name, 0)) for name, explorer in living.items()):
            return None
        return {name: explorer.asked for name, explorer in living.items()}

    def _take_part(self, timeout: float | None) -> Wait[int | None]:
        explorer = self._as("explorer", "ready_to_nccl_sync('explorer')")
        with explorer.asking() as asked:
            try:
                what = "waiting for the trainer to be ready"
                return (yield from self._until(lambda: self._decision(asked), timeout, what)).step
            except TimedOutError:
                pass
        # The ask is withdrawn. What the trainer was about to write when it still stood lands within a look.
        yield self.pace.next()
        return self._agreed(asked).step

    def _decision(self, asked: int) -> "Decision | None":
        agreed = self._agreed(asked)
        return agreed if agreed.step is not None or self.trainers.departed() is not None else None

    def _agreed(self, asked: int) -> "Decision":
        me = self.identity or ""
        self.trainers.look()
        for trainer in self.trainers.last().values():
            record = trainer.info.get("agreed")
            if agreed_asks(trainer).get(me) == asked and isinstance(record, Mapping):
                step = record.get("step")
                return Decision(step if type(step) is int else None)
        return Decision(None)


class Decision:
    """What became of an ask: the step of the broadcast, None for no broadcast."""

    def __init__(self, step: int | None) -> None:
        self.step = step


def agreed_asks(trainer: Presence) -> dict[str, int]:
    """Return the asks that a trainer's last agreement names, by explorer."""
    record = trainer.info.get("agreed")
    members = record.get("members") if isinstance(record, Mapping) else None
    if not isinstance(members, Mapping):
        return {}
    return {name: asked for name, asked in members.items() if type(asked) is int}


def _asks(explorer: Presence, agreed_before: int) -> bool:
    return explorer.status is RunningStatus.REQUIRE_SYNC and explorer.asked > agreed_before
