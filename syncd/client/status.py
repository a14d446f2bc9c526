"""Who is doing what: the statuses of the trainer and of each explorer, by identity, only while they live."""

from abc import ABC, abstractmethod
from typing import Any

from syncd.client.base import Base, public
from syncd.protocol.presence import RunningStatus
from syncd.transports.broadcast.agreeing import agreed_asks


class Statuses(Base, ABC):
    """Statuses, and who asks for a sync."""

    @public
    def add_module(self) -> None:
        """Publish this process as a module of the job; opening has done it already."""
        if self._member is not None:
            self._member.change()

    @public
    def set_trainer_status(self, status: RunningStatus) -> None:
        """Set this trainer's status; the step that it announced last goes out in the same write."""
        self._as("trainer", "set_trainer_status").set_status(RunningStatus(status), **self._position())

    @public
    def get_trainer_status(self) -> RunningStatus:
        """Return what the trainer does: `STOPPED` too before there is one, and once it has died."""
        found = {trainer.status for trainer in self.trainers.look().values()}
        order = (RunningStatus.REQUIRE_SYNC, RunningStatus.RUNNING)
        return next((status for status in order if status in found), RunningStatus.STOPPED)

    @public
    def trainer_requires_weight_sync(self) -> bool | None:
        """Return whether the trainer asks for a sync; None once the one that was there has gone."""
        found = [trainer.status for trainer in self.trainers.look().values()]
        if self.trainers.departed() is not None:
            return None
        return RunningStatus.REQUIRE_SYNC in found

    @public
    def set_explorer_status(self, status: RunningStatus, old_status: RunningStatus | None = None) -> None:
        """Set this explorer's status.

        Raises:
            UsageError: The status is not `old_status` now, or would not change.
        """
        old = None if old_status is None else RunningStatus(old_status)
        self._as("explorer", "set_explorer_status").set_status(RunningStatus(status), old)

    @public
    def get_explorer_status_counts(self) -> dict[RunningStatus, int]:
        """Return how many explorers there are of each status; a dead one counts as stopped."""
        counts = dict.fromkeys(RunningStatus, 0)
        for explorer in self.explorers.look().values():
            counts[explorer.status] += 1
        return counts

    @public
    def explorer_requires_sync(self) -> bool:
        """Say whether any explorer asks for a sync and has had no answer to it yet."""
        me = self._member.presence if self._member else None
        answered = {} if me is None else {**me.answered, **agreed_asks(me)}
        return any(
            explorer.status is RunningStatus.REQUIRE_SYNC and explorer.asked > answered.get(name, 0)
            for name, explorer in self.explorers.look().items()
        )

    @public
    def notify_no_new_model_state_dict(self) -> None:
        """Tell the explorers that ask now that there is nothing newer than the step announced last.

        The answer names that step, so an explorer takes it only once that step is what is published.
        """
        trainer = self._as("trainer", "notify_no_new_model_state_dict")
        # The asks come first: what is announced after this moment is news to those who ask after it.
        asks = {
            name: explorer.asked
            for name, explorer in self.explorers.living().items()
            if explorer.status is RunningStatus.REQUIRE_SYNC
        }
        known = self.explorers.last()
        before = trainer.presence
        kept = {name: asked for name, asked in before.answered.items() if name in known}
        changes = {"answered": {**kept, **asks}, **self._position()}
        if any(getattr(before, name) != value for name, value in changes.items()):
            trainer.change(**changes)

    @abstractmethod
    def _position(self) -> dict[str, Any]:
        """Return the fields that say which step the trainer announced last."""
