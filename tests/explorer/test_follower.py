"""The follower over a real job directory and a real daemon, with an engine that can be told to go wrong."""

import pytest
from followers import Scene


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path / "job")
    yield made
    made.close()


def test_each_version_is_loaded_confirmed_and_published(scene):
    follower = scene.follow()
    assert follower.turn(timeout=0).kind == "nothing"
    assert follower.applied is None
    for step in (1, 2, 3):
        scene.publish(step)
        outcome = follower.turn(timeout=30)
        assert (outcome.kind, outcome.pair) == ("applied", (1, step))
        assert follower.applied == scene.presence().applied == (1, step)
    assert scene.engine.log == ["prepare", "load", "commit"] * 3
    info = scene.presence().info
    assert (info["state"], info["loads"]) == ("serving", 3)
    assert set(info["timings"]) == {"noticed", "verify", "prepare", "load", "confirm"}
