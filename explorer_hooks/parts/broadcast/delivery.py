"""One version from this process's memory into one paused engine: what is common to all engines and all ways.

    with contextlib.closing(delivery):
        delivery.push("2.120", tensors)

The weights are cut into buckets of whole tensors. For each bucket the engine gets a request that names its tensors.
How their bytes reach its workers is the way: through a group (`group.py`), or as memory that both share (`ipc.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from explorer_hooks.http_client import HttpClient
from syncd.client.wait import Deadline
from syncd.errors import LoadFailedError
from syncd.protocol.local_disk import SystemClock

BUCKET = 256 << 20
"""Bytes of a bucket unless one tensor is larger: the engine needs memory for one bucket beside its weights."""

QUICK = 10.0  # seconds that an engine may take to drop an update

Tensors = Mapping[str, torch.Tensor]


class Delivery(ABC):
    """One version on its way into an engine. Used by one thread.

    Args:
        server: The engine's server, whose time-out of a load is that of one version.
        address: The address of this host at which workers of the engine meet this process, if they do.
        flush_cache: Whether the engine drops keys and values of the old weights, if it does so while it loads.
    """

    begin: ClassVar[str]
    end: ClassVar[str]
    """The paths that begin and end an update."""
    may_lack_updates: ClassVar[bool] = False
    """Whether old releases know no such paths."""
    hint: ClassVar[str]

    def __init__(self, server: HttpClient, address: str, *, flush_cache: bool = False) -> None:
        self._server, self._address, self._flush_cache = server, address, flush_cache
        self._deadline = Deadline(SystemClock(), server.timeout)
        self._is_updating = False
        self.touched = False  # whether the engine's weights may have changed

    def push(self, label: str, tensors: Tensors) -> None:
        cuts = cut({name: tensor.nbytes for name, tensor in tensors.items()}, BUCKET)
        buckets = [{name: tensors[name].detach() for name in names} for names in cuts]
        if not buckets:
            raise LoadFailedError("the version has no tensors")
        self._open(buckets)
        for bucket in buckets:
            self._carry(bucket, label if bucket is buckets[-1] else None)
        self._finish_update()

    @abstractmethod
    def close(self) -> None:
        """Make the engine drop what is unfinished, whatever has happened; takes seconds at most."""

    @abstractmethod
    def _open(self, buckets: Sequence[Tensors]) -> None:
        """Begin an update of these buckets, and connect this process with the engine's workers."""

    @abstractmethod
    def _carry(self, tensors: Tensors, label: str | None) -> None:
        """Have the engine load one bucket; with the last comes the label of the weights."""

    @abstractmethod
    def _leave(self) -> None:
        """Make the engine drop an unfinished update and what connects it with this process."""

    def _begin_update(self) -> None:
        """Begin an update, after one that an earlier process left unfinished."""
        reply = self._server.post_raw(self.begin)
        if reply.has_no_route and self.may_lack_updates:
            return
        self._is_updating = True
        if reply.is_error:
            self._finish_update()
            self._post(self.begin)
            self._is_updating = True

    def _finish_update(self) -> None:
        if self._is_updating:
            self._post(self.end)
            self._is_updating = False

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        self._server.post(path, body, hint=self.hint)


def cut(sizes: Mapping[str, int], bucket: int) -> Iterator[list[str]]:
    """Yield the names of each bucket, in order: as many as fit into `bucket` bytes, and one at least."""
    names: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if names and filled + size > bucket:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    if names:
        yield names


def described(tensors: Tensors) -> dict[str, list[object]]:
    """Return names, dtypes as torch names them, and shapes, as both engines want them."""
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
