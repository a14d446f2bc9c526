"""The SGLang hook: what it sends, what a 400 means, and what becomes of a server that a bad shard ends."""

import os

import pytest
from support.engine_beds import SglangBed, write_version
from support.fake_engines import fingerprint_of
from support.fake_servers import Answer
from support.hook_contract import load
from support.targets import label, target_of

from explorer_hooks.hook import HookOptions, Running
from explorer_hooks.hooks.sglang import SGLangHook
from syncd.errors import ConfigError, EngineDeadError, EngineUnreachableError, LoadFailedError


@pytest.fixture
def bed(tmp_path):
    with SglangBed(tmp_path) as bed:
        yield bed


@pytest.fixture
def hook(bed):
    return bed.open()


def told(bed):
    return [(path, body) for path, body in bed.engine.seen if path.startswith("POST")]


def test_a_load_sends_pause_update_and_continue(bed, hook):
    target = bed.target((2, 120))
    load(hook, target)
    body = {"model_path": target.path, "weight_version": label(120, 2), "flush_cache": True}
    assert told(bed) == [
        ("POST /pause_generation", {"mode": "retract"}),
        ("POST /update_weights_from_disk", body),
        ("POST /continue_generation", {}),
    ]


def test_the_label_changes_together_with_the_weights(bed, hook):
    targets = [bed.target((1, step)) for step in (10, 11)]
    for target in targets:
        load(hook, target)
    assert bed.engine.versions_at == [(target.label, fingerprint_of(target.path)) for target in targets]


def test_a_400_before_the_first_tensor_resumes_the_engine_unchanged(bed, hook):
    """The directory is there for the follower and not for the engine."""
    good = bed.target((1, 10))
    load(hook, good)
    bed.engine.replies["/update_weights_from_disk"] = Answer(
        400, {"success": False, "message": "Failed to get weights iterator: no such directory."}
    )
    target = bed.target((1, 11))
    hook.prepare(target)
    with pytest.raises(LoadFailedError, match="no such directory"):
        hook.load(target)
    bed.engine.replies.clear()
    before = len(told(bed))
    hook.abort(good)
    assert [path for path, _ in told(bed)[before:]] == ["POST /continue_generation"]
    assert bed.runs(good)


def test_a_400_before_the_first_tensor_of_a_first_load_keeps_start_weights(bed, hook):
    bed.engine.replies["/update_weights_from_disk"] = Answer(
        400, {"success": False, "message": "Failed to get weights iterator: no such directory."}
    )
    target = bed.target((1, 10))
    hook.prepare(target)
    with pytest.raises(LoadFailedError):
        hook.load(target)
    hook.abort(None)
    assert hook.current_version() == Running(None)
    assert bed.runs(None)


def test_a_400_after_the_first_tensor_reloads_the_last_good_version(bed, hook):
    good = bed.target((1, 10))
    load(hook, good)
    target = bed.target((1, 11))
    hook.prepare(target)
    bed.fail_load(target)
    with pytest.raises(LoadFailedError, match="Rolling back to original weights"):
        hook.load(target)
    before = len(told(bed))
    hook.abort(good)
    assert told(bed)[before + 1][1]["model_path"] == good.path
    assert bed.runs(good)


def test_a_200_with_success_false_is_a_failed_load(bed, hook):
    target = bed.target((1, 10))
    hook.prepare(target)
    answer = {"success": False, "message": "Weights were updated, but the cache was not flushed"}
    bed.engine.replies["/update_weights_from_disk"] = Answer(200, answer)
    with pytest.raises(LoadFailedError, match="not flushed"):
        hook.load(target)
    with pytest.raises(EngineDeadError):
        hook.abort(None)


@pytest.mark.parametrize("body", [b"", b"ok", b"[]", b'{"success": "true"}'])
def test_a_malformed_200_response_is_a_failed_load(bed, hook, body):
    target = bed.target((1, 10))
    hook.prepare(target)
    bed.engine.replies["/update_weights_from_disk"] = Answer(200, body)
    with pytest.raises(LoadFailedError):
        hook.load(target)


def test_a_server_ended_by_a_wrong_shape_is_unreachable_until_restarted(bed, hook, tmp_path):
    bed.engine.survives = False
    good = bed.target((1, 10))
    load(hook, good)
    wrong = target_of(write_version(f"{tmp_path}/wrong", 5, shapes={"model.a": (9, 9)}), (1, 11))
    hook.prepare(wrong)
    with pytest.raises(EngineUnreachableError):
        hook.load(wrong)
    with pytest.raises(EngineUnreachableError):
        hook.abort(good)
    with pytest.raises(EngineUnreachableError):
        hook.current_version()
    bed.restart()
    assert hook.current_version() == Running(None)
    hook.abort(good)
    assert bed.runs(good)
    assert hook.current_version() == Running(label(10))


def test_an_unknown_pause_state_counts_as_paused_until_resumed_by_this_hook(bed):
    bed.engine.tells_readiness = False
    hook = bed.open()
    assert hook.current_version() == Running(None, paused=True)
    target = bed.target((1, 10))
    load(hook, target)
    assert hook.current_version() == Running(label(10))
    other = bed.open()
    assert other.current_version() == Running(label(10), paused=True)
    load(other, target)
    assert other.current_version() == Running(label(10))


@pytest.mark.parametrize(
    ("version", "refused"),
    [("0.5.5", True), ("0.4.9.post6", True), ("0.5.6", False), ("0.5.6.post1", False), ("0.5.23", False)],
)
def test_an_unsupported_sglang_version_is_refused(bed, hook, version, refused):
    bed.engine.version = version
    if not refused:
        hook.prepare(bed.target((1, 10)))
        return
    with pytest.raises(ConfigError, match=version):
        hook.prepare(bed.target((1, 10)))


def test_another_program_at_the_address_is_an_unreachable_engine(bed, hook):
    bed.engine.replies["/model_info"] = lambda: {"model_path": "/x"}
    with pytest.raises(EngineUnreachableError, match="as SGLang does"):
        hook.current_version()


def test_settings_are_sent_to_the_engine(tmp_path):
    with SglangBed(tmp_path, pause="in_place", flush_cache="false") as bed:
        load(bed.open(), bed.target((1, 10)))
        assert told(bed)[0][1] == {"mode": "in_place"}
        assert told(bed)[1][1]["flush_cache"] is False


@pytest.mark.parametrize(
    "settings", [{"pause": "keep"}, {"pause": "in_place"}, {"flush": "true"}, {"flush_cache": "1"}]
)
def test_invalid_settings_are_refused(settings):
    with pytest.raises(ConfigError) as error:
        SGLangHook.from_options(HookOptions(settings=settings))
    assert error.value.hint


def test_a_truncated_shard_is_refused_before_any_request_to_the_server(bed, hook):
    target = bed.target((1, 10))
    os.truncate(f"{target.path}/{target.shards[0].name}", 20)
    with pytest.raises(Exception, match="20 bytes"):
        hook.prepare(target)
    assert bed.engine.seen == []
