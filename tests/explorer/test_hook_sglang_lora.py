"""Adapters in SGLang: names that go at once, unloads that wait, and what would end the server is refused."""

import json
import threading
import time

import pytest
from support.engine_beds import SglangLoraBed
from support.fake_servers import Answer
from support.hook_contract import load
from support.jobs import shard_bytes
from support.targets import label, target_of

from explorer_hooks.hook import Running
from explorer_hooks.hooks.sglang_lora import require_servable
from explorer_hooks.proof.start_model import StartModel
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError, RefusedError
from syncd.transports.tensors import TensorMeta


@pytest.fixture
def bed(tmp_path):
    with SglangLoraBed(tmp_path, keep="1", drain="0.3") as bed:
        yield bed


@pytest.fixture
def hook(bed):
    return bed.open()


def named(step):
    return f"policy-{label(step)}"


def test_old_adapters_are_unloaded_once_they_were_superseded_for_the_drain_time(bed, hook):
    for step in (1, 2, 3, 4):
        load(hook, bed.target((1, step)))
    assert list(bed.engine.adapters) == [named(step) for step in (1, 2, 3, 4)]
    time.sleep(0.4)
    load(hook, bed.target((1, 5)))
    assert list(bed.engine.adapters) == [named(4), named(5)]
    assert not [path for path in bed.engine.paths() if "pause" in path or "completions" in path]


def test_a_withdrawn_adapter_in_use_loses_its_name_at_once(bed, hook, monkeypatch):
    monkeypatch.setattr("explorer_hooks.hooks.sglang_lora._UNLOADING", 0.2)
    load(hook, bed.target((1, 1)))
    load(hook, bed.target((1, 2)))
    bed.engine.used = {named(2): 1}
    load(hook, bed.target((1, 1)))
    assert hook.current_version() == Running(label(1))
    assert list(bed.engine.adapters) == [named(1)]
    timer = threading.Timer(0.3, bed.engine.used.clear)
    timer.start()
    load(hook, bed.target((1, 3)))
    assert hook.current_version() == Running(label(3))
    assert not bed.engine.used, "the next load waits for the requests on the withdrawn one"


def test_an_old_adapter_whose_requests_last_does_not_fail_the_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr("explorer_hooks.hooks.sglang_lora._UNLOADING", 0.2)
    with SglangLoraBed(tmp_path, keep="0", drain="0.3") as bed:
        hook = bed.open()
        for step in (1, 2, 3):
            load(hook, bed.target((1, step)))
        time.sleep(0.4)
        bed.engine.used = {named(1): 1}
        load(hook, bed.target((1, 4)))
        assert hook.current_version() == Running(label(4))
        assert named(1) not in bed.engine.adapters
        assert named(2) in bed.engine.adapters, "SGLang ends one unload before it begins another"
        bed.engine.used = {}
        load(hook, bed.target((1, 5)))
        assert named(2) not in bed.engine.adapters
        assert bed.runs(bed.target((1, 5)))


def test_an_unload_that_does_not_even_take_the_name_away_is_unreachable(bed, hook, monkeypatch):
    monkeypatch.setattr("explorer_hooks.hooks.sglang_lora._UNLOADING", 0.2)
    load(hook, bed.target((1, 2)))
    bed.engine.replies["/unload_lora_adapter"] = lambda: time.sleep(0.5)
    with pytest.raises(EngineUnreachableError):
        load(hook, bed.target((1, 1)))


def test_a_load_or_an_unload_that_stopped_half_way_is_repaired(bed, hook):
    bed.engine.half_unloaded = {named(1)}
    load(hook, bed.target((1, 1)))
    assert hook.current_version() == Running(label(1))
    assert bed.runs(bed.target((1, 1)))


def test_what_is_gone_already_counts_as_unloaded(bed, hook):
    load(hook, bed.target((1, 2)))
    bed.engine.adapters[named(3)] = ("/other", "")
    unload = bed.engine.post_unload_lora_adapter

    def gone(query, body):
        bed.engine.adapters.pop(body["lora_name"], None)
        return unload(query, body)

    bed.engine.post_unload_lora_adapter = gone
    load(hook, bed.target((1, 2)))
    assert list(bed.engine.adapters) == [named(2)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [(Answer(400, {"success": False, "error_message": "no room"}), "no room"), (dict, "failed with 200")],
)
def test_a_load_counts_only_if_sglang_says_that_it_succeeded(bed, hook, answer, message):
    bed.engine.replies["/load_lora_adapter"] = answer
    target = bed.target((1, 1))
    hook.prepare(target)
    with pytest.raises(LoadFailedError, match=message):
        hook.load(target)


