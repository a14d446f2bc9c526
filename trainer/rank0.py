"""What only rank 0 does: talk to explorers and the daemon, sample, decide, and report."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Concatenate, ParamSpec

import structlog

from syncd.client.client import Client
from syncd.client.sync_policy import SyncStyle
from syncd.errors import CorruptDataError, ProtocolTooNewError, SyncdError, TimedOutError, storage_error
from syncd.experience import batch_paths
from syncd.jobfile.model import JobFile
from syncd.protocol.disk import Clock
from syncd.protocol.job_end import JobEnd, clear_finished, mark_finished
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.mount import mount_of
from syncd.protocol.presence import Presence, RunningStatus
from syncd.protocol.version import read_marker
from trainer.auto_method import MethodChooser
from trainer.best_steps import Selection
from trainer.checkpoints import TrainerState
from trainer.engines.base import Metrics
from trainer.experience.batch import SampleStrategy
from trainer.experience.limits import UNLIMITED, Limits
from trainer.late_figures import late_figures
from trainer.next_action import (
    Action,
    Finish,
    Idle,
    LoopFacts,
    Train,
    due_action,
    end_of,
    publishes_only_to_watchers,
)
from trainer.reporting.report import Screen
from trainer.resume import roll_back_explorers
from trainer.waiting import DAEMON, ExplorerLiveness, Waiting, wait_text

P = ParamSpec("P")

FIRST_GENERATION = 1  # the generation of experiences that explorers made before the first version

_IDLE = {False: 0.02, True: 0.25}
"""Seconds between two turns while there is nothing to do, by whether the mount is a network's."""

_WAITING = "waiting"  # the field of the trainer's presence

_FAILED = "rank 0 failed"


