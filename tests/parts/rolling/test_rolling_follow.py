"""Followers and the daemon with and without rolling updates, in one process."""

import errno
import math
import os
import time

import pytest
from support.fake_hook import HALF, FakeEngine, FakeHook
from support.followers import Scene
from support.jobs import ManualClock, explorer, start, steps_of, write_step

from explorer_hooks.follower.gate import Gates
from explorer_hooks.follower.start_checks import UnfitEngineError
from explorer_hooks.parts.rolling.gate import RollingGate
from syncd.client.client import Client
from syncd.errors import EngineDeadError, LoadFailedError
from syncd.observe import event_names
from syncd.observe.metric_table import OF_FIELD
from syncd.observe.metrics import Metrics
from syncd.parts.rolling import admit
from syncd.parts.rolling.admit import Policy
from syncd.parts.rolling.daemon import OFF_AFTER
from syncd.protocol.layout import Job
from syncd.protocol.presence import READS_DELTA
from syncd.protocol.request import Request, write_request
from syncd.protocol.rolling import ALONE, GATE, READS_GATE, Wave, encode_wave, read_wave
from syncd.protocol.version import GoodVersion

ROLLING = {"rolling": Policy()}


@pytest.fixture
def scene(tmp_path):
    made = []

    def make(**config):
        made.append(Scene(tmp_path / "job", **config))
        return made[0]

    yield make
    made[0].close()


def follow(scene, name):
    return scene.follow(name, FakeHook(FakeEngine()))


def take_turns(scene, *followers, until):
    for _ in range(60):
        for follower in followers:
            follower.turn(0.0)
        scene.daemon._scanner._modules._read_at = float("-inf")  # presences are read at each tick here
        scene.tick()
        if until():
            return
    raise AssertionError(read_wave(scene.job))


def test_without_the_table_nothing_is_written_and_nobody_waits(scene):
    scene = scene()
    followers = [follow(scene, name) for name in ("e0", "e1", "e2")]
    scene.publish(1)
    assert [follower.turn(5.0).kind for follower in followers] == ["applied"] * 3
    scene.publish(2)
    assert [follower.turn(5.0).kind for follower in followers] == ["applied"] * 3
    assert not os.path.exists(scene.job.rolling)
    assert GATE not in scene.presence("e1").info
    assert scene.daemon.config.parts == {}


def test_one_loads_and_the_others_have_fetched_the_version_and_wait(scene):
    scene = scene(parts=ROLLING)
    followers = [follow(scene, name) for name in ("e0", "e1", "e2")]
    scene.publish(1)
    take_turns(scene, *followers, until=lambda: all(item.applied == (1, 1) for item in followers))
    scene.publish(2)
    outcomes = [follower.turn(0.0) for follower in followers]
    assert {outcome.kind for outcome in outcomes} <= {"applied", "nothing"}
    waiting = scene.presence("e2")
    assert (waiting.info[GATE]["step"], waiting.info[GATE]["passed"], waiting.leases) == (2, False, (1, 2))
    assert (waiting.info["state"], waiting.info["ready"]) == ("loaded", True)
    take_turns(scene, *followers, until=lambda: all(item.applied == (1, 2) for item in followers))
    take_turns(scene, *followers, until=lambda: read_wave(scene.job).phase == "idle")
    assert GATE not in scene.presence("e2").info
    assert read_wave(scene.job).by_word


def test_a_version_that_leaves_engines_dead_is_stopped_after_the_first(scene):
    """Its follower exits with 69 then, and says what it gave up."""
    scene = scene(parts=ROLLING)
    engines = {name: FakeEngine() for name in ("e0", "e1", "e2")}
    followers = {name: scene.follow(name, FakeHook(engine)) for name, engine in engines.items()}
    scene.publish(1)
    take_turns(scene, *followers.values(), until=lambda: read_wave(scene.job).phase == "idle")
    for engine in engines.values():
        engine.fails["load"], engine.cannot_go_back = 99, True
    scene.publish(2)
    with pytest.raises(EngineDeadError):
        take_turns(scene, *followers.values(), until=lambda: False)
    (dead,) = [name for name, engine in engines.items() if engine.weights == HALF]
    followers.pop(dead).close()
    take_turns(scene, *followers.values(), until=lambda: read_wave(scene.job).phase == "stopped")
    assert [follower.applied for follower in followers.values()] == [(1, 1)] * 2


