"""The ranks of one trainer: small messages between them, and errors that all of them raise together.

`RankGroup` talks over gloo, also if the engine uses NCCL: decisions must not queue behind kernels.
"""

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch.distributed as dist

from syncd.errors import StorageError, SyncdError, TimedOutError, first_line

T = TypeVar("T")
P = ParamSpec("P")

PASSING = (StorageError, TimedOutError)
"""Errors that may be over the next time: the disk was full, a rank was slow."""

_AGREED = "on all ranks"


class Ranks:
    """Messages between the ranks; all ranks make the same calls in the same order. Here: one rank by itself."""

    rank, world_size = 0, 1

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on all ranks."""
        return value

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order, on all ranks."""
        return [value]

    def close(self) -> None:
        """Leave all groups of `torch.distributed`, which engines may use for one rank as well."""
        if dist.is_initialized():
            dist.destroy_process_group()


class RankGroup(Ranks):
    """The ranks of `torch.distributed`, which must be initialised.

    A message to a rank that has ended, or does not answer within `timeout` seconds, raises TimedOutError.
    """

    def __init__(self, timeout: float) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def broadcast(self, value: T) -> T:
        box: list[Any] = [value if self.rank == 0 else None]
        with _timeouts():
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        box: list[Any] = [None] * self.world_size
        with _timeouts():
            dist.all_gather_object(box, value, group=self._group)
        return box


class RankError(SyncdError):
    """A rank met an error that is none of syncd's."""

    code = "rank_failed"


def all_or_error(ranks: Ranks, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do this rank's part of something, and return what it returned if all ranks succeeded."""
    done: list[T] = []
    error: SyncdError | None = None
    try:
        done.append(work(*args, **kwargs))
    except SyncdError as raised:
        error = _portable(raised)
    except Exception as raised:  # noqa: BLE001 - the other ranks must know, whatever it is
        error = RankError(f"rank {ranks.rank}: {type(raised).__name__}: {raised}")
    raise_gravest(ranks.gather(error))
    return done[0]


def rank0_or_error(ranks: Ranks, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Do something on rank 0 alone, and return what it returned there, None on the other ranks."""
    return (
        all_or_error(ranks, work, *args, **kwargs) if ranks.rank == 0 else all_or_error(ranks, lambda: None)
    )


def raise_gravest(errors: list[SyncdError | None]) -> None:
    raised = [error for error in errors if error is not None]
    if raised:
        raise_agreed(min(raised, key=lambda error: isinstance(error, PASSING)))


def raise_agreed(error: SyncdError) -> NoReturn:
    """Raise an error that every rank raises, marked as such."""
    error.add_note(_AGREED)
    raise error


def is_agreed(error: BaseException) -> bool:
    """Return whether all ranks have raised this error, so that one of them reports it."""
    return _AGREED in getattr(error, "__notes__", ())


def _portable(error: SyncdError) -> SyncdError:
    """Return the error without its traceback and causes, which cannot be sent to other ranks."""
    copy = type(error)(error.message, path=error.path, hint=error.hint)
    copy.__cause__ = copy.__context__ = None
    return copy


@contextlib.contextmanager
def _timeouts() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what gloo raises, for a timeout and for a connection that was closed
        raise _lost(error) from error


def lost_rank(error: BaseException) -> TimedOutError | None:
    """Return the error of this tree for a collective that failed because of another rank, None for other errors.

    gloo raises nothing more special than a RuntimeError with the place in its source.
    """
    is_lost = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))
    return _lost(error) if is_lost else None


def _lost(error: BaseException) -> TimedOutError:
    # gloo's second sentence guesses at bugs.
    reason = first_line(error).partition(". ")[0]
    return TimedOutError(
        f"another rank has ended or does not answer: {reason}",
        hint="read the log of the rank that failed first",
    )
