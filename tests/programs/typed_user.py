"""Code as a user writes it against the public names. `make lint` checks it with `mypy --strict`; tests run it.

Each `assert_type` fails in mypy if the name loses its type, for example because it becomes `Any`.
"""

import asyncio
import sys
import threading
from typing import TYPE_CHECKING, assert_type

import trainer
from explorer_hooks.hook import Hook, HookOptions, Running
from syncd.client.client import Client
from syncd.client.follow import Leased
from syncd.client.state_dict import TensorData
from syncd.client.wait import cancelled_by
from syncd.experience.writer import ExperienceWriter
from syncd.protocol.layout import Job
from syncd.protocol.version import Pair, Version
from syncd.synchronizer import AsyncSynchronizer, Synchronizer
from syncd.transports.base import WeightDirectory

if TYPE_CHECKING:
    from syncd.jobfile.model import JobFile


class OwnHook(Hook):
    """A hook of the user's own."""

    name = "own"

    def __init__(self) -> None:
        self.label: str | None = None

    @classmethod
    def from_options(cls, options: HookOptions) -> "OwnHook":
        assert_type(options.address, str | None)
        return cls()

    def prepare(self, target: WeightDirectory) -> None:
        assert_type(target.path, str)

    def load(self, target: WeightDirectory) -> None:
        self.label = target.label

    def commit(self, target: WeightDirectory) -> None:
        """Do nothing: the label is served already."""

    def current_version(self) -> Running:
        return Running(self.label)

    def abort(self, last_good: WeightDirectory | None) -> None:
        self.label = last_good.label if last_good else None


def train(job: str) -> None:
    """Publish a step as a trainer does."""
    state = {"w": TensorData("F32", (1,), bytes(4))}
    with Synchronizer.open(
        job, "trainer", timeout=60.0, poll=0.01, heartbeat=True, ttl=60.0, state_dir=None
    ) as sync:
        assert_type(sync, Synchronizer)
        sync.set_model_state_dict(state, 1)
        assert_type(sync.announced_step(), int | None)


def explore(job: str) -> None:
    """Look for a version as an explorer does, and write an experience."""
    with Client.open(job, "explorer", "e0", timeout=1.0) as client, cancelled_by(threading.Event()):
        assert_type(client, Client)
        version = client.latest_version()
        assert_type(version, Version | None)
        assert_type(client.confirmed, Pair | None)
        if version is not None:
            with client.lease(version) as leased:
                assert_type(leased, Leased)
                assert_type(leased.path, str)
    with ExperienceWriter(Job.at(job), "e0") as writer:
        assert_type(writer, ExperienceWriter)
        assert_type(writer.upcoming, int)


async def follow(job: str) -> None:
    """Look for a version as an explorer of asyncio does."""
    async with await AsyncSynchronizer.open(job, "explorer", "e1", timeout=1.0) as sync:
        assert_type(sync, AsyncSynchronizer)
        assert_type(sync.confirmed, Pair | None)
        version: Version | None = await sync.latest_version()
        if version is not None:
            async with sync.lease(version) as leased:
                assert_type(leased, Leased)


def trained(config: "JobFile") -> None:
    """Train as a program of its own does; nothing calls it here."""
    made = trainer.Trainer.get_actor(config)
    assert_type(made, trainer.Trainer)
    assert_type(trainer.get_latest_hf_checkpoint_path(config), str | None)
    assert_type(trainer.get_trainer_wrapper(config), trainer.TrainEngineWrapper)


def main() -> None:
    """Publish a step, and look at the job from both kinds of explorer."""
    train(sys.argv[1])
    explore(sys.argv[1])
    asyncio.run(follow(sys.argv[1]))
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main()
