"""Runs many schedules, prints what they went through, and for a seed that fails how to replay it."""

import argparse
import functools
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from simulator.deeds import EVERY, USUAL, Deed, deeds_of, names_of
from simulator.faults import Fault
from simulator.schedule import Outcome, run_schedule

REPLAY = "python -m simulator --schedules 1 --seed {seed} --deeds {deeds} --trace"

_CHUNK = 25
_ROWS = (
    ("crashes", Fault.CRASH),
    ("power cuts", "power cuts"),
    ("pauses", Fault.PAUSE),
    ("stalls", Fault.STALL),
    ("failed calls", Fault.ERROR),
    ("lost answers", Fault.LOST),
    ("outages", Fault.OUTAGE),
    ("terms", "leadership_acquired"),
    ("fenced leaders", "leadership_lost"),
    ("rewinds", "rewinds"),
    ("vacated steps", "vacated"),
    ("publishes", "publishes"),
    ("amended versions", "amendments"),
    ("loads", "loads"),
    ("deltas", "deltas"),
    ("shortcuts", "shortcuts"),
    ("loads of chains", "loads of chains"),
    ("loads by changes", "loads by changes"),
    ("prunes", "prunes"),
    ("attempts removed", "attempts removed"),
    ("zombies", "zombies"),
    ("zombies woken", "zombies woken"),
    ("states removed", "state removed"),
    ("jobs replaced", "job replaced"),
    ("flipped bits", "flipped bits"),
    ("late reads", "late reads"),
)


@dataclass
class Summary:
    """What some schedules went through together."""

    schedules: int = 0
    calls: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one schedule."""
        self.schedules += 1
        self.calls += outcome.calls
        self.seconds += outcome.seconds
        self.counts.update(outcome.counts)
        if outcome.failure is not None:
            self.failures.append(outcome)

    def merge(self, other: "Summary") -> None:
        """Count what another summary has counted."""
        self.schedules += other.schedules
        self.calls += other.calls
        self.seconds += other.seconds
        self.counts.update(other.counts)
        self.failures += other.failures


def run_seeds(seeds: Iterable[int], deeds: frozenset[Deed] = USUAL) -> Summary:
    """Run the schedules of some seeds."""
    summary = Summary()
    for seed in seeds:
        summary.add(run_schedule(seed, deeds=deeds))
    return summary


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parser().parse_args(arguments)
    started = time.monotonic()
    if options.trace:
        summary = Summary()
        for seed in range(options.seed, options.seed + options.schedules):
            summary.add(run_schedule(seed, _print, options.deeds))
        for outcome in summary.failures:
            _tell(outcome, options.deeds)
    else:
        summary = _run(options)
    _report(summary, time.monotonic() - started)
    return 1 if summary.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    parser.add_argument("--schedules", type=int, default=100, help="how many schedules to run")
    parser.add_argument(
        "--seed", type=int, default=1, help="the first seed; each schedule takes the next one"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes to run them in")
    parser.add_argument(
        "--deeds",
        type=deeds_of,
        default=USUAL,
        help=f"what schedules contain: all, none, or of {names_of(EVERY)} (default {names_of(USUAL)})",
    )
    parser.add_argument("--first-failure", action="store_true", help="stop at the first schedule that fails")
    parser.add_argument("--trace", action="store_true", help="print every system call of every process")
    return parser


def _run(options: argparse.Namespace) -> Summary:
    summary = Summary()
    for part in _parts(options):
        before = summary.schedules // 1000
        summary.merge(part)
        for outcome in part.failures:
            _tell(outcome, options.deeds)
        if summary.schedules // 1000 > before:
            _print(f"{summary.schedules} schedules, {len(summary.failures)} failed")
        if summary.failures and options.first_failure:
            break
    return summary


def _parts(options: argparse.Namespace) -> Iterator[Summary]:
    last = options.seed + options.schedules
    chunks = [range(first, min(first + _CHUNK, last)) for first in range(options.seed, last, _CHUNK)]
    run = functools.partial(run_seeds, deeds=options.deeds)
    if options.workers == 1:
        yield from map(run, chunks)
        return
    with ProcessPoolExecutor(options.workers) as pool:
        yield from pool.map(run, chunks)
        pool.shutdown(cancel_futures=True)


def _tell(outcome: Outcome, deeds: frozenset[Deed]) -> None:
    invariant, detail = outcome.failure or ("", "")
    _print(f"FAILED seed {outcome.seed}: {invariant}: {detail}")
    _print(f"  replay: {REPLAY.format(seed=outcome.seed, deeds=names_of(deeds))}")


def _report(summary: Summary, seconds: float) -> None:
    rows: list[tuple[str, object]] = [
        ("schedules", summary.schedules),
        ("failed", len(summary.failures)),
        ("system calls", summary.calls),
        ("virtual hours", f"{summary.seconds / 3600:.1f}"),
        *((label, summary.counts[name]) for label, name in _ROWS),
        ("seconds", f"{seconds:.1f}"),
        ("schedules a second", f"{summary.schedules / seconds:.1f}"),
    ]
    for label, value in rows:
        _print(f"{label:20} {value}")


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
