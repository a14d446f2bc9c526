"""The ranks of one trainer: small messages between them, besides what the engine exchanges.

`Group` talks over gloo, also where the engine uses NCCL: decisions must not queue behind kernels.
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from syncd.errors import TimedOutError

T = TypeVar("T")


class Ranks(Protocol):
    """Messages between the ranks; all ranks make the same calls in the same order."""

    rank: int
    world_size: int

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on all ranks."""

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order, on all ranks."""

    def close(self) -> None:
        """Leave `torch.distributed` altogether."""


class Alone:
    """One rank by itself."""

    rank, world_size = 0, 1

    def broadcast(self, value: T) -> T:
        """Return the value."""
        return value

    def gather(self, value: T) -> list[T]:
        """Return the value alone."""
        return [value]

    def close(self) -> None:
        """Leave `torch.distributed`, which engines may use for one rank as well."""
        _leave()


class Group:
    """The ranks of `torch.distributed`, which must be initialised.

    A message to a rank that has ended, or does not answer in time, raises TimedOutError.

    Args:
        timeout: Seconds after which a rank that does not answer is an error.
    """

    def __init__(self, timeout: float) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on all ranks."""
        box: list[Any] = [value if self.rank == 0 else None]
        with _answered():
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks on all ranks."""
        box: list[Any] = [None] * self.world_size
        with _answered():
            dist.all_gather_object(box, value, group=self._group)
        return box

    def close(self) -> None:
        """Leave all groups of `torch.distributed`."""
        _leave()


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what gloo raises, for a timeout and for a connection that was closed
        raise TimedOutError(
            f"another rank has ended or does not answer: {str(error).splitlines()[0]}",
            hint="the rank that failed first says why",
        ) from error


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
