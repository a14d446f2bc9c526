"""The follower over HTTP hooks: what it promises holds with engines that are half loaded, restarted, left paused."""

import os
from random import Random

import pytest
from support.engine_beds import SglangBed, VllmBed
from support.fake_engines import START, fingerprint, fingerprint_of
from support.fake_servers import Answer, VanishError
from support.followers import Scene
from support.hook_contract import bounded

from explorer_hooks.hook import HookOptions
from explorer_hooks.proof import ended_probes
from syncd.errors import ConfigError, EngineUnreachableError
from syncd.protocol.engine_state import EngineState, engine_report_of
from syncd.protocol.probe import Probe, write_base_probe


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path / "job")
    yield made
    made.close()


@pytest.fixture(params=[VllmBed, SglangBed])
def bed(request, tmp_path):
    with request.param(tmp_path) as bed:
        yield bed


def posts(bed):
    return [path for path in bed.engine.paths() if path.startswith("POST") and "completions" not in path]


def runs(bed, scene, step):
    return bed.said(None) == fingerprint_of(scene.payload(step))


def test_each_version_is_loaded_and_confirmed_by_the_engine(scene, bed):
    follower = scene.follow(hook=bed.open())
    for step in (1, 2, 3):
        scene.publish(step, salt=step)
        assert follower.turn(10).kind == "applied"
        assert runs(bed, scene, step)
        assert bed.engine.label == scene.label(step)
        assert follower.applied == (1, step)


class BadNetwork:
    """Loses a part of the connections, until so many were lost.

    Args:
        seed: Of the connections that it loses.
        left: How many it loses.
        share: The share of connections that it loses until then.
    """

    def __init__(self, seed, left, share=0.4):
        self.random, self.left, self.share = Random(seed), left, share

    def __call__(self):
        if self.left <= 0 or self.random.random() >= self.share:
            return ""
        self.left -= 1
        return self.random.choice(("asked", "answered"))


@pytest.mark.fault("a short fault of the network has a follower give a good version up for good")
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_a_bad_network_delays_a_version_and_never_gives_it_up(scene, bed, before, seed):
    follower = scene.follow(hook=bed.open(), retries=1)
    for step in range(1, before + 1):
        scene.publish(step, salt=step)
        assert follower.turn(60).kind == "applied"
    network = bed.engine.loses = BadNetwork(seed, left=25)
    newest = before + 1
    scene.publish(newest, salt=newest)
    while network.left > 0:
        follower.turn(0.2)
        network.share = 0.4 if follower.applied != (1, newest) else 1.0  # it polls on
    for _ in range(100):
        if follower.turn(0.2).kind == "nothing" and follower.applied == (1, newest):
            break
    assert follower.applied == (1, newest)
    assert runs(bed, scene, newest)
    assert not bed.is_paused()
    assert follower.may_work()
    report = engine_report_of(scene.presence().info)
    assert (report.state, report.ready, report.given_up) == (EngineState.LOADED, True, ())
    assert follower.turn(0.0).kind == "nothing"


