"""The loop where a file system is really full, or a quota really used up, for a while, and where it stays so."""

import contextlib
import os
import subprocess
from pathlib import Path

import pytest
from beds import probe
from beds.quota import limited
from support.checker import sealed
from support.trainers import make_trainer, small_config, write_experiences

from syncd.errors import NonFiniteError, StorageError
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.manifest import damaged_files, read_manifest
from syncd.protocol.version import read_marker
from syncd.synchronizer import Synchronizer
from trainer.loop import Trainer

pytestmark = pytest.mark.group("mounts")

SIZE = "size=4m"
SAID = {"full": "No space left", "quota": "quota exceeded"}


@contextlib.contextmanager
def small_tmpfs(point):
    """Mount a small file system; yield its directory."""
    if (reason := probe.tmpfs(SIZE)) is not None:
        pytest.skip(reason)
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", SIZE, "tmpfs", point], check=True, timeout=60)
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", point], check=True, timeout=60)


@contextlib.contextmanager
def with_quota():
    """Make a directory with a real quota of the same size; yield it."""
    if (reason := probe.quota()) is not None:
        pytest.skip(reason)
    with limited("4M") as made:
        yield Path(made.point)


@pytest.fixture(params=SAID)
def end(request):
    """Return what ends the room: that of the file system or that of a quota."""
    return request.param


@pytest.fixture
def job(end, tmp_path):
    """A job that has little room."""
    with small_tmpfs(tmp_path / "small") if end == "full" else with_quota() as point:
        (point / "job").mkdir()
        write_experiences(point / "job", 12)
        yield point / "job"


def filled(monkeypatch, job, first, last):
    """Let there be no room while the steps from `first` to `last` are trained."""
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


def test_training_continues_without_disk_space_and_syncs_later(job, monkeypatch):
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


def test_a_disk_that_stays_full_ends_the_run_with_the_good_steps(job, end, monkeypatch):
    filled(monkeypatch, job, first=3, last=99)
    with pytest.raises(StorageError, match=SAID[end]):
        train(small_config(job, trainer={"total_steps": 9}, sync={"max_failures": 2}))
    assert sealed(str(job)) == [1, 2]
    assert not os.path.exists(f"{job}/global_step_9")
