"""A real daemon beside the trainer: who starts one, what happens when it or the trainer dies, and the end."""

import os
import signal
import subprocess
import sys

import pytest
from support import checker
from support.jobs import write_step
from support.launching import OWN, alive, until

from syncd.jobfile.model import JobFile
from syncd.protocol.layout import Job
from syncd.protocol.leadership import latest_token, read_leader
from trainer.launch import daemon as beside
from trainer.launch.daemon import options, start_daemon


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(beside, "EVERY", 0.05)


def configured(path, **sections):
    os.makedirs(path, exist_ok=True)
    return JobFile.model_validate({"job": {"dir": str(path)}, "model": {"path": "none"}, **sections})


def leads(job, pid):
    token = latest_token(job)
    return token > 0 and read_leader(job, token).process.pid == pid


def test_the_daemon_publishes_the_last_step_and_exits_with_the_run(tmp_path):
    config = configured(tmp_path / "job")
    job, daemon = Job.at(config.job.dir), start_daemon(config)
    pid = daemon.pid
    assert alive(pid)
    write_step(job, 3)
    daemon.close()
    assert checker.pair(job.root) == (1, 3)
    assert not alive(pid)
    daemon.check()
    assert daemon.pid is None


def test_a_killed_daemon_is_restarted_and_another_leader_is_left_alone(tmp_path):
    config = configured(tmp_path / "job")
    job, daemon = Job.at(config.job.dir), start_daemon(config)
    other = None
    try:
        first = daemon.pid
        until(lambda: leads(job, first))
        os.kill(first, signal.SIGKILL)
        until(lambda: daemon.check() or daemon.pid not in (None, first))
        until(lambda: leads(job, daemon.pid))
        other = start_daemon(config)
        assert other.pid is None
    finally:
        daemon.close()
        if other:
            other.close()


def test_a_daemon_that_cannot_start_is_given_up_and_reported(tmp_path, capsys):
    config = configured(tmp_path / "job", daemon={"log_level": "info"})
    (tmp_path / "job/config.toml").write_text("[daemon]\nkeep_lost = 1\n")
    daemon = start_daemon(config)
    until(lambda: daemon.check() or daemon._ended == beside.ATTEMPTS)
    daemon.check()
    assert daemon.pid is None
    assert "unknown key 'keep_lost'" in (tmp_path / "job/.syncd/daemon.log").read_text()
    assert "syncd watch" in capsys.readouterr().out
    daemon.close()


def test_no_job_directory_is_created_if_it_is_not_mounted(tmp_path):
    config = configured(tmp_path / "job")
    os.rmdir(tmp_path / "job")
    daemon = start_daemon(config)
    assert daemon.pid is None
    assert not os.path.exists(tmp_path / "job")
    daemon.close()


def test_a_killed_trainer_leaves_no_daemon(tmp_path):
    config = configured(tmp_path / "job")
    program = (
        "import sys, time; from trainer.launch.daemon import start_daemon\n"
        "from syncd.jobfile.model import JobFile\n"
        "print(start_daemon(JobFile.model_validate_json(sys.argv[1])).pid, flush=True); time.sleep(60)"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", program, config.model_dump_json()],
        stdout=subprocess.PIPE, text=True, env=os.environ | OWN,
    )  # fmt: skip
    pid = int(trainer.stdout.readline())
    until(lambda: leads(Job.at(config.job.dir), pid))
    trainer.kill()
    trainer.communicate()
    until(lambda: not alive(pid))


def test_daemon_options_follow_the_configuration(tmp_path):
    trainer = {"max_checkpoints_to_keep": 3}
    assert options(configured(tmp_path, trainer=trainer)) == ["--keep-full", "3", "--log-level", "warning"]
    given = {"keep_full": 1, "log_level": "debug"}
    assert options(configured(tmp_path, trainer=trainer, daemon=given)) == []
    assert start_daemon(configured(tmp_path, trainer={"start_daemon": False})) is None
