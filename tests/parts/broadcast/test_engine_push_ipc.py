"""Weights as shared memory: what a worker reads, who may open it, what is left behind, and when it is not used."""

import base64
import json
import os
import signal
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from safetensors.torch import save_file  # noqa: E402
from support import matrices  # noqa: E402
from support.broadcasts import HERE, LONG, received  # noqa: E402
from support.paths import PYTHONPATH  # noqa: E402
from support.servers import Server, digest_of  # noqa: E402
from support.targets import target_of  # noqa: E402

from explorer_hooks.finding import open_hook  # noqa: E402
from explorer_hooks.hook import Running, UntouchedError  # noqa: E402
from explorer_hooks.parts.broadcast import delivery, segments  # noqa: E402
from explorer_hooks.parts.broadcast.paired_calls import EngineRequest  # noqa: E402
from explorer_hooks.parts.broadcast.received import allocate  # noqa: E402
from explorer_hooks.parts.broadcast.segments import (  # noqa: E402
    DIRECTORY,
    Segment,
    open_segment,
    remove_leftovers,
)
from explorer_hooks.parts.broadcast.shared import CopiedBucket, share  # noqa: E402
from syncd.errors import ConfigError, LoadFailedError  # noqa: E402

ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}


def run(*argv, **more):
    """Run a program of the tests in a fresh interpreter; return what it says last."""
    ended = subprocess.run(
        argv, env=ENVIRONMENT, timeout=LONG, stdout=subprocess.PIPE, text=True, check=False, **more
    )
    assert ended.returncode == 0, ended.stdout
    return json.loads(ended.stdout.splitlines()[-1])


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
def engine(server, monkeypatch):
    monkeypatch.setattr(delivery, "BUCKET", 20_000)
    server.ask("POST", "/reset")
    return server


def hook_of(engine, way):
    return open_hook(f"{engine.kind}={engine.address}", settings={"push": way}, timeout=20.0)


def weights(start):
    model = transformers.AutoModelForCausalLM.from_pretrained(start)
    return {name: tensor + 1 for name, tensor in model.state_dict().items()}


def every_kind():
    made = torch.Generator().manual_seed(1)
    return {
        "matrix": torch.randn(31, 17, generator=made),
        "transposed": torch.randn(5, 9, generator=made).t(),
        "half": torch.randn(7, generator=made).to(torch.bfloat16),
        "eighth": torch.randn(3, 3, generator=made).to(torch.float8_e4m3fn),
        "number": torch.tensor(3, dtype=torch.int64),
        "none": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
    }


@pytest.mark.parametrize("in_place", [True, False])
def test_workers_of_both_engines_read_every_kind_of_tensor(in_place):
    """Also where a model's loader keeps what it is given: then the worker copies it in the end."""
    tensors = every_kind()
    held = received(tensors) if in_place else tensors
    bucket = share(held, workers=2, in_place=in_place)
    assert isinstance(bucket, CopiedBucket) != in_place
    try:
        bucket.fill()
        pickles = [base64.b64encode(one).decode() for one in bucket.as_pickles()]
        given = {"bucket": bucket.as_json(), "pickles": pickles}
        found = run(sys.executable, f"{HERE}/programs/open_shared.py", input=json.dumps(given))
    finally:
        bucket.release()
    sys.path.insert(0, f"{HERE}/programs")
    try:
        from open_shared import digest
    finally:
        sys.path.pop(0)
    wanted = digest(tensors.items())
    assert found == {"json": wanted, "pickles": [wanted, wanted]}
    name = bucket.location["segment"]
    del held, bucket, tensors
    assert [one for one in os.listdir(DIRECTORY) if one.startswith(name)] == []


def test_memory_to_receive_into_is_shared_as_long_as_a_tensor_uses_it():
    views = received({"a": torch.ones(5), "b": torch.ones(3)})
    (name,) = share(views, 1, in_place=True).location.values()
    del views["a"]
    assert name in os.listdir(DIRECTORY)
    elsewhere = share(views | {"c": torch.ones(3)}, 1, in_place=True)
    assert isinstance(elsewhere, CopiedBucket), "one of them is not in that memory"
    elsewhere.release()
    views.clear()
    del elsewhere
    assert name not in os.listdir(DIRECTORY)


def test_an_engine_s_request_that_has_ended_holds_no_tensors():
    tensors = received({"a": torch.ones(5)})
    (name,) = share(tensors, 1, in_place=True).location.values()
    request = EngineRequest(lambda used=tensors: used["a"].sum())
    del tensors
    request.wait(LONG)
    assert request.has_ended
    assert name not in os.listdir(DIRECTORY)


def test_memory_to_receive_into_is_plain_memory_where_there_is_no_room(monkeypatch):
    monkeypatch.setattr(segments, "DIRECTORY", "/nowhere")
    assert allocate(100).shape == (100,)


def test_handles_of_a_gpu_reach_torch_as_torch_made_them():
    """Each worker has handles of its own; only the device differs, by each engine's way of naming it."""
    found = run(sys.executable, f"{HERE}/programs/open_handles.py")
    device, all_args = 6, found["exported"]
    assert len(all_args) == 4, "two tensors for two workers"

    def on(name, rows):
        return [[*args[:device], name, *args[device + 1 :]] for args in rows]

    assert found["vllm"] == on("1", all_args[:2])
    assert found["sglang"] == on("GPU-of-this", all_args)


