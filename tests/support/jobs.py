"""Real jobs for tests: steps by the protocol's own writer, a clock moved by hand, an observer that records."""

import json
import uuid

from support.presences import BeatingPublisher
from syncd.config import DaemonConfig
from syncd.daemon.service import Daemon
from syncd.observe.events import Event
from syncd.protocol.layout import Job
from syncd.protocol.manifest import Manifest
from syncd.protocol.presence import Presence
from syncd.protocol.writer import StepWriter


class ManualClock:
    """A clock that moves when told; sleeping moves it."""

    def __init__(self, at: float = 1000.0) -> None:
        self.at = at

    def monotonic(self) -> float:
        return self.at

    def time(self) -> float:
        return 1.7e9 + self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


class Recorder:
    """Remembers every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, event: Event) -> None:
        self.events.append(event)

    def names(self, *, debug: bool = False) -> list[str]:
        return [event.name for event in self.events if debug or event.level != "debug"]

    def of(self, name: str) -> list[dict]:
        return [dict(event.fields) for event in self.events if event.name == name]


def shard_bytes(tensors: dict[str, tuple[int, ...]], salt: int = 0) -> bytes:
    """Return a safetensors file of F32 tensors by shape, filled from a salt."""
    header, data = {}, b""
    for name, shape in tensors.items():
        count = 1
        for length in shape:
            count *= length
        piece = bytes((salt + place) % 251 for place in range(count * 4))
        header[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(piece)],
        }
        data += piece
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_step(
    job: Job,
    step: int,
    world_size: int = 1,
    *,
    announce: bool = True,
    full: bool = False,
    salt: int | None = None,
) -> Manifest:
    """Write a whole step of small tensors; its content follows from the salt (the step unless given)."""
    writer = StepWriter(job, step, world_size, uuid.uuid4().hex)
    writer.begin()
    for rank in range(1, world_size + 1):
        content = shard_bytes({f"layer.{rank}.weight": (4, 8)}, step if salt is None else salt)
        shard = writer.write(f"actor/model-{rank:05d}-of-{world_size:05d}.safetensors", content, tensors=1)
        writer.receipt(rank, [shard])
    manifest = writer.seal()
    assert manifest is not None
    if full:
        job.disk.replace(f"{job.step(step)}/.full_checkpoint", b"{}\n")
    if announce:
        writer.announce()
    return manifest


def start(job: Job, clock=None, **config) -> tuple[Daemon, Recorder, ManualClock]:
    """Return a daemon that ticks by hand on a clock that moves by hand."""
    clock, recorder = clock or ManualClock(), Recorder()
    config.setdefault("verify", "header")
    return Daemon(job, DaemonConfig(**config), clock, recorder), recorder, clock


def explorer(job: Job, clock, name: str = "e0", **state) -> BeatingPublisher:
    """Return the published presence of an explorer."""
    publisher = BeatingPublisher(job.disk, clock, job.explorers, Presence(name, incarnation=uuid.uuid4().hex))
    publisher.prepare()
    publisher.update(**state)
    return publisher


def steps_of(job: Job) -> list[int]:
    """Return the steps whose directories are there."""
    prefix = "global_step_"
    return sorted(
        int(e.name.removeprefix(prefix)) for e in job.disk.list(job.root) if e.name.startswith(prefix)
    )