def test_a_load_whose_last_answer_is_lost_is_found_to_have_worked(scene, bed):
    follower = scene.follow(hook=bed.open(), retries=0)
    scene.publish(1, salt=1)
    follower.turn(10)
    scene.publish(2, salt=2)
    commit = type(follower._loader._hook).commit
    told = bed.engine.paths

    def lossy(hook, target):
        commit(hook, target)
        raise EngineUnreachableError("its answer was lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(follower._loader._hook), "commit", lossy)
        outcome = follower.turn(10)
    assert outcome.kind == "applied"
    assert sum("pause" in path for path in told() if path.startswith("POST")) == 2  # it is not loaded again
    assert runs(bed, scene, 2)


def test_a_damaged_version_is_refused_before_any_request_to_the_engine(scene, bed):
    follower = scene.follow(hook=bed.open(), retries=0)
    scene.publish(1, salt=1)
    follower.turn(10)
    told = posts(bed)
    scene.publish(2, salt=2)
    shard = next(name for name in os.listdir(scene.payload(2)) if name.endswith(".safetensors"))
    os.truncate(f"{scene.payload(2)}/{shard}", 20)
    assert follower.turn(10).kind == "refused"
    assert posts(bed) == told
    assert runs(bed, scene, 1)


def test_a_load_that_fails_halfway_rolls_back_to_the_last_good_version(scene, bed):
    follower = scene.follow(hook=bed.open(), retries=0)
    scene.publish(1, salt=1)
    follower.turn(10)
    scene.publish(2, salt=2)
    bed.fail_load(None)
    assert follower.turn(10).kind == "failed"
    assert runs(bed, scene, 1)
    assert follower.applied == (1, 1)
    assert not bed.is_paused()


def test_an_engine_left_paused_is_loaded_and_resumed(scene, bed):
    scene.publish(1, salt=1)
    bed.pause()
    follower = scene.follow(hook=bed.open())
    assert follower.turn(10).kind == "applied"
    assert not bed.is_paused()
    assert runs(bed, scene, 1)


def test_a_restarted_engine_is_not_ready_until_it_runs_the_newest_version(scene, bed, tmp_path):
    ready = tmp_path / "ready"
    follower = scene.follow(hook=bed.open(), ready_file=str(ready))
    scene.publish(1, salt=1)
    follower.turn(10)
    assert ready.exists()
    with bed.gone():
        assert follower.turn(0.2).kind == "unreachable"
        assert not ready.exists()
        assert not follower.may_work()
        scene.publish(2, salt=2)
        bed.engine.boot()
    assert bed.said(None) == fingerprint(START)
    assert bounded(lambda: follower.turn(20)) is None
    assert follower.applied == (1, 2)
    assert runs(bed, scene, 2)
    assert ready.exists()


@pytest.mark.fault("an engine was given an API key, and its follower was not")
@pytest.mark.parametrize("baseline", [True, False])
def test_a_missing_key_is_an_error_of_configuration_with_the_option_that_gives_it(scene, bed, baseline):
    """vLLM's key guards `/v1` alone, SGLang's admin key all but what says which weights run."""
    open_to_all = (
        "/health",
        "/is_paused",
        "/weight_info",
        "/version",
        "/server_info",
        "/model_info",
        "/ready",
    )
    route, bed.engine.token = bed.engine.routed, None

    def guarded(method, target, body):
        is_open = target.partition("?")[0] in open_to_all
        if not is_open and bed.engine.request.headers.get("Authorization") != f"Bearer {bed.token}":
            raise Answer(401, {"error": "Unauthorized"})
        return route(method, target, body)

    bed.engine.routed = guarded
    options = HookOptions(bed.engine.address, timeout=bed.patience)
    if baseline:
        write_base_probe(scene.job, Probe(((5, 6),), ((-1.0,),), "float32", "float32"), "/start")
    scene.publish(1, salt=1)
    with pytest.raises(ConfigError, match="asks for a key") as error:
        scene.follow(hook=bed.hook_type.from_options(options)).turn(10)
    assert "--token-env" in error.value.hint
    assert bed.said(None) == fingerprint(START)
    assert not bed.is_paused()


def asked(bed):
    return [path for path in bed.engine.paths() if path.endswith(("/v1/completions", "/generate"))]


@pytest.mark.fault("an engine ends at a probe")
@pytest.mark.parametrize("answer", ["an error", "nothing"])
def test_what_has_ended_an_engine_once_is_not_asked_again_after_any_restart(scene, bed, answer):
    write_base_probe(scene.job, Probe(((5, 6),), ((-1.0,),), "float32", "float32"), "/start")

    def end():
        bed.engine.stop_soon()
        if answer == "nothing":
            raise VanishError
        raise Answer(500, {"error": {"message": "EngineCore encountered an issue"}})

    ends = dict.fromkeys(("/v1/completions", "/generate"), end)
    bed.engine.replies.update(ends)
    scene.publish(1, salt=1)
    follower = scene.follow(hook=bed.open())
    event = dict(scene.told)["probe_ended_engine"]
    assert bed.hook_type.product in event["engine"]
    assert len(asked(bed)) == 1
    bed.restart()
    assert follower.turn(20).kind == "applied"
    assert bed.engine.label == scene.label(1)
    follower.close()
    bed.restart()
    scene.told.clear()
    second = scene.follow("e1", hook=bed.open())
    assert dict(scene.told)["probe_left_out"]["engine"] == event["engine"]
    assert second.turn(20).kind == "applied"
    assert len(asked(bed)) == 1
    second.close()
    bed.engine.version, bed.engine.replies = "0.99.0", {}
    bed.restart()
    third = scene.follow("e2", hook=bed.open())
    assert len(asked(bed)) > 1, "another release is another kind of engine"
    third.close()
    assert "calibration_failed" not in scene.names()


@pytest.mark.parametrize("fault", ["an error", "no connection"])
def test_a_probe_that_fails_at_an_engine_that_lives_on_is_asked_again(scene, bed, monkeypatch, fault):
    monkeypatch.setattr(ended_probes, "PATIENCE", 0.2)
    write_base_probe(scene.job, Probe(((5, 6),), ((-1.0,),), "float32", "float32"), "/start")

    def fail():
        if fault == "no connection":
            raise VanishError
        raise Answer(500, {"error": "busy"})

    bed.engine.replies.update(dict.fromkeys(("/v1/completions", "/generate"), fail))
    scene.follow(hook=bed.open())
    assert "calibration_failed" in scene.names()
    assert "probe_ended_engine" not in scene.names()
    bed.engine.replies.clear()
    before = len(asked(bed))
    scene.follow("e1", hook=bed.open())
    assert len(asked(bed)) > before
