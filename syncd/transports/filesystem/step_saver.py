"""Saves steps: each rank writes its share of whole tensors as one shard of a step.

    saver = StepSaver(job, rank, world_size)
    saver.save(step, attempt, engine.get_per_tensor_param, {"config.json": config})
    ...                     # training continues while the step is written
    saver.wait()            # returns once the step is whole, or raises

Two modes, one format. `background` copies the share into memory that is kept for it and blocks for nothing
else; `stream` blocks until the step is whole and needs 48 MiB of memory. docs/saving.md has the figures.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from syncd.errors import UsageError, storage_error
from syncd.protocol.adapter_base import AdapterBase
from syncd.protocol.disk import Clock
from syncd.protocol.layout import ACTOR, ADAPTER, Job, shard_name
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.probe import Probe
from syncd.protocol.receipt import FileRecord
from syncd.protocol.writer import StepWriter
from syncd.transports.base import FILES, Sent
from syncd.transports.filesystem.export_walk import (
    AnyExport,
    ExportWalk,
    ShardLayout,
    can_repeat,
    encode_index,
)
from syncd.transports.filesystem.pinned_buffer import PinnedBuffer, TensorCopies
from syncd.transports.filesystem.save_outcome import leave_failure_note, wait_until_whole
from syncd.transports.filesystem.shard import (
    THREADS,
    Ring,
    ShardWriter,
    StepCopy,
    WriteMode,
    find_write_mode,
    pour,
    put_all,
)
from syncd.transports.host_memory import HostMemory, unlimited

Mode = Literal["background", "stream"]

INDEX = "model.safetensors.index.json"
_BUFFER = "the buffer for weights"


@dataclass(frozen=True, slots=True)
class _Save:
    """One save of this rank: its writer, files beside the weights, second copy and probe, and when it began."""

    writer: StepWriter
    companions: Mapping[str, bytes] = field(default_factory=dict)
    copy: StepCopy | None = None
    probe: Probe | None = None
    begun: float = 0.0


class StepSaver:
    """Writes this rank's part of each step. One save is in flight at a time; all ranks make the same calls.

    Args:
        job: The job.
        rank: This rank, from 0.
        world_size: Number of ranks, each of which writes one shard.
        mode: `background` or `stream`.
        dtype: What floating-point tensors are cast to; None keeps each as it is.
        tied: Names of tensors to leave out: those that repeat another one.
        check_finite: Whether NaN and infinity are refused.
        timeout: Seconds to wait for the other ranks once this one is done.
        write_mode: How files are written; found by trying unless given.
        clock: Time.
        fence: The directory through which steps are sealed and announced (`StepWriter`).
        base: If the tensors are an adapter, the model that it belongs to: the first rank writes all of it as one
            file, by the name that peft gives it, and the step is of kind `lora`.
        memory: The budget that the buffer of mode `background` is taken from.
    """

    def __init__(
        self,
        job: Job,
        rank: int,
        world_size: int,
        *,
        mode: Mode = "background",
        dtype: torch.dtype | None = torch.bfloat16,
        tied: Collection[str] = (),
        check_finite: bool = True,
        timeout: float = 600.0,
        write_mode: WriteMode | None = None,
        clock: Clock | None = None,
        fence: str = "",
        base: AdapterBase | None = None,
        memory: HostMemory | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} of {world_size} is out of range")
        self._job, self._rank, self._world_size = job, rank, world_size
        self._mode, self._dtype, self._tied = mode, dtype, frozenset(tied)
        self._timeout, self._write_mode, self._clock = timeout, write_mode, clock or SystemClock()
        self._check, self._fence, self._base = check_finite, fence, base
        self._memory = memory or unlimited()
        self._writers = ThreadPoolExecutor(THREADS, "save-write")
        self._behind = ThreadPoolExecutor(1, "save")
        self._buffer: PinnedBuffer | None = None
        self._buffer_ahead: Future[PinnedBuffer] | None = None
        self._ring: Ring | None = None
        self._layout: ShardLayout | None = None
        self._pending: tuple[_Save, Future[bool]] | None = None
        self.sent: Sent | None = None
        """The result of the last save that this rank has finished."""

    def prepare(self, tensors: AnyExport) -> str:
        """Begin to allocate the memory that saves need in a thread; then the first save is as fast as the others.

        Optional, and no limit: a larger export is saved too. Only shapes and dtypes are read, in the order of the
        export: tensors on `meta` will do, and sharded ones are not gathered.

        Args:
            tensors: As `save` takes them.

        Returns:
            Why the budget has no room for the buffer, empty if it has: without room, all ranks call `stream`.

        Raises:
            UsageError: Memory was allocated already, by this or by a save.
        """
        if self._buffer or self._buffer_ahead or self._ring:
            raise UsageError("memory is allocated once, before the first save")
        if self._mode == "stream":
            self._ring = Ring()
            return ""
        walk = self._walk(tensors)
        walk.plan()
        size = ShardLayout(walk.specs).data_size
        refused = self._memory.take(_BUFFER, size)
        if not refused:
            self._buffer_ahead = self._behind.submit(PinnedBuffer, size, pinned=True)
        return refused

    def stream(self) -> None:
        """Save in mode `stream` from now on and give the buffer back; call it between saves."""
        self._mode = "stream"
        self._close_buffer()

    def planned_size(self, tensors: AnyExport) -> int:
        """Return the bytes of all ranks' tensors, by a walk that reads no weight."""
        walk = self._walk(tensors)
        walk.plan()
        return walk.total_size

    def save(
        self,
        step: int,
        attempt: str,
        tensors: AnyExport,
        companions: Mapping[str, bytes] | None = None,
        copy: StepCopy | None = None,
        probe: Probe | None = None,
    ) -> None:
        """Save a step; every rank walks all the tensors.

        Args:
            step: The trainer's step.
            attempt: A name that the ranks share in this save and that no other save has.
            tensors: Names and tensors, or a function that begins a walk over them. `stream` needs what can be
                walked twice for its first save, to know where everything goes.
            companions: Files beside the weights by name, such as config.json; rank 0 writes them.
            copy: Gets the same files as this rank's part of the step.
            probe: What the model answers with these weights; rank 0's receipt has it.

        Raises:
            SyncdError: The save before this one failed, on any rank; or this one failed.
        """
        self.wait()
        writer = StepWriter(
            self._job, step, self._world_size, attempt, self._clock, fence=self._fence, base=self._base
        )
        save = _Save(writer, companions or {}, copy, probe, self._clock.monotonic())
        if self._mode == "stream":
            self._stream(save, tensors)
        else:
            self._start(save, tensors)

    def wait(self) -> None:
        """Return once the save in flight is a whole step on disk, written by all ranks and announced.

        Raises:
            SyncdError: It failed, on this rank or on another. This is raised once; the next save may be tried.
        """
        if self._pending is None:
            return
        save, future = self._pending
        try:
            if not future.result():
                wait_until_whole(save.writer, self._rank, self._clock, self._timeout)
        except Exception:
            self._pending = None
            raise
        self._pending = None

    @property
    def failed(self) -> bool:
        """Return whether this rank's part of the save in flight has failed; `wait` raises why."""
        return self._pending is not None and self._pending[1].done() and bool(self._pending[1].exception())

    def close(self) -> None:
        """Wait for the save in flight and give threads and memory back."""
        try:
            self.wait()
        finally:
            self._behind.shutdown()
            self._writers.shutdown()
            self._close_buffer()

    def _close_buffer(self) -> None:
        if self._buffer or self._buffer_ahead:
            self._kept_buffer().close()
            self._buffer = None
        self._memory.take(_BUFFER, 0)

    def _start(self, save: _Save, tensors: AnyExport) -> None:
        walk = self._walk(tensors)
        with self._guarded(save, walk):
            buffer = self._gather(walk)
            _require(walk)
        self._pending = save, self._behind.submit(self._write_behind, save, walk, buffer)

    def _kept_buffer(self) -> PinnedBuffer:
        """Return the buffer that all saves share; wait for the thread that allocates it, if one does."""
        ahead, self._buffer_ahead = self._buffer_ahead, None
        self._buffer = self._buffer or (ahead.result() if ahead else PinnedBuffer())
        return self._buffer

    def _gather(self, walk: ExportWalk) -> PinnedBuffer:
        """Copy this rank's share into the buffer: training is blocked for this alone."""
        buffer, end = self._kept_buffer(), 0
        with TensorCopies(self._behind) as copies:
            for spec, tensor, dtype, lasts in walk.in_file_order():
                if end + spec.size > buffer.capacity:
                    copies.finish()  # growing may move the memory
                    buffer.reserve(end + spec.size)
                    self._memory.record(_BUFFER, buffer.capacity)
                place = buffer.bytes[end : end + spec.size].view(dtype).view(spec.shape)
                copies.add(place, tensor, lasts=lasts)
                end += spec.size
        return buffer

    def _write_behind(self, save: _Save, walk: ExportWalk, buffer: PinnedBuffer) -> bool:
        layout = ShardLayout(walk.specs)
        try:
            with self._guarded(save):
                return self._publish(save, walk, layout, partial(put_all, buffer.bytes, layout.data_size))
        finally:
            buffer.renew(layout.data_size)

    def _stream(self, save: _Save, tensors: AnyExport) -> None:
        layout = self._planned(tensors)
        walk = self._walk(tensors)
        self._ring = self._ring or Ring()
        with self._guarded(save, walk):
            try:
                done = self._publish(save, walk, layout, partial(pour, walk, layout, self._ring))
            except UsageError:  # the export has changed: plan it again
                self._layout = None
                raise
        if not done:
            wait_until_whole(save.writer, self._rank, self._clock, self._timeout)

    def _planned(self, tensors: AnyExport) -> ShardLayout:
        """Return the layout of this rank's shard; the first time, by a walk that reads no weight."""
        if self._layout is None:
            if not can_repeat(tensors):
                raise UsageError(
                    "the first streamed save needs tensors that can be walked twice",
                    hint="pass the function that begins the export, not what it returns",
                )
            walk = self._walk(tensors)
            walk.plan()
            _require(walk)
            self._layout = ShardLayout(walk.specs)
        return self._layout

    def _publish(
        self, save: _Save, walk: ExportWalk, layout: ShardLayout, put: Callable[[ShardWriter], None]
    ) -> bool:
        """Write this rank's files and its receipt; seal and announce the step if all receipts are there."""
        writer, number = save.writer, self._rank + 1
        writer.begin()
        shards = []
        if name := self._file_name():
            fill = partial(self._fill, name, layout, put, save.copy)
            shards = [writer.place(f"{ACTOR}/{name}", fill, tensors=len(layout.specs))]
        files = self._companions(save, walk) if self._rank == 0 else []
        if save.copy is not None:
            save.copy.seal(number, shards, files)  # first: once the step is whole, its copy is too
        writer.receipt(number, shards, files, save.probe if self._rank == 0 else None)
        seconds = self._clock.monotonic() - save.begun
        self.sent = Sent(FILES, writer.step, walk.total_size, seconds, is_done=True)
        return writer.publish_if_whole()

    def _file_name(self) -> str:
        """Return the name of the file that this rank writes, empty if it writes none."""
        if self._base is None:
            return shard_name(self._rank + 1, self._world_size)
        return ADAPTER if self._rank == 0 else ""

    def _companions(self, save: _Save, walk: ExportWalk) -> list[FileRecord]:
        files = dict(save.companions)
        if self._base is None:
            files[INDEX] = encode_index(walk.weight_map, walk.total_size)
        if save.copy is not None:
            for name, content in files.items():
                save.copy.write(name, content)
        return [save.writer.write(f"{ACTOR}/{name}", content) for name, content in files.items()]

    def _walk(self, tensors: AnyExport) -> ExportWalk:
        writers = self._world_size if self._base is None else 1
        return ExportWalk(tensors, self._rank, writers, self._dtype, self._tied)

    def _fill(
        self,
        name: str,
        layout: ShardLayout,
        put: Callable[[ShardWriter], None],
        copy: StepCopy | None,
        path: str,
    ) -> tuple[int, str]:
        """Write a shard at a path, and return its size and digest."""
        self._write_mode = self._write_mode or find_write_mode(os.path.dirname(path), name=name)
        if copy is not None:
            copy.begin(name, layout.size)
        with ShardWriter(
            path, layout, self._write_mode, self._writers, check=self._check, copy=copy
        ) as shard:
            put(shard)
            return shard.finish()

    @contextlib.contextmanager
    def _guarded(self, save: _Save, walk: ExportWalk | None = None) -> Iterator[None]:
        """Tell the other ranks of a failure, and take part in their collectives to the end."""
        try:
            yield
        except Exception as error:
            if walk is not None:
                walk.finish()
            leave_failure_note(save.writer, self._rank, error)
            if isinstance(error, OSError):
                raise storage_error(error, save.writer.path) from error
            raise


def _require(walk: ExportWalk) -> None:
    if not walk.weight_map:
        raise UsageError("the export has no tensors")
