"""`syncd verify` of a step that was published and has lost something since: damage, exit code 65."""

import os
import shutil

import pytest
from support.foreign_jobs import put, shards_below
from support.jobs import start, write_step

from syncd.protocol.layout import Job

LOST = "it is published but no longer complete"


@pytest.fixture
def job(tmp_path):
    return Job.at(tmp_path)


def publish(job):
    daemon, _, _ = start(job)
    daemon.tick(woken=True)
    daemon.close()


def write_foreign(job, step):
    """Write a step as Trinity-RFT does, and announce it."""
    for name, content in shards_below(f"global_step_{step}/actor/", 2):
        put(f"{job.root}/{name}", content)
    put(job.marker, str(step).encode())


def lose_bytes(job, step):
    path = f"{job.step(step)}/actor/model-00002-of-00002.safetensors"
    os.truncate(path, os.path.getsize(path) - 4)


def lose_shard(job, step):
    os.unlink(f"{job.step(step)}/actor/model-00002-of-00002.safetensors")


def lose_manifest(job, step):
    os.unlink(f"{job.step(step)}/manifest.json")


def lose_directory(job, step):
    shutil.rmtree(job.step(step))


@pytest.mark.parametrize("args", [[], ["2"]])
@pytest.mark.parametrize("lose", [lose_bytes, lose_shard])
def test_a_published_foreign_step_with_a_missing_file_is_damaged(shell, job, lose, args):
    write_foreign(job, 2)
    publish(job)
    assert shell("verify", job.root, *args).code == 0
    lose(job, 2)
    done = shell("verify", job.root, *args, "--json")
    assert done.code == 65, done.err
    assert any(LOST in problem for problem in done.document["problems"])


@pytest.mark.parametrize("args", [[], ["2"]])
@pytest.mark.parametrize("lose", [lose_bytes, lose_shard, lose_manifest, lose_directory])
def test_a_published_step_with_a_missing_file_is_damaged(shell, job, lose, args):
    write_step(job, 2, world_size=2)
    publish(job)
    lose(job, 2)
    done = shell("verify", job.root, *args)
    assert done.code == 65, done.err
    assert "hint: syncd ls" in done.err


def test_the_version_before_the_newest_counts_as_published(shell, job):
    write_foreign(job, 1)
    publish(job)
    write_foreign(job, 2)
    publish(job)
    lose_shard(job, 1)
    assert shell("verify", job.root, 1).code == 65
    assert shell("verify", job.root).code == 0


def test_an_unpublished_incomplete_step_is_not_ready(shell, job):
    write_foreign(job, 1)
    publish(job)
    for name, content in shards_below("global_step_2/actor/", 2)[:1]:
        put(f"{job.root}/{name}", content)
    done = shell("verify", job.root, 2)
    assert (done.code, "is not complete" in done.err) == (3, True)


def test_an_abandoned_step_being_rewritten_is_not_ready(shell, job):
    for step in (5, 9):
        write_foreign(job, step)
        publish(job)
    put(job.marker, b"5")
    daemon, _, clock = start(job, rewind_settle=1.0)
    for _ in range(3):
        daemon.tick(woken=True)
        clock.sleep(2.0)
    daemon.close()
    lose_shard(job, 9)
    assert shell("verify", job.root, 9).code == 3
    assert shell("verify", job.root).code == 0
