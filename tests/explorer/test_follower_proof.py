"""A version runs when the engine has shown it: followers over engines that answer probes, right and wrong."""

import errno
import hashlib
import os

import pytest
from support.fake_hook import START, FakeHook, digest_of, logprobs_of
from support.followers import Scene
from support.jobs import write_step

from explorer_hooks.follower import follower as follower_module
from explorer_hooks.follower import start_checks
from explorer_hooks.hook import Unproven
from explorer_hooks.run.generation import BEFORE_THE_FIRST, version_after, version_of
from explorer_hooks.run.weight_sources import WeightSource
from syncd.daemon import scan
from syncd.errors import ConfigError, EngineUnreachableError
from syncd.protocol.engine_state import EngineState, engine_report_of
from syncd.protocol.probe import Probe, write_base_probe

LONG = 60.0
TOKENS = ((5, 6, 7), (8, 9))


def probe_of(weights, dtype="float32"):
    return Probe(TOKENS, logprobs_of(weights, TOKENS), dtype, dtype)


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path / "job")
    made.hook = FakeHook(made.engine, probes="serving")
    yield made
    made.close()


def publish(scene, step):
    """Publish a step with the probe that its weights answer."""
    write_step(scene.job, step, probe=lambda content: probe_of(hashlib.sha256(content).hexdigest()))
    scene.tick()
    assert read(scene, step) == digest_of(scene.payload(step))


def read(scene, step):
    return digest_of(scene.payload(step))


def report(scene, follower=None):
    return engine_report_of(scene.presence(follower.client.identity if follower else "e0").info)


def proven(scene, follower, step):
    outcome = follower.turn(timeout=LONG)
    assert (outcome.kind, outcome.pair) == ("applied", (1, step)), outcome
    found = report(scene)
    assert (found.state, found.ready, found.reason) == (EngineState.PROVEN, True, "")
    assert (found.proof.version, found.proof.mean, found.proof.tokens) == (scene.label(step), 0.0, 3)


@pytest.mark.parametrize("probes", ["serving", "held"])
def test_a_version_is_proven_by_the_engines_answer_after_each_load(scene, probes):
    scene.hook.probes = probes
    follower = scene.follow()
    for step in (1, 2):
        publish(scene, step)
        proven(scene, follower, step)
    event = dict(scene.told)["version_applied"]
    assert (event["proven"], event["mean"]) == (True, 0.0)
    assert event["prove"] >= 0
    assert follower.may_work()


@pytest.mark.parametrize("reason", ["no probe", "no answer"])
def test_a_version_that_nothing_can_prove_is_loaded_and_not_proven(scene, reason):
    scene.hook.probes = "serving" if reason == "no probe" else ""
    follower = scene.follow()
    if reason == "no probe":
        scene.publish(1)
    else:
        publish(scene, 1)
    assert follower.turn(timeout=LONG).kind == "applied"
    assert (report(scene).state, report(scene).proof, report(scene).ready) == (EngineState.LOADED, None, True)
    assert dict(scene.told)["version_applied"]["proven"] is False


@pytest.mark.fault("an engine reports a version and answers with other weights")
def test_an_engine_that_names_a_version_and_answers_as_another_is_led_back_to_the_last_proven_one(scene):
    follower = scene.follow(retries=1)
    publish(scene, 1)
    proven(scene, follower, 1)
    publish(scene, 2)
    # The load is forgotten whenever it is of step 2: only the label says that it happened.
    scene.engine.doing["commit"] = lambda: stay(scene, 2, 1)
    outcome = follower.turn(timeout=LONG)
    assert (outcome.kind, outcome.pair) == ("failed", (1, 2))
    assert "answers as other weights" in outcome.reason
    assert scene.engine.log.count("load") == 3  # step 1, step 2, and step 2 once more
    assert scene.names().count("proof_failed") == 2
    found = report(scene)
    assert (found.state, found.failures, found.given_up[0].step) == (EngineState.FAILED, 2, 2)
    assert found.ready  # it is back on step 1, and has proven it
    assert follower.applied == scene.presence().applied == (1, 1)
    assert scene.engine.label == scene.label(1)
    scene.engine.doing.clear()
    publish(scene, 3)
    proven(scene, follower, 3)


