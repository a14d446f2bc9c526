"""A model of this process takes deltas straight into its parameters, proved by its own memory.

The contract of every hook that does: `transformers`, and `callback` with the engine's parameters.
"""

import os

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from support.deltas import SHARDS, write_delta, write_keyframe  # noqa: E402
from support.jobs import ManualClock  # noqa: E402
from support.proven import answer, probe_of  # noqa: E402
from support.tied_qwen import tiny  # noqa: E402
from test_follow_deltas import (  # noqa: E402
    CONTAINER,
    HEADER,
    CountingDisk,
    DeltaScene,
    applied,
    container_of,
    flip,
)

import syncd.transports.delta.fill_changes  # noqa: E402
from explorer_hooks.follower.policy import FollowOptions  # noqa: E402
from explorer_hooks.follower.versions import Fetcher  # noqa: E402
from explorer_hooks.hook import HookOptions  # noqa: E402
from explorer_hooks.hooks.callback import CallbackHook  # noqa: E402
from explorer_hooks.hooks.parameters import ModelParameters  # noqa: E402
from explorer_hooks.hooks.transformers import TransformersHook  # noqa: E402
from syncd.client.client import Client  # noqa: E402
from syncd.errors import ConfigError, LoadFailedError, RefusedError  # noqa: E402
from syncd.protocol.local_disk import SystemClock  # noqa: E402
from syncd.publishing import FollowingDisk, publish_export, read_export  # noqa: E402
from syncd.transports.delta.publish import publish_delta  # noqa: E402
from syncd.transports.delta.storage_choice import reader_seconds  # noqa: E402
from syncd.transports.files.leased_directory import LoadTimings  # noqa: E402

ROWS = [[(7 * row + 3 * at) % 29 + 1 for at in range(9)] for row in range(3)]
KINDS = {"float16": torch.float16, "float32": torch.float32, "bool": torch.bool}


class Holder(torch.nn.Module):
    """A module with the tensors of the small model."""

    def __init__(self, model, **dtypes):
        super().__init__()
        for name, tensor in tensors_of(model).items():
            dtype = dtypes.get(name, KINDS[str(tensor.dtype)])
            self.register_buffer(name, torch.zeros(tensor.shape, dtype=dtype))


def tensors_of(model):
    return {name: tensor for tensors in model.shards.values() for name, tensor in tensors.items()}


def transformers(module):
    return TransformersHook(module, probe=False)


def callback(module):
    parameters = ModelParameters(module.state_dict(keep_vars=True))
    return CallbackHook(parameters.load, parameters=parameters)


def state_of(hook):
    return hook.parameters.tensors


def holds(hook, model):
    state = state_of(hook)
    return all(torch.equal(state[name], torch.from_numpy(one)) for name, one in tensors_of(model).items())


@pytest.fixture
def scene(tmp_path):
    scene = DeltaScene(tmp_path / "job")
    yield scene
    scene.close()


class Loader:
    """Loads versions into one hook on a disk that counts, as a follower does."""

    def __init__(self, scene, hook, name="e0", **options):
        self.scene, self.hook, self.disk = scene, hook, CountingDisk()
        client = Client.open(scene.root, "explorer", name, disk=self.disk, poll=0.005, heartbeat=False)
        self.client = scene._stack.enter_context(client)
        options = FollowOptions(**options)
        self.fetcher = Fetcher(self.client, hook, options, lambda: False, lambda *_, **__: None)
        self.held = None

    def load(self, step):
        """Load a step; return the steps of whose files more than headers was read on the way."""
        self.disk.steps()
        held = self.fetcher.fetch(step, LoadTimings(SystemClock()))
        self.hook.prepare(held.directory)
        self.hook.load(held.directory)
        self.hook.commit(held.directory)
        if self.held is not None:
            self.held.close()
        self.held = held
        read = {int(name): count for name, count in self.disk.bytes.items()}
        return {one for one, count in read.items() if one == step or count > len(SHARDS) * HEADER}

    @property
    def presence(self):
        return self.scene.presence(self.client.identity)


@pytest.fixture(params=[transformers, callback])
def opened(request, scene):
    """What opens a hook for a module of this process."""

    def opened(module):
        hook = request.param(module)
        scene._stack.callback(hook.close)
        return hook

    return opened


@pytest.fixture
def loader(scene, opened):
    return Loader(scene, opened(Holder(scene.model)))


