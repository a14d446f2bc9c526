"""Engines whose weights go out through files: what `export` walks over becomes steps and full checkpoints."""

import contextlib
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import Any

import torch

from syncd.client.sync_policy import SyncMethod
from syncd.errors import SyncdError
from syncd.protocol.writer import StepWriter
from syncd.transports.broadcast.broadcaster import Broadcaster, BroadcastOptions
from syncd.transports.filesystem.save import StepSaver
from syncd.transports.memory.save import Copy
from trainer.checkpoints import (
    begin_training,
    complete,
    staged_directory,
    sync_tree,
    training_directory,
)
from trainer.engines.all_or_error import agreed
from trainer.engines.base import EngineContext, Metrics, Sent, TrainEngineWrapper
from trainer.engines.copies import Copies
from trainer.experience.batch import Batch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "keep": None}


class FileEngine(TrainEngineWrapper):
    """An engine that gives its weights tensor by tensor and its training state as files.

    Derived engines say how to `build`, `train`, `export`, and what belongs beside the weights. All ranks make the
    same calls, and what fails on one of them is raised on all.
    """

    def __init__(self, context: EngineContext) -> None:
        self.context = context
        self._step = self._saved = 0
        self._handed: int | None = None  # the step whose weights are with the saver, or in a whole step
        self._attempt = ""
        self._attempted = 0  # the step of that attempt: training may be further when it fails
        self._saver: StepSaver | None = None
        self._finishing: tuple[int, Future[None]] | None = None
        self._files: Mapping[str, bytes] | None = None
        self._broadcaster: Broadcaster | None = None
        self._copies: Copies | None = None
        self._way = SyncMethod.CHECKPOINT  # of the sync before
        self._cast: Sent | None = None

    @abstractmethod
    def build(self) -> None:
        """Build model and optimizer."""

    @abstractmethod
    def train(self, batch: Batch, step: int) -> Metrics:
        """Train on the whole batch as step `step`; each rank takes its share of the rows."""

    @abstractmethod
    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Walk over the whole weights by their Hugging Face names; every rank walks all of it."""

    @property
    def tied(self) -> Collection[str]:
        """Return names in the export that repeat another tensor."""
        return ()

    @abstractmethod
    def companions(self) -> Mapping[str, bytes]:
        """Return the files beside the weights by name: config.json, generation_config.json, the tokenizer's."""

    @abstractmethod
    def save_training_state(self, directory: str) -> None:
        """Write what `load_training_state` needs into an empty directory: weights, optimizer, schedule, RNG.

        Each rank writes files of its own names; they are synced by the caller.
        """

    @abstractmethod
    def load_training_state(self, directory: str) -> None:
        """Go on exactly where `save_training_state` was.

        Raises:
            SyncdError: It was written by another number of ranks, or is not readable.
        """

    def prepare(self) -> None:
        """Build the model, and what saves it."""
        self.build()
        ranks, sync = self.context.ranks, self.context.config.sync
        self._saver = StepSaver(
            self.context.job,
            ranks.rank,
            ranks.world_size,
            mode=sync.mode,
            dtype=DTYPES[sync.dtype],
            tied=self.tied,
            check_finite=sync.check_finite,
            timeout=sync.save_timeout,
            fence=self.context.fence,
        )
        self._saver.prepare(self.export)
        if sync.method in (SyncMethod.NCCL, SyncMethod.AUTO):
            self._broadcaster = self._made_broadcaster()
        if sync.method in (SyncMethod.MEMORY, SyncMethod.AUTO):
            self._copies = Copies.opened(self.context, self._saver)

    @property
    def train_step_num(self) -> int:
        """Return the number of steps trained so far, over all starts."""
        return self._step

    @property
    def saved_step(self) -> int:
        """Return the newest full checkpoint that is known to be durable."""
        if self._finishing is not None and self._finishing[1].done() and not self._finishing[1].exception():
            return self._finishing[0]
        return self._saved

    @property
    def save_failed(self) -> bool:
        """Say whether this rank knows that its part of the save in flight has failed."""
        finishing = self._finishing is not None and self._finishing[1]
        behind = bool(finishing and finishing.done() and finishing.exception())
        return behind or (self._saver is not None and self._saver.failed)

    def train_step(self, batch: Batch) -> Metrics:
        """Train on the whole batch."""
        metrics = self.train(batch, self._step + 1)
        self._step += 1
        return metrics

    def save_state_dict(self) -> None:
        """Publish the weights; the save before this one has succeeded, or its error is raised now."""
        self.wait_for_save()
        if self._handed != self._step:
            self._way = SyncMethod.CHECKPOINT
            self._hand_over(self._new_attempt())

    @property
    def methods(self) -> frozenset[SyncMethod]:
        """Return the ways in which the weights can go out in this run."""
        found = {
            SyncMethod.CHECKPOINT: True,
            SyncMethod.MEMORY: self._copies is not None,
            SyncMethod.NCCL: self._broadcaster is not None,
        }
        return frozenset(method for method, is_there in found.items() if is_there)

    @property
    def sent(self) -> Sent | None:
        """Return what became of the last sync, None while this rank is still writing."""
        if self._way is SyncMethod.NCCL:
            return self._cast
        written = self._saver.written if self._saver else None
        if written is None or written.step != self._handed:
            return None
        is_done = self._way is SyncMethod.CHECKPOINT or written.is_copied
        return Sent(self._way, written.step, written.size, written.seconds, is_done)

    def upload_state_dict(self) -> None:
        """Publish the weights, and leave a copy of them in this host's memory where there is room."""
        self.wait_for_save()
        if self._handed != self._step:
            self._way, attempt = SyncMethod.MEMORY, self._new_attempt()
            copy = self._copies.next(self._step, attempt, self.export) if self._copies else None
            self._hand_over(attempt, copy)

    def sync_weight_nccl(self) -> None:
        """Broadcast the weights to the explorers that take part, and publish them, whatever became of that."""
        assert self._broadcaster is not None
        self.wait_for_save()
        if self._handed != self._step:
            self._way, attempt = SyncMethod.NCCL, self._new_attempt()
            start = time.perf_counter()
            is_done = self._broadcaster.send(self._step, attempt, self.export)
            took = time.perf_counter() - start
            self._cast = Sent(SyncMethod.NCCL, self._step, self._broadcaster.size, took, is_done)
            self._hand_over(attempt)

    def save_checkpoint(
        self, state: Mapping[str, Any], *, block_until_saved: bool = False, save_as_hf: bool = False
    ) -> None:
        """Publish the weights, and save all that a resume needs beside them."""
        self.save_state_dict()
        self._wait_for_weights()  # what is added to a step comes after its seal
        save = self._save_training() if self._saved != self._step else ""
        task = partial(self._complete, self._step, save, state, as_hf=save_as_hf)
        self._finishing = self._step, _behind(task if self.context.ranks.rank == 0 else lambda: None)
        if block_until_saved:
            self.wait_for_save()

    def load_checkpoint(self, step: int) -> None:
        """Go on from the full checkpoint of a step."""
        directory = training_directory(self.context.job, step)
        agreed(self.context.ranks, lambda: self.load_training_state(directory))
        self._step = self._saved = self._handed = step
        self._attempt = ""

    def wait_for_save(self) -> None:
        """Return once the weights are a whole step, and the checkpoint of it a full one."""
        self._wait_for_weights()
        if self._finishing is not None:
            step, future = self._finishing
            self._finishing = None
            agreed(self.context.ranks, future.result)
            self._saved = step

    def shutdown(self) -> None:
        """Finish what is being written, give threads and memory back."""
        if self._broadcaster is not None:
            self._broadcaster.close()
        try:
            if self._saver is not None:
                self._saver.close()
        finally:
            if self._copies is not None:
                self._copies.close()

    def _wait_for_weights(self) -> None:
        assert self._saver is not None
        try:
            agreed(self.context.ranks, self._saver.wait)
        except SyncdError:
            self._handed = self._finishing = None
            self._withdraw()
            self._discard()
            raise

    def _discard(self) -> None:
        """Remove what a save that failed on all ranks has written: where the disk is full, its space is needed."""
        if self.context.ranks.rank == 0 and self._attempt:
            world_size = self.context.ranks.world_size
            StepWriter(self.context.job, self._attempted, world_size, self._attempt).discard()

    def _withdraw(self) -> None:
        """Tell explorers that hold this attempt's weights that it will not be a step."""
        if self._broadcaster is not None:
            self._broadcaster.withdraw(self._attempt)

    def _made_broadcaster(self) -> Broadcaster:
        context, sync = self.context, self.context.config.sync
        options = BroadcastOptions(
            sync.address,
            sync.bucket_mib << 20,
            sync.ready_timeout,
            sync.broadcast_timeout,
        )
        return Broadcaster(
            context.ranks,
            context.sync,
            options,
            dtype=DTYPES[sync.dtype],
            tied=self.tied,
            check_finite=sync.check_finite,
        )

    def _new_attempt(self) -> str:
        return self.context.ranks.broadcast(uuid.uuid4().hex)

    def _hand_over(self, attempt: str, copy: Copy | None = None) -> None:
        """Give this step's weights to the saver, as one attempt of all ranks."""
        self._attempt, self._attempted = attempt, self._step
        try:
            agreed(self.context.ranks, lambda: self._save_weights(copy))
        except SyncdError:
            # The ranks that did not fail have a save in flight that cannot succeed.
            with contextlib.suppress(SyncdError):
                self._wait_for_weights()
            self._withdraw()
            self._discard()
            raise
        self._handed = self._step

    def _save_weights(self, copy: Copy | None) -> None:
        assert self._saver is not None
        self._files = self._files or self.companions()
        self._saver.save(self._step, self._attempt, self.export, self._files, copy)

    def _save_training(self) -> str:
        """Write the training state into a directory of this save, and return the save's name."""
        job, ranks, step, save = self.context.job, self.context.ranks, self._step, self._new_attempt()
        agreed(ranks, lambda: begin_training(job, step, save) if ranks.rank == 0 else None)
        directory = staged_directory(job, step, save)
        agreed(ranks, lambda: self.save_training_state(directory))
        # Only now: until a rank is done it may take files away again that it needed, and this walks over all of them.
        agreed(ranks, lambda: sync_tree(job, directory))
        return save

    def _complete(self, step: int, save: str, state: Mapping[str, Any], *, as_hf: bool) -> None:
        with self.context.lease(step):
            complete(self.context.job, step, state, save=save, as_hf=as_hf, fence=self.context.fence)


def _behind(work: Callable[[], None]) -> Future[None]:
    """Do something in a thread that no exit of the process waits for."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
            future.set_result(None)
        except Exception as error:  # noqa: BLE001 - raised by whoever waits
            future.set_exception(error)

    Thread(target=run, name="checkpoint", daemon=True).start()
    return future
