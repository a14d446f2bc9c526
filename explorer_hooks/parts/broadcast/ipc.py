"""Weights as memory that this process shares with the engine's workers on the same host: no wire, no group.

Weights that were received into shared memory (`received.allocate`) are not copied on this side. Others are: while the
engine loads a bucket, this process fills the next one, so two are in shared memory at once.
"""

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence

from explorer_hooks.http_client import HttpClient
from explorer_hooks.parts.broadcast.delivery import Delivery, Tensors
from explorer_hooks.parts.broadcast.paired_calls import EngineRequest, wait_for_all
from explorer_hooks.parts.broadcast.segments import remove_leftovers
from explorer_hooks.parts.broadcast.shared import SharedBucket, share
from syncd.errors import SyncdError

_ENDING = 10.0  # seconds for which memory is kept for a request that has not ended


class IpcDelivery(Delivery):
    def __init__(self, server: HttpClient, address: str, *, flush_cache: bool = False) -> None:
        super().__init__(server, address, flush_cache=flush_cache)
        self._held: list[SharedBucket] = []
        self._coming: Iterator[SharedBucket] = iter(())
        self._request: EngineRequest | None = None

    @abstractmethod
    def _count_workers(self) -> int:
        """Return how many workers the engine has."""

    @abstractmethod
    def _copies_tensors(self) -> bool:
        """Return whether the engine is known to keep none of the tensors that it opens."""

    @abstractmethod
    def _meet(self, first: SharedBucket) -> None:
        """Make sure that the engine's workers see this process's memory."""

    @abstractmethod
    def _start(self) -> None:
        """Begin an update."""

    @abstractmethod
    def _update(self, bucket: SharedBucket, label: str | None) -> None:
        """Request that the engine loads a bucket, and wait until it has."""

    def close(self) -> None:
        """Release the memory once the engine's last request has ended, and make the engine drop the update."""
        if self._request is not None:
            self._request.wait(_ENDING)
        while self._held:
            self._held.pop().release()
        with contextlib.suppress(SyncdError):
            self._leave()

    def _open(self, buckets: Sequence[Tensors]) -> None:
        remove_leftovers()
        workers = self._count_workers()
        self._coming = (self._shared(tensors, workers) for tensors in buckets)
        first = next(self._coming)
        self._meet(first)
        first.fill()
        self._start()

    def _carry(self, tensors: Tensors, label: str | None) -> None:
        bucket = self._held[0]
        assert bucket.tensors.keys() == tensors.keys()
        self.touched = True
        self._request = request = EngineRequest(lambda: self._update(bucket, label))
        if following := next(self._coming, None):
            following.fill()
        wait_for_all((request,), self._deadline)
        self._held.remove(bucket)
        bucket.release()

    def _shared(self, tensors: Tensors, workers: int) -> SharedBucket:
        made = share(tensors, workers, in_place=self._copies_tensors())
        self._held.append(made)
        return made
