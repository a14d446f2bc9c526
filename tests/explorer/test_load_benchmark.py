"""The benchmark of loading: it runs, checks what each contestant has loaded, and counts what readers read."""

import json
import subprocess
import sys

import pytest
from support.cli import ROOT, environment

from syncd.protocol.mount import mount_of

pytest.importorskip("torch", reason="needs torch")
pytestmark = pytest.mark.slow


def test_the_load_benchmark_measures_all_loaders_and_counts_bytes_read(tmp_path):
    if mount_of(str(tmp_path)).type in ("tmpfs", "overlay"):
        pytest.skip("what is here cannot be dropped from memory")
    path = tmp_path / "load.json"
    command = [
        sys.executable,
        f"{ROOT}/benchmarks/load.py",
        "--gib",
        "0.004",
        "--rounds",
        "1",
        "--readers",
        "2",
    ]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path), "--json", str(path)],
        capture_output=True, text=True, timeout=240, env=environment(OMP_NUM_THREADS="1"), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(path.read_text())
    assert len(found["rounds"]) == 7
    assert all(len(rounds[how]) == 1 for rounds in found["rounds"].values() for how in ("cold", "warm"))
    readers = found["readers"]
    assert readers["page cache, 1"][0] >= 0.9 * found["bytes"]
    assert readers["page cache, 2"][0] < 1.5 * readers["page cache, 1"][0]
    assert readers["direct, 2"][0] > 1.5 * readers["direct, 1"][0]
