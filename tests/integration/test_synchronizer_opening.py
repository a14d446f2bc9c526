"""Opening: what is interrupted leaves nothing behind that looks alive, and a name has one owner."""

import asyncio
import threading
import time

import pytest

from syncd.client.client import Client
from syncd.client.wait import WaitCancelledError, cancelled_by
from syncd.errors import UsageError
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.presence import Presence, RunningStatus, path_of, read_presence, write_presence
from syncd.synchronizer import AsyncSynchronizer, Synchronizer


@pytest.fixture
def job(tmp_path):
    return Job.at(tmp_path)


def said(job, identity="e0"):
    return read_presence(job.disk, path_of(job.explorers, identity))


class HookedClock(SystemClock):
    """A clock in whose first sleep something happens: `open` sleeps once it has published its presence."""

    def __init__(self, hook):
        self._hook = hook

    def sleep(self, seconds):
        self._hook()


def test_an_interrupted_open_leaves_the_status_stopped(job):
    def press():
        assert said(job).status is RunningStatus.RUNNING
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Client.open(job.root, "explorer", "e0", clock=HookedClock(press), heartbeat=False)
    assert said(job).status is RunningStatus.STOPPED


def test_a_cancelled_open_leaves_the_status_stopped(job):
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(WaitCancelledError), cancelled_by(cancel):
        Client.open(job.root, "explorer", "e0", heartbeat=False)
    assert said(job).status is RunningStatus.STOPPED


def test_an_open_cancelled_at_its_last_step_is_closed(job, monkeypatch):
    beat = Client.beat
    monkeypatch.setattr(Client, "beat", lambda self: (time.sleep(0.3), beat(self)))

    async def run():
        task = asyncio.create_task(AsyncSynchronizer.open(job.root, "explorer", "e0"))
        await asyncio.sleep(0.15)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert said(job).status is RunningStatus.STOPPED


def test_of_two_concurrent_claims_of_an_identity_one_wins(job):
    winner = Presence("e0", incarnation="the other")
    clock = HookedClock(lambda: write_presence(job.disk, job.explorers, winner))
    with pytest.raises(UsageError, match="in use by another"):
        Client.open(job.root, "explorer", "e0", clock=clock, heartbeat=False)
    assert said(job).incarnation == "the other"


def test_a_missing_identity_is_generated(job):
    with Synchronizer.open(job.root, "explorer") as one, Synchronizer.open(job.root, "trainer") as other:
        assert str(said(job, one.identity).pid) in one.identity
        assert other.identity == "trainer"
    with Synchronizer.open(job.root) as observer:
        assert observer.identity is None


@pytest.mark.parametrize(
    ("role", "identity"), [("daemon", "x"), ("explorer", "../x"), ("explorer", ".x"), ("explorer", "a" * 101)]
)
def test_invalid_roles_and_identities_are_refused(job, role, identity):
    with pytest.raises(UsageError):
        Synchronizer.open(job.root, role, identity)


def test_a_synchronizer_may_use_an_external_state_directory(job, tmp_path_factory):
    state = tmp_path_factory.mktemp("state")
    with Synchronizer.open(job.root, "explorer", "e0", state_dir=state):
        assert (state / "explorers" / "e0.json").exists()
    assert job.disk.list(job.root) == []


def test_an_error_of_the_body_hides_an_error_of_closing(job, monkeypatch):
    def broken(self):
        raise UsageError("closing fails")

    monkeypatch.setattr(Client, "close", broken)
    with pytest.raises(ZeroDivisionError), Synchronizer.open(job.root, "observer"):
        _ = 1 / 0
    with pytest.raises(UsageError, match="closing fails"), Synchronizer.open(job.root, "observer"):
        pass


@pytest.mark.parametrize("value", [float("nan"), object(), {1}, "x" * 2**20])
def test_facts_that_no_presence_can_hold_are_refused_and_the_heart_beats_on(job, value):
    with Client.open(job.root, "explorer", "e0", heartbeat=False) as client:
        for now in (True, False):
            with pytest.raises(UsageError):
                client.describe({"fact": value}, now=now)
        client.describe({"other": 1})
        assert said(job).info["other"] == 1
        assert "fact" not in said(job).info
