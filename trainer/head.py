"""What only rank 0 does: talk to explorers and the daemon, sample, decide, and show what happens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import structlog

from syncd.errors import SyncdError, TimedOutError
from syncd.protocol.disk import Clock, SystemClock
from syncd.protocol.marker import read_marker
from syncd.protocol.mount import mount_of
from syncd.synchronizer import RunningStatus, Synchronizer, SyncStyle
from trainer.audience import Audience
from trainer.chooser import Chooser
from trainer.config.model import JobConfig
from trainer.decide import Action, Finish, Idle, Situation, Train, duty, end_of
from trainer.experience.batch import Batch, Strategy
from trainer.experience.limits import UNLIMITED, Limits
from trainer.resume import lead_back
from trainer.sampling import Supervised
from trainer.state import TrainerState

FIRST_GENERATION = 1
"""The generation of experiences that were made before anything was published."""

_IDLE = {False: 0.02, True: 0.25}
"""Seconds between two turns while there is nothing to do, by whether the mount is a network's."""


class Show(Protocol):
    """Where figures go: monitors, the progress display."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the figures of a step."""

    def preview(self, batch: Batch, step: int) -> None:
        """Take rollouts that were trained on."""

    def note(self, text: str) -> None:
        """Say something to whoever watches."""

    def close(self) -> None:
        """Write out what is left."""


class Head:
    """Rank 0's side of the loop.

    Args:
        config: The job's file.
        sync: The trainer's synchronizer, open.
        strategy: Chooses samples.
        show: Where figures go.
        clock: Time.
        tend: Called each turn, to look after what runs beside the trainer.
    """

    def __init__(
        self,
        config: JobConfig,
        sync: Synchronizer,
        strategy: Strategy,
        show: Show,
        clock: Clock | None = None,
        tend: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.sync, self.strategy, self.show = config, sync, strategy, show
        self._clock, self._tend = clock or SystemClock(), tend
        self.chooser = Chooser(sync)
        self._audience = Audience(sync, self._clock, config.data.left_grace)
        self._idle = _IDLE[mount_of(sync.job.root).is_network]
        self._waiting_since: float | None = None
        self._uncommitted: TrainerState | None = None
        self._generation = FIRST_GENERATION
        self._world_size = 1

    def begin(self, state: TrainerState, world_size: int, limits: Limits = UNLIMITED) -> None:
        """Go on from a state: samples behind its cursor, explorers no further than its step."""
        self._world_size = world_size
        self.strategy.limit(limits)
        if state.sampler:
            self.strategy.load_state_dict(state.sampler)
        lead_back(self.sync, state.step, self.config.model.path)
        self.sync.set_trainer_status(RunningStatus.RUNNING)

    def decide(self, now: Situation, signals: Sequence[int | None]) -> Action:
        """Return what all ranks do next; an error here ends the run on all of them."""
        try:
            self._tend()
            return self._decide(now, next((number for number in signals if number), None))
        except SyncdError as error:
            return Finish("rank 0 failed", error)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for a word
            structlog.get_logger().exception("rank_0_failed")
            return Finish("rank 0 failed", SyncdError(f"{type(error).__name__}: {error}"))

    def clear_way(self, step: int) -> None:
        """Have an abandoned step taken away that lies where this one is written."""
        self.sync.vacate(step)

    def state_at(self, step: int) -> dict[str, object]:
        """Return the loop's state, to be saved with this step; samples are let go once that is durable."""
        self._uncommitted = TrainerState(step, self._generation, self._world_size, self.strategy.state_dict())
        return self._uncommitted.document()

    def commit(self, saved_step: int) -> None:
        """Let go of what the newest durable checkpoint covers."""
        if self._uncommitted is not None and saved_step >= self._uncommitted.step:
            self.strategy.commit(self._uncommitted.sampler)
            self._uncommitted = None

    def _decide(self, now: Situation, signal: int | None) -> Action:
        over = f"signal {signal}" if signal else self._over(now.step)
        timed_out = None if over else self._timed_out()
        ending = end_of(self.config, now.step, over or (timed_out.message if timed_out else ""))
        now = replace(
            now, ending=ending, interrupted=signal is not None, explorer_asks=self._explorer_asks(now)
        )
        due = duty(self.config, now)
        if isinstance(due, Finish):
            return replace(due, error=timed_out)
        return due or self._sampled(now.step)

    def _sampled(self, step: int) -> Action:
        version = self.sync.get_latest_version()
        self._generation = version.generation if version else FIRST_GENERATION
        batch = self.strategy.sample(step, generation=self._generation)
        if batch is not None:
            self._waiting_since = None
            return Train(batch)
        if self._waiting_since is None:
            self._waiting_since = self._clock.monotonic()
        return Idle(self._idle)

    def _over(self, step: int) -> str:
        """Return why there will be no more samples."""
        if isinstance(self.strategy, Supervised):
            return "all epochs done" if self.strategy.over else ""
        if self._waiting_since is None or not self.config.data.end_when_left or not self._audience.look():
            return ""
        return f"all explorers have left at step {step}"

    def _timed_out(self) -> TimedOutError | None:
        limit = self.config.data.wait_timeout
        if self._waiting_since is None or self._clock.monotonic() - self._waiting_since < limit:
            return None
        where = f"{self.sync.job.root}/experiences"
        hint = f"syncd status {self.sync.job.root}  # who explores?"
        return TimedOutError(f"no whole batch of experiences within {limit:g} s", path=where, hint=hint)

    def _explorer_asks(self, now: Situation) -> bool:
        """Say whether an explorer waits for what this step has; tell it where there is nothing newer."""
        if self.config.sync.style is not SyncStyle.EXPLORER_DRIVEN or not self.sync.explorer_requires_sync():
            return False
        if now.synced == now.step and self._announced() >= now.synced:
            self.sync.notify_no_new_model_state_dict()
        return True

    def _announced(self) -> int:
        return read_marker(self.sync.job.disk, self.sync.job.marker).step or 0
