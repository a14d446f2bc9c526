"""A hundred faults of engine and files, each with the check that must find it, and good loads without alarm.

The engine is a transformers model in this process, loaded by its real hook and followed by a real follower. `make
test` takes a slice; `make test-proof` takes them all.
"""

import copy
import os
import random
import re

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")
kind_of = pytest.importorskip("explorer_hooks.parts.exam.model", reason="needs the part exam").kind_of

from support.followers import Scene  # noqa: E402
from support.proven import SHARD, probe_of, write_version  # noqa: E402
from support.small_qwen import model_of  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from explorer_hooks.hook import ProbeAnswer  # noqa: E402
from explorer_hooks.hooks.transformers import TransformersHook  # noqa: E402
from syncd.protocol.engine_state import EngineState, engine_report_of  # noqa: E402
from syncd.protocol.probe import write_base_probe  # noqa: E402

ALL = os.environ.get("SYNCD_PROOF") == "full"
FAULTS = 100 if ALL else 20
PARTS = 20 if ALL else 2
"""Engines in each dtype that leave a kind of tensor out of every load."""

GOOD = 100 if ALL else 4
"""Good loads in each dtype."""

WITHIN = 40
"""In how many versions an engine that stays where it was is found."""

LONG = 60.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

CHECKS = {
    "change": "was not loaded",
    "cache": "prefix cache holds keys and values of other weights",
    "proof": "answers as other weights|does not answer the probe",
    "content": "differs from its digest|does not match its digest",
    "fit": "does not fit|missing",
    "size": "bytes",
}
"""What the reason says if a check has found a fault."""


NEAR = {"float32": 5e-7, "bfloat16": 2e-4}
"""How far the parameters of two neighbouring versions are apart, at the most."""


class FaultyHook(TransformersHook):
    """Loads as the real hook does, and then does to the model what an engine with a fault would have done.

    It has a prefix cache: the keys and values of a prompt, which a load drops unless `keeps_cache`.
    """

    fault = None
    keeps_cache = False
    cache = None

    def probe(self, target, tokens):
        answer = super().probe(target, tokens)
        prompt = torch.tensor([[token for row in tokens for token in row]])
        with torch.no_grad():
            if self.cache is None:
                self.cache = self.model(prompt[:, :-1], use_cache=True).past_key_values
            fresh = self.model(prompt).logits[0, -1].float().log_softmax(-1)
            kept = self.model(prompt[:, -1:], past_key_values=copy.deepcopy(self.cache))
        token = int(fresh.argmax())
        cached = kept.logits[0, -1].float().log_softmax(-1)
        return ProbeAnswer(answer.logprobs, float(fresh[token]), float(cached[token]))

    def load(self, target):
        before = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        super().load(target)
        if not self.keeps_cache:
            self.cache = None
        if self.fault is not None:
            with torch.no_grad():
                self.fault(self.model.state_dict(), before)

    def reload_start(self):
        self.cache = None
        return super().reload_start()


def stale(names):
    """Return the fault of an engine that does not reload some tensors."""

    def apply(state, before):
        for name in names:
            state[name].copy_(before[name])

    return apply


def swapped(one, other):
    def apply(state, before):
        kept = state[one].clone()
        state[one].copy_(state[other])
        state[other].copy_(kept)

    return apply


def nan_in(name):
    return lambda state, before: state[name].view(-1)[0].fill_(float("nan"))


def learnt():
    """Return the names of tensors that differ from version to version; norms and biases of a new model do not."""
    one, other = model_of(0).state_dict(), model_of(1).state_dict()
    return sorted(name for name in one if not torch.equal(one[name], other[name]))


def flipped(path, draw):
    with open(path, "r+b") as file:
        file.seek(draw.randrange(os.path.getsize(path) // 2, os.path.getsize(path)))
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << draw.randrange(8)]))


def truncated(path, draw):
    os.truncate(path, draw.randrange(os.path.getsize(path)))


def neighbour_of(model, number, size):
    """Move the parameters of a model a little, further with each number, and return the model."""
    chance = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(2 * torch.rand(parameter.shape, generator=chance) - 1, alpha=number * size)
    return model


def case(draw, number):
    """Return a fault: its name, the check that must find it, and what it does to engine, tensors or file."""
    names = learnt()
    layers = [name for name in names if ".0." in name]
    name = draw.choice(names)
    pair = draw.choice(layers)
    kinds = [
        ("a label without a load", "proof", {"engine": stale(names)}),
        ("a stale head", "proof", {"engine": stale(["lm_head.weight"])}),
        (f"not reloaded: {name}", "proof", {"engine": stale([name])}),
        (
            f"swapped with the next layer: {pair}",
            "proof",
            {"engine": swapped(pair, pair.replace(".0.", ".1."))},
        ),
        (f"NaN in {name}", "proof", {"engine": nan_in(name)}),
        (f"dropped from the file: {name}", "fit", {"tensors": lambda state: state.pop(name)}),
        ("a flipped byte", "content", {"file": flipped}),
        ("a truncated file", "size", {"file": truncated}),
        ("a stale prefix cache", "cache", {"cache": True}),
        ("stays where it was while updates are small", "change", {"engine": stale(names), "near": True}),
    ]
    return kinds[number % len(kinds)]


