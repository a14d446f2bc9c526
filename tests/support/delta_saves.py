"""A trainer that stores deltas beside one that stores the same weights whole: steps are compared byte for byte."""

import os
import uuid
from dataclasses import dataclass, field

import torch

from support.jobs import start
from support.presences import BeatingPublisher
from syncd.client.client import Client
from syncd.jobfile.sections import SyncSection
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.manifest import Manifest, read_manifest
from syncd.protocol.presence import Presence, RunningStatus
from syncd.transports.base import SendContext, StepContent
from syncd.transports.delta.materialise import materialise, prove
from syncd.transports.files.send import FilesSender
from syncd.transports.host_memory import HostMemory, unlimited
from syncd.transports.ranks import Ranks


def explorer(job: Job, name: str, *reads: str) -> BeatingPublisher:
    """Return the published presence of a living explorer."""
    presence = Presence(name, incarnation=uuid.uuid4().hex, reads=reads)
    publisher = BeatingPublisher(job.disk, SystemClock(), job.explorers, presence)
    publisher.prepare()
    publisher.update(status=RunningStatus.RUNNING)
    return publisher


FILES = {"config.json": b"{}"}


class Weights:
    """Weights of several tiles and of awkward lengths and dtypes, and what training changes of them."""

    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.tensors = {
            "embed": torch.randn(3000, 1700) * 0.02,
            "layer": torch.randn(1200, 1024) * 0.02,
            "count": torch.arange(37),
            "half": torch.randn(4001).to(torch.float16),
        }

    def train(self, share: float = 0.02) -> "Weights":
        """Change a share of the values a little."""
        for name in ("embed", "layer"):
            chosen = torch.rand_like(self.tensors[name]) < share
            self.tensors[name][chosen] *= 1.01
        self.tensors["count"][3] += 1
        return self


@dataclass
class DeltaTrainer:
    """A rank whose steps are stored as its explorers can read them, beside one whose steps are all whole.

    Args:
        place: A directory.
        ranks: The ranks of this trainer.
        sync: Keys of `[sync]`.
        memory: The budget of this rank.
        keep_last: Steps that the daemon keeps.
    """

    place: str
    ranks: Ranks = field(default_factory=Ranks)
    sync: dict = field(default_factory=dict)
    memory: HostMemory = field(default_factory=unlimited)
    keep_last: int = 100

    def __post_init__(self) -> None:
        for name in ("job", "whole"):
            os.makedirs(f"{self.place}/{name}", exist_ok=True)
        self.job, self.plain_job = Job.at(f"{self.place}/job"), Job.at(f"{self.place}/whole")
        self.client = Client.open(self.job.root, "trainer") if self.ranks.rank == 0 else None
        self.daemon, self.clock = None, None
        if self.ranks.rank == 0:
            self.daemon, _, self.clock = start(self.job, keep_last=self.keep_last)
        settings = SyncSection(save_timeout=60.0, **({"delta": "on"} | self.sync))
        context = SendContext(self.job, self.ranks, settings, self.client, memory=self.memory)
        self.sender = FilesSender.open(context)
        same = {key: value for key, value in self.sync.items() if key == "dtype"}
        plain = SyncSection(delta="off", save_timeout=60.0, **same)
        self.plain = FilesSender.open(SendContext(self.plain_job, self.ranks, plain))

    def store(self, step: int, export, must_be_whole: str = "", copy=None) -> None:
        """Store a step in both jobs, and have the daemon publish it."""
        self.store_whole(step, export)
        self.store_changes(step, export, must_be_whole, copy)
        if self.daemon is not None:
            self.daemon.tick()

    def store_whole(self, step: int, export) -> None:
        """Store a step in the job whose steps are all whole."""
        self._save(self.plain, step, StepContent(export, FILES))

    def store_changes(self, step: int, export, must_be_whole: str = "", copy=None) -> None:
        """Store a step in the other one."""
        self._save(self.sender, step, StepContent(export, FILES, must_be_whole=must_be_whole), copy)

    def _save(self, sender: FilesSender, step: int, content: StepContent, copy=None) -> None:
        sender.send(step, self.ranks.broadcast(uuid.uuid4().hex), content, copy)
        sender.wait()

    def close(self) -> None:
        """End the trainer."""
        self.sender.close()
        self.plain.close()
        if self.client is not None:
            self.client.close()


def form_of(job: Job, step: int) -> str:
    """Return how a step is stored: whole, shortcut or delta."""
    manifest = read_manifest(job.disk, job.step(step))
    assert not manifest.shortcut_problem
    return "delta" if manifest.kind == "delta" else "shortcut" if manifest.shortcut else "whole"


def assert_same(trainer_place: str, step: int, scratch: str) -> Manifest:
    """Compare what the chain of a step makes with what the whole save has, by every byte."""
    job, plain = Job.at(f"{trainer_place}/job"), Job.at(f"{trainer_place}/whole")
    target = f"{scratch}/{uuid.uuid4().hex}"
    assert prove(job, step) == []
    materialise(job, step, target)
    expected = f"{plain.step(step)}/actor"
    names = {name for name in os.listdir(expected) if not name.startswith(".")}
    assert set(os.listdir(target)) == names
    for name in names:
        with open(f"{target}/{name}", "rb") as found, open(f"{expected}/{name}", "rb") as wanted:
            assert found.read() == wanted.read(), f"step {step}: {name}"
    return read_manifest(job.disk, job.step(step))
