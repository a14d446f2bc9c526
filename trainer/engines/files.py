"""Engines whose weights go out through senders: what `export` walks over becomes steps and full checkpoints."""

import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, ClassVar

import structlog
import torch

from syncd.errors import ConfigError, SaveLostError, SyncdError, UsageError, storage_errors
from syncd.protocol.adapter_base import AdapterBase, find_base
from syncd.protocol.probe import Probe, write_base_probe
from syncd.protocol.process import Process
from syncd.protocol.writer import StepWriter
from syncd.transports.base import (
    FILES,
    SendContext,
    Sent,
    StepContent,
    WeightSender,
    close_senders,
    open_senders,
)
from syncd.transports.host_memory import HostMemory, free_memory
from syncd.transports.ranks import all_or_error, raise_agreed, rank0_or_error
from trainer.auto_method import senders_of
from trainer.checkpoints import training_directory
from trainer.engines.base import EngineContext, Metrics, TrainEngineWrapper
from trainer.engines.checkpoint_save import CheckpointSave
from trainer.engines.state_copy import CapturedState, StateBuffer, TrainingState
from trainer.experience.batch import Batch
from trainer.probe import Tokens, make_probe, non_finite_error, probe_tokens
from trainer.safe_unpickle import only_plain_data

_CHECKPOINT = "it is a full checkpoint"


