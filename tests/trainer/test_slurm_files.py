"""The shipped sbatch files on a real Slurm of two nodes: warned, drained, requeued, resumed exactly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from beds import probe
from support.checker import sealed
from support.trainers import ENVIRONMENT
from test_kills import STEPS, WHOLE, damaged, final_state, finish, new_job, write_config

from syncd.protocol.layout import Job
from syncd.protocol.version import read_version

pytestmark = [pytest.mark.group("mounts"), pytest.mark.beds, pytest.mark.slow, pytest.mark.timeout(1800)]

FILES = Path(__file__).parents[2] / "syncd" / "recipes"
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
idle() { [[ $(sinfo -h -t idle -o %D) == 2 ]]; }
at_once() { # a requeued job would wait two minutes
  wait_for 60 job_is "$1" JobState=PENDING
  # It waits for nodes to forget the job that they have just killed: they know the two apart by the second.
  wait_for 60 idle
  sleep 2
  wait_for 60 scontrol update jobid="$1" StartTime=now
}
lines() { (($(cat OUT/job/metrics.jsonl 2>/dev/null | wc -l) >= $1)); }
cd OUT
"""


@pytest.fixture(scope="module")
def bed():
    if (reason := probe.slurm()) is not None:
        pytest.skip(reason)
    return f"{probe.BEDS}/slurm-bed"


def in_bed(bed, place, script, limit=480, **environment):
    """Run a script beside a Slurm, in a directory of its own."""
    kept = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    path = f"{os.path.dirname(sys.executable)}:{kept['PATH']}"
    own = {"PATH": path, "LIMIT": str(limit), "OMP_NUM_THREADS": "1", **ENVIRONMENT, **environment}
    text = HELPERS.replace("OUT", str(place)) + script
    done = subprocess.run(
        [bed, "bash", "-euc", text],
        capture_output=True,
        text=True,
        check=False,
        timeout=limit + 60,
        env=kept | own,
    )
    assert done.returncode == 0, (done.stdout[-6000:], done.stderr[-3000:])
    return done.stdout


@pytest.mark.only_with(SYNCD_SLURM="1")
def test_a_requeued_trainer_ends_with_the_state_of_an_undisturbed_run(bed, tmp_path, record_line):
    straight, disturbed = finish(new_job(tmp_path, "straight")), new_job(tmp_path, "job")
    config = (tmp_path / "straight.toml").read_text().replace(str(straight), "/elsewhere")
    config = config.replace("pause = 0.08", "pause = 0.5")  # time to be disturbed in
    (tmp_path / "config.toml").write_text(config)
    in_bed(
        bed,
        tmp_path,
        f"""
sbatch --nodes 2 {FILES}/trainer.sbatch config.toml {disturbed}
wait_for 400 lines 4
# What --signal=B:USR2@120 does at the end of the time.
scancel --signal=USR2 --batch 1
wait_for 300 job_is 1 Restarts=1
at_once 1
wait_for 400 lines 10
scontrol update nodename=n1 state=drain reason=test
scontrol requeue 1
wait_for 60 job_is 1 JobState=PENDING
scontrol update nodename=n1 state=resume
at_once 1
wait_for 400 job_is 1 JobState=COMPLETED
job_is 1 Restarts=2
""",
        limit=1700,
    )
    assert final_state(disturbed) == final_state(straight)
    assert damaged(disturbed) == []
    version = read_version(Job.at(disturbed))
    assert version is not None
    assert version.step == STEPS
    assert STEPS in sealed(str(disturbed))
    steps = [json.loads(line)["step"] for line in (disturbed / "metrics.jsonl").read_text().splitlines()]
    record_line(
        f"Slurm: 2 requeues, {len(steps)} steps trained for {STEPS}, state and weights as undisturbed"
    )


def test_srun_trains_with_one_rank_a_task(bed, tmp_path):
    job = new_job(tmp_path, "job")
    Path(write_config(job, WHOLE)).rename(tmp_path / "grpo.toml")
    in_bed(bed, tmp_path, "srun -N2 -n2 trainer train grpo.toml")
    version = read_version(Job.at(job))
    assert version is not None
    assert version.step == STEPS


STUBS = {
    "explorer": """#!/bin/bash
# Says how it was started, works until it is told to leave or the trainer is gone, and leaves cleanly.
echo "$SLURM_JOB_ID ${SLURM_ARRAY_TASK_ID:--} $*" >>OUT/explorers
trap 'echo "left ${SLURM_ARRAY_TASK_ID:--}" >>OUT/explorers; exit 0' TERM
for _ in {1..1200}; do [[ -e OUT/gone ]] && exit 0; sleep 0.1; done
""",
    "trainer": """#!/bin/bash
# Trains until it is warned; the second time it comes to its end.
echo "$SLURM_RESTART_COUNT $*" >>OUT/trainers
trap 'exit 75' USR2
[[ ${SLURM_RESTART_COUNT:-0} == 1 ]] && touch OUT/gone && exit 0
for _ in {1..1200}; do sleep 0.1; done
""",
    "apptainer": """#!/bin/bash
# Says how it was called, and runs what is meant to run in the image.
echo "$*" >>OUT/images
while [[ $1 != *.sif ]]; do shift; done
shift
exec "$@"
""",
}


