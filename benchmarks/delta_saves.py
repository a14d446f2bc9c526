"""What it costs the trainer to store steps as deltas: blocked time and time until durable, against whole saves.

    python benchmarks/delta_saves.py [--gib 0.5] [--rounds 18] [--share 0.015] [--json FILE] [--dir DIR]

Three senders store the same weights in turn in one process, each in a job with a real daemon and an explorer that
reads deltas: whole (`delta = "off"`), delta, and shortcut (a step that must be whole). Rounds take all orders in
turn, and each save begins once the daemon of the one before has had time to remove an old step, which takes a
processor: else the one that comes behind a large step seems slower. Ratios are taken within a round. A round changes
a share of the values by one unit in the last place.
"""

import argparse
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import report
import torch
from report import Row
from save import TUNABLES, Weights, weights_of

from syncd.client.client import Client
from syncd.jobfile.sections import SyncSection
from syncd.protocol.layout import Job
from syncd.protocol.manifest import read_manifest
from syncd.protocol.presence import READS_DELTA, Presence, write_presence
from syncd.transports.base import SendContext, StepContent
from syncd.transports.files.send import FilesSender
from syncd.transports.ranks import Ranks

FORMS = {"whole": ("off", ""), "delta": ("on", ""), "shortcut": ("on", "the benchmark asks for it")}
"""What is compared: `sync.delta`, and why a step must be whole."""

ORDERS = tuple(itertools.permutations(FORMS))

SETTLES = 0.4
"""Seconds until a save begins after the one before."""

WARM = 3
"""Rounds that do not count: the first step is whole, the second shows the share of changes."""


class Contestant:
    """A sender and its job."""

    def __init__(self, place: Path, form: str, weights: Weights) -> None:
        delta, self._must_be_whole = FORMS[form]
        place.mkdir()
        self.job, self._weights = Job.at(place), weights
        self.client = Client.open(place, "trainer")
        self.job.disk.make_directory(self.job.explorers)
        self._presence = Presence("reader", incarnation="1", reads=(READS_DELTA,))
        settings = SyncSection(delta=delta, keyframe_every=1000, max_chain_bytes=1 << 50)  # type: ignore[arg-type]
        self.sender = FilesSender.open(SendContext(self.job, Ranks(), settings, self.client))
        self.sender.prepare(weights.items)

    def save(self, step: int) -> dict[str, float]:
        """Store a step; return the seconds of both parts, the bytes, and whether changes are stored."""
        self._presence = replace(self._presence, beat=step)
        write_presence(self.job.disk, self.job.explorers, self._presence)
        content = StepContent(self._weights.items, {"config.json": b"{}"}, must_be_whole=self._must_be_whole)
        started = time.perf_counter()
        self.sender.send(step, f"save-{step}", content)
        blocked = time.perf_counter() - started
        self.sender.wait()
        total = time.perf_counter() - started
        manifest = read_manifest(self.job.disk, self.job.step(step))
        self._wait_published(step)
        has_changes = float(manifest.changes is not None)
        return {"blocked": blocked, "total": total, "bytes": manifest.size, "has_changes": has_changes}

    def _wait_published(self, step: int) -> None:
        end = time.monotonic() + 60
        while (version := self.client.latest_version()) is None or version.step < step:
            if time.monotonic() > end:
                raise SystemExit(f"step {step} was not published within 60 s")
            time.sleep(0.01)


def main() -> None:
    """Run all contestants and print what they cost."""
    options = _options()
    if TUNABLES not in os.environ.get("GLIBC_TUNABLES", ""):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "GLIBC_TUNABLES": TUNABLES})
    scratch = Path(tempfile.mkdtemp(prefix="syncd-delta-saves-", dir=options.dir))
    try:
        figures = _measure(scratch, options)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _print(figures)
    report.keep(options.json, figures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=0.5, help="size of the weights")
    parser.add_argument("--rounds", type=int, default=18, help=f"rounds that count, after {WARM} that do not")
    parser.add_argument("--share", type=float, default=0.015, help="of the values that change in a round")
    parser.add_argument("--json", default="out/delta_saves.json", help="where to write the figures")
    parser.add_argument("--dir", default=None, help="where to work; its file system is what is measured")
    return parser.parse_args()


def _measure(scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    weights = weights_of(options.gib)
    changed = {
        name: torch.randint(tensor.numel(), (int(tensor.numel() * options.share),))
        for name, tensor in weights.items()
    }
    loads, found = [], {form: list[dict[str, float]]() for form in FORMS}
    with ExitStack() as running:
        contestants = {form: Contestant(scratch / form, form, weights) for form in FORMS}
        for form, contestant in contestants.items():
            running.enter_context(report.running_daemon(scratch / form, "--keep-last", "3"))
            running.callback(contestant.client.close)
            running.callback(contestant.sender.close)
        for number in range(WARM + options.rounds):
            _train(weights, changed)
            for form in ORDERS[number % len(ORDERS)]:
                time.sleep(SETTLES)
                figures = contestants[form].save(number + 1)
                found[form] += [figures] if number >= WARM else []
            loads.append(round(os.getloadavg()[0], 1))
    size = sum(tensor.nbytes for tensor in weights.values())
    machine = report.machine(scratch, torch=torch.__version__, load=report.span(loads))
    return {"machine": machine, "bytes": size, "share": options.share, "rounds": found}


def _train(weights: Weights, changed: dict[str, torch.Tensor]) -> None:
    """Change the chosen values of each tensor by one unit in the last place, and back in the next round."""
    for name, tensor in weights.items():
        tensor.view(torch.int16).view(-1)[changed[name]] ^= 1  # a finite value stays finite


def _ratios(rounds: dict[str, list[dict[str, float]]], form: str, figure: str) -> list[float]:
    return [one[figure] / base[figure] for one, base in zip(rounds[form], rounds["whole"], strict=True)]


def _print(figures: dict[str, Any]) -> None:
    machine, rounds = figures["machine"], figures["rounds"]
    print(f"{figures['bytes'] / (1 << 30):.2f} GiB, {figures['share']:.1%} changed; {machine}")
    for form, each in rounds.items():
        blocked, total = ([one[name] for one in each] for name in ("blocked", "total"))
        mebibytes = statistics.median(one["bytes"] for one in each) / (1 << 20)
        count = f"{sum(one['has_changes'] for one in each):.0f} of {len(each)} with changes"
        seconds = f"blocked {report.spread(blocked, 3)} s, until durable {report.spread(total, 3)} s"
        print(f"{form:<9} {seconds}, {mebibytes:.1f} MiB, {count}")
    report.print_targets(_rows(rounds), 34, 24)


def _rows(rounds: dict[str, list[dict[str, float]]]) -> list[Row]:
    rows: list[Row] = []
    for form in ("delta", "shortcut"):
        blocked, total = _ratios(rounds, form, "blocked"), _ratios(rounds, form, "total")
        is_met = statistics.median(blocked) <= 1.05
        rows.append((f"{form}, blocked, whole = 1", report.spread(blocked, 2), "<= 1.05", is_met))
        rows.append((f"{form}, until durable, whole = 1", report.spread(total, 2), "", None))
    return rows


if __name__ == "__main__":
    main()