def test_an_operator_goes_back_to_what_one_engine_gave_up_by_its_own_fault(scene, monkeypatch):
    monkeypatch.setattr(admit, "SETTLE", 0.0)
    scene = scene(parts=ROLLING, keep_last=5)
    engines = {name: FakeEngine() for name in ("e0", "e1", "e2")}
    followers = {name: scene.follow(name, FakeHook(engine), retries=0) for name, engine in engines.items()}

    def all_run(*pair):
        take_turns(
            scene,
            *followers.values(),
            until=lambda: all(follower.applied == pair for follower in followers.values()),
        )

    scene.publish(1)
    all_run(1, 1)
    scene.publish(2)
    take_turns(scene, *followers.values(), until=lambda: read_wave(scene.job).approved.step == 2)
    behind = max(name for name, follower in followers.items() if follower.applied == (1, 1))
    engines[behind].fails["load"] = 1
    others = [name for name in followers if name != behind]
    take_turns(
        scene,
        *followers.values(),
        until=lambda: (
            all(followers[name].applied == (1, 2) for name in others)
            and scene.presence(behind).info["given_up"]
        ),
    )
    scene.publish(3)
    all_run(1, 3)
    write_request(scene.job, Request("rollback", 2, reason="3 is bad", asked_at=time.time()))
    all_run(2, 2)
    assert read_wave(scene.job).stopped == ()


def test_an_engine_that_fails_its_exam_at_the_gate_leaves_it(scene, monkeypatch):
    scene = scene(parts=ROLLING)
    followers = [follow(scene, name) for name in ("e0", "e1")]
    scene.publish(1)
    take_turns(scene, *followers, until=lambda: read_wave(scene.job).phase == "idle")
    unfit = followers[0]

    def fail(_):
        unfit._engine.unfit = LoadFailedError("it does not load every tensor")
        raise UnfitEngineError("it does not load every tensor")

    monkeypatch.setattr(unfit._loader._checks, "examine_adapters", fail)
    scene.publish(2)
    take_turns(scene, *followers, until=lambda: scene.presence("e0").info["state"] == "wrong")
    assert GATE not in scene.presence("e0").info


def test_a_policy_that_names_steps_waits_for_nobody(scene):
    scene = scene(parts=ROLLING)
    scene.publish(1)
    follower = scene.follow("e0", policy="exact=1")
    assert READS_GATE not in scene.presence().reads
    assert follower.turn(5.0).kind == "applied"


def test_a_table_that_is_removed_ends_the_waiting(tmp_path):
    (tmp_path / "job").mkdir()
    job, clock = Job.at(tmp_path / "job"), ManualClock()
    daemon, _, _ = start(job, clock, parts=ROLLING)
    write_step(job, 1)
    daemon.tick(woken=True)
    assert read_wave(job).candidate.step == 1
    daemon.reload(type(daemon.config)())
    daemon.tick()
    clock.sleep(OFF_AFTER / 2)
    daemon.tick()
    assert read_wave(job) is not None  # a command such as prune leads for a moment only
    clock.sleep(OFF_AFTER)
    daemon.tick()
    assert read_wave(job) is None
    daemon.close()


def test_gauges_of_a_wave_have_no_value_once_the_table_is_removed(tmp_path):
    pytest.importorskip("prometheus_client")
    (tmp_path / "job").mkdir()
    job, clock, metrics = Job.at(tmp_path / "job"), ManualClock(), Metrics("job")
    daemon, recorder, _ = start(job, clock, parts=ROLLING)
    write_step(job, 1)
    daemon.tick(woken=True)
    daemon.reload(type(daemon.config)())
    for _ in range(3):
        clock.sleep(OFF_AFTER)
        daemon.tick()
    for event in recorder.events:
        metrics.observe(event)
    shown = [
        metrics.registry.get_sample_value(f"syncd_{name}", {"directory": "job"})
        for name in OF_FIELD[event_names.WAVE_CHANGED].values()
    ]
    assert all(map(math.isnan, shown))
    assert event_names.WAVE_CHANGED in [event.name for event in recorder.events]
    daemon.close()


