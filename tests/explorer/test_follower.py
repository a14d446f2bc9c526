"""The follower over a real job directory and a real daemon, with an engine that can be told to go wrong."""

import contextlib
import errno
import os
import shutil
import threading

import pytest
from support.fake_hook import HALF, START, FakeEngine, FakeHook, digest_of, tensors_of
from support.followers import QUICK, Scene
from support.jobs import shard_bytes, write_step

import syncd.client.own_presence
import syncd.transports.files.stage
from explorer_hooks.follower.follower import Follower, FollowOptions
from explorer_hooks.follower.versions import Fetcher
from explorer_hooks.hook import Running
from syncd.errors import ConfigError, EngineDeadError, RefusedError, StorageError, UsageError
from syncd.protocol.digest import digest_file
from syncd.protocol.documents import encode
from syncd.protocol.engine_state import EngineState, engine_report_of
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.manifest import read_manifest
from syncd.protocol.presence import RunningStatus
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import UNKNOWN_LABEL
from syncd.synchronizer import Synchronizer
from syncd.transports.tensors import read_tensors, require_tensors

LONG = 60.0
SHORT = 0.15
"""How long something is watched that must not happen: many looks."""


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path / "job")
    yield made
    made.close()


def applied(follower, step, generation=1):
    outcome = follower.turn(timeout=LONG)
    assert (outcome.kind, outcome.pair) == ("applied", (generation, step)), outcome


def serves(scene, step):
    """Check that the engine runs a step whole, and works."""
    assert scene.engine.weights == digest_of(scene.payload(step))
    assert scene.engine.label == scene.label(step)
    assert not scene.engine.paused


# --- versions in turn -------------------------------------------------------------------------------------------


@pytest.mark.fault("the version is set before the weights are loaded")
def test_each_version_is_loaded_confirmed_and_reported_in_presence(scene):
    follower = scene.follow()
    assert follower.turn(timeout=0).kind == "nothing"
    assert follower.applied is None
    seen = []
    scene.engine.doing["commit"] = lambda: seen.append(scene.presence())
    for step in (1, 2, 3):
        scene.publish(step)
        applied(follower, step)
        assert follower.applied == scene.presence().applied == (1, step)
        serves(scene, step)
    assert scene.engine.log == ["prepare", "load", "commit"] * 3
    assert [one.applied for one in seen] == [None, (1, 1), (1, 2)]
    assert [one.loading for one in seen] == [(1, 1), (1, 2), (1, 3)]
    assert {one.info["state"] for one in seen} == {"loading"}
    info = scene.presence().info
    assert (info["state"], info["loads"]) == ("loaded", 3)
    assert info["bytes"] == 3 * os.path.getsize(f"{scene.payload(3)}/model-00001-of-00001.safetensors")
    assert set(info["timings"]) == {"noticed", "verify", "prepare", "load", "confirm"}


def test_the_newest_version_is_loaded_and_older_ones_are_skipped(scene):
    follower = scene.follow()
    for step in (1, 2, 3):
        scene.publish(step)
    applied(follower, 3)
    assert follower.turn(timeout=SHORT).kind == "nothing"
    assert scene.engine.log.count("load") == 1


def test_policy_every_loads_all_versions_in_order(scene):
    follower = scene.follow(policy="every")
    for steps in ((1, 2), (3,), (4, 5)):
        for step in steps:
            write_step(scene.job, step)
        scene.tick()
        for step in steps:
            applied(follower, step)
    assert follower.turn(timeout=SHORT).kind == "nothing"


def test_policy_exact_waits_for_its_step_and_ends(scene):
    scene.publish(1)
    follower = scene.follow(policy="exact=2")
    assert follower.turn(timeout=SHORT).kind == "nothing"
    scene.publish(2)
    scene.publish(3)
    applied(follower, 2)
    assert follower.turn(timeout=LONG).kind == "ended"


def test_policy_exact_reports_a_step_that_is_gone(scene):
    scene.publish(5)
    follower = scene.follow(policy="exact=2")
    outcome = follower.run()
    assert (outcome.kind, outcome.pair) == ("gone", None)
    assert "step 2" in outcome.reason


def test_policy_at_least_waits_for_its_step(scene):
    follower = scene.follow(policy="at-least=2")
    scene.publish(1)
    assert follower.turn(timeout=SHORT).kind == "nothing"
    scene.publish(3)
    applied(follower, 3)
    scene.publish(4)
    applied(follower, 4)


@pytest.mark.fault("a marker moving back is ignored")
def test_a_rollback_of_the_trainer_is_followed(scene):
    follower = scene.follow(max_lag=2)
    scene.publish(3)
    applied(follower, 3)
    scene.publish(4)
    applied(follower, 4)
    with Synchronizer.open(scene.root, "trainer") as trainer:
        trainer.set_model_state_dict(None, 3, rewind=True)
        scene.tick()
        assert not follower.may_work()  # what it runs was abandoned
        applied(follower, 3, generation=2)
    assert follower.may_work()


