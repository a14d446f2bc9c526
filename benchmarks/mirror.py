"""How long a delta takes from the publish in one job to the publish in its mirror, and which bytes that moves.

    python benchmarks/mirror.py [--versions 40] [--poll S] [--direct] [--json FILE]

Two real mirrors with moto's S3 between them (`make test-mirror` installs moto), or with --direct one from job to job.
All runs on this host, so that both publishes have one clock. A version comes every other second. The phases are those
that the mirrors' logs tell; what comes before `noticed` is the poll.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import report
from support.cli import environment
from support.mirrors import Trainer
from support.s3 import environment_of, running_s3

from syncd.protocol.layout import Job
from syncd.protocol.manifest import read_manifest
from syncd.protocol.version import Version, read_version

KEYFRAMES = 10
"""Each version of such a number is stored whole, and not measured."""

REQUESTS = "requests"

_PATIENCE = 120.0
_REQUEST = re.compile(r'"([A-Z]+) (\S+) HTTP[^"]*" (\d+)')


def main() -> None:
    """Measure, and print or write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--versions", type=int, default=40)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two versions")
    parser.add_argument("--poll", type=float, help="of the mirrors; their own unless given")
    parser.add_argument("--direct", action="store_true", help="from job to job, without a store")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="syncd-mirror-") as place:
        figures = _measured(place, options)
    print(json.dumps(figures, indent=2))
    if options.json:
        report.keep(options.json, figures)


def _measured(place: str, options: argparse.Namespace) -> dict[str, Any]:
    for name in ("job", "far"):
        os.mkdir(f"{place}/{name}")
    load = os.getloadavg()[0]
    trainer, far = Trainer(Job.at(f"{place}/job")), Job.at(f"{place}/far")
    trainer.model(1)
    with _mirrors(place, options) as logs:
        _wait(trainer, far)
        seconds, stored, phases = [], 0, dict[str, list[float]]()
        for step in range(2, options.versions + 2):
            time.sleep(options.every)
            if step % KEYFRAMES == 0:
                trainer.model(step)
                _wait(trainer, far)
                continue
            trainer.delta(step, step - 1)
            there, here = _wait(trainer, far), _version(trainer.job).published_at
            seconds.append(there - here)
            for name, took in _phases(logs, step, here, there).items():
                phases.setdefault(name, []).append(took)
            stored += read_manifest(trainer.job.disk, trainer.job.step(step)).size
    whole = (
        read_manifest(trainer.job.disk, trainer.job.step(trainer.pair[1])).whole_size if trainer.pair else 0
    )
    sent = {end: _sent(log) for end, log in logs.items() if end != REQUESTS}
    ordered = sorted(seconds)
    return {
        "way": "job to job" if options.direct else "job to S3 (moto) to job",
        "poll": options.poll,
        "deltas": len(ordered),
        "machine": report.machine(Path(place)),
        "load": load,
        "seconds_p50": round(statistics.median(ordered), 3),
        "seconds_p95": round(ordered[int(len(ordered) * 0.95)], 3),
        "seconds_most": round(ordered[-1], 3),
        "phases_p50": {name: round(statistics.median(each), 3) for name, each in phases.items()},
        "requests": _requests(logs.get(REQUESTS), len(ordered)),
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
            requests = f"{place}/requests.log"
            more = environment_of(ends.enter_context(running_s3(log=requests)))
            pairs = {"push": (near, store), "pull": (store, far)}
        logs = {end: f"{place}/{end}.log" for end in pairs}
        poll = ["--poll", str(options.poll)] if options.poll else []
        for end, places in pairs.items():
            command = [sys.executable, "-m", "syncd", "mirror", *places, *poll, "--log-format", "json"]
            with open(logs[end], "wb") as log:
                process = subprocess.Popen(command, env={**environment(), **more}, stderr=log)
            ends.callback(process.wait)
            ends.callback(process.terminate)
        yield logs if options.direct else {**logs, REQUESTS: requests}


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


def _events(log: str) -> list[dict[str, Any]]:
    with open(log, encoding="utf-8") as lines:
        told = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{**one, "at": datetime.fromisoformat(one["timestamp"]).timestamp()} for one in told]


def _sent(log: str) -> int:
    """Return the bytes of deltas that a mirror has sent, by its log."""
    return sum(
        one["sent"] for one in _events(log) if one["event"] == "mirror_step_copied" and one["kind"] == "delta"
    )


def _phases(logs: dict[str, str], step: int, here: float, there: float) -> dict[str, float]:
    """Return the seconds of each phase of a delta, in their order.

    Args:
        here: When the near job published it.
        there: When the far job did.
    """
    marks, found = [("", here)], dict[str, float]()
    for end in (name for name in ("direct", "push", "pull") if name in logs):
        own = {one["event"]: one for one in _told(logs[end], step)}
        copied, published = own["mirror_step_copied"], own["mirror_version_published"]
        noticed = published["at"] - published["seconds"]
        marks += [(f"{end}: noticed", noticed), (f"{end}: leased", copied["at"] - copied["seconds"])]
        marks += [(f"{end}: copied", copied["at"])]
        # The far job's own date is when its version was written; the log comes a little later.
        marks += [(f"{end}: published", published["at"] if end == "push" else there)]
    for (_, before), (name, at) in itertools.pairwise(marks):
        found[name] = at - before
    return found


def _told(log: str, step: int) -> list[dict[str, Any]]:
    """Return what a mirror has logged of a step, once it has logged that it published it."""
    ends = time.monotonic() + _PATIENCE
    while time.monotonic() < ends:
        told = [one for one in _events(log) if one.get("step") == step]
        if any(one["event"] == "mirror_version_published" for one in told):
            return told
        time.sleep(0.05)
    raise SystemExit(f"{log} does not say that step {step} was published")


def _requests(log: str | None, deltas: int) -> dict[str, float]:
    """Return the requests for each delta, those of polls that found nothing left out."""
    if log is None:
        return {}
    with open(log, encoding="utf-8") as lines:
        found = [match for line in lines if (match := _REQUEST.search(line))]
    kinds = Counter(
        "LIST" if "list-type" in one[2] else one[1] for one in found if one[3] not in ("304", "404")
    )
    return {kind: round(count / deltas, 1) for kind, count in kinds.items()}


if __name__ == "__main__":
    main()
