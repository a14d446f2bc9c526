"""The benchmark of a whole sync, with weights of next to nothing: it ends, and its figures are those of its parts."""

import json
import os
import subprocess
import sys

import pytest
from support import forked

pytestmark = [pytest.mark.group("forked"), pytest.mark.slow]

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WAYS = {"syncd, stage", "syncd", "save_file", "torch.save"}
PARTS = {"gather", "write", "visibility", "stage", "verify", "pause", "load", "confirm"}


def test_the_sync_benchmark_reports_each_reader_count_and_method(tmp_path):
    program = (f"{ROOT}/benchmarks/sync.py", "--gib", "0.002", "--rounds", "1", "--readers", "1,2")
    places = ("--dir", str(tmp_path), "--stage", str(tmp_path), "--json", str(tmp_path / "sync.json"))
    process = forked.start(str(tmp_path / "said"), {"PYTHONPATH": ROOT}, *program, *places)
    process.join(200)
    process.kill()
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 0, said
    assert "x as fast as save_file" in said
    figures = json.loads((tmp_path / "sync.json").read_text())
    assert set(figures["readers"]) == {"1", "2"}
    for found in figures["readers"].values():
        assert set(found) == WAYS
        for name, (one,) in found.items():
            check(name, one)


def test_the_adapter_benchmark_refuses_a_model_without_layers(tmp_path):
    program = (sys.executable, f"{ROOT}/benchmarks/sync_adapter.py", "--gib", "0.02", "--dir", str(tmp_path))
    done = subprocess.run(
        program, env=os.environ | {"PYTHONPATH": ROOT}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, os.listdir(tmp_path)) == (2, [])
    assert "--gib 0.02 leaves no layer for an adapter" in done.stderr


def check(name, one):
    assert set(one) == PARTS | {"total"}
    assert one["total"] == pytest.approx(sum(one[part] for part in PARTS), rel=0.01)
    assert all(one[part] > 0 for part in ("write", "load"))
    assert (one["stage"] > 0) == (name == "syncd, stage")
    assert (one["gather"] > 0) == name.startswith("syncd")
