"""The loop with a real engine, real files and a real daemon, one rank in this process."""

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import xxhash
from support.checker import sealed
from support.trainers import (
    prepared_trainer,
    rollout,
    same,
    small_config,
    weights,
    write_experiences,
)
from support.waiting import until

from syncd.errors import NonFiniteError, StorageError, TimedOutError, UsageError
from syncd.experience.writer import ExperienceWriter
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.manifest import read_manifest
from syncd.protocol.version import read_marker
from syncd.protocol.writer import StepWriter
from syncd.synchronizer import RunningStatus, Synchronizer

_LONG = 60.0


@contextlib.contextmanager
def daemon(job, *options):
    """Run a real daemon over a job."""
    command = [sys.executable, "-m", "syncd", "watch", str(job), "--trash-grace", "0", *options]
    with open(f"{job}/daemon.log", "ab") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            yield
        finally:
            process.terminate()


def run(config, **options):
    """Train to the end; return the exit code and what was shown."""
    with prepared_trainer(config, **options) as (made, shown):
        return made.train(), shown


def steps_in(job):
    return sorted(int(name[12:]) for name in os.listdir(job) if name.startswith("global_step_"))


def versions_of(job):
    """Return the steps that the daemon made versions, in turn."""
    with contextlib.suppress(FileNotFoundError), open(f"{job}/.syncd/events.jsonl", encoding="utf-8") as file:
        events = [json.loads(line) for line in file if line.endswith("\n")]
        return [event["step"] for event in events if event["event"] == "version_published"]
    return []


@pytest.fixture
def job(tmp_path):
    write_experiences(tmp_path, 12)
    return tmp_path


@pytest.mark.slow
def test_published_steps_are_on_disk_and_retention_keeps_what_is_due(job):
    """Sync 1, save 2, keep 2, 6 steps: 4 and 6 are saves, 5 the newest sync step; the version before 6 stays, too."""
    config = small_config(job, trainer={"total_steps": 6, "save_interval": 2})
    with daemon(job, "--keep-last", "1", "--keep-full", "2"), prepared_trainer(config) as (made, shown):
        seen = []
        with watching(job, seen):
            assert made.train() == 0
        # A daemon that is given no time overtakes steps: which one was the version before is for it to say.
        until(lambda: versions_of(job)[-1:] == [6])
        before = versions_of(job)[-2:-1]
        until(lambda: steps_in(job) == sorted({4, 5, *before, 6}))
    assert not [wrong for _, wrong in seen if wrong]
    assert {step for step, _ in seen} >= {6}
    assert not os.path.isdir(f"{job}/global_step_4/actor/huggingface")
    assert os.path.isdir(f"{job}/global_step_6/actor/huggingface")
    assert [step for step, _ in shown.records] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in shown.previews] == [1, 2, 3, 4, 5, 6]


def problems_of(job, step):
    """Return what is wrong with a step, byte by byte; FileNotFoundError where it has gone."""
    found = read_manifest(LocalDisk(), f"{job}/global_step_{step}")
    wrong = []
    for record in (*found.shards, *found.files):
        with open(f"{job}/global_step_{step}/{record.name}", "rb") as file:
            content = file.read()
        if len(content) != record.size or f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}" != record.digest:
            wrong.append(record.name)
    return wrong


@contextlib.contextmanager
def watching(job, seen):
    """Note at each change of the marker what is wrong with the step that it names."""
    stop = threading.Event()

    def watch():
        last, is_last_look = None, False
        while not is_last_look:
            is_last_look = stop.is_set()
            step = read_marker(Job.at(job).disk, f"{job}/latest_state_dict_iteration.txt").step
            if step not in {None, last}:
                # What is superseded meanwhile may be taken away while it is looked at.
                with contextlib.suppress(FileNotFoundError):
                    seen.append((step, problems_of(job, step)))
                last = step
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path):
    states = {}
    for name, totals in {"straight": [5], "twice": [2, 5]}.items():
        job = tmp_path / name
        job.mkdir()
        write_experiences(job, 8)
        for total in totals:
            code, _ = run(small_config(job, trainer={"total_steps": total}))
            assert code == 0
        states[name] = weights(job, 5)
    assert same(states["straight"], states["twice"])


