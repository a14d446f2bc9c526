"""What a sync costs the trainer: blocked time, time until durable, extra memory, pause of other threads.

    python benchmarks/save.py [--gib 1] [--rounds 5] [--json out/save.json] [--dir DIR] [--without NAME ...]

All contestants save the same tensors, durably, in turn in one process; each round begins with another one.
Ratios are taken within a round, so that a machine that is busy for a while is busy for all. Absolute times
belong to this machine.

The process starts itself anew with the setting of libc that `trainer train` gives its ranks:
`GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x80000`, so that copies of half a mebibyte and more go around
the cache. `--plain` leaves that out.
"""

import argparse
import ctypes
import gc
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import report
import safetensors.torch
import torch
from report import Row
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from syncd.protocol.layout import Job
from syncd.protocol.manifest import read_manifest
from syncd.transports.files.buffers import PinnedBuffer
from syncd.transports.files.step_saver import StepSaver
from syncd.transports.torch_tensors import view

Weights = dict[str, torch.Tensor]
Figures = dict[str, float]
PIECE = 16 << 20
BLOCK = 1 << 30
"""What memcpy reads again and again, to leave memory to the others; no cache holds it."""

TUNABLES = "glibc.cpu.x86_non_temporal_threshold=0x80000"
RAW = "raw O_DIRECT"
BLOCKED = (("background", "memcpy"), ("background", "memcpy, all cores"), ("background, first", "memcpy"))


def main() -> None:
    """Run all contestants and print what they cost."""
    warnings.filterwarnings("ignore")
    options = _options()
    if not options.plain and TUNABLES not in os.environ.get("GLIBC_TUNABLES", ""):
        environment = {**os.environ, "GLIBC_TUNABLES": TUNABLES}
        os.execve(sys.executable, sys.orig_argv, environment)  # read by libc when a process starts
    with report.scratch_directory("syncd-save-", options.dir) as scratch:
        figures = _measure(scratch, options)
    _print_table(figures)
    report.print_targets(_rows(figures), 48, 10)
    report.keep(options.json, figures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the weights")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not")
    parser.add_argument("--json", default="out/save.json", help="where to write the figures")
    parser.add_argument("--dir", default=None, help="where to work; its file system is what is measured")
    parser.add_argument("--without", action="append", default=[], help="a contestant to leave out")
    parser.add_argument("--plain", action="store_true", help="without the setting of libc")
    return parser.parse_args()


