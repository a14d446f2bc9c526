"""Handles of tensors on a GPU, opened by another process as vLLM's and SGLang's workers do. `make test-gpu`."""

import base64
import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="handles are of tensors")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

from explorer_hooks.engine_push.shared import GpuBucket, SegmentBucket, share  # noqa: E402

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAMS = f"{TESTS}/explorer/broadcast/programs"
LONG = 300.0


def opened(bucket, pickles):
    """Return what another process finds in a bucket, and in pickles of one."""
    path = os.pathsep.join([os.path.dirname(TESTS), TESTS])
    ended = subprocess.run(
        [sys.executable, f"{PROGRAMS}/open_shared.py"],
        input=json.dumps({"bucket": bucket.as_json(), "pickles": pickles}),
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        timeout=LONG,
        check=True,
    )
    return json.loads(ended.stdout.splitlines()[-1])


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
        found = opened(bucket, pickles)
    finally:
        bucket.release()
        others.release()
    sys.path.insert(0, PROGRAMS)
    try:
        from open_shared import digest
    finally:
        sys.path.pop(0)
    wanted = digest(tensors(device).items())
    assert found == {"json": wanted, "pickles": [wanted]}


def test_tensors_of_a_gpu_and_of_main_memory_together_go_through_main_memory():
    mixed = tensors("cuda:0") | {"other": torch.ones(3)}
    bucket = share(mixed, 1, in_place=True)
    try:
        assert isinstance(bucket, SegmentBucket)
    finally:
        bucket.release()