@pytest.mark.parametrize("stage", [False, True])
def test_steps_in_use_are_leased_and_staged_ones_are_not(scene, tmp_path, stage):
    follower = scene.follow(stage=str(tmp_path / "stage") if stage else None)
    leases = []
    scene.engine.doing["load"] = lambda: leases.append(scene.presence().leases)
    for step in (1, 2):
        scene.publish(step)
        applied(follower, step)
    assert leases == ([(1,), (2,)] if stage else [(1,), (1, 2)])
    assert scene.presence().leases == (() if stage else (2,))
    assert scene.presence().loading is None
    assert ("staged" in scene.presence().info) is stage


# --- what is refused before the engine is touched ---------------------------------------------------------------


def untouched(scene, follower, outcome, *words):
    """Check a refusal: the engine goes on with step 1, people see why, and it is not tried again."""
    assert outcome.kind == "refused"
    report = engine_report_of(scene.presence().info)
    assert (report.state, report.failures) == (EngineState.REFUSED, 1)
    (record,) = report.given_up
    for word in words:
        assert word in outcome.reason
        assert word in record.reason
        assert word in report.reason
    assert all(fields["hint"] for name, fields in scene.told if name == "load_refused")
    assert (record.step, record.refused) == (2, True)
    assert record.digest == read_manifest(scene.job.disk, scene.job.step(2)).digest
    assert scene.engine.log == ["prepare", "load", "commit"]
    serves(scene, 1)
    assert follower.turn(timeout=SHORT).kind == "nothing"
    assert scene.engine.log == ["prepare", "load", "commit"]
    write_step(scene.job, 3)
    scene.tick()
    applied(follower, 3)
    after = engine_report_of(scene.presence().info)
    assert (after.state, after.reason, after.given_up) == (EngineState.LOADED, "", (record,))


@pytest.fixture
def running(scene):
    """Return a follower whose engine runs step 1."""
    follower = scene.follow()
    scene.publish(1)
    applied(follower, 1)
    return follower


def publish_tensors(scene, step, tensors):
    """Publish a step of other tensors."""
    with Synchronizer.open(scene.root) as sync:
        sync.set_model_state_dict(tensors, step)
    scene.tick()


WRONG = {
    "shape": ({"layer.1.weight": ("F32", (2, 8), bytes(64))}, ["layer.1.weight", "F32[2, 8]", "F32[4, 8]"]),
    "dtype": ({"layer.1.weight": ("BF16", (4, 8), bytes(64))}, ["layer.1.weight", "BF16"]),
    "missing": ({"other": ("F32", (4, 8), bytes(128))}, ["layer.1.weight", "missing", "other"]),
    "extra": (
        {"layer.1.weight": ("F32", (4, 8), bytes(128)), "more": ("F32", (1,), bytes(4))},
        ["more", "not expected"],
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_tensors_that_do_not_fit_the_model_are_refused(scene, running, what):
    tensors, words = WRONG[what]
    publish_tensors(scene, 2, tensors)
    untouched(scene, running, running.turn(timeout=LONG), *words)


def test_the_hook_s_tensor_list_takes_precedence_over_the_first_version(scene):
    scene.hook.known = tensors_of(w=(2, 2))
    follower = scene.follow()
    scene.publish(1)
    outcome = follower.turn(timeout=LONG)
    assert outcome.kind == "refused"
    assert "layer.1.weight" in outcome.reason
    assert scene.engine.log == []
    assert scene.engine.weights == START


def _truncate(path):
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) - 4)


def _break_header(path):
    with open(path, "r+b") as file:
        file.seek(12)
        file.write(b"\xff\xff")


def _flip(path):
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


DAMAGE = {
    "truncated": (_truncate, "header", "bytes of"),
    "missing": (os.unlink, "header", "missing"),
    "header": (_break_header, "header", "header"),
    "content": (_flip, "content", "digest"),
}


@pytest.mark.parametrize("stage", [False, True])
@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_version_is_refused(scene, tmp_path, what, stage):
    damage, verify, word = DAMAGE[what]
    follower = scene.follow(verify=verify, stage=str(tmp_path / "stage") if stage else None)
    scene.publish(1)
    applied(follower, 1)
    scene.publish(2)
    damage(f"{scene.payload(2)}/model-00001-of-00001.safetensors")
    untouched(scene, follower, follower.turn(timeout=LONG), "digest" if stage and what == "header" else word)


def test_a_flipped_byte_is_refused_naming_the_file_and_both_digests(scene, running):
    manifest = scene.publish(2)
    shard = f"{scene.payload(2)}/model-00001-of-00001.safetensors"
    _flip(shard)
    found = digest_file(LocalDisk(), shard)[0]
    untouched(scene, running, running.turn(timeout=LONG), shard, found, manifest.shards[0].digest)


def test_a_damaged_last_good_version_is_not_loaded_on_rollback(scene):
    scene.publish(1)
    scene.engine.label, scene.engine.weights = scene.label(1), digest_of(scene.payload(1))
    follower = scene.follow(retries=0)
    assert follower.applied == (1, 1)  # it runs it already: nothing was read
    _flip(f"{scene.payload(1)}/model-00001-of-00001.safetensors")
    scene.engine.fails["load"] = 1
    scene.publish(2)
    assert follower.turn(timeout=LONG).kind == "failed"
    assert scene.hook.aborted == []
    assert scene.engine.paused, "nobody is answered by a mixture"
    scene.publish(3)
    applied(follower, 3)


