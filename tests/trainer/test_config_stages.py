"""Stages run in order, are not run twice, go on where they failed, and are all checked before the first."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="the trainer needs pydantic")

from syncd.errors import ConfigError, CorruptDataError, StorageError, UsageError
from syncd.protocol.layout import FULL_CHECKPOINT, TRACKER
from trainer.config.job_config import enter_job_dir
from trainer.stages import load_stages, newest_model, preview_stages, run_stages

FILE = """
[job]
dir = "jobs"
[model]
path = "start"
[sync]
interval = 4
[[stages]]
name = "sft"
algorithm.name = "sft"
data.sft_path = "examples.jsonl"
[[stages]]
name = "grpo"
sync.interval = 2
[[stages]]
name = "last"
model.path = "given"
"""


@pytest.fixture
def write(tmp_path):
    def write(text=FILE):
        path = tmp_path / "stages.toml"
        path.write_text(text)
        return str(path)

    return write


class Training:
    """Stands in for the trainer: keeps the configuration as it does, and leaves a full checkpoint."""

    def __init__(self, *codes):
        self.codes, self.ran = list(codes), []

    def __call__(self, config):
        config = enter_job_dir(config)
        self.ran.append(config)
        code = self.codes.pop(0) if self.codes else 0
        if code == 0:
            leave_checkpoint(config.job.dir, 7)
        return code

    @property
    def names(self):
        return [os.path.basename(config.job.dir) for config in self.ran]


def leave_checkpoint(directory, step, *, whole=True):
    actor = Path(directory, f"global_step_{step}", "actor")
    (actor / "huggingface" if whole else actor).mkdir(parents=True)
    (actor.parent / FULL_CHECKPOINT).touch()
    Path(directory, TRACKER).write_text(str(step))


def go(path, *codes, overrides=()):
    training, said = Training(*codes), []
    return run_stages(load_stages(path, overrides), training, said.append), training, said


def refused(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_stages(path, overrides)
    return str(caught.value)


def test_stages_run_in_order_each_from_the_model_of_the_one_before(write, tmp_path):
    code, training, said = go(write(), overrides=["--data.groups", "2"])
    assert (code, training.names) == (0, ["sft", "grpo", "last"])
    sft, grpo, last = training.ran
    assert sft.job.dir == f"{tmp_path}/jobs/sft"
    assert [config.model.path for config in training.ran] == [
        f"{tmp_path}/start",
        f"{tmp_path}/jobs/sft/global_step_7/actor/huggingface",
        f"{tmp_path}/given",
    ]
    assert (sft.algorithm.name, grpo.algorithm.name) == ("sft", "grpo")
    assert [config.sync.interval for config in training.ran] == [4, 2, 4]
    assert {config.data.groups for config in training.ran} == {2}
    assert not any(config.stages for config in training.ran)
    assert len(said) == 3
    assert last.job.source == f"{tmp_path}/stages.toml"


def test_completed_stages_are_not_run_again(write):
    go(write())
    code, training, said = go(write())
    assert (code, training.names) == (0, [])
    assert said == ["stage sft: done before", "stage grpo: done before", "stage last: done before"]


@pytest.mark.parametrize("exit_code", [75, 1, 74])
def test_a_failed_stage_returns_its_exit_code_and_resumes_on_the_next_start(write, exit_code):
    code, training, _ = go(write(), 0, exit_code)
    assert (code, training.names) == (exit_code, ["sft", "grpo"])
    code, training, _ = go(write())
    assert (code, training.names) == (0, ["grpo", "last"])


def test_an_exception_leaves_the_stage_to_the_next_start(write):
    def broken(config):
        raise StorageError("full")

    with pytest.raises(StorageError):
        run_stages(load_stages(write()), broken, lambda line: None)
    assert go(write())[1].names == ["sft", "grpo", "last"]


def test_a_stage_resumes_with_the_model_that_it_started_with(write, tmp_path):
    go(write(), 0, 75)
    leave_checkpoint(f"{tmp_path}/jobs/sft", 9)
    _, training, _ = go(write())
    assert training.ran[0].model.path == f"{tmp_path}/jobs/sft/global_step_7/actor/huggingface"


def test_a_checkpoint_without_a_huggingface_directory_is_used_as_it_is(tmp_path):
    leave_checkpoint(tmp_path, 3, whole=False)
    assert newest_model(str(tmp_path)) == f"{tmp_path}/global_step_3/actor"


@pytest.mark.parametrize("tracker", [None, "x", "4"])
def test_the_next_stage_is_refused_without_a_full_checkpoint(tmp_path, tracker):
    if tracker is not None:
        (tmp_path / TRACKER).write_text(tracker)
    with pytest.raises(StorageError, match="no full checkpoint") as caught:
        newest_model(str(tmp_path))
    assert "model.path" in caught.value.hint


def test_a_contradiction_in_any_stage_is_reported_before_one_runs(write, tmp_path):
    go(write(), 0, 75)
    with pytest.raises(ConfigError) as caught:
        go(write(), overrides=["--algorithm.clip_ratio", "0.3"])
    assert str(caught.value).splitlines()[1:] == [
        f"  algorithm.clip_ratio: {kept} in {tmp_path}/jobs/{name}/config.toml, 0.3 now"
        for name, kept in (("sft", '"none"'), ("grpo", 0.2))
    ]


def test_the_first_stage_s_model_is_fixed_once_that_stage_is_done(write):
    go(write(), 0, 75)
    with pytest.raises(ConfigError, match=r"model\.path: "):
        go(write(), overrides=["--model.path", "another"])


def test_model_path_on_the_command_line_applies_to_the_first_stage_only(write, tmp_path):
    _, training, _ = go(write(), overrides=["--model.path", "/another"])
    assert training.ran[0].model.path == "/another"
    assert training.ran[1].model.path.startswith(f"{tmp_path}/jobs/sft/")


def test_the_preview_of_stages_matches_what_runs(write, tmp_path):
    go(write(), 0, 75)
    seen = {
        stage.name: (stage.config.model.path, found) for stage, found in preview_stages(load_stages(write()))
    }
    assert seen["grpo"] == (f"{tmp_path}/jobs/sft/global_step_7/actor/huggingface", ())
    later = dict(previewed_by_name(write(), "--sync.interval", "8"))
    assert [len(later[name]) for name in ("sft", "grpo", "last")] == [1, 1, 0]


def previewed_by_name(path, *overrides):
    return [(stage.name, found) for stage, found in preview_stages(load_stages(path, overrides))]


def test_no_stage_starts_from_an_adapter(write):
    adapters = 'name = "sft"\nmodel.lora = { rank = 4 }'
    text = FILE.replace('name = "sft"', adapters, 1)
    assert "stage grpo starts from the last step of stage sft" in refused(write(text))
    load_stages(write(text.replace("rank = 4", 'rank = 4, publish = "merged"')))


def test_completed_stages_must_stay_first(write):
    go(write(), 0, 75)
    with pytest.raises(ConfigError, match="are not the first of new, sft"):
        go(write(FILE.replace("[[stages]]", '[[stages]]\nname = "new"\n[[stages]]', 1)))


def test_stages_may_be_added_at_the_end(write):
    go(write())
    assert go(write(f'{FILE}\n[[stages]]\nname = "more"\n'))[1].names == ["more"]


def test_a_fresh_start_runs_all_stages_in_a_new_directory(write, tmp_path):
    anew = ["--trainer.continue_from_checkpoint", "false"]
    go(write(), 0, 75, overrides=anew)
    _, training, _ = go(write(), overrides=anew)
    assert training.names == ["sft", "grpo", "last"]
    assert {os.path.dirname(config.job.dir) for config in training.ran} == {f"{tmp_path}/jobs-2"}


def test_each_stage_has_its_own_state_directory(write, tmp_path):
    _, training, _ = go(write(), overrides=["--job.state_dir", "/state"])
    assert [config.job.state_dir for config in training.ran] == ["/state/sft", "/state/grpo", "/state/last"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FILE.partition("[[stages]]")[0], "there is no [[stages]]"),
        (FILE.replace('name = "grpo"', 'name = "a/b"'), 'name of stage 2, "a/b", cannot be a directory'),
        (FILE.replace('name = "grpo"', 'name = ".."'), 'name of stage 2, "..", cannot be a directory'),
        (FILE.replace('name = "grpo"', "name = 3"), "name of stage 2, 3, cannot be a directory"),
        (FILE.replace('name = "grpo"', ""), 'name of stage 2, "none", cannot be a directory'),
        (FILE.replace('name = "grpo"', 'name = "sft"'), "two stages are called 'sft'"),
        (FILE.replace("sync.interval = 2", "job.dir = 'x'"), "job.dir is shared by all stages"),
        (
            FILE.replace("sync.interval = 2", "trainer.continue_from_checkpoint = false"),
            "trainer.continue_from_checkpoint is shared by all stages",
        ),
        (FILE.replace("sync.interval = 2", "sync.intervall = 2"), "unknown key sync.intervall"),
        (FILE.replace("sync.interval = 2", "nope.x = 2"), "unknown key nope"),
        (FILE.replace("sync.interval = 2", "model = 2"), "model = 2 is not a table"),
        (FILE.replace("sync.interval = 2", "data.max_waiting = 2"), "data.max_waiting = 2 is less than"),
    ],
)
def test_an_error_in_any_stage_is_reported_before_one_runs(write, tmp_path, text, said):
    assert said in refused(write(text))
    assert not (tmp_path / "jobs").exists()


def test_errors_name_their_stage_and_common_errors_appear_once(write):
    text = FILE.replace("interval = 4", "interval = 0", 1).replace("sync.interval = 2", "sync.offset = -1")
    said = refused(write(text))
    assert said.count("sync.interval = 0") == 1
    assert "sync.offset = -1 is not a whole number at least 0: " in said
    assert "stages.toml, stage 'grpo'" in said


def test_stages_on_the_command_line_are_refused(write):
    assert "stages are given in the file" in refused(write(), "--stages", "[]")
    with pytest.raises(UsageError):
        load_stages(write(), ["nonsense"])


@pytest.mark.parametrize("text", ["{", "[]", '{"done": 3, "models": {}}', '{"done": []}'])
def test_a_damaged_stage_record_is_an_error(write, tmp_path, text):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "stages.json").write_text(text)
    with pytest.raises(CorruptDataError):
        go(write())


def test_the_stage_record_lists_completed_stages_and_started_models(write, tmp_path):
    go(write(), 0, 75)
    record = json.loads((tmp_path / "jobs" / "stages.json").read_text())
    assert record["done"] == ["sft"]
    assert set(record["models"]) == {"sft", "grpo"}
