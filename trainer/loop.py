"""The loop: each turn rank 0 decides what comes next, and all ranks do it."""

import contextlib
import time
from collections.abc import Callable, Iterator

import structlog

from syncd.client.sync_policy import SyncMethod
from syncd.errors import SyncdError
from syncd.transports.filesystem.finite import NonFiniteError
from trainer.checkpoints import has_huggingface
from trainer.engines.all_or_error import PASSING, agreed, is_known, raise_on_all
from trainer.engines.base import EngineContext, Metrics, TrainEngineWrapper
from trainer.experience.batch import Batch
from trainer.loop_state import TrainerState
from trainer.next_action import Action, Finish, Idle, Save, Situation, Sync, Train, need_save, need_sync
from trainer.rank0 import Head
from trainer.stopping import StopSignals

INTERRUPTED = 75
"""Exit code of a run that was asked to stop: start it again and it goes on."""


class Trainer:
    """Consumes experiences and trains the model. Each rank has one, and all make the same calls.

    Args:
        engine: What computes.
        context: What the engine was made of.
        stop: Signals that ask for an end.
        state: What to go on from.
        head: Rank 0's side; None on the other ranks.
    """

    def __init__(
        self,
        engine: TrainEngineWrapper,
        context: EngineContext,
        stop: StopSignals,
        state: TrainerState,
        head: Head | None,
    ) -> None:
        self.engine, self.head, self._state = engine, head, state
        self._context, self._ranks, self._stop = context, context.ranks, stop
        self._config = context.config
        self._synced = self._saved = self._tried = self._cleared = 0
        self._waiting_since: float | None = None
        self._saved_as_hf = self._in_flight = False
        self._intact = True  # no step of training is half done, and the samples' state is whole
        self._failures = 0
        self._record: Metrics = {}
        self._last: Batch | None = None
        self._log = structlog.get_logger()

    @property
    def train_step_num(self) -> int:
        """Return the number of steps trained so far."""
        return self.engine.train_step_num

    def prepare(self) -> None:
        """Build the model and go on from the newest full checkpoint, if there is one.

        Raises:
            SyncdError: On all ranks.
        """
        self.engine.prepare()
        state = self._state
        if state.step:
            self.engine.load_checkpoint(state.step)
            self._saved_as_hf = has_huggingface(self._context.job, state.step)
            self._log.info("training_resumed", step=state.step)
        self._synced = self._saved = self._cleared = state.step
        limits = self.engine.limits
        self._on_head(lambda head: head.begin(state, self._ranks.world_size, limits))

    def train(self) -> int:
        """Train until the run is over; return the exit code.

        Raises:
            SyncdError: The run cannot go on; the last good state is on disk.
        """
        try:
            while True:
                action = self.next_action()
                if isinstance(action, Finish):
                    return self._finish(action)
                self._carry_out(action)
        except Exception as error:
            self._end_with(error)
            raise

    def next_action(self) -> Action:
        """Return what all ranks do next."""
        told = self._ranks.gather((self._stop.requested, self.engine.save_failed))
        if any(failed for _, failed in told):
            self.wait_for_save()
        now = self.situation()
        head = self.head
        decided = head.decide(now, [signal for signal, _ in told]) if head else None
        action = self._ranks.broadcast(decided)
        assert action is not None
        self._aside(lambda head: head.commit(self.engine.saved_step))
        if not isinstance(action, Sync | Save):
            self._aside(self._flush)
        return action

    def situation(self) -> Situation:
        """Return what this rank knows for a decision."""
        return Situation(
            self.train_step_num,
            self._synced,
            self._saved,
            saved_as_hf=self._saved_as_hf,
            tried=self._tried,
        )

    def need_sync(self) -> bool:
        """Say whether the weights of this step are due."""
        return need_sync(self._config, self.situation())

    def need_save(self) -> bool:
        """Say whether a full checkpoint of this step is due."""
        return need_save(self._config, self.situation())

    def train_step(self, batch: Batch) -> Metrics:
        """Train one step."""
        self._intact = False
        with self._timed("time/train_step"):
            metrics = self.engine.train_step(batch)
        self._intact = True
        self._record.update(metrics)
        self._aside(lambda head: self._record.update(head.strategy.metrics()))
        self._last = batch
        return metrics

    def sync_weight(self) -> None:
        """Publish the weights of this step; a failure of the storage is counted, and the next sync tries again."""
        step = self.train_step_num
        with self._timed("time/sync_weight"):
            if self._saving(self._published):
                self._note(f"step {step}: weights out")
        self._synced = step

    def save_checkpoint(self, *, block_until_saved: bool = False, save_as_hf: bool = False) -> None:
        """Save a full checkpoint of this step, which publishes its weights too."""
        step = self.train_step_num
        state = self.head.state_at(step) if self.head else {}

        def save() -> None:
            self._clear_way(step)
            if self._takes_another_way():
                self._send()
            self.engine.save_checkpoint(state, block_until_saved=block_until_saved, save_as_hf=save_as_hf)

        with self._timed("time/save_checkpoint"):
            if self._saving(save, may_fail=not block_until_saved):
                self._saved, self._saved_as_hf = step, save_as_hf
                self._record["save/step"] = float(step)
                self._note(f"step {step}: full checkpoint")
        self._synced = self._tried = step

    def wait_for_save(self) -> None:
        """Return once nothing is being saved; a failure of the storage is counted."""
        if self._in_flight:
            self._in_flight = False
            if self._tolerated(self.engine.wait_for_save):
                self._failures = 0

    def is_alive(self) -> bool:
        """Say that this process lives."""
        return True

    def shutdown(self) -> None:
        """Give back what the engine holds."""
        self.engine.shutdown()

    def _carry_out(self, action: Action) -> None:
        match action:
            case Train(batch):
                self._note_waiting()
                self.train_step(batch)
            case Sync():
                self.sync_weight()
            case Save(block, as_hf):
                self.save_checkpoint(block_until_saved=block, save_as_hf=as_hf)
            case Idle(seconds):
                self._waiting_since = self._waiting_since or time.perf_counter()
                time.sleep(seconds)

    def _note_waiting(self) -> None:
        since, self._waiting_since = self._waiting_since, None
        self._record["time/sample_wait"] = 0.0 if since is None else time.perf_counter() - since

    def _published(self) -> None:
        self._clear_way(self.train_step_num)
        self._send()

    def _send(self) -> None:
        """Hand the weights out, the way that the job's file names or that is chosen now."""
        method = self._config.sync.method
        if method is SyncMethod.AUTO:
            method = self._ranks.broadcast(self._chosen())
        match method:
            case SyncMethod.MEMORY:
                self.engine.upload_state_dict()
            case SyncMethod.NCCL:
                self.engine.sync_weight_nccl()
            case _:
                self.engine.save_state_dict()

    def _takes_another_way(self) -> bool:
        """Say whether the weights of a full checkpoint go out by more than its files."""
        method = self._config.sync.method
        return method is SyncMethod.MEMORY or (method is not SyncMethod.CHECKPOINT and self.need_sync())

    def _chosen(self) -> SyncMethod:
        if self.head is None:
            return SyncMethod.CHECKPOINT
        return self.head.chooser.choose(self.engine.methods, self.engine.sent)

    def _clear_way(self, step: int) -> None:
        """Have what an earlier start left under this step taken away; what lies there later is this run's own."""
        if self._cleared != step:
            self._on_head(lambda head: head.clear_way(step))
            self._cleared = step

    def _saving(self, work: Callable[[], None], *, may_fail: bool = True) -> bool:
        """Let the save in flight end, then begin another one; say whether that has begun.

        The storage may fail `sync.max_failures` times in a row: training goes on without, and tries again.
        """
        self.wait_for_save()
        self._in_flight = self._tolerated(work, may_fail=may_fail)
        return self._in_flight

    def _tolerated(self, work: Callable[[], None], *, may_fail: bool = True) -> bool:
        try:
            work()
        except PASSING as error:
            self._failures += 1
            self._saved, self._saved_as_hf = min(self._saved, self.engine.saved_step), False
            if not may_fail or self._failures > self._config.sync.max_failures:
                raise
            self._log.error("save_failed", step=self.train_step_num, reason=str(error), again=self._failures)
            self._record["sync/failures"] = float(self._failures)
            return False
        return True

    def _on_head(self, work: Callable[[Head], None]) -> None:
        """Do something on rank 0; what fails there fails on all ranks."""
        head = self.head
        agreed(self._ranks, lambda: work(head) if head else None)

    def _finish(self, finish: Finish) -> int:
        if finish.error is None:
            self._in_flight = False
            self.engine.wait_for_save()
        self._aside(lambda head: head.commit(self.engine.saved_step))
        self._aside(self._flush)
        self._log.info("training_finished", step=self.train_step_num, reason=finish.reason)
        self._intact = self._intact and finish.intact
        error = finish.error or self._ranks.broadcast(self.head.failure if self.head else None)
        if error is not None:
            raise_on_all(error)
        if finish.again:
            return INTERRUPTED
        self._on_head(lambda head: head.finish(self.train_step_num, finish.reason, is_done=finish.is_done))
        return 0

    def _end_with(self, error: Exception) -> None:
        """Save what was trained before the run ends with an error, where every rank holds it whole; say which."""
        reason = self._not_whole(error) or self._last_save()
        if reason:
            self._tell_unsaved(reason)

    def _not_whole(self, error: Exception) -> str:
        """Return why what the ranks hold must not be saved, empty where it may."""
        if not self._intact:
            return "the error came from inside a step: weights, optimizer or samples may be half changed"
        if isinstance(error, NonFiniteError):
            return "the weights are not finite"
        if self._ranks.world_size > 1 and not is_known(error):
            return "not all ranks have met the error: some may not answer"
        return ""

    def _last_save(self) -> str:
        """Save a full checkpoint of this step unless there is one; return why there is none, empty where there is."""
        step, self._in_flight = self.train_step_num, False
        with contextlib.suppress(SyncdError):  # a save in flight: it is done, or tried once more below
            self.engine.wait_for_save()
        try:
            if self._ranks.broadcast(self.engine.saved_step) == step:
                return ""
            state = self.head.state_at(step) if self.head else {}
            self._clear_way(step)
            self.engine.save_checkpoint(state, block_until_saved=True)
        except Exception as error:  # noqa: BLE001 - the first error is the one to raise
            return f"it could not be saved: {error}"
        self._log.warning("checkpoint_saved_after_error", step=step)
        self._note(f"step {step}: full checkpoint, saved because of an error")
        return ""

    def _tell_unsaved(self, reason: str) -> None:
        newest, step = self.engine.saved_step, self.train_step_num
        if self.head is not None and newest < step:
            self._log.error(
                "checkpoint_save_failed", step=step, newest_full_checkpoint=newest or None, reason=reason
            )
            self._note(f"step {step} is not saved: {reason}; newest full checkpoint: {newest or 'none'}")

    def _aside(self, work: Callable[[Head], None]) -> None:
        """Do what only rank 0 does besides training."""
        if self.head is not None:
            self.head.attempt(work)

    def _note(self, text: str) -> None:
        if self.head is not None:
            self.head.show.note(text)

    def _flush(self, head: Head) -> None:
        """Hand out the figures of the last step, once all that belongs to it is done."""
        if not self._record:
            return
        step = self.train_step_num
        head.show.log({**self._record, "sync/step": float(self._synced)}, step)
        if self._last is not None and self._synced == step:
            head.show.preview(self._last, step)
        self._record, self._last = {}, None

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._record[name] = time.perf_counter() - start
