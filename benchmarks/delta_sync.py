"""Whole syncs by full files, by deltas and by what others ship: seconds, and bytes at the file server.

    python benchmarks/delta_sync.py DIR OUT [--mounts DIR] [--mib 128] [--readers 8,4,1] [--rates 0.1,1]

The trainer's real sender stores each step in two jobs, one with `delta = "off"`, in turn; readers fetch it into a
stage of their own, as followers do. A sync begins with the save and ends when the last reader has a directory that is
checked. The weights go there and back by one synthetic step of AdamW at 1e-6, which changes 1.5 % of them.

`xor` and `coo` store the same change in a file of 8 MiB tiles, as `delta.py` encodes them: XOR with zstd 1, and int32
positions with the values. Each reader applies it in place to a copy of its own and compares the digest of each tile.
`copy` is what the place itself can do: the same bytes written, synced, and read by all readers at once. These three
have nothing of syncd: no manifest, daemon or lease, and a reader is told at once that the file is there. `auto` is a
job in which the trainer chooses; it says in its log why.

Without `--mounts` all is in DIR, on this host: no link has a limit, and nobody counts its bytes.
`delta_sync_on_nfs.sh` runs it in the NFS bed: DIR is the trainer's client, each reader has a mount of its own on
client B, and this process is on the server, where it limits what both links carry and counts their bytes. A rate of 0
is a link without a limit.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from delta_sync_parts import ANSWER, WAYS

PARTS = Path(__file__).with_name("delta_sync_parts.py")

_WARM = 3
"""Rounds that do not count, on links without a limit: the first two steps of a trainer are whole."""

_LONG = 300.0


def main() -> None:
    """Measure every rate and number of readers; print a table and write JSON."""
    options = _options()
    bed = Bed(options.mounts) if options.mounts else Host(options.place)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as stage:
        run(options, bed, stage)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("place", type=Path, help="a directory for the jobs, as the trainer has it")
    parser.add_argument("out", type=Path, help="the figures of each round, JSON")
    parser.add_argument("--mounts", type=Path, help="where each reader has a mount of its own: 1, 2, ...")
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--weights", help="a file with the weights before and after a step, instead of --mib")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--readers", type=_list_of(int), default="8,4,1")
    parser.add_argument("--rates", type=_list_of(float), default="0", help="GB/s of each link; 0: no limit")
    parser.add_argument("--ways", type=_list_of(str), default="copy,full,delta,xor,coo", help="also auto")
    return parser.parse_args()


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(one) for one in text.split(",")]


class Host:
    """Everything on this host, in one directory.

    Args:
        place: The directory.
    """

    def __init__(self, place: Path) -> None:
        self._place = place

    def on(self, _client: str) -> list[str]:
        """Return what runs a command where a client is."""
        return []

    def seen_by(self, _reader: int) -> Path:
        """Return the directory as a reader has it."""
        return self._place

    def limit(self, rate: float) -> None:
        """Let each link carry so many GB/s each way; any number if it is 0."""
        if rate:
            raise SystemExit("there is no link to limit on one host: --rates 0")

    def counted(self) -> dict[str, int]:
        """Return the bytes that the server has received and sent."""
        return {}


class Bed(Host):
    """The server of the NFS bed, with the trainer on client A and the readers on client B.

    Args:
        place: Where each reader has a mount of its own: 1, 2, ...
    """

    def on(self, client: str) -> list[str]:
        """Return what runs a command where a client is."""
        return ["nsenter", f"--net=/run/netns/c{client}"]

    def seen_by(self, reader: int) -> Path:
        """Return the directory as a reader has it."""
        return self._place / str(reader)

    def limit(self, rate: float) -> None:
        """Let each link carry so many GB/s each way; any number if it is 0."""
        tbf = ["tbf", "rate", f"{int(rate * 8000)}mbit", "burst", "4mb", "latency", "100ms"]
        shape = tbf if rate else ["pfifo"]
        for client in ("a", "b"):
            for where, device in (([], f"v{client}"), (["-n", f"c{client}"], "eth0")):
                command = ["tc", *where, "qdisc", "replace", "dev", device, "root", *shape]
                subprocess.run(command, check=True)

    def counted(self) -> dict[str, int]:
        """Return the bytes that the server has received and sent."""
        found = {"received": "rx_bytes", "sent": "tx_bytes"}
        return {key: _counter("va", name) + _counter("vb", name) for key, name in found.items()}


def _counter(link: str, name: str) -> int:
    return int(Path(f"/sys/class/net/{link}/statistics/{name}").read_text())


class Part:
    """A process that does one line of work at a time and answers each with a line.

    Args:
        command: What starts it.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *words: object) -> None:
        """Give it something to do."""
        assert self._process.stdin
        print(*words, file=self._process.stdin, flush=True)

    def answer(self) -> list[str]:
        """Wait until it is done, and return what it says; other lines are its log."""
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return line.removeprefix(ANSWER).split()
            print(line, end="", file=sys.stderr)
        raise RuntimeError(f"a part ended with {self._process.wait()}")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(_LONG)