def test_each_delta_and_keyframe_goes_into_the_parameters_and_only_changes_are_read(scene, loader):
    assert loader.presence.reads == ("delta",)
    scene.whole(1)
    loader.load(1)
    assert holds(loader.hook, scene.model)
    for step, write in ((2, write_delta), (3, write_delta), (4, write_keyframe), (5, write_delta)):
        scene.written(step, write)
        assert loader.load(step) == {step}
        assert holds(loader.hook, scene.model)
        assert loader.hook.current_version().label == scene.label(step)
        assert (
            loader.hook.parameters.loaded.direct + loader.hook.parameters.loaded.cached == 0
        )  # no shard was opened for its data
    for step in (6, 7):
        scene.written(step, write_delta)
    assert loader.load(7) == {7}  # of step 6 the container, which is as short as a header
    assert holds(loader.hook, scene.model)
    assert loader.presence.leases == (4, 5, 6, 7)  # what it goes back to is a chain


def test_a_late_model_reads_the_keyframe_and_the_chain(scene, loader):
    scene.chain(3)
    assert loader.load(3) == {1, 3}
    assert holds(loader.hook, scene.model)
    scene.delta(4)
    assert loader.load(4) == {4}
    assert holds(loader.hook, scene.model)


@pytest.mark.fault("a delta is applied to a base that it was not made from")
def test_a_model_whose_memory_is_another_version_is_read_whole(scene, loader):
    """Whoever changed a parameter, the digests of the tiles before say so, and nothing is applied to it."""
    scene.chain(1)
    loader.load(1)
    scene.delta(2)
    state_of(loader.hook)["b"][70_000] += 1
    loader.disk.bytes.clear()
    assert loader.load(2) == {1, 2}
    assert holds(loader.hook, scene.model)
    scene.delta(3)
    assert loader.load(3) == {3}
    assert holds(loader.hook, scene.model)


def test_a_model_says_how_long_reading_and_filling_took_and_waiting_does_not_count(scene, opened):
    """The trainer weighs whole weights and deltas by it: no stage of this process says it."""
    hook = opened(Holder(scene.model))
    follower = scene.follow("e0", hook)
    told = []
    for step in (1, 2):
        scene.delta(step) if step > 1 else scene.whole(step)
        applied(follower, step)
        info = scene.presence().info
        assert "stage" not in info["timings"]
        told.append(reader_seconds(info, step))
        assert told[-1] == pytest.approx(hook.parameters.seconds, abs=1e-6)
        assert 0 < told[-1] <= info["timings"]["prepare"] + info["timings"]["load"] + 1e-5
    assert set(hook.parameters._timings) == {"prepare", "load"}
    assert min(hook.parameters._timings.values()) > 0


def test_waiting_for_generations_is_not_what_a_model_says(scene, monkeypatch):
    hook = transformers(Holder(scene.model))
    scene._stack.callback(hook.close)
    follower, clock = scene.follow("e0", hook), ManualClock()
    hook.parameters._timings = LoadTimings(clock)
    shut, fill = hook._gate.shut, hook.parameters._fill
    monkeypatch.setattr(hook._gate, "shut", lambda: (clock.sleep(100.0), shut()))
    monkeypatch.setattr(hook.parameters, "_fill", lambda *given: (clock.sleep(2.0), fill(*given))[1])
    scene.whole(1)
    applied(follower, 1)
    assert reader_seconds(scene.presence().info, 1) == 2.0


def test_a_damaged_delta_is_refused_before_any_parameter_is_touched(scene, loader):
    scene.chain(1)
    loader.load(1)
    before = {name: tensor.clone() for name, tensor in state_of(loader.hook).items()}
    scene.delta(2)
    flip(f"{scene.job.step(2)}/{CONTAINER}", container_of(scene, 2) - 1)
    with pytest.raises(RefusedError, match="does not match its checksum"):
        loader.load(2)
    assert all(torch.equal(before[name], one) for name, one in state_of(loader.hook).items())
    flip(f"{scene.job.step(2)}/{CONTAINER}", container_of(scene, 2) - 1)
    loader.load(2)
    assert holds(loader.hook, scene.model)


def test_a_shortcut_that_is_damaged_is_no_fault_and_the_shards_are_read(scene, loader):
    scene.chain(1)
    loader.load(1)
    scene.written(2, write_keyframe)
    path = f"{scene.job.step(2)}/delta/delta-00001-of-00002.safetensors"
    flip(path, os.path.getsize(path) - 1)
    loader.load(2)
    assert holds(loader.hook, scene.model)
    assert loader.hook.parameters.loaded.direct + loader.hook.parameters.loaded.cached == len(SHARDS)