def test_which_versions_work_without_a_proof_is_known_by_label_while_and_after_they_do(scene):
    """Work that ends during a proof, or begins before a failed one and ends after it, may be of other weights."""
    follower, seen = scene.follow(retries=0), []
    answer = scene.engine.probe

    def watched(tokens):
        seen.append(follower.running())
        return answer(tokens)

    scene.engine.probe = watched
    publish(scene, 1)
    before = follower.running()
    proven(scene, follower, 1)
    publish(scene, 2)
    scene.engine.doing["commit"] = lambda: stay(scene, 2, 1)
    assert follower.turn(timeout=LONG).kind == "failed"
    after = follower.running()
    first, second = scene.label(1), scene.label(2)
    assert [one.unproven for one in seen] == [
        {first: Unproven(pending=True)},
        {second: Unproven(pending=True)},
        {second: Unproven(1), first: Unproven(pending=True)},
    ]
    assert [one.unproven_since(before) for one in seen] == [{first}, {second}, {first, second}]
    assert (before.unproven, after.unproven) == ({}, {second: Unproven(1)})
    assert after.unproven_since(before) == {second}
    assert after.unproven_since(seen[1]) == {second}
    assert after.unproven_since(after) == frozenset()
    assert (follower.pair_named(first), follower.pair_named(second)) == ((1, 1), (1, 2))
    assert follower.pair_named("1.1.0000000000000000") is None


def stay(scene, step, on):
    """Have the engine run another step than the one that it has just loaded."""
    if scene.engine.weights == read(scene, step):
        scene.engine.weights = read(scene, on)


@pytest.mark.fault("an engine answers as other weights")
@pytest.mark.parametrize("reloads", [True, False])
def test_a_failed_proof_is_reported_with_its_own_figures_and_what_to_do(scene, reloads):
    if not reloads:
        write_base_probe(scene.job, probe_of(START), "/models/base")
        scene.hook.reloads_start = True
        scene.engine.doing["reload_start"] = lambda: setattr(scene.engine, "answers_as", "permuted experts")
    follower = scene.follow(retries=0)
    scene.engine.answers_as = None
    publish(scene, 1)
    proven(scene, follower, 1)
    publish(scene, 2)
    scene.engine.doing["commit"] = lambda: stay(scene, 2, 1)
    assert follower.turn(timeout=LONG).kind == "failed"
    event = dict(scene.told)["proof_failed"]
    assert event["mean"] > event["tolerance"] > report(scene).proof.mean == 0.0
    assert ("reload=restart" in event["hint"]) is not reloads


def test_an_engine_that_cannot_be_brought_back_is_wrong_and_gets_no_work(scene):
    follower = scene.follow(retries=0)
    publish(scene, 1)
    proven(scene, follower, 1)
    publish(scene, 2)
    scene.engine.answers_as = "a stale head"
    assert follower.turn(timeout=LONG).kind == "failed"
    found = report(scene)
    assert (found.state, found.ready) == (EngineState.WRONG, False)
    assert "answers as other weights" in found.reason
    assert follower.applied is scene.presence().applied is None
    assert not follower.may_work()
    assert (
        follower.turn(timeout=0.2).kind == "nothing"
    )  # nothing that is here could mend it: it is not loaded again
    assert scene.engine.log.count("load") == 2
    scene.engine.answers_as = None
    publish(scene, 3)
    proven(scene, follower, 3)


