"""Weights from a hook's memory into engines whose group is real, each a process, and what breaks off."""

import contextlib
import gc
import json
import os
import signal
import socket
import time

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from safetensors.torch import save_file  # noqa: E402
from support import forked  # noqa: E402
from support.broadcasts import ENVIRONMENT, HERE, LONG  # noqa: E402
from support.servers import Server, digest_of  # noqa: E402
from support.targets import label, target_of  # noqa: E402

from explorer_hooks.finding import open_hook  # noqa: E402
from explorer_hooks.hook import Running, UntouchedError  # noqa: E402
from explorer_hooks.parts.broadcast import delivery, group, ipc  # noqa: E402
from explorer_hooks.parts.broadcast.delivery import cut  # noqa: E402
from explorer_hooks.parts.broadcast.group import Invitation  # noqa: E402
from explorer_hooks.parts.broadcast.segments import Segment  # noqa: E402
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError, RefusedError  # noqa: E402
from syncd.parts.broadcast.process_group import ProcessGroup  # noqa: E402
from syncd.transports.tensors import TensorMeta  # noqa: E402

SMALL = 20_000
"""Bytes of a bucket: the model is several."""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    directory = tmp_path_factory.mktemp("start")
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).float().save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def server(request, start, tmp_path_factory):
    made = Server(request.param, start, tmp_path_factory.mktemp("engine") / "log")
    yield made
    made.process.kill()


@pytest.fixture
def over_gloo(monkeypatch):
    """Have a group over NCCL be one over gloo, and a GPU be main memory, as the engines have it."""
    monkeypatch.syspath_prepend(f"{HERE}/programs")
    from as_if_nccl import OverGloo

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", OverGloo, raising=False)
    monkeypatch.setattr(group, "device_for", lambda backend: torch.device("cpu"))


@pytest.fixture(params=["gloo", "ipc"])
def engine(server, monkeypatch, request):
    """Return an engine that is as it was when it was started; no segment made here is left at the end."""
    monkeypatch.setattr(delivery, "BUCKET", SMALL)
    names, link = [], Segment._link
    monkeypatch.setattr(Segment, "_link", lambda self, name: (names.append(name), link(self, name)))
    if server.process.poll() is not None:
        server.start()
    server.ask("POST", "/reset")
    server.way = request.param
    yield server
    assert not set(names).intersection(os.listdir("/dev/shm"))


def hook_of(engine, timeout=20.0, **settings):
    settings = {"push": engine.way, **settings}
    return open_hook(f"{engine.kind}={engine.address}", settings=settings, timeout=timeout)


def weights(start, seed):
    """Return the tensors of a version."""
    noise = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(start)
    return {
        name: held + torch.randn(held.shape, generator=noise) for name, held in model.state_dict().items()
    }


def target(tensors, directory, pair):
    os.makedirs(directory)
    save_file(tensors, f"{directory}/model-00001-of-00001.safetensors")
    return target_of(str(directory), pair)


def load(hook, wanted):
    hook.prepare(wanted)
    hook.load(wanted)
    hook.commit(wanted)


