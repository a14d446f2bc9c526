"""The daemon's figures: latency, idle cost, start-up, scan, prune. Prints one table and writes JSON.

    python benchmarks/daemon.py [--quick] [--json out/daemon.json] [--dir DIR]

Everything runs against the real command in processes of its own. Ratios compare contestants of this one run;
absolute times belong to this machine.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import report
from report import Row
from support.jobs import shard_bytes, start, write_step

from syncd.daemon.scan import examine_all
from syncd.daemon.wake import WakePipe, Watcher
from syncd.protocol.disk import remove_tree
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk, SystemClock
from syncd.protocol.presence import HEARTBEAT, Presence, write_presence
from syncd.protocol.version import write_marker
from syncd.protocol.writer import StepWriter

SYNCD = [sys.executable, "-m", "syncd"]
IDLE = (("events", "events", 3), ("polling", "polling", 3), ("polling_500", "polling", 500))
"""How a daemon is idle: a name, what wakes it, and the steps that lie there."""


def main() -> None:
    """Run all benchmarks."""
    options = _options()
    # What pip installs has its bytecode beside it, and so has what is measured here.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with report.scratch_directory("syncd-bench-", options.dir) as scratch:
        figures = _measure(scratch, quick=options.quick)
    rows = list(_rows(figures))
    _print(rows, figures["machine"])
    if options.json:
        report.keep(options.json, figures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", default="out/daemon.json", help="where to write the figures")
    parser.add_argument("--dir", default=None, help="where to work; its file system is what is measured")
    return parser.parse_args()


def _measure(scratch: Path, *, quick: bool) -> dict[str, Any]:
    rounds = 100 if quick else 1000
    return {
        "machine": report.machine(scratch),
        "latency_ms": _latency(scratch / "latency", rounds),
        "notify_ms": _notify(scratch / "notify", 5 if quick else 20),
        "idle": _idle(scratch / "idle", 3.0 if quick else 20.0),
        "start_s": _start_up(scratch / "start", 5 if quick else 15),
        "scan_s": _scan(scratch / "scan", (25, 50, 100) if quick else (250, 500, 1000)),
        "prune_ms": _prune(scratch / "prune", 5 if quick else 15),
        "presences": _presences(scratch / "presences", 500 if quick else 5000, 5.0 if quick else 30.0),
    }


@contextmanager
def _daemon(job: Job, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the daemon until the block ends; it must end by itself within 20 s of SIGTERM."""
    process = subprocess.Popen([*SYNCD, "watch", job.root, "--log-level", "warning", *more])
    try:
        _until(lambda: Path(job.lock).is_dir() and any(Path(job.lock).glob("0*")), 20)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def _until(holds: Callable[[], bool], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > ends:
            raise TimeoutError("the daemon did not get there")
        time.sleep(0.0001)


def _job(path: Path) -> Job:
    path.mkdir(parents=True)
    return Job.at(path)


def _latency(path: Path, rounds: int) -> dict[str, float]:
    """Time from just before the marker's replace until the version's replace is seen, polled each 0.1 ms."""
    job, times, disk = _job(path), [], _Timed()
    write_step(job, 0)
    with _daemon(job), ThreadPoolExecutor(1) as watchers:
        _until(lambda: os.path.exists(job.version), 10)
        for step in range(1, rounds + 1):
            write_step(job, step, announce=False)
            time.sleep(0.01)
            seen = watchers.submit(_replaced_at, job.version, os.stat(job.version).st_ino)
            write_marker(disk, job.marker, step)
            times.append((seen.result() - disk.renamed_at) * 1e3)
            published = json.loads(Path(job.version).read_text())["step"]
            if published != step:
                raise RuntimeError(f"step {step} was written and {published} published")
    return {**_percentiles(times), "rounds": rounds}


class _Timed(LocalDisk):
    """Notes when it renames: what a writer does before, and makes durable after, is not the daemon's time."""

    renamed_at = 0.0

    def rename(self, source: str, target: str) -> None:
        self.renamed_at = time.perf_counter()
        super().rename(source, target)


def _replaced_at(path: str, inode: int) -> float:
    """Return when another file than `inode` is seen at a path, polled each 0.1 ms."""
    _until(lambda: os.stat(path).st_ino != inode, 20)
    return time.perf_counter()


def _notify(path: Path, rounds: int) -> dict[str, float]:
    """Time from the marker's replace until a waiter knows: the daemon's watcher against a poll each second."""
    job = _job(path)
    write_marker(job.disk, job.marker, 0)
    pipe = WakePipe()
    watcher = Watcher(job, SystemClock(), pipe, "events")
    try:
        watched = [_notified(job, number, partial(watcher.wait, 5.0)) for number in range(1, 10 * rounds)]
        polled = [_notified(job, number, partial(_polled, job, number)) for number in range(-rounds, 0)]
    finally:
        watcher.close()
        pipe.close()
    found = {"watched_p50": statistics.median(watched), "polled_p50": statistics.median(polled)}
    ratio = found["polled_p50"] / found["watched_p50"]
    return {**{name: round(value, 3) for name, value in found.items()}, "ratio": round(ratio, 1)}


def _notified(job: Job, number: int, wait: Callable[[], object]) -> float:
    """Replace the marker at a random moment of the next second, in another thread, and return the delay in ms."""
    at: list[float] = []

    def write() -> None:
        data = str(abs(number)).encode()
        temporary = f"{job.root}/.marker.tmp"
        Path(temporary).write_bytes(data)
        at.append(time.perf_counter())
        os.replace(temporary, job.marker)

    # Only the poll cares when; the watcher need not wait long for its turn.
    timer = threading.Timer(random.random() if number < 0 else 0.003, write)
    timer.start()
    wait()
    seen = time.perf_counter()
    timer.join()
    return (seen - at[0]) * 1e3


def _polled(job: Job, number: int) -> None:
    while Path(job.marker).read_bytes() != str(abs(number)).encode():
        time.sleep(1.0)


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 3),
        "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 3),
        "max": round(ordered[-1], 3),
    }


