"""The job directory that a start gets, and the copy of its configuration."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from support.job_file import LEAST

pytest.importorskip("pydantic", reason="the trainer needs pydantic")

from support.cli import environment

from syncd.config import load as load_daemon
from syncd.errors import ConfigError, StorageError
from syncd.jobfile.model import KEYS
from trainer.config.job_config import (
    contradictions,
    enter_job_dir,
    keep_config,
    kept_path,
    make_job_dir,
    next_job_dir,
)
from trainer.config.load import FIRST_LINE, load_config


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file.toml"
    path.write_text(LEAST)
    return str(path)


ANEW = ["--trainer.continue_from_checkpoint", "false"]


def read(path):
    return Path(path).read_text(encoding="utf-8")


def same(one, other):
    """Compare two configurations but for what they were read from and the daemon's derived key."""
    job = {"source": "", "dir": ""}
    left, right = (
        config.model_copy(update={"job": config.job.model_copy(update=job), "daemon": {}})
        for config in (one, other)
    )
    return left == right


def test_the_saved_config_has_all_keys_and_loads_as_the_same_configuration(file, tmp_path):
    config = enter_job_dir(load_config(file, ["--data.max_age", "3", "--monitor.kinds", '["wandb"]']))
    path = kept_path(config.job.dir)
    text = read(path)
    assert text.startswith("# The resolved configuration of this job")
    table = tomllib.loads(text)
    assert table["algorithm"]["clip_ratio_low"] == "none"
    assert table["explorer"] == {}  # of explorers what was given
    assert table["daemon"] == {"keep_full": 0}
    for key in (key for key in KEYS.all if not key.startswith(("explorer.", "daemon."))):
        place = table
        for part in key.split("."):
            assert part in place or key.startswith("stages"), key  # tables that only a file with stages has
            place = place.get(part, {})
    again = load_config(path)
    assert same(again, config)
    assert again.job.dir == config.job.dir == f"{tmp_path}/job"
    assert [name for name in os.listdir(config.job.dir) if name.startswith(".")] == []


def test_the_daemon_reads_its_table_from_the_saved_config(file):
    config = enter_job_dir(
        load_config(file, ["--trainer.max_checkpoints_to_keep", "3", "--daemon.keep_last", "5"])
    )
    daemon = load_daemon(kept_path(config.job.dir), {})
    assert (daemon.keep_full, daemon.keep_last) == (3, 5)


def test_keep_full_follows_max_checkpoints_to_keep_on_a_restart_from_the_copy(file):
    config = enter_job_dir(load_config(file, ["--trainer.max_checkpoints_to_keep", "3"]))
    path = kept_path(config.job.dir)
    enter_job_dir(load_config(path, ["--trainer.max_checkpoints_to_keep", "4"]))
    assert load_daemon(path, {}).keep_full == 4


def test_an_explicit_keep_full_is_kept(file):
    config = enter_job_dir(load_config(file, ["--daemon.keep_full", "9"]))
    path = kept_path(config.job.dir)
    enter_job_dir(load_config(path, ["--trainer.max_checkpoints_to_keep", "4"]))
    assert load_daemon(path, {}).keep_full == 9


def test_a_contradicting_start_names_each_key_with_both_values(file, tmp_path):
    enter_job_dir(load_config(file))
    path = f"{tmp_path}/job/config.toml"
    before = read(path)
    later = load_config(
        file, ["--algorithm.clip_ratio", "0.3", "--data.max_age", "2", "--job.seed=1", "--sync.offset=1"]
    )
    with pytest.raises(ConfigError) as caught:
        enter_job_dir(later)
    assert str(caught.value).splitlines()[1:] == [
        f"  job.seed: 0 in {path}, 1 now",
        f"  algorithm.clip_ratio: 0.2 in {path}, 0.3 now",
        f'  data.max_age: "none" in {path}, 2 now',
    ]
    assert "--trainer.continue_from_checkpoint false" in caught.value.hint
    assert read(path) == before


