"""Weights between a GPU and files: how long a save blocks the trainer, and how long a load takes.

    python benchmarks/gpu_copies.py [--gib 4] [--rounds 5] [--json out/gpu_copies.json] [--dir DIR]

All contestants have the same tensors, in turn in one process; each round begins with another one, and one round
before them does not count. Files are read from the page cache. No copy of a GPU's memory can be faster than one of
all bytes at once into pinned memory, and back: `pinned copy`. Absolute times belong to this machine.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import report
import safetensors.torch
import torch
from save import weights_of
from torch.distributed.checkpoint.state_dict_saver import async_save

from syncd.protocol.layout import Job
from syncd.protocol.manifest import read_manifest
from syncd.protocol.version import Version
from syncd.transports.base import WeightDirectory
from syncd.transports.files.fill_tensors import check_fit, load
from syncd.transports.files.step_saver import StepSaver
from syncd.transports.torch_tensors import target_tensors

Weights = Mapping[str, torch.Tensor]
Contestant = Callable[[], float | None]
"""Does it once; returns the seconds that count, if that is not all of it."""

GPU = torch.device("cuda")
BOUND = "pinned copy"


def main() -> None:
    """Run all contestants and print what they take."""
    warnings.filterwarnings("ignore")
    options = _options()
    with report.scratch_directory("syncd-gpu-", options.dir) as scratch:
        figures = _measure(scratch, options)
    for kind in ("save", "load"):
        _print_table(kind, figures)
    print(figures["machine"])
    report.keep(options.json, figures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.0, help="size of the weights")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not")
    parser.add_argument("--json", default="out/gpu_copies.json", help="where to write the figures")
    parser.add_argument("--dir", default=None, help="where to work; its file system is what is measured")
    return parser.parse_args()


def _measure(scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    weights = {name: tensor.to(GPU) for name, tensor in weights_of(options.gib).items()}
    with ExitStack() as opened:
        save = _race(_saves(scratch, weights, opened), options.rounds)
    load = _race(_loads(scratch, weights), options.rounds)
    machine = report.machine(scratch, torch=torch.__version__, gpu=torch.cuda.get_device_name())
    size = sum(tensor.nbytes for tensor in weights.values())
    return {"machine": machine, "bytes": size, "tensors": len(weights), "save": save, "load": load}


def _race(contestants: Mapping[str, Contestant], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contestant, by round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            own = contestants[name]()
            torch.cuda.synchronize()
            if number:
                seconds[name].append(time.perf_counter() - begin if own is None else own)
    return seconds


def _saves(scratch: Path, weights: Weights, opened: ExitStack) -> dict[str, Contestant]:
    """Return what blocks a trainer that saves."""
    size = sum(tensor.nbytes for tensor in weights.values())
    source = torch.empty(size, dtype=torch.uint8, device=GPU)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    modes = ("background", "stream")
    savers = {mode: opened.enter_context(closing(_Saver(scratch / mode, mode, weights))) for mode in modes}
    return {
        BOUND: lambda: _done(pinned.copy_(source, non_blocking=True)),
        **savers,
        "tensor.cpu()": lambda: _done([tensor.cpu() for tensor in weights.values()]),
        "DCP async_save": lambda: _dcp_async(scratch, weights),
    }


class _Saver:
    """The saver of one mode, kept over the rounds as a trainer keeps it."""

    def __init__(self, job: Path, mode: Any, weights: Weights) -> None:
        job.mkdir()
        self._job, self._weights, self._step = Job.at(job), weights, 0
        self._saver = StepSaver(self._job, 0, 1, mode=mode)

    def __call__(self) -> float:
        self._step += 1
        begin = time.perf_counter()
        self._saver.save(self._step, f"bench-{self._step}", self._weights.items())
        blocked = time.perf_counter() - begin
        self._saver.wait()
        assert read_manifest(self._job.disk, self._job.step(self._step)).shards
        shutil.rmtree(self._job.step(self._step))
        return blocked

    def close(self) -> None:
        self._saver.close()


def _dcp_async(scratch: Path, weights: Weights) -> float:
    directory = tempfile.mkdtemp(dir=scratch)
    begin = time.perf_counter()
    future = async_save(dict(weights), checkpoint_id=directory, no_dist=True)
    blocked = time.perf_counter() - begin
    future.result()  # type: ignore[union-attr]
    shutil.rmtree(directory)
    return blocked


def _loads(scratch: Path, weights: Weights) -> dict[str, Contestant]:
    """Return what fills a model on the GPU."""
    job = Job.at(scratch / "loaded")
    os.mkdir(job.root)
    saver = StepSaver(job, 0, 1, dtype=None)
    saver.save(1, "bench-1", weights.items())
    saver.close()
    directory = f"{job.step(1)}/actor"
    model = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    size = sum(tensor.nbytes for tensor in weights.values())
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=GPU)
    return {
        BOUND: lambda: _done(target.copy_(pinned, non_blocking=True)),
        "ours, hashed": lambda: _load(job, directory, model, is_verified=False),
        "ours, verified before": lambda: _load(job, directory, model, is_verified=True),
        "load_file + copy_": lambda: _load_file(directory, model),
    }


def _load(job: Job, directory: str, model: Weights, *, is_verified: bool) -> None:
    shards = tuple(
        record._replace(name=os.path.basename(record.name))
        for record in read_manifest(job.disk, job.step(1)).shards
    )
    version = WeightDirectory(
        Version(1, 1, "weights", "step", "xxh3_128:0"), directory, shards, verified=is_verified
    )
    targets = target_tensors(model)
    load(version, targets, check_fit(version, targets))


def _load_file(directory: str, model: Weights) -> None:
    for path in Path(directory).glob("*.safetensors"):
        for name, tensor in safetensors.torch.load_file(path, device=str(GPU)).items():
            model[name].copy_(tensor)


def _done(_: object) -> None:
    torch.cuda.synchronize()


def _print_table(kind: str, figures: dict[str, Any]) -> None:
    bound = figures[kind][BOUND]
    print(
        f"{kind}: {figures['bytes'] >> 20} MiB in {figures['tensors']} tensors, seconds, median (least-most)"
    )
    for name, seconds in figures[kind].items():
        ratio = statistics.median(own / least for own, least in zip(seconds, bound, strict=True))
        speed = figures["bytes"] / statistics.median(seconds) / 1e9
        print(f"{name:<22} {report.spread(seconds, 3):<24} {speed:6.1f} GB/s  {ratio:.2f} x of {BOUND}")


if __name__ == "__main__":
    main()