@pytest.mark.fault("a patch that was applied half drifts until a restart")
def test_a_load_that_fails_half_way_goes_back_to_the_delta_before(scene, opened, monkeypatch):
    hook = opened(Holder(scene.model))
    follower = scene.follow("e0", hook, retries=0)
    scene.whole(1)
    applied(follower, 1)
    scene.delta(2)
    applied(follower, 2)
    good = {name: tensor.clone() for name, tensor in state_of(hook).items()}
    scene.delta(3)
    real, calls = syncd.transports.delta.fill_changes._put, []

    def failing(*given):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("half way")
        real(*given)

    monkeypatch.setattr(syncd.transports.delta.fill_changes, "_put", failing)
    assert follower.turn(20).kind == "failed"
    assert hook.current_version().label == scene.label(2)
    assert all(torch.equal(good[name], one) for name, one in state_of(hook).items())
    monkeypatch.undo()
    scene.delta(4)
    applied(follower, 4)
    assert holds(hook, scene.model)


def test_a_model_of_another_dtype_loads_deltas_and_does_not_ask_for_them(scene, opened):
    loader = Loader(scene, opened(Holder(scene.model, b=torch.float32)))
    scene.chain(2)
    assert loader.load(2) == {1, 2}
    assert torch.equal(state_of(loader.hook)["b"], torch.from_numpy(tensors_of(scene.model)["b"]).float())
    scene.delta(3)
    assert loader.load(3) == {1, 3}
    assert loader.presence.reads == ()


def test_with_a_stage_a_model_of_this_process_gets_a_verified_directory(scene, opened):
    hook = opened(Holder(scene.model))
    loader = Loader(scene, hook, stage=str(scene.place / "stage"))
    scene.chain(1)
    loader.load(1)
    scene.delta(2)
    loader.load(2)
    assert loader.held.source == "stage"
    assert holds(hook, scene.model)


def test_an_import_path_may_name_the_parameters_too(tmp_path, monkeypatch, scene):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_model_of_a_test.py").write_text(
        "import torch\nfrom explorer_hooks.hooks.parameters import ModelParameters\n"
        "class Own:\n    parameters = ModelParameters({'b': torch.zeros(3)})\n    load = parameters.load\n"
        "class Module(torch.nn.Module):\n    def load(self, target): pass\n"
        "class Wrong:\n    parameters = 3\n    def load(self, target): pass\n"
    )
    for name, takes in (("Own", True), ("Module", False)):
        hook = CallbackHook.from_options(HookOptions(address=f"own_model_of_a_test:{name}"))
        scene._stack.callback(hook.close)
        assert hook.reads_changes == hook.checks_content == takes
    with pytest.raises(ConfigError, match="parameters of own_model_of_a_test:Wrong are 3"):
        CallbackHook.from_options(HookOptions(address="own_model_of_a_test:Wrong"))


def test_a_function_that_does_not_fill_the_parameters_is_a_failed_load(scene):
    parameters = ModelParameters(Holder(scene.model).state_dict(keep_vars=True))
    hook = CallbackHook(lambda target: None, parameters=parameters)
    scene._stack.callback(hook.close)
    scene.whole(1)
    with pytest.raises(LoadFailedError, match="did not fill the parameters"):
        Loader(scene, hook).load(1)


def test_the_probe_proves_a_delta_in_a_real_model(scene, tmp_path):
    """The trainer's log-probs, by a forward pass here; the model gets each version as changes of the one before."""
    trained, hook = tiny(1, torch.bfloat16), TransformersHook(tiny(0, torch.bfloat16), timeout=60)
    follower = scene.follow("e0", hook)
    for step in (1, 2, 3):
        export = tmp_path / f"model{step}"
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.view(torch.int16)[torch.rand(parameter.shape) < 0.02] += 1
        trained.save_pretrained(export)
        found, more = (
            read_export(FollowingDisk(), str(export)),
            {"probe": probe_of(trained, "bfloat16", ROWS)},
        )
        if step == 1:
            publish_export(scene.job, step, FollowingDisk(), found, **more)
        else:
            assert publish_delta(scene.job, step, FollowingDisk(), found, step - 1, **more).why_whole == ""
        scene.tick()
        applied(follower, step)
        assert scene.presence().info["state"] == "proven"
        assert answer(hook.model, ROWS) == answer(trained, ROWS)