def test_a_signal_saves_a_checkpoint_and_exits_with_75(job):
    config = small_config(job, trainer={"total_steps": 6})
    with prepared_trainer(config) as (made, _):
        made.train_step(made.rank0.strategy.sample(0, generation=1))
        made._stop.requested = 15
        assert made.train() == 75
    assert not os.path.isdir(f"{job}/global_step_1/actor/huggingface")
    code, shown = run(config)
    assert code == 0
    assert next(step for step, _ in shown.records) == 2


def test_a_full_disk_is_survived_and_the_next_sync_succeeds(job, monkeypatch):
    fail_at(monkeypatch, {2, 3})
    code, shown = run(small_config(job, trainer={"total_steps": 5}))
    assert code == 0
    assert sealed(str(job)) == [1, 4, 5], "what failed left no half step"
    figures = dict(shown.records)
    assert max(record.get("sync/failures", 0.0) for record in figures.values()) == 2.0


def test_a_failed_full_checkpoint_is_retried_at_the_next_interval(job, monkeypatch):
    fail_at(monkeypatch, {2})
    code, _ = run(small_config(job, trainer={"total_steps": 5, "save_interval": 2}))
    assert code == 0
    full = [step for step in sealed(str(job)) if os.path.exists(f"{job}/global_step_{step}/.full_checkpoint")]
    assert full == [4, 5]


def test_a_disk_that_stays_full_ends_the_run(job, monkeypatch):
    fail_at(monkeypatch, set(range(2, 99)))
    config = small_config(job, trainer={"total_steps": 9}, sync={"max_failures": 2})
    with prepared_trainer(config) as (made, _), pytest.raises(StorageError, match="No space left"):
        made.train()
    assert sealed(str(job)) == [1]


def fail_at(monkeypatch, steps):
    """Let the storage fail for some steps."""
    add_file = StepWriter.add_file

    def full(writer, name, fill, tensors=0):
        if writer.step in steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), writer.path)
        return add_file(writer, name, fill, tensors)

    monkeypatch.setattr(StepWriter, "add_file", full)


@pytest.mark.parametrize("probe", [True, False])
def test_non_finite_weights_end_the_run_at_once(job, probe):
    """With a probe before anything is written, without one while it is; both name the tensor."""
    config = small_config(job, trainer={"total_steps": 6}, sync={"probe": probe})
    with prepared_trainer(config) as (made, _):
        with torch.no_grad():
            made.engine.model.layer.bias[0] = float("nan")
        with pytest.raises(NonFiniteError, match=r"layer\.bias"):  # noqa: PT012 - the first or the second raises
            made.sync_weight()
            assert not probe
            made.wait_for_save()
    assert read_marker(Job.at(job).disk, f"{job}/latest_state_dict_iteration.txt").step is None


@pytest.mark.slow
def test_explorers_roll_back_to_the_checkpoint_after_a_resume(job):
    """Killed at step 5 after a checkpoint at 2: the marker goes back, and 3 and later are written again."""
    config = small_config(job, trainer={"total_steps": 6, "save_interval": 2})
    with daemon(job, "--keep-last", "3"):
        with prepared_trainer(config) as (made, _):
            for _ in range(9):
                if made.train_step_num == 4 and made.need_save():
                    break
                made._do(made.next_action())
            until(lambda: published(job) == (1, 3))
        write_by_hand(job, 5)
        until(lambda: published(job) == (1, 5))
        code, _ = run(config)
        assert code == 0
        until(lambda: published(job) == (2, 6))
    for step in (4, 5, 6):
        if step in steps_in(job):
            assert not problems_of(job, step)


@pytest.mark.slow
def test_a_restart_without_a_checkpoint_rolls_explorers_back_to_the_base(job):
    with daemon(job, "--keep-last", "3"):
        write_by_hand(job, 1)
        write_by_hand(job, 2)
        until(lambda: published(job) == (1, 2))
        # What the lost run produced is another generation's; nothing here has a bound on age.
        code, _ = run(small_config(job, trainer={"total_steps": 3}))
        assert code == 0
        until(lambda: published(job) == (2, 3))


def write_by_hand(job, step):
    with Synchronizer.open(str(job), "observer") as sync:
        sync.set_model_state_dict({"w": torch.full((2, 2), float(step))}, step)


def published(job):
    with Synchronizer.open(str(job), "observer") as sync:
        version = sync.latest_version()
        return version.pair if version else None