class Slow(LocalDisk):
    """Waits at each piece of a shard until it is told to go on."""

    def __init__(self, *roots):
        super().__init__(*roots)
        self.at, self.go = threading.Event(), threading.Event()

    def read_at(self, path, offset, length):
        if path.endswith(".safetensors") and threading.current_thread().name.startswith("files"):
            self.at.set()
            assert self.go.wait(LONG)
        return super().read_at(path, offset, length)


def test_heartbeats_continue_while_hashing_and_a_stop_ends_it(scene, monkeypatch):
    monkeypatch.setattr("syncd.client.own_presence.HEARTBEAT", 0.01)
    told, slow = threading.Event(), Slow((scene.root,))
    with Synchronizer.open(scene.root, "explorer", "e0", poll=0.005, disk=slow) as sync:
        follower = Follower(sync, scene.hook, FollowOptions(**QUICK), stop=told.is_set)
        scene.publish(1)
        turning = threading.Thread(target=lambda: done.append(follower.turn(timeout=LONG)))
        done: list[object] = []
        turning.start()
        assert slow.at.wait(LONG)
        before = scene.presence()
        assert (before.loading, before.leases) == ((1, 1), (1,))
        until_more = threading.Event()
        while scene.presence().beat <= before.beat:
            until_more.wait(0.01)
        told.set()
        slow.go.set()
        turning.join(LONG)
        assert [one.kind for one in done] == ["gone"] or [one.kind for one in done] == ["nothing"]
        assert scene.engine.log == []
        assert scene.presence().leases == ()


class Hashing(LocalDisk):
    """Counts the bytes of shards that are read by those who hash."""

    def __init__(self, *roots):
        super().__init__(*roots)
        self.bytes = 0

    def read_at(self, path, offset, length):
        found = super().read_at(path, offset, length)
        if threading.current_thread().name.startswith("files"):
            self.bytes += len(found)
        return found


@pytest.mark.parametrize(
    ("verify", "stage", "times"), [("content", False, 2), ("content", True, 1), ("header", False, 0)]
)
def test_followers_that_share_a_stage_hash_a_version_once(scene, tmp_path, verify, stage, times):
    disk = Hashing((scene.root,))
    manifest = scene.publish(1)
    options = FollowOptions(**QUICK, verify=verify, stage=str(tmp_path / "stage") if stage else None)
    with contextlib.ExitStack() as stack:
        for identity in ("e0", "e1"):
            sync = Synchronizer.open(scene.root, "explorer", identity, poll=0.005, disk=disk)
            follower = stack.enter_context(Follower(sync, FakeHook(FakeEngine()), options))
            applied(follower, 1)
    assert disk.bytes == times * manifest.size


@pytest.mark.parametrize(
    ("shards", "word"),
    [
        ([], "no tensors"),
        ([("a.safetensors", {})], "no tensors"),
        ([("a.safetensors", {"w": (2,)}), ("b.safetensors", {"w": (2,)})], "two shards hold tensor 'w'"),
    ],
)
def test_a_version_with_missing_or_duplicate_tensors_is_refused(tmp_path, shards, word):
    """Sealing and publishing refuse it too; a step that an earlier release has published comes this far."""
    records = []
    for name, tensors in shards:
        (tmp_path / name).write_bytes(shard_bytes(tensors))
        digest, size = digest_file(LocalDisk(), f"{tmp_path}/{name}")
        records.append(FileRecord(name, size, digest, len(tensors)))
    with pytest.raises(RefusedError, match=word):
        read_tensors(LocalDisk(), str(tmp_path), records)
    if not records:
        with pytest.raises(RefusedError, match=word):
            require_tensors(records, str(tmp_path))


def test_after_an_engine_restart_the_first_applied_version_sets_the_tensors(scene, running):
    scene.engine.restart()
    publish_tensors(scene, 2, {"other": ("F32", (4, 8), bytes(128))})
    outcome = running.turn(timeout=LONG)
    assert (outcome.kind, outcome.pair) == ("refused", (1, 2))
    assert "layer.1.weight' is missing" in outcome.reason


def test_a_version_that_the_hook_refuses_is_refused(scene, running):
    scene.engine.fails["prepare"] = 1
    scene.publish(2)
    assert running.turn(timeout=LONG).kind == "refused"
    serves(scene, 1)
    assert scene.hook.aborted == []


def test_a_kind_that_the_hook_does_not_load_is_refused(scene, running):
    with Synchronizer.open(scene.root) as sync:
        sync.set_model_state_dict("tinker://weights/7", 2)
    scene.tick()
    untouched(scene, running, running.turn(timeout=LONG), "remote", "weights")


def test_a_remote_version_that_is_a_directory_is_loaded_as_weights(scene, running, tmp_path):
    # What a run that begins again without a checkpoint publishes: the model that it started from.
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "model.safetensors").write_bytes(shard_bytes({"w": (2, 2)}))
    with Synchronizer.open(scene.root) as sync:
        sync.set_model_state_dict(str(tmp_path / "start"), 2)
    scene.tick()
    applied(running, 2)
    assert scene.engine.weights == digest_of(tmp_path / "start")
    assert scene.presence().applied == (1, 2)


