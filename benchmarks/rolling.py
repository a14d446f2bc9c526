"""What a roll costs a fleet: tokens per second in bins of a second, and the versions that serve at once.

    python benchmarks/rolling.py [--engines 6] [--rolls 20] [--load 2.0] [--json out/rolling.json]

The followers and the daemon are the product's, each in a process. The engines are stand-ins: while one serves it
generates RATE tokens a second, and each load pauses it for `--load` seconds. So this measures when engines pause,
and not how quick an engine is. Each way runs the same rolls.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import report
from support.jobs import write_step
from support.rolling_fleet import follow, lead, process, read_log

from syncd.protocol.layout import Job
from syncd.protocol.presence import read_presences

RATE = 100.0
"""Tokens a second of an engine that serves."""

BIN = 1.0
PATIENCE = 300.0
WAYS: Mapping[str, Mapping[str, Any] | None] = {
    "all at once": None,
    "1 at a time, 1 canary": {"max_paused": 1, "canaries": 1},
    "2 at a time, 1 canary": {"max_paused": 2, "canaries": 1},
}
"""The table of each way, None for no rolling updates."""


def main() -> None:
    """Run all ways and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=6)
    parser.add_argument("--rolls", type=int, default=20)
    parser.add_argument("--load", type=float, default=2.0)
    parser.add_argument("--json")
    options = parser.parse_args()
    with report.scratch_directory("syncd-rolling-", None) as scratch:
        figures: dict[str, Any] = {
            "machine": report.machine(scratch),
            "engines": options.engines,
            "load": options.load,
        }
        for number, (name, table) in enumerate(WAYS.items()):
            place = scratch / str(number)
            place.mkdir()
            figures[name] = _measure(place, table, options)
            print(f"{name}: {figures[name]}", flush=True)
    if options.json:
        report.keep(options.json, figures)


def _measure(place: Path, table: Mapping[str, Any] | None, options: argparse.Namespace) -> dict[str, Any]:
    """Return what the rolls of one way cost."""
    job, log = Job.at(place), str(place / "engines.log")
    names = [f"e{number}" for number in range(options.engines)]
    processes = [process(lead, job.root, table)]
    processes += [process(follow, job.root, name, log, options.load, None) for name in names]
    try:
        rolls = list(_rolls(job, names, options.rolls))
    finally:
        _end(processes)
    lines = read_log(log)
    return _figures(lines, rolls, len(names))


def _rolls(job: Job, names: Sequence[str], count: int) -> Iterator[tuple[float, float]]:
    """Roll versions out; yield when each was published and had reached the last engine, without the first."""
    for step in range(1, count + 2):
        began = time.monotonic()
        write_step(job, step)
        while not all(_runs(job, name, step) for name in names):
            if time.monotonic() - began > PATIENCE:
                raise TimeoutError(f"step {step} has not reached all engines")
            time.sleep(0.05)
        if step > 1:
            yield began, time.monotonic()


def _runs(job: Job, name: str, step: int) -> bool:
    presence = read_presences(job.disk, job.explorers)[0].get(name)
    return presence is not None and presence.applied == (1, step)


def _end(processes: Sequence[multiprocessing.process.BaseProcess]) -> None:
    for made in processes:
        made.kill()
        made.join()


def _figures(lines: list[dict[str, Any]], rolls: list[tuple[float, float]], engines: int) -> dict[str, Any]:
    best = RATE * engines
    bins = [rate for began, ended in rolls for rate in _bins(lines, engines, began, ended)]
    return {
        "rolls": len(rolls),
        "seconds_to_last": round(statistics.median(ended - began for began, ended in rolls), 2),
        "tokens_per_s_least": round(min(bins), 1),
        "tokens_per_s_mean": round(statistics.mean(bins), 1),
        "least_of_all": round(min(bins) / best, 3),
        "versions_at_once": max(_versions(lines, began, ended) for began, ended in rolls),
    }


def _bins(lines: list[dict[str, Any]], engines: int, began: float, ended: float) -> Iterator[float]:
    """Yield the tokens of each second of a roll, by when engines were paused in it."""
    pauses = list(_pauses(lines))
    at = began
    while at < ended:
        lost = sum(max(min(end, at + BIN) - max(start, at), 0.0) for start, end in pauses)
        yield RATE * (engines - lost / BIN)
        at += BIN


def _pauses(lines: list[dict[str, Any]]) -> Iterator[tuple[float, float]]:
    for name in {line["engine"] for line in lines}:
        own = [line for line in lines if line["engine"] == name]
        yield from ((line["at"], after["at"]) for line, after in pairwise(own) if line["what"] == "pause")


def _versions(lines: list[dict[str, Any]], began: float, ended: float) -> int:
    """Return how many versions served at once at most during a roll."""
    serving: dict[str, str] = {}
    most = 0
    for line in sorted(lines, key=lambda line: float(line["at"])):
        if line["what"] == "serve":
            serving[line["engine"]] = line["label"]
        elif line["what"] == "pause":
            serving.pop(line["engine"], None)
        if began <= line["at"] <= ended:
            most = max(most, len(set(serving.values())))
    return most


if __name__ == "__main__":
    main()
