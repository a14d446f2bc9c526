"""What feeds the choice of a way: what rank 0 knows of a sync, and what explorers say of their loads."""

from dataclasses import replace

import pytest
from support.jobs import explorer

from syncd.jobfile.sections import SyncSection
from syncd.parts.broadcast.send import BroadcastSender
from syncd.parts.memory.send import MemorySender
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.process import Process
from syncd.synchronizer import Synchronizer
from syncd.transports.base import SendContext, Sent
from syncd.transports.measured import ExplorerLoad, load_of
from syncd.transports.ranks import Ranks
from trainer import auto_method
from trainer.auto_method import BEGINNING, ORDER, Measured, MethodChooser, measured

FILES, MEMORY, BROADCAST = ORDER


def sent(method, step=2, seconds=1.0, *, is_done=True):
    return Sent(method, step, 1000, seconds, is_done, is_received=method == BROADCAST)


class Available:
    """A sender that can always send."""

    def unavailable(self):
        return ""


ALL = dict.fromkeys(ORDER, Available())


@pytest.mark.parametrize(
    ("sync", "loads", "found"),
    [
        (sent(FILES), [], None),
        (sent(FILES), [ExplorerLoad(2, "files", 0.5), ExplorerLoad(2, "stage", 2.0)], Measured(7, 1000, 3.0)),
        (sent(MEMORY), [], None),
        (
            sent(MEMORY),
            [ExplorerLoad(2, "memory", 0.5), ExplorerLoad(2, "files", 1.0)],
            Measured(7, 1000, 2.0),
        ),
        (sent(MEMORY), [ExplorerLoad(2, "files", 1.0)], Measured(7, 1000, None, 1)),
        (sent(MEMORY, is_done=False), [ExplorerLoad(2, "files", 1.0)], Measured(7, 1000, None, 1)),
        (sent(BROADCAST), [], Measured(7, 1000, 1.0)),
        (sent(BROADCAST, is_done=False), [], Measured(7, 1000, None, 1)),
    ],
)
def test_a_sync_takes_as_long_as_the_slowest_explorer_that_received_it(sync, loads, found):
    assert measured(7, sync, loads) == found


@pytest.mark.parametrize(
    "loaded",
    [None, "memory", {}, {"step": "2", "source": "files", "seconds": 1.0}, {"step": 2, "source": 3, "seconds": 1.0},
     {"step": 2, "source": "files", "seconds": "1"}, {"step": 2, "source": "files", "seconds": -1.0}],
)  # fmt: skip
def test_a_malformed_load_report_is_ignored(loaded):
    assert load_of({"loaded": loaded}) is None
    assert load_of({"loaded": {"step": 2, "source": "files", "seconds": 1}}) == ExplorerLoad(2, "files", 1.0)


@pytest.fixture
def sync(tmp_path):
    (tmp_path / "job").mkdir()
    with Synchronizer.open(tmp_path / "job", "trainer", heartbeat=False) as opened:
        yield opened


@pytest.fixture
def made(monkeypatch, sync):
    """Return a chooser, and what it was given to choose from."""
    given = []
    original = auto_method.choose_method
    monkeypatch.setattr(auto_method, "choose_method", lambda now: given.append(now) or original(now))
    return MethodChooser(sync), given


def told(sync, name="e0", boot=None, **info):
    """Publish an explorer of this host, or of another one."""
    process = {"boot": boot or Process.current().boot, "namespace": "n", "pid": 1, "started": 1}
    job = Job.at(sync.job.root)
    return explorer(job, SystemClock(), name, info={"process": process, **info})