def weights_of(gib: float) -> Weights:
    """Return bf16 weights in the proportions of a small language model: one large embedding, many layers."""
    total = int(gib * (1 << 30)) // 2
    width = max(64, int((total / 300) ** 0.5) // 64 * 64)
    found: Weights = {"model.embed_tokens.weight": _noise(total // 8 // width * width).view(-1, width)}
    left, layer = total - found["model.embed_tokens.weight"].numel(), 0
    while left > 0:
        for name, rows in (("self_attn.q_proj", 1), ("self_attn.o_proj", 1), ("mlp.up_proj", 4), ("norm", 0)):
            size = max(width, rows * width * width)
            found[f"model.layers.{layer}.{name}.weight"] = _noise(size).view(-1, width)
            left -= size
        layer += 1
    return found


def _noise(size: int) -> torch.Tensor:
    """Return random weights, the same again after a while: making them takes longer than saving them."""
    return torch.randn(min(size, 1 << 22)).bfloat16().repeat(-(-size // (1 << 22)))[:size].clone()


class Watch:
    """What happens in the process meanwhile: its peak memory, and the longest pause of another thread."""

    _TICK = 0.0005

    def __enter__(self) -> Self:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._before, self._longest, self._over = _status("VmRSS"), 0.0, threading.Event()
        self._thread = threading.Thread(target=self._tick)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.memory = max(0.0, (_status("VmHWM") - self._before) / 1024)
        self.pause = max(0.0, self._longest - self._TICK) * 1e3

    def _tick(self) -> None:
        last = time.perf_counter()
        while not self._over.is_set():
            time.sleep(self._TICK)
            now = time.perf_counter()
            self._longest, last = max(self._longest, now - last), now


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


class _Ours:
    """The saver of one mode, kept over the rounds as a trainer keeps it."""

    def __init__(self, job: Path, mode: Any, weights: Weights) -> None:
        job.mkdir()
        self.job, self._weights, self._step = Job.at(job), weights, 0
        self._saver = StepSaver(self.job, 0, 1, mode=mode)

    def ready(self) -> None:
        """Do what comes before a save and is not part of it."""

    def __call__(self, _: Path) -> float:
        self._step += 1
        started = time.perf_counter()
        self._saver.save(self._step, f"bench-{self._step}", self._weights.items())
        blocked = time.perf_counter() - started
        self._saver.wait()
        return blocked

    def clear(self) -> None:
        assert read_manifest(self.job.disk, self.job.step(self._step)).shards
        shutil.rmtree(self.job.step(self._step))


class _First(_Ours):
    """A new saver each time, whose memory is made ahead: while a trainer builds its model."""

    def ready(self) -> None:
        self._saver = StepSaver(self.job, 0, 1)
        self._saver.prepare(self._weights.items())
        time.sleep(5 * sum(tensor.nbytes for tensor in self._weights.values()) / (1 << 30))

    def clear(self) -> None:
        super().clear()
        self._saver.close()


def _memcpy(size: int, target: torch.Tensor) -> dict[str, Callable[[Path], float | None]]:
    """Copy as many bytes in pieces as large as memory allows, into memory as an arena has it."""
    source = torch.ones(min(size, BLOCK), dtype=torch.uint8)
    pieces = [(target[at : at + BLOCK], source[: min(BLOCK, size - at)]) for at in range(0, size, BLOCK)]

    def one(_: Path) -> None:
        for to, what in pieces:
            ctypes.memmove(to.data_ptr(), what.data_ptr(), what.nbytes)

    def all_cores(_: Path) -> None:
        for to, what in pieces:
            to.copy_(what)

    return {"memcpy": one, "memcpy, all cores": all_cores}


def _raw_direct(source: PinnedBuffer) -> Callable[[Path], None]:
    """Write the same bytes to a new file as fast as the device takes them: O_DIRECT, two threads."""

    def write(path: Path) -> None:
        descriptor = os.open(path / "raw", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        memory = view(source.bytes)
        os.posix_fallocate(descriptor, 0, len(memory))
        with ThreadPoolExecutor(2) as pool:
            places = range(0, len(memory), PIECE)
            done = pool.map(lambda at: os.pwrite(descriptor, memory[at : at + PIECE], at), places)
            assert sum(done) == len(memory)
        os.fsync(descriptor)
        os.close(descriptor)

    return write


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _torch_save(weights: Weights) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        torch.save(weights, path / "model.pt")
        _fsync(path / "model.pt")

    return save


def _save_file(weights: Weights) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        safetensors.torch.save_file(weights, path / "model.safetensors")
        _fsync(path / "model.safetensors")

    return save


def _dcp_save(weights: Weights) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        dcp_save(weights, checkpoint_id=str(path / "dcp"), no_dist=True)

    return save


def _dcp_async(weights: Weights) -> Callable[[Path], float]:
    def save(path: Path) -> float:
        started = time.perf_counter()
        future = async_save(weights, checkpoint_id=str(path / "dcp"), no_dist=True)
        blocked = time.perf_counter() - started
        future.result()  # type: ignore[union-attr]
        return blocked

    return save


def _dcp_hugging_face(weights: Weights) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        writer = HuggingFaceStorageWriter(str(path / "hf"), dict.fromkeys(weights, 1))
        dcp_save(weights, storage_writer=writer, no_dist=True)
        for file in (path / "hf").iterdir():
            _fsync(file)

    return save


def _contestants(scratch: Path, weights: Weights) -> dict[str, Callable[[Path], float | None]]:
    size = sum(tensor.nbytes for tensor in weights.values())
    memory = PinnedBuffer(size)
    return {
        **_memcpy(size, memory.bytes[:size]),
        RAW: _raw_direct(memory),
        "background": _Ours(scratch / "background", "background", weights),
        "background, first": _First(scratch / "first", "background", weights),
        "stream": _Ours(scratch / "stream", "stream", weights),
        "torch.save": _torch_save(weights),
        "safetensors save_file": _save_file(weights),
        "DCP save": _dcp_save(weights),
        "DCP async_save": _dcp_async(weights),
        "DCP Hugging Face": _dcp_hugging_face(weights),
        "nothing": lambda _: time.sleep(0.5),
    }


def _measure(scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    weights = weights_of(options.gib)
    contestants = _contestants(scratch, weights)
    names = [name for name in contestants if name not in options.without]
    found: dict[str, list[Figures]] = {name: [] for name in names}
    loads = []
    for number in range(options.rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            figures = _one(scratch, contestants[name])
            if number:
                found[name].append(figures)
        loads.append(round(os.getloadavg()[0], 1))
    size = sum(tensor.nbytes for tensor in weights.values())
    non_temporal = TUNABLES in os.environ.get("GLIBC_TUNABLES", "")
    machine = report.machine(
        scratch, torch=torch.__version__, non_temporal=non_temporal, load=report.span(loads)
    )
    return {"machine": machine, "bytes": size, "tensors": len(weights), "rounds": found}


def _one(scratch: Path, contestant: Callable[[Path], float | None]) -> Figures:
    place = Path(tempfile.mkdtemp(dir=scratch))
    if isinstance(contestant, _Ours):
        contestant.ready()
    os.sync()
    with Watch() as watch:
        started = time.perf_counter()
        blocked = contestant(place)
        total = time.perf_counter() - started
    shutil.rmtree(place)
    if isinstance(contestant, _Ours):
        contestant.clear()
    blocked = total if blocked is None else blocked
    return {"blocked": blocked, "total": total, "memory": watch.memory, "pause": watch.pause}


def _rows(figures: dict[str, Any]) -> Iterator[Row]:
    """Yield each target of the design with what was measured: medians of the ratios within each round."""
    rounds = figures["rounds"]
    yield from _speed_rows(rounds)
    for mode, name in BLOCKED:
        if mode in rounds and name in rounds:
            yield _blocked_row(rounds, mode, name)
    for mode in [mode for mode in ("background", "stream") if mode in rounds]:
        memory = statistics.median(_each(rounds, mode, "memory"))
        pause = statistics.median(_each(rounds, mode, "pause"))
        yield f"{mode}, extra memory", f"{memory:.0f} MiB", "<= 64 MiB", memory <= 64
        yield f"{mode}, pause of other threads", f"{pause:.1f} ms", "<= 20 ms", pause <= 20
    if "nothing" in rounds:
        idle = statistics.median(_each(rounds, "nothing", "pause"))
        yield "  bound: pause while nothing is saved", f"{idle:.1f} ms", "", None


def _speed_rows(rounds: dict[str, list[Figures]]) -> Iterator[Row]:
    """Yield how fast ours is; what writing at the speed of the device would reach is the bound of each."""
    raw = _each(rounds, RAW, "total") if RAW in rounds else None
    if raw and "background" in rounds:
        share = _ratio(raw, [one["total"] - one["blocked"] for one in rounds["background"]])
        yield "durable write, raw O_DIRECT = 1", f"{share:.2f}", ">= 0.85", share >= 0.85
    for name, least in (("torch.save", 2), ("safetensors save_file", 3), ("DCP Hugging Face", 4)):
        if name not in rounds:
            continue
        theirs = _each(rounds, name, "total")
        for mode in [mode for mode in ("background", "stream") if mode in rounds]:
            ratio = _ratio(theirs, _each(rounds, mode, "total"))
            yield f"{mode}, against {name}", f"{ratio:.1f} x", f">= {least} x", ratio >= least
        if raw:
            yield f"  bound: {RAW}, against {name}", f"{_ratio(theirs, raw):.1f} x", "", None


def _blocked_row(rounds: dict[str, list[Figures]], mode: str, name: str) -> Row:
    ratio = _ratio(_each(rounds, mode, "blocked"), _each(rounds, name, "total"))
    return f"{mode}, blocked, against {name}", f"{ratio:.2f} x", "<= 1.25 x", ratio <= 1.25


def _each(rounds: dict[str, list[Figures]], name: str, key: str) -> list[float]:
    return [one[key] for one in rounds[name]]


def _ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def _print_table(figures: dict[str, Any]) -> None:
    print(", ".join(f"{key} {value}" for key, value in figures["machine"].items()))
    print(f"{figures['bytes'] / (1 << 30):.2f} GiB in {figures['tensors']} tensors; median (least-most)\n")
    print(f"{'':<22} {'blocked s':>20} {'durable s':>20} {'extra MiB':>16} {'pause ms':>18}")
    for name, rounds in figures["rounds"].items():
        shown = [report.spread([one[key] for one in rounds], digits) for key, digits in _COLUMNS]
        print(f"{name:<22} {shown[0]:>20} {shown[1]:>20} {shown[2]:>16} {shown[3]:>18}")
    print()


_COLUMNS = (("blocked", 2), ("total", 2), ("memory", 0), ("pause", 1))


if __name__ == "__main__":
    main()