def test_a_uri_is_passed_to_a_hook_that_takes_remote_versions(scene):
    hook = FakeHook(scene.engine, frozenset({"remote"}))
    follower = scene.follow(hook=hook)
    with Synchronizer.open(scene.root) as sync:
        sync.set_model_state_dict("tinker://weights/7", 2)
    scene.tick()
    scene.engine.load = lambda path: setattr(scene.engine, "weights", path)
    applied(follower, 2)
    assert scene.engine.weights == "tinker://weights/7"


def test_a_malformed_uri_is_neither_published_nor_passed_to_the_hook(scene):
    hook = FakeHook(scene.engine, frozenset({"remote"}))
    follower = scene.follow(hook=hook)
    with Synchronizer.open(scene.root) as sync, pytest.raises(UsageError, match="neither a URI"):
        sync.set_model_state_dict("--config=/tmp/evil", 1)
    # A daemon of an earlier release has published one all the same.
    document = {
        "generation": 1, "step": 1, "kind": "remote", "path": "--config=/tmp/evil", "digest": "sha256:00",
        "layout": "tinker", "published_at": 0.0, "abandoned": [],
    }  # fmt: skip
    scene.job.disk.replace(scene.job.version, encode(document))
    outcome = follower.turn(timeout=LONG)
    assert (outcome.kind, scene.engine.log) == ("refused", [])
    assert "neither a URI" in outcome.reason


def test_foreign_safetensors_steps_are_loaded(scene, tmp_path):
    follower = scene.follow(stage=str(tmp_path / "stage"))
    for step, name, data in ((1, "model.safetensors", shard_bytes({"w": (2, 2)})), (2, "model.bin", b"")):
        os.makedirs(scene.payload(step))
        with open(f"{scene.payload(step)}/{name}", "wb") as file:
            file.write(data)
    with open(scene.job.marker, "w") as file:
        file.write("1")
    scene.tick()
    applied(follower, 1)
    target = scene.hook.prepared[-1]
    assert (target.path, target.shards, set(target.tensors)) == (scene.payload(1), (), {"w"})


def test_a_follower_that_starts_beside_a_running_engine_can_go_back_to_a_foreign_step(scene):
    applied(scene.follow(), foreign(scene, 1))
    again = scene.follow("e1", retries=0)
    assert again.applied == (1, 1)
    foreign(scene, 2)
    scene.engine.fails["load"] = 1
    assert again.turn(LONG).kind == "failed"
    assert scene.hook.aborted[-1].path == scene.payload(1)
    assert scene.engine.weights == digest_of(scene.payload(1))


def foreign(scene, step):
    """Publish a step as another framework writes it, and return it."""
    os.makedirs(scene.payload(step))
    with open(f"{scene.payload(step)}/model.safetensors", "wb") as file:
        file.write(shard_bytes({"w": (2, 2)}, step))
    with open(scene.job.marker, "w") as file:
        file.write(str(step))
    scene.tick()
    return step


# --- what fails in the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["load", "commit"])
def test_a_load_that_failed_once_is_retried(scene, running, phase):
    scene.engine.fails[phase] = 1
    scene.publish(2)
    applied(running, 2)
    serves(scene, 2)
    assert scene.engine.log[3:] == [
        *(["prepare", "load", "abort"] if phase == "load" else ["prepare", "load", "commit", "abort"]),
        *["prepare", "load", "commit"],
    ]
    assert scene.hook.aborted[0].label == scene.label(1)
    assert "failed" not in scene.presence().info


@pytest.mark.fault("an exception between pause and resume leaves an engine paused")
@pytest.mark.parametrize("phase", ["load", "commit"])
def test_a_version_that_keeps_failing_is_given_up_and_rolled_back(scene, running, phase):
    scene.engine.fails[phase] = 3
    scene.publish(2)
    outcome = running.turn(timeout=LONG)
    assert (outcome.kind, outcome.pair) == ("failed", (1, 2))
    assert f"{phase} went wrong" in outcome.reason
    serves(scene, 1)
    presence = scene.presence()
    assert presence.applied == running.applied == (1, 1)
    report = engine_report_of(presence.info)
    assert (report.state, report.failures, report.ready) == (EngineState.FAILED, 3, True)
    assert [(one.step, one.refused) for one in report.given_up] == [(2, False)]
    assert presence.leases == (1,)
    tried = scene.engine.log.count("load")
    assert tried == 4
    assert running.turn(timeout=SHORT).kind == "nothing"
    assert scene.engine.log.count("load") == tried
    scene.publish(3)
    applied(running, 3)
    serves(scene, 3)


def test_the_last_good_version_is_kept_however_many_versions_fail(scene, running):
    scene.engine.fails["load"] = 100
    for step in range(2, 7):
        scene.publish(step)
        assert running.turn(timeout=LONG).kind == "failed"
        serves(scene, 1)
    assert os.path.isdir(scene.payload(1))


