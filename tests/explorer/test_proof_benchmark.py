"""The benchmark of proofs: it runs, and every load has a proof."""

import re
import subprocess
import sys

import pytest
from support.cli import ROOT, environment

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.slow


def test_the_benchmark_of_proofs_shows_their_share_of_a_load(tmp_path):
    done = subprocess.run(
        [sys.executable, f"{ROOT}/benchmarks/proof.py", "--model", "tiny", "--rounds", "1", "--dir", str(tmp_path)],
        capture_output=True, text=True, timeout=240, env=environment(OMP_NUM_THREADS="1"), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (share,) = re.findall(r"proof, % of the load +([0-9.]+)", done.stdout)
    assert 0 < float(share) < 100
    assert list(tmp_path.iterdir()) == []