def _idle(path: Path, seconds: float) -> dict[str, float]:
    """Cost of a daemon that has nothing to do: per cent of one core (the middle of three windows), resident MiB."""
    job, found, written = _job(path), {}, 0
    for name, mode, steps in IDLE:
        for step in range(written + 1, steps + 1):
            write_step(job, step, world_size=4)
        written = steps
        with _daemon(job, "--watch", mode, "--keep-last", str(steps)) as process:
            time.sleep(3)
            windows = [_used(process.pid, seconds) for _ in range(3)]
            found[f"{name}_cpu_percent"] = round(statistics.median(windows) * 100, 3)
            found[f"{name}_resident_mib"] = round(_resident(process.pid), 1)
    return found


def _used(pid: int, seconds: float) -> float:
    """Return the share of one core that a process takes for some seconds."""
    before, at = _cpu(pid), time.monotonic()
    time.sleep(seconds)
    return (_cpu(pid) - before) / (time.monotonic() - at)


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def _start_up(path: Path, rounds: int) -> dict[str, float]:
    job = _job(path)
    for step in range(1, 4):
        write_step(job, step)
    subprocess.run([*SYNCD, "watch", job.root, "--once"], check=True, capture_output=True)
    commands = {"help": ["--help"], "status": ["status", job.root], "ls": ["ls", job.root]}
    return {name: _wall([*SYNCD, *arguments], rounds) for name, arguments in commands.items()}