def test_keys_that_are_not_fixed_may_change_and_the_saved_config_follows(file):
    enter_job_dir(load_config(file))
    later = enter_job_dir(load_config(file, ["--trainer.total_steps", "9", "--sync.timeout", "5"]))
    assert load_config(kept_path(later.job.dir)).trainer.total_steps == 9


def test_a_key_missing_from_the_saved_config_counts_as_its_default(file):
    config = enter_job_dir(load_config(file))
    path = kept_path(config.job.dir)
    text = read(path).replace("seed = 0\n", "")
    Path(path).write_text(text, encoding="utf-8")
    assert contradictions(load_config(file)) == ()
    assert [found.key for found in contradictions(load_config(file, ["--job.seed", "4"]))] == ["job.seed"]


def test_a_damaged_saved_config_is_an_error_and_is_left_unchanged(file):
    config = enter_job_dir(load_config(file))
    with open(kept_path(config.job.dir), "a", encoding="utf-8") as kept:
        kept.write("[[[")
    with pytest.raises(ConfigError, match="not TOML"):
        enter_job_dir(config)
    assert read(kept_path(config.job.dir)).endswith("[[[")


def test_a_fresh_start_takes_the_first_unused_directory(file, tmp_path):
    config = load_config(file, ANEW)
    taken = [enter_job_dir(config).job.dir for _ in range(3)]
    assert taken == [f"{tmp_path}/job", f"{tmp_path}/job-2", f"{tmp_path}/job-3"]
    assert next_job_dir(config).job.dir == f"{tmp_path}/job-4"


def test_a_fresh_start_takes_an_empty_directory_and_skips_files(file, tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "something").touch()
    (tmp_path / "job-2").touch()
    (tmp_path / "job-3").mkdir()
    assert make_job_dir(load_config(file, ANEW)).job.dir == f"{tmp_path}/job-3"


def test_resolving_a_resolved_job_directory_changes_nothing(file):
    settled = make_job_dir(load_config(file, ANEW))
    keep_config(settled)
    assert make_job_dir(settled) == settled
    assert make_job_dir(load_config(kept_path(settled.job.dir))).job.dir == settled.job.dir


def test_a_new_job_directory_gets_a_new_state_directory(file, tmp_path):
    config = load_config(file, [*ANEW, "--job.state_dir", str(tmp_path / "state")])
    enter_job_dir(config)
    again = enter_job_dir(config)
    assert (again.job.dir, again.job.state_dir) == (f"{tmp_path}/job-2", f"{tmp_path}/state-2")


SETTLE = """
import sys
from trainer.config.job_config import make_job_dir
from trainer.config.load import load_config
config = load_config(sys.argv[1], sys.argv[2:])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(5):
    print(make_job_dir(config).job.dir)
"""


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.slow
def test_concurrent_starts_never_share_a_directory(file, tmp_path, there):
    if there:
        (tmp_path / "job").mkdir()
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SETTLE, file, *ANEW]
    starts = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment()) for _ in range(4)
    ]
    assert [start.stdout.readline() for start in starts] == ["ready\n"] * 4
    for start in starts:
        start.stdin.write("go\n")
        start.stdin.flush()
    taken = [name for start in starts for name in start.communicate(timeout=60)[0].split()]
    assert len(set(taken)) == len(taken) == 20


def test_a_user_s_own_config_in_the_job_directory_is_never_overwritten(file, tmp_path):
    (tmp_path / "job").mkdir()
    own = tmp_path / "job" / "config.toml"
    own.write_text("[daemon]\nkeep_last = 7\n")
    with pytest.raises(ConfigError, match="did not write") as caught:
        enter_job_dir(load_config(file))
    assert str(own) in str(caught.value)
    assert own.read_text() == "[daemon]\nkeep_last = 7\n"


