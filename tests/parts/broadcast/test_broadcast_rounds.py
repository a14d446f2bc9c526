"""Rounds that do not come about, members that come late or start again: a trainer and explorers of one process."""

import threading
from contextlib import ExitStack

import pytest
import torch
from structlog.testing import capture_logs
from support.jobs import start, write_step

from syncd.client.broadcast_control import BroadcastControl
from syncd.client.client import Client
from syncd.jobfile.sections import SyncSection
from syncd.parts.broadcast.receive import BACKEND, BroadcastReceiver
from syncd.parts.broadcast.send import BroadcastSender
from syncd.protocol.broadcast_round import Round
from syncd.protocol.presence import Presence, RunningStatus
from syncd.protocol.version import Version
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


def test_an_explorer_that_asks_only_while_it_is_waited_for_takes_part_again_after_it_was_late(sender, member):
    broadcast, late = sender(ready_timeout=1.0), member()
    assert not broadcast(1)
    late.begin(0, only_if_wanted=True)
    assert any(broadcast(step) for step in range(2, 40))
    assert isinstance(late.end(), WeightTensors)


def test_an_explorer_that_is_late_is_waited_for_again_ever_more_rarely(trainer):
    class Control:
        """Says that one explorer asks and another one does not; nobody agrees on anything."""

        def members(self, _):
            statuses = {"ready": RunningStatus.REQUIRE_SYNC, "late": RunningStatus.RUNNING}
            return {name: Presence(name, status) for name, status in statuses.items()}

        def agree(self, *_, members):
            waited.append("late" in members)

    waited, settings = [], SyncSection(address="127.0.0.1")
    sender = BroadcastSender(SendContext(trainer.job, Ranks(), settings, client=trainer), None)
    for step in range(12):
        sender._open_round(Control(), step, f"save-{step}", None, None)
    assert waited == [True, False, True, *[False] * 3, True, *[False] * 5]


def test_explorers_load_files_at_once_if_no_round_follows_an_agreement(sender, member, trainer):
    """The trainer cannot listen on that address."""
    broadcast, explorer = sender(ready_timeout=LONG, address="203.0.113.5"), member()
    explorer.begin(0, timeout=30.0)
    assert not broadcast(1)
    write_step(trainer.job, 1)
    trainer.publish(None, 1)
    daemon, _, _ = start(trainer.job)
    daemon.tick()
    assert isinstance(explorer.end(), Version)


def test_a_round_that_ends_before_its_group_is_read_is_given_up_at_once(trainer, member):
    control, explorer = BroadcastControl(trainer), member()
    control.take_part(BACKEND)
    offer = control.offer_group("127.0.0.1", 9, [("w", "F32", SHAPE)], backend=BACKEND, bucket=1 << 20)
    opened = Round(1, "save-1", 1, offer.epoch, "", 5.0, {"e0": 1})
    control.open_round(opened)
    control.end_round(opened, None)
    control.drop_group()
    with capture_logs() as logs:
        assert explorer.receiver.receive(opened, LONG) is None
    assert [line["reason"] for line in logs] == ["the trainer aborted the broadcast"]
