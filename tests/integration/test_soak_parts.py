"""A soak of the real parts, as `make soak-parts` runs it for an hour: here for some seconds."""

import json
import subprocess
import sys

import pytest
from soak.crew import TESTS
from soak.schedule import KINDS
from support.sweep import ENVIRONMENT

pytestmark = pytest.mark.group("mounts")

SECONDS, EXPLORERS = 18, 4
OPTIONS = {
    "minutes": SECONDS / 60,
    "seed": 52,
    "gap": 1.2,
    "explorers": EXPLORERS,
    "pause": 0.4,
    "ttl": 12.0,
    "takeover": 4.0,
    "sample": 0.5,
    "slow": 1.5,
}


@pytest.mark.slow
@pytest.mark.beds
def test_the_parts_survive_every_fault_of_a_short_soak(record_line):
    options = [text for name, value in OPTIONS.items() for text in (f"--{name}", str(value))]
    ran = subprocess.run(
        [sys.executable, "-m", "soak", *options],
        capture_output=True, text=True, timeout=240, check=False, cwd=TESTS, env=ENVIRONMENT,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr
    found = json.loads(ran.stdout)
    assert found["wrong"] == []
    skipped = {line.split(":")[0].removeprefix("no ") for line in found["cannot_be_done"]}
    done = found["done"]
    assert set(KINDS) - skipped == set(done), "each kind that can be done was done"
    assert found["versions"] > 2
    assert found["loads"] >= 2 * EXPLORERS
    assert found["removed"] > 0
    assert found["pair"][0] > 1, "it went back and on again"
    record_line(
        f"soak of {SECONDS} s: {sum(done.values())} disturbances of {len(done)} kinds, {found['versions']} versions, "
        f"{found['loads']} loads, {found['terms']} terms, {found['excused']} loads cut off: 0 violations"
    )
