"""The groups of tests that do not run side by side are those that are meant."""

import re
from pathlib import Path

import pytest

workers = pytest.importorskip("workers", reason="pytest-xdist is not installed")

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("test", "group"),
    [
        (
            "integration/test_powercut.py::test_the_power_cut_finds_a_writer_that_does_not_sync_its_shards",
            "mounts",
        ),
        ("integration/test_watch.py::test_a_job_on_a_read_only_mount_is_watched", "mounts"),
        (
            "trainer/test_ranks.py::test_full_file_system_is_said_and_the_other_rank_hears_of_it[stream]",
            "mounts",
        ),
        ("trainer/test_launch_ranks.py::test_srun", "mounts"),
        ("trainer/test_slurm_files.py::test_explorers_of_an_array_come_and_go", "mounts"),
        (
            "integration/test_systemd.py::test_reload_reads_the_configuration_again_in_the_same_process",
            "systemd",
        ),
        ("integration/test_nfs.py::test_markers_are_followed_through_nfs[v4.2-b]", "NFS v4.2"),
        ("integration/test_nfs.py::test_a_shard_truncated_on_the_server_is_noticed[v3]", "NFS v3"),
        ("integration/test_doctor.py::test_on_nfs_it_finds_what_nfs_does[vers=4.2-excludes]", "NFS v4.2"),
        (
            "integration/test_doctor.py::test_on_nfs_it_finds_what_nfs_does[vers=3,nolock-both acquire]",
            "NFS v3",
        ),
    ],
)
def test_groups(test, group):
    assert workers.group_of(f"tests/{test}") == group
    file, name = test.split("[")[0].split("::")
    assert f"def {name}(" in (TESTS / file).read_text(), "it has another name now"


def test_others_are_alone():
    assert workers.group_of("tests/unit/test_leadership.py::test_the_first_claim").endswith(
        "test_the_first_claim"
    )


def test_whoever_mounts_is_in_a_group():
    mounts = re.compile(r'\["(?:mount|unshare)"|\bmounted\(|nfs_bed\b|probe\.(?:slurm|systemd|quota)')
    found = {path.name for path in TESTS.rglob("test_*.py") if mounts.search(path.read_text())}
    assert found == {
        "test_powercut.py",
        "test_launch_ranks.py",
        "test_slurm_files.py",
        "test_systemd.py",
        "test_watch.py",
        "test_ranks.py",
        "test_nfs.py",
        "test_memory_transport.py",
        "test_mount_verbs.py",
        "test_doctor.py",
        "test_workers.py",
        "test_nfs_dead_server.py",
        "test_mount_trouble.py",
        "test_full_disk.py",
        "test_loop_full_disk.py",
        "test_sweep_full_disk.py",
    }, "a test that mounts belongs into workers.GROUPS"
