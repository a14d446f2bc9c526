"""Weights of a GPU into another process on the same GPU: by CUDA's handles, and through shared memory of the host.

    python benchmarks/push_gpu.py [--gib 4] [--rounds 5] [--json out/push_gpu.json]

The other process opens each bucket as a worker of an engine does and copies it into tensors of its own. Contestants
take turns; each round begins with another one, and one round before them does not count.

    copy        one process copies the tensors on its GPU: no push is faster
    handles     CUDA's handles of the tensors themselves
    segments    the tensors are copied to shared memory of the host, and from there to the GPU
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import report
import torch
from save import weights_of

from explorer_hooks.parts.broadcast.delivery import BUCKET, cut
from explorer_hooks.parts.broadcast.shared import CopiedBucket, GpuBucket
from explorer_hooks.parts.broadcast.worker import Bucket, SharedMemory

GPU = torch.device("cuda")
Weights = Mapping[str, torch.Tensor]


def main() -> None:
    """Run all contestants and print what they take."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.0, help="size of the weights")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not")
    parser.add_argument("--json", default="out/push_gpu.json", help="where to write the figures")
    options = parser.parse_args()
    figures = _measure(options.gib, options.rounds)
    _print_table(figures)
    report.keep(options.json, figures)


def _measure(gib: float, rounds: int) -> dict[str, Any]:
    weights = {name: tensor.to(GPU) for name, tensor in weights_of(gib).items()}
    copies = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    worker = context.Process(target=_receive, args=(there,), daemon=True)
    worker.start()
    contestants: dict[str, Callable[[], None]] = {
        "copy": lambda: _copy(copies, weights),
        "handles": lambda: _push(here, weights, GpuBucket),
        "segments": lambda: _push(here, weights, CopiedBucket),
    }
    seconds = _race(contestants, rounds)
    here.send(None)
    worker.join()
    machine = report.machine(Path("/dev/shm"), torch=torch.__version__, gpu=torch.cuda.get_device_name())
    size = sum(tensor.nbytes for tensor in weights.values())
    return {"machine": machine, "bytes": size, "tensors": len(weights), "seconds": seconds}


def _race(contestants: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contestant, by round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            begin = time.perf_counter()
            contestants[name]()
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def _copy(copies: Weights, weights: Weights) -> None:
    for name, tensor in weights.items():
        copies[name].copy_(tensor)
    torch.cuda.synchronize()


def _push(worker: Connection, weights: Weights, kind: type[GpuBucket | CopiedBucket]) -> None:
    """Have the other process load all weights, bucket by bucket."""
    for names in cut({name: tensor.nbytes for name, tensor in weights.items()}, BUCKET):
        bucket = kind({name: weights[name] for name in names}, 1)
        try:
            bucket.fill()
            worker.send(bucket.as_json())
            assert worker.recv() == "loaded"
        finally:
            bucket.release()


def _receive(sender: Connection) -> None:
    """Load buckets into tensors of this process until there are no more."""
    model: dict[str, torch.Tensor] = {}
    while (told := sender.recv()) is not None:
        source, bucket = SharedMemory(), Bucket(**told)
        for name, tensor in zip(bucket.names, source.tensors(bucket, 0), strict=True):
            if name not in model:
                model[name] = torch.empty_like(tensor, device=GPU)
            model[name].copy_(tensor)
        torch.cuda.synchronize()
        del tensor
        source.close()
        sender.send("loaded")


def _print_table(figures: dict[str, Any]) -> None:
    bound = figures["seconds"]["copy"]
    print(f"{figures['bytes'] >> 20} MiB in {figures['tensors']} tensors, seconds, median (least-most)")
    for name, seconds in figures["seconds"].items():
        ratio = statistics.median(own / least for own, least in zip(seconds, bound, strict=True))
        speed = figures["bytes"] / statistics.median(seconds) / 1e9
        print(f"{name:<10} {report.spread(seconds, 3):<24} {speed:7.1f} GB/s  {ratio:.1f} x of a copy")
    print(figures["machine"])


if __name__ == "__main__":
    main()
