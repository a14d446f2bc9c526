"""Adapters in vLLM: a name for each version, nothing unloaded that somebody uses."""

import json
import os

import pytest
from support.engine_beds import LoraBed, SglangLoraBed
from support.fake_servers import Answer
from support.hook_contract import load
from support.jobs import shard_bytes
from support.targets import label, target_of

from explorer_hooks.hook import HookOptions, Running
from explorer_hooks.hooks.vllm_lora import LoraHook, adapters_in
from syncd.errors import ConfigError, EngineDeadError, LoadFailedError, RefusedError


@pytest.fixture
def bed(tmp_path):
    with LoraBed(tmp_path) as bed:
        yield bed


@pytest.fixture
def hook(bed):
    return bed.open()


def loaded(bed):
    return sorted(bed.engine.adapters, key=lambda name: int(name.split(".")[1]))


def follow(bed, hook, *steps):
    for step in steps:
        load(hook, bed.target((1, step)))


def test_each_version_has_its_own_adapter_name(bed, hook):
    target = bed.target((2, 120))
    load(hook, target)
    assert hook.adapter_name(target) == f"policy-{label(120, 2)}"
    assert bed.engine.adapters[hook.adapter_name(target)][0] == target.path
    assert not [path for path in bed.engine.paths() if "pause" in path]


def test_the_newest_adapter_and_the_two_before_are_kept(bed, hook):
    follow(bed, hook, 1, 2, 3, 4, 5)
    assert loaded(bed) == [f"policy-{label(3)}", f"policy-{label(4)}", f"policy-{label(5)}"]


@pytest.mark.parametrize("use", ["running", "waiting"])
def test_an_adapter_in_use_is_not_unloaded_until_its_requests_end(bed, hook, use):
    bed.engine.stale = [(f"policy-{label(9)}", "")]
    if use == "running":
        bed.engine.used = {f"policy-{label(1)}": 1}
    else:
        bed.engine.get_metrics = lambda query, body: _metrics("", f"policy-{label(1)}").encode()
    follow(bed, hook, 1, 2, 3, 4, 5, 6)
    assert loaded(bed) == [
        f"policy-{label(1)}",
        f"policy-{label(4)}",
        f"policy-{label(5)}",
        f"policy-{label(6)}",
    ]
    bed.engine.used = {}
    bed.engine.get_metrics = lambda query, body: _metrics(f"policy-{label(6)}", "").encode()
    follow(bed, hook, 7)
    assert loaded(bed) == [f"policy-{label(5)}", f"policy-{label(6)}", f"policy-{label(7)}"]


def _metrics(running, waiting):
    labels = f'max_lora="4",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f"vllm:lora_requests_info{{{labels}}} 1.8e+09\n"


def _running(replica):
    return f'vllm:num_requests_running{{engine="{replica}",model_name="m"}} 1.0\n'


def test_without_usage_metrics_adapters_are_unloaded_after_the_drain_time(tmp_path):
    with LoraBed(tmp_path, keep="1", drain="3600") as bed:
        bed.engine.tells_use = False
        hook = bed.open()
        follow(bed, hook, 1, 2, 3, 4)
        assert loaded(bed) == [f"policy-{label(step)}" for step in (1, 2, 3, 4)]
        since = hook._superseded[f"policy-{label(1)}"]
        hook._superseded[f"policy-{label(1)}"] = since - 3600
        follow(bed, hook, 5)
        assert loaded(bed) == [f"policy-{label(step)}" for step in (2, 3, 4, 5)]


def test_a_failed_unload_does_not_fail_the_version(bed, hook):
    follow(bed, hook, 1, 2, 3)
    bed.engine.replies["/v1/unload_lora_adapter"] = Answer(500, {"error": "not now"})
    follow(bed, hook, 4)
    assert hook.current_version() == Running(label(4))
    bed.engine.replies.clear()
    follow(bed, hook, 5)
    assert loaded(bed) == [f"policy-{label(3)}", f"policy-{label(4)}", f"policy-{label(5)}"]


def test_adapters_of_other_users_are_left_alone(bed, hook):
    bed.engine.adapters = dict.fromkeys(
        ["judge", "policy", "policy-x", "policy-1", "judge-1.1", "policy-1.1-copy"], ("/x", "")
    )
    others = set(bed.engine.adapters)
    assert hook.current_version() == Running(None)
    follow(bed, hook, 1, 2, 3, 4, 5)
    assert others < set(bed.engine.adapters)
    assert hook.current_version() == Running(label(5))


def test_a_custom_name_separates_two_jobs(tmp_path):
    with LoraBed(tmp_path, name="job-a") as bed:
        hook = bed.open()
        load(hook, bed.target((1, 10)))
        assert list(bed.engine.adapters) == [f"job-a-{label(10)}"]
        other = LoraHook.from_options(HookOptions(bed.engine.address, token=bed.token))
        assert other.current_version() == Running(None)


