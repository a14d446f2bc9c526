"""The trainer's end of the transport through memory: each save leaves a copy of its files in a tmpfs directory too.

A copy is used only once the files of the very same save are published. So if anything fails for a copy, the
only consequence is that there is none. The package has the rules.
"""

import atexit
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

import structlog

from syncd.client.peers import process_of
from syncd.errors import SyncdError, UsageError
from syncd.protocol.disk import Clock
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk, SystemClock
from syncd.protocol.memory_copies import (
    MemoryDirectory,
    clear_all,
    clear_directory,
    discard,
    is_private,
    lock_directory,
)
from syncd.protocol.process import Process
from syncd.protocol.receipt import read_receipts, receipts_directory, whole_attempt
from syncd.transports.base import Export, SendContext, Sent, StepContent, WeightSender
from syncd.transports.files.memory_copy import MemoryCopy
from syncd.transports.files.send import FilesSender
from syncd.transports.host_memory import HostMemory, capacity, is_tmpfs, read_free_memory, refusal, unlimited

if TYPE_CHECKING:
    from syncd.client.client import Client
    from syncd.protocol.file_lock import FileLock

SLACK = 1 << 20  # bytes for what lies beside the weights, and for headers
_KEPT = 1  # copies that stay while the next one is made, besides those that are read

_COPIES = "the copies in memory"
_PATIENCE = 2.0  # seconds for which a reader may tidy up after the trainer before this one


class MemorySender(WeightSender):
    """Sends through files, and leaves a copy of each step in the memory of the trainer's host.

    Rank 0 has opened `copies`, the job's on this host; None on all ranks if there can be none. `client` is None on
    all ranks but the first. `memory` is the budget that this rank's share of the copies is taken from.
    """

    name = "memory"
    sends_checkpoints = True

    def __init__(
        self,
        files: FilesSender,
        copies: "MemoryCopies | None",
        client: "Client | None",
        memory: HostMemory | None = None,
    ) -> None:
        self._files, self._copies, self._client = files, copies, client
        self._memory = memory or unlimited()
        self._log = structlog.get_logger()
        self._size: int | None = None
        self._copy: MemoryCopy | None = None  # of the last send

    @classmethod
    def open(cls, context: SendContext) -> Self:
        """Return a sender; if no copies can be made, one that sends through files, and an event tells why."""
        files, settings, ranks = context.files, context.settings, context.ranks
        if not isinstance(files, FilesSender):
            raise UsageError("transport memory needs the sender of transport checkpoint")
        copies = MemoryCopies(context.job, settings.memory_dir, settings.memory_mib << 20)
        is_one_host = len(set(ranks.gather(Process.current().boot))) == 1
        problem = "" if is_one_host else "the trainer's ranks are on several hosts"
        if ranks.rank == 0 and not problem:
            problem = copies.open()
        problem = ranks.broadcast(problem)
        sender = cls(files, None if problem else copies, context.client, context.memory)
        if problem:
            sender._warn("memory_disabled", reason=problem, hint=f"df -h {settings.memory_dir}")
        elif context.client is not None:
            context.client.publish_copies(copies.memory_directory)
        return sender

    def prepare(self, export: Export) -> None:
        self._files.prepare(export)

    def send(self, step: int, attempt: str, content: StepContent) -> None:
        """Begin to write a step, and its copy if there is room for one."""
        self._copy = self._next_copy(step, attempt, content.export)
        self._files.send(step, attempt, content, self._copy)

    def wait(self) -> None:
        """Return once the step is whole and announced; its copy is whole then too."""
        self._files.wait()

    @property
    def sent(self) -> Sent | None:
        """Return the result of the last send; it is done if there is a copy."""
        sent, copy = self._files.sent, self._copy
        return sent and replace(sent, method=self.name, is_done=copy is not None and not copy.failed)

    @property
    def has_failed(self) -> bool:
        return self._files.has_failed

    def unavailable(self) -> str:
        if self._copies is None or self._client is None:
            return "no copies can be made"
        here = Process.current().boot
        boots = {
            process.boot
            for presence in self._client.explorers.living().values()
            if (process := process_of(presence))
        }
        return "" if here and here in boots else "no explorer is on this host"

    def close(self) -> None:
        """Finish the save in flight, then remove the copies that nobody reads."""
        copies, self._copies = self._copies, None
        try:
            self._files.close()
        finally:
            if copies is not None:
                self._withdraw()
                copies.close()

    def _next_copy(self, step: int, attempt: str, export: Export) -> MemoryCopy | None:
        """Return this rank's side of the next copy, None on all ranks if there is no room for it."""
        if self._copies is None:
            return None
        ranks, size = self._files.ranks, self._planned_size(export)
        share = (_KEPT + 1) * (size + SLACK) // ranks.world_size
        problem = next(filter(None, ranks.gather(self._memory.take(_COPIES, share))), "")
        if problem:
            self._memory.take(_COPIES, 0)
        else:
            problem = ranks.broadcast(self._copies.make_room(step, attempt, size) if ranks.rank == 0 else "")
        if problem:
            self._warn("memory_copy_skipped", step=step, reason=problem)
            return None
        return self._copies.copy(step, attempt, ranks.world_size, partial(self._warn_failed, step))

    def _planned_size(self, export: Export) -> int:
        if self._size is None:
            self._size = self._files.planned_size(export)
        return self._size

    def _withdraw(self) -> None:
        if self._client is not None:
            try:
                self._client.publish_copies(None)
            except SyncdError as error:
                self._warn("memory_withdrawal_failed", reason=str(error))

    def _warn_failed(self, step: int, reason: str) -> None:
        self._warn("memory_copy_failed", step=step, reason=reason)

    def _warn(self, event: str, **fields: object) -> None:
        if self._files.ranks.rank == 0:
            self._log.warning(event, **fields)