def test_a_segment_of_a_living_process_stays_and_one_of_a_killed_process_is_removed():
    code = (
        "import os, signal; from explorer_hooks.parts.broadcast.segments import Segment; held = Segment(100);"
        "print(held.name, held.another_name(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    dead = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=False
    )
    assert dead.returncode == -signal.SIGKILL
    mine = Segment(100)
    try:
        assert set(dead.stdout.split()) <= set(os.listdir(DIRECTORY))
        assert remove_leftovers() >= 2
        assert set(os.listdir(DIRECTORY)).isdisjoint(dead.stdout.split())
        assert mine.name in os.listdir(DIRECTORY)
    finally:
        mine.remove()
    mine.remove()


def test_only_a_segment_of_this_user_is_opened(tmp_path):
    held = Segment(100)
    forged = "syncd-push-" + "0" * 32
    try:
        for name in (f"../..{tmp_path}/x", "/etc/passwd", held.name.upper(), f"{held.name}/", ""):
            with pytest.raises(ValueError, match="is not the name of a segment"):
                open_segment(name)
        (tmp_path / "secret").write_text("secret")
        os.symlink(tmp_path / "secret", f"{DIRECTORY}/{forged}")
        with pytest.raises(OSError, match="symbolic link"):
            open_segment(forged)
        opened = open_segment(held.name)
        opened[80:84] = b"mine"
        assert open_segment(held.name)[80:84] == bytes(4), "a worker's writes stay its own"
        assert os.stat(f"{DIRECTORY}/{held.name}").st_mode & 0o777 == 0o600
    finally:
        held.remove()
        os.unlink(f"{DIRECTORY}/{forged}")


def test_a_segment_that_does_not_fit_is_refused_before_memory_is_taken():
    room = os.statvfs(DIRECTORY)
    before = os.listdir(DIRECTORY)
    with pytest.raises(OSError, match="No space left"):
        Segment(room.f_bavail * room.f_frsize + (64 << 20))
    assert [name for name in os.listdir(DIRECTORY) if name not in before and "syncd-push" in name] == []


def test_auto_pushes_by_ipc_to_an_engine_on_this_host(engine, start):
    tensors = weights(start)
    hook_of(engine, "auto").load_tensors("1.2+a", tensors)
    assert engine.state()["ways"] == ["memory"]
    assert engine.state()["digest"] == digest_of(tensors)


@pytest.mark.group("mounts")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts another shared memory, as root")
@pytest.mark.parametrize(
    ("size", "complaint"), matrices.rows([("8m", "memory"), ("16k", "does not take")], ("8m", "memory"))
)
def test_an_engine_that_does_not_share_memory_is_pushed_over_gloo(engine, start, size, complaint):
    """As from another container, with room there and without."""
    before = engine.state()["digest"]
    program = ["unshare", "--mount", sys.executable, f"{HERE}/programs/apart.py"]
    found = run(*program, engine.kind, engine.address, start, size)
    assert found["ipc"][0] == "UntouchedError"
    assert complaint in found["ipc"][1]
    assert found["auto"] == []
    state = engine.state()
    assert state["ways"] == ["group"]
    assert state["digest"] == before, "they are the weights that it was started with"
    assert (state["label"], state["paused"], state["open"]) == ("1.2+a", False, False)


def test_a_tunnel_to_sglang_is_no_reason_to_share_memory(engine, start):
    """What listens at the address has no worker of SGLang below it."""
    if engine.kind != "sglang":
        pytest.skip("vLLM's workers open the memory before anything is touched")
    hook = hook_of(engine, "ipc")
    engine.ask("POST", "/rename")
    with pytest.raises(UntouchedError, match="of 1 workers of the server at port"):
        hook.load_tensors("1.2+a", weights(start))
    assert hook.current_version() == Running(None)


def test_memory_that_is_full_in_the_middle_leaves_the_engine_paused_until_files_are_loaded(
    engine, start, monkeypatch, tmp_path
):
    os.makedirs(tmp_path / "good")
    save_file(weights(start), tmp_path / "good" / "model-00001-of-00001.safetensors")
    good, hook = target_of(str(tmp_path / "good"), (1, 1)), hook_of(engine, "auto")
    for act in (hook.prepare, hook.load, hook.commit):
        act(good)
    real, made = segments.Segment.__init__, []

    def full(self, size):
        made.append(size)
        if len(made) == 3:
            raise OSError(28, "No space left on device")
        real(self, size)

    monkeypatch.setattr(segments.Segment, "__init__", full)
    with pytest.raises(LoadFailedError, match="No space left") as error:
        hook.load_tensors("1.2+a", weights(start))
    assert not isinstance(error.value, UntouchedError)
    assert engine.state()["paused"]
    hook.abort(good)
    assert engine.state()["digest"] == digest_of(weights(start))
    assert hook.current_version() == Running(good.label)


def test_ipc_to_another_host_is_refused_and_auto_goes_over_gloo():
    def ways(address, way):
        return open_hook(f"vllm={address}", settings={"push": way}, timeout=1.0)._ways

    assert ways("http://127.0.0.1:1", "auto") == ("ipc", "gloo")
    assert ways("http://10.0.0.5:1", "auto") == ("gloo",)
    assert ways("http://127.0.0.1:1", "gloo") == ("gloo",)
    with pytest.raises(ConfigError, match="push=ipc shares memory with the engine"):
        ways("http://10.0.0.5:1", "ipc")
    with pytest.raises(ConfigError, match="push=wire"):
        ways("http://127.0.0.1:1", "wire")
