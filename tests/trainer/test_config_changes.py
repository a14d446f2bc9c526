"""Keys that a person changes between two starts: allowed one by one, recorded, and in force after the resume."""

import getpass
import json
import os
from pathlib import Path

import pytest
from support.job_file import LEAST

pytest.importorskip("torch", reason="the trainer needs torch")

from support.trainers import make_trainer, small_config, write_experiences

from syncd.errors import ConfigError, CorruptDataError, UsageError
from syncd.jobfile.model import KEYS
from syncd.synchronizer import Synchronizer
from syncd.transports.ranks import Ranks
from trainer.cli.main import run as trainer
from trainer.config.changes import UNSOUND, check_allowed
from trainer.config.job_config import enter_job_dir
from trainer.config.load import load_config
from trainer.launch.process_group import share_config
from trainer.launch.rank_env import RankEnv
from trainer.stages import load_stages, run_stages

LR = "algorithm.optimizer.lr"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file.toml"
    path.write_text(LEAST)
    return str(path)


def changes(directory):
    with open(f"{directory}/changes.json", encoding="utf-8") as record:
        return json.load(record)["changes"]


def test_a_change_without_allow_change_is_refused_with_a_hint(file):
    enter_job_dir(load_config(file))
    later = load_config(file, [f"--{LR}", "2e-6", "--algorithm.clip_ratio", "0.3", "--job.seed", "1"])
    with pytest.raises(ConfigError) as caught:
        enter_job_dir(later)
    assert f"--allow-change {LR}" in caught.value.hint
    assert "--allow-change algorithm.clip_ratio" in caught.value.hint
    assert "--allow-change job.seed" not in caught.value.hint


def test_an_allowed_change_is_applied_and_recorded(file):
    directory = enter_job_dir(load_config(file)).job.dir
    Path(directory, "latest_checkpointed_iteration.txt").write_text("12")
    later = load_config(file, [f"--{LR}", "2e-6"])
    enter_job_dir(later, [LR])
    (one,) = changes(directory)
    assert (one["key"], one["old"], one["new"], one["step"]) == (LR, 1e-6, 2e-6, 12)
    assert (one["user"], one["host"]) == (getpass.getuser(), os.uname().nodename)
    assert load_config(f"{directory}/config.toml").algorithm.optimizer.lr == 2e-6
    enter_job_dir(later, [LR])
    enter_job_dir(later)
    assert len(changes(directory)) == 1, "the same start again changes nothing"
    enter_job_dir(load_config(file), [LR])
    assert [(each["old"], each["new"]) for each in changes(directory)] == [(1e-6, 2e-6), (2e-6, 1e-6)]


def test_one_key_that_is_not_allowed_refuses_the_whole_start(file):
    directory = enter_job_dir(load_config(file)).job.dir
    later = load_config(file, [f"--{LR}", "2e-6", "--data.max_age", "2"])
    with pytest.raises(ConfigError) as caught:
        enter_job_dir(later, [LR])
    assert LR not in str(caught.value)
    assert "data.max_age" in str(caught.value)
    assert not os.path.exists(f"{directory}/changes.json")


def test_a_damaged_record_is_not_overwritten(file):
    directory = enter_job_dir(load_config(file)).job.dir
    Path(directory, "changes.json").write_text("{")
    with pytest.raises(CorruptDataError):
        enter_job_dir(load_config(file, [f"--{LR}", "2e-6"]), [LR])
    assert load_config(f"{directory}/config.toml").algorithm.optimizer.lr == 1e-6


@pytest.mark.parametrize("key", sorted(UNSOUND))
def test_a_change_that_would_be_unsound_is_refused_with_the_reason(key):
    assert KEYS.all[key].fixed
    with pytest.raises(UsageError) as caught:
        check_allowed([key])
    assert UNSOUND[key] in str(caught.value)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("algorithm.optimizer.rl", "did you mean algorithm.optimizer.lr?"),
        ("sync.offset", "may change anyway"),
        ("model.lora.rank", "the checkpoint holds adapters of that rank"),
    ],
)
def test_allow_change_accepts_exact_names_of_fixed_keys_only(file, capsys, key, says):
    assert trainer(["train", file, "--allow-change", key]) == 2
    assert says in capsys.readouterr().err


def test_the_micro_batch_size_may_change_without_allow_change(file):
    enter_job_dir(load_config(file))
    assert enter_job_dir(load_config(file, ["--engine.micro_batch_size", "4"])).engine.micro_batch_size == 4


def test_a_dry_run_distinguishes_changes_from_contradictions(file, capsys):
    enter_job_dir(load_config(file))
    more = [f"--{LR}", "2e-6", "--job.seed", "1", "--allow-change", LR, "--dry-run"]
    trainer(["train", file, *more])  # there is no model, which it says last
    said = capsys.readouterr().err
    assert f"change: {LR}: 1e-06 in" in said
    assert "contradiction: job.seed: 0 in" in said


def trained(config):
    with Synchronizer.open(config.job.dir, "trainer", poll=0.01) as sync:
        made, shown = make_trainer(config, sync)
        made.prepare()
        assert made.train() == 0
        made.shutdown()
    return made.engine, [record["actor/lr"] for _, record in shown.records]


def test_a_changed_learning_rate_applies_after_the_resume(tmp_path):
    write_experiences(tmp_path, 6)
    assert trained(small_config(tmp_path, trainer={"total_steps": 2}))[1] == [0.01, 0.01]
    optimizer = {"lr": 0.003, "weight_decay": 0.1, "betas": [0.8, 0.99]}
    later = small_config(tmp_path, trainer={"total_steps": 4}, algorithm={"optimizer": optimizer})
    engine, rates = trained(later)
    assert rates == [0.003, 0.003]
    group = engine.optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"]) == (0.1, (0.8, 0.99))


def test_allow_change_works_on_ranks_that_torchrun_starts(file):
    directory = enter_job_dir(load_config(file)).job.dir
    later = load_config(file, [f"--{LR}", "2e-6"])
    place = RankEnv(0, 0, 1, 1, "127.0.0.1", 1, "torchrun")
    share_config(later, place, Ranks(), [LR])
    assert [one["new"] for one in changes(directory)] == [2e-6]


def test_allow_change_works_with_stages(tmp_path):
    path = tmp_path / "stages.toml"
    path.write_text('[job]\ndir = "job"\n[model]\npath = "model"\n[[stages]]\nname = "a"\n')
    run_stages(load_stages(str(path)), lambda config: enter_job_dir(config) and 75, print)
    later, ran = load_stages(str(path), [f"--{LR}", "2e-6"]), []
    with pytest.raises(ConfigError, match=LR):
        run_stages(later, ran.append, print)
    run_stages(later, lambda config: ran.append(enter_job_dir(config, [LR])) or 75, print, [LR])
    assert [one["key"] for one in changes(ran[0].job.dir)] == [LR]
