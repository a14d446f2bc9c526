"""Whole syncs by full files and by deltas over a link of limited bandwidth: seconds, and bytes at the file server.

    python benchmarks/delta_sync.py run A READERS OUT [--mib 128] [--rounds 3] [--readers 8,4,1] [--rates 0.1,1]

`delta_sync_on_nfs.sh` runs it in the NFS bed: A is the trainer's client, each reader has a mount of its own on client
B, and this process is on the server, where it limits what both links carry and counts their bytes. The trainer's real
sender stores each step in two jobs, one with `delta = "off"`, in turn; readers fetch it into a stage of their own, as
followers do. A sync begins with the save and ends when the last reader has a directory that is checked. Changes:
1.5 % of the values, one unit in the last place.

`copy` is what the bed itself can do: the same bytes written and synced by the trainer's process, then read by all
readers at once into memory, with nothing of syncd. `auto` is a job in which the trainer chooses; it says in its log
why. A rate of 0 is a link without a limit.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

WAYS: dict[str, Any] = {"copy": "", "full": "off", "delta": "on", "auto": "auto"}
"""What is compared, and `sync.delta` of its job; none for `copy`."""

SHARE = 0.015
_WARM = 3
"""Rounds that do not count, on links without a limit: the first two steps of a trainer are whole."""

_PIECE = 1 << 20

_LONG = 300.0
_ANSWER = "answer:"


def main() -> None:
    """Run the whole, or one of its processes."""
    if sys.argv[1] == "train":
        train(sys.argv[2], sys.argv[3].split(","), int(sys.argv[4]))
    elif sys.argv[1] == "read":
        read(sys.argv[2], sys.argv[3].split(","), sys.argv[4])
    else:
        run(_options())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("trainer", type=Path, help="the export as the trainer's client has it")
    parser.add_argument("readers_at", type=Path, help="where each reader has a mount of its own: 1, 2, ...")
    parser.add_argument("out", type=Path)
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--readers", type=_list_of(int), default="8,4,1")
    parser.add_argument(
        "--rates", type=_list_of(float), default="0.1,1", help="GB/s of each link; 0: no limit"
    )
    parser.add_argument(
        "--ways", type=_list_of(str), default="copy,full,delta", help="copy, full, delta, auto"
    )
    return parser.parse_args()


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(one) for one in text.split(",")]


class Part:
    """A process that does one line of work at a time and answers each with a line.

    Args:
        client: The client that it runs on.
        arguments: Of this program.
    """

    def __init__(self, client: str, *arguments: str) -> None:
        command = ["nsenter", f"--net=/run/netns/{client}", sys.executable, __file__, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer()

    def ask(self, *words: object) -> None:
        """Give it something to do."""
        assert self._process.stdin
        print(*words, file=self._process.stdin, flush=True)

    def answer(self) -> str:
        """Wait until it is done, and return what it says; other lines are its log."""
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                return line.removeprefix(_ANSWER).strip()
            print(line, end="", file=sys.stderr)
        raise RuntimeError(f"a part ended with {self._process.wait()}")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(_LONG)


def run(options: argparse.Namespace) -> None:
    """Measure every rate and number of readers; print a table and write JSON."""
    ways = ",".join(options.ways)
    for way in options.ways:
        (options.trainer / way).mkdir()
    daemons = [_daemon(options.trainer / way) for way in options.ways if WAYS[way]]
    names = range(1, max(options.readers) + 1)
    readers = [Part("cb", "read", str(options.readers_at / str(n)), ways, f"r{n}") for n in names]
    trainer = Part("ca", "train", str(options.trainer), ways, str(options.mib))
    rows: list[dict[str, Any]] = []
    try:
        for row in _measured(trainer, readers, options):
            rows.append(row)
            options.out.write_text(json.dumps({"mib": options.mib, "share": SHARE, "rows": rows}))
    finally:
        for part in (trainer, *readers):
            part.close()
        for daemon in daemons:
            daemon.terminate()
        _print(rows)


def _measured(
    trainer: Part, readers: Sequence[Part], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield each round. The most readers come first, so that fewer of them still have the step before."""
    steps = itertools.count(1)
    for number, rate in enumerate(options.rates):
        _limit(0)
        for _ in range(1 if number else _WARM):
            _round(trainer, readers, options.ways, next(steps))
        _limit(rate)
        for count in sorted(options.readers, reverse=True):
            for _ in range(options.rounds):
                yield {
                    "rate": rate,
                    "readers": count,
                    **_round(trainer, readers[:count], options.ways, next(steps)),
                }


