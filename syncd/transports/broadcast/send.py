"""The trainer's end of a broadcast: it broadcasts each step, and saves it to files, whether or not that worked."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Self

from syncd.errors import SyncdError, UsageError
from syncd.protocol.probe import Probe
from syncd.transports.base import Export, SendContext, Sent, WeightSender
from syncd.transports.broadcast.broadcaster import Broadcaster, BroadcastOptions
from syncd.transports.filesystem.send import DTYPES


class BroadcastSender(WeightSender):
    """Broadcasts each step to the explorers that take part, and saves it to files, whether or not that worked.

    Args:
        broadcaster: Broadcasts.
        files: The opened sender of the transport through files.
    """

    name = "nccl"

    def __init__(self, broadcaster: "Broadcaster", files: WeightSender) -> None:
        self._broadcaster, self._files = broadcaster, files
        self._attempt = ""
        self._sent: Sent | None = None

    @classmethod
    def open(cls, context: SendContext) -> Self:
        """Return a sender after the job file's `[sync]`."""
        settings = context.settings
        if context.files is None:
            raise UsageError("transport nccl needs the sender of transport checkpoint")
        options = BroadcastOptions(
            settings.address,
            settings.bucket_mib << 20,
            settings.ready_timeout,
            settings.broadcast_timeout,
        )
        broadcaster = Broadcaster(
            context.ranks,
            context.client,
            options,
            dtype=DTYPES[settings.dtype],
            tied=context.tied,
            check_finite=settings.check_finite,
        )
        return cls(broadcaster, context.files)

    def prepare(self, export: Export) -> None:
        """Prepare the files' sender; buckets are allocated for the first broadcast."""
        self._files.prepare(export)

    def send(
        self,
        step: int,
        attempt: str,
        export: Export,
        files: Mapping[str, bytes],
        probe: Probe | None = None,
    ) -> None:
        """Broadcast a step, then begin to save it."""
        self._attempt, start = attempt, time.perf_counter()
        is_done = self._broadcaster.send(step, attempt, export, probe)
        seconds = time.perf_counter() - start
        self._sent = Sent(self.name, step, self._broadcaster.size, seconds, is_done, is_received=True)
        with self._withdrawn_on_error():
            self._files.send(step, attempt, export, files, probe)

    def wait(self) -> None:
        """Wait for the files; if they fail, explorers that run the step already are told."""
        with self._withdrawn_on_error():
            self._files.wait()

    @property
    def sent(self) -> Sent | None:
        """Return the result of the last broadcast."""
        return self._sent

    def unavailable(self) -> str:
        """Return why there would be no broadcast."""
        return "" if self._broadcaster.has_members() else "no explorer takes part"

    @property
    def has_failed(self) -> bool:
        """Return whether this rank's part of the files has failed."""
        return self._files.has_failed

    @contextlib.contextmanager
    def _withdrawn_on_error(self) -> Iterator[None]:
        try:
            yield
        except SyncdError:
            self._sent = None
            self._broadcaster.withdraw(self._attempt)
            raise

    def close(self) -> None:
        """End the group, and finish the save in flight."""
        try:
            self._broadcaster.close()
        finally:
            self._files.close()
