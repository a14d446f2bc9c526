"""Terms: one daemon leads a job, and one that has been replaced can no longer publish or delete.

The lock is a directory of terms, `daemon.lock/<token>/`. It needs no flock, which NFSv3 does not carry between hosts:

- A term is claimed by renaming a prepared directory to the next free token. A term's directory is never empty
  and a directory cannot be renamed over a full one, so exactly one claimer gets each token.
- A claim counts only if a listing made after it shows no higher token. Only the leader of a higher term removes
  the highest one.
- The leader rewrites `leader.json` in its term. A candidate claims the next token if it sees that file unchanged
  for `timeout` seconds of its own clock, or sees that the process has ended on this host, or reads that the leader
  released its term.
- Fencing: what a leader renames into place it first writes to `daemon.lock/<token>/<identity>/`, and what it removes
  it first renames into `trash/<token>/<identity>/`. A new leader removes both directories of all earlier terms before
  it acts. From then on the server itself refuses the renames of a leader that was paused and wakes up.
- The identity is random and made for one claim. If somebody removes the state directory, tokens begin again
  at 1, and two leaders may hold one token; but neither has a place of that identity in the other's term.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from syncd.errors import FencedError, TermLostError
from syncd.protocol.disk import MISSING, Clock, DirectoryEntry, list_if_there, temporary_name
from syncd.protocol.documents import SMALL_LIMIT, encode, read_document, record_from
from syncd.protocol.layout import Job
from syncd.protocol.process import Process, host_name
from syncd.protocol.version import Pair, pair_document, pair_from

if TYPE_CHECKING:
    from syncd.protocol.entry_problem import EntryProblem

TIMEOUT = 15.0  # seconds without a heartbeat after which a leader on another host is replaced
BEAT = 2.0  # seconds between two heartbeats of a leader
LEADER = "leader.json"  # the file of a term that says who leads

_DIGITS = 10
MAX_TOKEN = 10**_DIGITS - 1  # the highest token that has a name

_CLAIM_IDENTITY = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Leader:
    identity: str  # unique name of this claim
    host: str = field(default_factory=host_name)  # where the leader runs, for people to read
    process: Process = field(default_factory=Process.current)
    beat: int = 0  # grows with every heartbeat
    released: bool = False  # it has ended and waits for nobody
    floor: Pair | None = None  # the highest pair that it has published or knew of


def parse_token(name: str) -> int | None:
    """Return the token of a term's directory name, None for other names."""
    return int(name) if len(name) == _DIGITS and name.isascii() and name.isdigit() else None


def token_name(token: int) -> str:
    return f"{token:0{_DIGITS}d}"


def is_private(entry: DirectoryEntry) -> bool:
    """Return whether an entry of a term's directory belongs to one claim alone: its name is the claim's identity."""
    return entry.kind == "directory" and _CLAIM_IDENTITY.fullmatch(entry.name) is not None


def read_leader(job: Job, token: int) -> Leader:
    fields = read_document(job.disk, f"{job.lock}/{token_name(token)}/{LEADER}", SMALL_LIMIT)
    floor = pair_from(fields.optional_record("floor"))
    return record_from(Leader, fields, "host", "process", "beat", floor=floor)


def latest_token(job: Job, directory: str = "") -> int:
    """Return the highest token of a term that has a directory in the lock, or in another place; 0 if none has."""
    tokens = (parse_token(entry.name) for entry in list_if_there(job.disk, directory or job.lock))
    return max((token for token in tokens if token), default=0)


class Term:
    """The leadership of this process: its token, its heartbeat, its staging places; with `removes` also a trash."""

    def __init__(self, job: Job, clock: Clock, token: int, leader: Leader, *, removes: bool = True) -> None:
        self.job, self.token, self.removes, self.identity = job, token, removes, leader.identity
        # Another leader may get this directory as well; in the other two, this leader and nobody else writes what it
        # publishes, and moves what it removes.
        self.directory = f"{job.lock}/{token_name(token)}"
        self.record = f"{self.directory}/{LEADER}"
        self.staging = f"{self.directory}/{self.identity}"
        self.trash = f"{job.trash}/{token_name(token)}/{self.identity}"
        self._clock, self._leader = clock, leader
        self._beaten = clock.monotonic()
        self.left: tuple[EntryProblem, ...] = ()
        """Directories of leaders that have ended which could not be removed."""

    @property
    def floor(self) -> Pair | None:
        """Return the highest pair that earlier leaders are known to have published."""
        return self._leader.floor

    def publish(self, path: str, data: bytes) -> None:
        """Replace a file as the leader of this term."""
        with self._checked():
            self.job.disk.replace(path, data, via=self.staging)

    def move_to_trash(self, source: str, name: str) -> None:
        with self._checked():
            self.job.disk.rename(source, f"{self.trash}/{name}")

    def discard(self, path: str) -> None:
        """Remove a file of the state directory; a missing one is removed already."""
        aside = self.set_aside(path)
        if aside is not None:
            with contextlib.suppress(OSError):
                self.job.disk.unlink(aside)

    def set_aside(self, path: str) -> str | None:
        """Move a file of the state directory to where this leader writes; return where it is, None without one."""
        aside = f"{self.staging}/{temporary_name(path.rpartition('/')[2])}"
        with contextlib.suppress(*MISSING), self._checked():
            self.job.disk.rename(path, aside)
            return aside
        return None

    def beat(self, floor: Pair | None) -> None:
        """Publish a heartbeat if one is due."""
        if self._clock.monotonic() - self._beaten >= BEAT or floor != self._leader.floor:
            self._write(floor=floor)

    def release(self) -> None:
        """Let a standby take over at once."""
        with contextlib.suppress(OSError, FencedError):
            self._write(released=True)

    def _write(self, **changes: Any) -> None:
        # A write that failed may have happened all the same: its number is never used for another content.
        self._leader = replace(self._leader, beat=self._leader.beat + 1)
        leader = replace(self._leader, **changes)
        self.publish(self.record, encode_leader(leader))
        self._leader, self._beaten = leader, self._clock.monotonic()

    def confirm(self) -> None:
        """Check that this term is still the newest on disk."""
        newest = latest_token(self.job)
        if newest > self.token:
            raise FencedError(
                f"the daemon of term {newest} has taken over from term {self.token}", path=self.job.root
            )
        self._check_there(self.staging)

    def _check_there(self, path: str) -> None:
        # A listing asks the server; the absence of a name may be cached.
        above, _, name = path.rpartition("/")
        if all(entry.name != name for entry in list_if_there(self.job.disk, above)):
            raise TermLostError(f"term {self.token} of this daemon was removed from the disk", path=path)

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        """Raise an error of the block as a fence if a newer leader has taken over."""
        try:
            yield
        except OSError as error:
            # Only reading the terms tells a fence from a passing fault of the file system.
            with contextlib.suppress(OSError):
                try:
                    self.confirm()
                    if self.removes:
                        self._check_there(self.trash)
                except FencedError as fenced:
                    raise fenced from error
            raise


def encode_leader(leader: Leader) -> bytes:
    return encode({**asdict(leader), "floor": pair_document(leader.floor)})
