"""What explorers, storage and rank 0 do wrong: a run continues, or ends with its last step on disk."""

import contextlib
import errno
import os
import subprocess
import sys
import threading

import pytest
import torch
from support.job_file import tiny_job, write_job
from support.trainers import (
    ENVIRONMENT,
    HERE,
    Shown,
    prepared_trainer,
    rollout,
    same,
    small_config,
    weights,
)

from syncd.client.client import Client
from syncd.errors import NonFiniteError, ProtocolTooNewError, StorageError, SyncdError, TimedOutError
from syncd.experience import batch_paths
from syncd.experience.model import Experience
from syncd.experience.writer import ExperienceWriter
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.version import read_marker
from trainer.engines import state_copy

BAD_TOKEN = 64
"""The first token id that the tiny engine's model does not have."""


def run(config, **options):
    """Train to the end; return the exit code and what was shown."""
    with prepared_trainer(config, **options) as (made, shown):
        return made.train(), shown


def batch_of(step):
    return [rollout(step, group, number) for group in range(2) for number in range(2)]


def with_bad_token(experience):
    fields = {name: getattr(experience, name) for name in experience.__slots__}
    return Experience(**fields | {"tokens": [1, 5, 6, BAD_TOKEN]})


def fill(job, steps, bad=()):
    """Write batches, those numbered in `bad` with a token that the model does not have in their last row."""
    job.mkdir(exist_ok=True)
    with ExperienceWriter(Job.at(job), "e0") as writer:
        for number in range(1, steps + 1):
            rows = batch_of(number)
            writer.write([*rows[:-1], with_bad_token(rows[-1])] if number in bad else rows)


def test_a_batch_that_the_model_cannot_take_is_rejected_and_training_continues(tmp_path, capsys):
    job = tmp_path / "job"
    fill(job, 6, bad={2})
    code, shown = run(small_config(job))
    assert code == 0
    assert [step for step, _ in shown.records] == [1, 2, 3, 4]
    assert batch_paths.numbers(Job.at(job), batch_paths.rejected(Job.at(job), "e0")) == {2}
    said = capsys.readouterr().out
    assert "experience_rejected" in said
    assert "e0" in said
    assert "2.parquet" in said
    assert "token 64 for a model of 64 tokens" in said


@pytest.mark.parametrize("bad", [{2}, {3}])
def test_a_resume_after_a_rejected_batch_matches_an_uninterrupted_run(tmp_path, bad):
    states = {}
    for name, totals in {"straight": [4], "twice": [2, 4]}.items():
        job = tmp_path / name
        fill(job, 7, bad=bad)
        for total in totals:
            assert run(small_config(job, trainer={"total_steps": total}))[0] == 0
        states[name] = weights(job, 4)
    assert same(states["straight"], states["twice"])


def full_checkpoints(job):
    return sorted(int(path.parent.name[12:]) for path in job.glob("global_step_*/.full_checkpoint"))


def fail_at(monkeypatch, step, error):
    """Have a look at the published version fail once so many steps are trained, until the run has ended.

    The first look is that of the start.
    """
    get, asked = Client.latest_version, [0]

    def failing(sync):
        asked[0] += 1
        if asked[0] > 1 + step:
            raise error
        return get(sync)

    monkeypatch.setattr(Client, "latest_version", failing)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StorageError("No space left on device"), 74),
        (ProtocolTooNewError("written by a newer syncd"), 78),
        (PermissionError(13, "Permission denied"), 74),
    ],
    ids=["storage", "newer", "oserror"],
)
def test_an_error_outside_a_step_saves_a_full_checkpoint_and_its_exit_code(
    tmp_path, monkeypatch, error, code
):
    fill(tmp_path / "straight", 6)
    assert run(small_config(tmp_path / "straight", trainer={"total_steps": 5}))[0] == 0
    job = tmp_path / "job"
    fill(job, 6)
    # Only the loop looks at the published version then, once a step.
    config = small_config(job, trainer={"total_steps": 5}, sync={"delta": "off"})
    with monkeypatch.context() as patch:
        fail_at(patch, 3, error)
        with prepared_trainer(config) as (made, shown), pytest.raises(SyncdError) as caught:
            made.train()
    assert caught.value.exit_code == code
    assert full_checkpoints(job) == [3]
    assert any("saved because of an error" in note for note in shown.notes)
    code, shown = run(config)
    assert (code, [step for step, _ in shown.records]) == (0, [4, 5])
    assert same(weights(job, 5), weights(tmp_path / "straight", 5))


