"""The benchmark of the broadcast, with weights of next to nothing: it ends, and each receiver has what was sent."""

import pytest
from support import forked

pytestmark = pytest.mark.slow

WAYS = {"broadcast", "files", "tensor by tensor", "one buffer"}


def test_the_broadcast_benchmark_reports_each_size_and_method(tmp_path):
    pytest.importorskip("torch", reason="needs torch")
    options = ("--gib", "0.001,0.002", "--rounds", "1", "--receivers", "2")
    said, figures = forked.benchmark("broadcast.py", tmp_path, *options)
    assert "x as fast as files" in said
    assert set(figures["sizes"]) == {"0.001", "0.002"}
    for gib, found in figures["sizes"].items():
        assert found["bytes"] == pytest.approx(float(gib) * (1 << 30), rel=0.01)
        rounds = found["receivers"]["2"]["rounds"]
        assert set(rounds) == WAYS
        assert all(took > 0 for (took,) in rounds.values())