def test_asking_explorers_get_new_steps_and_learn_when_there_is_none(job):
    config = small_config(job, sync={"style": "explorer_driven"}, trainer={"total_steps": 30})
    steps = []
    with daemon(job), prepared_trainer(config) as (made, _):
        loop = threading.Thread(target=made.train)
        loop.start()
        with Synchronizer.open(str(job), "explorer", "e1", poll=0.01, timeout=_LONG) as explorer:
            for number in range(3):
                steps.append(explorer.wait_new_model_state_dict(steps[-1] if steps else 0))
                explorer.confirm(steps[-1])
                more(job, f"e{number + 2}")
            until(lambda: made.train_step_num == 24 or not loop.is_alive())
            while steps[-1] != 24:
                steps.append(explorer.wait_new_model_state_dict(steps[-1]))
            assert explorer.wait_new_model_state_dict(24) == 24, "told that there is nothing newer"
        made._stop.requested = 15
        loop.join(_LONG)
    assert steps[0] > 0
    assert steps == sorted(steps)


def more(job, explorer):
    with ExperienceWriter(Job.at(job), explorer) as writer:
        for step in range(4):
            writer.write([rollout(step, group, number) for group in range(2) for number in range(2)])


def test_a_broadcast_group_is_set_up_and_torn_down_by_both_sides(job):
    with (
        Synchronizer.open(job, "explorer", "e0") as explorer,
        prepared_trainer(small_config(job)) as (made, _),
    ):
        assert made.get_weight_sync_info() is None
        joining = threading.Thread(target=explorer.coordinate_weight_sync_setup, args=[60.0])
        joining.start()
        made.setup_weight_sync_group("127.0.0.1", 4000, 2, "weights", 60.0)
        joining.join()
        assert made.get_weight_sync_info() == explorer.get_weight_sync_info() == ("127.0.0.1", 4000, [])
        explorer.coordinate_weight_sync_teardown()
        made.teardown_weight_sync_group()
        assert made.get_weight_sync_info() is explorer.get_weight_sync_info() is None


def test_a_broadcast_group_with_a_wrong_name_size_or_no_peer_is_refused(job):
    with Synchronizer.open(job, "explorer", "e0"), prepared_trainer(small_config(job)) as (made, _):
        with pytest.raises(UsageError, match="no group is called 'other'"):
            made.setup_weight_sync_group("127.0.0.1", 4000, 2, "other", 60.0)
        with pytest.raises(UsageError, match="a group of 3 cannot be formed: 1 explorers live"):
            made.setup_weight_sync_group("127.0.0.1", 4000, 3, "weights", 60.0)
        with pytest.raises(TimedOutError):
            made.setup_weight_sync_group("127.0.0.1", 4000, 2, "weights", 0.05)
        assert made.get_weight_sync_info() is None


@pytest.mark.slow
def test_the_run_ends_when_all_explorers_have_left(job):
    config = small_config(job, data={"left_grace": 0.5}, trainer={"total_steps": None})
    with prepared_trainer(config) as (made, _):
        ends = []
        loop = threading.Thread(target=lambda: ends.append(made.train()))
        with Synchronizer.open(str(job), "explorer", "e1") as explorer:
            explorer.set_explorer_status(RunningStatus.REQUIRE_SYNC)
            loop.start()
            until(lambda: made.train_step_num == 12)
            time.sleep(2)
            assert loop.is_alive(), "an explorer is still there"
        loop.join(_LONG)
    assert ends == [0]
    assert steps_in(job)[-1] == 12


def test_a_run_without_samples_times_out_and_saves_a_full_checkpoint(job):
    config = small_config(job, data={"wait_timeout": 0.5}, trainer={"total_steps": None})
    with (
        prepared_trainer(config) as (made, _),
        pytest.raises(TimedOutError, match="no complete batch") as caught,
    ):
        made.train()
    assert caught.value.exit_code == 4
    assert os.path.exists(f"{job}/global_step_12/.full_checkpoint")


def test_consumed_batches_are_deleted_once_a_checkpoint_covers_them(job):
    config = small_config(job, data={"consumed": "delete"}, trainer={"total_steps": 4, "save_interval": 2})
    with prepared_trainer(config) as (made, _):
        assert made.train() == 0
    left = sorted(int(name.split(".")[0]) for name in os.listdir(f"{job}/experiences/e0") if name[0] != ".")
    assert left == list(range(5, 13))