def test_a_damaged_document_is_removed_once_the_table_is(tmp_path):
    """Else it admits nobody for ever."""
    (tmp_path / "job").mkdir()
    job, clock = Job.at(tmp_path / "job"), ManualClock()
    daemon, _, _ = start(job, clock)
    write_step(job, 1)
    daemon.tick(woken=True)
    job.disk.replace(job.rolling, b'{"proto')
    for _ in range(4):
        clock.sleep(OFF_AFTER)
        daemon.tick()
    assert not os.path.exists(job.rolling)
    daemon.close()


def test_on_a_full_disk_the_daemon_still_removes_steps(tmp_path, monkeypatch):
    (tmp_path / "job").mkdir()
    job, clock = Job.at(tmp_path / "job"), ManualClock()
    daemon, _, _ = start(job, clock, parts=ROLLING, keep_last=1, trash_grace=0.0, prune=False)
    for step in range(1, 7):
        write_step(job, step)
        daemon.tick(woken=True)
    replace_file = type(job.disk).replace

    def full(disk, path, data, **more):
        if path == job.rolling:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        replace_file(disk, path, data, **more)

    monkeypatch.setattr(type(job.disk), "replace", full)
    daemon.reload(type(daemon.config)(parts=ROLLING, keep_last=1, trash_grace=0.0))
    for _ in range(30):
        clock.sleep(10.0)
        daemon.tick()
    assert "No space left" in str(daemon.error)
    assert steps_of(job) == [5, 6]
    monkeypatch.undo()
    clock.sleep(10.0)
    daemon.tick()
    assert daemon.error is None
    daemon.close()


def test_a_replaced_daemon_cannot_write_the_wave(tmp_path):
    (tmp_path / "job").mkdir()
    job, clock = Job.at(tmp_path / "job"), ManualClock()
    old, _, _ = start(job, clock, parts=ROLLING)
    old.tick()
    new, _, _ = start(job, clock, parts=ROLLING)
    new.tick()
    clock.sleep(60.0)
    new.tick()
    assert (new.leads, read_wave(job).term) == (True, 2)
    old.tick()
    assert (old.leads, read_wave(job).term) == (False, 2)
    new.close()


def test_without_a_leader_a_follower_goes_on_after_a_while_and_only_to_what_is_approved(tmp_path):
    (tmp_path / "job").mkdir()
    job, clock = Job.at(tmp_path / "job"), ManualClock()
    good, new = [GoodVersion(1, step, "weights", f"global_step_{step}/actor", f"d{step}") for step in (2, 3)]
    explorer(job, clock, "a", applied=(1, 1), reads=(READS_GATE, READS_DELTA))
    explorer(job, clock, "b", applied=(1, 1), reads=(READS_GATE,))
    job.disk.replace(job.rolling, encode_wave(Wave(term=1, beat=1, candidate=new, approved=good)))
    gates = {}
    for name in ("a", "b"):
        client = Client(job, "observer", None, Client.open(job.root, clock=clock).poller)
        client.identity = name
        gates[name] = Gates([RollingGate(client)])
    admits = lambda name, pair: gates[name].admits(pair, (1, 1))  # noqa: E731
    assert not any(admits(name, good.pair) for name in gates)
    clock.sleep(ALONE - 1)
    assert not any(admits(name, good.pair) for name in gates)
    clock.sleep(2)
    assert [admits(name, good.pair) for name in gates] == [True, False]
    assert not any(admits(name, new.pair) for name in gates)
    job.disk.replace(job.rolling, encode_wave(Wave(term=2, beat=1, candidate=new, approved=good)))
    assert not admits("a", good.pair)


def test_metrics_show_the_wave():
    pytest.importorskip("prometheus_client")
    from syncd.observe.events import Event

    metrics = Metrics("/j")
    counts = {"admitted": 3, "slots": 2, "waiting": 5, "stopped": 1}
    metrics.observe(Event(event_names.WAVE_CHANGED, "error", 0.0, {**counts, "seconds": 4.5}))
    read = lambda name: metrics.registry.get_sample_value(f"syncd_rolling_{name}", {"directory": "/j"})  # noqa: E731
    names = ("admitted", "paused", "waiting", "stopped", "seconds_to_last")
    assert [read(name) for name in names] == [3, 2, 5, 1, 4.5]