def test_an_io_error_of_the_experience_reader_ends_no_run(tmp_path, monkeypatch):
    """A gap in the numbers has the reader ask how far batches were consumed, and the mount does not say once."""
    fill(tmp_path, 4)
    third, hidden = tmp_path / "experiences/e0/3.parquet", tmp_path / "hidden"
    third.rename(hidden)
    read = LocalDisk.read

    def failing(disk, path, *limit):
        if ".consumed" in path and hidden.exists():
            hidden.rename(third)
            raise OSError(errno.EIO, "Input/output error", path)
        return read(disk, path, *limit)

    monkeypatch.setattr(LocalDisk, "read", failing)
    assert run(small_config(tmp_path))[0] == 0
    assert (hidden.exists(), full_checkpoints(tmp_path)) == (False, [4])


def test_a_read_error_while_a_checkpoint_waits_for_its_weights_is_a_failed_save(tmp_path, monkeypatch):
    """The job cannot be looked at once, by the thread that writes the training state of step 2."""
    fill(tmp_path, 5)
    refresh, failures = LocalDisk.refresh, []

    def failing(disk, path):
        if threading.current_thread().name == "checkpoint" and path == str(tmp_path) and not failures:
            failures.append(path)
            raise OSError(errno.EIO, "Input/output error", path)
        refresh(disk, path)

    monkeypatch.setattr(LocalDisk, "refresh", failing)
    code, shown = run(small_config(tmp_path, trainer={"total_steps": 4, "save_interval": 2}))
    assert (code, len(failures), full_checkpoints(tmp_path)) == (0, 1, [4])
    assert [record["sync/failures"] for _, record in shown.records if "sync/failures" in record] == [1.0]


def test_an_error_in_the_progress_display_saves_a_full_checkpoint(tmp_path, monkeypatch):
    fill(tmp_path, 6)

    def broken(shown, metrics, step):
        if step == 3:
            raise RuntimeError("no such panel")

    monkeypatch.setattr(Shown, "log", broken)
    with (
        prepared_trainer(small_config(tmp_path)) as (made, _),
        pytest.raises(SyncdError, match="no such panel"),
    ):
        made.train()
    assert full_checkpoints(tmp_path) == [4]


