"""What fails on one rank fails on all, with the same error, so that no two ranks go on differently."""

from collections.abc import Callable

from syncd.errors import StorageError, SyncdError, TimedOutError
from syncd.transports.ranks import Ranks

PASSING = (StorageError, TimedOutError)
"""What may be over the next time: the disk was full, a rank was slow."""


_KNOWN = "on all ranks"


class RankError(SyncdError):
    """A rank met something that no other error of ours describes."""

    code = "rank_failed"


def raise_on_all(error: SyncdError) -> None:
    """Raise an error that every rank raises."""
    raise _known(error)


def agreed(ranks: Ranks, work: Callable[[], object]) -> None:
    """Do a rank's part of something and learn whether all ranks succeeded.

    Raises:
        SyncdError: A rank failed; all ranks raise the same error, the gravest one.
    """
    found = ranks.gather(_error_of(ranks.rank, work))
    errors = [error for error in found if error is not None]
    if errors:
        raise _known(min(errors, key=lambda error: isinstance(error, PASSING)))


def is_known(error: BaseException) -> bool:
    """Say whether all ranks have raised this error, so that one of them tells it."""
    return _KNOWN in getattr(error, "__notes__", ())


def _error_of(rank: int, work: Callable[[], object]) -> SyncdError | None:
    try:
        work()
    except SyncdError as error:
        return _plain(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        return RankError(f"rank {rank}: {type(error).__name__}: {error}")
    return None


def _known(error: SyncdError) -> SyncdError:
    error.add_note(_KNOWN)
    return error


def _plain(error: SyncdError) -> SyncdError:
    """Return the error without what cannot travel: its traceback and causes."""
    copy = type(error)(error.message, path=error.path, hint=error.hint)
    copy.__cause__ = copy.__context__ = None
    return copy
