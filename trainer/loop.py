"""The loop: each turn rank 0 decides what comes next, and all ranks do it."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import structlog

from syncd.client.broadcast_control import WEIGHTS, BroadcastControl
from syncd.errors import FencedError, NonFiniteError, SyncdError, UsageError
from syncd.jobfile.model import JobFile
from syncd.protocol.rendezvous import TensorInfo
from syncd.transports.ranks import PASSING, all_or_error, is_agreed, raise_agreed, raise_gravest
from trainer.auto_method import AUTO
from trainer.checkpoints import TrainerState, has_huggingface
from trainer.engines.base import EngineContext, Metrics, TrainEngineWrapper
from trainer.experience.batch import Batch
from trainer.next_action import (
    Action,
    Finish,
    Idle,
    LoopFacts,
    Save,
    Sync,
    Train,
    Validate,
    need_save,
    need_sync,
)
from trainer.rank0 import Rank0
from trainer.step_figures import StepFigures
from trainer.stopping import STOPPED, StopSignals
from trainer.validation import validation_examples, validation_metrics

if TYPE_CHECKING:
    from trainer.experience.sft import Example

P = ParamSpec("P")


class Trainer:
    """Consumes experiences and trains the model. Each rank has one, and all make the same calls."""

    def __init__(
        self,
        engine: TrainEngineWrapper,
        context: EngineContext,
        stop: StopSignals,
        state: TrainerState,
        rank0: Rank0 | None,
    ) -> None:
        """Join engine and loop.

        Args:
            context: What the engine was opened with.
            stop: Signals that ask for an end.
            rank0: Rank 0's side; None on the other ranks.
        """
        self.engine, self.rank0, self._state = engine, rank0, state
        self._context, self._ranks, self._stop = context, context.ranks, stop
        self._config = context.config
        self._broadcasts = BroadcastControl(context.client) if context.client is not None else None
        self._facts, self._vacated = LoopFacts(0), 0
        self._in_flight = False
        self._intact = True  # no training step is half done, and the samples' state is whole
        self._failures = 0
        self._figures = StepFigures(context.device, context.ranks.world_size)
        self._validation: Sequence[Example] = ()
        self._log = structlog.get_logger()
        self._awaits_evaluation = False  # the run has ended well, and what came after it is not reported yet
        self.exit_code: int | None = None
        """What `train` has returned, None before."""
        self.resources = contextlib.ExitStack()
        """What `shutdown` closes after the engine."""

    @classmethod
    def get_actor(cls, config: JobFile) -> "Trainer":
        """Return the trainer of this rank, joined to its job, by the name that users of Trinity-RFT know.

        No actor and no process is started: the trainer is an object of this process, and `shutdown` leaves the job.

        Raises:
            SyncdError: The job cannot be joined; on all ranks.
        """
        # By name: trainer.run, which opens what a trainer needs, imports this module.
        trainer: Trainer = resolve_name("trainer.run:open_trainer")(config)
        return trainer

    @property
    def train_step_num(self) -> int:
        """Return the number of steps trained so far."""
        return self.engine.train_step_num

    def prepare(self) -> None:
        """Build the model and resume from the newest full checkpoint, if there is one.

        Raises:
            SyncdError: On all ranks.
        """
        self.engine.prepare()
        state = self._state
        if state.step:
            self.engine.load_checkpoint(state.step)
            self._note_fact(saved_as_hf=has_huggingface(self._context.job, state.step))
            self._log.info("training_resumed", step=state.step)
        else:
            self.engine.record_start()
        self._note_fact(synced=state.step, saved=state.step, validated=state.step)
        self._vacated = state.step
        self._on_rank0(Rank0.begin, state, self._ranks.world_size, self.engine.limits)
        self._validation = all_or_error(self._ranks, validation_examples, self._config, self.engine.limits)

    def train(self) -> int:
        """Train until the run is over; return the exit code.

        Raises:
            SyncdError: The run cannot continue; the last good state is on disk.
        """
        self._figures.begin()
        try:
            while True:
                action = self.next_action()
                if isinstance(action, Finish):
                    self.exit_code = self._finish(action)
                    self._awaits_evaluation = self.exit_code == 0
                    return self.exit_code
                self._do(action)
        except Exception as error:
            self._end_with(error)
            raise

    def next_action(self) -> Action:
        """Return what all ranks do next."""
        states = self._ranks.gather((self._stop.requested, self.engine.save_failed))
        if any(has_failed for _, has_failed in states):
            self.wait_for_save()
        signals, rank0 = [signal for signal, _ in states], self.rank0
        action = self._ranks.broadcast(rank0.decide(self.situation(), signals) if rank0 else None)
        assert action is not None
        if isinstance(action, Finish) and isinstance(action.error, FencedError):
            return action  # what this trainer would still write, another one writes now
        self._aside(Rank0.commit, self.engine.saved_step)
        if not isinstance(action, Sync | Save | Validate):
            self._aside(self._figures.report, self.train_step_num, self._facts.synced)
        return action

    def situation(self) -> LoopFacts:
        """Return what this rank knows for a decision."""
        return replace(self._facts, step=self.train_step_num)

    def _note_fact(self, **facts: Any) -> None:
        self._facts = replace(self._facts, **facts)

    def need_sync(self) -> bool:
        """Return whether the weights of this step are due."""
        return need_sync(self._config, self.situation())

    def need_save(self) -> bool:
        """Return whether a full checkpoint of this step is due."""
        return need_save(self._config, self.situation())

    def train_step(self, batch: Batch) -> Metrics:
        """Train one step."""
        self._intact = False
        preparing = self.rank0.strategy.preparing() if self.rank0 else contextlib.nullcontext()
        with preparing, self._figures.timed("timing_s/train_step"):
            metrics = self.engine.train_step(batch)
        self._intact = True
        self._figures.trained(batch, metrics | self.engine.step_times)
        self._aside(self._figures.add_samples, self.train_step_num)
        return metrics

    def validate(self) -> None:
        """Measure the loss of `data.validation_path`; it belongs to this step."""
        with self._figures.timed("timing_s/validation"):
            measured = validation_metrics(self._validation, self.engine.token_logprobs)
        self._figures.add(measured)
        self._aside(Rank0.compare, measured, self.train_step_num)
        self._note_fact(validated=self.train_step_num)

    def sync_weight(self) -> None:
        """Publish the weights of this step; a failure of the storage is counted, and the next sync tries again."""
        step = self.train_step_num
        with self._figures.timed("timing_s/sync_weight"):
            if self._begin_save(self._send):
                self._note(f"step {step}: weights sent")
        self._note_fact(synced=step)

    def save_checkpoint(self, *, block_until_saved: bool = False, save_as_hf: bool = False) -> None:
        """Save a full checkpoint of this step, which publishes its weights too."""
        step = self.train_step_num
        save = partial(self._save, self._state_at(step), block=block_until_saved, as_hf=save_as_hf)
        with self._figures.timed("timing_s/save_checkpoint"):
            if self._begin_save(save, may_fail=not block_until_saved):
                self._note_fact(saved=step, saved_as_hf=save_as_hf)
                self._figures.add({"save/step": float(step)})
                self._note(f"step {step}: full checkpoint")
        self._note_fact(synced=step, tried=step)

    def wait_for_save(self) -> None:
        """Return once no save is in flight; a failure of the storage is counted."""
        if self._in_flight:
            self._in_flight = False
            if self._tolerated(self.engine.wait_for_save):
                self._failures = 0

    def get_weight_sync_info(self) -> tuple[str, int, list[TensorInfo]] | None:
        """Return address, port and tensors of the broadcast group that is offered, None if there is none."""
        offer = self._broadcasts.offered() if self._broadcasts is not None else None
        return None if offer is None else (offer.address, offer.port, list(offer.tensors))

    def setup_weight_sync_group(
        self, master_address: str, master_port: int, world_size: int, group_name: str, timeout: float
    ) -> None:
        """Offer a broadcast group to the living explorers, and wait until they have joined it.

        The sender of transport nccl does this by itself; this is for callers that know the seeds' trainer.

        Args:
            master_address: The address of the group's store.
            master_port: Its port.
            world_size: The trainer and the explorers that join it.
            group_name: `weights`: a job has one group.
            timeout: Seconds to wait.

        Raises:
            UsageError: There is another number of explorers, or another name is asked for.
            TimedOutError: Not all of them joined in time; the group is torn down.
        """
        if group_name != WEIGHTS:
            raise UsageError(f"no group is called {group_name!r}", hint=f"the job's group is {WEIGHTS!r}")
        if self._broadcasts is None:
            return
        offer = self._broadcasts.offer_group(master_address, master_port)
        if offer.world_size != world_size:
            self._broadcasts.drop_group()
            living = f"{offer.world_size - 1} explorers live"
            raise UsageError(f"a group of {world_size} cannot be formed: {living}", hint="syncd status JOB")
        self._broadcasts.wait_joined(timeout)

    def teardown_weight_sync_group(self, timeout: float | None = None) -> None:
        """Close the broadcast group once explorers have left it, without waiting for those that have ended."""
        if self._broadcasts is not None:
            self._broadcasts.close_group(timeout)

    def is_alive(self) -> bool:
        """Return true: this process lives."""
        return True

    def shutdown(self) -> None:
        """Give the engine's threads and memory back; a trainer of `get_actor` leaves its job too.

        After a run that has ended well, rank 0 then reports the evaluations that explorers make of its last version.
        """
        with self.resources:
            self.engine.shutdown()
            if self.rank0 is not None and self._awaits_evaluation:
                self._awaits_evaluation = False
                self.rank0.report_last_evaluations(self.train_step_num, lambda: bool(self._stop.requested))

    def _do(self, action: Action) -> None:
        match action:
            case Train(batch):
                self._figures.waited()
                self.train_step(batch)
            case Validate():
                self.validate()
            case Sync():
                self.sync_weight()
            case Save(block, as_hf):
                self.save_checkpoint(block_until_saved=block, save_as_hf=as_hf)
            case Idle(seconds):
                self._figures.waits()
                time.sleep(seconds)

    def _send(self, *, is_checkpoint: bool = False) -> None:
        """Publish the weights by the transport that the job's file names, or that is chosen now."""
        self._vacate(self.train_step_num)
        method, engine, rank0 = self._config.sync.method, self.engine, self.rank0
        if method == AUTO:
            chosen = rank0.chooser.next_method(engine.senders, engine.sent) if rank0 else ""
            method = self._ranks.broadcast(chosen)
        engine.sync_weight(method, is_checkpoint=is_checkpoint)

    def _save(self, state: Mapping[str, object], *, block: bool, as_hf: bool) -> None:
        """Begin a full checkpoint; its weights go out by the transport too if a sync is due."""
        self._vacate(self.train_step_num)
        sender = self.engine.senders.get(self._config.sync.method)
        if self.need_sync() or (sender is not None and sender.sends_checkpoints):
            self._send(is_checkpoint=True)
        self.engine.save_checkpoint(state, block_until_saved=block, save_as_hf=as_hf)

    def _state_at(self, step: int) -> dict[str, object]:
        return self.rank0.state_at(step) if self.rank0 else {}

    def _vacate(self, step: int) -> None:
        """Have what an earlier start left under this step removed; what is there later is this run's own."""
        if self._vacated != step:
            self._on_rank0(Rank0.vacate, step)
            self._vacated = step

    def _begin_save(self, work: Callable[[], None], *, may_fail: bool = True) -> bool:
        """Wait for the save in flight, then begin another one; return whether that has begun.

        The storage may fail `sync.max_failures` times in a row: training continues, and the next save tries again.
        """
        self.wait_for_save()
        self._in_flight = self._tolerated(work, may_fail=may_fail)
        if self._in_flight:
            self._figures.add(self.engine.sync_metrics)
        return self._in_flight

    def _tolerated(self, work: Callable[[], None], *, may_fail: bool = True) -> bool:
        try:
            work()
        except PASSING as error:
            self._failures += 1
            self._note_fact(saved=min(self._facts.saved, self.engine.saved_step), saved_as_hf=False)
            if not may_fail or self._failures > self._config.sync.max_failures:
                raise
            self._log.error("save_failed", step=self.train_step_num, reason=str(error), again=self._failures)
            self._figures.add({"sync/failures": float(self._failures)})
            return False
        return True

    def _on_rank0(
        self, work: Callable[Concatenate[Rank0, P], object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Do something on rank 0; an error there is raised on all ranks."""
        if self.rank0 is None:
            raise_gravest(self._ranks.gather(None))
        else:
            all_or_error(self._ranks, work, self.rank0, *args, **kwargs)

    def _finish(self, finish: Finish) -> int:
        if isinstance(finish.error, FencedError):
            raise_agreed(finish.error)
        if finish.error is None:
            self._in_flight = False
            self.engine.wait_for_save()
        self._aside(Rank0.commit, self.engine.saved_step)
        self._aside(self._figures.report, self.train_step_num, self._facts.synced)
        self._log.info("training_finished", step=self.train_step_num, reason=finish.reason)
        self._intact = self._intact and finish.intact
        error = finish.error or self._ranks.broadcast(self.rank0.failure if self.rank0 else None)
        if error is not None:
            raise_agreed(error)
        if finish.again:
            return STOPPED
        self._on_rank0(Rank0.finish, self.train_step_num, finish.reason, is_done=finish.is_done)
        return 0

    def _end_with(self, error: Exception) -> None:
        """Save what was trained before the run ends with an error, if every rank holds it whole; report if not."""
        reason = self._not_whole(error) or self._last_save()
        if reason:
            self._report_unsaved(reason)

    def _not_whole(self, error: Exception) -> str:
        """Return why what the ranks hold must not be saved, empty if it may."""
        if not self._intact:
            return "the error came from inside a step: weights, optimizer or samples may be half changed"
        if isinstance(error, NonFiniteError):
            return "the weights are not finite"
        if isinstance(error, FencedError):
            return "another trainer trains this job now"
        if self._ranks.world_size > 1 and not is_agreed(error):
            return "not all ranks have met the error: some may not answer"
        return ""

    def _last_save(self) -> str:
        """Save a full checkpoint of this step unless there is one; return why there is none, empty if there is."""
        step, self._in_flight = self.train_step_num, False
        with contextlib.suppress(SyncdError):  # a save in flight: it is done, or tried once more below
            self.engine.wait_for_save()
        try:
            if self._ranks.broadcast(self.engine.saved_step) == step:
                return ""
            state = self._state_at(step)
            self._vacate(step)
            self.engine.save_checkpoint(state, block_until_saved=True)
        except Exception as error:  # noqa: BLE001 - the first error is the one to raise
            return f"it could not be saved: {error}"
        self._log.warning("checkpoint_saved_after_error", step=step)
        self._note(f"step {step}: full checkpoint, saved because of an error")
        return ""

    def _report_unsaved(self, reason: str) -> None:
        newest, step = self.engine.saved_step, self.train_step_num
        if self.rank0 is not None and newest < step:
            self._log.error(
                "checkpoint_save_failed", step=step, newest_full_checkpoint=newest or None, reason=reason
            )
            self._note(f"step {step} is not saved: {reason}; newest full checkpoint: {newest or 'none'}")

    def _aside(
        self, work: Callable[Concatenate[Rank0, P], object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Do what only rank 0 does besides training; an error there ends the run at the next decision."""
        if self.rank0 is not None:
            self.rank0.attempt(work, *args, **kwargs)

    def _note(self, text: str) -> None:
        if self.rank0 is not None:
            self.rank0.sink.note(text)