def test_an_error_inside_a_step_saves_nothing_and_names_the_newest_checkpoint(tmp_path, monkeypatch, capsys):
    fill(tmp_path, 6)
    with prepared_trainer(small_config(tmp_path, trainer={"save_interval": 2})) as (made, shown):
        train = made.engine.train

        def failing(batch, step):
            if step == 4:
                raise RuntimeError("out of memory")
            return train(batch, step)

        monkeypatch.setattr(made.engine, "train", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            made.train()
    assert full_checkpoints(tmp_path) == [2]
    assert shown.notes[-1].startswith("step 3 is not saved: the error came from inside a step")
    assert "newest full checkpoint: 2" in shown.notes[-1]
    assert "checkpoint_save_failed" in capsys.readouterr().out


def test_non_finite_weights_are_not_saved_at_the_end(tmp_path):
    fill(tmp_path, 6)
    with contextlib.suppress(NonFiniteError), prepared_trainer(small_config(tmp_path)) as (made, shown):
        made.train_step(made.rank0.strategy.sample(0, generation=1))
        with torch.no_grad():
            made.engine.model.layer.bias[0] = float("nan")
        made._stop.requested = 15
        with pytest.raises(NonFiniteError):
            made.train()
    assert full_checkpoints(tmp_path) == []
    assert "the weights are not finite" in shown.notes[-1]


class Deaf:
    """Ranks of which the others do not answer: what a rank meets alone, it may not act upon."""

    rank, world_size = 0, 2

    def broadcast(self, value):
        raise TimedOutError("another rank has ended or does not answer")

    gather = broadcast


def test_no_checkpoint_is_saved_unless_all_ranks_met_the_error(tmp_path):
    fill(tmp_path, 6)
    with prepared_trainer(small_config(tmp_path)) as (made, shown):
        made.train_step(made.rank0.strategy.sample(0, generation=1))
        made._ranks = Deaf()
        with pytest.raises(TimedOutError):
            made.train()
    assert full_checkpoints(tmp_path) == []
    assert "not all ranks have met the error" in shown.notes[-1]


def test_a_briefly_damaged_version_file_does_not_end_the_run(tmp_path):
    fill(tmp_path, 3)
    with prepared_trainer(small_config(tmp_path, trainer={"save_interval": 2})) as (made, _):
        (tmp_path / ".syncd/version.json").write_text("{")
        made.engine.context.job.disk.sync_directory(str(tmp_path / ".syncd"))
        for _ in range(3):
            made.train_step(made.rank0._train_or_wait(made.train_step_num).batch)
        made._stop.requested = 15
        assert made.train() == 75
    assert full_checkpoints(tmp_path) == [3]


@pytest.mark.slow
def test_two_ranks_save_together_and_exit_with_the_error_of_rank_0(tmp_path):
    """Rank 0 cannot look at explorers any more once it waits for the third batch."""
    fill(tmp_path, 2)
    path = tmp_path / "job.toml"
    write_job(path, tiny_job(tmp_path, trainer={"nproc": 2, "start_daemon": False}))
    program = (
        "import sys; from trainer.launch.train import train; from trainer.config.load import load_config\n"
    )
    program += "sys.exit(train(load_config(sys.argv[1]), run='blind_rank:run_rank'))"
    python_path = f"{ENVIRONMENT['PYTHONPATH']}{os.pathsep}{HERE}/programs"
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env=os.environ | {"PYTHONPATH": python_path},
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 74, done.stderr
    assert "stale file handle" in done.stderr
    assert "checkpoint_saved_after_error" in done.stderr
    assert full_checkpoints(tmp_path) == [2]
    assert {f"tiny_{rank}_of_2.pt" for rank in (0, 1)} < set(os.listdir(tmp_path / "global_step_2/training"))


@pytest.mark.parametrize("mode", ["background", "stream"])
def test_a_last_step_that_is_sealed_while_its_marker_fails_becomes_a_full_checkpoint(
    tmp_path, monkeypatch, mode
):
    replace, failures = LocalDisk.replace, []

    def failing(disk, path, data, **more):
        if path == Job.at(tmp_path).marker and data == b"2" and not failures:
            failures.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        replace(disk, path, data, **more)

    fill(tmp_path, 4)
    monkeypatch.setattr(LocalDisk, "replace", failing)
    config = small_config(tmp_path, trainer={"total_steps": 2}, sync={"mode": mode, "delta": "off"})
    with prepared_trainer(config) as (made, _), pytest.raises(StorageError, match="Input/output error"):
        made.train()
    assert (len(failures), full_checkpoints(tmp_path)) == (1, [2])
    assert read_marker(LocalDisk(), Job.at(tmp_path).marker).step == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_checkpoint_that_fails_behind_is_counted_and_training_goes_on_as_if_nothing_had_been(
    tmp_path, monkeypatch, number
):
    failing = []

    def broken(path, mode):
        failing.extend(["failing/.training."] if "failing/.training." in path else [])
        if len(failing) == 2:  # at step 4: each save writes one file
            raise OSError(number, os.strerror(number), path)
        return open(path, mode)

    monkeypatch.setattr(state_copy, "open", broken, raising=False)
    states, shown = {}, None
    for name in ("straight", "failing"):
        job = tmp_path / name
        fill(job, 7)
        code, shown = run(small_config(job, trainer={"total_steps": 6, "save_interval": 2}))
        assert code == 0
        states[name] = weights(job, 6)
    assert same(states["straight"], states["failing"])
    assert [step for step, _ in shown.records] == [1, 2, 3, 4, 5, 6]
    assert [record["sync/failures"] for _, record in shown.records if "sync/failures" in record] == [1.0]
    assert [step for step in (2, 4, 6) if (job / f"global_step_{step}" / ".full_checkpoint").exists()] == [
        2,
        6,
    ]
    assert not [*job.glob(".training*"), *(job / "global_step_4").glob("*training*")]
    assert all(record["timing_s/save_blocked"] > 0 for _, record in shown.records if "save/step" in record)
