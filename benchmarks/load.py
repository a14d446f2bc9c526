"""What a load into parameters that exist costs: seconds cold and warm, extra memory, and reads of several processes.

    python benchmarks/load.py [--gib 0.5] [--rounds 5] [--readers 8] [--json out/load.json] [--dir DIR]
                              [--without NAME ...]

All contestants fill the same parameters from files with the same tensors, in turn in one process; each round begins
with another one, and one round before them does not count. Before a cold load the files are dropped from the page
cache, and that they are gone is checked. Ratios are taken within a round. Absolute times belong to this machine.
"""

import argparse
import functools
import mmap
import multiprocessing
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import report
import safetensors.torch
import torch
from report import Row
from save import Watch, weights_of
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from syncd.protocol.digest import digest_file
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import Version
from syncd.transports.base import WeightDirectory
from syncd.transports.files.fill_tensors import THREADS, check_fit, load
from syncd.transports.files.read_file import PIECE, cached_share
from syncd.transports.torch_tensors import target_tensors

_OWN = threading.local()

Weights = dict[str, torch.Tensor]
Figures = dict[str, float]

SHARDS = 2
COLD, WARM = "cold", "warm"
HASHED, PLAIN, CACHED = "ours, hashed", "ours, verified before", "ours, page cache only"
LOAD_FILE, TORCH_LOAD, DCP = "load_file + copy_", "torch.load(mmap) + copy_", "DCP load"
RAW = "raw O_DIRECT"
"""Reads the same files past the page cache and fills nothing: no cold load can be faster than the device is."""


def main() -> None:
    """Run all contestants and print what they cost."""
    warnings.filterwarnings("ignore")
    options = _options()
    with report.scratch_directory("syncd-load-", options.dir) as scratch:
        figures = _measure(scratch, options)
    _print_table(figures)
    report.print_targets(_rows(figures), 60, 12)
    report.keep(options.json, figures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=0.5, help="size of the weights")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not")
    parser.add_argument("--readers", type=int, default=8, help="processes that load at once")
    parser.add_argument("--json", default="out/load.json", help="where to write the figures")
    parser.add_argument("--dir", default=None, help="where to work; its file system is what is measured")
    parser.add_argument("--without", action="append", default=[], help="a contestant to leave out")
    return parser.parse_args()


