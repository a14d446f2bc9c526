"""How long a delta takes from the publish in one job to the publish in its mirror, and which bytes that moves.

    python benchmarks/mirror.py [--versions 40] [--poll 0.25] [--direct] [--json FILE]

Two real mirrors with moto's S3 between them (`make test-mirror` installs moto), or with --direct one from job to job.
All runs on this host, so that both publishes have one clock. A version comes every other second.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.cli import environment
from support.mirrors import Trainer
from support.s3 import environment_of, running_s3

from syncd.protocol.layout import Job
from syncd.protocol.manifest import read_manifest
from syncd.protocol.version import Version, read_version

KEYFRAMES = 10
"""Each version of such a number is stored whole, and not measured."""

_PATIENCE = 120.0


def main() -> None:
    """Measure, and print or write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--versions", type=int, default=40)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two versions")
    parser.add_argument("--poll", type=float, default=0.25)
    parser.add_argument("--direct", action="store_true", help="from job to job, without a store")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="syncd-mirror-") as place:
        figures = _measured(place, options)
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(f"{text}\n")


def _measured(place: str, options: argparse.Namespace) -> dict[str, Any]:
    for name in ("job", "far"):
        os.mkdir(f"{place}/{name}")
    trainer, far = Trainer(Job.at(f"{place}/job")), Job.at(f"{place}/far")
    trainer.model(1)
    with _mirrors(place, options) as logs:
        _wait(trainer, far)
        seconds, stored = [], 0
        for step in range(2, options.versions + 2):
            time.sleep(options.every)
            if step % KEYFRAMES == 0:
                trainer.model(step)
                _wait(trainer, far)
                continue
            trainer.delta(step, step - 1)
            seconds.append(_wait(trainer, far) - _version(trainer.job).published_at)
            stored += read_manifest(trainer.job.disk, trainer.job.step(step)).size
    whole = (
        read_manifest(trainer.job.disk, trainer.job.step(trainer.pair[1])).whole_size if trainer.pair else 0
    )
    sent = {end: _sent(log) for end, log in logs.items()}
    ordered = sorted(seconds)
    return {
        "way": "job to job" if options.direct else "job to S3 (moto) to job",
        "poll": options.poll,
        "deltas": len(ordered),
        "load": os.getloadavg()[0],
        "seconds_p50": round(statistics.median(ordered), 3),
        "seconds_p95": round(ordered[int(len(ordered) * 0.95)], 3),
        "seconds_most": round(ordered[-1], 3),
        "delta_bytes": stored,
        "whole_bytes": whole * len(ordered),
        "sent_bytes": sent,
    }


@contextlib.contextmanager
def _mirrors(place: str, options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Run the mirrors, and yield the file of each one's log."""
    with contextlib.ExitStack() as ends:
        near, far, store = f"{place}/job", f"{place}/far", "s3://weights/job"
        if options.direct:
            pairs, more = {"direct": (near, far)}, {}
        else:
            more = environment_of(ends.enter_context(running_s3()))
            pairs = {"push": (near, store), "pull": (store, far)}
        logs = {end: f"{place}/{end}.log" for end in pairs}
        for end, places in pairs.items():
            command = [sys.executable, "-m", "syncd", "mirror", *places, "--poll", str(options.poll)]
            with open(logs[end], "wb") as log:
                process = subprocess.Popen(command, env={**environment(), **more}, stderr=log)
            ends.callback(process.wait)
            ends.callback(process.terminate)
        yield logs


def _version(job: Job) -> Version:
    version = read_version(job)
    assert version is not None
    return version


def _wait(trainer: Trainer, far: Job) -> float:
    """Wait until the far job has published what the near one has, and return when it did."""
    ends = time.monotonic() + _PATIENCE
    while (version := read_version(far)) is None or version.pair != trainer.pair:
        if time.monotonic() >= ends:
            raise SystemExit("the version does not arrive")
        time.sleep(0.01)
    return version.published_at


def _sent(log: str) -> int:
    """Return the bytes of deltas that a mirror has sent, by its log."""
    with open(log, encoding="utf-8") as lines:
        events = [json.loads(line) for line in lines]
    return sum(
        one["sent"] for one in events if one["event"] == "mirror_step_copied" and one["kind"] == "delta"
    )


if __name__ == "__main__":
    main()
