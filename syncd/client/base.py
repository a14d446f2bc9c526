"""What all parts of the synchronizer share: the job, this process as a member of it, who else is there."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec, TypeVar

from syncd.client.own_presence import Member
from syncd.client.peers import Roster
from syncd.client.wait import Deadline, Pace, T, Wait, until
from syncd.errors import JobMissingError, UsageError, storage_error
from syncd.protocol.disk import MISSING, Clock, exists
from syncd.protocol.layout import Job
from syncd.protocol.version import Pair, Version, read_version

if TYPE_CHECKING:
    from syncd.protocol.rendezvous import Offer
    from syncd.protocol.round import Ahead

Role = Literal["trainer", "explorer", "observer"]
"""An observer publishes nothing of itself: a script, an evaluator, a rank that only writes shards."""

P = ParamSpec("P")
B = TypeVar("B", bound="Base")


_REMEMBERED = 256


class Memory(dict[int, T]):
    """What is known of the steps that were met last."""

    def keep(self, step: int, known: T) -> None:
        """Note what is known of a step, and forget the oldest of too many."""
        self.pop(step, None)
        self[step] = known
        if len(self) > _REMEMBERED:
            del self[next(iter(self))]


class Base:
    """One process's view of a job.

    Args:
        job: The job.
        role: What this process is.
        member: Its presence; None for an observer.
        clock: This host's clock.
        pace: How often to look.
        timeout: Seconds that a wait lasts unless it is told otherwise.
        rosters: The job's trainers and explorers.
    """

    def __init__(
        self,
        job: Job,
        role: Role,
        member: Member | None,
        *,
        clock: Clock,
        pace: Pace,
        timeout: float,
        rosters: tuple[Roster, Roster],
    ) -> None:
        self.job, self.role, self.clock, self.pace, self.timeout = job, role, clock, pace, timeout
        self.trainers, self.explorers = rosters
        self.fence = ""
        """A directory through which steps are announced (`StepWriter`): who loses it announces nothing any more."""
        self._member = member
        self._announcing = threading.Lock()
        self._group: Offer | None = None
        self._announced: tuple[int, str] | None = None
        self._ahead: Ahead | None = None
        self._versions: Memory[Version] = Memory()
        self._followed: Memory[Pair] = Memory()
        self._looked_at_trainers = float("-inf")

    @property
    def identity(self) -> str | None:
        """Return the name of this process in the job; None for an observer."""
        return self._member.identity if self._member else None

    def check(self) -> None:
        """Raise what has gone wrong in the background since the last call."""
        if self._member is not None:
            self._member.check()

    def _as(self, role: Role, what: str) -> Member:
        """Return the member, for what only one role may do."""
        if self._member is None or self.role != role:
            raise UsageError(f"{what} is for the role {role}; this one is {self.role}")
        return self._member

    def _until(self, look: Callable[[], T | None], timeout: float | None, what: str) -> Wait[T]:
        deadline = Deadline(self.clock, self.timeout if timeout is None else timeout)
        return until(look, deadline, self.pace, self.clock, what=what, hint=f"syncd watch {self.job.root}")

    def _published(self) -> Version | None:
        """Return the published version as its server has it now."""
        try:
            self.job.disk.refresh(self.job.state)
        except MISSING:
            if not exists(self.job.disk, self.job.root):
                raise missing_job(self.job.root) from None
            return None
        return read_version(self.job)


def checked(client: Base, wait: Wait[T]) -> Wait[T]:
    """Return a wait that first raises what went wrong in the background, and only errors of this project."""
    with reported(client.job.root):
        client.check()
        return (yield from wait)


def missing_job(root: str) -> JobMissingError:
    """Return the error for a job directory that is not there: nothing is created in what may be unmounted."""
    return JobMissingError("the job directory is not there", path=root, hint=f"mkdir -p {root}")


@contextlib.contextmanager
def reported(path: str) -> Iterator[None]:
    """Turn what the operating system raises into an error of this project."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path) from error


def public(method: Callable[Concatenate[B, P], T]) -> Callable[Concatenate[B, P], T]:
    """Make a method raise what went wrong in the background first, and only errors of this project."""

    @functools.wraps(method)
    def call(self: B, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self.check()
        with reported(self.job.root):
            return method(self, *args, **kwargs)

    return call
