"""What monitors keep of a run, and what they may not do to training."""

import json
import math
import subprocess
import sys
import threading
from importlib.metadata import EntryPoint

import pytest

pytest.importorskip("pydantic", reason="the trainer needs pydantic")

from structlog.testing import capture_logs
from support.monitored import LONG, ROLLOUT, config_of, opened
from support.synchronizers import eventually
from support.waiting import until

from syncd.errors import ConfigError, FencedError
from syncd.extras import install_command
from trainer import plugins
from trainer.monitors import several
from trainer.monitors.base import MonitoredRun, job_identity
from trainer.monitors.jsonl import Jsonl, read_history
from trainer.monitors.several import DROPPED, FAILURES, Monitors


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


def test_a_trainer_that_was_replaced_reports_nothing_more_not_even_what_was_queued(job):
    """A process may be stopped after it has decided to report, and wake up when another one trains."""

    def check():
        if replaced:
            raise FencedError("another trainer has taken over this job")

    replaced = []
    monitors = Monitors.open(config_of(job), 0, check)
    monitors.log({"a": 1.0}, 1)
    eventually((job / "metrics.jsonl").exists)
    replaced.append(True)
    monitors.log({"a": 2.0}, 2)
    monitors.close(LONG)
    assert list(read_history(str(job / "metrics.jsonl")).steps) == [1]


def test_json_lines_keep_their_records_through_a_restart(job):
    with opened(config_of(job)) as monitors:
        for step in (1, 2):
            monitors.log({"critic/score/mean": step / 4, "actor/pg_loss": math.nan}, step)
        monitors.log_rollouts([ROLLOUT], 2)
        assert monitors.metrics()[DROPPED] == 0
    assert monitors.metrics()[FAILURES] == 0
    with opened(config_of(job), resumed_from=2) as monitors:
        monitors.log({"critic/score/mean": 0.75}, 3)
    assert monitors.metrics()[FAILURES] == 0
    history = read_history(str(job / "metrics.jsonl"))
    assert list(zip(*history.series("critic/score/mean"), strict=True)) == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert "<b>yes</b>" in (job / "rollouts.jsonl").read_text()


def test_a_monitor_without_its_package_hints_at_what_to_install(job, monkeypatch):
    absent = EntryPoint("wandb", "trainer.monitors.no_such_package", "trainer.monitors")
    monkeypatch.setattr(plugins, "registered", lambda group: {absent.name: absent})
    with pytest.raises(ConfigError) as caught:
        Monitors.open(config_of(job, "wandb"), 0)
    assert caught.value.hint == install_command("wandb")


# --- monitors that misbehave ----------------------------------------------------------------


class Odd:
    """A monitor of somebody else."""

    def __init__(self, run):
        self.calls, self.closed = [], False

    def log(self, metrics, step):
        self.calls.append((dict(metrics), step))

    def log_rollouts(self, rollouts, step):
        self.calls.append((rollouts, step))

    def close(self):
        self.closed = True


@pytest.fixture
def open_odd(job, monkeypatch):
    """Open the monitors of a job with one more kind, made by a function."""

    def open_with(make):
        monkeypatch.setattr(several.MONITORS, "get", lambda kind: make)
        return Monitors.open(config_of(job, "odd"), 0)

    return open_with


def steps_in(job):
    path = job / "metrics.jsonl"
    return list(read_history(str(path)).steps) if path.exists() else []


def test_a_monitor_that_keeps_raising_is_reported_once_and_disabled(job, open_odd):
    class Raises(Odd):
        tried = 0

        def log(self, metrics, step):
            Raises.tried += 1
            raise RuntimeError("no route to host")

    with capture_logs() as logs:
        monitors = open_odd(Raises)
        for step in range(20):
            monitors.log({"critic/score/mean": 1.0}, step)
        monitors.close(LONG)
    assert Raises.tried == 5 == monitors.metrics()[FAILURES]
    assert [line["event"] for line in logs] == ["monitor_failed", "monitor_disabled"]
    assert "no route to host" in logs[0]["reason"]
    assert steps_in(job) == list(range(20))


def test_isolated_monitor_failures_are_counted_and_do_not_disable_it(job, open_odd):
    class Flaky(Odd):
        seen = 0

        def log(self, metrics, step):
            if step % 2:
                raise RuntimeError("now and then")
            Flaky.seen += 1

    monitors = open_odd(Flaky)
    for step in range(20):
        monitors.log({}, step)
    monitors.close(LONG)
    assert Flaky.seen == 10 == monitors.metrics()[FAILURES]


def test_a_hanging_monitor_blocks_neither_the_loop_nor_the_exit(job, open_odd):
    forever = threading.Event()

    class Hangs(Odd):
        def log(self, metrics, step):
            forever.wait()

    with capture_logs() as logs:
        monitors = open_odd(Hangs)
        for step in range(300):
            monitors.log({"critic/score/mean": 1.0}, step)
            threading.Event().wait(
                0.0005
            )  # the writer of metrics.jsonl must not be the one that falls behind
        monitors.close(1.0)
    forever.set()
    assert monitors.metrics()[DROPPED] >= 300 - 256 - 1
    assert [line["monitor"] for line in logs] == ["odd", "odd"]
    assert logs[0]["event"] == "monitor_fell_behind"
    assert logs[1]["event"] == "monitor_close_timed_out"
    assert steps_in(job) == list(range(300))


def test_a_monitor_that_hangs_while_opening_does_not_delay_the_start(job, open_odd, monkeypatch):
    forever = threading.Event()
    monkeypatch.setattr(several, "START", 0.05)
    monitors = open_odd(lambda run: forever.wait() and Odd(run))
    monitors.log({"critic/score/mean": 1.0}, 1)
    until(lambda: steps_in(job) == [1])
    monitors.close(0.1)
    forever.set()