def test_a_newer_version_takes_precedence_over_a_retry(scene):
    follower = scene.follow(backoff=60.0)
    scene.publish(1)
    applied(follower, 1)
    scene.publish(2)
    scene.engine.fails["load"] = 1
    scene.engine.doing["abort"] = lambda: scene.publish(3)
    applied(follower, 3)


def test_an_engine_that_reports_another_version_fails_the_load(scene, running):
    scene.publish(2)
    scene.engine.lies = scene.label(1)
    outcome = running.turn(timeout=LONG)
    assert outcome.kind == "failed"
    assert f"{scene.label(2)} and reports {scene.label(1)}" in outcome.reason
    assert scene.presence().applied == (1, 1)
    assert scene.engine.weights == digest_of(scene.payload(1))


def test_a_failed_first_load_is_a_dead_engine(scene):
    follower = scene.follow()
    scene.engine.fails["load"] = 1
    scene.publish(1)
    with pytest.raises(EngineDeadError, match="cannot go back"):
        follower.turn(timeout=LONG)
    assert scene.presence().info["state"] == "dead"
    assert not follower.may_work()
    with pytest.raises(EngineDeadError):
        follower.turn(timeout=SHORT)


def test_an_engine_that_cannot_roll_back_is_dead_until_it_restarts(scene, running):
    scene.engine.fails["commit"] = 1
    scene.engine.cannot_go_back = True
    scene.publish(2)
    with pytest.raises(EngineDeadError):
        running.turn(timeout=LONG)
    presence = scene.presence()
    assert (presence.applied, presence.info["state"]) == (None, "dead")
    assert engine_report_of(presence.info).given_up[0].step == 2
    scene.engine.restart()
    scene.engine.cannot_go_back = False
    scene.publish(3)
    applied(running, 3)
    serves(scene, 3)


def test_an_arbitrary_exception_of_a_hook_fails_the_load(scene, running):
    def broken():
        raise KeyError("tensor")

    scene.publish(2)
    scene.engine.doing["load"] = broken
    outcome = running.turn(timeout=LONG)
    assert outcome.kind == "failed"
    assert "KeyError" in outcome.reason
    serves(scene, 1)


def test_an_interrupted_load_rolls_back(scene, running):
    def interrupted():
        raise KeyboardInterrupt

    scene.publish(2)
    scene.engine.doing["commit"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        running.turn(timeout=LONG)
    serves(scene, 1)


# --- engines that go and come -----------------------------------------------------------------------------------


def test_an_unreachable_engine_is_loaded_once_it_answers(scene):
    scene.engine.is_gone = True
    follower = scene.follow()
    scene.publish(1)
    assert follower.turn(timeout=SHORT).kind == "unreachable"
    assert (scene.presence().applied, scene.presence().info["state"]) == (None, "unreachable")
    assert not follower.may_work()
    scene.engine.is_gone = False
    applied(follower, 1)
    assert follower.may_work()


def test_an_unchanged_engine_that_returns_is_not_loaded_again(scene, running):
    scene.engine.is_gone = True
    assert running.turn(timeout=SHORT).kind == "unreachable"
    assert (scene.presence().applied, scene.presence().info["state"]) == (None, "unreachable")
    scene.engine.is_gone = False
    assert running.turn(timeout=SHORT).kind == "nothing"
    assert (scene.presence().applied, scene.presence().info["state"]) == ((1, 1), "loaded")
    assert scene.engine.log.count("load") == 1


def test_a_restarted_engine_gets_the_newest_version(scene, running):
    seen = []
    scene.engine.doing["load"] = lambda: seen.append(scene.presence().applied)
    scene.engine.restart()
    applied(running, 1)
    assert seen == [None]  # corrected before the load
    serves(scene, 1)


def test_an_engine_restart_is_noticed_within_one_turn(scene, running):
    waiting = threading.Timer(0.05, scene.engine.restart)
    waiting.start()
    applied(running, 1)
    waiting.join()
    serves(scene, 1)


def test_an_engine_that_vanished_during_a_load_is_loaded_again(scene, running):
    scene.publish(2)
    scene.engine.doing["commit"] = lambda: setattr(scene.engine, "is_gone", True)
    assert running.turn(timeout=SHORT).kind == "unreachable"
    assert scene.engine.weights != HALF
    assert scene.engine.paused
    report = engine_report_of(scene.presence().info)
    assert (report.state, report.failures) == (EngineState.UNREACHABLE, 1)
    scene.engine.doing.clear()
    scene.engine.is_gone = False
    applied(running, 2)
    serves(scene, 2)


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "stale"), StorageError("the disk is full")])
def test_a_mount_that_fails_for_a_while_gives_no_version_up(scene, running, monkeypatch, error):
    fetch, failures = Fetcher.fetch, iter([error] * 6)

    def failing(self, wanted, timings, **options):
        if (found := next(failures, None)) is not None:
            raise found
        return fetch(self, wanted, timings, **options)

    monkeypatch.setattr(Fetcher, "fetch", failing)
    scene.publish(2)
    applied(running, 2)
    serves(scene, 2)
    assert engine_report_of(scene.presence().info).given_up == ()


