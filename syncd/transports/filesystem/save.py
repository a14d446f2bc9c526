"""Weights out through files: each rank writes its share of whole tensors as one shard of a step.

    saver = StepSaver(job, rank, world_size)
    saver.save(step, attempt, engine.get_per_tensor_param, {"config.json": config})
    ...                     # training goes on while the step is written
    saver.wait()            # the step is whole, or this raises

Two modes, one format. `background` copies the share into memory that is kept for it and blocks for nothing
else; `stream` blocks until the step is whole and needs no memory to speak of. docs/saving.md has the figures.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import torch

from syncd.errors import UsageError
from syncd.protocol.disk import Clock
from syncd.protocol.layout import ACTOR, Job, shard_name
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.receipt import FileRecord
from syncd.protocol.writer import StepWriter
from syncd.transports.filesystem.device_copy import Copies
from syncd.transports.filesystem.direct_io import THREADS, Way, choose
from syncd.transports.filesystem.export_walk import Export, Walk, can_repeat
from syncd.transports.filesystem.layout import Layout, encode_index
from syncd.transports.filesystem.pinned_buffer import Arena, Kept
from syncd.transports.filesystem.save_outcome import as_ours, conclude, leave_note, settle
from syncd.transports.filesystem.shard import ChangedError, Ring, Shard, pour, put_all
from syncd.transports.memory.save import Copy

Mode = Literal["background", "stream"]

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Written:
    """What a save took.

    Args:
        step: The step.
        size: Bytes of the weights, of all ranks.
        seconds: From the call until this rank's files were durable.
        is_copied: Whether this rank's part is in memory too.
    """

    step: int
    size: int
    seconds: float
    is_copied: bool


@dataclass(frozen=True, slots=True)
class _Save:
    """One save of this rank: its writer, what goes beside the weights, its copy in memory, and when it began."""

    writer: StepWriter
    companions: Mapping[str, bytes] = field(default_factory=dict)
    copy: Copy | None = None
    begun: float = 0.0


class StepSaver:
    """Writes this rank's part of each step. One save is in flight; all ranks make the same calls.

    Args:
        job: The job.
        rank: This rank, from 0.
        world_size: Number of ranks, each of which writes one shard.
        mode: `background` or `stream`.
        dtype: What floating-point tensors are cast to; None keeps each as it is.
        tied: Names of tensors to leave out: those that repeat another one.
        check_finite: Whether NaN and infinity are refused.
        timeout: Seconds to wait for the other ranks once this one is done.
        way: How files are written; found by trying unless given.
        clock: Time.
        fence: The directory through which steps are sealed and announced (`StepWriter`).
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
        way: Way | None = None,
        clock: Clock | None = None,
        fence: str = "",
    ) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} of {world_size} is out of range")
        self._job, self._rank, self._world_size = job, rank, world_size
        self._mode, self._dtype, self._tied = mode, dtype, frozenset(tied)
        self._timeout, self._way, self._clock = timeout, way, clock or SystemClock()
        self._check, self._fence = check_finite, fence
        self._writers = ThreadPoolExecutor(THREADS, "save-write")
        self._behind = ThreadPoolExecutor(1, "save")
        self._memory = Kept()
        self._ring: Ring | None = None
        self._layout: Layout | None = None
        self._pending: tuple[_Save, Future[bool]] | None = None
        self.written: Written | None = None
        """What the last save took that this rank has finished."""

    def prepare(self, tensors: Export) -> None:
        """Begin to make the memory that saves need, behind what comes next; then the first save is as fast as others.

        Not needed, and no promise: an export that turns out larger is saved all the same. Only shapes and dtypes are
        looked at, in the order of the export: tensors on `meta` will do, and sharded ones are not gathered.

        Args:
            tensors: As `save` takes them.

        Raises:
            UsageError: Memory was made already, by this or by a save.
        """
        if self._memory.begun or self._ring:
            raise UsageError("memory is made once, before the first save")
        if self._mode == "stream":
            self._ring = Ring()
            return
        walk = self._walk(tensors)
        walk.plan()
        self._memory.begin(Layout(walk.specs).data_size, self._behind)

    def planned_size(self, tensors: Export) -> int:
        """Return the bytes of all ranks' tensors, by a walk that looks at no weight."""
        walk = self._walk(tensors)
        walk.plan()
        return walk.total_size

    def save(
        self,
        step: int,
        attempt: str,
        tensors: Export,
        companions: Mapping[str, bytes] | None = None,
        copy: Copy | None = None,
    ) -> None:
        """Save a step; every rank walks all the tensors.

        Args:
            step: The trainer's step.
            attempt: A name that the ranks share in this save and that no other save has.
            tensors: Names and tensors, or a function that begins a walk over them. `stream` needs what can be
                walked twice for its first save, to know where everything goes.
            companions: Files beside the weights by name, such as config.json; rank 0 writes them.
            copy: This rank's side of a copy in memory that takes the same files.

        Raises:
            SyncdError: The save before this one failed, on any rank; or this one did.
        """
        self.wait()
        writer = StepWriter(self._job, step, self._world_size, attempt, self._clock, fence=self._fence)
        save = _Save(writer, companions or {}, copy, self._clock.monotonic())
        if self._mode == "stream":
            self._stream(save, tensors)
        else:
            self._start(save, tensors)

    def wait(self) -> None:
        """Return once the save in flight is a whole step on disk, written by all ranks and announced.

        Raises:
            SyncdError: It failed, on this rank or on another. It is said once; the next save may be tried.
        """
        if self._pending is None:
            return
        save, future = self._pending
        try:
            if not future.result():
                settle(save.writer, self._rank, self._clock, self._timeout)
        except Exception:
            self._pending = None
            raise
        self._pending = None

    @property
    def saving(self) -> bool:
        """Say whether this rank is still writing."""
        return self._pending is not None and not self._pending[1].done()

    @property
    def failed(self) -> bool:
        """Say whether this rank's part of the save in flight has failed; `wait` raises why."""
        return self._pending is not None and self._pending[1].done() and bool(self._pending[1].exception())

    def close(self) -> None:
        """Wait for the save in flight and give threads and memory back."""
        try:
            self.wait()
        finally:
            self._behind.shutdown()
            self._writers.shutdown()
            self._memory.close()

    def _start(self, save: _Save, tensors: Export) -> None:
        walk = self._walk(tensors)
        with self._guarded(save, walk):
            arena = self._gather(walk)
            _require(walk)
        self._pending = save, self._behind.submit(self._write_behind, save, walk, arena)

    def _gather(self, walk: Walk) -> Arena:
        """Copy this rank's share into the arena: all that training is blocked for."""
        arena, end = self._memory.arena(), 0
        with Copies(self._behind) as copies:
            for spec, tensor, dtype, lasts in walk.in_file_order():
                if end + spec.size > arena.capacity:
                    copies.finish()  # growing may move the memory
                    arena.reserve(end + spec.size)
                place = arena.bytes[end : end + spec.size].view(dtype).view(spec.shape)
                copies.add(place, tensor, lasts=lasts)
                end += spec.size
        return arena

    def _write_behind(self, save: _Save, walk: Walk, arena: Arena) -> bool:
        layout = Layout(walk.specs)

        def fill(path: str) -> tuple[int, str]:
            with self._shard(path, layout, save.copy) as shard:
                put_all(shard, arena.bytes, layout.data_size)
                return shard.finish()

        try:
            with self._guarded(save):
                return self._publish(save, walk, fill)
        finally:
            arena.renew(layout.data_size)

    def _stream(self, save: _Save, tensors: Export) -> None:
        layout = self._planned(tensors)
        walk, ring = self._walk(tensors), self._ring or Ring()
        self._ring = ring

        def fill(path: str) -> tuple[int, str]:
            with self._shard(path, layout, save.copy) as shard:
                pour(walk, layout, ring, shard)
                return shard.finish()

        with self._guarded(save, walk):
            try:
                done = self._publish(save, walk, fill)
            except ChangedError:
                self._layout = None
                raise
        if not done:
            settle(save.writer, self._rank, self._clock, self._timeout)

    def _planned(self, tensors: Export) -> Layout:
        """Return the layout of this rank's shard, unless it is known by a walk that looks at no weight."""
        if self._layout is None:
            if not can_repeat(tensors):
                raise UsageError(
                    "the first streamed save needs tensors that can be walked twice",
                    hint="pass the function that begins the export, not what it returns",
                )
            walk = self._walk(tensors)
            walk.plan()
            _require(walk)
            self._layout = Layout(walk.specs)
        return self._layout

    def _publish(self, save: _Save, walk: Walk, fill: Callable[[str], tuple[int, str]]) -> bool:
        """Write this rank's files and its receipt, and conclude the step if it is the last one."""
        writer, number = save.writer, self._rank + 1
        name = shard_name(number, self._world_size)
        writer.begin()
        if self._way is None:
            self._way = choose(f"{writer.path}/{ACTOR}", name=name)
        shard = writer.place(f"{ACTOR}/{name}", fill)
        shard = FileRecord(shard.name, shard.size, shard.digest, len(walk.specs))
        files = self._companions(save, walk) if self._rank == 0 else []
        if save.copy is not None:
            save.copy.seal(number, shard, files)  # first: once the step is whole, so is its copy
        writer.receipt(number, [shard], files)
        self._note(save, walk)
        return conclude(writer)

    def _note(self, save: _Save, walk: Walk) -> None:
        is_copied = save.copy is not None and not save.copy.failed
        seconds = self._clock.monotonic() - save.begun
        self.written = Written(save.writer.step, walk.total_size, seconds, is_copied)

    def _companions(self, save: _Save, walk: Walk) -> list[FileRecord]:
        files = {**save.companions, INDEX: encode_index(walk.weight_map, walk.total_size)}
        if save.copy is not None:
            for name, content in files.items():
                save.copy.write(name, content)
        return [save.writer.write(f"{ACTOR}/{name}", content) for name, content in files.items()]

    def _walk(self, tensors: Export) -> Walk:
        return Walk(tensors, self._rank, self._world_size, self._dtype, self._tied)

    def _shard(self, path: str, layout: Layout, copy: Copy | None) -> Shard:
        assert self._way is not None
        if copy is not None:
            copy.begin(shard_name(self._rank + 1, self._world_size), layout.size)
        return Shard(path, layout, self._way, self._writers, check=self._check, copy=copy)

    @contextlib.contextmanager
    def _guarded(self, save: _Save, walk: Walk | None = None) -> Iterator[None]:
        """Make a failure known to the other ranks, without leaving them alone in a collective."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
            if walk is not None:
                walk.finish()
            leave_note(save.writer, self._rank, error)
            ours = as_ours(error, save.writer)
            raise ours from (error if ours is not error else error.__cause__)


def _require(walk: Walk) -> None:
    if not walk.weight_map:
        raise UsageError("the export has no tensors")