def sockets():
    found = {name: _link(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
    return sorted(name for name, link in found.items() if link.startswith("socket:"))


def _link(path):
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


def test_a_pushed_engine_runs_the_weights_and_no_connection_is_left(engine, start):
    hook, before = hook_of(engine), sockets()
    for number in (1, 2):
        tensors = weights(start, number)
        hook.load_tensors(f"1.{number}+a", tensors)
        state = engine.state()
        assert state["digest"] == digest_of(tensors)
        assert state["label"] == f"1.{number}+a"
        assert hook.current_version() == Running(f"1.{number}+a")
        assert (state["paused"], state["groups"], state["open"]) == (False, 0, False)
    assert state["updates"] > 4, "there were several buckets"
    assert state["ways"] == [{"gloo": "group", "ipc": "memory"}[engine.way]]
    assert sockets() == before


def test_a_group_over_nccl_is_formed_as_each_engine_expects_it(engine, start, over_gloo, capfd):
    """NCCL itself is not there: what is seen is how the members meet, and the bytes of two versions."""
    if engine.way != "gloo":
        pytest.skip("the way is nccl")
    hook = hook_of(engine, push="nccl")
    for number in (1, 2):
        tensors = weights(start, number)
        hook.load_tensors(f"1.{number}+a", tensors)
        assert engine.state()["digest"] == digest_of(tensors)
    assert engine.state()["ways"] == ["group"]
    made = [json.loads(line.removeprefix("nccl ")) for line in capfd.readouterr().out.splitlines()]
    assert [(one["rank"], one["size"], one["watched"]) for one in made] == [(0, 2, False)] * 2


def test_push_nccl_without_a_gpu_leaves_broadcasts_out(engine):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    hook = hook_of(engine, push="nccl")
    assert "needs a GPU of this process" in hook.no_broadcasts()
    with pytest.raises(UntouchedError, match="needs a GPU of this process"):
        hook.load_tensors("1.1+a", {"a": torch.ones(1)})
    assert hook.current_version() == Running(None)


def test_a_failed_push_leaves_no_connection_open(engine, start):
    """Not even until Python looks for circles: connections that stay open keep the engine's workers waiting."""
    hook, before = hook_of(engine), sockets()
    gc.collect()
    gc.disable()
    try:
        engine.break_at("update", "refuse", 2)
        with contextlib.suppress(LoadFailedError):
            hook.load_tensors("1.2+a", weights(start, 2))
        deadline = time.monotonic() + LONG
        while len(sockets()) > len(before):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        gc.enable()


def test_a_pushed_version_counts_as_paused_for_other_hooks_until_published(engine, start):
    hook, other = hook_of(engine), hook_of(engine)
    hook.load_tensors("1.2+a", weights(start, 2))
    assert other.current_version() == Running("1.2+a", paused=True), "it is to be loaded from files"
    hook.set_label(label(2))
    assert other.current_version() == hook.current_version() == Running(label(2))


def test_a_dropped_label_leaves_the_engine_paused_for_every_hook(engine, start):
    hook = hook_of(engine)
    hook.load_tensors("1.2+a", weights(start, 2))
    hook.drop_label()
    assert hook.current_version() == Running("1.2+a", paused=True)


def test_files_are_loaded_normally_after_a_push(engine, start, tmp_path):
    hook, tensors = hook_of(engine), weights(start, 3)
    hook.load_tensors("1.2+a", weights(start, 2))
    load(hook, target(tensors, tmp_path / "version", (1, 3)))
    assert engine.state()["digest"] == digest_of(tensors)
    assert hook.current_version() == hook_of(engine).current_version() == Running(label(3))


def test_an_engine_that_does_not_join_keeps_its_weights(engine, start):
    if (engine.kind, engine.way) == ("sglang", "ipc"):
        pytest.skip(
            "it is asked for no group: see test_an_engine_that_does_not_share_memory_is_pushed_over_gloo"
        )
    hook, before = hook_of(engine), engine.state()
    engine.break_at("group", "refuse")
    with pytest.raises(UntouchedError, match="told to refuse"):
        hook.load_tensors("1.2+a", weights(start, 2))
    state = engine.state()
    assert state["digest"] == before["digest"]
    assert (state["paused"], state["open"]) == (False, False)
    assert hook.current_version() == Running(None)
    hook.load_tensors("1.2+a", weights(start, 2))
    assert hook.current_version() == Running("1.2+a")


@pytest.mark.parametrize("after", [0, 2])
def test_an_engine_that_refuses_a_bucket_stays_paused_until_files_are_loaded(engine, start, tmp_path, after):
    hook, good = hook_of(engine), weights(start, 1)
    known = target(good, tmp_path / "good", (1, 1))
    load(hook, known)
    engine.break_at("update", "refuse", after)
    with pytest.raises(LoadFailedError) as error:
        hook.load_tensors("1.2+a", weights(start, 2))
    assert not isinstance(error.value, UntouchedError)
    state = engine.state()
    assert (state["paused"], state["groups"], state["open"]) == (True, 0, False)
    hook.abort(known)
    assert engine.state()["digest"] == digest_of(good)
    assert hook.current_version() == Running(label(1))
    tensors = weights(start, 2)
    hook.load_tensors("1.2+b", tensors)
    assert engine.state()["digest"] == digest_of(tensors)


def test_a_tensor_that_torch_cannot_copy_is_a_failed_load(engine, start, tmp_path):
    """As on a GPU without room for a copy."""
    hook, good = hook_of(engine), weights(start, 1)
    known = target(good, tmp_path / "good", (1, 1))
    load(hook, known)
    with pytest.raises(LoadFailedError, match="meta"):
        hook.load_tensors("1.2+a", {name: tensor.to("meta") for name, tensor in weights(start, 2).items()})
    hook.abort(known)
    assert engine.state()["digest"] == digest_of(good)
    assert hook.current_version() == Running(label(1))


def test_an_engine_killed_during_a_push_can_be_loaded_after_its_restart(engine, start, tmp_path):
    hook, tensors = hook_of(engine), weights(start, 2)
    engine.break_at("update", "SIGKILL", 1)
    with pytest.raises(EngineUnreachableError):
        hook.load_tensors("1.2+a", tensors)
    assert engine.process.wait(LONG) == -signal.SIGKILL
    engine.start()
    assert hook.current_version() == Running(None)
    load(hook, target(tensors, tmp_path / "version", (1, 2)))
    assert engine.state()["digest"] == digest_of(tensors)
    assert hook.current_version() == Running(label(2))


def test_a_stopped_engine_times_out_the_push_and_can_be_rolled_back(engine, start, tmp_path, monkeypatch):
    monkeypatch.setattr(group, "_ENDING", 0.5)
    monkeypatch.setattr(ipc, "_ENDING", 0.5)
    good = weights(start, 1)
    known = target(good, tmp_path / "good", (1, 1))
    load(hook_of(engine), known)
    impatient = hook_of(engine, timeout=3.0, ask_timeout="1")
    engine.break_at("update", "SIGSTOP", 1)
    with pytest.raises((LoadFailedError, EngineUnreachableError)):
        impatient.load_tensors("1.2+a", weights(start, 2))
    os.kill(engine.process.pid, signal.SIGCONT)
    later = hook_of(engine)
    later.abort(known)
    assert engine.state()["digest"] == digest_of(good)
    assert later.current_version() == Running(label(1))


def test_the_next_hook_loads_an_engine_whose_hook_was_killed_during_a_push(engine, start, tmp_path):
    program = f"{HERE}/programs/hand.py"
    dying = forked.start(
        tmp_path / "log", ENVIRONMENT, program, engine.kind, engine.address, start, engine.way
    )
    assert dying.wait(LONG) == -signal.SIGKILL
    left = {line.split()[1] for line in (tmp_path / "log").read_text().splitlines() if "segment" in line}
    assert bool(left) == (engine.way == "ipc")
    assert bool(left.intersection(os.listdir("/dev/shm"))) == bool(left), "its bucket is still there"
    hook, tensors = hook_of(engine), weights(start, 3)
    assert hook.current_version().paused
    load(hook, target(tensors, tmp_path / "version", (1, 3)))
    assert hook.current_version() == Running(label(3))
    tensors = weights(start, 4)
    hook.load_tensors("1.4+a", tensors)
    assert engine.state()["digest"] == digest_of(tensors)
    assert not left.intersection(os.listdir("/dev/shm")), "the next push has removed it"


def test_tensors_that_do_not_fit_are_refused_before_anything_is_sent(engine, start):
    hook = hook_of(engine)
    metas = {name: TensorMeta("F32", tuple(held.shape)) for name, held in weights(start, 1).items()}
    hook.check_offered(metas)
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(RefusedError, match="instead of"):
        hook.check_offered(metas | {name: TensorMeta("F32", (7, 7))})
    with pytest.raises(RefusedError, match="missing"):
        hook.check_offered({key: meta for key, meta in metas.items() if key != name})


def test_engines_on_another_host_need_a_broadcast_address():
    def reason(address, **settings):
        return open_hook(f"sglang={address}", settings=settings, timeout=1.0).no_broadcasts()

    assert reason("http://127.0.0.1:1") == reason("http://localhost:1") == ""
    assert "another host" in reason("http://10.0.0.5:1")
    assert reason("http://10.0.0.5:1", broadcast="10.0.0.4") == ""
    assert "broadcast=false" in reason("http://127.0.0.1:1", broadcast="false")
    with pytest.raises(ConfigError, match="broadcast=maybe"):
        reason("http://127.0.0.1:1", broadcast="maybe")


def test_the_group_listens_on_its_own_address_only():
    group = ProcessGroup.listen("127.0.0.1", 5.0)
    try:
        with socket.create_server(("127.0.0.2", group.port)), pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", group.port))
    finally:
        group.abort()


def test_the_secret_of_an_invitation_is_not_in_its_repr():
    invitation = Invitation("127.0.0.1", 1, 2)
    assert len(invitation.secret) == 32
    assert invitation.secret not in repr(invitation)


def test_buckets_hold_whole_tensors_in_order():
    sizes = {"a": 4, "b": 4, "c": 9, "d": 1, "e": 1}
    assert list(cut(sizes, 8)) == [["a", "b"], ["c"], ["d", "e"]]
    assert list(cut(sizes, 1)) == [["a"], ["b"], ["c"], ["d"], ["e"]]
    assert list(cut({}, 8)) == []