def run(options: argparse.Namespace, bed: Host, stage: str) -> None:
    """Start the processes, and measure."""
    ways = ",".join(options.ways)
    for way in options.ways:
        (options.place / way).mkdir()
    daemons = [_daemon(bed, options.place / way) for way in options.ways if WAYS[way]]

    def part(client: str, *arguments: object) -> Part:
        return Part([*bed.on(client), sys.executable, str(PARTS), *map(str, arguments)])

    readers = [
        part("b", "read", bed.seen_by(n), ways, f"{stage}/r{n}") for n in range(1, max(options.readers) + 1)
    ]
    trainer = part("a", "train", options.place, ways, options.weights or options.mib)
    rows: list[dict[str, Any]] = []
    try:
        for one in (trainer, *readers):
            one.answer()
        for row in _measured(bed, trainer, readers, options):
            rows.append(row)
            options.out.write_text(json.dumps({"mib": options.mib, "rows": rows}))
    finally:
        for one in (trainer, *readers):
            one.close()
        for daemon in daemons:
            daemon.terminate()
        _print(rows)


def _daemon(bed: Host, job: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "syncd", "watch", str(job), "--keep-last", "3", "--log-level", "error"]
    return subprocess.Popen([*bed.on("a"), *command])


def _measured(
    bed: Host, trainer: Part, readers: Sequence[Part], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield each round. The most readers come first, so that fewer of them still have the step before."""
    steps = itertools.count(1)
    for number, rate in enumerate(options.rates):
        bed.limit(0)
        for _ in range(1 if number else _WARM):
            _round(bed, trainer, readers, options.ways, next(steps), "whole")
        bed.limit(rate)
        for count in sorted(options.readers, reverse=True):
            for _ in range(options.rounds):
                found = _round(bed, trainer, readers[:count], options.ways, next(steps))
                yield {"rate": rate, "readers": count, **found}


def _round(
    bed: Host, trainer: Part, readers: Sequence[Part], ways: Sequence[str], step: int, form: str = "changes"
) -> dict[str, Any]:
    trainer.ask("train", step, form)
    trainer.answer()
    return {way: _sync(bed, trainer, readers, way, (way, step, form)) for way in ways}


def _sync(
    bed: Host, trainer: Part, readers: Sequence[Part], way: str, asked: tuple[object, ...]
) -> dict[str, Any]:
    """Have a step stored and read; return the seconds until it is durable, seen and read, and the bytes."""
    before, began = bed.counted(), time.monotonic()
    trainer.ask(*asked)
    if WAYS[way]:
        _ask_all(readers, asked)
    form, stored, size = trainer.answer()
    if not WAYS[way]:
        _ask_all(readers, asked)
    answers = [[float(word) for word in reader.answer()] for reader in readers]
    after = bed.counted()
    seen, read, processor = map(max, zip(*answers, strict=True))
    times = {"stored": float(stored) - began, "seen": seen - began, "seconds": read - began}
    carried = {key: after[key] - before[key] for key in after}
    return {"form": form, **times, "cpu": processor, "size": int(size), **carried}


def _ask_all(readers: Sequence[Part], words: Sequence[object]) -> None:
    for reader in readers:
        reader.ask(*words)


def _print(rows: Sequence[dict[str, Any]]) -> None:
    heads = "GB/s | readers | way | stored | seen | read, s | full = 1 | MB stored | MB in | MB out | CPU, s | form"
    print(f"| {heads} |\n|" + "---|" * 12)
    for rate, count in sorted({(row["rate"], row["readers"]) for row in rows}):
        chosen = [row for row in rows if (row["rate"], row["readers"]) == (rate, count)]
        for way in [way for way in WAYS if way in rows[0]]:
            print(f"| {rate:g} | {count} | {way} |", _cells(chosen, way), "|")


def _cells(rows: Sequence[dict[str, Any]], way: str) -> str:
    def middle(key: str, scale: float = 1) -> float:
        return float(statistics.median(row[way].get(key, 0) for row in rows)) * scale

    ratio = statistics.median(row["full"]["seconds"] / row[way]["seconds"] for row in rows)
    seconds = sorted(row[way]["seconds"] for row in rows)
    cells = [f"{middle('stored'):.2f}", f"{middle('seen'):.2f}"]
    cells += [f"{middle('seconds'):.2f} ({seconds[0]:.2f}-{seconds[-1]:.2f})", f"{ratio:.1f}"]
    cells += [f"{middle(key, 1e-6):.1f}" for key in ("size", "received", "sent")]
    return " | ".join([*cells, f"{middle('cpu'):.2f}", "/".join(sorted({row[way]["form"] for row in rows}))])


if __name__ == "__main__":
    main()