def _measure(scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    weights = weights_of(options.gib)
    size = sum(tensor.nbytes for tensor in weights.values())
    target = _write(scratch, weights)
    parameters = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    readers = _readers(scratch / "step", target, parameters, options.readers)
    contestants = _contestants(scratch, target, parameters)
    rounds, loads = _rounds(contestants, weights, parameters, options)
    machine = report.machine(scratch, torch=torch.__version__, load=report.span(loads))
    found = {"machine": machine, "bytes": size, "tensors": len(weights)}
    return {**found, "rounds": rounds, "readers": {"processes": options.readers, **readers}}


def _write(scratch: Path, weights: Weights) -> WeightDirectory:
    """Write the weights in the form of each contestant; return the version of ours."""
    for name in ("step", "torch", "dcp"):
        (scratch / name).mkdir()
    names, records = list(weights), []
    for number in range(SHARDS):
        name = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        path = scratch / "step" / name
        safetensors.torch.save_file({key: weights[key] for key in names[number::SHARDS]}, path)
        digest, size = digest_file(LocalDisk(), str(path))
        records.append(FileRecord(name, size, digest, len(names[number::SHARDS])))
    torch.save(weights, scratch / "torch" / "model.pt")
    dcp_save(weights, checkpoint_id=str(scratch / "dcp"), no_dist=True)
    os.sync()
    return WeightDirectory(
        Version(1, 1, "weights", "step", "xxh3_128:0"), str(scratch / "step"), tuple(records)
    )


Contestant = tuple[Path, Callable[[], object]]


def _contestants(scratch: Path, target: WeightDirectory, parameters: Weights) -> dict[str, Contestant]:
    """Return each contestant: the directory of its files, and what it does."""
    place = target_tensors(parameters)
    found = check_fit(target, place)
    verified = WeightDirectory(target.version, target.path, target.shards, verified=True)
    return {
        HASHED: (scratch / "step", lambda: load(target, place, found)),
        PLAIN: (scratch / "step", lambda: load(verified, place, found)),
        CACHED: (scratch / "step", lambda: load(target, place, found, direct=False)),
        LOAD_FILE: (scratch / "step", lambda: _load_file(target, parameters)),
        TORCH_LOAD: (scratch / "torch", lambda: _torch_load(scratch / "torch", parameters)),
        DCP: (scratch / "dcp", lambda: _dcp_load(scratch / "dcp", parameters)),
        RAW: (scratch / "step", lambda: _raw_direct(scratch / "step")),
    }


def _load_file(target: WeightDirectory, parameters: Weights) -> None:
    for record in target.shards:
        for name, tensor in safetensors.torch.load_file(f"{target.path}/{record.name}").items():
            parameters[name].copy_(tensor)


def _torch_load(directory: Path, parameters: Weights) -> None:
    for name, tensor in torch.load(directory / "model.pt", mmap=True).items():
        parameters[name].copy_(tensor)


def _dcp_load(directory: Path, parameters: Weights) -> None:
    dcp_load(parameters, checkpoint_id=str(directory), no_dist=True)


def _raw_direct(directory: Path) -> None:
    """Read with as many threads, and in as large pieces, as ours does."""
    with ThreadPoolExecutor(THREADS) as pool:
        for path in _files(directory):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            pieces = range(0, os.fstat(descriptor).st_size, PIECE)
            list(pool.map(functools.partial(_read_piece, descriptor), pieces))
            os.close(descriptor)


def _read_piece(descriptor: int, offset: int) -> None:
    if not hasattr(_OWN, "memory"):
        _OWN.memory = mmap.mmap(-1, PIECE)
    os.preadv(descriptor, [_OWN.memory], offset)


def _rounds(
    contestants: dict[str, Contestant], weights: Weights, parameters: Weights, options: argparse.Namespace
) -> tuple[dict[str, dict[str, list[Figures]]], list[float]]:
    names = [name for name in contestants if name not in options.without]
    found: dict[str, dict[str, list[Figures]]] = {name: {COLD: [], WARM: []} for name in names}
    loads = []
    for number in range(options.rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            for how in (COLD, WARM):
                figures = _one(*contestants[name], cold=how == COLD, parameters=parameters)
                if name != RAW:
                    _check(name, weights, parameters)
                if number:
                    found[name][how].append(figures)
        loads.append(round(os.getloadavg()[0], 1))
    return found, loads


def _one(directory: Path, contestant: Callable[[], object], *, cold: bool, parameters: Weights) -> Figures:
    for tensor in parameters.values():
        tensor.zero_()
    for path in _files(directory):
        drop(path) if cold else path.read_bytes()
    with Watch() as watch:
        started = time.perf_counter()
        contestant()
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "memory": watch.memory}


def _check(name: str, weights: Weights, parameters: Weights) -> None:
    wrong = [key for key, tensor in weights.items() if not torch.equal(tensor, parameters[key])]
    if wrong:
        raise SystemExit(f"{name} left {wrong[0]} wrong")


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_file())