class Rank0:
    """Rank 0's side of the loop: figures go to `sink`, and each turn calls `checks`, which raise to end the run."""

    def __init__(
        self,
        config: JobFile,
        client: Client,
        strategy: SampleStrategy,
        sink: Screen,
        clock: Clock | None = None,
        checks: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.config, self.client, self.strategy, self.sink = config, client, strategy, sink
        self._clock, self._checks = clock or SystemClock(), checks
        self.chooser = MethodChooser(client)
        self.evaluations = late_figures(config, client)
        self.selection = Selection(config.selection, client.job)
        self._explorers = ExplorerLiveness(client, self._clock, config.data.left_grace)
        self._idle = _IDLE[mount_of(client.job.root).is_network]
        self._waiting = Waiting(self._clock)
        self._path = batch_paths.root(client.job)
        self.failure: SyncdError | None = None  # the first error of `attempt`
        self.sample_seconds = 0.0  # how long it took to choose the last batch, all its rows being there
        self._uncommitted: TrainerState | None = None
        self._generation = FIRST_GENERATION
        self._world_size = 1

    def begin(self, state: TrainerState, world_size: int, limits: Limits = UNLIMITED) -> None:
        """Resume from a state: samples behind its cursor, explorers no further than its step."""
        self._world_size = world_size
        self.strategy.limit(limits)
        clear_finished(self.client.job)
        if state.sampler:
            self.strategy.load_state_dict(state.sampler)
        self.evaluations.resume(state.evaluations, state.step, self._abandoned_generation(state.step))
        self.selection.load_state_dict(state.selection, self.evaluations.all_figures())
        roll_back_explorers(self.client, state.step, self.config.model.path)
        self.client.set_status(RunningStatus.RUNNING)

    def decide(self, now: LoopFacts, signals: Sequence[int | None]) -> Action:
        """Return what all ranks do next; an error here ends the run on all of them."""
        try:
            if self.failure is not None:
                return Finish(_FAILED, self.failure)
            for check in self._checks:
                check()
            return self._decide(now, next((number for number in signals if number), None))
        except SyncdError as error:
            return Finish(_FAILED, error)
        except OSError as error:
            return Finish(_FAILED, storage_error(error, self.client.job.root))
        except Exception as error:  # noqa: BLE001 - the other ranks wait for a decision
            # A bug: groups may have been taken out of the pool and given to nobody.
            return Finish(_FAILED, _bug(error), intact=False)

    def attempt(
        self, work: Callable[Concatenate["Rank0", P], object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Do what the other ranks have no part in; if it fails, the next decision ends the run."""
        try:
            work(self, *args, **kwargs)
        except SyncdError as error:
            self.failure = self.failure or error
        except Exception as error:  # noqa: BLE001 - raised here, the other ranks would not hear of it
            self.failure = self.failure or _bug(error)

    def compare(self, figures: Metrics, step: int) -> None:
        self.selection.observe(figures, step)

    def finish(self, step: int, reason: str, *, is_done: bool) -> None:
        self.selection.observe_all(self.evaluations.all_figures())
        self.selection.keep()
        if is_done:
            mark_finished(self.client.job, JobEnd(step, reason))

    def report_last_evaluations(self, step: int, is_stopped: Callable[[], bool]) -> None:
        """Report the evaluations that come after the last step, under that step; wait for those of its version.

        Nothing here fails a run that has ended well.
        """
        log = structlog.get_logger()
        try:
            if not self.evaluations.wait_for_last(step, is_stopped, self.sink.note):
                log.warning("last_evaluation_missing", step=step)
            for figures in self.evaluations.remaining():
                self.selection.observe(figures, step)
                self.sink.log(figures, step)
            self.selection.keep()
        except (SyncdError, OSError) as error:
            log.warning("last_evaluation_missing", step=step, reason=str(error))

    def vacate(self, step: int) -> None:
        """Have the daemon remove an abandoned step that is where this one will be written."""
        self.client.vacate(step, min(DAEMON, self.client.timeout))

    def state_at(self, step: int) -> dict[str, object]:
        """Return the loop's state, to be saved with this step; its samples are consumed once that is durable."""
        samples, critic = self.strategy.state_dict(), self.config.critic.enabled
        states = self.selection.state_dict(), self.evaluations.state_dict()
        self._uncommitted = TrainerState(step, self._generation, self._world_size, samples, critic, *states)
        return self._uncommitted.document()

    def commit(self, saved_step: int) -> None:
        """Consume the samples that the newest durable checkpoint covers."""
        if self._uncommitted is not None and saved_step >= self._uncommitted.step:
            self.strategy.commit(self._uncommitted.sampler)
            self._uncommitted = None

    def _decide(self, now: LoopFacts, signal: int | None) -> Action:
        over = f"signal {signal}" if signal else self.selection.over or self._samples_ended(now.step)
        timed_out = None if over else self._timed_out()
        ending = end_of(self.config, now.step, over or (timed_out.message if timed_out else ""))
        now = replace(
            now,
            ending=ending,
            interrupted=signal is not None,
            explorer_asks=self._explorer_asks(now),
            is_watched=self._is_watched(),
        )
        due = due_action(self.config, now)
        if isinstance(due, Finish):
            return replace(due, error=timed_out, is_done=self._is_done(now.step))
        return due or self._train_or_wait(now.step)

    def _abandoned_generation(self, step: int) -> int:
        """Return the newest generation whose versions beyond the step, from which the run resumes, are abandoned."""
        with contextlib.suppress(CorruptDataError):  # the daemon is about to replace the file
            if (newest := self.client.latest_version()) is not None:
                return newest.generation if newest.step > step else newest.generation - 1
        return 0

    def _read_generation(self) -> None:
        try:
            version = self.client.latest_version()
        except ProtocolTooNewError:
            raise
        except CorruptDataError:
            return  # the daemon is about to replace the file, and generations rarely change
        self._generation = version.generation if version else FIRST_GENERATION

    def _train_or_wait(self, step: int) -> Action:
        self._read_generation()
        start = time.perf_counter()
        batch = self.strategy.sample(step, generation=self._generation)
        if batch is not None:
            self.sample_seconds = time.perf_counter() - start
            self._end_wait()
            return Train(batch)
        self._waiting.begin()
        if self._waiting.is_due():
            self._report_wait()
        return Idle(self._idle)

    def _report_wait(self) -> None:
        """Report what rank 0 waits for; if the presence cannot be written, the log still has it."""
        with contextlib.suppress(SyncdError, OSError):
            about = {"for": "experiences", "path": self._path, "since": self._waiting.since}
            self.client.describe({_WAITING: about})
        metrics, data = self.strategy.metrics(), self.config.data
        whole = int(metrics.get("experience/waiting", 0)) // data.group_size
        rejected = int(metrics.get("experience/rejected", 0))
        since, seconds, groups = self._waiting.since, self._waiting.seconds or 0.0, (whole, data.groups)
        source = self.config.job.source
        text = wait_text(self._path, since, seconds, groups, rejected, self._living(), source)
        structlog.get_logger().info("experience_awaited", text=text)
        self.sink.note(text)

    def _end_wait(self) -> None:
        if self._waiting.seconds is not None:
            self._waiting.end()
            with contextlib.suppress(SyncdError, OSError):
                self.client.describe({_WAITING: None}, now=False)

    def _living(self) -> Mapping[str, Presence] | None:
        try:
            self._explorers.have_left()
        except (SyncdError, OSError):
            return None
        return self._explorers.living

    def _is_watched(self) -> bool:
        """Return whether weights that are due are published; explorers that cannot be seen may be there."""
        return not publishes_only_to_watchers(self.config) or self._living() != {}

    def _is_done(self, step: int) -> bool:
        total, strategy = self.config.trainer.total_steps, self.strategy
        return (total is not None and step >= total) or bool(strategy.over) or bool(self.selection.over)

    def _samples_ended(self, step: int) -> str:
        if self.strategy.over:
            return self.strategy.over
        may_end = self._waiting.seconds is not None and self.config.data.end_when_left
        if not may_end or not self._explorers.have_left():
            return ""
        return f"all explorers have left at step {step}"

    def _timed_out(self) -> TimedOutError | None:
        limit, waited = self.config.data.wait_timeout, self._waiting.seconds
        if waited is None or waited < limit:
            return None
        hint = f"syncd status {self.client.job.root}  # who explores?"
        return TimedOutError(
            f"no complete batch of experiences within {limit:g} s", path=self._path, hint=hint
        )

    def _explorer_asks(self, now: LoopFacts) -> bool:
        """Return whether an explorer asks for weights; if there are no newer ones, tell it so."""
        if (
            self.config.sync.style is not SyncStyle.EXPLORER_DRIVEN
            or not self.client.explorer_requires_sync()
        ):
            return False
        job = self.client.job
        if now.synced == now.step and (read_marker(job.disk, job.marker).step or 0) >= now.synced:
            self.client.answer_nothing_new()
        return True


def _bug(error: Exception) -> SyncdError:
    structlog.get_logger().exception("rank_0_failed")
    return SyncdError(f"{type(error).__name__}: {error}")