def _round(trainer: Part, readers: Sequence[Part], ways: Sequence[str], step: int) -> dict[str, Any]:
    trainer.ask("train", step)
    trainer.answer()
    return {way: _sync(trainer, readers, way, step) for way in ways}


def _daemon(job: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "syncd", "watch", str(job), "--keep-last", "3", "--log-level", "error"]
    return subprocess.Popen(["nsenter", "--net=/run/netns/ca", *command])


def _limit(rate: float) -> None:
    """Let each link carry so many GB/s each way; any number if it is 0."""
    shape = ["tbf", "rate", f"{int(rate * 8000)}mbit", "burst", "4mb", "latency", "100ms"]
    for client in ("a", "b"):
        for where in ([], ["-n", f"c{client}"]):
            device = "eth0" if where else f"v{client}"
            command = [
                "tc",
                *where,
                "qdisc",
                "replace",
                "dev",
                device,
                "root",
                *(shape if rate else ["pfifo"]),
            ]
            subprocess.run(command, check=True)


def _sync(trainer: Part, readers: Sequence[Part], way: str, step: int) -> dict[str, Any]:
    """Have a step stored and read; return the seconds until it is durable, seen and read, and the bytes."""
    before, began = _bytes(), time.monotonic()
    trainer.ask(way, step)
    if WAYS[way]:
        _ask_all(readers, way, step)
    form, stored = trainer.answer().split()
    if not WAYS[way]:
        _ask_all(readers, way, step)
    answers = [[float(word) for word in reader.answer().split()] for reader in readers]
    after = _bytes()
    seen, read, processor = map(max, zip(*answers, strict=True))
    times = {"stored": float(stored) - began, "seen": seen - began, "seconds": read - began}
    return {"form": form, **times, "cpu": processor, **{key: after[key] - before[key] for key in after}}


def _ask_all(readers: Sequence[Part], *words: object) -> None:
    for reader in readers:
        reader.ask(*words)


def _bytes() -> dict[str, int]:
    """Return the bytes that the server has received and sent."""
    found = {"received": "rx_bytes", "sent": "tx_bytes"}
    return {key: _counter("va", name) + _counter("vb", name) for key, name in found.items()}


def _counter(link: str, name: str) -> int:
    return int(Path(f"/sys/class/net/{link}/statistics/{name}").read_text())


def _print(rows: Sequence[dict[str, Any]]) -> None:
    heads = "link, GB/s | readers | way | stored | seen | read, s | full = 1 | MB in | MB out | CPU, s | form"
    print(f"| {heads} |\n|" + "---|" * 11)
    for rate, count in sorted({(row["rate"], row["readers"]) for row in rows}):
        chosen = [row for row in rows if (row["rate"], row["readers"]) == (rate, count)]
        for way in [way for way in WAYS if way in rows[0]]:
            print(f"| {rate:g} | {count} | {way} |", _cells(chosen, way), "|")


def _cells(rows: Sequence[dict[str, Any]], way: str) -> str:
    def middle(key: str, scale: float = 1) -> float:
        return float(statistics.median(row[way][key] for row in rows)) * scale

    ratio = statistics.median(row["full"]["seconds"] / row[way]["seconds"] for row in rows)
    seconds = sorted(row[way]["seconds"] for row in rows)
    cells = [f"{middle('stored'):.2f}", f"{middle('seen'):.2f}"]
    cells += [f"{middle('seconds'):.2f} ({seconds[0]:.2f}-{seconds[-1]:.2f})", f"{ratio:.1f}"]
    cells += [f"{middle('received', 1e-6):.1f}", f"{middle('sent', 1e-6):.1f}", f"{middle('cpu'):.2f}"]
    return " | ".join([*cells, "/".join(sorted({row[way]["form"] for row in rows}))])