def test_an_adapter_that_fails_to_load_leaves_the_old_one(bed, hook):
    follow(bed, hook, 1, 2)
    target = bed.target((1, 3))
    bed.fail_load(target)
    hook.prepare(target)
    with pytest.raises(LoadFailedError, match="max_lora_rank"):
        hook.load(target)
    hook.abort(bed.target((1, 2)))
    assert hook.current_version() == Running(label(2))
    assert loaded(bed) == [f"policy-{label(1)}", f"policy-{label(2)}"]


def test_a_last_good_adapter_lost_in_a_restart_is_loaded_again(bed, hook):
    follow(bed, hook, 1)
    bed.restart()
    hook.abort(bed.target((1, 1)))
    assert hook.current_version() == Running(label(1))


def test_a_last_good_adapter_that_cannot_be_reloaded_is_a_dead_engine(bed, hook):
    follow(bed, hook, 1)
    bed.restart()
    bed.fail_load(None)
    with pytest.raises(EngineDeadError):
        hook.abort(bed.target((1, 1)))


def test_an_adapter_of_the_same_name_from_another_directory_is_replaced(bed, hook, tmp_path):
    target = bed.target((1, 10))
    bed.engine.adapters[f"policy-{label(10)}"] = ("/an/older/job", "something else")
    load(hook, target)
    assert bed.runs(target)


def test_an_adapter_of_the_same_step_with_other_content_is_replaced(bed, hook):
    target, left = bed.target((1, 10)), "policy-1.10.ffffffffffffffff"
    bed.engine.adapters[left] = ("/an/older/job", "something else")
    assert hook.current_version().label == left.removeprefix("policy-")
    load(hook, target)
    assert hook.current_version() == Running(target.label)
    assert list(bed.engine.adapters) == [hook.adapter_name(target)]


def test_a_rollback_unloads_newer_adapters(bed, hook):
    follow(bed, hook, 10, 11, 12)
    follow(bed, hook, 10)
    assert hook.current_version() == Running(label(10))
    assert loaded(bed) == [f"policy-{label(10)}"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: os.remove(f"{path}/adapter_config.json"), "adapter_config"),
        (lambda path: os.remove(f"{path}/adapter_model.safetensors"), "adapter_model"),
        (lambda path: os.truncate(f"{path}/adapter_model.safetensors", 30), "30 bytes"),
        (lambda path: _config(path, "{"), "cannot be read"),
        (lambda path: _config(path, "[]"), "not a JSON object"),
        (lambda path: _config(path, json.dumps({"peft_type": "IA3"})), "peft_type"),
    ],
)
@pytest.mark.fault("a failed adapter save is published all the same")
def test_an_incomplete_adapter_is_refused_before_any_request_to_the_engine(bed, hook, change, message):
    target = bed.target((1, 10))
    change(target.path)
    with pytest.raises(RefusedError, match=message):
        hook.prepare(target)
    assert bed.engine.seen == []


def _config(path, text):
    with open(f"{path}/adapter_config.json", "w") as file:
        file.write(text)


def test_weights_under_another_file_name_are_not_an_adapter(bed, hook):
    target = bed.target((1, 10))
    os.rename(f"{target.path}/adapter_model.safetensors", f"{target.path}/model.safetensors")
    with pytest.raises(RefusedError, match="no adapter_model"):
        hook.prepare(target_of(target.path, (1, 10), kind="lora"))


def test_an_engine_without_lora_support_hints_at_how_to_start_it(bed, hook):
    bed.engine.enabled = False
    with pytest.raises(ConfigError) as error:
        hook.prepare(bed.target((1, 10)))
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in error.value.hint
    assert "--enable-lora" in error.value.hint


@pytest.mark.parametrize(
    "settings", [{"name": "a b"}, {"name": ""}, {"keep": "-1"}, {"drain": "0"}, {"n": "1"}]
)
def test_invalid_settings_are_refused(settings):
    with pytest.raises(ConfigError):
        LoraHook.from_options(HookOptions(settings=settings))


@pytest.mark.parametrize(
    ("metrics", "used"),
    [
        ("", None),
        ("vllm:num_requests_running 3\n", None),
        ("# HELP vllm:lora_requests_info Running stats\n", frozenset()),
        (_metrics("", ""), frozenset()),
        (_metrics("a-1.1,a-1.2", "a-1.3"), frozenset({"a-1.1", "a-1.2", "a-1.3"})),
        (_running(0) + _metrics("new", ""), frozenset({"new"})),
        (_running(0) + _running(1) + _metrics("of one of them", ""), None),
        (_metrics("old", "").replace("1.8e", "1.7e") + _metrics("new", ""), frozenset({"new"})),
        (_metrics("new", "") + _metrics("old", "").replace("1.8e", "1.7e"), frozenset({"new"})),
        (_metrics("odd", "").replace("1.8e+09", "?") + _metrics("new", ""), frozenset({"new"})),
    ],
)
def test_adapters_in_use_are_read_from_the_engine_s_metrics(metrics, used):
    assert adapters_in(metrics) == used


