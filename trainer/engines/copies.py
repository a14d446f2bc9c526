"""The copies in memory of an engine whose weights go out through files: all ranks make the same calls."""

import structlog

from syncd.errors import SyncdError
from syncd.protocol.process import Process
from syncd.transports.filesystem.export_walk import Export
from syncd.transports.filesystem.save import StepSaver
from syncd.transports.memory.save import Copy, Memory, Options
from trainer.engines.base import EngineContext


class Copies:
    """Leaves a copy of each step in the memory of the trainer's host.

    Args:
        context: What the engine is made of.
        saver: Writes the steps.
        memory: Where copies are; of rank 0 it is open.
    """

    def __init__(self, context: EngineContext, saver: StepSaver, memory: Memory) -> None:
        self._context, self._saver, self._memory = context, saver, memory
        self._size: int | None = None

    @staticmethod
    def opened(context: EngineContext, saver: StepSaver) -> "Copies | None":
        """Return what makes copies, None on all ranks where there can be none; an event says why."""
        ranks, sync = context.ranks, context.config.sync
        memory = Memory(context.job, Options(sync.memory_dir, sync.memory_mib << 20))
        several = len(set(ranks.gather(Process.current().boot))) > 1
        problem = "the trainer's ranks are on several hosts" if several else ""
        if ranks.rank == 0 and not problem:
            problem = memory.open()
        problem = ranks.broadcast(problem)
        if problem:
            _tell(context, "memory_disabled", reason=problem, hint=f"df -h {sync.memory_dir}")
            return None
        if context.sync is not None:
            context.sync.tell_copies(memory.place)
        return Copies(context, saver, memory)

    def next(self, step: int, attempt: str, export: Export) -> Copy | None:
        """Return this rank's side of the next copy, None on all ranks where there is no room for it.

        Args:
            step: The trainer's step.
            attempt: The save that it is a copy of.
            export: What the engine exports; it can be walked twice.
        """
        ranks, size = self._context.ranks, self._planned(export)
        problem = self._memory.make_room(step, attempt, size) if ranks.rank == 0 else ""
        problem = ranks.broadcast(problem)
        if problem:
            _tell(self._context, "memory_copy_skipped", step=step, reason=problem)
            return None
        told = lambda reason: _tell(self._context, "memory_copy_failed", step=step, reason=reason)  # noqa: E731
        return self._memory.copy(step, attempt, ranks.world_size, told)

    def close(self) -> None:
        """Remove the copies that nobody reads."""
        if self._context.sync is not None:
            try:
                self._context.sync.tell_copies(None)
            except SyncdError as error:
                _tell(self._context, "memory_withdrawal_failed", reason=str(error))
        self._memory.close()

    def _planned(self, export: Export) -> int:
        """Return the bytes of the weights, found once by a walk that looks at none of them."""
        if self._size is None:
            self._size = self._saver.planned_size(export)
        return self._size


def _tell(context: EngineContext, event: str, **fields: object) -> None:
    if context.ranks.rank == 0:
        structlog.get_logger().warning(event, **fields)