def train(place: str, ways: Sequence[str], mib: int) -> None:
    """Store steps in either job when asked to, and answer with the form of each."""
    import torch  # noqa: PLC0415
    from support.delta_saves import form_of  # noqa: PLC0415

    from syncd.client.client import Client  # noqa: PLC0415
    from syncd.jobfile.sections import SyncSection  # noqa: PLC0415
    from syncd.protocol.layout import Job  # noqa: PLC0415
    from syncd.transports.base import SendContext, StepContent  # noqa: PLC0415
    from syncd.transports.filesystem.send import FilesystemSender  # noqa: PLC0415
    from syncd.transports.host_memory import unlimited  # noqa: PLC0415
    from syncd.transports.ranks import Ranks  # noqa: PLC0415

    torch.set_num_threads(1)
    words = torch.randn(mib << 19).mul_(0.02).bfloat16().view(torch.int16)
    weights = {
        f"p{number}": part.view(torch.bfloat16) for number, part in enumerate(torch.split(words, 1 << 22))
    }
    jobs, senders = {}, {}
    for way in filter(WAYS.get, ways):
        jobs[way] = Job.at(f"{place}/{way}")
        client = Client.open(jobs[way].root, "trainer")
        settings = SyncSection(delta=WAYS[way], keyframe_every=1000, max_chain_bytes=1 << 40)
        senders[way] = FilesystemSender.open(
            SendContext(jobs[way], Ranks(), settings, client, memory=unlimited())
        )
    _answer("ready")
    for line in sys.stdin:
        way, step = line.split()
        if way == "train":
            words[torch.randint(len(words), (int(len(words) * SHARE),))] += 1
            _answer(way)
        elif way in jobs:
            senders[way].send(int(step), uuid.uuid4().hex, StepContent(weights.items, {"config.json": b"{}"}))
            senders[way].wait()
            stored = time.monotonic()
            _answer(form_of(jobs[way], int(step)), stored)
        else:
            _write(Path(place, way, step), words.numpy().view("u1").data)
            _answer("file", time.monotonic())
    os._exit(0)


def _write(path: Path, data: memoryview) -> None:
    for old in path.parent.iterdir():
        old.unlink()
    with path.open("xb", buffering=0) as file:
        for begin in range(0, len(data), _PIECE):
            file.write(data[begin : begin + _PIECE])
        os.fsync(file.fileno())


def read(place: str, ways: Sequence[str], name: str) -> None:
    """Fetch steps of either job when asked to, and answer with the time at which each was there."""
    from support.fake_hook import FakeEngine, FakeHook  # noqa: PLC0415

    from explorer_hooks.follower.policy import FollowOptions  # noqa: PLC0415
    from explorer_hooks.follower.versions import Fetcher  # noqa: PLC0415
    from syncd.client.client import Client  # noqa: PLC0415
    from syncd.protocol.local_disk import SystemClock  # noqa: PLC0415
    from syncd.transports.filesystem.directory import LoadTimings  # noqa: PLC0415

    clients, fetchers = {}, {}
    for way in filter(WAYS.get, ways):
        clients[way] = client = Client.open(f"{place}/{way}", "explorer", name)
        options = FollowOptions(stage=f"/dev/shm/stage/{name}/{way}")
        os.makedirs(options.stage or "", exist_ok=True)
        fetchers[way] = Fetcher(client, FakeHook(FakeEngine()), options, lambda: False, lambda *_, **__: None)
    _answer("ready")
    for line in sys.stdin:
        way, step = line.split()[0], int(line.split()[1])
        if way not in clients:
            _answer(*_copied(Path(place, way, str(step)), Path(f"/dev/shm/stage/{name}/{way}.copy")))
            continue
        version = clients[way].wait_for(partial(_published, clients[way], step), _LONG)
        seen, processor = time.monotonic(), time.process_time()
        timings = LoadTimings(SystemClock())
        with closing(fetchers[way].fetch(version, timings)):
            _answer(seen, time.monotonic(), time.process_time() - processor)
        clients[way].confirm(version)
        clients[way].describe({"loaded": {"step": step}, "timings": dict(timings)})  # as followers do
    os._exit(0)


def _copied(source: Path, target: Path) -> tuple[float, float, float]:
    """Copy a file; return when that began and ended, and the processor's seconds."""
    began, processor = time.monotonic(), time.process_time()
    with source.open("rb", buffering=0) as file, target.open("wb", buffering=0) as copy:
        while piece := file.read(_PIECE):
            copy.write(piece)
    ended = time.monotonic(), time.process_time()
    target.unlink()
    return began, ended[0], ended[1] - processor


def _answer(*words: object) -> None:
    print(_ANSWER, *words, flush=True)


def _published(client: Any, step: int) -> Any:
    version = client.latest_version()
    return version if version is not None and version.step == step else None


if __name__ == "__main__":
    main()
