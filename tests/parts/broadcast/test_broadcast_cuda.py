"""The broadcast of tensors on GPUs: over NCCL between two, over gloo where both sides share one. `make test-gpu`."""

import json
import os
import signal
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="the broadcast needs torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

from support.paths import PYTHONPATH, TESTS  # noqa: E402

from syncd.client.wait import Deadline  # noqa: E402
from syncd.parts.broadcast import group_calls, packing, process_group  # noqa: E402
from syncd.parts.broadcast.packing import Packer  # noqa: E402
from syncd.parts.broadcast.process_group import CPU  # noqa: E402
from syncd.protocol.backend import NCCL  # noqa: E402
from syncd.protocol.buckets import plan_buckets  # noqa: E402
from syncd.protocol.local_disk import SystemClock  # noqa: E402
from syncd.transports import torch_tensors  # noqa: E402
from syncd.transports.files.export_walk import ExportWalk  # noqa: E402

LONG = 300.0
FIRST, SECOND = "cuda:0", "cuda:1"

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture
def cast(tmp_path):
    """Start one side; it is killed at the end if it is still there."""
    started = []

    def start(*words):
        command = [sys.executable, f"{TESTS}/support/cast.py", *map(str, words)]
        environment = os.environ | {"PYTHONPATH": PYTHONPATH}
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        return started[-1]

    (tmp_path / "job").mkdir()
    start.job = str(tmp_path / "job")
    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=LONG)


def result(process):
    output = process.communicate(timeout=LONG)[0]
    assert process.returncode == 0, output
    return json.loads(output.splitlines()[-1])


def sent(cast, here, there, steps=3):
    receiver = cast("receive", cast.job, there, steps)
    sender = cast("send", cast.job, here, steps, 60)
    return result(sender), result(receiver)


def check(sender, receiver, backend, steps=3):
    assert sender["ends"] == [True] * steps
    assert sender["backends"] == [backend] * steps
    assert receiver["digest"] == sender["digest"]


@two_gpus
def test_two_gpus_use_nccl_and_tensors_arrive_on_the_device(cast):
    sender, receiver = sent(cast, FIRST, SECOND)
    check(sender, receiver, "nccl")
    assert receiver["devices"] == [SECOND]


def test_two_processes_on_one_gpu_use_gloo(cast):
    sender, receiver = sent(cast, FIRST, FIRST)
    check(sender, receiver, "gloo")
    assert receiver["devices"] == ["cpu"]


@pytest.mark.parametrize("sides", [(FIRST, "cpu"), ("cpu", FIRST)])
def test_a_process_without_a_gpu_uses_gloo(cast, sides):
    check(*sent(cast, *sides), "gloo")


@two_gpus
def test_the_trainer_survives_a_receiver_killed_during_a_broadcast(cast):
    receiver = cast("receive", cast.job, SECOND, 1, 3)
    sender = cast("send", cast.job, FIRST, 1, 15)
    assert receiver.wait(LONG) == -signal.SIGKILL
    found = result(sender)
    assert found["ends"] == [False]
    assert found["works"]


def state():
    made = torch.Generator().manual_seed(1)
    return [(f"w{n}", torch.randn(size, generator=made)) for n, size in enumerate((300_000, 7, 500_001))]


def test_a_group_of_one_broadcasts_and_is_aborted(tmp_path):
    """As far as NCCL goes with one GPU: constructor, communicator, broadcasts, abort, and the GPU works on."""
    deadline, device = Deadline(SystemClock(), 120.0), torch.device(FIRST)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    group = process_group.make_group(
        store,
        backend=NCCL,
        device=device,
        rank=0,
        world_size=1,
        address="127.0.0.1",
        deadline=deadline,
    )
    walk = ExportWalk(state(), 0, 1, None)
    walk.plan()
    plan = plan_buckets([spec[:3] for spec in walk.specs], 1 << 20)
    found, wanted = packing.WordChecksum(device), packing.WordChecksum(CPU)
    with group_calls.aborted_at(group, deadline):
        for bucket in Packer(check_finite=True).buckets(plan, ExportWalk(state(), 0, 1, None), device):
            work = process_group.start_broadcast(group, bucket, deadline)
            found.add(bucket)
            group_calls.finish_broadcast(work, deadline, "not sent")
    for bucket in Packer(check_finite=True).buckets(plan, ExportWalk(state(), 0, 1, None), CPU):
        wanted.add(bucket)
    assert found.text() == wanted.text()
    ending = group_calls.abort([group])
    ending.join(LONG)
    assert not ending.is_alive()
    assert float(torch.ones(1000, device=device).sum()) == 1000.0


@pytest.mark.parametrize("dtype", sorted(torch_tensors._EXPONENT, key=str), ids=str)
@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf"), -float("inf")])
def test_a_gpu_finds_the_same_non_finite_values_as_main_memory(dtype, value):
    content = torch.tensor([1.0, value]).to(dtype).view(torch.uint8)
    assert bool(torch_tensors.is_finite(content.cuda(), dtype)) is bool(
        torch_tensors.is_finite(content, dtype)
    )


def test_a_gpu_is_reported_by_its_uuid():
    gpu = process_group.gpu_of(torch.device(FIRST))
    assert gpu is not None
    assert gpu.uuid == str(torch.cuda.get_device_properties(0).uuid)
