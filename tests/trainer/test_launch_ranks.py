"""The same command alone, under torchrun and under srun: real ranks that meet, add up and agree on the job."""

import sys

import pytest
from beds import probe
from support.launching import Launch

pytestmark = pytest.mark.slow

pytest.importorskip("torch", reason="the trainer needs torch")


def check(launch, world_size, origin):
    """Judge what all ranks have found."""
    code, output, errors = launch.ended()
    assert code == 0, (output, errors)
    ranks = launch.ranks()
    assert [rank["place"]["rank"] for rank in ranks] == list(range(world_size))
    for rank in ranks:
        assert rank["place"]["origin"] == origin
        assert rank["place"]["world_size"] == world_size
        assert rank["sum"] == sum(range(world_size + 1))
        assert rank["told"] == "from 0"
        assert rank["gathered"] == list(range(world_size))
        assert rank["dir"] == f"{launch.place}/job-settled"
    return ranks


def test_the_trainer_alone_starts_its_ranks(tmp_path):
    ranks = check(Launch(tmp_path, "--nproc", "2"), 2, "trainer")
    assert [rank["place"]["local_rank"] for rank in ranks] == [0, 1]
    assert all("x86_non_temporal_threshold=0x80000" in rank["tunables"] for rank in ranks)


def test_a_single_rank_has_a_process_group(tmp_path):
    check(Launch(tmp_path), 1, "trainer")


def test_ranks_started_by_torchrun_agree_on_the_job(tmp_path):
    before = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    check(Launch(tmp_path, before=before), 2, "torchrun")


@pytest.fixture(scope="module")
def slurm():
    if (reason := probe.slurm()) is not None:
        pytest.skip(reason)
    return f"{probe.BEDS}/slurm-bed"


@pytest.mark.beds
@pytest.mark.group("mounts")
def test_ranks_started_by_srun_agree_on_the_job(slurm, tmp_path):
    ranks = check(Launch(tmp_path, before=[slurm, "srun", "-N2", "-n3", sys.executable]), 3, "slurm")
    assert [rank["place"]["local_rank"] for rank in ranks] == [0, 1, 0]
    assert [rank["place"]["local_world_size"] for rank in ranks] == [2, 2, 1]
    assert {rank["place"]["master_addr"] for rank in ranks} == {"n0"}


@pytest.mark.beds
@pytest.mark.group("mounts")
def test_a_slurm_warning_exits_with_75_and_requeues_the_batch_job(slurm, tmp_path):
    """USR2 reaches the ranks of a step through their starter; the script asks for another start."""
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\n"
        f"srun -n1 {sys.executable} $1 {tmp_path}/job --nproc 2 --rank wait_for_stop\n"
        "code=$?\n"
        f"echo $code >>{tmp_path}/codes\n"
        "((code == 75)) && scontrol requeue $SLURM_JOB_ID\n"
    )
    up, again = f"[[ -e {tmp_path}/said/1.json ]]", "scontrol show job 1 | grep -q Restarts=1"
    driver = (
        f"sbatch --requeue -N1 -n1 -c2 -o {tmp_path}/out {tmp_path}/job.sh $1 || exit 1\n"
        f"for _ in {{1..300}}; do {up} && {up.replace('1.json', '0.json')} && break; sleep 0.1; done\n"
        "scancel --signal=USR2 1\n"
        f"for _ in {{1..300}}; do {again} && exit 0; sleep 0.1; done\n"
        f"cat {tmp_path}/out; scontrol show job 1; exit 1\n"
    )
    launch = Launch(tmp_path, before=[slurm, "bash", "-c", driver, "driver"])
    code, output, errors = launch.ended()
    assert code == 0, (output, errors)
    assert (tmp_path / "codes").read_text() == "75\n"
    assert {rank["place"]["origin"] for rank in launch.ranks()} == {"trainer"}