def test_a_version_that_crashes_the_engine_each_time_is_given_up(scene, running):
    def crash():
        scene.engine.restart()
        scene.engine.is_gone = True
        threading.Timer(0.02, setattr, (scene.engine, "is_gone", False)).start()

    scene.publish(2)
    scene.engine.doing["load"] = crash
    outcome = running.turn(timeout=LONG)
    assert outcome.kind == "failed"
    assert scene.engine.log.count("prepare") == 4
    scene.engine.doing.clear()
    # The restarted engine goes back to what was good, in more than one short turn where the machine is busy.
    assert [running.turn(timeout=SHORT).kind for _ in range(5)] == ["nothing"] * 5
    serves(scene, 1)
    assert scene.presence().applied == (1, 1)


def test_a_first_version_that_ends_the_engine_each_time_is_given_up(scene):
    """It says nothing of a version before and after, but in between nobody listened."""
    follower = scene.follow(retries=0)
    scene.publish(1)
    scene.engine.why_gone = ConnectionRefusedError(111, "Connection refused")
    scene.engine.doing["load"] = lambda: setattr(scene.engine, "is_gone", True)
    assert follower.turn(timeout=SHORT).kind == "unreachable"
    scene.engine.doing.clear()
    scene.engine.is_gone = False
    follower.turn(timeout=0)
    assert [version.step for version in engine_report_of(scene.presence().info).given_up] == [1]


def test_a_first_version_is_not_given_up_because_the_network_was_out(scene):
    follower = scene.follow(retries=0)
    scene.publish(1)
    scene.engine.doing["load"] = lambda: setattr(
        scene.engine, "is_gone", True
    )  # the request never reaches it
    assert follower.turn(timeout=SHORT).kind == "unreachable"
    scene.engine.doing.clear()
    scene.engine.is_gone = False
    follower.turn(timeout=0)
    assert engine_report_of(scene.presence().info).given_up == ()
    while follower.applied is None:
        follower.turn(timeout=SHORT)
    serves(scene, 1)


@pytest.mark.parametrize("step", [1, 2, None])
def test_an_engine_left_paused_is_loaded_and_resumed(scene, step):
    scene.publish(1)
    scene.publish(2)
    scene.engine.label = scene.label(step) if step else None
    scene.engine.paused, scene.engine.weights = True, HALF
    follower = scene.follow()
    applied(follower, 2)
    serves(scene, 2)


def test_a_paused_engine_without_a_fitting_version_resumes_what_it_ran(scene):
    scene.publish(1)
    scene.publish(2)
    scene.engine.label, scene.engine.paused, scene.engine.weights = scene.label(1), True, HALF
    scene.engine.fails["prepare"] = 1
    follower = scene.follow()
    assert follower.turn(timeout=LONG).kind == "refused"
    assert follower.turn(timeout=SHORT).kind == "nothing"
    serves(scene, 1)
    assert scene.presence().applied == (1, 1)


def test_a_paused_engine_without_a_good_version_is_dead(scene):
    scene.publish(1)
    scene.engine.paused, scene.engine.weights = True, HALF
    scene.engine.fails["prepare"] = 1
    follower = scene.follow()
    assert follower.turn(timeout=LONG).kind == "refused"
    with pytest.raises(EngineDeadError):
        follower.turn(timeout=LONG)


def test_a_version_already_running_is_adopted_as_the_last_good_one(scene):
    scene.publish(1)
    scene.engine.label, scene.engine.weights = scene.label(1), digest_of(scene.payload(1))
    follower = scene.follow()
    assert scene.presence().applied == follower.applied == (1, 1)
    assert follower.turn(timeout=SHORT).kind == "nothing"
    assert scene.engine.log == []
    scene.engine.fails["load"] = 3
    scene.publish(2)
    assert follower.turn(timeout=LONG).kind == "failed"
    serves(scene, 1)


FOREIGN = ["9.9", "latest", "1.0.0", "1.1", "1.1.0123456789abcdef", "1.1+attempt", "unknown", ""]


@pytest.mark.parametrize("label", FOREIGN)
def test_an_engine_with_a_foreign_label_is_loaded_once(scene, label):
    scene.publish(1)
    scene.engine.label = label
    follower = scene.follow()
    assert follower.applied is scene.presence().applied is None
    assert follower.running() == Running(UNKNOWN_LABEL)
    applied(follower, 1)
    serves(scene, 1)
    assert follower.turn(timeout=SHORT).kind == "nothing"
    assert scene.engine.log == ["prepare", "load", "commit"]


@pytest.mark.parametrize("label", FOREIGN)
def test_an_engine_with_a_foreign_label_may_not_work(scene, label):
    scene.engine.label = label
    follower = scene.follow()
    assert not follower.may_work()
    scene.engine.restart()
    assert follower.turn(timeout=0).kind == "nothing"
    assert follower.may_work()


def test_an_engine_moved_from_another_job_is_loaded_again(scene, tmp_path):
    other = Scene(tmp_path / "other")
    try:
        other.publish(5, salt=1)
        scene.publish(5, salt=2)
        with Follower.open(other.root, FakeHook(scene.engine), "e0", FollowOptions(**QUICK)) as before:
            applied(before, 5)
        moved = scene.follow()
        assert moved.applied is None
        applied(moved, 5)
        serves(scene, 5)
    finally:
        other.close()


