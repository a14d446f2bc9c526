"""What is said of jobs that others write: no warning for a marker that they never have, and every shard counted."""

import shutil

import pytest
from support.foreign_jobs import SAMPLES
from support.jobs import start, write_step

from syncd.observe import event_names
from syncd.protocol.layout import Job
from syncd.protocol.version import write_marker

FAMILIES = {sample.layout: sample for sample in SAMPLES}


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return Job.at(tmp_path / "job")


def warnings(job):
    daemon, heard, clock = start(job)
    for _ in range(3):
        daemon.tick(woken=True)
        clock.at += 10.0
    assert daemon.error is None
    return heard.of(event_names.MARKER_REJECTED)


@pytest.mark.parametrize("sample", FAMILIES.values(), ids=lambda sample: sample.layout)
def test_a_foreign_job_without_a_marker_has_no_warning(job, sample):
    sample.place(job.root)
    if sample.announced_by == "marker":
        write_marker(job.disk, job.tracker, int(sample.directory.rpartition("_")[2]))
    assert warnings(job) == []


@pytest.mark.parametrize("layout", ["syncd", "verl-fsdp"])
def test_a_missing_marker_is_a_problem_where_the_layout_needs_one(job, layout):
    if layout == "syncd":
        write_step(job, 1, announce=False)
    else:
        FAMILIES[layout].place(job.root)
    assert [told["detail"] for told in warnings(job)] == ["missing"]


def listed(shell, job):
    (row,) = shell("ls", job.root, "--json").document["steps"]
    table = shell("ls", job.root).out
    return row["shards"], row["shards_expected"], f"{row['shards']}/{row['shards_expected']}" in table


def test_ls_counts_the_shards_of_a_foreign_step(shell, job):
    sample = FAMILIES["verl-huggingface"]
    sample.place(job.root)
    assert listed(shell, job) == (2, 2, True)


def test_ls_counts_the_shards_of_a_published_directory_not_its_writers(shell, job, tmp_path):
    export = tmp_path / "export"
    sample = next(sample for sample in SAMPLES if sample.name == "huggingface")
    shutil.copytree(sample.place(tmp_path), export)
    assert shell("publish", job.root, 3, export).code == 0
    assert listed(shell, job) == (3, 3, True)
    (export.parent / "job/global_step_3/actor/model-00002-of-00003.safetensors").unlink()
    assert listed(shell, job) == (2, 3, True)