def test_a_restarted_engine_that_cannot_prove_the_version_it_is_restored_to_is_wrong_and_not_dead(scene):
    follower = scene.follow(retries=0)
    publish(scene, 1)
    proven(scene, follower, 1)
    publish(scene, 2)
    scene.engine.fails["prepare"] = 1
    assert follower.turn(timeout=LONG).kind == "refused"
    scene.engine.restart()
    scene.engine.answers_as = "a stale head"
    assert follower.turn(timeout=0.5).kind == "nothing"
    assert (report(scene).state, report(scene).ready) == (EngineState.WRONG, False)
    scene.engine.answers_as = None
    publish(scene, 3)
    proven(scene, follower, 3)


def test_the_first_version_that_cannot_be_proven_leaves_the_engine_wrong(scene):
    follower = scene.follow(retries=0)
    publish(scene, 1)
    scene.engine.answers_as = START
    assert follower.turn(timeout=LONG).kind == "failed"
    assert (report(scene).state, follower.applied) == (EngineState.WRONG, None)
    assert not follower.may_work()
    scene.engine.answers_as = None
    publish(scene, 2)
    proven(scene, follower, 2)


def test_a_stale_prefix_cache_is_a_failed_proof(scene):
    follower = scene.follow(retries=0)
    publish(scene, 1)
    proven(scene, follower, 1)
    publish(scene, 2)
    scene.engine.cached = (-1.0, -3.0)
    outcome = follower.turn(timeout=LONG)
    assert outcome.kind == "failed"
    assert "prefix cache" in outcome.reason


def test_an_engine_that_runs_a_version_at_the_followers_start_has_to_prove_it(scene):
    with scene.follow() as first:
        publish(scene, 1)
        proven(scene, first, 1)
    with scene.follow("e1") as second:
        assert report(scene, second).state is EngineState.PROVEN
    scene.engine.answers_as = START
    third = scene.follow("e2")
    assert report(scene, third).state is EngineState.WRONG
    assert not third.may_work()


def test_an_engine_on_the_base_model_is_calibrated_against_the_baseline(scene):
    write_base_probe(scene.job, probe_of(START), "/models/base")
    follower = scene.follow()
    assert dict(scene.told)["engine_calibrated"]["mean"] == 0.0
    publish(scene, 1)
    proven(scene, follower, 1)
    assert (report(scene).proof.calibrated, report(scene).proof.tolerance) == (0.0, 1e-4)


def test_a_follower_that_starts_again_takes_up_what_was_measured_of_such_an_engine(scene):
    write_base_probe(scene.job, probe_of(START), "/models/base")
    with scene.follow() as first:
        publish(scene, 1)
        proven(scene, first, 1)
    with scene.follow("e1") as second:  # the engine runs a version, so its start weights cannot be asked
        assert report(scene, second).proof.calibrated == 0.0
        assert report(scene, second).proof.tolerance == 1e-4
    scene.hook.engine_kind = lambda: "another release"
    with scene.follow("e2") as third:
        assert report(scene, third).proof.calibrated is None


@pytest.mark.fault("somebody replaces an engine's weights under the same label")
@pytest.mark.parametrize("every", [0.001, 0.0])
def test_weights_that_somebody_replaced_are_found_while_the_engine_runs(scene, every):
    follower = scene.follow(prove_every=every, check_every=0.0)
    publish(scene, 1)
    proven(scene, follower, 1)
    scene.engine.answers_as = "by hand"
    scene.engine.doing["load"] = lambda: setattr(scene.engine, "answers_as", None)
    if not every:
        assert follower.turn(timeout=0.2).kind == "nothing"
        assert "proof_failed" not in scene.names()
        return
    proven(scene, follower, 1)
    assert scene.names().count("proof_failed") == 1
    assert scene.engine.log.count("load") == 2


class ExaminedHook(FakeHook):
    """A hook of an engine that could be examined."""

    dtype_error = None

    def start_directory(self):
        return "/models/base"

    def dtype(self):
        if self.dtype_error is not None:
            raise self.dtype_error
        return "float32"


