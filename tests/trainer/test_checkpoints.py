"""Full checkpoints: their order, what a kill at each point leaves, and where a run goes on."""

import contextlib
import errno
import os
import shutil
from dataclasses import replace

import pytest
from support.jobs import ManualClock, write_step
from support.pausing import Pausing

from syncd.errors import CorruptDataError, StorageError
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from trainer.checkpoints import (
    TrainerState,
    begin_training,
    complete,
    full_checkpoints,
    has_huggingface,
    read_state,
)
from trainer.resume import FRESH, find_state


class Killed(BaseException):
    """The process ends here."""


class Mortal(LocalDisk):
    """A disk whose process is killed before its nth replacement of a file."""

    def __init__(self, lives):
        self.lives = lives

    def replace(self, path, data, **more):
        if self.lives == 0:
            raise Killed(path)
        self.lives -= 1
        super().replace(path, data, **more)


def state_at(step):
    return TrainerState(step, generation=1, world_size=1, sampler={"kind": "fifo"})


def save(job, step, *, as_hf=False, disk=None):
    write_step(job, step)
    begin_training(job, "a")
    complete(disk or job, step, state_at(step).document(), save="a", as_hf=as_hf)


@pytest.fixture
def job(tmp_path):
    return Job.at(tmp_path)


def test_the_newest_full_checkpoint_is_what_a_run_resumes_from(job):
    save(job, 2)
    save(job, 4)
    assert full_checkpoints(job) == [2, 4]
    assert find_state(job) == state_at(4) == read_state(job, 4)


def test_a_checkpoint_without_its_critic_is_no_checkpoint(job):
    for step in (2, 4):
        write_step(job, step)
        os.mkdir(f"{begin_training(job, 'a')}/critic")
        with open(f"{job.root}/.training.a/critic/rank_0.pt", "wb"):
            pass
        complete(job, step, replace(state_at(step), critic=True).document(), save="a")
    assert find_state(job) == replace(state_at(4), critic=True)
    shutil.rmtree(f"{job.step(4)}/training/critic")
    assert find_state(job) == replace(state_at(2), critic=True)


def test_a_job_without_a_full_checkpoint_starts_fresh(job):
    assert find_state(job) == FRESH
    write_step(job, 3)
    assert find_state(job) == FRESH, "a sync step is no checkpoint"


@pytest.mark.parametrize("lives", range(5))
def test_killed_at_any_point_a_save_leaves_the_old_or_the_new_checkpoint(job, lives):
    save(job, 2)
    mortal = Job(job.root, job.state, Mortal(lives))
    write_step(job, 4)
    begin_training(job, "a")
    killed = False
    try:
        complete(mortal, 4, state_at(4).document(), save="a", as_hf=True)
    except Killed:
        killed = True
    assert killed is (lives < 4)
    # The tracker is the third of the four files: before it, the run goes on from step 2.
    assert find_state(job).step == (4 if lives >= 3 else 2)
    begin_training(job, "b")
    complete(job, 4, state_at(4).document(), save="b", as_hf=True)
    assert find_state(job) == state_at(4)
    assert has_huggingface(job, 4)


def test_a_huggingface_directory_is_complete_without_the_actor_s_shard(job):
    save(job, 2, as_hf=True)
    actor = f"{job.step(2)}/actor"
    names = {entry.name for entry in os.scandir(f"{actor}/huggingface")}
    assert names == {"model-00001-of-00001.safetensors"}
    with open(f"{actor}/huggingface/model-00001-of-00001.safetensors", "rb") as linked:
        content = linked.read()
    os.unlink(f"{actor}/model-00001-of-00001.safetensors")
    with open(f"{actor}/huggingface/model-00001-of-00001.safetensors", "rb") as linked:
        assert linked.read() == content
    assert not [name for name in os.listdir(actor) if "huggingface." in name]


def test_files_are_copied_if_hard_links_are_not_permitted(job, monkeypatch):
    def refuse(source, target):
        raise PermissionError(1, "no links here", target)

    monkeypatch.setattr("os.link", refuse)
    save(job, 2, as_hf=True)
    shard = "model-00001-of-00001.safetensors"
    actor = f"{job.step(2)}/actor"
    with open(f"{actor}/{shard}", "rb") as one, open(f"{actor}/huggingface/{shard}", "rb") as other:
        assert one.read() == other.read()
    assert os.stat(f"{actor}/{shard}").st_nlink == 1


@pytest.mark.fault("a truncated meta file silently restarts training at step 0")
def test_a_damaged_checkpoint_is_skipped_and_none_left_is_an_error(job):
    save(job, 2)
    save(job, 4)
    os.truncate(f"{job.step(4)}/actor/model-00001-of-00001.safetensors", 10)
    assert find_state(job) == state_at(2)
    for damage in (lambda path: os.truncate(path, 10), os.unlink):
        damage(f"{job.step(2)}/training/trainer.json")
        with pytest.raises(CorruptDataError, match="no full checkpoint is complete") as caught:
            find_state(job)
        assert "continue_from_checkpoint" in caught.value.hint