def test_an_older_running_version_is_identified_by_its_manifest(scene):
    scene.publish(1)
    scene.engine.label, scene.engine.weights = scene.label(1), digest_of(scene.payload(1))
    scene.publish(2)
    follower = scene.follow()
    assert follower.applied == (1, 1)
    assert scene.presence().applied_digest == read_manifest(scene.job.disk, scene.job.step(1)).digest
    applied(follower, 2)
    assert scene.presence().applied_digest == read_manifest(scene.job.disk, scene.job.step(2)).digest


# --- steps that go, trainers that go ----------------------------------------------------------------------------


def test_a_step_that_is_gone_is_skipped_for_the_newest(scene, running):
    scene.publish(2)
    shutil.rmtree(scene.job.step(2))
    outcome = running.turn(timeout=SHORT)
    assert (outcome.kind, outcome.pair) == ("gone", (1, 2))
    assert scene.engine.log == ["prepare", "load", "commit"]
    scene.publish(3)
    applied(running, 3)


class Meddling(LocalDisk):
    """Does something when a shard is first read, or fails where it is told to."""

    def __init__(self):
        self.meddle = None
        self.full = self.unreadable = ""

    def read(self, path, *limit):
        if self.unreadable and path.endswith(self.unreadable):
            raise OSError(5, "Input/output error", path)
        return super().read(path, *limit)

    def read_at(self, path, offset, length):
        if path.endswith(".safetensors") and self.meddle is not None:
            meddle, self.meddle = self.meddle, None
            meddle()
        return super().read_at(path, offset, length)

    def replace(self, path, data, **more):
        if self.full and self.full in path:
            raise OSError(28, "No space left on device", path)
        super().replace(path, data, **more)


def meddled(scene, disk, identity="e0", **options):
    """Return a follower over a disk of its own."""
    sync = Synchronizer.open(scene.root, "explorer", identity, disk=disk, poll=0.005)
    tell = lambda level, name, fields: scene.told.append((name, fields))  # noqa: E731
    made = Follower(sync, scene.hook, FollowOptions(**{**QUICK, **options}), listener=tell)
    return scene._stack.enter_context(made)


@pytest.mark.fault("a step is pruned while it is read")
def test_a_step_removed_while_it_is_staged_is_skipped_for_the_newest(scene, tmp_path):
    disk = Meddling()
    follower = meddled(scene, disk, stage=str(tmp_path / "stage"))
    scene.publish(1)

    def overtake():
        shutil.rmtree(scene.job.step(1))
        scene.publish(2)

    disk.meddle = overtake
    applied(follower, 2)
    assert scene.engine.log == ["prepare", "load", "commit"]


class Counting(LocalDisk):
    """Counts what is read of shards, by all followers together, from the job directory."""

    def __init__(self):
        self.count = 0

    def read_at(self, path, offset, length):
        data = super().read_at(path, offset, length)
        self.count += len(data) if path.endswith(".safetensors") else 0
        return data


def test_engines_that_share_a_stage_read_each_byte_of_the_job_once(scene, tmp_path):
    disk, engines = Counting(), [FakeEngine() for _ in range(3)]
    followers = []
    for place, engine in enumerate(engines):
        scene.hook = FakeHook(engine)
        followers.append(meddled(scene, disk, f"e{place}", stage=str(tmp_path / "stage")))
    total = 0
    for step in (1, 2, 3):
        total += sum(record.size for record in scene.publish(step, world_size=2).shards)
        for follower in followers:
            applied(follower, step)
        assert disk.count == total
        assert {engine.weights for engine in engines} == {digest_of(scene.payload(step))}
    assert len({target.path for hook in (scene.hook,) for target in hook.prepared}) == 3


def test_a_stage_without_space_is_bypassed(scene, tmp_path, monkeypatch):
    monkeypatch.setattr(syncd.transports.files.stage.LocalDisk, "free", lambda *_: 0)
    follower = scene.follow(stage=str(tmp_path / "stage"))
    scene.publish(1)
    applied(follower, 1)
    assert scene.hook.prepared[0].path == scene.payload(1)
    assert ("stage_write_failed" in scene.names(), scene.presence().leases) == (True, (1,))


def test_a_failed_presence_write_does_not_stop_the_load(scene):
    disk = Meddling()
    follower = meddled(scene, disk)
    scene.publish(1)
    applied(follower, 1)
    scene.publish(2)
    scene.engine.doing["commit"] = lambda: setattr(disk, "full", "/explorers/")
    applied(follower, 2)
    serves(scene, 2)
    assert "presence_write_failed" in scene.names()
    assert scene.presence().applied == (1, 1)
    disk.full = ""
    follower.turn(timeout=0)
    follower.client.beat()
    assert scene.presence().applied == (1, 2)


