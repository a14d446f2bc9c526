"""An explorer of its own process that takes part in broadcasts.

receive.py JOB IDENTITY STYLE LAST [FAULT]      runs until it has step LAST, confirmed; then says what it has

It writes, into JOB.IDENTITY.json, the way each step came and the digest of its parameters at the end. A fault is
PHASE:SIGNAL: at that phase of the second round that it takes part in, it sends itself the signal.
"""

import json
import os
import signal
import sys
import time

import torch
import xxhash
from safetensors.torch import load_file
from tiny import Bigram

from explorer_hooks.transports import group, nccl
from explorer_hooks.transports.nccl import Received, Receiver
from syncd.errors import TryAgainError
from syncd.synchronizer import Synchronizer

LONG = 120.0


def digest(model):
    state = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        state.update(name.encode())
        state.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def arm(fault):
    """Have a phase of the second round end this process, or stop it for good."""
    phase, _, name = fault.partition(":")
    number, seen = getattr(signal, name), []

    def hit(*_args):
        seen.append(phase)
        if len(seen) == 2:
            os.kill(os.getpid(), number)

    def before(owner, attribute):
        original = getattr(owner, attribute)
        setattr(owner, attribute, lambda *args, **named: (hit(), original(*args, **named))[1])

    if phase == "joining":
        # There is one group as a rule: the first time that it is joined counts.
        seen.append(phase)
        before(nccl.Receiver, "_fitting")
    elif phase == "joined":
        before(nccl.Receiver, "_pour")
    elif phase == "bucket":
        calls, receive = [], group.Member.receive

        def counted(*args, **named):
            calls.append(1)
            if len(calls) % 5 == 3:
                hit()
            return receive(*args, **named)

        group.Member.receive = counted
    elif phase == "confirming":
        before(Synchronizer, "acknowledge_round")
    else:
        raise SystemExit(f"no phase is called {phase!r}")


def load_files(sync, model, version):
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


def explore(job, identity, style, last, fault=""):
    torch.set_num_threads(1)
    with open(f"{job}/sizes.json", encoding="ascii") as file:
        sizes = json.load(file)
    model = Bigram(sizes["vocab"], sizes["width"])
    ways, step = [], -1
    with Synchronizer.open(job, "explorer", identity, timeout=LONG) as sync:
        receiver = Receiver(sync, model.state_dict(prefix="model."))
        if fault:
            arm(fault)
        print("ready", flush=True)
        while step < int(last) and sync.trainer_requires_weight_sync() is not None:
            if style == "fully_async" and not receiver.wanted():
                came = sync.get_latest_version()
                came = came if came and came.step > step else None
                time.sleep(0.01)
            else:
                came = receiver.turn(step, timeout=10.0)
            if isinstance(came, Received):
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
        applied = sync._member.presence.applied
        receiver.close()
    with open(f"{job}.{identity}.json", "w", encoding="ascii") as file:
        json.dump({"ways": ways, "applied": applied, "digest": digest(model)}, file)


if __name__ == "__main__":
    explore(*sys.argv[1:])
