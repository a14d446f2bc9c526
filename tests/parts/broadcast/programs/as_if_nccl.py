"""A trainer or an explorer that takes a process group over gloo for one over NCCL, and main memory for a GPU.

as_if_nccl.py send|receive FAILING ...        the rest is what send.py and receive.py take

Everything but NCCL itself is as where there are GPUs: what presences say, the agreement, the offer, how the group
is made and connected, the checksum of devices. A FAILING of 1 has no group over NCCL formed here. Each group that is
made is told in a line.
"""

import json
import os
import sys

import torch.distributed as dist

from syncd.parts.broadcast import packing, process_group
from syncd.protocol.backend import Gpu

LOOPBACK = "127.0.0.1"


class OverGloo:
    """What `torch.distributed.ProcessGroupNCCL` is where there is NCCL: the same constructor and options."""

    failing = False

    class Options:
        _timeout = None

    def __new__(cls, store, rank, size, options):
        told = {"rank": rank, "size": size, "timeout": options._timeout.total_seconds()}
        told["watched"] = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1"
        print("nccl " + json.dumps(told), flush=True)
        if cls.failing:
            raise RuntimeError("NCCL error: no way to the others")
        inner = dist.ProcessGroupGloo._Options()
        inner._timeout = options._timeout
        inner._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        return dist.ProcessGroupGloo(store, rank, size, inner)


def install(failing):
    OverGloo.failing = failing
    dist.ProcessGroupNCCL = OverGloo
    process_group.gpu_of = lambda device: Gpu(f"gpu-{os.getpid()}", "2.27")
    packing.make_checksum = packing.WordChecksum


def main(side, failing, *rest):
    install(failing == "1")
    module = __import__(side)
    (module.main if side == "send" else module.explore)(*rest)
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


if __name__ == "__main__":
    main(*sys.argv[1:])