def test_the_follower_ends_with_the_trainer_after_its_last_version(scene):
    follower = scene.follow()
    with Synchronizer.open(scene.root, "trainer") as trainer:
        follower.client.trainer_requires_weight_sync()  # it was seen
        trainer.set_model_state_dict({"w": ("F32", (1,), b"1234")}, 7)
    scene.tick()
    follower.client.trainer_requires_weight_sync()
    applied(follower, 7)
    outcome = follower.run()
    assert (outcome.kind, outcome.pair) == ("ended", (1, 7))
    follower.close()
    assert scene.presence().status is RunningStatus.STOPPED


def test_a_request_to_the_trainer_is_answered_or_brings_a_version(scene):
    follower = scene.follow()
    with Synchronizer.open(scene.root, "trainer") as trainer:
        stop = threading.Event()

        def serve(make):
            while not stop.wait(0.005):
                if trainer.explorer_requires_sync():
                    make()
                    stop.set()
                    scene.tick()

        for make, kind in (
            (lambda: trainer.set_model_state_dict({"w": ("F32", (1,), b"1234")}, 1), "applied"),
            (trainer.notify_no_new_model_state_dict, "nothing"),
        ):
            stop.clear()
            serving = threading.Thread(target=serve, args=(make,))
            serving.start()
            assert follower.turn(timeout=LONG, ask=True).kind == kind
            serving.join()


def test_heartbeats_continue_during_a_long_load(scene, monkeypatch):
    monkeypatch.setattr(syncd.client.own_presence, "HEARTBEAT", 0.01)
    follower = scene.follow()
    scene.publish(1)

    def wait_for_beats():
        first = scene.presence().beat
        for _ in range(1000):
            if scene.presence().beat > first + 1:
                return
            threading.Event().wait(0.01)
        pytest.fail("the heart stood still")

    scene.engine.doing["load"] = wait_for_beats
    applied(follower, 1)


# --- readiness --------------------------------------------------------------------------------------------------


def test_a_ready_file_that_cannot_be_written_ends_no_follower_and_is_written_later(scene, tmp_path):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "ready"
    follower = scene.follow(ready_file=str(path))
    scene.publish(1)
    applied(follower, 1)
    shutil.rmtree(tmp_path / "run")
    scene.publish(2)
    applied(follower, 2)
    serves(scene, 2)
    assert scene.names().count("ready_file_failed") == 1
    assert follower.may_work()
    (tmp_path / "run").mkdir()
    follower._reporter.ready._written = float("-inf")  # a heartbeat later
    follower.turn(timeout=0)
    assert path.read_text().split()[0] == "1.2"


def test_a_version_file_that_cannot_be_read_is_reported_once_and_the_follower_goes_on(scene):
    disk = Meddling()
    follower = meddled(scene, disk)
    scene.publish(1)
    applied(follower, 1)
    disk.unreadable = "version.json"
    for _ in range(3):
        outcome = follower.turn(timeout=SHORT)
        assert outcome.kind == "nothing"
        assert "Input/output error" in outcome.reason
    assert scene.names().count("storage_failed") == 1
    disk.unreadable = ""
    scene.publish(2)
    applied(follower, 2)
    disk.unreadable = "version.json"
    follower.turn(timeout=SHORT)
    assert scene.names().count("storage_failed") == 2


def test_a_presence_and_its_follower_remember_the_newest_versions_that_were_given_up(scene):
    follower = scene.follow(retries=0)
    scene.engine.fails["prepare"] = 99
    for step in range(1, 12):
        scene.publish(step)
        assert follower.turn(timeout=LONG).kind == "refused"
    given_up = engine_report_of(scene.presence().info).given_up
    assert [(version.generation, version.step) for version in given_up] == [
        (1, step) for step in range(4, 12)
    ]
    assert len(follower._reporter.report.given_up) == 8


def test_the_ready_file_exists_only_while_the_engine_may_work(scene, tmp_path):
    path = tmp_path / "ready"
    path.write_text("left by a killed one")
    follower = scene.follow(ready_file=str(path), max_lag=1)
    assert not path.exists()
    scene.publish(1)
    applied(follower, 1)
    assert path.read_text().split()[0] == "1.1"
    scene.engine.fails["prepare"] = 9
    scene.publish(2)
    assert follower.turn(timeout=LONG).kind == "refused"
    assert path.exists()  # one step behind
    assert follower.may_work()
    scene.publish(3)
    assert follower.turn(timeout=LONG).kind == "refused"
    assert not path.exists()
    assert not follower.may_work()
    scene.engine.fails["prepare"] = 0
    scene.publish(4)
    applied(follower, 4)
    assert path.read_text().split()[0] == "1.4"
    scene.engine.is_gone = True
    assert follower.turn(timeout=SHORT).kind == "unreachable"
    assert not path.exists()
    scene.engine.is_gone = False
    assert follower.turn(timeout=SHORT).kind == "nothing"
    assert path.exists()
    follower.close()
    assert not path.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "latest"},
        {"policy": "exact=x"},
        {"verify": "deep"},
        {"retries": -1},
        {"backoff": float("nan")},
    ],
)
def test_invalid_follow_options_are_refused(wrong):
    with pytest.raises(ConfigError):
        FollowOptions(**wrong)


def test_an_identity_in_use_is_refused_to_a_second_follower(scene, running):
    with pytest.raises(UsageError, match="in use by another"):
        scene.follow()
