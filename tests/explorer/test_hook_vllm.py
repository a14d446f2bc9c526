"""The vLLM hook: what it sends, in which order, and what becomes of an engine that fails."""

import dataclasses
import os

import pytest
from support.engine_beds import SECRET, VllmBed, write_version
from support.fake_engines import START, fingerprint, fingerprint_of
from support.fake_servers import Answer
from support.hook_contract import load
from support.targets import label, target_of

from explorer_hooks.hook import HookOptions, Running
from explorer_hooks.hooks.http_settings import PathMap
from explorer_hooks.hooks.vllm import VllmHook
from syncd.errors import ConfigError, EngineDeadError, EngineUnreachableError, LoadFailedError, RefusedError


@pytest.fixture
def bed(tmp_path):
    with VllmBed(tmp_path) as bed:
        yield bed


@pytest.fixture
def hook(bed):
    return bed.open()


def sent(bed):
    """Return what the engine was told, without the questions."""
    return [path for path in bed.engine.paths() if path.startswith("POST")]


def test_a_load_sends_pause_reload_reset_label_and_resume(bed, hook):
    target = bed.target((2, 120))
    load(hook, target)
    assert sent(bed) == [
        "POST /pause?mode=keep&clear_cache=true",
        "POST /collective_rpc",
        "POST /reset_prefix_cache?reset_running_requests=true&reset_external=false",
        "POST /update_weight_version",
        "POST /resume",
    ]
    (call,) = [body for path, body in bed.engine.seen if path == "POST /collective_rpc"]
    assert call == {"method": "reload_weights", "kwargs": {"weights_path": target.path}}


@pytest.mark.fault("the version is set before the weights are loaded")
def test_the_label_changes_together_with_the_weights(bed, hook):
    targets = [bed.target((1, step)) for step in (10, 11)]
    for target in targets:
        load(hook, target)
    assert bed.engine.versions_at == [(target.label, fingerprint_of(target.path)) for target in targets]


def test_settings_are_sent_to_the_engine(tmp_path):
    with VllmBed(tmp_path, pause="wait", clear_cache="false", reset_external="true") as bed:
        load(bed.open(), bed.target((1, 10)))
        assert sent(bed)[0] == "POST /pause?mode=wait&clear_cache=false"
        assert sent(bed)[2] == "POST /reset_prefix_cache?reset_running_requests=false&reset_external=true"


def test_a_repeated_prompt_is_answered_by_the_new_weights(bed, hook):
    seen = {bed.said(None)}
    for step in range(10, 15):
        load(hook, bed.target((1, step)))
        seen.add(bed.said(None))
    assert len(seen) == 6


def test_a_prefix_cache_that_cannot_be_reset_is_a_failed_load(bed, hook):
    load(hook, bed.target((1, 10)))
    bed.engine.replies["/reset_prefix_cache"] = lambda: {"success": False}
    target = bed.target((1, 11))
    hook.prepare(target)
    hook.load(target)
    with pytest.raises(LoadFailedError, match="prefix cache"):
        hook.commit(target)
    assert hook.current_version() == Running(label(10), paused=True)


def test_a_held_prefix_cache_is_accepted_with_clear_cache_false(tmp_path):
    with VllmBed(tmp_path, clear_cache="false") as bed:
        bed.engine.blocked_cache = True
        load(bed.open(), bed.target((1, 10)))
        assert bed.open().current_version() == Running(label(10))


def test_an_engine_that_cannot_roll_back_is_dead_and_stays_paused(bed, hook, tmp_path):
    good = bed.target((1, 10))
    load(hook, good)
    shapes = {"model.a": (4, 2), "model.b": (7,), "model.c": (2, 2)}
    wrong = target_of(write_version(f"{tmp_path}/wrong", 5, shapes=shapes), (1, 11))
    hook.prepare(wrong)
    with pytest.raises(LoadFailedError, match="shape mismatch"):
        hook.load(wrong)
    with pytest.raises(EngineDeadError, match=r"1\.10.*meta device") as error:
        hook.abort(good)
    assert "restart" in error.value.hint
    assert bed.is_paused()
    assert hook.current_version() == Running(label(10), paused=True)