@pytest.fixture
def stubs(tmp_path):
    """Put programs that only say how they were started before the real ones; `syncd` stays."""
    place = tmp_path / "bin"
    place.mkdir()
    for name, text in STUBS.items():
        (place / name).write_text(text.replace("OUT", str(tmp_path)))
        (place / name).chmod(0o755)
    return f"{place}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"


def test_explorers_of_a_job_array_join_and_leave(bed, tmp_path, stubs):
    in_bed(
        bed,
        tmp_path,
        f"""
sbatch --array 0-2%2 {FILES}/explorers.sbatch c.toml {tmp_path}/job --explorer.groups 2
started() {{ (($(grep -c run explorers 2>/dev/null) >= $1)); }}
left() {{ grep -qx "left $1" explorers; }}
wait_for 60 started 2
# What --signal=B:TERM@60 does at the end of the time of one: the next of the array takes its place.
scancel --signal=TERM --batch 1_0
wait_for 60 left 0
wait_for 60 started 3
touch gone
wait_for 60 job_is 1 'JobState=COMPLETED'
""",
        PATH=stubs,
    )
    said = (tmp_path / "explorers").read_text().splitlines()
    started = sorted(line.partition(" ")[2] for line in said if "run" in line)
    assert started == [
        f"{n} run c.toml --name explorers-{n} --job.dir {tmp_path}/job --explorer.groups 2" for n in range(3)
    ]


def test_explorers_restart_while_the_trainer_is_queued_and_end_once_it_is_gone(bed, tmp_path, stubs):
    in_bed(
        bed,
        tmp_path,
        f"""
sbatch --wrap 'sleep 400'
touch gone  # the trainer has left: an explorer ends by itself
sbatch --array 7 --export ALL,TRAINER_JOB=1 {FILES}/explorers.sbatch c.toml {tmp_path}/job
started() {{ (($(grep -c run explorers 2>/dev/null) >= $1)); }}
wait_for 60 started 2
scancel 1
wait_for 60 job_is 2 JobState=COMPLETED
""",
        PATH=stubs,
    )


@pytest.mark.only_with(SYNCD_SLURM="1")
def test_a_heterogeneous_job_requeues_trainer_and_explorers_together(bed, tmp_path, stubs):
    said = in_bed(
        bed,
        tmp_path,
        f"""
sbatch {FILES}/together.sbatch c.toml {tmp_path}/job --engine.seed 1
both() {{ (($(wc -l <explorers) >= $1 && $(wc -l <trainers) >= $1)); }}
wait_for 60 both 1
scancel --signal=USR2 --batch 1
wait_for 60 job_is 1 Restarts=1
# Each component waits two minutes of its own. Each change makes the scheduler begin anew: once is enough.
at_once 1+0
at_once 1+1
wait_for 300 both 2
wait_for 60 job_is 1 JobState=COMPLETED
cat *.out
""",
        PATH=stubs,
        SYNCD_IMAGE="/images/syncd.sif",
    )
    assert "srun: forcing job termination" not in said, "daemon and explorers ended by themselves"
    more = f"--job.dir {tmp_path}/job --engine.seed 1"
    assert (tmp_path / "trainers").read_text() == f" train c.toml {more}\n1 train c.toml {more}\n", said
    explorers = (tmp_path / "explorers").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in explorers if "run" in line] == [
        f"run c.toml {more} --name together-0"
    ] * 2
    images = (tmp_path / "images").read_text().splitlines()
    before = f"exec --bind {tmp_path}/job --bind {tmp_path} /images/syncd.sif "
    assert all(line.startswith(before) for line in images)
    assert sum("syncd watch" in line for line in images) == 4, "the daemon, and one cycle after it; twice"


@pytest.mark.parametrize("name", ["trainer", "explorers", "explorers-vllm", "explorers-sglang", "together"])
def test_each_sbatch_file_is_valid_bash_and_reports_missing_arguments(name):
    path = FILES / f"{name}.sbatch"
    assert subprocess.run(["bash", "-n", path], check=False, capture_output=True).stderr == b""
    assert path.read_text().startswith("#!/bin/bash\n# ")
    done = subprocess.run(["bash", path], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "CONFIG" in done.stderr, "without arguments it says what it needs"


def test_the_files_of_servers_differ_only_in_the_engine():
    vllm, sglang = ((FILES / f"explorers-{name}.sbatch").read_text() for name in ("vllm", "sglang"))
    for word, other in (
        ("vLLM", "SGLang"),
        ("explorers-vllm", "explorers-sglang"),
        ("kind vllm", "kind sglang"),
    ):
        assert word in vllm
        vllm = vllm.replace(word, other)
    assert vllm == sglang