def test_a_monitor_that_failed_to_open_is_retried(job, open_odd):
    made = []

    def second_time(run):
        made.append(Odd(run))
        if len(made) < 2:
            raise ConnectionError("not yet")
        return made[-1]

    monitors = open_odd(second_time)
    monitors.log({"critic/score/mean": 1.0}, 1)
    monitors.close(LONG)
    assert [step for _, step in made[-1].calls] == [1]
    assert made[-1].closed
    assert monitors.metrics()[FAILURES] == 1


def test_values_that_are_not_numbers_are_dropped(job, open_odd):
    monitors = open_odd(Odd)
    monitors.log({"critic/score/mean": 1.0, "note": "text", "none": None}, 1)
    monitors.close(LONG)
    assert set(read_history(str(job / "metrics.jsonl")).steps[1]) == {"critic/score/mean", FAILURES, DROPPED}


def test_an_unwritable_metrics_file_does_not_stop_the_run(job):
    (job / "metrics.jsonl").mkdir()
    with capture_logs() as logs, opened(config_of(job)) as monitors:
        monitors.log({"critic/score/mean": 1.0}, 1)
    assert monitors.metrics()[FAILURES] == 1
    assert logs[0]["monitor"] == "jsonl"


def test_metrics_are_written_again_however_often_the_disk_refused_them(job):
    monitors = Monitors.open(config_of(job), 0)
    (job / "metrics.jsonl").mkdir()
    for step in range(1, 2 * several.PATIENCE):
        monitors.log({"critic/score/mean": 1.0}, step)
    until(lambda: monitors.metrics()[FAILURES] == 2 * several.PATIENCE - 1)
    (job / "metrics.jsonl").rmdir()
    monitors.log({"critic/score/mean": 1.0}, 99)
    monitors.close(LONG)
    assert steps_in(job) == [99]


def test_monitors_are_given_directory_project_name_and_plain_config(job, open_odd):
    runs = []
    open_odd(lambda run: runs.append(run) or Odd(run)).close(LONG)
    (run,) = runs
    assert (run.directory, run.project, run.name) == (str(job), "proj", "run-1")
    json.dumps(run.config)  # plain data


# --- jsonl -----------------------------------------------------------------------------------


def jsonl_of(job, **more):
    return Jsonl(MonitoredRun(str(job), "p", "", "n", {}, {}), **more)


def test_non_finite_metrics_are_null_and_listed_in_strict_json(job):
    jsonl_of(job).log({"a": math.nan, "b": 1.5, "c": -math.inf}, 3)

    def refuse(name):
        raise AssertionError(name)

    line = json.loads((job / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (line["step"], line["metrics"], line["not_finite"]) == (
        3,
        {"a": None, "b": 1.5, "c": None},
        ["a", "c"],
    )
    assert line["time"].endswith("Z")


def test_a_torn_last_line_loses_only_itself(job):
    jsonl_of(job).log({"a": 1.0}, 1)
    with open(job / "metrics.jsonl", "a") as file:
        file.write('{"step":2,"ti')
    jsonl_of(job).log({"a": 2.0}, 2)
    history = read_history(str(job / "metrics.jsonl"))
    assert history.steps == {1: {"a": 1.0}, 2: {"a": 2.0}}
    assert history.ignored == 1


def test_after_a_resume_the_reader_drops_superseded_steps_and_the_file_keeps_them(job):
    for steps in ((1, 2, 3, 4, 5), (3,), (4,)):
        for step in steps:
            jsonl_of(job).log({"a": step + len(steps) / 10}, step)
    assert len((job / "metrics.jsonl").read_text().splitlines()) == 7
    assert read_history(str(job / "metrics.jsonl")).series("a") == ([1, 2, 3, 4], [1.5, 2.5, 3.1, 4.1])


def test_malformed_lines_are_counted_and_skipped(job):
    jsonl_of(job).log({"a": 1.0}, 1)
    with open(job / "metrics.jsonl", "ab") as file:
        file.write(
            b'[]\n{"step":"2","metrics":{}}\n\xff\xfe\n{"step":true,"metrics":{}}\n' + b"[" * 5000 + b"\n"
        )
    with open(job / "metrics.jsonl", "ab") as file:
        file.write(b'{"step":2,"metrics":{"a":true,"b":"x","c":2}}\n')
    history = read_history(str(job / "metrics.jsonl"))
    assert (history.steps, history.ignored) == ({1: {"a": 1.0}, 2: {"c": 2.0}}, 5)


def test_rollout_files_are_rotated_and_bounded(job):
    monitor = jsonl_of(job, max_rollouts=400)
    for step in range(20):
        monitor.log_rollouts([ROLLOUT], step)
    assert sorted(each.name for each in job.iterdir()) == ["rollouts.jsonl", "rollouts.jsonl.1"]
    assert all(each.stat().st_size < 800 for each in job.iterdir())
    last = json.loads((job / "rollouts.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["rollout"]["response"]) == (19, ROLLOUT.response)


def test_the_job_id_is_stable_and_replaced_if_damaged(job):
    first = job_identity(str(job))
    assert job_identity(str(job)) == first
    (job / "monitors/id").write_text("")
    again = job_identity(str(job))
    assert again != first
    assert job_identity(str(job)) == again


def test_monitor_and_reporting_modules_import_neither_torch_nor_matplotlib():
    ours = "monitors.several", "reporting.report", "reporting.display"
    modules = ", ".join(f"trainer.{name}" for name in ours)
    code = f"import sys, {modules}; print(sorted({{'torch', 'matplotlib', 'tensorflow'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "[]\n"
