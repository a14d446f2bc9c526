"""A trainer of one rank that broadcasts, by the real loop and the tiny engine.

send.py JOB STYLE STEPS MEMBERS [FAULT]         begins once so many explorers are there

It writes, into JOB.trainer.json, how each broadcast ended and the digest of its weights. Faults are as there.
"""

import gc
import json
import sys

import torch
from receive import BUCKETS, Fault, digest, sockets
from support.trainers import make_trainer, small_config, write_experiences

from syncd.client.broadcast_control import BroadcastControl
from syncd.parts.broadcast.process_group import ProcessGroup
from syncd.parts.broadcast.send import BroadcastSender
from syncd.synchronizer import RunningStatus, Synchronizer

LONG = 120.0


def arm(text):
    """Have a fault strike."""
    fault = Fault(text)
    if fault.phase == "asked":
        fault.before(BroadcastSender, "_offer_group")
    elif fault.phase == "joined":
        fault.before(ProcessGroup, "connect")
    elif fault.phase == "bucket":
        fault.midst(ProcessGroup, "broadcast", BUCKETS)
    elif fault.phase == "confirming":
        fault.before(BroadcastControl, "end_round")
    else:
        raise SystemExit(f"no phase is called {fault.phase!r}")


def main(job, style, steps, members, fault="", timeout="20", address=""):
    torch.set_num_threads(1)
    gc.disable()  # a circle would keep a group's sockets open until it is found
    with open(f"{job}/sizes.json", encoding="ascii") as file:
        sizes = json.load(file)
    write_experiences(job, int(steps) + 4)
    # Where explorers drive, a trainer that is done in an instant has not been asked for anything yet.
    pause = 0.5 if style == "explorer_driven" else 0.0
    config = small_config(
        job,
        engine={"options": {**sizes, "pause": pause}},
        sync={
            "method": "nccl",
            "style": style,
            "dtype": "keep",
            "address": address,
            "ready_timeout": float(timeout),
            "broadcast_timeout": float(timeout),
        },
        trainer={"total_steps": int(steps)},
        data={"end_when_left": False},
    )
    if fault:
        arm(fault)
    ends = []
    send = BroadcastSender.broadcast
    BroadcastSender.broadcast = lambda self, step, *rest: ends.append([step, send(self, step, *rest)])
    with Synchronizer.open(job, "trainer", timeout=LONG) as sync:
        ready = sync.get_explorer_status_counts
        sync.wait_for(
            lambda: sum(n for s, n in ready().items() if s is not RunningStatus.STOPPED) >= int(members)
        )
        made, _ = make_trainer(config, sync)
        made.prepare()
        made.engine.senders["nccl"]._bucket = 128 << 10
        code = made.train()
        made.shutdown()
        weights = digest(made.engine.model)
    with open(f"{job}.trainer.json", "w", encoding="ascii") as file:
        json.dump({"ends": ends, "digest": weights, "code": code, "sockets": sockets()}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
