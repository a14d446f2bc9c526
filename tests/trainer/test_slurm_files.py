"""The shipped sbatch files on a real Slurm: two nodes, the daemon as a step, warned, drained, requeued, resumed exactly."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from beds import probe
from checker import sealed
from test_kills import STEPS, damaged, final_state, finish
from trainers import ENVIRONMENT, write_experiences

from syncd.protocol.layout import Job
from syncd.protocol.version import read_version

pytestmark = [pytest.mark.beds, pytest.mark.slow, pytest.mark.timeout(600)]

FILES = Path(__file__).parents[2] / "examples" / "slurm"
NOT_OURS = ("SYNCD_VENV", "SYNCD_IMAGE")

HELPERS = """
wait_for() { # SECONDS COMMAND...: until it succeeds
  local ends=$((SECONDS + $1)); shift
  until "$@"; do
    ((SECONDS < ends)) || { echo "waited in vain: $*"; squeue; cat OUT/*.out; scontrol show job; exit 1; }
    sleep 0.2
  done
}
job_is() { [[ $(scontrol show job "$1" | grep -o "$2") ]]; }
at_once() { scontrol update jobid="$1" StartTime=now 2>/dev/null || :; }
lines() { (($(cat OUT/job/metrics.jsonl 2>/dev/null | wc -l) >= $1)); }
cd OUT
"""


@pytest.fixture(scope="module")
def bed():
    if (reason := probe.slurm()) is not None:
        pytest.skip(reason)
    return f"{probe.BEDS}/slurm-bed"


def in_bed(bed, place, script, limit=240, **environment):
    """Run a script beside a Slurm, in a directory of its own."""
    kept = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    path = f"{os.path.dirname(sys.executable)}:{kept['PATH']}"
    own = {"PATH": path, "LIMIT": str(limit), "OMP_NUM_THREADS": "1", **ENVIRONMENT, **environment}
    text = HELPERS.replace("OUT", str(place)) + script
    done = subprocess.run(
        [bed, "bash", "-euc", text], capture_output=True, text=True, check=False, timeout=limit + 60, env=kept | own
    )
    assert done.returncode == 0, (done.stdout[-6000:], done.stderr[-3000:])
    return done.stdout


def test_a_trainer_that_is_warned_drained_and_requeued_ends_where_an_undisturbed_one_does(
    bed, tmp_path, record_line
):
    straight, disturbed = tmp_path / "straight", tmp_path / "job"
    for job in (straight, disturbed):
        job.mkdir()
        write_experiences(job, STEPS + 4)
    finish(straight)
    config = (tmp_path / "straight.toml").read_text().replace(str(straight), "/elsewhere")
    (tmp_path / "config.toml").write_text(config)
    in_bed(
        bed,
        tmp_path,
        f"""
sbatch {FILES}/trainer.sbatch config.toml {disturbed}
wait_for 90 lines 4
# What --signal=B:USR2@120 does at the end of the time.
scancel --signal=USR2 --batch 1
wait_for 60 job_is 1 Restarts=1
at_once 1
wait_for 90 lines 10
scontrol update nodename=n1 state=drain reason=test
scontrol requeue 1
wait_for 60 job_is 1 JobState=PENDING
scontrol update nodename=n1 state=resume
at_once 1
wait_for 120 job_is 1 JobState=COMPLETED
job_is 1 Restarts=2
""",
    )
    assert final_state(disturbed) == final_state(straight)
    assert damaged(disturbed) == []
    version = read_version(Job.at(disturbed))
    assert version is not None
    assert version.step == STEPS
    assert STEPS in sealed(str(disturbed))
    steps = [json.loads(line)["step"] for line in (disturbed / "metrics.jsonl").read_text().splitlines()]
    record_line(f"Slurm: 2 requeues, {len(steps)} steps trained for {STEPS}, state and weights as undisturbed")