def drop(path: Path) -> None:
    """Take a file out of the page cache, and see to it that it is out."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        left = cached_share(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
    if left > 0.01:  # a page or two of a small file that the kernel was not done with
        raise SystemExit(
            f"{left:.0%} of {path.name} stays in the page cache: a cold load cannot be measured here"
        )


def _readers(
    directory: Path, target: WeightDirectory, parameters: Weights, count: int
) -> dict[str, list[float]]:
    """Return bytes read from storage by one reader and by several, through the page cache and past it."""
    found = {}
    for name, direct in (("page cache", False), ("direct", True)):
        for readers in (1, count):
            for path in _files(directory):
                drop(path)
            found[f"{name}, {readers}"] = _read_at_once(target, parameters, readers, direct=direct)
    return found


def _read_at_once(target: WeightDirectory, parameters: Weights, count: int, *, direct: bool) -> list[float]:
    """Return the bytes that all readers together have read from storage, and the seconds of the slowest."""
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(count), context.SimpleQueue()

    def read() -> None:
        before = _bytes_read()
        place = target_tensors(parameters)
        fits = check_fit(target, place)
        start.wait(60)
        started = time.perf_counter()
        load(target, place, fits, direct=direct)
        results.put((_bytes_read() - before, time.perf_counter() - started))

    processes = [context.Process(target=read) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
        if process.exitcode != 0:
            raise SystemExit(f"a reader ended with {process.exitcode}")
    read_bytes, seconds = zip(*(results.get() for _ in range(count)), strict=True)
    return [sum(read_bytes), max(seconds)]


def _bytes_read() -> int:
    """Return what this process has had storage read; what it found in the page cache is not part of it."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def _rows(figures: dict[str, Any]) -> Iterator[Row]:
    """Yield each target of the design with what was measured: medians of the ratios within each round."""
    rounds = figures["rounds"]
    for name, least in ((LOAD_FILE, 1.8), (TORCH_LOAD, None), (DCP, 3.0)):
        for ours in (HASHED, PLAIN, CACHED):
            if name in rounds and ours in rounds:
                ratio = _ratio(rounds[name][COLD], rounds[ours][COLD])
                goal = "" if least is None or ours == CACHED else f">= {least} x"
                yield (
                    f"cold, {ours}, against {name}",
                    f"{ratio:.1f} x",
                    goal,
                    ratio >= least if goal and least else None,
                )
        if name in rounds and RAW in rounds:
            yield (
                f"  bound: {RAW}, against {name}",
                f"{_ratio(rounds[name][COLD], rounds[RAW][COLD]):.1f} x",
                "",
                None,
            )
    for ours in (HASHED, PLAIN, CACHED):
        if ours in rounds:
            memory = max(one["memory"] for how in (COLD, WARM) for one in rounds[ours][how])
            yield f"{ours}, most extra memory", f"{memory:.0f} MiB", "<= 64 MiB", memory <= 64
    yield from _reader_rows(figures["readers"])


def _reader_rows(readers: dict[str, Any]) -> Iterator[Row]:
    count = readers["processes"]
    for name, goal in (("page cache", "<= 1.1 x"), ("direct", "")):
        one, many = readers[f"{name}, 1"], readers[f"{name}, {count}"]
        ratio = many[0] / max(1, one[0])
        shown = f"{ratio:.2f} x"
        yield f"{count} readers, {name}: bytes against one", shown, goal, ratio <= 1.1 if goal else None
        yield f"  seconds of the slowest of {count}, of one", f"{many[1]:.2f}, {one[1]:.2f}", "", None


def _ratio(above: list[Figures], below: list[Figures]) -> float:
    return statistics.median(a["seconds"] / b["seconds"] for a, b in zip(above, below, strict=True))


def _print_table(figures: dict[str, Any]) -> None:
    print(", ".join(f"{key} {value}" for key, value in figures["machine"].items()))
    print(f"{figures['bytes'] / (1 << 30):.2f} GiB in {figures['tensors']} tensors; median (least-most)\n")
    print(f"{'':<26} {'cold s':>20} {'warm s':>20} {'extra MiB':>18}")
    for name, rounds in figures["rounds"].items():
        shown = [report.spread([one["seconds"] for one in rounds[how]], 2) for how in (COLD, WARM)]
        memory = report.spread([one["memory"] for how in (COLD, WARM) for one in rounds[how]], 0)
        print(f"{name:<26} {shown[0]:>20} {shown[1]:>20} {memory:>18}")
    print()


if __name__ == "__main__":
    main()
