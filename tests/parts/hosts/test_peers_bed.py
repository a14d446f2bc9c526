"""Hosts in namespaces with limited links: a slice of the matrix and random kills; `make test-peers`: all, and 100."""

import os

import pytest
from links import no_links
from peer_bed import Cell, random_kills, run_cell
from peer_matrix import Results, cells, problem_of
from support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.beds, pytest.mark.group("peers-bed")]

FULL = os.environ.get("SYNCD_PEERS") == "full"
MEMORY = 64 << 20


@pytest.fixture(autouse=True)
def links():
    if why := no_links():
        pytest.skip(why)


def test_two_hosts_read_one_copy_over_limited_links():
    row = run_cell(Cell(2, origin=6.0, mib=12))
    assert row["right"], row
    assert row["copies"] <= 1.25, row
    assert row["memory"] <= MEMORY, row


@pytest.mark.parametrize("fault", ["killed", "liar"])
def test_a_host_that_is_killed_or_lies_leaves_the_others_with_the_right_bytes(fault):
    row = run_cell(Cell(3, "whole", fault, origin=6.0, mib=12))
    assert row["right"], row
    assert row["copies"] < 2, row
    # A busy machine may lose a piece of the killed host on a connection that was there, before one is refused.
    assert set(row["removed"]) - {"lost"} == {"refused" if fault == "killed" else "wrong"}, row


@pytest.mark.parametrize("seed", range(100 if FULL else 1))
def test_whoever_is_killed_the_others_get_the_right_bytes(seed):
    row = run_cell(random_kills(seed))
    assert row["right"], row
    assert row["time"] is not None, row


@pytest.fixture(scope="module")
def results():
    return Results(ROOT / "benchmarks" / "results" / "peers.json")


@pytest.mark.skipif(not FULL, reason="an hour: make test-peers")
@pytest.mark.parametrize(
    "cell", cells() if FULL else cells()[:1], ids=lambda cell: f"{cell.hosts}-{cell.way}-{cell.fault}"
)
def test_every_host_has_the_right_bytes_in_time_and_the_origin_gives_few_copies(cell, results):
    row = run_cell(cell)
    problem = problem_of(row)
    results.add({**row, "problem": problem})
    assert not problem, row


def test_a_row_of_the_matrix_is_held_to_its_targets():
    row = {
        "hosts": 8,
        "fault": "none",
        "right": True,
        "time": 1.2,
        "copies": 1.0,
        "seconds": 12.0,
        "one_copy": 10.0,
    }
    assert not problem_of(row)
    assert problem_of({**row, "time": 1.3})
    assert problem_of({**row, "copies": 1.1})
    assert problem_of({**row, "right": False})
    assert not problem_of({**row, "hosts": 16, "time": 1.39})
    assert problem_of({**row, "fault": "dead", "seconds": 12.1})
    assert not problem_of({**row, "fault": "token", "seconds": 95.9})
