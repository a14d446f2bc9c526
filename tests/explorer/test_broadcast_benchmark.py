"""The benchmark of the broadcast, with weights of next to nothing: it ends, and each receiver has what was sent."""

import json
import os

import forked
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WAYS = {"broadcast", "files", "tensor by tensor", "one buffer"}


def test_a_small_run(tmp_path):
    pytest.importorskip("torch", reason="needs torch")
    program = (f"{ROOT}/benchmarks/broadcast.py", "--gib", "0.001,0.002", "--rounds", "1", "--receivers", "2")
    places = ("--dir", str(tmp_path), "--json", str(tmp_path / "figures.json"))
    process = forked.start(str(tmp_path / "said"), {"PYTHONPATH": ROOT}, *program, *places)
    process.join(200)
    process.kill()
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 0, said
    assert "x as fast as files" in said
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures["sizes"]) == {"0.001", "0.002"}
    for gib, found in figures["sizes"].items():
        assert found["bytes"] == pytest.approx(float(gib) * (1 << 30), rel=0.01)
        rounds = found["receivers"]["2"]["rounds"]
        assert set(rounds) == WAYS
        assert all(took > 0 for (took,) in rounds.values())
