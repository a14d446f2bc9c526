"""The exam of adapters and of servers that are started on each version: a layer that is left out is named."""

import os
import sys
import time

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
peft = pytest.importorskip("peft", reason="needs peft")

from support import paths, small_qwen  # noqa: E402
from support.engine_beds import SmallLoraBed, SmallSglangLoraBed  # noqa: E402
from support.followers import Scene  # noqa: E402
from support.ports import free_port  # noqa: E402
from support.probe_contract import ROWS  # noqa: E402

from explorer_hooks.finding import open_hook  # noqa: E402
from explorer_hooks.hook import EXAM_LABEL  # noqa: E402
from explorer_hooks.hooks.peft_model import PeftHook, with_adapter  # noqa: E402
from explorer_hooks.parts.exam.files import ExamFiles, Subject  # noqa: E402
from syncd.jobfile.sections import LoraSection  # noqa: E402
from syncd.protocol.engine_state import EngineState, engine_report_of  # noqa: E402
from syncd.protocol.probe import Probe  # noqa: E402
from syncd.protocol.writer import StepWriter  # noqa: E402

LONG = 60.0
LEFT_OUT = "the adapter of model.layers.*.self_attn.v_proj stayed as it was"


def publish(scene, step):
    """Write an adapter as an announced step, with the probe of the model that has it."""
    place = small_qwen.write_adapter(f"{scene.root}-{step}", step)
    model = small_qwen.model_with_adapter(step)
    rows = tuple(tuple(small_qwen.expected(model, row, len(row) - 1)) for row in ROWS)
    probe = Probe(tuple(map(tuple, ROWS)), rows, "float32", "float32")
    writer = StepWriter(scene.job, step, 1, f"a{step}")
    writer.begin()
    names = ("adapter_model.safetensors", "adapter_config.json")
    with open(f"{place}/{names[0]}", "rb") as weights, open(f"{place}/{names[1]}", "rb") as config:
        shard = writer.write(f"actor/{names[0]}", weights.read(), tensors=16)
        other = writer.write(f"actor/{names[1]}", config.read())
    writer.receipt(1, [shard], [other], probe=probe)
    writer.seal(kind="lora")
    writer.announce()
    scene.tick()


def report(scene):
    return engine_report_of(scene.presence().info)


def told(scene, name):
    return [fields for event, fields in scene.told if event == name]


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path / "job")
    yield made
    made.close()


@pytest.fixture(params=[SmallLoraBed, SmallSglangLoraBed])
def bed(request, tmp_path):
    made = request.param(tmp_path)
    made.engine.base_root = small_qwen.write_model(f"{tmp_path}/model")
    yield made
    made.close()


def leave_out(adapter):
    """Drop what the adapter adds to one layer."""
    return {name: tensor * (0 if "v_proj.lora_B" in name else 1) for name, tensor in adapter.items()}


def test_a_server_that_serves_every_layer_of_an_adapter_passes_and_keeps_nothing_of_the_exam(bed, scene):
    follower = scene.follow("e0", bed.open(), retries=0, exam="on")
    assert (report(scene).exam, report(scene).state) == ("", EngineState.WAITING)
    publish(scene, 1)
    outcome = follower.turn(timeout=LONG)
    assert outcome.kind == "applied", outcome.reason
    found = report(scene)
    assert (found.exam, found.unseen, found.state) == ("passed", (), EngineState.PROVEN)
    assert list(bed.engine.adapters) == [f"policy-{scene.label(1)}"]
    publish(scene, 2)
    assert follower.turn(timeout=LONG).kind == "applied"
    assert len(told(scene, "engine_examined")) == 1


@pytest.mark.fault("an engine's way of loading does not reach a tensor, whose change no version shows")
def test_a_server_that_leaves_a_layer_out_gets_no_version(bed, scene, monkeypatch):
    merged = small_qwen._merged
    monkeypatch.setattr(small_qwen, "_merged", lambda model, adapter: merged(model, leave_out(adapter)))
    follower = scene.follow("e0", bed.open(), retries=0, exam="on")
    publish(scene, 1)
    assert follower.turn(timeout=0.5).kind == "failed"
    found = report(scene)
    assert (found.exam, found.state, found.given_up) == ("failed", EngineState.WRONG, ())
    assert LEFT_OUT in found.reason
    assert not follower.may_work()
    assert list(bed.engine.adapters) == []