class Bed:
    """A job, an engine with switches, and its follower."""

    def __init__(self, place, dtype):
        self.scene, self.dtype = Scene(place), dtype
        self.hook = FaultyHook(model_of(0).to(DTYPES[dtype]))
        write_base_probe(self.scene.job, self.version(0)[1], "start")
        self.follower = self.scene.follow("e0", self.hook, retries=0)
        assert "engine_calibrated" in self.scene.names()

    def version(self, seed, near=0):
        """Return the model of a seed and its probe: the trainer computes with the very weights that it publishes.

        Its attention is another implementation than the engine's.
        """
        model = neighbour_of(model_of(seed), near, NEAR[self.dtype]).to(DTYPES[self.dtype])
        model.set_attn_implementation("eager")
        return model, probe_of(model, self.dtype)

    def publish(self, step, tensors=None, file=None, draw=None, seed=None, near=0):
        write_version(self.scene.job, step, *self.version(step if seed is None else seed, near), tensors)
        self.scene.tick()
        if file is not None:  # storage damages what was published
            file(f"{self.scene.job.step(step)}/{SHARD}", draw)

    def report(self):
        return engine_report_of(self.scene.presence().info)

    def close(self):
        self.scene.close()


@pytest.fixture(params=sorted(DTYPES) if ALL else ["bfloat16"])
def bed(request, tmp_path):
    made = Bed(tmp_path / "job", request.param)
    yield made
    made.close()


@pytest.mark.slow
def test_each_fault_is_found_by_the_check_that_must_find_it(bed):
    draw, step = random.Random(bed.dtype), 1
    bed.publish(step)
    assert bed.follower.turn(timeout=LONG).kind == "applied"
    for number in range(FAULTS // 2):
        name, check, does = case(draw, number)
        bed.hook.fault, bed.hook.keeps_cache = does.get("engine"), does.get("cache", False)
        for near in range(1, (WITHIN if "near" in does else 1) + 1):
            place = {"seed": step, "near": near} if "near" in does else {}
            bed.publish(step + near, does.get("tensors"), does.get("file"), draw, **place)
            outcome = bed.follower.turn(timeout=LONG)
            if outcome.kind != "applied":
                break
        assert outcome.kind in ("failed", "refused"), (number, name, near)
        assert re.search(CHECKS[check], outcome.reason), (number, name, outcome.reason)
        bed.hook.fault, bed.hook.keeps_cache = None, False
        step += near + 1
        bed.publish(step)
        assert bed.follower.turn(timeout=LONG).pair == (1, step), (number, name)
        assert bed.report().state is EngineState.PROVEN


def examined(place, dtype, fault=None, *, keeps_cache=False):
    """Return what an engine with a fault reports after its exam."""
    os.mkdir(place)
    model_of(0).to(DTYPES[dtype]).save_pretrained(f"{place}/start")
    model = AutoModelForCausalLM.from_pretrained(f"{place}/start", dtype=DTYPES[dtype])
    scene, hook = Scene(f"{place}/job"), FaultyHook(model.eval())
    hook.fault, hook.keeps_cache = fault, keeps_cache
    try:
        follower = scene.follow("e0", hook, retries=0)
        return engine_report_of(scene.presence().info), follower.may_work()
    finally:
        scene.close()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_each_part_that_no_load_reaches_is_named_before_an_engine_gets_work(tmp_path, dtype):
    kinds = {}
    for name in model_of(0).state_dict():
        kinds.setdefault(kind_of(name), []).append(name)
    draw = random.Random(dtype)
    for number, kind in enumerate(draw.choices(sorted(kinds), k=PARTS)):
        found, may_work = examined(tmp_path / str(number), dtype, stale(kinds[kind]))
        assert (found.exam, found.state, may_work) == ("failed", EngineState.WRONG, False), kind
        assert f"{kind} stayed as it was" in found.reason
        assert found.unseen == ()
    assert examined(tmp_path / "good", dtype)[0].exam == "passed"


@pytest.mark.slow
def test_a_prefix_cache_that_loads_do_not_reset_fails_the_exam(tmp_path):
    found, may_work = examined(tmp_path / "one", "float32", keeps_cache=True)
    assert (found.exam, may_work) == ("failed", False)
    assert re.search(CHECKS["cache"], found.reason)


@pytest.mark.slow
def test_good_loads_are_all_proven(bed):
    worst = 0.0
    for step in range(1, GOOD + 1):
        bed.publish(step)
        outcome = bed.follower.turn(timeout=LONG)
        assert outcome.kind == "applied", (step, outcome.reason)
        found = bed.report()
        assert found.state is EngineState.PROVEN
        worst = max(worst, found.proof.mean / found.proof.tolerance)
    assert bed.report().failures == 0
    assert worst < 1


@pytest.mark.slow
def test_good_loads_of_neighbouring_versions_are_all_proven(bed):
    for step in range(1, GOOD + 1):
        bed.publish(step, seed=0, near=step)
        outcome = bed.follower.turn(timeout=LONG)
        assert outcome.kind == "applied", (step, outcome.reason)
        assert bed.report().state is EngineState.PROVEN
    assert bed.report().failures == 0