class FileEngine(TrainEngineWrapper):
    """An engine that gives its weights tensor by tensor and its training state as files.

    Derived engines define how to `build`, `train`, `export`, and which files belong beside the weights. All ranks
    make the same calls, and an error on one of them is raised on all.
    """

    trains_adapters: ClassVar[bool] = False
    """Whether it trains what `[model.lora]` asks for, and exports adapters if steps are to be adapters."""
    copies_training_state: ClassVar[bool] = True
    """Whether its training state is tensors, for whose copy memory is allocated ahead; otherwise it is files."""

    def __init__(self, context: EngineContext) -> None:
        self.context = context
        self.train_step_num = self._saved = 0
        self.base: AdapterBase | None = None  # with LoRA, the model that adapters belong to
        self._handed: int | None = None  # the step whose weights a sender has, or that is whole
        self._sender: WeightSender | None = None  # of the last sync
        self._attempt = ""  # the save of those weights
        self._saving: CheckpointSave | None = None
        self._state_buffer: StateBuffer | None = None
        self._is_state_buffer_ready = False
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
    def training_state(self) -> TrainingState:
        """Return what each of this rank's files of a training state holds: weights, optimizer, schedule, RNG.

        All ranks call it for each full checkpoint, and once after the first step for the size of the copy. Names
        differ between ranks. Tensors may be the engine's own: training continues once they are copied or written.
        """

    @abstractmethod
    def load_training_state(self, directory: str) -> None:
        """Resume exactly from files of `training_state`; SyncdError if unreadable, or of another number of ranks."""

    def prepare(self) -> None:
        settings = self.context.config.sync
        if self.context.config.model.lora.rank:
            self.base = self._find_base()
        self.build()
        self._memory = memory = self._host_memory()
        self.senders = self.open_senders(memory)
        live = "sync.mode is stream" if settings.mode == "stream" else ""
        self._state_buffer = StateBuffer(memory, live)
        if settings.probe and type(self).token_logprobs is not TrainEngineWrapper.token_logprobs:
            self._probe_tokens = self._find_probe_tokens()

    def open_senders(self, memory: HostMemory) -> Mapping[str, WeightSender]:
        """Return senders of what `export` walks over, by transport; SyncdError on all ranks if one cannot open."""
        context, settings, model = self.context, self.context.config.sync, self.context.config.model
        base = self.base if model.publishes_adapters else None
        opened = SendContext(
            context.job,
            context.ranks,
            settings,
            context.client,
            self.tied,
            context.fence,
            base=base,
            memory=memory,
        )
        senders = open_senders((FILES,) if base else senders_of(settings.method), opened)
        for sender in senders.values():
            sender.prepare(self.export)
        return senders

    def record_start(self) -> None:
        """Record the baseline, unless this run sends no probes or the job has one; a failure is logged."""
        context, probe = self.context, self._measured_probe(self.start_logprobs)
        if context.ranks.rank == 0 and probe is not None:
            try:
                write_base_probe(context.job, probe, context.config.model.path)
            except (OSError, SyncdError) as error:
                structlog.get_logger().warning("base_probe_failed", reason=str(error))

    def start_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return what the model at `model.path` answers before the first step, as `token_logprobs` does."""
        return self.token_logprobs(rows)

    @property
    def saved_step(self) -> int:
        return self._saving.step if self._saving is not None and self._saving.is_saved else self._saved

    @property
    def save_failed(self) -> bool:
        if self._saving is not None and self._saving.has_failed:
            return True
        return self._sender is not None and self._sender.has_failed

    @property
    def sent(self) -> Sent | None:
        return self._sender.sent if self._sender is not None else None

    @property
    def sync_metrics(self) -> Metrics:
        """Return the seconds that parts of the save of this step took: the probe, the copy of the training state."""
        return self._sync_metrics

    def train_step(self, batch: Batch) -> Metrics:
        metrics = self.train(batch, self.train_step_num + 1)
        self.train_step_num += 1
        self._prepare_state_buffer()
        self._sync_metrics = {}
        return metrics

    def sync_weight(self, method: str, *, is_checkpoint: bool = False) -> None:
        """Publish the weights by a transport, unless those of this step are published or on their way."""
        self.wait_for_save()
        if self._handed == self.train_step_num:
            return
        if method not in self.senders:
            opened = ", ".join(self.senders) or "none: call prepare first"
            raise UsageError(f"this run opened no transport {method!r}", hint=f"opened: {opened}")
        if self._announced_again():
            return
        self._sender = self.senders[method]
        if self._files is None:
            self._files = all_or_error(self.context.ranks, self.companions)
        # Now: it must be of the very weights that are exported.
        probe = self._measured_probe(self.token_logprobs)
        content = StepContent(self.export, self._files, probe, _CHECKPOINT if is_checkpoint else "")
        self._attempt, self._handed = self._new_attempt(), None
        self._sender.send(self.train_step_num, self._attempt, content)
        self._handed = self.train_step_num

    def save_checkpoint(
        self, state: Mapping[str, Any], *, block_until_saved: bool = False, save_as_hf: bool = False
    ) -> None:
        self.sync_weight(FILES, is_checkpoint=True)
        start, save = time.perf_counter(), self._new_attempt()
        captured = None
        if self._saved != self.train_step_num:
            captured = all_or_error(self.context.ranks, self._captured)
        self._saving = CheckpointSave(
            self.context, self.train_step_num, self._attempt, save, captured, state, as_hf=save_as_hf
        )
        self._saving.start()
        self._wait_if_live(captured)
        self._sync_metrics |= {
            "timing_s/save_blocked": time.perf_counter() - start,
            "save/host_memory_mib": self._memory.used / (1 << 20),
        }
        if block_until_saved:
            self.wait_for_save()

    def load_checkpoint(self, step: int) -> None:
        directory = training_directory(self.context.job, step)
        all_or_error(self.context.ranks, self._load_plain_state, directory)
        self.train_step_num = self._saved = self._handed = step
        self._sender, self._attempt = None, ""

    def _load_plain_state(self, directory: str) -> None:
        with only_plain_data(directory):
            self.load_training_state(directory)

    def wait_for_save(self) -> None:
        self._wait_for_weights()
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()
            self._saved = saving.step

    def shutdown(self) -> None:
        with ExitStack() as closing:
            if self._state_buffer is not None:
                closing.callback(self._state_buffer.close)
            if self._saving is not None:
                closing.callback(self._saving.close)
            closing.callback(close_senders, list(self.senders.values()))

    def _host_memory(self) -> HostMemory:
        here = Process.current().boot
        neighbours = self.context.ranks.gather(here).count(here)
        limit = self.context.config.trainer.host_memory_mib << 20
        return HostMemory(limit or free_memory() // 2 // neighbours)

    def _find_base(self) -> AdapterBase:
        """Return the model that adapters belong to; rank 0 reads it, once a start."""
        context = self.context
        if not self.trains_adapters:
            name = context.config.engine.name
            raise ConfigError(f"the engine {name} trains no adapters", hint="leave out [model.lora]")
        base_or_error = rank0_or_error(context.ranks, find_base, context.job, context.config.model.path)
        base = context.ranks.broadcast(base_or_error)
        assert base is not None, "rank 0 has found it"
        return base

    def _prepare_state_buffer(self) -> None:
        """Allocate the memory for the copy of the training state, once there is one of its full size."""
        is_wanted = self.copies_training_state and self.context.config.trainer.save_interval
        if is_wanted and self._state_buffer is not None and not self._is_state_buffer_ready:
            self._is_state_buffer_ready = True
            self._state_buffer.prepare(self.training_state())

    def _find_probe_tokens(self) -> Tokens:
        model, limits, tokens = self.context.config.model, self.limits, Tokens()
        if self.context.ranks.rank == 0:
            tokens = probe_tokens(model.path, limits.vocabulary, limits.tokens, trust=model.trust_remote_code)
        return self.context.ranks.broadcast(tokens)

    def _measured_probe(self, ask: Callable[[Tokens], list[list[float]]]) -> Probe | None:
        """Return what the model answers now, None if this run sends no probes."""
        tokens, settings, start = self._probe_tokens, self.context.config.sync, time.perf_counter()
        if not tokens:
            return None
        probe = make_probe(tokens, ask(tokens), self.compute_dtype, self.export_dtype)
        if probe is None and settings.check_finite:
            raise_agreed(non_finite_error(self.export()))
        self._sync_metrics = {"timing_s/probe": time.perf_counter() - start}
        return probe

    def _wait_for_weights(self) -> None:
        if self._sender is None:
            return
        try:
            self._sender.wait()
        except SyncdError:
            if self._saving is not None:
                self._saving.abandon()
                self._saving.close()
            self._handed = self._saving = None
            raise

    def _announced_again(self) -> bool:
        """Return whether the save that failed last has sealed this step all the same; the marker names it then."""
        if self._handed is not None or not self._attempt:
            return False
        ranks = self.context.ranks
        if ranks.broadcast(rank0_or_error(ranks, self._announce_if_sealed)):
            self._handed = self.train_step_num
        return self._handed is not None

    def _announce_if_sealed(self) -> bool:
        job, step, ranks = self.context.job, self.train_step_num, self.context.ranks
        writer = StepWriter(job, step, ranks.world_size, self._attempt, fence=self.context.fence)
        with storage_errors(writer.sealed_path), suppress(SaveLostError):
            if writer.sealed():
                writer.announce()
                return True
        return False

    def _new_attempt(self) -> str:
        return self.context.ranks.broadcast(uuid.uuid4().hex)

    def _captured(self) -> CapturedState:
        assert self._state_buffer is not None, "call prepare first"
        return self._state_buffer.capture(self.training_state())

    def _wait_if_live(self, captured: CapturedState | None) -> None:
        """Wait for the save if a rank could not copy its training state: training would change what is written."""
        reasons = self.context.ranks.gather(captured.live if captured is not None else "")
        reason = next(filter(None, reasons), "")
        if not reason:
            return
        if self.context.ranks.rank == 0 and self.context.config.sync.mode == "background":
            hint = "--trainer.host_memory_mib MIB"
            structlog.get_logger().warning("save_blocks", step=self.train_step_num, reason=reason, hint=hint)
        self.wait_for_save()
