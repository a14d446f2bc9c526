"""prime-rl's own file transport for benchmarks/readers.py: the unmodified class of its workers, with vLLM's reader.

    PYTHONPATH=PRIME/src python readers_prime.py    # in an environment with vLLM; says ready, then takes work

A line of JSON is work, for all readers at once; they begin at the next line. vLLM is imported once: a reader is a
fork in the namespaces of the process that it stands for. Its model is a module with the step's tensors.
"""

import ctypes
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from prime_rl.inference.vllm.worker.filesystem import FileSystemWeightUpdateWorker
from vllm.config import LoadConfig, VllmConfig
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

_LIBC = ctypes.CDLL(None, use_errno=True)


class Model(torch.nn.Module):
    """Takes tensors of the names and lengths that it is made with."""

    def __init__(self, tensors: dict[str, int]) -> None:
        super().__init__()
        for name, length in tensors.items():
            parameter = torch.nn.Parameter(torch.zeros(length, dtype=torch.float16), requires_grad=False)
            parameter.weight_loader = _copy  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    def load_weights(self, weights: Any) -> None:
        """Load each tensor as vLLM's models do."""
        for name, tensor in weights:
            parameter = getattr(self, name)
            parameter.weight_loader(parameter, tensor)


def _copy(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copy a tensor: vLLM calls it again with another `param`, by this name."""
    param.data.copy_(loaded_weight)


def _worker(tensors: dict[str, int]) -> Any:
    worker, model = FileSystemWeightUpdateWorker(), Model(tensors)
    record_metadata_for_reloading(model)
    config = SimpleNamespace(dtype=torch.float16, quantization=None)
    worker.model_runner = SimpleNamespace(model=model, model_config=config)
    worker.load_config, worker.vllm_config = LoadConfig(use_tqdm_on_load=False), VllmConfig()
    return worker


def _enter(pid: int) -> None:
    for kind in ("net", "mnt"):
        with Path(f"/proc/{pid}/ns/{kind}").open() as file:
            if _LIBC.setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), "no namespace", kind)


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # at once: the readers share the pipe


def _read(work: dict[str, Any], reader: dict[str, Any], go: int) -> None:
    _enter(reader["pid"])
    worker = _worker(work["tensors"])
    _say("ready")
    os.read(go, 1)
    Path("/proc/self/clear_refs").write_text("5")
    before, processor = _memory("VmRSS"), time.process_time()
    worker.update_weights_from_path(reader["path"])
    found = {"ended": time.monotonic(), "cpu": time.process_time() - processor}
    found["memory"] = _memory("VmHWM") - before
    arrays = {name: one.numpy().tobytes() for name, one in worker.model_runner.model.named_parameters()}
    digests = {name: hashlib.sha256(array).hexdigest() for name, array in arrays.items()}
    _say(json.dumps({**found, "files": digests}))


def main() -> None:
    """Do what is asked, line by line."""
    torch.set_num_threads(1)
    _say("ready")
    for line in sys.stdin:
        work = json.loads(line)
        waits, go = os.pipe()
        for reader in work["readers"]:
            if not os.fork():
                os.close(go)
                _read(work, reader, waits)
                os._exit(0)
        os.close(waits)
        sys.stdin.readline()
        os.close(go)
        for _ in work["readers"]:
            os.wait()


if __name__ == "__main__":
    main()