@pytest.mark.parametrize("exam", ["on", "off"])
@pytest.mark.parametrize("fault", ["damaged baseline", "unreadable baseline", "no answer"])
def test_what_cannot_be_read_before_the_first_version_ends_no_follower(scene, monkeypatch, fault, exam):
    if exam == "on":
        pytest.importorskip("explorer_hooks.parts.exam")
    scene.hook = ExaminedHook(scene.engine, probes="serving")
    if fault == "damaged baseline":
        write_base_probe(scene.job, probe_of(START), "/models/base")
        with open(scene.job.base_probe, "w") as file:
            file.write("{")
    elif fault == "unreadable baseline":
        monkeypatch.setattr(follower_module, "read_base_probe", fail_to_read)
    else:
        scene.hook.dtype_error = EngineUnreachableError("it does not answer")
    follower = scene.follow(exam=exam)
    assert scene.names().count("exam_left_out") == (exam == "on")
    scene.hook.dtype_error = None
    publish(scene, 1)
    proven(scene, follower, 1)


def fail_to_read(_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_an_engine_that_reloads_its_start_weights_well_passes_the_reload_test(scene):
    write_base_probe(scene.job, probe_of(START), "/models/base")
    scene.hook.reloads_start = True
    follower = scene.follow()
    assert scene.engine.log == ["reload_start"]
    assert scene.names().count("reload_tested") == 1
    publish(scene, 1)
    proven(scene, follower, 1)
    assert scene.engine.log.count("reload_start") == 1


@pytest.mark.fault("an engine that cannot reload its own model reports each version as applied")
def test_an_engine_that_reloads_its_start_weights_as_others_is_wrong_at_once(scene):
    write_base_probe(scene.job, probe_of(START), "/models/base")
    scene.hook.reloads_start = True
    scene.engine.doing["reload_start"] = lambda: setattr(scene.engine, "answers_as", "permuted experts")
    follower = scene.follow(retries=0)
    event = dict(scene.told)["reload_test_failed"]
    assert "cannot reload this model" in event["reason"]
    assert event["hint"]
    assert (report(scene).state, report(scene).ready) == (EngineState.WRONG, False)
    assert not follower.may_work()
    publish(scene, 1)
    assert follower.turn(timeout=LONG).kind == "failed"
    assert report(scene).state is EngineState.WRONG


def test_an_engine_that_fails_to_read_its_start_weights_is_dead(scene):
    write_base_probe(scene.job, probe_of(START), "/models/base")
    scene.hook.reloads_start = True
    scene.engine.fails["load"] = 1
    assert report(scene, scene.follow()).state is EngineState.DEAD


@pytest.mark.parametrize("why", ["switched off", "another start model", "no baseline"])
def test_the_reload_test_is_left_out(scene, why):
    if why != "no baseline":
        write_base_probe(
            scene.job, probe_of("other" if why == "another start model" else START), "/models/base"
        )
    scene.hook.reloads_start = True
    scene.follow(reload_test=why != "switched off")
    assert scene.engine.log == []


def neighbour(scene, step):
    """Publish a step whose trainer answers as that of the first: too close to it for a probe."""
    write_step(scene.job, step, probe=lambda _: probe_of(read(scene, 1)))
    scene.tick()


def test_an_engine_that_stayed_where_it_was_is_found_by_its_checksums_alone(scene):
    follower = scene.follow(retries=0)
    scene.engine.gives_checksums = True
    publish(scene, 1)
    proven(scene, follower, 1)
    assert report(scene).proof.checksums == "not needed"
    scene.engine.answers_as = read(scene, 1)
    neighbour(scene, 2)
    outcome = follower.turn(timeout=LONG)
    assert outcome.kind == "failed"
    assert "checksums are those of the version before" in outcome.reason
    found = report(scene)
    assert (found.state, found.proof.version) == (EngineState.FAILED, scene.label(1))


@pytest.mark.parametrize("gives", [True, False])
def test_neighbouring_versions_are_proven_with_the_word_of_the_checksums(scene, gives):
    follower = scene.follow(retries=0)
    scene.engine.gives_checksums = gives
    publish(scene, 1)
    proven(scene, follower, 1)
    right = logprobs_of(read(scene, 1), TOKENS)
    scene.engine.probe = lambda tokens: right
    neighbour(scene, 2)
    proven(scene, follower, 2)
    assert report(scene).proof.checksums == ("changed" if gives else "not given")


@pytest.mark.parametrize("others", [["stale"], ["right", "stale"]])
def test_a_replica_that_answers_as_other_weights_proves_nothing(scene, others):
    follower = scene.follow(retries=0)
    publish(scene, 1)
    right = read(scene, 1)
    scene.engine.others_answer_as = [right if other == "right" else other for other in others]
    outcome = follower.turn(timeout=LONG)
    assert outcome.kind == "failed"
    assert outcome.reason.startswith(
        f"replica {len(others)} of {len(others) + 1}: the engine answers as other"
    )
    assert report(scene).state is EngineState.WRONG
    assert report(scene).proof.mean > 0.01
    publish(scene, 2)
    scene.engine.others_answer_as = [read(scene, 2)] * len(others)
    proven(scene, follower, 2)
    assert report(scene).proof.replicas == len(others) + 1


def test_an_engine_on_another_model_is_named_and_not_calibrated(scene):
    write_base_probe(scene.job, probe_of("another model"), "/models/base")
    follower = scene.follow()
    assert "start_model_differs" in scene.names()
    publish(scene, 1)
    proven(scene, follower, 1)
    assert report(scene).proof.calibrated is None


def may_write(follower):
    """Return whether work that was begun now, or before, may be written as that of the start model."""
    return (
        follower.may_work(),
        version_of(follower.running(), BEFORE_THE_FIRST) is not None,
        version_after(follower.running(), BEFORE_THE_FIRST) is not None,
        WeightSource(follower).are_published({BEFORE_THE_FIRST}),
    )


@pytest.mark.fault("an engine that was started with another model writes rollouts of the job's start model")
@pytest.mark.parametrize("when", ["before", "later"])
@pytest.mark.parametrize("probes", ["serving", "held"])
def test_an_engine_on_another_start_model_gets_no_work_until_a_version_is_proven(scene, when, probes):
    scene.hook.probes, seen = probes, []
    follower = scene.follow(retries=1) if when == "later" else None
    if follower is not None:
        assert all(may_write(follower))  # nothing shows it yet
    write_base_probe(scene.job, probe_of("another model"), "/models/base")
    follower = follower or scene.follow(retries=1)
    assert follower.turn(timeout=0.0).kind == "nothing"
    assert not any(may_write(follower))
    assert (report(scene).state, report(scene).ready) == (EngineState.WRONG, False)
    assert "another model" in report(scene).reason
    assert "another model" in follower.engine_reason
    publish(scene, 1)
    scene.engine.doing["commit"] = lambda: seen.append(may_write(follower)[1:])
    scene.engine.fails["commit"] = 1  # it goes back to the start that it has
    proven(scene, follower, 1)
    assert not any(map(any, seen))
    assert scene.names().count("load_failed") == 1
    assert follower.may_work()
    assert not WeightSource(follower).are_published({BEFORE_THE_FIRST, (1, 1)})
    assert WeightSource(follower).are_published({(1, 1)})


def test_an_engine_that_is_restarted_on_the_right_model_gets_work(scene):
    write_base_probe(scene.job, probe_of(START), "/models/base")
    scene.engine.answers_as = "another model"
    follower = scene.follow()
    assert not any(may_write(follower))
    scene.engine.is_gone = True
    follower.turn(timeout=0.0)
    scene.engine.is_gone, scene.engine.answers_as = False, None
    follower.turn(timeout=0.0)
    assert all(may_write(follower))


def test_an_engine_that_rounds_further_than_its_dtype_is_not_called_one_on_another_model(scene):
    write_base_probe(scene.job, probe_of("what rounding makes of it"), "/models/base")
    scene.hook.rounds = "--kv-cache-dtype fp8"
    follower = scene.follow(retries=0)
    assert "start_model_differs" not in scene.names()
    event = dict(scene.told)["calibration_failed"]
    assert "--kv-cache-dtype fp8" in event["reason"]
    assert "probe=false" in event["hint"]
    publish(scene, 1)
    scene.engine.answers_as = START
    assert follower.turn(timeout=LONG).kind == "failed"
    assert "--kv-cache-dtype fp8" in dict(scene.told)["proof_failed"]["hint"]


def test_a_baseline_that_appears_later_calibrates_before_the_first_load(scene):
    follower = scene.follow()
    write_base_probe(scene.job, probe_of(START), "/models/base")
    publish(scene, 1)
    proven(scene, follower, 1)
    assert report(scene).proof.calibrated == 0.0


@pytest.mark.parametrize("probes", ["serving", "held"])
def test_an_answer_that_fails_is_a_failed_load(scene, probes):
    scene.hook.probes = probes
    follower = scene.follow(retries=1)
    publish(scene, 1)
    scene.engine.fails["probe"] = 1
    outcome = follower.turn(timeout=LONG)
    assert outcome.kind == "applied"
    assert scene.names().count("load_failed") == 1
    assert report(scene).failures == 1


def test_states_that_operators_see_follow_the_engine(scene):
    follower = scene.follow(retries=0)
    begun = report(scene)
    assert (begun.state, begun.ready, begun.loads) == (EngineState.WAITING, False, 0)
    seen = []
    scene.engine.doing["load"] = lambda: seen.append(report(scene).state)
    publish(scene, 1)
    proven(scene, follower, 1)
    assert seen == [EngineState.LOADING]
    assert report(scene).since >= begun.since
    assert report(scene).load_seconds > 0
    publish(scene, 2)
    scene.engine.fails["prepare"] = 1
    assert follower.turn(timeout=LONG).kind == "refused"
    found = report(scene)
    assert (found.state, found.ready, found.failures) == (EngineState.REFUSED, True, 1)
    assert found.given_up[0].step == 2
    assert found.given_up[0].refused
    scene.engine.is_gone = True
    follower.turn(timeout=0.1)
    assert (report(scene).state, report(scene).ready) == (EngineState.UNREACHABLE, False)


def test_the_daemon_reports_what_engines_report(scene, monkeypatch):
    monkeypatch.setattr(scan, "MODULES_EVERY", 0.0)
    monkeypatch.setattr(scan, "MODULES_SHARE", 0)
    follower = scene.follow(retries=0)
    publish(scene, 1)
    proven(scene, follower, 1)
    scene.tick()
    *_, last = reported = scene.heard.of("engine_reported")
    assert (last["explorer"], last["state"], last["ready"], last["failures"]) == ("e0", "proven", True, 0)
    assert (last["mean"], last["load_seconds"] > 0) == (0.0, True)
    assert scene.heard.of("engine_state_changed") == []
    scene.tick()
    assert len(scene.heard.of("engine_reported")) == len(reported)
    publish(scene, 2)
    scene.engine.answers_as = "a stale head"
    assert follower.turn(timeout=LONG).kind == "failed"
    scene.tick()
    scene.engine.answers_as = None
    publish(scene, 3)
    proven(scene, follower, 3)
    scene.tick()
    follower.close()
    scene.tick()
    assert scene.heard.of("engine_reported")[-1]["state"] == "proven"  # that it has left is another event
    wrong, well = (event for event in scene.heard.events if event.name == "engine_state_changed")
    assert (wrong.level, wrong.fields["state"]) == ("error", "wrong")
    assert (well.level, well.fields["before"]) == ("info", "wrong")
    assert "answers as other weights" in wrong.fields["reason"]


def test_an_installation_without_exams_says_so_and_proves_versions(scene, monkeypatch):
    monkeypatch.setattr(start_checks, "registered", lambda group: {})
    with pytest.raises(ConfigError, match="examines no engine"):
        scene.follow("e1", exam="on")
    follower = scene.follow()
    assert report(scene).exam == "off"
    publish(scene, 1)
    proven(scene, follower, 1)
