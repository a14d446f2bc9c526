"""A worker that opens a shared bucket and says what is in it.

open_shared.py < JSON      {"bucket": as vLLM's workers get it, "pickles": as SGLang's get them, in base 64}

It writes {"json": DIGEST, "pickles": [DIGEST, ...]}.
"""

import base64
import json
import pickle
import sys

import torch
import vllm_stub
import xxhash
from torch.multiprocessing import reductions


def digest(pairs):
    state = xxhash.xxh3_128()
    for name, tensor in pairs:
        content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        state.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode() + content)
    return state.hexdigest()


def number_of(gpu):
    """Return a GPU's number by its UUID, which SGLang puts where torch has the number."""
    found = {str(torch.cuda.get_device_properties(one).uuid): one for one in range(torch.cuda.device_count())}
    return found[gpu]


KEPT = "kept_"


class Keeper(torch.nn.Module):
    """A model whose loader keeps the very tensors that it is given."""

    def load_weights(self, loaded):
        for name, tensor in loaded:
            self.register_buffer(f"{KEPT}{name}", tensor)


def main():
    given = json.load(sys.stdin)
    model = Keeper()
    place = {key: given["bucket"][key] for key in ("segment", "gpu") if key in given["bucket"]}
    device = f"cuda:{number_of(place['gpu'])}" if "gpu" in place else "cpu"
    worker = vllm_stub.worker(None, model, device)
    worker.init_transfer_engine(worker.parse_init_info(place))
    worker.start_weight_update()
    worker.update_weights(given["bucket"])
    shared = [tensor.data_ptr() for tensor in model.buffers() if tensor.numel()]
    worker.finish_weight_update()
    assert set(shared).isdisjoint(tensor.data_ptr() for tensor in model.buffers()), (
        "it has the sender's memory"
    )
    kept = [(name.removeprefix(KEPT), tensor) for name, tensor in model.named_buffers()]
    found = {"json": digest(kept), "pickles": []}
    rebuild = reductions.rebuild_cuda_tensor
    reductions.rebuild_cuda_tensor = lambda *args: rebuild(*args[:6], number_of(args[6]), *args[7:])
    for one in given["pickles"]:
        found["pickles"].append(digest(pickle.loads(base64.b64decode(one))))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
