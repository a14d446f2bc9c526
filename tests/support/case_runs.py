"""Starts ranks that run cases, waits for them, and reads what they found."""

import os

import torch

from support import forked
from support.paths import PYTHONPATH, TESTS
from support.ports import free_port

LONG = 1200.0
"""Seconds that a rank may take; on a quiet machine it is one minute."""

HERE = f"{TESTS}/trainer/engines"


def run_cases(directory, engine, models, world_size, *names, device="cpu"):
    """Run cases on ranks in processes of their own; return what each rank found, by case.

    Raises:
        AssertionError: A rank failed; with what it said.
    """
    temporary = f"{directory}/temporary"
    os.makedirs(temporary, exist_ok=True)
    environment = {"PYTHONPATH": PYTHONPATH, "TMPDIR": temporary}
    shared = (world_size, free_port(), *names)
    kind = "torch" if engine == "tests.tiny" else "verl"
    ranks = [
        forked.start(
            f"{directory}/{world_size}.{rank}.log", environment, f"{HERE}/programs/run_cases.py",
            directory, engine, models, device, rank, *shared, kind=kind,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    try:
        codes = [rank.wait(LONG) for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()
    said = [rank.said() for rank in ranks]
    assert codes == [0] * world_size, "\n".join(said)
    found = {name: [_read(directory, name, rank) for rank in range(world_size)] for name in names}
    return found | {"said": said}


def assert_close(found, expected, tolerance=1e-5):
    """Assert that tensors are those expected, by name, but for this share of the norm of each."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= tolerance * tensor.norm(), name


def _read(directory, name, rank):
    return torch.load(f"{directory}/{name}.{rank}.pt", weights_only=False)