def test_methods_are_measured_in_turn_and_the_fastest_is_chosen(sync, made):
    one, given = made
    e0 = told(sync, broadcast="gloo")
    able = ALL
    assert one.next_method(able, None) is FILES
    e0.update(info=e0.presence.info | {"loaded": {"step": 1, "source": "files", "seconds": 3.0}})
    assert one.next_method(able, sent(FILES, 1)) is MEMORY
    e0.update(info=e0.presence.info | {"loaded": {"step": 2, "source": "memory", "seconds": 0.5}})
    assert one.next_method(able, sent(MEMORY, 2)) is BROADCAST
    assert one.next_method(able, sent(BROADCAST, 3, 2.0)) is MEMORY
    assert given[-1].ways == {
        FILES: Measured(1, 1000, 4.0),
        MEMORY: Measured(2, 1000, 1.5),
        BROADCAST: Measured(3, 1000, 2.0),
    }
    assert (given[-1].number, given[-1].size, given[-1].lacking) == (4, 1000, {})


def test_a_late_load_report_is_still_counted(sync, made):
    one, given = made
    e0 = told(sync)
    able = {FILES: Available(), MEMORY: Available()}
    assert one.next_method(able, None) is FILES
    assert one.next_method(able, sent(FILES, 1)) is FILES, "nobody has loaded it yet"
    e0.update(info=e0.presence.info | {"loaded": {"step": 1, "source": "files", "seconds": 3.0}})
    assert one.next_method(able, sent(FILES, 2)) is MEMORY
    assert given[-1].ways == {FILES: Measured(1, 1000, 4.0)}


def test_files_are_measured_once_their_steps_are_stored_as_changes(sync, made):
    one, given = made
    e0, able = told(sync), {FILES: Available(), MEMORY: Available()}
    method = one.next_method(able, None)
    for step, begins in ((1, True), (2, True), (3, False)):
        assert method is FILES, step
        e0.update(
            info=e0.presence.info | {"loaded": {"step": step, "source": "files", "seconds": 4.0 - step}}
        )
        method = one.next_method(able, replace(sent(FILES, step), begins_deltas=begins))
    assert method is MEMORY
    assert given[-1].ways == {FILES: Measured(3, 1000, 2.0)}


def test_files_whose_steps_stay_whole_are_measured_as_that(sync, made):
    one, given = made
    e0 = told(sync)
    known = []
    for step in range(1, BEGINNING + 3):
        e0.update(info=e0.presence.info | {"loaded": {"step": step, "source": "files", "seconds": 3.0}})
        one.next_method({FILES: Available()}, replace(sent(FILES, step), begins_deltas=True))
        known.append(list(given[-1].ways))
    assert known == [[]] * BEGINNING + [[FILES]] * 2


def test_consecutive_failures_are_counted(sync, made):
    one, given = made
    told(sync)
    for number in range(3):
        one.next_method(ALL, sent(MEMORY, number + 1, is_done=False))
    assert given[-1].ways[MEMORY].failures == 3


@pytest.mark.parametrize(
    ("copies", "here", "takes_part", "lacking"),
    [
        (True, True, True, {}),
        (True, False, True, {MEMORY: "no explorer is on this host"}),
        (True, True, False, {BROADCAST: "no explorer takes part"}),
        (False, True, True, {MEMORY: "no copies can be made"}),
    ],
)
def test_an_unavailable_method_has_a_reason(sync, made, copies, here, takes_part, lacking):
    one, given = made
    told(sync, boot=None if here else "another", **({"broadcast": "gloo"} if takes_part else {}))
    memory = MemorySender(Available(), object() if copies else None, sync)
    broadcast = BroadcastSender(SendContext(sync.job, Ranks(), SyncSection(), sync), Available())
    one.next_method({FILES: Available(), MEMORY: memory, BROADCAST: broadcast}, None)
    assert given[-1].lacking == lacking


def test_a_method_that_the_engine_did_not_open_is_not_chosen(sync, made):
    one, given = made
    assert one.next_method({FILES: Available()}, None) == FILES
    assert given[-1].lacking == dict.fromkeys((MEMORY, BROADCAST), "the engine did not open it")


def test_if_presence_files_cannot_be_read_weights_go_through_files(sync, made, monkeypatch):
    one, given = made
    monkeypatch.setattr(sync.explorers, "living", failing)
    assert one.next_method(ALL, None) == FILES
    assert given == []


def failing():
    raise OSError(5, "Input/output error")
