"""Starts ranks that run cases, waits for them, and reads what they found."""

import os
import socket
import subprocess
import sys

import torch

from support.paths import PYTHONPATH, TESTS

LONG = 1200.0
"""Seconds that a rank may take; on a quiet machine it is one minute."""

HERE = f"{TESTS}/trainer/engines"


def run_cases(directory, engine, models, world_size, *names, device="cpu"):
    """Run cases on ranks in processes of their own; return what each rank found, by case.

    Raises:
        AssertionError: A rank failed; with what it said.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.makedirs(f"{directory}/temporary", exist_ok=True)
    ranks = [
        _start([directory, engine, models, device, rank, world_size, port, *names])
        for rank in range(world_size)
    ]
    try:
        said = [rank.communicate(timeout=LONG)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(said)
    found = {name: [_read(directory, name, rank) for rank in range(world_size)] for name in names}
    return found | {"said": said}


def assert_close(found, expected, tolerance=1e-5):
    """Assert that tensors are those expected, by name, but for this share of the norm of each."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= tolerance * tensor.norm(), name


def _start(arguments):
    return subprocess.Popen(
        [sys.executable, f"{HERE}/programs/run_cases.py", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "TMPDIR": f"{arguments[0]}/temporary"},
    )


def _read(directory, name, rank):
    return torch.load(f"{directory}/{name}.{rank}.pt", weights_only=False)
