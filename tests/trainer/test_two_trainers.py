"""Two real trainers on one job: the second is refused, whatever its name."""

import os
import subprocess
import sys
import time

import pytest
from support.checker import marker
from support.trainers import ENVIRONMENT, write_experiences

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = """
[job]
dir = "{job}"
[model]
path = "{job}/model"
[engine]
name = "tests.tiny"
[algorithm.optimizer]
lr = 0.01
[data]
groups = 2
group_size = 2
consumed = "archive"
[trainer]
name = "{name}"
nproc = 1
total_steps = 6
save_interval = 5
"""


def start(job, name="trainer"):
    path = f"{job}.{name}.toml"
    with open(path, "w", encoding="utf-8") as file:
        file.write(CONFIG.format(job=job, name=name))
    command = [sys.executable, "-m", "trainer", "train", path]
    return subprocess.Popen(
        command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def until_marked(job, step, process):
    deadline = time.monotonic() + 300
    while (marker(job) or 0) < step:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_second_trainer_process_is_refused_under_any_identity(tmp_path):
    job = str(tmp_path / "job")
    os.mkdir(job)
    write_experiences(job, 3)
    first = start(job)
    try:
        until_marked(job, 3, first)
        second = start(job, "another-name")
        output = second.communicate(timeout=300)[0]
        assert second.returncode == 5, output
        assert "another trainer trains this job" in output
        assert "identity" not in output
        write_experiences(job, 3, "e1")
        output = first.communicate(timeout=300)[0]
        assert first.returncode == 0, output
        assert marker(job) == 6
    finally:
        first.kill()
