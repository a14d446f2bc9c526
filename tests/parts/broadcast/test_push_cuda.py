"""Weights on a GPU into workers of an engine: by handles that another process opens, by NCCL. `make test-gpu`."""

import base64
import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="handles are of tensors")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

from explorer_hooks.parts.broadcast.delivery import described  # noqa: E402
from explorer_hooks.parts.broadcast.shared import GpuBucket, SegmentBucket, share  # noqa: E402
from syncd.client.wait import Deadline  # noqa: E402
from syncd.parts.broadcast.process_group import ProcessGroup  # noqa: E402
from syncd.protocol.backend import NCCL  # noqa: E402
from syncd.protocol.local_disk import SystemClock  # noqa: E402

TESTS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAMS = f"{TESTS}/parts/broadcast/programs"
LONG = 300.0


def begin(program, *argv):
    path = os.pathsep.join([os.path.dirname(TESTS), TESTS])
    return subprocess.Popen(
        [sys.executable, f"{PROGRAMS}/{program}", *argv],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process, given=None):
    """Return the last line that a program writes."""
    output = process.communicate(given, timeout=LONG)[0]
    assert process.returncode == 0, output
    return output.splitlines()[-1]


def digest_of(pairs):
    """Return what the programs say of such tensors."""
    sys.path.insert(0, PROGRAMS)
    try:
        from open_shared import digest
    finally:
        sys.path.pop(0)
    return digest(pairs)


def tensors(device):
    made = torch.Generator().manual_seed(1)
    shapes = {"large": (700, 1000), "small": (7,), "number": ()}
    found = {name: torch.randn(shape, generator=made).to(device) for name, shape in shapes.items()}
    return found | {
        "half": found["large"][:3].to(torch.bfloat16),
        "transposed": found["large"].t(),
        "part": found["large"][100:200],
    }


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_another_process_reads_the_tensors_of_a_gpu_and_of_main_memory(device):
    # A worker opens handles once: what the pickles have is exported for a worker of their own.
    bucket, others = share(tensors(device), 1, in_place=True), share(tensors(device), 1, in_place=True)
    assert isinstance(bucket, GpuBucket if device != "cpu" else SegmentBucket)
    for one in (bucket, others):
        one.fill()
    try:
        pickles = [base64.b64encode(one).decode() for one in others.as_pickles()]
        given = json.dumps({"bucket": bucket.as_json(), "pickles": pickles})
        found = json.loads(said(begin("open_shared.py"), given))
    finally:
        bucket.release()
        others.release()
    wanted = digest_of(tensors(device).items())
    assert found == {"json": wanted, "pickles": [wanted]}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL refuses two members on one")
def test_a_worker_receives_over_nccl():
    deadline, sent = Deadline(SystemClock(), LONG), tensors("cuda:0")
    group = ProcessGroup.listen("127.0.0.1", LONG, torch.device("cuda:0"))
    meeting = {"address": group.address, "port": group.port, "secret": "secret", "world_size": 2}
    meeting |= {"timeout": LONG, "backend": NCCL}
    worker = begin("join_group.py", "cuda:1", json.dumps(meeting), json.dumps(described(sent)))
    try:
        group.connect(["secret"], 2, deadline, NCCL)
        with group.aborted_at(deadline):
            for tensor in sent.values():
                group.finish(group.broadcast(tensor.contiguous(), deadline), deadline)
        assert said(worker) == digest_of(sent.items())
    finally:
        worker.kill()
        group.abort()


def test_tensors_of_a_gpu_and_of_main_memory_together_go_through_main_memory():
    mixed = tensors("cuda:0") | {"other": torch.ones(3)}
    bucket = share(mixed, 1, in_place=True)
    try:
        assert isinstance(bucket, SegmentBucket)
    finally:
        bucket.release()
