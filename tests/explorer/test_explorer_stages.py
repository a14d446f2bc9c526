"""`explorer run --stage`: a file with stages is explored in the directory, and with the model, of one of them."""

import json
import os
import threading

import pytest

pytest.importorskip("pydantic", reason="the explorer needs pydantic")

from explorer_hooks.cli.main import run as explorer
from explorer_hooks.run.load import load_file
from explorer_hooks.run.stages import wait_for
from syncd.errors import ConfigError, CorruptDataError, TimedOutError

FILE = """
[job]
dir = "jobs"
state_dir = "state"
[model]
path = "start"
[data]
group_size = 4
[explorer]
tasks = "tasks.jsonl"
[[stages]]
name = "sft"
algorithm.name = "sft"
[[stages]]
name = "grpo"
data.group_size = 6
explorer.sampling.max_tokens = 7
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "stages.toml"
    path.write_text(FILE)
    os.mkdir(tmp_path / "jobs")
    return str(path)


def record(file, *done, **models):
    jobs = os.path.join(os.path.dirname(file), "jobs")
    for name in models:
        os.makedirs(f"{jobs}/{name}", exist_ok=True)
    with open(f"{jobs}/stages.json.new", "w", encoding="ascii") as written:
        json.dump({"done": done, "models": models}, written)
    os.replace(f"{jobs}/stages.json.new", f"{jobs}/stages.json")


class Clock:
    """A clock that moves only while somebody sleeps."""

    def __init__(self, meanwhile=lambda now: None):
        self.now, self.meanwhile = 0.0, meanwhile

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.meanwhile(self.now)


def test_a_file_with_stages_needs_a_stage_and_its_names_are_listed(file, capsys):
    assert explorer(["run", file]) == 78
    said = capsys.readouterr().err
    assert "[[stages]]" in said
    assert f"explorer run {file} --stage sft" in said
    assert f"explorer run {file} --stage grpo" in said


@pytest.mark.parametrize(
    ("text", "hint"), [(FILE, "sft, grpo"), (FILE.partition("[[")[0], "leave --stage out")]
)
def test_an_unknown_stage_is_refused(file, text, hint):
    with open(file, "w", encoding="ascii") as written:
        written.write(text)
    with pytest.raises(ConfigError) as caught:
        load_file(file, stage="gpro")
    assert "'gpro'" in str(caught.value)
    assert hint in caught.value.hint


def test_a_stage_has_its_own_keys_and_directory(file, tmp_path):
    found = load_file(file, ["--explorer.groups", "3"], "grpo")
    assert (found.job.dir, found.job.state_dir) == (f"{tmp_path}/jobs/grpo", f"{tmp_path}/state/grpo")
    assert (found.data.group_size, found.explorer.sampling.max_tokens, found.explorer.groups) == (6, 7, 3)
    assert load_file(file, stage="sft").data.group_size == 4


def test_a_wrong_key_in_a_stage_is_reported_with_the_stage(file):
    with open(file, "a", encoding="ascii") as written:
        written.write("explorer.ahaed = 2\n")
    with pytest.raises(ConfigError, match=r"unknown key explorer.ahaed.*stage 'grpo'"):
        load_file(file, stage="grpo")


def test_an_explorer_waits_until_its_stage_starts_and_uses_its_model(file, tmp_path, capsys):
    record(file, sft="start")

    def meanwhile(now):
        if now >= 130:
            record(file, "sft", sft="start", grpo=f"{tmp_path}/jobs/sft/global_step_4/actor/huggingface")

    begun = wait_for(load_file(file, stage="grpo"), "grpo", Clock(meanwhile))
    assert begun.model.path == f"{tmp_path}/jobs/sft/global_step_4/actor/huggingface"
    said = capsys.readouterr().err
    assert said.count("stage_awaited") == 3
    assert f"{tmp_path}/jobs/stages.json" in said
    assert '"stage": "grpo"' in said
    assert '"begun": ["sft"]' in said


def test_waiting_for_a_stage_times_out_with_exit_code_4(file):
    with pytest.raises(TimedOutError, match="stage grpo has not begun within 90 s") as caught:
        wait_for(load_file(file, ["--sync.timeout", "90"], "grpo"), "grpo", Clock())
    assert (caught.value.exit_code, f"trainer stages {file}" in caught.value.hint) == (4, True)


def test_a_completed_stage_is_not_explored(file, capsys):
    record(file, "sft", sft="start")
    assert explorer(["run", file, "--stage", "sft"]) == 0
    assert "explorer ended: stage sft is done" in capsys.readouterr().err


def test_a_signal_ends_the_wait_for_a_stage(file):
    threading.Timer(1.0, lambda: os.kill(os.getpid(), 15)).start()
    assert wait_for(load_file(file, stage="grpo"), "grpo") == "told to stop"


def test_a_damaged_stage_record_is_an_error(file, tmp_path):
    (tmp_path / "jobs/stages.json").write_text("{")
    with pytest.raises(CorruptDataError, match="not a record of stages"):
        wait_for(load_file(file, stage="grpo"), "grpo")


def test_a_stage_without_its_directory_has_not_started(file, tmp_path):
    record(file, grpo="start")
    os.rmdir(tmp_path / "jobs/grpo")
    begun = wait_for(
        load_file(file, stage="grpo"), "grpo", Clock(lambda now: now < 3 or record(file, grpo="start"))
    )
    assert begun.model.path == "start"
