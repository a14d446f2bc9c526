"""An explorer of its own process that takes part in broadcasts.

receive.py JOB IDENTITY STYLE LAST [FAULT [UNTIL]]      runs until it has step LAST, confirmed

or, with UNTIL gone, until the trainer is gone.

It writes, into JOB.IDENTITY.json, the way each step came and the digest of its parameters at the end. A fault is
PHASE:SIGNAL:NUMBER: at that phase of its broadcast of that number it sends itself the signal.
"""

import gc
import json
import os
import signal
import sys
import time

import torch
import xxhash
from safetensors.torch import load_file
from support.tiny import Bigram

from syncd.client.broadcast_membership import BroadcastMembership
from syncd.errors import TryAgainError
from syncd.parts.broadcast.process_group import ProcessGroup
from syncd.parts.broadcast.receive import BroadcastReceiver
from syncd.synchronizer import Synchronizer
from syncd.transports.base import WeightTensors

LONG = 120.0
BUCKETS = 5
MET = "the fault strikes"
"""Said by a process whose fault is met, right before it strikes."""


def digest(model):
    state = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        state.update(name.encode())
        state.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


class Fault:
    """Has one phase of a broadcast end this process, or stop it.

    Args:
        text: PHASE:SIGNAL:NUMBER; which broadcast it is, from 1.
    """

    def __init__(self, text):
        self.phase, name, number = text.split(":")
        self._signal, self._left = getattr(signal, name), int(number)

    def hit(self):
        self._left -= 1
        if self._left == 0:
            print(MET, flush=True)
            os.kill(os.getpid(), self._signal)

    def before(self, owner, attribute):
        """Let it strike before a method is called."""
        original = getattr(owner, attribute)
        setattr(owner, attribute, lambda *args, **named: (self.hit(), original(*args, **named))[1])

    def midst(self, owner, attribute, buckets):
        """Let it strike before the second bucket of each broadcast."""
        original, calls = getattr(owner, attribute), []

        def counted(*args, **named):
            calls.append(1)
            if len(calls) % buckets == 2:
                self.hit()
            return original(*args, **named)

        setattr(owner, attribute, counted)


def arm(text):
    """Have a fault strike."""
    fault = Fault(text)
    if fault.phase == "asked":
        fault.before(BroadcastReceiver, "_receive")
    elif fault.phase == "joined":
        fault.before(ProcessGroup, "join")
    elif fault.phase == "bucket":
        fault.midst(ProcessGroup, "broadcast", BUCKETS)
    elif fault.phase == "confirming":
        fault.before(BroadcastMembership, "acknowledge")
    elif fault.phase == "shape":
        BroadcastReceiver._parameters = property(lambda self: {}, lambda self, value: None)
    else:
        raise SystemExit(f"no phase is called {fault.phase!r}")


def sockets():
    """Return the sockets that this process holds, once what was aborted has had its time."""
    deadline = time.monotonic() + LONG
    while found := [name for name in map(_link, os.listdir("/proc/self/fd")) if name.startswith("socket:")]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return found


def _link(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""


def load_files(sync, model, version):
    if version.kind == "remote":
        sync.confirm(version)  # the model that everybody started with: nothing of it is checked here
        return
    with sync.lease(version) as leased:
        tensors = {}
        for name in sorted(os.listdir(leased.path)):
            if name.endswith(".safetensors"):
                tensors |= load_file(f"{leased.path}/{name}")
        with torch.no_grad():
            state = model.state_dict(prefix="model.")
            for name, tensor in tensors.items():
                state[name].copy_(tensor)
    sync.confirm(version)


def explore(job, identity, style, last, fault="", until="gone"):
    torch.set_num_threads(1)
    gc.disable()  # a circle would keep a group's sockets open until it is found
    with open(f"{job}/sizes.json", encoding="ascii") as file:
        sizes = json.load(file)
    model = Bigram(sizes["vocab"], sizes["width"])
    ways, step = [], -1
    with Synchronizer.open(job, "explorer", identity, timeout=LONG) as sync:
        moves = identity.endswith(
            ("0", "2")
        )  # parameters take over what is received; else it is copied into them
        receiver = BroadcastReceiver(sync, model.state_dict(prefix="model.", keep_vars=moves))
        if fault:
            arm(fault)
        print("ready", flush=True)
        while step < int(last):
            if until == "gone" and sync.trainer_requires_weight_sync() is None:
                break
            if style == "fully_async" and not receiver.is_wanted():
                came = sync.latest_version()
                came = came if came and came.step > step else None
                time.sleep(0.01)
            else:
                came = receiver.wait(step, timeout=10.0)
            if isinstance(came, WeightTensors):
                receiver.load(came)
                step = came.step
                ways.append([step, "broadcast"])
            elif came is not None:
                try:
                    load_files(sync, model, came)
                except TryAgainError:
                    continue
                step = came.step
                ways.append([step, "files"])
        sync.wait_for(receiver.confirm_published, LONG)
        applied = sync.confirmed
        receiver.close()
    with open(f"{job}.{identity}.json", "w", encoding="ascii") as file:
        json.dump({"ways": ways, "applied": applied, "digest": digest(model), "sockets": sockets()}, file)


if __name__ == "__main__":
    explore(*sys.argv[1:])
