"""One trainer a job: who may train it, and what one that was replaced can still do."""

import os
import subprocess
import sys

import pytest
from support.jobs import ManualClock

from syncd.errors import FencedError, LockHeldError
from syncd.protocol.layout import Job
from syncd.protocol.leadership import Leader, encode_leader, token_name
from syncd.protocol.process import Process
from trainer.lock import TrainerLock

ELSEWHERE = Process("another-boot", "another-namespace", 7, 7)


def led_from_elsewhere(job, beat=0):
    """Leave the lock of a trainer on another host."""
    directory = f"{job.trainer_lock}/{token_name(1)}"
    job.disk.make_directory(directory)
    job.disk.replace(f"{directory}/leader.json", encode_leader(Leader("a", "far", ELSEWHERE, beat)))
    return directory


def test_a_second_trainer_is_refused_without_a_hint_at_another_identity(tmp_path):
    job = Job.at(tmp_path)
    with TrainerLock.acquire(job):
        with pytest.raises(LockHeldError, match=f"process {os.getpid()} on") as caught:
            TrainerLock.acquire(job)
        assert "syncd status" in caught.value.hint
        assert "identity" not in caught.value.hint
        assert caught.value.exit_code == 5
    TrainerLock.acquire(job).close()


def test_a_killed_trainer_on_this_host_is_replaced_at_once(tmp_path):
    job = Job.at(tmp_path)
    program = (
        "import os,sys\nfrom syncd.protocol.layout import Job\nfrom trainer.lock import TrainerLock\n"
        "TrainerLock.acquire(Job.at(sys.argv[1]))\nos._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", program, job.root], check=False).returncode == 9
    clock = ManualClock()
    TrainerLock.acquire(job, clock).close()
    assert clock.at == ManualClock().at, "it waited for a process that is known to be gone"


def test_a_silent_remote_trainer_is_replaced_and_fenced_after_the_time_out(tmp_path):
    job, clock = Job.at(tmp_path), ManualClock()
    fence = led_from_elsewhere(job)
    with TrainerLock.acquire(job, clock) as lock:
        assert clock.at >= ManualClock().at + 15
        assert not os.path.exists(fence)
        assert os.path.isdir(lock.fence)


def test_a_remote_trainer_that_renews_its_lock_is_not_replaced(tmp_path):
    job, beats = Job.at(tmp_path), iter(range(1, 1000))

    class Beating(ManualClock):
        def sleep(self, seconds):
            super().sleep(seconds)
            led_from_elsewhere(job, next(beats))

    led_from_elsewhere(job)
    with pytest.raises(LockHeldError, match="process 7 on far"):
        TrainerLock.acquire(job, Beating())


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_trainer_that_lost_its_lock_exits_with_75(tmp_path, how):
    job, clock = Job.at(tmp_path), ManualClock()
    lock = TrainerLock.acquire(job, clock)
    lock.check()
    os.rename(lock.fence, tmp_path / "gone")
    if how == "replaced":
        job.disk.make_directory(f"{job.trainer_lock}/{token_name(2)}")
    clock.at += 100
    lock._beat()
    with pytest.raises(FencedError, match="taken over" if how == "replaced" else "was removed") as caught:
        lock.check()
    assert caught.value.exit_code == 75
    lock.close()
