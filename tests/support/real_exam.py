"""The exam of real engines in bfloat16, and good loads of neighboring versions beside it, which raise no alarm.

SYNCD_GOOD_LOADS says how many loads there are; 60 take minutes.
"""

import os

import torch
from peft import PeftModel

from support import small_qwen
from support.engine_matrix import BF16
from support.engine_models import model_of
from support.probe_contract import ROWS
from support.proven import answer, probe_of, write_version
from syncd.protocol.engine_state import EngineState, engine_report_of
from syncd.protocol.probe import Probe, write_base_probe
from syncd.protocol.writer import StepWriter

LOADS = int(os.environ.get("SYNCD_GOOD_LOADS", "4"))
DTYPE = "bfloat16"
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_NEAR = 2e-4
"""How far the parameters of two neighboring versions are apart, at the most."""

_LONG = 120.0


def report(scene):
    return engine_report_of(scene.presence().info)


def examined(scene, hook, name, record_line, product):
    """Follow an engine that was started on a model, and return the follower and what it reports after its exam."""
    write_base_probe(scene.job, probe_of(model_of(name, 0).to(torch.bfloat16), DTYPE), "start")
    before = hook.probe(None, ROWS).logprobs
    follower = scene.follow("e0", hook, retries=0, exam="on")
    after, found = hook.probe(None, ROWS).logprobs, report(scene)
    off = [abs(a - b) for rows in zip(before, after, strict=True) for a, b in zip(*rows, strict=True)]
    is_broken = (found.exam, found.state) == ("failed", EngineState.WRONG)  # as vLLM breaks a Qwen3-MoE
    assert max(off) < BF16 or is_broken, found
    assert hook.current_version().label is None
    told = dict(scene.told).get("engine_examined", {})
    record_line(
        f"{product}, {name}, {DTYPE}: exam {found.exam}, unseen {found.unseen}, {found.reason}, {told}"
    )
    return follower, found


def require_good_loads(scene, follower, name, record_line, product):
    """Publish neighboring versions; each is proven, and the least part of a change that would be seen is recorded."""
    model, seen, seconds = model_of(name, 0), [], []
    for step in range(1, LOADS + 1):
        version = moved(model, step).to(torch.bfloat16)
        version.set_attn_implementation("eager")
        write_version(scene.job, step, version, probe_of(version, DTYPE))
        scene.tick()
        outcome = follower.turn(timeout=_LONG)
        assert outcome.kind == "applied", (step, outcome.reason)
        assert report(scene).state is EngineState.PROVEN
        seen.append(report(scene).proof.seen)
        seconds.append((outcome.timings["prove"], outcome.timings["load"]))
    assert report(scene).failures == 0
    record_line(
        f"{product}, {name}, {DTYPE}: {LOADS} good loads, no alarm, seen at last {seen[-1]}, {seconds[-1]} s"
    )


def moved(model, number):
    """Return the model with its parameters a little further away with each number."""
    chance = torch.Generator().manual_seed(7)
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(2 * torch.rand(parameter.shape, generator=chance) - 1, alpha=number * _NEAR)
    return copy.eval()


def publish_adapter(scene, step, name):
    """Publish an adapter of a model as a step, with the probe of peft's model in bfloat16."""
    base = model_of(name, 0)
    place = small_qwen.write_adapter(f"{scene.root}-{step}", step, model=base, layers=LAYERS)
    adapted = PeftModel.from_pretrained(base.to(torch.bfloat16), place, autocast_adapter_dtype=False).eval()
    probe = Probe(tuple(map(tuple, ROWS)), answer(adapted), DTYPE, DTYPE)
    writer = StepWriter(scene.job, step, 1, f"a{step}")
    writer.begin()
    contents = {}
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        with open(f"{place}/{file}", "rb") as opened:
            contents[file] = opened.read()
    shard = writer.write("actor/adapter_model.safetensors", contents["adapter_model.safetensors"], tensors=28)
    config = writer.write("actor/adapter_config.json", contents["adapter_config.json"])
    writer.receipt(1, [shard], [config], probe=probe)
    writer.seal(kind="lora")
    writer.announce()
    scene.tick()


def require_good_adapters(scene, follower, name, record_line, product):
    """Publish adapters; the engine is examined before the first, and each is proven."""
    for step in range(1, LOADS + 1):
        publish_adapter(scene, step, name)
        outcome = follower.turn(timeout=_LONG)
        assert outcome.kind == "applied", (step, outcome.reason)
        assert report(scene).state is EngineState.PROVEN
    found, told = report(scene), dict(scene.told).get("engine_examined", {})
    record_line(
        f"{product}, {name} with adapters, {DTYPE}: exam {found.exam}, unseen {found.unseen}, {told}; "
        f"{LOADS} good loads, no alarm"
    )
    assert (found.exam, found.unseen, found.failures) == ("passed", (), 0)
