"""Handles of a GPU's memory on their way into both engines, where there is no GPU: torch's two ends are stand-ins.

It writes {"exported": [...], "vllm": [...], "sglang": [...]}, each as lists of what torch's own function takes.
"""

import json
import pickle
from types import SimpleNamespace

import torch
import vllm_stub
from torch.multiprocessing import reductions

from explorer_hooks.parts.broadcast.shared import GpuBucket

GPUS = ["GPU-of-others", "GPU-of-this"]
SENDERS, HERE = 7, 1


def reduce(tensor):
    """Return what torch's own returns for a tensor on a GPU: what is known of its memory, told by made-up values."""
    exported.append(len(exported))
    number = exported[-1]
    args = (
        torch.Tensor, tensor.size(), tensor.stride(), 3 + number, torch.storage.TypedStorage, tensor.dtype, SENDERS,
        b"memory\0\xff%d" % number, 1000 + number, 64 * number, False, b"counter%d" % number, 5 + number,
        b"event%d" % number, True,
    )  # fmt: skip
    given.append(args)
    return None, args


def rebuild(*args):
    taken.append(args)
    return torch.zeros(())


def plain(args):
    return [one.hex() if isinstance(one, bytes) else str(one) for one in args]


exported, given, taken = [], [], []


def main():
    torch.cuda.device_count = lambda: len(GPUS)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(
        uuid=GPUS[device if isinstance(device, int) else HERE]
    )
    reductions.reduce_tensor, reductions.rebuild_cuda_tensor = reduce, rebuild
    worker = vllm_stub.worker(lambda loaded: None)
    bucket = GpuBucket({"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, workers=2)
    worker.init_transfer_engine(worker.parse_init_info(json.loads(json.dumps(bucket.location))))
    worker.update_weights(json.loads(json.dumps(bucket.as_json())))
    found = {"exported": list(map(plain, given)), "vllm": list(map(plain, taken))}
    taken.clear()
    for one in bucket.as_pickles():
        pickle.loads(one)
    print(json.dumps(found | {"sglang": list(map(plain, taken))}))


if __name__ == "__main__":
    main()
