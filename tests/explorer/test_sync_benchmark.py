"""The benchmark of adapters refuses a model that can have none."""

import os
import subprocess
import sys

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.slow


def test_the_adapter_benchmark_refuses_a_model_without_layers(tmp_path):
    program = (sys.executable, f"{ROOT}/benchmarks/sync_adapter.py", "--gib", "0.02", "--dir", str(tmp_path))
    done = subprocess.run(
        program, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, os.listdir(tmp_path)) == (2, [])
    assert "--gib 0.02 leaves no layer for an adapter" in done.stderr
