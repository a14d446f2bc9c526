"""The figures of one step: gathered while it is trained, sent and saved, and reported once all of that is done."""

import contextlib
import time
from collections.abc import Iterator

import psutil
import torch

from trainer.engines.base import Metrics
from trainer.experience.batch import Batch
from trainer.rank0 import Rank0

_GIB = 1 << 30


class StepFigures:
    """Gathers the figures of the step that is being done; times are in seconds. Each rank has one, rank 0 reports."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device, self._ranks = device, ranks
        self._values: Metrics = {}
        self._batch: Batch | None = None
        self._waiting_since: float | None = None
        self._ended_at = time.perf_counter()

    def begin(self) -> None:
        self._ended_at = time.perf_counter()

    def add(self, figures: Metrics) -> None:
        self._values.update(figures)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._values[name] = time.perf_counter() - start

    def waits(self) -> None:
        """Note that there is no batch to train on."""
        self._waiting_since = self._waiting_since or time.perf_counter()

    def waited(self) -> None:
        since, self._waiting_since = self._waiting_since, None
        self._values["timing_s/sample_wait"] = 0.0 if since is None else time.perf_counter() - since

    def trained(self, batch: Batch, figures: Metrics) -> None:
        self._batch = batch
        self.add(figures)
        before, self._ended_at = self._ended_at, time.perf_counter()
        seconds = self._values["timing_s/step"] = self._ended_at - before
        if (processed := figures.get("perf/total_num_tokens")) is not None:
            self._values["perf/throughput"] = processed / seconds / self._ranks
        if (tokens := figures.get("train/tokens")) is not None:
            self._values["perf/tokens_per_second"] = tokens / seconds
            self._values["perf/train_tokens_per_second"] = tokens / self._values["timing_s/train_step"]

    def add_samples(self, rank0: Rank0, step: int) -> None:
        self.add(rank0.strategy.metrics() | rank0.evaluations.next_figures())
        self._values["timing_s/sample"] = rank0.sample_seconds
        rank0.compare(self._values, step)

    def report(self, rank0: Rank0, step: int, synced: int) -> None:
        """Report what was gathered; `synced` is the last step whose weights went out."""
        if not self._values:
            return
        if self._batch is not None:
            self.add(memory_figures(self._device))
        rank0.selection.keep()
        rank0.sink.log({**self._values, "sync/step": float(synced)}, step)
        if self._batch is not None and synced == step:
            rank0.sink.preview(self._batch, step)
        self._values, self._batch = {}, None


def memory_figures(device: torch.device) -> Metrics:
    """Return what this rank has used of its GPU at most since its start, and what its host uses; in GiB."""
    used = {"perf/cpu_memory_used_gb": psutil.virtual_memory().used / _GIB}
    if device.type != "cuda":
        return used
    return used | {
        "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(device) / _GIB,
        "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved(device) / _GIB,
    }
