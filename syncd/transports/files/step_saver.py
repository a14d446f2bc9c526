"""Saves steps: each rank writes its share of whole tensors as one shard of a step.

    saver = StepSaver(job, rank, world_size)
    saver.save(step, attempt, engine.get_per_tensor_param, {"config.json": config})
    ...                     # training continues while the step is written
    saver.wait()            # returns once the step is whole, or raises

Two modes, one format. `background` copies the share into memory that is kept for it and blocks for nothing
else; `stream` blocks until the step is whole and needs 48 MiB of memory. docs/publish.md says which to use.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Literal

import torch

from syncd.errors import UsageError, storage_error, storage_errors
from syncd.protocol.adapter_base import AdapterBase
from syncd.protocol.disk import Clock
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.probe import Probe
from syncd.protocol.writer import StepWriter
from syncd.transports.base import FILES, Sent
from syncd.transports.files.buffers import SaveBuffers, Share, TensorCopies
from syncd.transports.files.export_walk import AnyExport, ExportWalk, ShardLayout, can_repeat
from syncd.transports.files.memory_copy import MemoryCopy
from syncd.transports.files.save_files import SaveFiles, StepSave
from syncd.transports.files.save_outcome import leave_failure_note, wait_until_whole
from syncd.transports.files.shard import Ring, WriteMode, pour
from syncd.transports.files.storage import WHOLE, ShareState, Storage
from syncd.transports.host_memory import HostMemory, unlimited
from syncd.transports.measured import AGAIN

Mode = Literal["background", "stream"]


class StepSaver:
    """Writes this rank's part of each step. One save is in flight at a time; all ranks make the same calls.

    Args:
        dtype: What floating-point tensors are cast to; None keeps each as it is.
        tied: Names of tensors to leave out: those that repeat another one.
        check_finite: Whether NaN and infinity are refused.
        timeout: Seconds to wait for the other ranks once this one is done.
        write_mode: How files are written; found by trying unless given.
        fence: The directory through which steps are sealed and announced (`StepWriter`).
        base: If the tensors are an adapter, the model that it belongs to: the first rank writes all of it as one
            file, by the name that peft gives it, and the step is of kind `lora`.
        memory: The budget that the buffers of mode `background` are taken from.
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
        self._timeout, self._clock = timeout, clock or SystemClock()
        self._fence, self._base = fence, base
        self._behind = ThreadPoolExecutor(1, "save")
        self._buffers = SaveBuffers(memory or unlimited(), self._behind)
        self._files = SaveFiles(
            rank, world_size, self._clock, base=base, check=check_finite, write_mode=write_mode
        )
        self._ring: Ring | None = None
        self._layout: ShardLayout | None = None
        self._begun: StepSave | None = None  # nothing of it is written yet
        self._pending: tuple[StepSave, Share, Future[bool]] | None = None
        self._encoded_ago = 0
        self.leaves_notes = True
        """Whether the next save says how far it is, for explorers that read it meanwhile."""
        self.has_tiles = False
        """Whether it has the tables of its tiles in any case, for hosts that divide it among them."""
        self.sent: Sent | None = None
        """The result of the last save that this rank has finished."""

    def prepare(self, tensors: AnyExport) -> str:
        """Begin to allocate the memory that saves need in a thread; then the first save is as fast as the others.

        Optional, and no limit: a larger export is saved too. Only shapes and dtypes are read, in the order of the
        export: tensors on `meta` will do, and sharded ones are not gathered.

        Returns:
            Why the budget has no room for the buffer, empty if it has: without room, all ranks call `stream`.
        """
        if self._ring:
            raise UsageError("memory is allocated once, before the first save")
        if self._mode == "stream":
            self._ring = Ring()
            return ""
        walk = self._walk(tensors)
        walk.plan()
        return self._buffers.prepare(ShardLayout(walk.specs).data_size)

    def stream(self) -> None:
        """Save in mode `stream` from now on and give the buffer back; call it between saves."""
        self._mode = "stream"
        self._buffers.close()

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
        copy: MemoryCopy | None = None,
        probe: Probe | None = None,
    ) -> None:
        """Save a step; every rank walks all the tensors.

        Args:
            attempt: A name that the ranks share in this save and that no other save has.
            tensors: Names and tensors, or a function that begins a walk over them. `stream` needs what can be
                walked twice for its first save, to know where everything goes.
            companions: Files beside the weights by name, such as config.json; rank 0 writes them.
            probe: What the model answers with these weights; rank 0's receipt has it.
        """
        self.copy(step, attempt, tensors, companions, copy, probe)
        self.write()

    def copy(
        self,
        step: int,
        attempt: str,
        tensors: AnyExport,
        companions: Mapping[str, bytes] | None = None,
        copy: MemoryCopy | None = None,
        probe: Probe | None = None,
    ) -> None:
        """Do the first part of `save`: copy this rank's share, so that `state` knows it. Then call `write`."""
        self.wait()
        writer = StepWriter(
            self._job, step, self._world_size, attempt, self._clock, fence=self._fence, base=self._base
        )
        begun = self._clock.monotonic()
        if self._mode == "stream":
            self._plan(tensors)
        save = StepSave(
            writer,
            self._walk(tensors),
            companions or {},
            copy,
            probe,
            begun,
            leaves_notes=self.leaves_notes,
            has_tiles=self.has_tiles and self._base is None,
        )
        if self._mode == "background":
            save.share = self._copied(save)
        self._begun = save

    def write(self, storage: Storage = WHOLE) -> None:
        """Do the second part of `save`: write what was copied, as all ranks have agreed to store it."""
        save, self._begun = self._begun, None
        if save is None:
            raise UsageError("nothing was copied", hint="call copy first")
        if save.share is None:
            self._stream(save)
        else:
            work = self._behind.submit(self._write_behind, save, save.share, storage)
            self._pending = save, save.share, work

    def state(self) -> ShareState:
        """Return what this rank knows before a step is stored, once its share is copied."""
        # A save that fails because this host has no room for changes should not fail the next one, too.
        no_changes = self._files.why_no_changes if self._encoded_ago < AGAIN else ""
        sealed = None if no_changes else self._buffers.sealed
        share = self._begun.share if self._begun else None
        layout = share.layout if share else None
        return ShareState(
            (sealed.step, sealed.attempt) if sealed else None,
            no_changes or self._buffers.refused or "no step was sealed since this trainer started",
            bool(sealed and layout and sealed.share.layout.header == layout.header),
            layout.size if layout else 0,
            self._files.times,
            self._encoded_ago,
        )

    def wait(self) -> None:
        """Return once the save in flight is a whole step on disk, written by all ranks and announced."""
        if self._pending is None:
            return
        (save, share, future), self._pending = self._pending, None
        if not future.result():
            self._wait_until_whole(save)
        self._buffers.keep(save.writer.step, save.writer.attempt, share)

    @property
    def is_writing(self) -> bool:
        return self._pending is not None

    @property
    def failed(self) -> bool:
        """Return whether this rank's part of the save in flight has failed; `wait` raises why."""
        if self._pending is None:
            return False
        future = self._pending[2]
        return future.done() and future.exception() is not None

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._behind.shutdown()
            self._files.close()
            self._buffers.close()

    def _copied(self, save: StepSave) -> Share:
        """Copy this rank's share into the buffer: training is blocked for this alone."""
        with self._guarded(save, save.walk):
            self._gather(save.walk)
            _require(save.walk)
        return Share(ShardLayout(save.walk.specs), self._buffers.next())

    def _gather(self, walk: ExportWalk) -> None:
        buffer, end = self._buffers.next(), 0
        with TensorCopies(self._behind) as copies:
            for spec, tensor, dtype, lasts in walk.in_file_order():
                if end + spec.size > buffer.capacity:
                    copies.finish()  # growing may move the memory
                    buffer.reserve(end + spec.size)
                    self._buffers.record_growth()
                target = buffer.bytes[end : end + spec.size].view(dtype).view(spec.shape)
                copies.add(target, tensor, lasts=lasts)
                end += spec.size

    def _write_behind(self, save: StepSave, share: Share, storage: Storage) -> bool:
        try:
            with self._guarded(save):
                is_sealed = self._files.write(save, share, self._buffers.sealed, storage)
            self._note_sent(save, begins_deltas=storage.keeps and not storage.is_delta)
            return is_sealed
        finally:
            self._encoded_ago = 0 if storage.parent else self._encoded_ago + 1
            self._buffers.tidy(share.layout.data_size, keeps=storage.keeps)

    def _note_sent(self, save: StepSave, *, begins_deltas: bool = False) -> None:
        seconds, step = self._clock.monotonic() - save.begun, save.writer.step
        self.sent = Sent(
            FILES, step, save.walk.total_size, seconds, is_done=True, begins_deltas=begins_deltas
        )

    def _stream(self, save: StepSave) -> None:
        layout, self._ring = self._layout, self._ring or Ring()
        assert layout is not None, "copy has planned it"
        with self._guarded(save, save.walk):
            try:
                put = partial(pour, save.walk, layout, self._ring)
                is_sealed = self._files.write_streamed(save, layout, put)
            except UsageError:  # the export has changed: plan it again
                self._layout = None
                raise
            self._note_sent(save)
        if not is_sealed:
            self._wait_until_whole(save)

    def _wait_until_whole(self, save: StepSave) -> None:
        with storage_errors(save.writer.path):
            wait_until_whole(save.writer, self._rank, self._clock, self._timeout)

    def _plan(self, tensors: AnyExport) -> None:
        """Learn the layout of this rank's shard; the first time, by a walk that reads no weight."""
        if self._layout is not None:
            return
        if not can_repeat(tensors):
            raise UsageError(
                "the first streamed save needs tensors that can be walked twice",
                hint="pass the function that begins the export, not what it returns",
            )
        walk = self._walk(tensors)
        walk.plan()
        _require(walk)
        self._layout = ShardLayout(walk.specs)

    def _walk(self, tensors: AnyExport) -> ExportWalk:
        writers = self._world_size if self._base is None else 1
        return ExportWalk(tensors, self._rank, writers, self._dtype, self._tied)

    @contextlib.contextmanager
    def _guarded(self, save: StepSave, walk: ExportWalk | None = None) -> Iterator[None]:
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
