"""Engines whose weights go out through senders: what `export` walks over becomes steps and full checkpoints."""

import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from threading import Thread
from typing import Any

import structlog
import torch

from syncd.errors import SyncdError, UsageError
from syncd.protocol.probe import Probe, write_base_probe
from syncd.transports.base import FILES, SendContext, Sent, WeightSender, close_senders, open_senders
from syncd.transports.ranks import all_or_error, raise_agreed, rank0_or_error
from trainer.auto_method import senders_of
from trainer.checkpoints import (
    begin_training,
    complete,
    staged_directory,
    sync_tree,
    training_directory,
)
from trainer.engines.base import EngineContext, Metrics, TrainEngineWrapper
from trainer.experience.batch import Batch
from trainer.probe import Tokens, make_probe, non_finite_error, probe_tokens


class FileEngine(TrainEngineWrapper):
    """An engine that gives its weights tensor by tensor and its training state as files.

    Derived engines define how to `build`, `train`, `export`, and which files belong beside the weights. All ranks
    make the same calls, and an error on one of them is raised on all.
    """

    def __init__(self, context: EngineContext) -> None:
        self.context = context
        self.train_step_num = self._saved = 0
        self._handed: int | None = None  # the step whose weights a sender has, or that is whole
        self._sender: WeightSender | None = None  # of the last sync
        self._finishing: tuple[int, Future[None]] | None = None
        self._files: Mapping[str, bytes] | None = None
        self._probe_tokens: Tokens = ()
        self._sync_metrics: Metrics = {}

    @abstractmethod
    def build(self) -> None:
        """Build model and optimizer."""

    @abstractmethod
    def train(self, batch: Batch, step: int) -> Metrics:
        """Train on the whole batch as step `step`; each rank trains on its share of the rows."""

    @abstractmethod
    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Walk over the whole weights by their Hugging Face names; every rank walks all of it."""

    @property
    def tied(self) -> Collection[str]:
        """Return names in the export that repeat another tensor."""
        return ()

    @property
    def compute_dtype(self) -> str:
        """Return the dtype in which a forward pass computes: float32, bfloat16 or float16."""
        return self.context.config.engine.compute_dtype

    @property
    def export_dtype(self) -> str:
        """Return the dtype of the weights in a step; `keep` for the one that they are trained in."""
        return self.context.config.sync.dtype

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
        """Resume exactly from what `save_training_state` wrote.

        Raises:
            SyncdError: It was written by another number of ranks, or is not readable.
        """

    def prepare(self) -> None:
        """Build the model, and open the senders that `sync.method` needs."""
        self.build()
        context, settings = self.context, self.context.config.sync
        opened = SendContext(context.job, context.ranks, settings, context.sync, self.tied, context.fence)
        self.senders = open_senders(senders_of(settings.method), opened)
        for sender in self.senders.values():
            sender.prepare(self.export)
        self.prepare_probe()

    def prepare_probe(self) -> None:
        """Choose the tokens of the run's probes, once the model is built; none if it sends no probes."""
        settings = self.context.config.sync
        if settings.probe and type(self).token_logprobs is not TrainEngineWrapper.token_logprobs:
            self._probe_tokens = self._find_probe_tokens()

    def record_start(self) -> None:
        """Record the baseline, unless this run sends no probes or the job has one; a failure is logged."""
        context, probe = self.context, self.measured_probe()
        if context.ranks.rank == 0 and probe is not None:
            try:
                write_base_probe(context.job, probe, context.config.model.path)
            except (OSError, SyncdError) as error:
                structlog.get_logger().warning("base_probe_failed", reason=str(error))

    @property
    def saved_step(self) -> int:
        """Return the newest full checkpoint that is known to be durable."""
        if self._finishing is not None and self._finishing[1].done() and not self._finishing[1].exception():
            return self._finishing[0]
        return self._saved

    @property
    def save_failed(self) -> bool:
        """Return whether this rank knows that its part of the save in flight has failed."""
        future = self._finishing[1] if self._finishing is not None else None
        if future is not None and future.done() and future.exception():
            return True
        return self._sender is not None and self._sender.has_failed

    @property
    def sent(self) -> Sent | None:
        """Return the result of the last sync, None while this rank does not know it."""
        return self._sender.sent if self._sender is not None else None

    @property
    def sync_metrics(self) -> Metrics:
        """Return the seconds that the probe of this step took; nothing before its sync, or without a probe."""
        return self._sync_metrics

    def train_step(self, batch: Batch) -> Metrics:
        """Train on the whole batch."""
        metrics = self.train(batch, self.train_step_num + 1)
        self.train_step_num += 1
        self._sync_metrics = {}
        return metrics

    def sync_weight(self, method: str) -> None:
        """Publish the weights by a transport, unless those of this step are published or on their way."""
        self.wait_for_save()
        if self._handed == self.train_step_num:
            return
        if method not in self.senders:
            known = ", ".join(self.senders) or "none: call prepare first"
            raise UsageError(f"this run opened no transport {method!r}", hint=f"opened: {known}")
        self._sender = self.senders[method]
        if self._files is None:
            self._files = all_or_error(self.context.ranks, self.companions)
        # Now: it must be of the very weights that are exported.
        probe = self.measured_probe()
        self._sender.send(self.train_step_num, self._new_attempt(), self.export, self._files, probe)
        self._handed = self.train_step_num

    def save_checkpoint(
        self, state: Mapping[str, Any], *, block_until_saved: bool = False, save_as_hf: bool = False
    ) -> None:
        """Publish the weights, and save all that a resume needs beside them."""
        self.sync_weight(FILES)
        self._wait_for_weights()  # files are added to a step only after its seal
        save = self._save_training() if self._saved != self.train_step_num else ""
        step = self.train_step_num
        self._finishing = step, _in_thread(partial(self._complete, step, save, state, as_hf=save_as_hf))
        if block_until_saved:
            self.wait_for_save()

    def load_checkpoint(self, step: int) -> None:
        """Resume from the full checkpoint of a step."""
        directory = training_directory(self.context.job, step)
        all_or_error(self.context.ranks, self.load_training_state, directory)
        self.train_step_num = self._saved = self._handed = step
        self._sender = None

    def wait_for_save(self) -> None:
        """Return once the weights are a whole step, and the checkpoint of it a full one."""
        self._wait_for_weights()
        if self._finishing is not None:
            step, future = self._finishing
            self._finishing = None
            all_or_error(self.context.ranks, future.result)
            self._saved = step

    def shutdown(self) -> None:
        """Finish the save in flight, then give threads and memory back."""
        close_senders(list(self.senders.values()))

    def _find_probe_tokens(self) -> Tokens:
        model, limits, tokens = self.context.config.model, self.limits, Tokens()
        if self.context.ranks.rank == 0:
            tokens = probe_tokens(model.path, limits.vocabulary, limits.tokens, trust=model.trust_remote_code)
        return self.context.ranks.broadcast(tokens)

    def measured_probe(self) -> Probe | None:
        """Return what the model answers now, None if this run sends no probes.

        Raises:
            NonFiniteError: A log-prob is not finite, and `sync.check_finite` is set; on all ranks.
        """
        tokens, settings, start = self._probe_tokens, self.context.config.sync, time.perf_counter()
        if not tokens:
            return None
        probe = make_probe(tokens, self.token_logprobs(tokens), self.compute_dtype, self.export_dtype)
        if probe is None and settings.check_finite:
            raise_agreed(non_finite_error(self.export()))
        self._sync_metrics = {"time/probe": time.perf_counter() - start}
        return probe

    def _wait_for_weights(self) -> None:
        if self._sender is None:
            return
        try:
            self._sender.wait()
        except SyncdError:
            self._handed = self._finishing = None
            raise

    def _new_attempt(self) -> str:
        return self.context.ranks.broadcast(uuid.uuid4().hex)

    def _save_training(self) -> str:
        """Write the training state into a directory of this save, and return the save's name."""
        job, ranks = self.context.job, self.context.ranks
        step, save = self.train_step_num, self._new_attempt()
        rank0_or_error(ranks, begin_training, job, step, save)
        directory = staged_directory(job, step, save)
        all_or_error(ranks, self.save_training_state, directory)
        # Only now: until a rank is done it may remove files again that it needed, and this walks over all of them.
        all_or_error(ranks, sync_tree, job, directory)
        return save

    def _complete(self, step: int, save: str, state: Mapping[str, Any], *, as_hf: bool) -> None:
        if self.context.ranks.rank:
            return
        sync = self.context.sync
        with sync.lease(step) if sync else nullcontext():
            complete(self.context.job, step, state, save=save, as_hf=as_hf, fence=self.context.fence)


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """Do something in a thread that does not delay the exit of the process."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
            future.set_result(None)
        except Exception as error:  # noqa: BLE001 - raised by whoever waits
            future.set_exception(error)

    Thread(target=run, name="checkpoint", daemon=True).start()
    return future
