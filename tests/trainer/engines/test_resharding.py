"""A training state of policy and critic that some number of ranks has written is loaded by any other, exactly."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

import torch
from support.case_runs import HERE
from support.engine_cases import equal
from support.matrices import LONG
from support.paths import PYTHONPATH

_LONG = 900.0
pytestmark = [pytest.mark.group("engines"), pytest.mark.slow, pytest.mark.timeout(2 * _LONG), LONG]

SIZES = (2, 1, 4, 2)


@pytest.fixture(scope="module")
def legs(models, tmp_path_factory):
    """Return what each rank of each leg found."""
    place = tmp_path_factory.mktemp("resharded")
    (place / "temporary").mkdir()
    command = [sys.executable, f"{HERE}/programs/resharded.py", place, models, *SIZES]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "TMPDIR": f"{place}/temporary"}
    done = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, timeout=_LONG, check=False
    )
    assert done.returncode == 0, done.stderr
    return [
        [torch.load(f"{place}/{number}.{rank}.pt", weights_only=False) for rank in range(size)]
        for number, size in enumerate(SIZES)
    ]


def test_weights_optimizer_and_schedule_are_the_same_bits_after_each_resharding(legs):
    for number in range(1, len(SIZES)):
        for rank in legs[number]:
            assert equal(rank["loaded"], legs[number - 1][0]["saved"]), SIZES[number - 1 : number + 1]
        for before, after in zip(*(legs[number][0][at] for at in ("loaded", "saved")), strict=True):
            assert not any(
                torch.equal(before["model"][name], after["model"][name]) for name in before["model"]
            )


def test_ranks_take_the_random_states_of_their_predecessors(legs):
    for number in range(1, len(SIZES)):
        for mine, before in zip(legs[number], legs[number - 1], strict=False):
            assert torch.equal(mine["rng"], before["rng saved"])