def _wall(command: list[str], rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    return round(statistics.median(times[1:]), 3)


def _scan(path: Path, sizes: tuple[int, ...]) -> dict[str, float]:
    """Seconds of one whole examination, files in the kernel's cache: N steps of 64 shards and N explorers."""
    job, found, made = _job(path), {}, 0
    Path(job.explorers).mkdir(parents=True)
    for size in sizes:
        for number in range(made, size):
            _many_shards(job, number)
            write_presence(_Unsynced(), job.explorers, Presence(f"explorer-{number}", beat=1))
        made = size
        found[str(size)] = round(min(_timed(lambda: examine_all(job, SystemClock())) for _ in range(3)), 3)
    return found


class _Unsynced(LocalDisk):
    """Writes without syncing: a thousand steps are only there to be scanned."""

    def sync_directory(self, path: str) -> None:
        """Leave it to the kernel."""

    def replace(self, path: str, data: Any, *, via: str | None = None, private: bool = False) -> None:  # noqa: ARG002
        """Write in place: nobody reads yet."""
        Path(path).write_bytes(data if isinstance(data, bytes) else b"".join(data))


def _many_shards(job: Job, step: int) -> None:
    writer = StepWriter(Job(job.root, job.state, _Unsynced()), step, 64, "bench")
    writer.begin()
    for rank in range(1, 65):
        content = shard_bytes({f"w{rank}": (2, 2)})
        writer.receipt(rank, [writer.write(f"actor/model-{rank:05d}-of-00064.safetensors", content, 1)])
    writer.seal()


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _prune(path: Path, rounds: int) -> dict[str, float]:
    """Milliseconds to take a step away: one rename into the trash, against removing its files in place."""
    job, disk = _job(path), LocalDisk()
    content = os.urandom(4 << 20)
    Path(job.trash).mkdir(parents=True)
    renames, removals = [], []
    for round_ in range(rounds):
        for step in (2 * round_, 2 * round_ + 1):
            directory = Path(job.step(step), "actor")
            directory.mkdir(parents=True)
            for rank in range(64):
                (directory / f"model-{rank}.safetensors").write_bytes(content)
        os.sync()
        source, target = job.step(2 * round_), f"{job.trash}/{round_}"
        renames.append(_timed(partial(disk.rename, source, target)) * 1e3)
        removals.append(_timed(partial(remove_tree, disk, job.step(2 * round_ + 1))) * 1e3)
    rename, removal = statistics.median(renames), statistics.median(removals)
    return {"rename": round(rename, 4), "rmtree": round(removal, 3), "ratio": round(removal / rename, 1)}


def _presences(path: Path, count: int, seconds: float) -> dict[str, float]:
    """Cost of many explorers: CPU seconds of a removal, and per cent of one core while all of them beat."""
    job = _job(path)
    Path(job.explorers).mkdir(parents=True)
    _beat_all(job, count, 0)
    for step in range(1, 11):
        write_step(job, step)
    daemon, heard, _ = start(job, keep_last=1, prune=False)
    daemon.tick(woken=True)
    daemon.reload(replace(daemon.config, prune=True))
    started = time.process_time()
    daemon.tick()
    spent, removed = time.process_time() - started, len(heard.of("step_pruned"))
    daemon.close()
    with _daemon(job, "--keep-last", "1") as process, ThreadPoolExecutor(1) as beaters:
        beating = beaters.submit(_beat_for, job, count, seconds + 6)
        time.sleep(3)
        share = _used(process.pid, seconds)
        beating.result()
    return {"count": count, "removal_s": round(spent / removed, 4), "cpu_percent": round(share * 100, 1)}


def _beat_for(job: Job, count: int, seconds: float) -> None:
    """Have explorers beat each 5 s."""
    ends, beat = time.monotonic() + seconds, 1
    while (now := time.monotonic()) < ends:
        _beat_all(job, count, beat)
        beat += 1
        time.sleep(max(HEARTBEAT - (time.monotonic() - now), 0.0))


def _beat_all(job: Job, count: int, beat: int) -> None:
    for number in range(count):
        presence = Presence(
            f"explorer-{number}", beat=beat, incarnation=f"{number:032x}", applied=(1, 10), leases=(10,)
        )
        write_presence(_Renamed(), job.explorers, presence)


class _Renamed(LocalDisk):
    """Replaces without syncing: the daemon is measured, not the disk."""

    def replace(self, path: str, data: Any, *, via: str | None = None, private: bool = False) -> None:  # noqa: ARG002
        """Write beside it and rename."""
        Path(f"{path}.tmp").write_bytes(data)
        os.rename(f"{path}.tmp", path)


def _rows(figures: dict[str, Any]) -> Iterator[Row]:
    latency, idle, start = figures["latency_ms"], figures["idle"], figures["start_s"]
    yield "marker to version, p50", f"{latency['p50']:.2f} ms", "<= 5 ms", latency["p50"] <= 5
    yield "marker to version, p99", f"{latency['p99']:.2f} ms", "<= 20 ms", latency["p99"] <= 20
    notify = figures["notify_ms"]
    yield (
        "notified, p50: watcher | 1 s poll",
        f"{notify['watched_p50']} | {notify['polled_p50']} ms",
        "",
        None,
    )
    yield "notified: ratio", f"{notify['ratio']} x", ">= 500 x", notify["ratio"] >= 500
    for name, mode, steps in IDLE:
        yield (
            f"idle, {mode}, {steps} steps: one core",
            f"{idle[f'{name}_cpu_percent']} %",
            "<= 0.5 %",
            idle[f"{name}_cpu_percent"] <= 0.5,
        )
        yield (
            f"idle, {mode}, {steps} steps: resident",
            f"{idle[f'{name}_resident_mib']} MiB",
            "<= 40 MiB",
            idle[f"{name}_resident_mib"] <= 40,
        )
    for name in ("help", "status", "ls"):
        yield f"syncd {name}, warm", f"{start[name]} s", "<= 0.3 s", start[name] <= 0.3
    yield from _scan_rows(figures["scan_s"])
    prune = figures["prune_ms"]
    yield "prune: rename | rmtree", f"{prune['rename']} | {prune['rmtree']} ms", "", None
    yield "prune: ratio", f"{prune['ratio']} x", ">= 300 x", prune["ratio"] >= 300
    crowd = figures["presences"]
    yield f"{crowd['count']} presences: CPU of a removal", f"{crowd['removal_s']} s", "", None
    yield f"{crowd['count']} presences: one core", f"{crowd['cpu_percent']} %", "", None


def _scan_rows(scan: dict[str, float]) -> Iterator[Row]:
    for size, seconds in scan.items():
        limit = int(size) / 1000
        yield (
            f"scan {size} steps x 64 shards, {size} explorers",
            f"{seconds} s",
            f"<= {limit} s",
            seconds <= limit,
        )


def _print(rows: list[Row], machine: dict[str, Any]) -> None:
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    report.print_targets(rows, 48, 18)


if __name__ == "__main__":
    main()
