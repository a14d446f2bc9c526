"""The benchmark of copies in memory, with weights of next to nothing: it ends, and each way has its figures."""

import os

import pytest
from support import forked

pytestmark = pytest.mark.slow


def test_the_copies_benchmark_reports_each_round_and_leaves_no_copies(tmp_path, shm):
    pytest.importorskip("torch", reason="needs torch")
    options = ("--gib", "0.001", "--rounds", "2", "--memory", shm)
    said, figures = forked.benchmark("copies.py", tmp_path, *options)
    assert "memory is" in said
    found = figures["sizes"]["0.001"]
    assert found["bytes"] == pytest.approx(0.001 * (1 << 30), rel=0.1)
    assert len(found["rounds"]) == 2
    assert all(seconds > 0 for one in found["rounds"] for way in one.values() for seconds in way.values())
    assert os.listdir(shm) == []
