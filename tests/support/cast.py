"""One side of a broadcast of tensors on a device, as a process of its own.

cast.py send JOB DEVICE STEPS TIMEOUT          sends so many steps, each of them of weights of its own
cast.py receive JOB DEVICE STEPS [DIES]        takes them; DIES is the bucket before which it kills itself

Each prints, as its last line of JSON, what it has come to.
"""

import json
import os
import signal
import sys
from contextlib import ExitStack, closing

import torch
import xxhash

from syncd.client.broadcast_control import BroadcastControl
from syncd.jobfile.sections import SyncSection
from syncd.parts.broadcast.process_group import ProcessGroup
from syncd.parts.broadcast.receive import BroadcastReceiver
from syncd.parts.broadcast.send import BroadcastSender
from syncd.synchronizer import Synchronizer
from syncd.transports.base import SendContext, WeightTensors
from syncd.transports.ranks import Ranks

LONG = 120.0
BUCKET = 1 << 20
SHAPES = {"a": (1500, 1000), "b": (333,), "c": (1000, 1501), "d": (7, 3)}


def weights(step, device):
    made = torch.Generator().manual_seed(step)
    state = {name: torch.randn(shape, generator=made).to(torch.bfloat16) for name, shape in SHAPES.items()}
    state["d"] = torch.arange(21, dtype=torch.int64).reshape(7, 3) + step
    return {name: tensor.to(device) for name, tensor in state.items()}


def digest(state):
    found = xxhash.xxh3_128()
    for name, tensor in sorted(state.items()):
        found.update(name.encode())
        found.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def works(device):
    """Say whether the device still does as it is told."""
    ones = torch.ones(512, 512, device=device)
    return float((ones @ ones).sum()) == 512.0**3


def send(job, device, steps, timeout):
    ends, backends = [], []
    settings = SyncSection(
        dtype="keep", bucket_mib=BUCKET >> 20, ready_timeout=LONG, broadcast_timeout=float(timeout)
    )
    with (
        Synchronizer.open(job, "trainer", timeout=LONG) as sync,
        closing(BroadcastSender(SendContext(sync.job, Ranks(), settings, sync), ExitStack())) as sender,
    ):
        sync.wait_for(lambda: BroadcastControl(sync).members("gloo"))
        for step in range(1, int(steps) + 1):
            state = weights(step, device)
            ends.append(sender.broadcast(step, f"attempt-{step}", state.items))
            backends.append(sender._group.offer.backend if sender._group else "")
        found = {"ends": ends, "backends": backends, "digest": digest(state), "works": works(device)}
    print(json.dumps(found), flush=True)


def receive(job, device, steps, dies=""):
    if dies:
        die_before(int(dies))
    state, step, devices = weights(0, device), 0, set()
    with (
        Synchronizer.open(job, "explorer", "e0", timeout=LONG) as sync,
        closing(BroadcastReceiver(sync, state)) as receiver,
    ):
        while step < int(steps):
            came = receiver.wait(step, LONG)
            assert isinstance(came, WeightTensors), came
            devices |= {str(tensor.device) for tensor in came.tensors.values()}
            receiver.load(came)
            step = came.step
    print(json.dumps({"digest": digest(state), "devices": sorted(devices)}), flush=True)


def die_before(bucket):
    """Have SIGKILL strike before a bucket is received."""
    receive, calls = ProcessGroup.broadcast, []

    def counted(*args):
        calls.append(1)
        if len(calls) == bucket:
            os.kill(os.getpid(), signal.SIGKILL)
        return receive(*args)

    ProcessGroup.broadcast = counted


if __name__ == "__main__":
    {"send": send, "receive": receive}[sys.argv[1]](*sys.argv[2:])
