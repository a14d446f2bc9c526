"""What the device allows a sync that copies while it is written: plain calls, no digest, no daemon, no parameters.

    python benchmarks/sync_bound.py [--gib 0.25] [--rounds 7] [--readers 1,4] [--json out/sync_bound.json]
                                    [--dir DIR] [--reader-dir DIR] [--stage DIR]

Two threads write one file and sync it; a process copies into the stage what is written; then each reader reads the
copy into memory of its own. No sync with a stage does less. Three ways to write take turns:

    direct     past the page cache, as syncd writes
    cached     through it, synced at the end
    started    through it, and the kernel begins at once to bring each piece to the device

Each round writes once alone. The bound is the quickest way's total over the quickest write that is alone.
"""

import argparse
import ctypes
import mmap
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import report

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

WAYS = ("direct", "cached", "started")
_WRITE, _COPY, _READ = 16 << 20, 8 << 20, 1 << 20  # bytes of a call, as in syncd
_THREADS = 2
_POLL = 0.0005
_LONG = 120.0
_START = 2  # SYNC_FILE_RANGE_WRITE
_LIBC = ctypes.CDLL(None)

Queue = Any  # multiprocessing's has no type of its own


def main() -> None:
    """Measure and print the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=0.25, help="size of the file")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count, after one that does not")
    parser.add_argument("--readers", default="1,4", help="numbers of readers: 1,4")
    parser.add_argument("--json", default="out/sync_bound.json", help="where to write the figures")
    parser.add_argument("--dir", default=None, help="where to work; its file system is what is measured")
    parser.add_argument("--reader-dir", default=None, help="the same directory as readers see it")
    parser.add_argument("--stage", default="/dev/shm", help="where the stage is")
    report.run_with_stage("syncd-bound-", parser.parse_args(), _measure, _print)


def _measure(scratch: Path, stage: str, options: argparse.Namespace) -> dict[str, Any]:
    size = int(options.gib * (1 << 30)) // _WRITE * _WRITE
    seen = Path(options.reader_dir) / scratch.name if options.reader_dir else scratch
    found: dict[str, Any] = {}
    with closing(mmap.mmap(-1, size)) as content:
        content[:] = os.urandom(1 << 20) * (size >> 20)
        for count in (int(text) for text in options.readers.split(",")):
            rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            with _processes(seen / "file", Path(stage) / "copy", size, count) as crew:
                for number in range(options.rounds + 1):
                    for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                        figures = _sync(scratch / "file", content, way, crew)
                        if number:
                            rounds[way].append(figures)
            found[str(count)] = rounds
    return {"machine": report.machine(scratch), "bytes": size, "readers": found}


class _Crew:
    """The process that copies, and those that read."""

    def __init__(self, written: Any, copier: tuple[Queue, Queue], readers: list[tuple[Queue, Queue]]) -> None:
        self.written: Synchronized[int] = written
        self.copier, self.readers = copier, readers


@contextmanager
def _processes(path: Path, copy: Path, size: int, count: int) -> Iterator[_Crew]:
    context = multiprocessing.get_context("fork")
    written = context.Value("q", 0)
    pairs = [(context.Queue(), context.Queue()) for _ in range(count + 1)]
    copier = context.Process(target=_copy, args=(path, copy, size, written, *pairs[0]), daemon=True)
    readers = [context.Process(target=_read, args=(copy, size, *pair), daemon=True) for pair in pairs[1:]]
    processes = [copier, *readers]
    for process in processes:
        process.start()
    try:
        yield _Crew(written, pairs[0], pairs[1:])
    finally:
        for process in processes:
            process.kill()
            process.join()


def _sync(path: Path, content: mmap.mmap, way: str, crew: _Crew) -> dict[str, float]:
    began = time.monotonic()
    _write(path, content, way, None)
    alone = time.monotonic() - began
    path.unlink()
    crew.written.value = 0
    began = time.monotonic()
    crew.copier[0].put(way)
    _write(path, content, way, crew.written)
    written = time.monotonic() - began
    copied = crew.copier[1].get(timeout=_LONG) - began
    for go, _ in crew.readers:
        go.put(way)
    total = max(done.get(timeout=_LONG) for _, done in crew.readers) - began
    path.unlink()
    return {"alone": alone, "write": written, "copied": copied, "total": total}


def _write(path: Path, content: mmap.mmap, way: str, written: "Synchronized[int] | None") -> None:
    size = len(content)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if way == "direct" else 0))
    done, lock = set[int](), threading.Lock()
    with suppress(OSError):  # not on every network mount
        os.posix_fallocate(descriptor, 0, size)

    def write(offset: int) -> None:
        with memoryview(content) as view, view[offset : offset + _WRITE] as piece:
            os.pwrite(descriptor, piece, offset)
        if way == "started":
            _LIBC.sync_file_range(descriptor, ctypes.c_int64(offset), ctypes.c_int64(_WRITE), _START)
        with lock:
            done.add(offset)
            while written is not None and written.value in done:
                written.value += _WRITE

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(write, range(0, size, _WRITE)))
    os.fsync(descriptor)
    os.close(descriptor)


def _copy(path: Path, copy: Path, size: int, written: "Synchronized[int]", go: Queue, done: Queue) -> None:
    """Copy the file while it is written, each time that the way is told."""
    buffer = mmap.mmap(-1, _COPY)
    while way := go.get():
        offset, source = 0, -1
        target = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        while offset < size:
            if written.value <= offset:
                time.sleep(_POLL)
                continue
            if source < 0:
                source = os.open(path, os.O_RDONLY | (os.O_DIRECT if way == "direct" else 0))
            os.preadv(source, [buffer], offset)
            offset += os.pwrite(target, buffer, offset)
        os.close(source)
        os.close(target)
        done.put(time.monotonic())


def _read(copy: Path, size: int, go: Queue, done: Queue) -> None:
    """Read the copy into memory that is there, each time that it is told."""
    memory = mmap.mmap(-1, size)
    memory[:] = bytes(size)
    while go.get():
        with memoryview(memory) as view, copy.open("rb", buffering=0) as file:
            for offset in range(0, size, _READ):
                file.readinto(view[offset : offset + _READ])
        done.put(time.monotonic())


def _print(figures: dict[str, Any]) -> None:
    print(", ".join(f"{key} {value}" for key, value in figures["machine"].items()))
    for count, rounds in figures["readers"].items():
        columns = ("alone", "write", "copied", "total")
        medians = {
            way: {column: statistics.median(one[column] for one in of_way) for column in columns}
            for way, of_way in rounds.items()
        }
        print(f"\n{f'{count} readers':<12}" + "".join(f"{column:>9}" for column in columns))
        for way, of_way in medians.items():
            print(f"{way:<12}" + "".join(f"{of_way[column]:>9.3f}" for column in columns))
        quickest = [min(of_way[column] for of_way in medians.values()) for column in ("total", "alone")]
        print(f"bound: {quickest[0] / quickest[1]:.2f} durable writes")


if __name__ == "__main__":
    main()