def test_an_engine_goes_on_while_the_files_of_its_adapter_are_away(bed, scene):
    follower = scene.follow("e0", bed.open(), exam="off", prove_every=0.001, check_every=0.0)
    publish(scene, 1)
    assert follower.turn(timeout=LONG).kind == "applied"
    config = f"{scene.payload(1)}/adapter_config.json"
    os.rename(config, f"{config}.away")
    assert follower.turn(timeout=0.0).kind == "nothing"
    assert (follower.applied, report(scene).state) == ((1, 1), EngineState.PROVEN)
    os.rename(f"{config}.away", config)
    publish(scene, 2)
    assert follower.turn(timeout=LONG).pair == follower.applied == (1, 2)


def test_an_adapter_that_a_killed_follower_left_in_an_exam_is_unloaded(bed, scene, tmp_path):
    adapter = small_qwen.write_adapter(f"{tmp_path}/adapter", 3)
    hook = bed.open()
    subject = Subject(hook.start_directory(), adapter)
    with ExamFiles(scene.job).opened(subject, "float32", None) as (_, copy):
        hook.prepare(copy)
        hook.load(copy)
    assert hook.current_version().label == EXAM_LABEL
    follower = scene.follow("e0", bed.open(), retries=0)
    assert "exam_ended" in scene.names() or list(bed.engine.adapters) == []
    assert follower.running().label is None


class Peft(PeftHook):
    """Loads as the real hook does, but leaves out a layer if it is told to."""

    leaves_out = False

    def load(self, target):
        super().load(target)
        if self.leaves_out:
            with torch.no_grad():
                for name, tensor in self._loadable_tensors().items():
                    if "v_proj.lora_B" in name:
                        tensor.zero_()


def in_process(place):
    start = small_qwen.write_model(f"{place}/model")
    model = small_qwen.model_of(0)
    model.config._name_or_path = start
    section = LoraSection(rank=8, alpha=16, targets=small_qwen.ADAPTED)
    return Peft(with_adapter(model, section).eval(), start)


@pytest.mark.parametrize("leaves_out", [False, True])
def test_a_model_in_this_process_is_examined_before_its_first_adapter(tmp_path, scene, leaves_out):
    hook = in_process(tmp_path)
    hook.leaves_out = leaves_out
    before = {name: tensor.detach().clone() for name, tensor in hook._loadable_tensors().items()}
    follower = scene.follow("e0", hook, retries=0)
    publish(scene, 1)
    outcome = follower.turn(timeout=0.5 if leaves_out else LONG)
    found = report(scene)
    if leaves_out:
        assert (found.exam, found.state) == ("failed", EngineState.WRONG)
        assert LEFT_OUT in found.reason
        assert all(torch.equal(tensor, before[name]) for name, tensor in hook._loadable_tensors().items())
        assert hook.current_version().label is None
    else:
        assert outcome.kind == "applied", outcome.reason
        assert (found.exam, found.unseen, found.state) == ("passed", (), EngineState.PROVEN)


@pytest.mark.slow
def test_a_server_that_is_started_on_each_version_is_examined_by_two_starts(tmp_path, scene):
    start = small_qwen.write_model(f"{tmp_path}/model")
    argv = (
        sys.executable,
        f"{paths.ROOT}/tests/programs/restarted_server.py",
        "{model}",
        "{port}",
        str(tmp_path),
    )
    settings = {"reload": "restart", "start_model": start, "start_timeout": "300", "stop_timeout": "5"}
    hook = open_hook(f"vllm=http://127.0.0.1:{free_port()}", argv=argv, settings=settings, timeout=30.0)
    follower, until = scene.follow("e0", hook, retries=0), time.monotonic() + 5 * LONG
    while not report(scene).exam:
        assert time.monotonic() < until
        follower.turn(0.1)
    assert (report(scene).exam, report(scene).unseen) == ("passed", ())
    models = [line.split()[2] for line in (tmp_path / "starts").read_text().splitlines()]
    assert len(models) == 3
    assert (models[0], models[2]) == (start, start)
    assert scene.job.exams in models[1]
    assert follower.running().label is None
