"""Whole syncs by full files and by deltas over a link of limited bandwidth: seconds, and bytes at the file server.

    python benchmarks/delta_sync.py run A READERS OUT [--mib 64] [--rounds 3] [--readers 1,4,8] [--rates 0.1,1]

`delta_sync_on_nfs.sh` runs it in the NFS bed: A is the trainer's client, each reader has a mount of its own on client
B, and this process is on the server, where it limits what both links carry and counts their bytes. The trainer's real
sender stores each step in two jobs, one with `delta = "off"`, in turn; readers fetch it into a stage of their own, as
followers do. A sync begins with the save and ends when the last reader has a directory that is checked. Changes:
1.5 % of the values, one unit in the last place.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

WAYS = ("full", "delta")
SHARE = 0.015
_WARM = 2
"""Rounds that do not count: the first two steps of a trainer are whole."""

_LONG = 300.0
_ANSWER = "answer: "


def main() -> None:
    """Run the whole, or one of its processes."""
    if sys.argv[1] == "train":
        train(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "read":
        read(*sys.argv[2:])
    else:
        run(_options())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("trainer", type=Path, help="the export as the trainer's client has it")
    parser.add_argument("readers_at", type=Path, help="where each reader has a mount of its own: 1, 2, ...")
    parser.add_argument("out", type=Path)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--readers", default="1,4,8")
    parser.add_argument("--rates", default="0.1,1", help="GB/s of each link")
    return parser.parse_args()


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
    counts = [int(one) for one in options.readers.split(",")]
    for way in WAYS:
        (options.trainer / way).mkdir()
    daemons = [_daemon(options.trainer / way) for way in WAYS]
    readers = [
        Part("cb", "read", str(options.readers_at / str(n)), f"r{n}") for n in range(1, max(counts) + 1)
    ]
    trainer = Part("ca", "train", str(options.trainer), str(options.mib))
    rows, step = [], 0
    try:
        for rate in options.rates.split(","):
            _limit(float(rate))
            for count in counts:
                for round_ in range(-_WARM, options.rounds):
                    step += 1
                    # Every reader takes part in the rounds that do not count, so that all have the step before.
                    chosen = readers if round_ < 0 else readers[:count]
                    found = {way: _sync(trainer, chosen, way, step) for way in WAYS}
                    if round_ >= 0:
                        rows.append({"rate": float(rate), "readers": count, **found})
    finally:
        for part in (trainer, *readers):
            part.close()
        for daemon in daemons:
            daemon.terminate()
    options.out.write_text(json.dumps(rows))
    _print(rows)


def _daemon(job: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "syncd", "watch", str(job), "--keep-last", "3", "--log-level", "error"]
    return subprocess.Popen(["nsenter", "--net=/run/netns/ca", *command])


def _limit(rate: float) -> None:
    """Let each link carry so many GB/s each way."""
    bits = f"{int(rate * 8000)}mbit"
    for client in ("a", "b"):
        for where in ([], ["-n", f"c{client}"]):
            device = "eth0" if where else f"v{client}"
            shape = ["root", "tbf", "rate", bits, "burst", "4mb", "latency", "100ms"]
            subprocess.run(["tc", *where, "qdisc", "replace", "dev", device, *shape], check=True)


def _sync(trainer: Part, readers: Sequence[Part], way: str, step: int) -> dict[str, Any]:
    before, began = _bytes(), time.monotonic()
    trainer.ask(way, step)
    for reader in readers:
        reader.ask(way, step)
    form = trainer.answer()
    ended = max(float(reader.answer()) for reader in readers)
    after = _bytes()
    return {"seconds": ended - began, "form": form, **{key: after[key] - before[key] for key in after}}


def _bytes() -> dict[str, int]:
    """Return the bytes that the server has received and sent."""
    found = {"received": "rx_bytes", "sent": "tx_bytes"}
    return {key: _counter("va", name) + _counter("vb", name) for key, name in found.items()}


def _counter(link: str, name: str) -> int:
    return int(Path(f"/sys/class/net/{link}/statistics/{name}").read_text())


def _print(rows: Sequence[dict[str, Any]]) -> None:
    print(
        "| link | readers | full, s | delta, s | ratio | full, MB in and out | delta, MB in and out |\n|"
        + "---|" * 7
    )
    for rate, count in sorted({(row["rate"], row["readers"]) for row in rows}):
        chosen = [row for row in rows if (row["rate"], row["readers"]) == (rate, count)]
        full, delta = ([row[way] for row in chosen] for way in WAYS)
        ratios = [row["full"]["seconds"] / row["delta"]["seconds"] for row in chosen]
        cells = [
            f"{rate:g} GB/s",
            str(count),
            _median(full),
            _median(delta),
            f"{statistics.median(ratios):.1f}",
        ]
        print("|", " | ".join([*cells, _traffic(full), _traffic(delta)]), "|", {one["form"] for one in delta})


def _median(syncs: Sequence[dict[str, Any]]) -> str:
    return f"{statistics.median(one['seconds'] for one in syncs):.2f}"


def _traffic(syncs: Sequence[dict[str, Any]]) -> str:
    middle = (statistics.median(one[key] for one in syncs) / 1e6 for key in ("received", "sent"))
    return ", ".join(f"{one:.1f}" for one in middle)


def train(place: str, mib: int) -> None:
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
    for way in WAYS:
        jobs[way] = Job.at(f"{place}/{way}")
        client = Client.open(jobs[way].root, "trainer")
        settings = SyncSection(
            delta="off" if way == "full" else "on", keyframe_every=1000, max_chain_bytes=1 << 40
        )
        senders[way] = FilesystemSender.open(
            SendContext(jobs[way], Ranks(), settings, client, memory=unlimited())
        )
    _answer("ready")
    for line in sys.stdin:
        way, step = line.split()
        if way == WAYS[0]:
            words[torch.randint(len(words), (int(len(words) * SHARE),))] += 1
        senders[way].send(int(step), uuid.uuid4().hex, StepContent(weights.items, {"config.json": b"{}"}))
        senders[way].wait()
        _answer(form_of(jobs[way], int(step)))
    os._exit(0)


def read(place: str, name: str) -> None:
    """Fetch steps of either job when asked to, and answer with the time at which each was there."""
    from support.fake_hook import FakeEngine, FakeHook  # noqa: PLC0415

    from explorer_hooks.follower.policy import FollowOptions  # noqa: PLC0415
    from explorer_hooks.follower.versions import Fetcher  # noqa: PLC0415
    from syncd.client.client import Client  # noqa: PLC0415
    from syncd.protocol.local_disk import SystemClock  # noqa: PLC0415
    from syncd.transports.filesystem.directory import LoadTimings  # noqa: PLC0415

    clients, fetchers = {}, {}
    for way in WAYS:
        clients[way] = client = Client.open(f"{place}/{way}", "explorer", name)
        options = FollowOptions(stage=f"/dev/shm/stage/{name}/{way}")
        os.makedirs(options.stage or "", exist_ok=True)
        fetchers[way] = Fetcher(client, FakeHook(FakeEngine()), options, lambda: False, lambda *_, **__: None)
    _answer("ready")
    for line in sys.stdin:
        way, step = line.split()[0], int(line.split()[1])
        version = clients[way].wait_for(partial(_published, clients[way], step), _LONG)
        with closing(fetchers[way].fetch(version, LoadTimings(SystemClock()))):
            _answer(time.monotonic())
        clients[way].confirm(version)
    os._exit(0)


def _answer(what: object) -> None:
    print(f"{_ANSWER}{what}", flush=True)


def _published(client: Any, step: int) -> Any:
    version = client.latest_version()
    return version if version is not None and version.step == step else None


if __name__ == "__main__":
    main()