LAYERS = {f"m.0.{one}.weight": (6, 4) for one in ("q_proj", "v_proj")} | {"m.0.packed.qweight": (2, 2)}


def based(bed, shapes=LAYERS, **config):
    """Have the engine be started with a model of some tensors."""
    base = bed.root / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(shard_bytes(shapes, 1))
    (base / "config.json").write_text(json.dumps(config))
    bed.engine.base_root = str(base)


def reshaped(bed, shapes, **config):
    """Return an adapter whose tensors have these shapes, by name without what peft puts around it."""
    target = bed.target((1, 10))
    with open(f"{target.path}/adapter_model.safetensors", "wb") as file:
        file.write(shard_bytes({f"base_model.model.{name}": one for name, one in shapes.items()}, 1))
    _config(target.path, json.dumps({"peft_type": "LORA", "r": 2, **config}))
    return target_of(target.path, (1, 10), kind="lora")


def halves(layer, a=(2, 4), b=(6, 2)):
    return {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}


QV = halves("m.0.q_proj") | halves("m.0.v_proj")


@pytest.mark.parametrize(
    ("shapes", "config"),
    [
        (QV, {}),
        (halves("m.0.q_proj", (3, 4), (6, 3)), {"rank_pattern": {"q_proj": 3}}),
        (halves("m.0.q_proj", (2, 6), (4, 2)), {"fan_in_fan_out": True}),
        (QV | halves("m.0.experts", (4, 4), (8, 4)), {"rank_pattern": {"experts": 4}}),
        (QV | halves("m.0.packed", (2, 9), (9, 2)), {}),
        (QV | {"m.0.embed.lora_embedding_A": (2, 9)}, {}),
        (halves("other.0.q_proj", (2, 63)), {}),
    ],
)
def test_adapters_that_fit_the_model_pass(bed, hook, shapes, config):
    based(bed)
    hook.prepare(reshaped(bed, shapes, **config))


@pytest.mark.parametrize(
    ("shapes", "config", "message"),
    [
        (QV | halves("m.0.v_proj", (2, 3)), {}, r"\[6, 3\], and its weight \[6, 4\]"),
        (QV | halves("m.0.v_proj", b=(5, 2)), {}, r"\[5, 4\], and its weight \[6, 4\]"),
        (QV | halves("m.0.v_proj", (1, 4), (6, 1)), {}, "the rank is 2"),
        (QV | halves("m.0.v_proj", (3, 4)), {"rank_pattern": {"v_proj": 3}}, "the rank is 3"),
        (QV | halves("m.0.v_proj", (4,)), {}, "the rank is 2"),
        ({"m.0.q_proj.lora_A.weight": (2, 4)}, {}, r"\[2, 4\] and \[\]"),
        (QV | halves("m.7.v_proj"), {}, "has no m.7.v_proj"),
        (QV | halves("lm_head"), {}, "has no lm_head"),
    ],
)
@pytest.mark.fault("vLLM serves an adapter whose matrices do not fit the model")
def test_an_adapter_that_does_not_fit_the_model_is_refused_before_vllm_hears_of_it(
    bed, hook, shapes, config, message
):
    based(bed, tie_word_embeddings=False)
    with pytest.raises(RefusedError, match=message):
        hook.prepare(reshaped(bed, shapes, **config))
    assert not [path for path in bed.engine.paths() if path.startswith("POST")]


def test_an_adapter_of_a_tied_head_is_left_to_vllm(bed, hook):
    based(bed, tie_word_embeddings=True)
    hook.prepare(reshaped(bed, QV | halves("lm_head", (2, 4), (9, 2))))


@pytest.mark.fault("an adapter answers as other weights")
@pytest.mark.parametrize("bed_type", [LoraBed, SglangLoraBed])
def test_a_failed_proof_unloads_its_own_adapter_alone(tmp_path, bed_type):
    with bed_type(tmp_path, keep="0", drain="0.001") as bed:
        hook, good = bed.open(), bed.target((1, 1))
        load(hook, good)
        failed = bed.target((1, 2))
        hook.prepare(failed)
        hook.load(failed)
        hook.commit(failed)
        assert len(loaded(bed)) == 2
        posts = len([path for path in bed.engine.paths() if "load_lora_adapter" in path])
        hook.abort(good)
        after = [path for path in bed.engine.paths() if "load_lora_adapter" in path][posts:]
        assert len(after) == 1
        assert "unload" in after[0]
        assert loaded(bed) == [f"policy-{label(1)}"]