class Refusing(LocalDisk):
    """A disk that refuses some reads of a file."""

    def __init__(self, name, error, times):
        super().__init__()
        self._name, self._error, self.left = name, error, times

    def read(self, path, *limit):
        if path.endswith(self._name) and self.left > 0:
            self.left -= 1
            raise OSError(self._error, os.strerror(self._error), path)
        return super().read(path, *limit)


@pytest.mark.parametrize(
    "name",
    ["global_step_4/training/trainer.json", "global_step_4/manifest.json", "checkpointed_iteration.txt"],
)
@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ENOMEM])
def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_read_again(job, name, error):
    save(job, 2)
    save(job, 4)
    disk, clock = Refusing(name, error, times=3), ManualClock()
    assert find_state(Job(job.root, job.state, disk), clock) == state_at(4)
    assert disk.left == 0


def test_a_checkpoint_that_stays_unreadable_is_not_given_up_for_an_older_one(job):
    save(job, 2)
    save(job, 4)
    disk = Refusing("global_step_4/training/trainer.json", errno.EIO, times=9999)
    with pytest.raises(StorageError, match="Input/output error"):
        find_state(Job(job.root, job.state, disk), ManualClock())


def test_a_checkpoint_newer_than_the_tracker_is_ignored(job):
    save(job, 2)
    save(job, 4)
    job.disk.replace(job.tracker, b"2")
    assert find_state(job) == state_at(2)


def test_a_missing_tracker_falls_back_to_the_newest_checkpoint(job):
    save(job, 2)
    save(job, 4)
    os.unlink(job.tracker)
    assert find_state(job) == state_at(4)


def test_leftovers_of_an_earlier_save_are_removed(job):
    write_step(job, 3)
    directory = begin_training(job, "a")
    with open(f"{directory}/rank_7.pt", "wb"):
        pass
    assert os.listdir(begin_training(job, "b")) == []
    assert not os.path.exists(directory)


def test_a_rank_of_an_earlier_start_cannot_write_into_a_checkpoint(job):
    """It was paused while it wrote; the step was taken away and written again meanwhile."""
    write_step(job, 3)
    late = begin_training(job, "a")
    os.rename(job.step(3), f"{job.root}/vacated")
    save(job, 3)
    with pytest.raises(FileNotFoundError), open(f"{late}/rank_0.pt", "wb"):
        pass
    with pytest.raises(StorageError):
        complete(job, 3, state_at(99).document(), save="a")
    assert read_state(job, 3) == state_at(3)


def test_a_replaced_trainer_cannot_complete_a_checkpoint(job, tmp_path):
    fence = tmp_path / "fence"
    write_step(job, 3)
    begin_training(job, "a")
    with pytest.raises(StorageError):
        complete(job, 3, state_at(3).document(), save="a", fence=str(fence))
    assert full_checkpoints(job) == []
    assert not os.path.exists(job.tracker)


class TrainerOfStep4:
    """One of two trainers that write step 4 with its training state, each by way of a fence of its own."""

    def __init__(self, root, name, disk=None):
        self.job, self.name, self.fence = Job.at(root, disk=disk), name, f"{root}/.syncd/trainer.lock/{name}"
        os.makedirs(self.fence)

    def begin(self):
        directory = begin_training(self.job, self.name, self.fence)
        for file in ("model.pt", "optim.pt"):
            with open(f"{directory}/{file}", "w") as written:
                written.write(self.name)

    def complete(self):
        state = replace(state_at(4), sampler={"by": self.name}).document()
        complete(self.job, 4, state, save=self.name, as_hf=True, fence=self.fence)


def replaced_while_it_saves(root, call, *, at_once):
    """Pause a trainer before one of its calls until it is replaced; `at_once`, its successor's save is over then."""
    root.mkdir()
    write_step(Job.at(root), 4)
    ways = []

    def take_over():
        os.rename(Job.at(root).step(4), f"{root}/vacated")
        shutil.rmtree(first.fence)
        ways.append(TrainerOfStep4(root, "second"))
        write_step(Job.at(root), 4)
        ways[0].begin()
        if at_once:
            ways[0].complete()

    disk = Pausing(call, take_over)
    first = TrainerOfStep4(root, "first", disk)
    with contextlib.suppress(OSError, StorageError):
        first.begin()
        first.complete()
    if ways and not at_once:
        ways[0].complete()
    return disk.calls


@pytest.mark.parametrize("at_once", [True, False], ids=["saved", "saving"])
def test_a_trainer_that_was_paused_changes_no_training_state_of_its_successor(tmp_path, at_once):
    calls = replaced_while_it_saves(tmp_path / "counted", None, at_once=at_once)
    assert calls > 20
    for call in range(1, calls + 1):
        root = tmp_path / f"{call}"
        replaced_while_it_saves(root, call, at_once=at_once)
        job = Job.at(root)
        assert find_state(job).sampler == {"by": "second"}, call
        for file in ("model.pt", "optim.pt"):
            with open(f"{job.step(4)}/training/{file}") as written:
                assert written.read() == "second", (call, file)
        assert not [name for name in os.listdir(job.step(4)) if name.startswith(".training")], call
