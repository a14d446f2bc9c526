"""`trainer stages` of docs/launch.md, typed in bash, with an engine that is a few numbers."""

import json

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

from support.job_file import tiny_job, write_job
from support.paths import PYTHONPATH
from support.readme import typed
from support.trainers import write_experiences

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def new_job(directory):
    directory.mkdir(parents=True)
    write_experiences(directory, 4)


def test_the_stages_of_a_file_train_one_after_the_other(tmp_path):
    for name in ("first", "second"):
        new_job(tmp_path / "job" / name)
    job = tiny_job("job", engine={"device": "cpu"}, trainer={"total_steps": 2})
    stages = [{"name": "first", "trainer": {"total_steps": 1}}, {"name": "second", "model": {"path": "none"}}]
    write_job(tmp_path / "grpo.toml", job | {"stages": stages})
    typed("trainer stages grpo.toml", tmp_path, PYTHONPATH=PYTHONPATH, OMP_NUM_THREADS="1")
    for name, steps in (("first", [1]), ("second", [1, 2])):
        lines = (tmp_path / "job" / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == steps
