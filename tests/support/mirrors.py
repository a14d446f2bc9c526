"""Mirrors in one process: a store in memory whose every call can end or pause a mirror, and jobs at both ends."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from support.deltas import SmallModel
from support.jobs import Recorder, steps_of, write_step
from syncd.client.announce import StepAnnouncer
from syncd.client.wait import Pace, Poller
from syncd.config import DaemonConfig
from syncd.daemon.service import Daemon
from syncd.errors import FencedError
from syncd.parts.mirror.ends import OvertakenError
from syncd.parts.mirror.job_source import JobSource
from syncd.parts.mirror.job_target import JobTarget
from syncd.parts.mirror.meter import Meter
from syncd.parts.mirror.mirror import Mirror
from syncd.parts.mirror.objects import Found, Listed
from syncd.parts.mirror.store import StoreRetention, StoreSource, StoreTarget
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.manifest import read_manifest
from syncd.protocol.mirror_report import MirrorReport
from syncd.protocol.owner import MirrorSource
from syncd.protocol.request import Request, write_request
from syncd.protocol.version import write_marker
from syncd.publishing import FollowingDisk, publish_export, read_export
from syncd.transports.delta.publish import publish_delta

PART = 64 << 10
PATIENCE = 90.0
"""Seconds for a step to be vacated: longer than a killed mirror's lease lasts."""


class KilledError(BaseException):
    """The process was killed: nothing of it runs any more."""


class MemoryObjects:
    """An object store in memory with a clock of its own.

    Args:
        before: Called before each call that changes something, with what it does and the name.
    """

    def __init__(self, before: Callable[[str, str], None] = lambda *_: None) -> None:
        self.address, self.before = "s3://bucket/job", before
        self.objects: dict[str, tuple[bytes, int, float]] = {}
        self.at, self.changes = 1000.0, 0
        self.calls: list[tuple[str, str]] = []
        self._lock = threading.RLock()

    def sharing(self, before: Callable[[str, str], None]) -> "MemoryObjects":
        """Return another client of the same store."""
        other = MemoryObjects(before)
        other.__dict__.update(objects=self.objects, calls=self.calls, _lock=self._lock, _of=self)
        return other

    def get(self, name: str) -> Found:
        data, tag, modified = self._at(name)
        self.calls.append(("get", name))
        return Found(data, tag, modified)

    def get_changed(self, name: str, tag: Any) -> Found | None:
        found = self.get(name)
        return None if found.tag == tag else found

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        return self.get(name).data[offset : offset + length]

    def modified(self, name: str) -> float:
        return self._at(name)[2]

    def create(self, name: str, data: bytes) -> bool:
        self._begin("create", name)
        with self._lock:
            return name not in self.objects and self._write(name, data) > 0

    def put(self, name: str, data: bytes) -> None:
        self._begin("put", name)
        self._write(name, data)

    def replace(self, name: str, data: bytes, tag: Any) -> Any:
        self._begin("replace", name)
        with self._lock:
            there = self.objects.get(name)
            if (there[1] if there else None) != tag:
                raise FencedError("another has written it")
            return self._write(name, data)

    def list(self, prefix: str) -> list[Listed]:
        self.calls.append(("list", prefix))
        with self._lock:
            found = sorted((name, one) for name, one in self.objects.items() if name.startswith(prefix))
        return [Listed(name, len(data), modified) for name, (data, _, modified) in found]

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._begin("delete", name)
            self.objects.pop(name, None)

    def _begin(self, what: str, name: str) -> None:
        self.before(what, name)
        self.calls.append((what, name))

    def _at(self, name: str) -> tuple[bytes, int, float]:
        if name not in self.objects:
            raise FileNotFoundError(name)
        return self.objects[name]

    def _write(self, name: str, data: bytes) -> int:
        owner = self.__dict__.get("_of", self)
        with self._lock:
            owner.changes += 1
            self.objects[name] = (bytes(data), owner.changes, owner.at)
            return int(owner.changes)


