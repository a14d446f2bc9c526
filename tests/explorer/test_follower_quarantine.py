"""Quarantine with a real daemon, real followers and engines that refuse a step."""

from dataclasses import replace

import pytest
from support.fake_hook import FakeEngine, FakeHook
from support.followers import Scene

from syncd.protocol.request import Request, write_request
from syncd.protocol.version import read_version


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path / "job")
    made.daemon.reload(replace(made.daemon.config, reconcile=0.0))
    yield made
    made.close()


class Fleet:
    """Several followers of one job, each with its engine."""

    def __init__(self, scene, count):
        self.scene = scene
        self.engines = [FakeEngine() for _ in range(count)]
        self.followers = [
            scene.follow(f"e{number}", FakeHook(engine)) for number, engine in enumerate(self.engines)
        ]

    def refuse_next(self, *numbers):
        for number in numbers:
            self.engines[number].fails["prepare"] = 1

    def turns(self):
        """Let each follower load what is due, and the daemon read what they say."""
        kinds = [follower.turn(timeout=1).kind for follower in self.followers]
        self.scene.tick()
        return kinds


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