def test_a_rollback_that_failed_once_is_retried(bed, hook):
    good = bed.target((1, 10))
    load(hook, good)
    bad = bed.target((1, 11))
    hook.prepare(bad)
    bed.fail_load(bad)
    with pytest.raises(LoadFailedError):
        hook.load(bad)
    bed.fail_load(good)
    hook.abort(good)
    assert bed.runs(good)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/pause", Answer(400, {"error": "Invalid pause mode"})),
        ("/pause", Answer(500, {"error": "Failed to pause generation"})),
    ],
)
def test_an_engine_that_cannot_pause_keeps_its_weights(bed, hook, path, answer):
    good = bed.target((1, 10))
    load(hook, good)
    reloads = sent(bed).count("POST /collective_rpc")
    bed.engine.replies[path] = answer
    target = bed.target((1, 11))
    hook.prepare(target)
    with pytest.raises(LoadFailedError):
        hook.load(target)
    bed.engine.replies.clear()
    hook.abort(good)
    assert sent(bed).count("POST /collective_rpc") == reloads
    assert bed.runs(good)
    assert hook.current_version() == Running(label(10))


def test_a_pause_without_a_reload_is_resumed_without_loading(bed, hook):
    """A request for the reload that never reached the engine, because it cannot be connected to any more."""
    good = bed.target((1, 10))
    load(hook, good)
    target = bed.target((1, 11))
    hook.prepare(target)
    hook._hold()
    reloads = sent(bed).count("POST /collective_rpc")
    hook.abort(good)
    assert sent(bed).count("POST /collective_rpc") == reloads
    assert hook.current_version() == Running(label(10))


def test_an_engine_left_paused_is_reloaded_before_it_resumes(bed):
    good = bed.target((1, 10))
    load(bed.open(), good)
    dying = bed.open()
    torn = bed.target((1, 11))
    dying.prepare(torn)
    bed.fail_load(torn)
    with pytest.raises(LoadFailedError):
        dying.load(torn)
    following = bed.open()
    assert following.current_version() == Running(label(10), paused=True)
    following.abort(good)
    assert bed.runs(good)
    assert following.current_version() == Running(label(10))


def test_a_paused_engine_without_a_good_version_is_dead_and_stays_paused(bed, hook):
    bed.pause()
    with pytest.raises(EngineDeadError):
        hook.abort(None)
    assert bed.is_paused()


def test_a_restarted_engine_runs_its_start_weights_after_a_failed_first_load(bed, hook):
    target = bed.target((1, 10))
    hook.prepare(target)
    bed.fail_load(target)
    with pytest.raises(LoadFailedError):
        hook.load(target)
    bed.restart()
    hook.abort(None)
    assert bed.said(None) == fingerprint(START)


def test_missing_development_endpoints_hint_at_the_variable_to_set(bed, hook):
    bed.engine.dev_mode = False
    for call in (hook.current_version, hook._pause):
        with pytest.raises(ConfigError) as error:
            call()
        assert "VLLM_SERVER_DEV_MODE=1" in error.value.hint


@pytest.mark.parametrize(
    ("version", "refused"),
    [
        ("0.15.1", True),
        ("0.27.0", True),
        ("0.27.1", False),
        ("0.27.1rc1", False),
        ("0.9.2", True),
        ("1.0", False),
        ("0.32.0+cpu", False),
        ("0.27.2.dev15+g0abc", False),
        ("0.1.dev9000+g1234", False),
        ("dev", False),
        (None, False),
    ],
)
def test_an_unsupported_vllm_version_is_refused(bed, hook, version, refused):
    bed.engine.version = version
    if not refused:
        hook.prepare(bed.target((1, 10)))
        return
    with pytest.raises(ConfigError, match=version) as error:
        hook.prepare(bed.target((1, 10)))
    assert "0.27.1" in error.value.hint
    assert not bed.is_paused()


def test_check_version_false_accepts_any_version(tmp_path):
    with VllmBed(tmp_path, check_version="false") as bed:
        bed.engine.version = "0.9.0"
        load(bed.open(), bed.target((1, 10)))


def test_a_dead_engine_core_is_an_unreachable_engine(bed, hook):
    bed.engine.replies["/health"] = Answer(503)
    with pytest.raises(EngineUnreachableError):
        hook.prepare(bed.target((1, 10)))


