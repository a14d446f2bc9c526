"""What feeds the choice of a way: what rank 0 knows of a sync, and what explorers say of their loads."""

import pytest
from jobs import explorer

from syncd.client.sync_policy import SyncMethod
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.process import Process
from syncd.synchronizer import Synchronizer
from trainer import auto_method
from trainer.auto_method import Chooser, Loaded, loaded_of, measured
from trainer.engines.base import Sent
from trainer.method_choice import ORDER, Measured

FILES, MEMORY, BROADCAST = ORDER


def sent(method, step=2, seconds=1.0, *, is_done=True):
    return Sent(method, step, 1000, seconds, is_done)


@pytest.mark.parametrize(
    ("sync", "loads", "found"),
    [
        (sent(FILES), [], None),
        (sent(FILES), [Loaded(2, "files", 0.5), Loaded(2, "stage", 2.0)], Measured(7, 1000, 3.0)),
        (sent(MEMORY), [], None),
        (sent(MEMORY), [Loaded(2, "memory", 0.5), Loaded(2, "files", 1.0)], Measured(7, 1000, 2.0)),
        (sent(MEMORY), [Loaded(2, "files", 1.0)], Measured(7, 1000, None, 1)),
        (sent(MEMORY, is_done=False), [Loaded(2, "files", 1.0)], Measured(7, 1000, None, 1)),
        (sent(BROADCAST), [], Measured(7, 1000, 1.0)),
        (sent(BROADCAST, is_done=False), [], Measured(7, 1000, None, 1)),
    ],
)
def test_a_sync_is_measured_by_the_slowest_who_has_its_weights(sync, loads, found):
    assert measured(7, sync, loads) == found


@pytest.mark.parametrize(
    "loaded",
    [None, "memory", {}, {"step": "2", "source": "files", "seconds": 1.0}, {"step": 2, "source": 3, "seconds": 1.0},
     {"step": 2, "source": "files", "seconds": "1"}, {"step": 2, "source": "files", "seconds": -1.0}],
)  # fmt: skip
def test_what_an_explorer_says_wrongly_is_not_taken_in(loaded):
    assert loaded_of({"loaded": loaded}) is None
    assert loaded_of({"loaded": {"step": 2, "source": "files", "seconds": 1}}) == Loaded(2, "files", 1.0)


@pytest.fixture
def sync(tmp_path):
    (tmp_path / "job").mkdir()
    with Synchronizer.open(tmp_path / "job", "trainer", heartbeat=False) as opened:
        yield opened


@pytest.fixture
def made(monkeypatch, sync):
    """Return a chooser, and what it was given to choose from."""
    given = []
    original = auto_method.choose
    monkeypatch.setattr(auto_method, "choose", lambda now: given.append(now) or original(now))
    return Chooser(sync), given


def told(sync, name="e0", boot=None, **info):
    """Publish an explorer of this host, or of another one."""
    process = {"boot": boot or Process.current().boot, "namespace": "n", "pid": 1, "started": 1}
    job = Job.at(sync.job.root)
    return explorer(job, SystemClock(), name, info={"process": process, **info})


def test_ways_are_measured_one_after_the_other_and_the_fastest_is_taken(sync, made):
    one, given = made
    e0 = told(sync, broadcast="gloo")
    able = frozenset(ORDER)
    assert one.choose(able, None) is FILES
    e0.update(info=e0.presence.info | {"loaded": {"step": 1, "source": "files", "seconds": 3.0}})
    assert one.choose(able, sent(FILES, 1)) is MEMORY
    e0.update(info=e0.presence.info | {"loaded": {"step": 2, "source": "memory", "seconds": 0.5}})
    assert one.choose(able, sent(MEMORY, 2)) is BROADCAST
    assert one.choose(able, sent(BROADCAST, 3, 2.0)) is MEMORY
    assert given[-1].ways == {
        FILES: Measured(1, 1000, 4.0),
        MEMORY: Measured(2, 1000, 1.5),
        BROADCAST: Measured(3, 1000, 2.0),
    }
    assert (given[-1].number, given[-1].size, given[-1].lacking) == (4, 1000, {})


def test_a_load_that_comes_late_is_taken_in_late(sync, made):
    one, given = made
    e0 = told(sync)
    able = frozenset({FILES, MEMORY})
    assert one.choose(able, None) is FILES
    assert one.choose(able, sent(FILES, 1)) is FILES, "nobody has loaded it yet"
    e0.update(info=e0.presence.info | {"loaded": {"step": 1, "source": "files", "seconds": 3.0}})
    assert one.choose(able, sent(FILES, 2)) is MEMORY
    assert given[-1].ways == {FILES: Measured(1, 1000, 4.0)}


def test_failures_in_a_row_are_counted(sync, made):
    one, given = made
    told(sync)
    for number in range(3):
        one.choose(frozenset(ORDER), sent(MEMORY, number + 1, is_done=False))
    assert given[-1].ways[MEMORY].failures == 3


@pytest.mark.parametrize(
    ("methods", "here", "takes_part", "lacking"),
    [
        (ORDER, True, True, {}),
        (ORDER, False, True, {MEMORY: "no explorer is on this host"}),
        (ORDER, True, False, {BROADCAST: "no explorer takes part"}),
        ((FILES,), True, True, {MEMORY: "no copies can be made", BROADCAST: "the engine does not broadcast"}),
    ],
)
def test_what_cannot_be_taken_has_a_reason(sync, made, methods, here, takes_part, lacking):
    one, given = made
    told(sync, boot=None if here else "another", **({"broadcast": "gloo"} if takes_part else {}))
    one.choose(frozenset(methods), None)
    assert given[-1].lacking == lacking


def test_where_explorers_cannot_be_looked_at_weights_go_through_files(sync, made, monkeypatch):
    one, given = made
    monkeypatch.setattr(sync.explorers, "living", failing)
    assert one.choose(frozenset(ORDER), None) is SyncMethod.CHECKPOINT
    assert given == []


def failing():
    raise OSError(5, "Input/output error")
