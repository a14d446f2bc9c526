"""The trainer's end of the transport through files. All other senders wrap this one, for the durable step."""

import contextlib
from dataclasses import replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Self

import structlog
import torch

from syncd.errors import SyncdError
from syncd.extras import install_command, missing_packages
from syncd.protocol.layout import Job
from syncd.protocol.presence import RunningStatus
from syncd.protocol.tile_table import READS_TILES
from syncd.protocol.write_progress import READS_EARLY
from syncd.protocol.writer import StepWriter
from syncd.transports.base import FILES, Export, SendContext, Sent, StepContent, WeightSender
from syncd.transports.files.memory_copy import MemoryCopy
from syncd.transports.files.step_saver import StepSaver
from syncd.transports.files.storage import WHOLE, ChoosesStorage, Storage
from syncd.transports.ranks import Ranks, all_or_error

if TYPE_CHECKING:
    from syncd.client.client import Client

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "keep": None}
"""What `sync.dtype` casts floating-point tensors to; None keeps each as it is."""

_CHOOSER = "syncd.transports.delta.storage_chooser:StorageChooser"


class FilesSender(WeightSender):
    """Writes steps, and has all ranks agree on the result of each.

    Without `stores_deltas`, all steps are whole. `chooser` and `client` are None on all ranks but the first.
    """

    name = FILES

    def __init__(
        self,
        job: Job,
        ranks: Ranks,
        saver: StepSaver,
        *,
        stores_deltas: bool = False,
        chooser: ChoosesStorage | None = None,
        client: "Client | None" = None,
    ) -> None:
        self.ranks = ranks
        self._job, self._saver, self._client = job, saver, client
        self._stores_deltas, self._chooser = stores_deltas, chooser
        self._is_prepared = False
        self._attempt: tuple[int, str] | None = None

    @classmethod
    def open(cls, context: SendContext) -> Self:
        """Return a sender that allocates nothing before `prepare`."""
        ranks, settings = context.ranks, context.settings
        saver = StepSaver(
            context.job,
            ranks.rank,
            ranks.world_size,
            mode=settings.mode,
            dtype=DTYPES[settings.dtype],
            tied=context.tied,
            check_finite=settings.check_finite,
            timeout=settings.save_timeout,
            fence=context.fence,
            base=context.base,
            memory=context.memory,
        )
        stores_deltas = _stores_deltas(context)
        chooser = None
        if stores_deltas and context.client is not None:
            chooser = resolve_name(_CHOOSER)(
                context.job,
                context.client,
                settings.keyframe_every,
                settings.max_chain_bytes,
                weighs_time=settings.delta == "auto",
            )
        return cls(
            context.job, ranks, saver, stores_deltas=stores_deltas, chooser=chooser, client=context.client
        )

    def prepare(self, export: Export) -> None:
        if not self._is_prepared:
            self._is_prepared = True
            refused = next(filter(None, self.ranks.gather(self._saver.prepare(export))), "")
            if refused:
                self._stores_deltas = False
                self._saver.stream()
            if refused and self.ranks.rank == 0:
                structlog.get_logger().warning(
                    "save_blocks", reason=refused, hint="--trainer.host_memory_mib MIB"
                )

    def planned_size(self, export: Export) -> int:
        return self._saver.planned_size(export)

    def send(self, step: int, attempt: str, content: StepContent, copy: MemoryCopy | None = None) -> None:
        """Begin to write a step; with a copy, write the same files into it."""
        self._attempt = step, attempt
        reads = self.ranks.broadcast(self._reads())
        self._saver.leaves_notes, self._saver.has_tiles = READS_EARLY in reads, READS_TILES in reads
        begin = self._saver.copy if self._stores_deltas else self._saver.save
        if self._chooser is not None and self._stores_deltas and not self._saver.is_writing:
            self._chooser.begin(self._saver.state())
        try:
            all_or_error(self.ranks, begin, step, attempt, content.export, content.files, copy, content.probe)
            if self._stores_deltas:
                whole = content.must_be_whole or ("a copy in memory is made" if copy else "")
                self._saver.write(self._choose_storage(step, whole))
        except SyncdError:
            # The ranks that did not fail have a save in flight that cannot succeed.
            with contextlib.suppress(SyncdError):
                self.wait()
            self._discard()
            raise

    def wait(self) -> None:
        try:
            all_or_error(self.ranks, self._saver.wait)
        except SyncdError:
            self._discard()
            raise
        self._release()

    @property
    def sent(self) -> Sent | None:
        """Return the result of the last send, None while this rank is writing or if it failed."""
        sent = self._saver.sent
        if sent is None or self._attempt is None or sent.step != self._attempt[0]:
            return None
        return replace(sent, method=self.name)  # a subclass has its own name

    @property
    def has_failed(self) -> bool:
        return self._saver.failed

    def close(self) -> None:
        try:
            self._saver.close()
        finally:
            if self._chooser is not None:
                self._chooser.close()

    def _reads(self) -> set[str]:
        """Return what explorers take beside steps that are stored whole, by what the last heartbeat has read."""
        explorers = self._client.explorers.last().values() if self._client else ()
        living = (explorer for explorer in explorers if explorer.status is not RunningStatus.STOPPED)
        return {name for explorer in living for name in explorer.reads}

    def _release(self) -> None:
        """Let the step go that the last one is stored as changes of: no save is in flight."""
        if self._chooser is not None:
            self._chooser.release()

    def _choose_storage(self, step: int, must_be_whole: str) -> Storage:
        """Return how all ranks store a step; rank 0 chooses."""
        shares, chooser = self.ranks.gather(self._saver.state()), self._chooser
        chosen = chooser.next_storage(step, shares, must_be_whole) if chooser else WHOLE
        return self.ranks.broadcast(chosen)

    def _discard(self) -> None:
        """Remove what a save that failed on all ranks has written: if the disk is full, its space is needed."""
        if self._chooser is not None:
            self._chooser.note_failure()
        attempt, self._attempt = self._attempt, None
        if self.ranks.rank == 0 and attempt is not None:
            StepWriter(self._job, attempt[0], self.ranks.world_size, attempt[1]).discard()


def _stores_deltas(context: SendContext) -> bool:
    """Return whether steps may be stored as deltas; if packages for that are missing on a rank, log it."""
    settings = context.settings
    if settings.delta == "off" or settings.mode == "stream" or context.base is not None:
        return False
    missing = next(filter(None, context.ranks.gather(missing_packages("delta"))), None)
    if missing and context.ranks.rank == 0:
        reason = f"not installed: {', '.join(missing)}"
        structlog.get_logger().warning("deltas_disabled", reason=reason, hint=install_command("delta"))
    return not missing
