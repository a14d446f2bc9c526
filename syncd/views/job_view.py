"""Reads a job without leading it or writing to it: steps, version, and who is alive.

Clocks of two hosts are never compared. One reading therefore cannot tell who is alive: a module that has not left is
`unknown` until its heartbeat changes (`alive`), or has not changed for its whole time to live (`dead`).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from syncd.daemon.scan import Scanner
from syncd.daemon.snapshot import Module, Snapshot
from syncd.errors import CorruptDataError, SyncdError, storage_errors
from syncd.protocol.disk import MISSING, Clock
from syncd.protocol.entry_problem import read_problem
from syncd.protocol.job_end import JobEnd, read_end
from syncd.protocol.layout import Job
from syncd.protocol.leadership import TIMEOUT, Leader, latest_token, read_leader
from syncd.protocol.mirror_report import mirror_of_presence
from syncd.protocol.mount import Mount, mount_of
from syncd.protocol.owner import MirrorSource, mirrored_from
from syncd.protocol.permissions import parse_config
from syncd.protocol.presence import TTL, Liveness, Presence, RunningStatus
from syncd.protocol.process import Process
from syncd.stall import host_state
from syncd.stall.host_state import HostFile

RECONCILE = 60.0
"""Seconds between two readings of everything; between them only what may have changed is read."""

_STEP = 0.25
_JOB_FILE = "job.toml"
_FILE_LIMIT = 1 << 20


class Heart(StrEnum):
    """Whether a module or a daemon is alive.

    alive: its heartbeat was seen to change, or it is a running process of this host. dead: its heartbeat has not
    changed for its time to live, or its process has ended. left: it has stopped in order. unknown: not watched yet.
    """

    ALIVE = "alive"
    DEAD = "dead"
    LEFT = "left"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Lead:
    term: int  # its token
    leader: Leader | None  # what its leader has published about itself, None if that cannot be read
    heart: Heart  # whether the leader is alive


@dataclass(frozen=True, slots=True)
class JobView:
    job: Job
    at: float  # seconds since the epoch on this host's clock
    snapshot: Snapshot  # what the scanner found; of the modules only the dead are marked as such
    lead: Lead | None  # the newest term, None before the first daemon
    hearts: Mapping[str, Heart]  # of `explorer/<id>` and `trainer/<id>`
    mount: Mount  # the file system of the job
    problems: Mapping[str, str]  # what is wrong with files, by name
    host_report: HostFile | None = None  # what a daemon of this host reports, None without one
    # What the scanner found: with the modules that cannot be read, as retention must see them.
    scanned: Snapshot = field(default_factory=Snapshot)
    end: JobEnd | None = None  # how the job has finished, None if it has not or a trainer may still run
    # How many files can still be made on its file system, None where no number bounds it.
    inodes: int | None = None
    # Of a job without steps: `job.toml` beside it, as `syncd init` writes it, empty if there is none.
    job_file: str = ""
    mirror_of: MirrorSource | None = None  # what a mirror copies into the job, None of a job of its own


class JobViewer:
    """Reads a job again and again; each reading adds to what is known of heartbeats.

    A module counts as dead after `ttl` seconds without a heartbeat, a daemon after `takeover` seconds.
    """

    def __init__(self, job: Job, clock: Clock, ttl: float = TTL, takeover: float = TIMEOUT) -> None:
        self._job, self._clock = job, clock
        self._scanner = Scanner(job, clock, ttl)
        self._modules, self._daemons = _Pulse(ttl), _Pulse(takeover)
        self._mount = mount_of(job.root)
        self._reconciled = float("-inf")
        self._free: int | None = None

    def read(self) -> JobView:
        """Read everything; within a minute of that, read only what may have changed."""
        with storage_errors(self._job.root):
            return self._read()

    def read_until_known(self, seconds: float) -> JobView:
        """Read until it is known of every module whether it is alive, for `seconds` at most."""
        ends, view = self._clock.monotonic() + seconds, self.read()
        while _is_open(view) and (left := ends - self._clock.monotonic()) > 0:
            self._clock.sleep(min(_STEP, left))
            view = self.read()
        return view

    def _read(self) -> JobView:
        self._scanner.check_root()
        snapshot = self._scan()
        self._free = snapshot.free if snapshot.free is not None else self._free
        explorers, problems = self._presences("explorer", self._job.explorers)
        trainers, wrong_trainers = self._presences("trainer", self._job.trainers)
        hearts = self._hearts({**explorers, **trainers})
        lead, wrong_lead = self._lead()
        return JobView(
            job=self._job,
            at=self._clock.time(),
            snapshot=replace(
                snapshot,
                explorers=_marked(explorers, hearts),
                trainers=_marked(trainers, hearts),
                free=self._free,
            ),
            lead=lead,
            hearts=hearts,
            mount=self._mount,
            problems={**problems, **wrong_trainers, **wrong_lead},
            host_report=host_state.find(self._job.root),
            scanned=snapshot,
            end=None if _may_train(hearts) or not snapshot.steps else read_end(self._job),
            inodes=self._job.disk.inodes(self._job.root),
            job_file="" if snapshot.steps else _job_file(self._job),
            mirror_of=mirrored_from(self._job),
        )

    def _scan(self) -> Snapshot:
        now = self._clock.monotonic()
        if now - self._reconciled < RECONCILE:
            return self._scanner.scan(woken=True)
        snapshot = self._scanner.reconcile()
        self._reconciled = now
        return snapshot

    def _hearts(self, everybody: Mapping[str, Presence]) -> dict[str, Heart]:
        beats = {name: (presence.incarnation, presence.beat) for name, presence in everybody.items()}
        judged = self._modules.judge(self._clock.monotonic(), beats)
        # A mirror takes no part in the job, so it has stopped from the first, and still beats.
        left = {
            name
            for name, presence in everybody.items()
            if presence.status is RunningStatus.STOPPED and mirror_of_presence(presence) is None
        }
        return {name: Heart.LEFT if name in left else heart for name, heart in judged.items()}

    def _presences(self, kind: str, directory: str) -> tuple[dict[str, Presence], dict[str, str]]:
        """Return the presences of a kind, and what is wrong with the files of others, by `<kind>/<id>`."""
        try:
            read, unreadable = self._scanner.presences.read(directory)
        except OSError as error:
            if read_problem(error, directory) is None:
                raise
            return {}, {}  # the snapshot reports it
        presences = {f"{kind}/{name}": presence for name, presence in read.items()}
        return presences, {f"{kind}/{name}": presence.problem for name, presence in unreadable.items()}

    def _lead(self) -> tuple[Lead | None, dict[str, str]]:
        """Return the newest term, and why it cannot be read."""
        token = 0
        try:
            token = latest_token(self._job)
            return self._lead_of(token) if token else None, {}
        except OSError as error:
            if (entry_problem := read_problem(error, self._job.lock)) is None:
                raise
            return Lead(token, None, Heart.UNKNOWN), {"lock": str(entry_problem)}

    def _lead_of(self, token: int) -> Lead:
        try:
            leader = read_leader(self._job, token)
        except (*MISSING, CorruptDataError):
            return Lead(token, None, Heart.UNKNOWN)
        judged = self._daemons.judge(self._clock.monotonic(), {leader.identity: leader.beat})
        return Lead(token, leader, _heart_of(leader, judged[leader.identity]))


class _Pulse:
    """Which heartbeats have changed since the first reading."""

    def __init__(self, ttl: float) -> None:
        self._liveness = Liveness(ttl)
        self._started: float | None = None

    def judge(self, now: float, beats: Mapping[str, object]) -> dict[str, Heart]:
        """Add a reading of all heartbeats, and return what is known of each."""
        started = self._started = now if self._started is None else self._started
        self._liveness.observe(now, beats.items())
        return {name: self._judge(name, now, now - started) for name in beats}

    def _judge(self, name: str, now: float, watched: float) -> Heart:
        if not self._liveness.is_alive(name, now):
            return Heart.DEAD
        return Heart.ALIVE if self._liveness.silent_for(name, now) < watched else Heart.UNKNOWN


def _heart_of(leader: Leader, seen: Heart) -> Heart:
    if leader.released:
        return Heart.LEFT
    if leader.process.is_gone():
        return Heart.DEAD
    here = Process.current()
    same_host = (here.boot, here.namespace) == (leader.process.boot, leader.process.namespace)
    return Heart.ALIVE if same_host and seen is Heart.UNKNOWN else seen


def _may_train(hearts: Mapping[str, Heart]) -> bool:
    """Return whether a trainer is not known to have ended."""
    running = (Heart.ALIVE, Heart.UNKNOWN)
    return any(heart in running for name, heart in hearts.items() if name.startswith("trainer/"))


def _job_file(job: Job) -> str:
    """Return `job.toml` beside the job directory if it names that directory, else nothing."""
    path = f"{os.path.dirname(job.root)}/{_JOB_FILE}"
    try:
        directory = parse_config(job.disk.read(path, _FILE_LIMIT), path)["job"]["dir"]
        names_it = os.path.normpath(os.path.join(os.path.dirname(path), directory)) == job.root
    except (OSError, SyncdError, KeyError, TypeError):
        return ""
    return path if names_it else ""


def _is_open(view: JobView) -> bool:
    lead = view.lead.heart if view.lead else Heart.LEFT
    return Heart.UNKNOWN in (lead, *view.hearts.values())


def _marked(presences: Mapping[str, Presence], hearts: Mapping[str, Heart]) -> dict[str, Module]:
    return {
        name.partition("/")[2]: Module(presence, alive=hearts[name] is not Heart.DEAD)
        for name, presence in presences.items()
    }
