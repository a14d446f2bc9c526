"""Rounds that do not come about, members that come late or start again: a trainer and explorers of one process."""

import threading
from contextlib import ExitStack

import pytest
import torch

from syncd.client.client import Client
from syncd.jobfile.sections import SyncSection
from syncd.parts.broadcast.receive import BroadcastReceiver
from syncd.parts.broadcast.send import BroadcastSender
from syncd.transports.base import FILES, SendContext, WeightTensors, find_transport
from syncd.transports.ranks import Ranks

LONG = 60.0
SHAPE = (1000,)


class Member:
    """An explorer that receives in a thread."""

    def __init__(self, job, name):
        self.client = Client.open(job, "explorer", name, timeout=LONG)
        self.parameters = {"w": torch.zeros(SHAPE)}
        self.receiver = BroadcastReceiver(self.client, self.parameters)
        self.came = []

    def begin(self, current, timeout=LONG, *, only_if_wanted=False):
        def receive():
            if only_if_wanted:
                self.client.wait_for(self.receiver.is_wanted, LONG)
            came = self.receiver.wait(current, timeout)
            if isinstance(came, WeightTensors):
                self.receiver.load(came)
            self.came.append(came)

        self.thread = threading.Thread(target=receive)
        self.thread.start()

    def end(self):
        self.thread.join(LONG)
        return self.came[-1]

    def close(self):
        self.receiver.close()
        self.client.close()


@pytest.fixture
def closing():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def trainer(tmp_path, closing):
    (tmp_path / "job").mkdir()
    return closing.enter_context(Client.open(tmp_path / "job", "trainer"))


@pytest.fixture
def member(trainer, closing):
    """Return what opens an explorer."""

    def opened(name="e0"):
        made = Member(trainer.job.root, name)
        closing.callback(made.close)
        return made

    return opened


@pytest.fixture
def sender(trainer, closing):
    """Return what opens the trainer's end; it returns what broadcasts a step and returns whether that worked."""

    def opened(**settings):
        given = SyncSection(dtype="keep", broadcast_timeout=LONG, **settings)
        context = SendContext(trainer.job, Ranks(), given, client=trainer)
        made = BroadcastSender(context, find_transport(FILES).open_sender(context))
        closing.callback(made.close)
        return lambda step: made.broadcast(
            step, f"save-{step}", lambda: [("w", torch.full(SHAPE, float(step)))]
        )

    return opened


def test_an_explorer_that_has_started_again_by_its_name_takes_part_in_the_next_broadcast(sender, member):
    broadcast, first = sender(ready_timeout=LONG), member()
    first.begin(0)
    assert broadcast(1)
    first.end()
    first.close()
    second = member()
    second.begin(1)
    assert broadcast(2)
    second.end()
    assert second.parameters["w"].eq(2).all()