@pytest.mark.parametrize("document", [{}, {"weight_version": 3}, {"weight_version": None}])
def test_another_program_at_the_address_is_an_unreachable_engine(bed, hook, document):
    bed.engine.replies["/weight_info"] = lambda: document
    with pytest.raises(EngineUnreachableError, match="as vLLM does"):
        hook.current_version()


def test_path_map_translates_the_directory_for_the_engine(tmp_path):
    with VllmBed(tmp_path, path_map=f"{tmp_path}/versions:/mnt/there") as bed:
        hook = bed.open()
        target = bed.target((1, 10))
        hook.prepare(target)
        with pytest.raises(LoadFailedError):
            hook.load(target)
        (call,) = [body for path, body in bed.engine.seen if path == "POST /collective_rpc"]
        assert call["kwargs"]["weights_path"] == "/mnt/there/1.10-1"


@pytest.mark.parametrize(
    ("path_map", "here", "there"),
    [
        ("/:/host", "/ckpt/job", "/host/ckpt/job"),
        ("/ckpt/:/", "/ckpt/job", "/job"),
        ("/ckpt:/there", "/ckpt", "/there"),
        ("/ckpt:/there", "/ckpts/job", "/ckpts/job"),
        ("/:/", "/ckpt/job", "/ckpt/job"),
        ("", "/ckpt/job", "/ckpt/job"),
    ],
)
def test_path_map_may_have_the_root_on_either_side(path_map, here, there):
    paths = PathMap(path_map)
    assert (paths.there(here), paths.here(there)) == (there, here)
    assert [paths.here(name) for name in ("", "Qwen/Qwen3")] == [
        "",
        "Qwen/Qwen3",
    ]  # those of a hub are no paths
    assert PathMap("/ckpt:/").there("/ckpt") == "/"


def test_a_relative_directory_is_sent_as_an_absolute_path(bed, hook, monkeypatch):
    target = bed.target((1, 10))
    monkeypatch.chdir(os.path.dirname(target.path))
    load(hook, dataclasses.replace(target, path=os.path.basename(target.path)))
    assert bed.runs(target)


@pytest.mark.parametrize("damage", ["short", "missing"])
def test_a_short_or_missing_shard_is_refused_before_any_request_to_the_engine(bed, hook, damage):
    target = bed.target((1, 10), shards=2)
    path = f"{target.path}/{target.shards[1].name}"
    if damage == "short":
        os.truncate(path, target.shards[1].size - 1)
    else:
        os.remove(path)
    with pytest.raises(RefusedError) as error:
        hook.prepare(target)
    assert error.value.path == path
    assert bed.engine.seen == []


@pytest.mark.parametrize(
    "settings",
    [
        {"pause": "sleep"},
        {"clear_cache": "yes"},
        {"clear_caches": "true"},
        {"ask_timeout": "-1"},
        {"ask_timeout": "inf"},
        {"ask_timeout": "soon"},
        {"path_map": "/a"},
        {"path_map": "a:b"},
        {"path_map": "/a:/b:/c"},
    ],
)
def test_invalid_settings_are_refused(settings):
    with pytest.raises(ConfigError) as error:
        VllmHook.from_options(HookOptions(settings=settings))
    assert error.value.hint


def test_the_default_address_is_vllm_s_own_port():
    assert repr(VllmHook.from_options(HookOptions(token=SECRET))) == "VllmHook(http://127.0.0.1:8000)"


@pytest.mark.fault("vLLM moves experts and reads new weights into the places where they were")
def test_a_vllm_that_moves_experts_is_refused_by_its_flag_before_it_is_touched(bed, hook, tmp_path):
    target = bed.target((1, 10))
    bed.engine.moves_experts = True
    bed.engine.started_from = str(tmp_path)
    for reload in (lambda: hook.prepare(target), hook.reload_start):
        with pytest.raises(ConfigError, match="--enable-eplb") as error:
            reload()
        assert "reload=restart" in error.value.hint
    assert "--enable-eplb" in hook.no_broadcasts()
    assert sent(bed) == []
    hook.is_restarted = True
    hook.prepare(target)
