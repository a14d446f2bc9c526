"""What many steps, deltas and explorers cost: one plan, the text of `ls`, a tick that finds nothing new.

    python benchmarks/planning.py [--quick] [--json out/planning.json] [--dir DIR]

Processor time, which other work on the machine changes little. The cost of a plan is shown per link and explorer: it
stays the same where planning is linear. Run by the Python path of another tree, it measures that tree.
"""

import argparse
import io
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import report
from report import Row
from rich.console import Console
from support.jobs import ManualClock, start, write_step

from syncd.config import DaemonConfig
from syncd.daemon.plan import plan
from syncd.daemon.retention import decide
from syncd.daemon.snapshot import Module, Snapshot
from syncd.protocol.layout import Job
from syncd.protocol.presence import READS_DELTA, Presence
from syncd.protocol.step import Step, StepState
from syncd.protocol.version import MarkerReading, Version
from syncd.views import table
from syncd.views.job_view import JobViewer
from syncd.views.listing import listing

_WHOLE, _DELTA = 10**9, 1000
_POLL = DaemonConfig().poll


def main() -> None:
    """Measure, print one table, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", default="out/planning.json", help="where to write the figures")
    parser.add_argument("--dir", default=None, help="where to work")
    options = parser.parse_args()
    with report.scratch_directory("syncd-bench-", options.dir) as scratch:
        figures = {
            "machine": report.machine(scratch),
            "plan": [_plan(links, explorers) for links, explorers in _sizes(quick=options.quick)],
            "ls_text_s": _listing(_steps(scratch / "ls", 500 if options.quick else 5000)),
            "idle_percent": _idle(_steps(scratch / "idle", 500)),
        }
    report.print_targets(_rows(figures), 56, 14)
    report.keep(options.json, figures)


def _sizes(*, quick: bool) -> list[tuple[int, int]]:
    sizes = [(50, 500), (100, 1000), (200, 2000), (400, 4000)]
    return sizes[:3] if quick else sizes


def _rows(figures: dict[str, Any]) -> Iterator[Row]:
    for one in figures["plan"]:
        name = f"plan, {one['links']} deltas and {one['explorers']} explorers"
        yield name, f"{one['seconds']} s", "", None
    first, last = figures["plan"][0], figures["plan"][-1]
    growth = round(last["us_each"] / first["us_each"], 2)
    yield "plan: cost of each, last to first", f"{growth} x", "<= 2 x", growth <= 2
    text = figures["ls_text_s"]
    yield "ls: text of all steps", f"{text} s", "<= 1 s", text <= 1
    idle = figures["idle_percent"]
    yield "ticks at default polling, 500 steps: one core", f"{idle} %", "<= 0.5 %", idle <= 0.5


def _plan(links: int, explorers: int) -> dict[str, Any]:
    """Measure a plan for a chain of deltas and explorers that run each of its steps."""
    whole = Step(0, "global_step_0", state=StepState.COMPLETE, digest="d0", size=_WHOLE, whole_size=_WHOLE)
    chain = {number: _delta(number) for number in range(1, links + 1)}
    snapshot = Snapshot(
        steps={0: whole, **chain},
        version=Version(1, links, "delta", f"global_step_{links}/actor", f"d{links}"),
        marker=MarkerReading(links, str(links)),
        explorers={f"e{number}": Module(_explorer(number, links)) for number in range(explorers)},
    )
    seconds = min(_spent(lambda: plan(snapshot, DaemonConfig())) for _ in range(3))
    each = round(seconds / (links + explorers) * 1e6, 2)
    return {"links": links, "explorers": explorers, "seconds": round(seconds, 4), "us_each": each}


def _delta(number: int) -> Step:
    directory, parent = f"global_step_{number}", number - 1
    return Step(
        number, directory, state=StepState.COMPLETE, kind="delta", digest=f"d{number}", size=_DELTA,
        parent=parent, whole_size=_WHOLE,
    )  # fmt: skip


def _explorer(number: int, links: int) -> Presence:
    step = number % links
    return Presence(
        f"e{number}", incarnation="x", applied=(1, step), applied_digest=f"d{step}", reads=(READS_DELTA,)
    )


def _steps(path: Path, count: int) -> Job:
    path.mkdir()
    job = Job.at(path)
    for step in range(1, count + 1):
        write_step(job, step, announce=step == count)
    return job


def _listing(job: Job) -> float:
    """Return the seconds for the table of `ls` on a pipe, once all is read."""
    policy = DaemonConfig()
    view = JobViewer(job, ManualClock()).read()
    document = listing(view, decide(view.scanned, policy), policy)
    console = Console(file=io.StringIO(), width=160, markup=False, highlight=False, emoji=False)
    return round(_spent(lambda: console.print(table.steps(document))), 3)


def _idle(job: Job) -> float:
    """Return the share of a core, in per cent, of ticks that come by default polling, full scans included."""
    daemon, _, clock = start(job, prune=False)
    daemon.tick(woken=True)

    def minute() -> None:
        for _ in range(round(60 / _POLL)):
            clock.at += _POLL
            daemon.tick()

    shares = [_spent(minute) / 60 * 100 for _ in range(5)]
    daemon.close()
    return round(statistics.median(shares), 3)


def _spent(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    main()