def kill_at(count: int) -> Callable[[str, str], None]:
    """Return what ends a mirror at its call of this number, counted from 1."""
    left = [count]

    def before(*_: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KilledError

    return before


def no_meter(rate: int = 0) -> Meter:
    return Meter(SystemClock(), rate, threading.Event())


class Push:
    """A mirror from a job into an object store."""

    def __init__(self, job: Job, objects: MemoryObjects, identity: str = "job-a", **retention: Any) -> None:
        self.recorder = Recorder()
        self.source, clock = JobSource(job), SystemClock()
        self.target = StoreTarget(
            objects, identity, StoreRetention(**retention), clock, no_meter(), self.tell, part=PART
        )
        self.mirror = Mirror(
            self.source, self.target, clock, MirrorReport(job.root, objects.address), self.tell
        )

    def tell(self, name: str, level: Any, **fields: Any) -> None:
        from syncd.observe.events import Event

        self.recorder.observe(Event(name, level, 0.0, fields))

    def run(self, most: int = 200) -> None:
        """Turn until there is nothing to do."""
        for _ in range(most):
            with contextlib.suppress(OvertakenError):
                if not self.mirror.turn():
                    return
        raise AssertionError("it does not come to an end")

    def close(self) -> None:
        self.source.close()


class TickingClock(SystemClock):
    """A clock whose sleep lets a daemon of the same thread work."""

    def __init__(self) -> None:
        self.tick: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.tick()
        super().sleep(min(seconds, 0.002))


class Pull:
    """A mirror from an object store, or from a job, into a job that it leads."""

    def __init__(
        self, source: MemoryObjects | Job, job: Job, meter: Meter | None = None, **config: Any
    ) -> None:
        self.recorder, self.clock = Recorder(), TickingClock()
        self.job = job
        config.setdefault("trash_grace", 0.0)
        name = source.root if isinstance(source, Job) else source.address
        self.daemon = Daemon(
            job, DaemonConfig(**config), self.clock, self.recorder, mirror_of=MirrorSource(name, "")
        )
        self.source = JobSource(source) if isinstance(source, Job) else StoreSource(source, part=PART)
        self.target = JobTarget(job, self.daemon, self.tick, self.clock, meter or no_meter())
        self.clock.tick = self.tick
        self.mirror = Mirror(
            self.source, self.target, self.clock, MirrorReport(name, job.root), self.daemon.report
        )

    def tick(self) -> None:
        self.daemon.tick(woken=True)

    def run(self, most: int = 200) -> None:
        """Turn until there is nothing to do."""
        for _ in range(most):
            self.tick()
            if not self.mirror.turn():
                self.tick()
                return
        raise AssertionError("it does not come to an end")

    def close(self) -> None:
        self.source.close()
        self.target.close()
        self.daemon.close()

    @property
    def pair(self) -> tuple[int, int] | None:
        version = self.daemon.snapshot.version
        return version.pair if version else None


class Trainer:
    """The job at the near end: steps by the protocol's writer, published by a real daemon."""

    def __init__(self, job: Job, **config: Any) -> None:
        self.job, self.recorder = job, Recorder()
        config = {"keep_last": 4, "trash_grace": 0.0, "rewind_settle": 0.0, **config}
        self.daemon = Daemon(job, DaemonConfig(**config), SystemClock(), self.recorder)
        self.clock = TickingClock()
        self.clock.tick = self.tick
        self._model, self._exports, self._place = SmallModel(), 0, f"{job.root}-exports"

    def tick(self) -> None:
        self.daemon.tick(woken=True)

    def keyframe(self, step: int, salt: int | None = None) -> None:
        """Write a step stored whole, and publish it."""
        write_step(self.job, step, world_size=2, salt=salt)
        self.tick()

    def model(self, step: int) -> None:
        """Write a small model stored whole, and publish it; deltas can follow."""
        disk, export = FollowingDisk(), self._export(step)
        publish_export(self.job, step, disk, read_export(disk, export), rewind=True)
        self.tick()

    def delta(self, step: int, parent: int) -> None:
        """Train the small model a little, and publish what changed since a step."""
        disk, export = FollowingDisk(), self._export(step)
        manifest, why_whole = publish_delta(
            self.job,
            step,
            disk,
            read_export(disk, export),
            parent,
            rewind=True,
            allow_nonfinite=False,
            probe=None,
        )
        assert manifest.kind == "delta", why_whole
        self.tick()

    def rewind(self, step: int) -> None:
        """Go back to a step, and have the daemon vacate all later ones."""
        write_marker(self.job.disk, self.job.marker, step)
        ends = self.clock.monotonic() + PATIENCE
        while self.pair is None or self.pair[1] != step:
            assert self.clock.monotonic() < ends, self.pair
            self.tick()
        announcer = StepAnnouncer(self.job, None, Poller(self.clock, Pace(self.job.state, 0.01), PATIENCE))
        for later in [number for number in steps_of(self.job) if number > step]:
            announcer.vacate(later, PATIENCE)

    def roll_back(self, step: int) -> None:
        """Have the daemon publish an older step again."""
        write_request(self.job, Request("rollback", step, asked_at=self.clock.time(), reason="worse"))
        self.tick()
        assert self.pair is not None
        assert self.pair[1] == step

    @property
    def tensors(self) -> dict[str, dict[str, Any]]:
        """Return the weights of the last model or delta, by the file that holds them."""
        return self._model.shards

    def _export(self, step: int) -> str:
        self._exports += 1
        return self._model.train().export(f"{self._place}/{step}-{self._exports}")

    @property
    def pair(self) -> tuple[int, int] | None:
        version = self.daemon.snapshot.version
        return version.pair if version else None


def files_of(job: Job, step: int) -> dict[str, bytes]:
    """Return the files of a step that its manifest names, and the manifest."""
    manifest = read_manifest(job.disk, job.step(step))
    names = [record.name for record in (*manifest.shards, *manifest.files)]
    return {name: job.disk.read(f"{job.step(step)}/{name}") for name in (*names, "manifest.json")}