@pytest.mark.parametrize("options", [[], ["--algorithm.clip_ratio", "0.3"], ANEW])
def test_a_user_s_own_config_that_is_given_is_saved_under_another_name(tmp_path, options):
    job = tmp_path / "job"
    job.mkdir()
    own = job / "config.toml"
    text = f'# mine\n[job]\ndir = "{job}"\n[model]\npath = "model"\n'
    own.write_text(text)
    config = enter_job_dir(load_config(str(own), options))
    assert config.job.dir == str(job)
    assert (job / "config.given.toml").read_text() == text
    again = load_config(str(own), options[:2] if options != ANEW else [])
    assert enter_job_dir(again).algorithm.clip_ratio == config.algorithm.clip_ratio
    assert (job / "config.given.toml").read_text() == text
    assert not (job / "config.given-2.toml").exists()


def test_an_earlier_saved_user_config_is_not_overwritten(tmp_path):
    job = tmp_path / "job"
    job.mkdir()
    (job / "config.given.toml").write_text("# another\n")
    (job / "config.toml").write_text('[job]\ndir = "."\n[model]\npath = "model"\n')
    enter_job_dir(load_config(str(job / "config.toml")))
    assert (job / "config.given.toml").read_text() == "# another\n"
    assert (job / "config.given-2.toml").exists()


@pytest.mark.parametrize("options", [[], ANEW])
def test_a_job_directory_that_cannot_be_created_is_a_storage_error(file, tmp_path, options):
    (tmp_path / "file").touch()
    config = load_config(file, [*options, "--job.dir", str(tmp_path / "file" / "job")])
    with pytest.raises(StorageError) as caught:
        enter_job_dir(config)
    assert caught.value.exit_code == 74
    assert str(tmp_path / "file") in str(caught.value)


def test_a_job_directory_that_was_removed_is_a_storage_error(file):
    config = make_job_dir(load_config(file))
    os.rmdir(config.job.dir)
    with pytest.raises(StorageError):
        keep_config(config)


def test_looking_up_the_next_job_directory_creates_nothing(file, tmp_path):
    config = load_config(file, ANEW)
    assert next_job_dir(config).job.dir == f"{tmp_path}/job"
    assert contradictions(config) == ()
    assert sorted(os.listdir(tmp_path)) == ["file.toml"]


@pytest.mark.parametrize(
    ("table", "value"),
    [("engine", "verl"), ("algorithm", {"name": ["grpo"]}), ("algorithm", {"loss": {"name": "gspo"}})],
)
def test_a_copy_that_was_edited_wrongly_is_refused_as_any_file_is(file, table, value):
    path = kept_path(enter_job_dir(load_config(file)).job.dir)
    edited = tomllib.loads(read(path)) | {table: value}
    Path(path).write_text(f"{FIRST_LINE}\n{tomli_w.dumps(edited)}", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{table}.* is not"):
        load_config(path)


@pytest.mark.parametrize(
    ("name", "agrees"), [("grpo", True), ("gpg", True), ("sapo", True), ("rloo", True), ("gspo", False)]
)
def test_a_config_of_an_earlier_release_is_accepted_unless_its_defaults_differ(file, name, agrees):
    """It wrote one default for all: where the algorithm reads it and its publication says another, that is told."""
    config = enter_job_dir(load_config(file, ["--algorithm.name", name]))
    path = kept_path(config.job.dir)
    table = tomllib.loads(read(path))
    former = {"clip_ratio": 0.2, "clip_ratio_low": "none", "clip_ratio_high": "none"}
    table["algorithm"] |= {**former, "loss_agg_mode": "token-mean", "norm_advantage": True}
    Path(path).write_text(f"{FIRST_LINE}\n{tomli_w.dumps(table)}", encoding="utf-8")
    found = {one.key for one in contradictions(load_config(file, ["--algorithm.name", name]))}
    clips = {
        f"algorithm.{key}" for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "loss_agg_mode")
    }
    assert found == (set() if agrees else clips)
    if agrees:
        assert not contradictions(load_config(path)), "the copy itself can be given"
    before = ["--algorithm.clip_ratio", "0.2", "--algorithm.loss_agg_mode", "token-mean"]
    if not agrees:
        assert not contradictions(load_config(file, ["--algorithm.name", name, *before])), "as it was"
