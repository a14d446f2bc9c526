"""The loop on a file system that is really full for a while, and on one that stays so."""

import contextlib
import os
import subprocess

import pytest
from beds import probe
from checker import sealed
from trainers import make_trainer, small_config, write_experiences

from syncd.errors import StorageError
from syncd.protocol.disk import LocalDisk
from syncd.protocol.layout import Job
from syncd.protocol.manifest import damaged_files, read_manifest
from syncd.protocol.marker import read_marker
from syncd.synchronizer import Synchronizer
from trainer.loop import Trainer
from trainer.transports.finite import NonFiniteError

SIZE = "size=4m"


@pytest.fixture
def job(tmp_path):
    """A job on a small file system of its own."""
    if (reason := probe.tmpfs(SIZE)) is not None:
        pytest.skip(reason)
    point = tmp_path / "small"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", SIZE, "tmpfs", point], check=True, timeout=60)
    try:
        (point / "job").mkdir()
        write_experiences(point / "job", 12)
        yield point / "job"
    finally:
        subprocess.run(["umount", "-l", point], check=True, timeout=60)


def filled(monkeypatch, job, first, last):
    """Let the file system be full while the steps from `first` to `last` are trained."""
    train_step, filler = Trainer.train_step, job.parent / "filler"

    def step(made, batch):
        if made.train_step_num + 1 == first:
            made.wait_for_save()
            fill(filler)
        if made.train_step_num == last:
            made.wait_for_save()
            filler.unlink()
        return train_step(made, batch)

    monkeypatch.setattr(Trainer, "train_step", step)


def fill(filler):
    for size in (1 << 16, 4096):
        with open(filler, "ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * size):
                pass


def train(config):
    with Synchronizer.open(config.job.dir, "trainer", poll=0.01) as sync:
        made, shown = make_trainer(config, sync)
        made.prepare()
        try:
            return made.train(), shown
        finally:
            with contextlib.suppress(StorageError, NonFiniteError):
                made.shutdown()


def test_training_goes_on_while_the_disk_is_full_and_the_weights_come_later(job, monkeypatch):
    filled(monkeypatch, job, first=3, last=5)
    code, shown = train(small_config(job, trainer={"total_steps": 8}, sync={"max_failures": 4}))
    assert code == 0
    done = sealed(str(job))
    assert {1, 2, 7, 8} <= set(done), done
    assert not {3, 4} & set(done), "nothing that was not whole was announced"
    assert read_marker(Job.at(job).disk, f"{job}/latest_state_dict_iteration.txt").step == 8
    assert [step for step, _ in shown.records] == list(range(1, 9)), "every step was trained"
    counted = [record["sync/failures"] for _, record in shown.records if "sync/failures" in record]
    assert counted
    assert max(counted) >= 2
    for step in done:
        path = f"{job}/global_step_{step}"
        assert damaged_files(LocalDisk(), path, read_manifest(LocalDisk(), path)) == []


def test_a_disk_that_stays_full_ends_the_run_with_what_was_good(job, monkeypatch):
    filled(monkeypatch, job, first=3, last=99)
    with pytest.raises(StorageError, match="No space left"):
        train(small_config(job, trainer={"total_steps": 9}, sync={"max_failures": 2}))
    assert sealed(str(job)) == [1, 2]
    assert not os.path.exists(f"{job}/global_step_9")
