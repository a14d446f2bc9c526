"""The benchmark of copies in memory, with weights of next to nothing: it ends, and each way has its figures."""

import json
import os

import forked
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def test_a_small_run(tmp_path, shm):
    pytest.importorskip("torch", reason="needs torch")
    program = (f"{ROOT}/benchmarks/copies.py", "--gib", "0.001", "--rounds", "2", "--memory", shm)
    places = ("--dir", str(tmp_path), "--json", str(tmp_path / "figures.json"))
    process = forked.start(str(tmp_path / "said"), {"PYTHONPATH": ROOT}, *program, *places)
    process.join(200)
    process.kill()
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 0, said
    assert "memory is" in said
    found = json.loads((tmp_path / "figures.json").read_text())["sizes"]["0.001"]
    assert found["bytes"] == pytest.approx(0.001 * (1 << 30), rel=0.1)
    assert len(found["rounds"]) == 2
    assert all(seconds > 0 for one in found["rounds"] for way in one.values() for seconds in way.values())
    assert os.listdir(shm) == []
