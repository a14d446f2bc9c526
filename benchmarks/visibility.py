"""How long a version takes to be seen on a mount without events: from the marker to the version, then to a follower.

    python benchmarks/visibility.py write JOB --steps 60 --every 2 --fill 0.3 --seed 1 --out write.json
    python benchmarks/visibility.py follow JOB LAST --out follow.json
    python benchmarks/visibility.py table NAME=WRITE,OBSERVED,FOLLOW... [--json FILE]

`visibility_on_nfs.sh` runs all of it in the NFS bed, whose hosts share one clock. tests/programs/observe.py, on the
file server, says when marker and version were replaced there.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.jobs import shard_bytes

from syncd.client.client import Client
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.writer import StepWriter


class _Timed(LocalDisk):
    """Notes when it began its last rename."""

    renamed_at = 0.0

    def rename(self, source: str, target: str) -> None:
        self.renamed_at = time.monotonic()
        super().rename(source, target)


def main() -> None:
    """Run one part."""
    options = _options()
    if options.part == "write":
        _keep(options.out, _write(options))
    elif options.part == "follow":
        _keep(options.out, _follow(options.job, options.last))
    else:
        _table(options.runs, options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    write = parts.add_parser("write")
    write.add_argument("job")
    write.add_argument("--steps", type=int, default=60)
    write.add_argument("--every", type=float, default=2.0, help="seconds between two steps")
    write.add_argument("--spread", type=float, default=0.1, help="by how much of that it differs")
    write.add_argument(
        "--fill", type=float, default=0.3, help="seconds in which a step's two shards are written"
    )
    write.add_argument("--seed", type=int, default=1)
    write.add_argument("--out", required=True)
    follow = parts.add_parser("follow")
    follow.add_argument("job")
    follow.add_argument("last", type=int)
    follow.add_argument("--out", required=True)
    table = parts.add_parser("table")
    table.add_argument("runs", nargs="+")
    table.add_argument("--json")
    return parser.parse_args()


def _keep(path: str, document: Any) -> None:
    Path(path).write_text(json.dumps(document))


def _write(options: argparse.Namespace) -> list[tuple[int, float]]:
    """Write steps as a trainer does; return when the rename of each marker began."""
    disk, pauses = _Timed(), random.Random(options.seed)
    job, began = Job.at(options.job, disk=disk), []
    for step in range(1, options.steps + 1):
        time.sleep(
            max(options.every * pauses.uniform(1 - options.spread, 1 + options.spread) - options.fill, 0)
        )
        writer = StepWriter(job, step, 2, f"bench{step}")
        writer.begin()
        for rank in (1, 2):
            content = shard_bytes({f"layer.{rank}.weight": (64, 64)}, step)
            shard = writer.write(f"actor/model-{rank:05d}-of-00002.safetensors", content, tensors=1)
            time.sleep(options.fill / 2)
            writer.receipt(rank, [shard])
        writer.seal()
        writer.announce()
        began.append((step, disk.renamed_at))
    return began


def _follow(path: str, last: int) -> dict[str, Any]:
    """Wait for versions as a follower does; return when each was noticed, and the CPU time of a second."""
    seen, current, cpu, started = [], -1, time.process_time(), time.monotonic()
    with Client.open(path, "explorer", "bench") as client:
        while current < last:
            version = client.wait_for(partial(_newer, client, current), 600.0)
            current = version.step
            seen.append((current, time.monotonic()))
            client.confirm(version)
    share = (time.process_time() - cpu) / (time.monotonic() - started)
    return {"seen": seen, "cpu_percent": round(share * 100, 2)}


def _newer(client: Client, current: int) -> Any:
    version = client.latest_version()
    return version if version is not None and version.step > current else None


def _table(runs: list[str], out: str | None) -> None:
    found = {}
    for run in runs:
        name, _, files = run.partition("=")
        found[name] = _figures(*(Path(one) for one in files.split(",")))
        print(f"{name}: {json.dumps(found[name])}")
    if out:
        _keep(out, found)


def _figures(written: Path, observed: Path, followed: Path) -> dict[str, Any]:
    notes = [json.loads(line) for line in observed.read_text().splitlines()]
    versions: dict[int, float] = {}
    for note in notes:
        if note["file"] == "version":
            versions.setdefault(
                note["step"], note["at"]
            )  # the daemon replaces the file for other reasons too
    follow = json.loads(followed.read_text())
    published = [_first(versions.items(), step, at) for step, at in json.loads(written.read_text())]
    noticed = [_first(follow["seen"], step, at) for step, at in versions.items()]
    return {
        "marker to version": _spread(published),
        "version to follower": _spread(noticed),
        "follower's CPU": f"{follow['cpu_percent']} %",
    }


def _first(events: Iterable[Any], step: int, since: float) -> float | None:
    """Return the seconds until a step or a newer one; whoever noted `since` may have been a little late."""
    return next((max(at - since, 0.0) for other, at in events if other >= step), None)


def _spread(seconds: list[float | None]) -> str:
    known = [one * 1e3 for one in seconds if one is not None]
    cuts = statistics.quantiles(known, n=100, method="inclusive")
    return f"p50 {cuts[49]:.0f}, p99 {cuts[98]:.0f}, max {max(known):.0f} ms of {len(known)}"


if __name__ == "__main__":
    main()
