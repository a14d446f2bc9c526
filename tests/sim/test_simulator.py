"""A fixed share of the simulator's schedules, and that a schedule replays. `make soak-simulator` runs many more."""

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest
from simulator import schedule
from simulator.deeds import USUAL, names_of
from simulator.run import REPLAY, Summary, main, run_seeds

SCHEDULES = 100
WORKERS = min(2, os.cpu_count() or 1)


def run(first: int, count: int) -> Summary:
    share = -(-count // WORKERS)
    ranges = [range(start, min(start + share, first + count)) for start in range(first, first + count, share)]
    summary = Summary()
    # Never forked from this process: what torch's groups left here would be collected there, without their threads.
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        for part in pool.map(run_seeds, ranges):
            summary.merge(part)
    return summary


@pytest.fixture(scope="module")
def summary():
    return run(1, SCHEDULES)


@pytest.mark.slow
def test_all_invariants_hold_over_a_fixed_number_of_schedules(summary, record_line):
    failed = [
        (REPLAY.format(seed=outcome.seed, deeds=names_of(USUAL)), outcome.failure)
        for outcome in summary.failures
    ]
    assert not failed
    assert summary.schedules == SCHEDULES
    counts = summary.counts
    record_line(
        f"simulator: {summary.schedules} schedules, {summary.calls} calls, {counts['crash']} crashes, "
        f"{counts['leadership_acquired']} terms, {counts['rewinds']} rewinds, no invariant broken"
    )


@pytest.mark.slow
def test_schedules_cover_every_kind_of_fault(summary):
    for what in (
        "crash",
        "power cuts",
        "pause",
        "lost answer",
        "leadership_lost",
        "rewinds",
        "vacated",
        "loads",
        "amendments",
        "deltas",
        "shortcuts",
        "loads of chains",
        "loads by changes",
        "prunes",
        "zombies woken",
        "flipped bits",
        "late reads",
    ):
        assert summary.counts[what] > 0, what


TRACE = """
import hashlib
from simulator.schedule import run_schedule
state = hashlib.sha256()
for seed in range(5):
    run_schedule(seed, lambda line: state.update(line.encode()))
print(state.hexdigest())
"""


def trace(hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", TRACE], env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_a_seed_replays_in_another_process():
    assert trace("1") == trace("2")


def test_the_command_line_prints_a_table(capsys):
    assert main(["--schedules", "3", "--seed", "7"]) == 0
    printed = capsys.readouterr().out
    assert "schedules            3" in printed
    assert "failed               0" in printed


def test_the_command_line_prints_a_trace(capsys):
    main(["--schedules", "1", "--seed", "7", "--trace"])
    assert "daemon0#1" in capsys.readouterr().out


def test_the_command_line_shows_how_to_replay_a_failure(capsys, monkeypatch):
    monkeypatch.setattr(schedule, "unsettled", lambda *_: ["this never comes right"])
    monkeypatch.setattr(schedule, "CALM", 1.0)
    assert main(["--schedules", "60", "--seed", "7", "--first-failure"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED seed 7: I7 everything comes right: this never comes right" in printed
    assert "replay: python -m simulator --schedules 1 --seed 7 --deeds " in printed
    assert f"--deeds {names_of(USUAL)} --trace" in printed
    assert "schedules            25" in printed