class MemoryCopies:
    """The copies of one job on this host, `limit` bytes together; 0 for half of what the file system can take."""

    def __init__(self, job: Job, root: str, limit: int = 0, clock: Clock | None = None) -> None:
        self.memory_directory = MemoryDirectory.here(root, job.root)
        self._limit, self._clock = limit, clock or SystemClock()
        self._owner: FileLock | None = None
        self._made: list[str] = []

    def open(self) -> str:
        """Claim the directory, and remove what trainers that were killed have left.

        Return why no copies can be made, empty if they can.
        """
        root = os.path.dirname(self.memory_directory.directory)
        try:
            if not is_tmpfs(root):
                return f"{root} is not on a tmpfs"
            clear_all(root)
            atexit.register(self.close)  # a run that ends by an error must give the host's memory back
            return self._own()
        except (OSError, SyncdError) as error:
            return str(error)

    def make_room(self, step: int, attempt: str, size: int) -> str:
        """Remove copies that are no longer needed, and make the directory for the copy of save `attempt`.

        Its tensors have `size` bytes. Return why there is no room, empty if there is.
        """
        try:
            return self._make_room(self.memory_directory.copy(step, attempt), size + SLACK)
        except (OSError, SyncdError) as error:
            return str(error)

    def copy(
        self, step: int, attempt: str, world_size: int, report_failure: Callable[[str], None]
    ) -> MemoryCopy:
        return MemoryCopy(
            self.memory_directory.copy(step, attempt), step, attempt, world_size, report_failure
        )

    def close(self) -> None:
        """Remove all copies but those that are read; the last of their readers removes them."""
        atexit.unregister(self.close)
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.close()
            clear_directory(self.memory_directory.directory)

    def _own(self) -> str:
        if self._owner is not None and self._owner.is_valid():
            return ""
        directory, end = self.memory_directory.directory, self._clock.monotonic() + _PATIENCE
        while True:
            if not os.path.lexists(directory):
                os.mkdir(directory, 0o700)
            if not is_private(directory):
                return f"{directory} can be used by others"
            self._owner = lock_directory(directory)
            if self._owner is not None:
                return ""
            if self._clock.monotonic() > end:
                return f"another trainer holds {directory}"
            self._clock.sleep(0.02)

    def _make_room(self, path: str, size: int) -> str:
        if problem := self._own():
            return problem
        directory = self.memory_directory.directory
        limit = self._limit or capacity(directory) // 2
        kept = [name for name in self._made if _is_whole(f"{directory}/{name}")][-_KEPT:]
        used = discard(directory, keep=kept)
        if refusal(read_free_memory(directory), size, used, limit):
            used = discard(directory)  # late explorers may still want the copy before, if there is room
        if problem := refusal(read_free_memory(directory), size, used, limit):
            return problem
        os.makedirs(receipts_directory(path), 0o700)
        self._made = [*kept, os.path.basename(path)]
        return ""


def _is_whole(path: str) -> bool:
    """Return whether all ranks have confirmed a copy: not if the save that makes it has failed."""
    return whole_attempt(read_receipts(LocalDisk(), path)) is not None