def test_a_server_that_was_started_otherwise_is_told_apart(bed, hook):
    bed.engine.enabled = False
    with pytest.raises(ConfigError, match="without --enable-lora") as error:
        hook.prepare(bed.target((1, 1)))
    assert "--lora-target-modules" in error.value.hint
    bed.engine.enabled, bed.engine.replicas = True, 2
    with pytest.raises(ConfigError, match="2 data-parallel replicas"):
        hook.prepare(bed.target((1, 1)))


def test_a_model_of_the_hub_is_looked_up_in_this_host_s_cache(bed, hook, monkeypatch):
    asked = []
    monkeypatch.setattr("explorer_hooks.hooks.adapter_server.start_model_of", asked.append)
    bed.engine.base_root = "Qwen/Qwen2"
    for step in (1, 2):
        hook.prepare(bed.target((1, step)))
    assert asked == ["Qwen/Qwen2"]


def adapter(tmp_path, shapes, **config):
    """Return an adapter whose tensors have these shapes."""
    with open(tmp_path / "adapter_model.safetensors", "wb") as file:
        file.write(shard_bytes({f"base_model.model.{name}.weight": one for name, one in shapes.items()}, 1))
    with open(tmp_path / "adapter_config.json", "w") as file:
        json.dump({"peft_type": "LORA", "r": 2, **config}, file)
    return target_of(tmp_path, (1, 1), kind="lora")


MODEL = {
    **{f"m.{one}.weight": TensorMeta("F32", (6, 4)) for one in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{f"m.{one}.weight": TensorMeta("F32", (8, 4)) for one in ("gate_proj", "up_proj")},
    "plain.up_proj.weight": TensorMeta("F32", (8, 4)),
}


def halves(*layers, out=6):
    return {f"{one}.lora_{half}": (2, 4) if half == "A" else (out, 2) for one in layers for half in "AB"}


QKV = halves("m.q_proj", "m.v_proj")


@pytest.mark.parametrize("start", [StartModel(MODEL, {}), None])
@pytest.mark.parametrize(
    "shapes",
    [QKV, halves("m.q_proj", "m.k_proj", "m.v_proj"), halves("m.o_proj"), halves("m.gate_proj", out=8)],
)
def test_adapters_that_sglang_serves_pass(tmp_path, start, shapes):
    target = adapter(tmp_path, shapes, bias="none", use_rslora=False, rank_pattern={})
    require_servable(target, {"r": 2, "bias": "none"}, start)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (halves("m.q_proj"), "m.q_proj without m.v_proj"),
        (halves("m.v_proj"), "m.v_proj without m.q_proj"),
        (halves("m.k_proj", "m.v_proj"), "without m.q_proj"),
        (halves("m.up_proj", out=8), "m.up_proj without m.gate_proj"),
        ({"m.o_proj.lora_A": (2, 4)}, "the shapes .2, 4. and .., and the rank is 2"),
        ({"m.o_proj.lora_A": (3, 4), "m.o_proj.lora_B": (6, 3)}, "the rank is 2"),
        ({**QKV, "m.norm": (4,)}, "no A or B"),
    ],
)
@pytest.mark.parametrize("start", [StartModel(MODEL, {}), None])
def test_adapters_that_would_end_sglang_are_refused(tmp_path, shapes, message, start):
    with pytest.raises(RefusedError, match=message):
        require_servable(adapter(tmp_path, shapes), {"r": 2}, start)


def test_an_adapter_is_compared_with_the_model_that_sglang_was_started_with(tmp_path):
    start = StartModel(MODEL, {})
    require_servable(adapter(tmp_path, halves("plain.up_proj", out=8)), {"r": 2}, start)
    with pytest.raises(RefusedError, match=r"has no m\.other"):
        require_servable(adapter(tmp_path, halves("m.other")), {"r": 2}, start)
    with pytest.raises(RefusedError, match=r"the shape \[7, 4\], and its weight \[6, 4\]"):
        require_servable(adapter(tmp_path, halves("m.o_proj", out=7)), {"r": 2}, start)


@pytest.mark.parametrize(
    "config", [{"use_rslora": True}, {"alpha_pattern": {"q": 3}}, {"modules_to_save": ["a"]}, {"bias": "all"}]
)
def test_adapters_that_sglang_would_answer_wrongly_with_are_refused(tmp_path, config):
    with pytest.raises(RefusedError, match=next(iter(config))):
        require_servable(adapter(tmp_path, QKV), {"r": 2, **config}, None)
