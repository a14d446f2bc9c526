"""Quarantine with a real daemon, real followers and engines that refuse a step."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from support.fake_hook import FakeEngine, FakeHook, logprobs_of
from support.followers import Scene
from support.jobs import write_step

from syncd.cli.wait import NewerThan, wait_for
from syncd.client.client import Client
from syncd.errors import TimedOutError
from syncd.protocol.engine_state import EngineState, engine_report_of
from syncd.protocol.probe import Probe
from syncd.protocol.request import Request, write_request
from syncd.protocol.version import Quarantined, encode_version, read_version

TOKENS = ((5, 6, 7), (8, 9))


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path / "job")
    made.daemon.reload(replace(made.daemon.config, reconcile=0.0))
    yield made
    made.close()


class Fleet:
    """Several followers of one job, each with its engine."""

    def __init__(self, scene, count, probes="", **options):
        self.scene = scene
        self.engines = [FakeEngine() for _ in range(count)]
        self.followers = [
            scene.follow(f"e{number}", FakeHook(engine, probes=probes), **options)
            for number, engine in enumerate(self.engines)
        ]

    def refuse_next(self, *numbers):
        for number in numbers:
            self.engines[number].fails["prepare"] = 1

    def turns(self):
        """Let each follower load what is due, and the daemon read what they say."""
        kinds = [follower.turn(timeout=1).kind for follower in self.followers]
        self.scene.tick()
        return kinds


def write_proven(scene, step, answers=None):
    """Publish a step with the probe that its weights answer, or that other weights do."""

    def probe(content):
        answer = logprobs_of(answers or hashlib.sha256(content).hexdigest(), TOKENS)
        return Probe(TOKENS, answer, "float32", "float32")

    write_step(scene.job, step, probe=probe)
    scene.tick()


def quarantine(scene):
    return [one.step for one in read_version(scene.job).quarantine]


def test_a_step_that_both_engines_refuse_is_put_aside_and_a_new_engine_loads_the_last_good_one(scene):
    fleet = Fleet(scene, 2)
    scene.publish(1)
    assert fleet.turns() == ["applied", "applied"]
    assert read_version(scene.job).last_good.pair == (1, 1)
    scene.publish(2)
    published = read_version(scene.job)
    fleet.refuse_next(0, 1)
    assert fleet.turns() == ["refused", "refused"]
    found = read_version(scene.job)
    assert (quarantine(scene), found.last_good.pair) == ([2], (1, 1))
    assert (found.pair, found.digest, found.published_at) == (
        published.pair,
        published.digest,
        published.published_at,
    )
    scene.tick()
    assert read_version(scene.job) == found
    (event,) = scene.heard.of("step_quarantined")
    assert (event["step"], event["digest"]) == (2, published.digest)
    assert len(scene.heard.of("version_published")) == 2, "a change of the quarantine is no publish"

    # No engine that runs something is rolled back or moved; a new one loads the last good version.
    assert fleet.turns() == ["nothing", "nothing"]
    fresh = scene.follow("fresh", FakeHook(FakeEngine()))
    assert fresh.turn(timeout=1).pair == (1, 1)
    assert scene.presence("fresh").applied == (1, 1)
    assert fresh.turn(timeout=0.1).kind == "nothing"

    # The next version is loaded by all.
    scene.publish(3)
    assert fleet.turns() == ["applied", "applied"]
    assert fresh.turn(timeout=1).pair == (1, 3)
    scene.tick()
    assert (quarantine(scene), read_version(scene.job).last_good.pair) == ([2], (1, 3))


def test_a_rollback_to_a_quarantined_step_takes_it_out(scene):
    fleet = Fleet(scene, 2)
    scene.publish(1)
    fleet.turns()
    scene.publish(2)
    fleet.refuse_next(0, 1)
    fleet.turns()
    assert quarantine(scene) == [2]
    write_request(scene.job, Request("rollback", 2, reason="the engines were at fault"))
    scene.tick()
    assert (read_version(scene.job).pair, quarantine(scene)) == ((2, 2), [])
    assert fleet.turns() == ["applied", "applied"]
    assert (read_version(scene.job).last_good.pair, quarantine(scene)) == ((2, 2), [])


def test_what_one_engine_of_three_refuses_is_not_put_aside(scene):
    fleet = Fleet(scene, 3)
    scene.publish(1)
    fleet.turns()
    scene.publish(2)
    fleet.refuse_next(1)
    assert fleet.turns() == ["applied", "refused", "applied"]
    for _ in range(3):
        scene.tick()
    assert (quarantine(scene), scene.heard.of("step_quarantined")) == ([], [])
    assert read_version(scene.job).last_good.pair == (1, 2)
    assert scene.presence("e1").applied == (1, 1)
    assert scene.follow("fresh", FakeHook(FakeEngine())).turn(timeout=1).pair == (1, 2)


def test_who_names_a_quarantined_step_gets_it(scene):
    fleet = Fleet(scene, 2)
    scene.publish(1)
    fleet.turns()
    scene.publish(2)
    fleet.refuse_next(0, 1)
    fleet.turns()
    assert scene.follow("exact", FakeHook(FakeEngine()), policy="exact=2").turn(timeout=1).pair == (1, 2)
    every = scene.follow("every", FakeHook(FakeEngine()), policy="every")
    assert [every.turn(timeout=1).pair, every.turn(timeout=0.1).kind] == [(1, 1), "nothing"]


def test_a_step_that_no_engine_can_prove_is_put_aside(scene):
    """The probe of step 2 is not of its weights: each engine loads it, fails to prove it, and goes back to step 1."""
    fleet = Fleet(scene, 2, probes="serving", retries=0)
    write_proven(scene, 1)
    assert fleet.turns() == ["applied", "applied"]
    assert read_version(scene.job).last_good.pair == (1, 1)
    write_proven(scene, 2, answers="other weights")
    assert fleet.turns() == ["failed", "failed"]
    assert (quarantine(scene), read_version(scene.job).last_good.pair) == ([2], (1, 1))
    fresh = scene.follow("fresh", FakeHook(FakeEngine(), probes="serving"))
    assert fresh.turn(timeout=1).pair == (1, 1)
    assert engine_report_of(scene.presence("fresh").info).state is EngineState.PROVEN


def test_an_engine_that_may_try_again_is_waited_for(scene):
    fleet = Fleet(scene, 3, retries=1, backoff=60.0)
    scene.publish(1)
    fleet.turns()
    scene.publish(2)
    fleet.refuse_next(0, 1)
    fleet.engines[2].fails["load"] = 1
    assert [follower.turn(timeout=0.2).kind for follower in fleet.followers] == [
        "refused",
        "refused",
        "failed",
    ]
    for _ in range(3):
        scene.tick()
    assert quarantine(scene) == []


def test_a_change_of_the_quarantine_is_no_new_version_for_who_waits(scene):
    fleet = Fleet(scene, 2)
    scene.publish(1)
    fleet.turns()
    scene.publish(2)
    fleet.refuse_next(0, 1)
    [follower.turn(timeout=1) for follower in fleet.followers]
    with Client.open(scene.root, "observer", poll=0.005) as client:
        assert client.wait_for_version(1) == 2
        before = read_version(scene.job)
        waiting = ThreadPoolExecutor(1).submit(client.wait_for_version, 2, timeout=0.5)
        scene.tick()
        assert read_version(scene.job) != before
        with pytest.raises(TimedOutError):
            waiting.result()
    with pytest.raises(TimedOutError):
        wait_for(scene.job, NewerThan(1, 2), 0.1)


def test_a_version_file_that_somebody_else_has_written_is_not_replaced(scene):
    scene.publish(1)
    version = read_version(scene.job)
    other = replace(version, carried_out=("r1",))
    scene.job.disk.replace(scene.job.version, encode_version(other))
    judged = replace(version, quarantine=(Quarantined(1, version.digest, "damaged"),))
    assert scene.daemon.leader.amend(version, judged) is None
    assert read_version(scene.job) == other
    amended = scene.daemon.leader.amend(other, judged)
    assert (amended, read_version(scene.job)) == (judged, judged)
