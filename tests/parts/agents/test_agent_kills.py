"""Agents, gateways, engines and writers are killed while rollouts are played; `make agent-kills` does it longer."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from agent_kills.judging import compared
from support.cli import environment
from support.paths import ROOT, TESTS

KILLS = 12


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_parts_lose_nothing_and_train_nothing_twice(record_property):
    """Half of the kills with agents of `explorer run`, half with a driver of `explorer serve`, whose agents go on."""
    command = [sys.executable, "-m", "agent_kills", "--kills", str(KILLS), "--groups", "0.5", "--seed", "3"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment(), "PYTHONPATH": os.pathsep.join(map(str, (ROOT, TESTS, TESTS / "parts/agents")))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [found[mode]["wrong"] for mode in ("run", "serve")] == [[], []]
    assert sum(sum(found[mode]["kills"].values()) for mode in ("run", "serve")) > KILLS / 2
    record_property("figure", f"kills of agents: {json.dumps(found)}")


def test_samples_of_one_distribution_are_near_and_short_ones_in_place_of_long_ones_are_far():
    """By hand: of 1, 2 and 2, 3 the distribution functions differ by a half at 1 and at 2."""
    assert compared([1, 2], [2, 3])[0] == 0.5
    assert compared([1, 2, 3], [3, 1, 2]) == (0.0, 1.0)
    chance = np.random.default_rng(0)
    ones, others = (chance.geometric(0.3, 1000) for _ in range(2))
    assert compared(ones, others)[1] > 0.05
    survived = others[chance.random(1000) < 0.9**others]
    assert compared(ones, survived)[1] < 0.001
