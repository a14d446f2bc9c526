"""One contract for all kinds of monitors, on their real libraries; and what they may not do to training."""

import json
import math
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from importlib.util import find_spec

import pytest

pytest.importorskip("pydantic", reason="the trainer needs pydantic")

from structlog.testing import capture_logs
from support.synchronizers import eventually

from syncd.errors import ConfigError, FencedError
from syncd.extras import install_command
from syncd.jobfile.model import JobFile
from trainer import plugins
from trainer.monitors import several
from trainer.monitors.base import MonitoredRun, RolloutSample, job_identity
from trainer.monitors.jsonl import Jsonl, read_history
from trainer.monitors.several import DROPPED, FAILURES, Monitors

ROLLOUT = RolloutSample("1+1=", "2 | <b>yes</b>\nso it is", 1.0, 3, 40, "g0", "task-1", "explorer-0")
LONG = 60.0


def config_of(directory, *kinds, options=None, **monitor):
    return JobFile.model_validate(
        {
            "job": {"dir": str(directory), "name": "run-1"},
            "model": {"path": "/model"},
            "monitor": {"kinds": kinds, "project": "proj", "options": options or {}, **monitor},
        }
    )


@contextmanager
def opened(config, resumed_from=0):
    monitors = Monitors.open(config, resumed_from)
    try:
        yield monitors
    finally:
        monitors.close(LONG)


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


# --- each kind, read back with its library -------------------------------------------------


def read_tensorboard(job):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(job / "monitors/tensorboard")).Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("critic/score/mean")]
    return scalars, events.Tensors("rollouts")[0].tensor_proto.string_val[0].decode()


def records_of(path):
    """Yield the records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    data, block, at, whole = path.read_bytes(), 32768, 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def read_wandb(job):
    from wandb.proto.wandb_internal_pb2 import Record

    scalars, runs = [], set()
    for path in sorted((job / "monitors/wandb").glob("wandb/offline-run-*/run-*.wandb")):
        for data in records_of(path):
            record = Record.FromString(data)
            runs |= {record.run.run_id} if record.HasField("run") else set()
            row = {each.key or "/".join(each.nested_key): each.value_json for each in record.history.item}
            scalars += (
                [(int(row["step"]), float(row["critic/score/mean"]))] if "critic/score/mean" in row else []
            )
    assert runs == {job_identity(str(job))}
    (table,) = (job / "monitors/wandb").glob("wandb/offline-run-*/files/media/table/*.json")
    return scalars, table.read_text()


def read_mlflow(job):
    from mlflow import MlflowClient

    client = MlflowClient((job / "monitors/mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("proj").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run-1", "FINISHED")
    assert run.data.params["model.path"] == "/model"
    history = client.get_metric_history(run.info.run_id, "critic/score/mean")
    (artifact,) = client.list_artifacts(run.info.run_id, "rollouts")
    artifacts = job / "monitors/mlflow" / run.info.experiment_id / run.info.run_id / "artifacts"
    return [(each.step, each.value) for each in history], (artifacts / artifact.path).read_text()


def read_trackio(job):
    from trackio.sqlite_storage import SQLiteStorage

    assert (job / "monitors/trackio/proj.db").exists()
    lines = SQLiteStorage.get_logs("proj", "run-1")
    (table,) = [line["rollouts"] for line in lines if "rollouts" in line]
    scalars = [(line["step"], line["critic/score/mean"]) for line in lines if "critic/score/mean" in line]
    return scalars, json.dumps(table)


def read_jsonl(job):
    history = read_history(str(job / "metrics.jsonl"))
    return list(zip(*history.series("critic/score/mean"), strict=True)), (job / "rollouts.jsonl").read_text()


KINDS = {
    "jsonl": read_jsonl,
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}
OPTIONS = {"wandb": {"mode": "offline"}}


@pytest.fixture
def quiet_environment(monkeypatch):
    """Keep what libraries read of the environment, and what monitors set in it, within the test."""
    for name in ("TRACKIO_DIR", "MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize("kind", KINDS)
def test_each_monitor_keeps_its_records_through_a_restart(kind, job, quiet_environment):
    # Not imported before the monitor does: trackio reads its directory then.
    if kind != "jsonl" and find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed")
    config = config_of(job, *({kind} - {"jsonl"}), options={k: v for k, v in OPTIONS.items() if k == kind})
    with opened(config) as monitors:
        for step in (1, 2):
            monitors.log({"critic/score/mean": step / 4, "actor/pg_loss": math.nan}, step)
        monitors.log_rollouts([ROLLOUT], 2)
        assert monitors.metrics()[DROPPED] == 0
    assert monitors.metrics()[FAILURES] == 0
    with opened(config, resumed_from=2) as monitors:
        monitors.log({"critic/score/mean": 0.75}, 3)
    assert monitors.metrics()[FAILURES] == 0
    scalars, rollouts = KINDS[kind](job)
    assert scalars == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert "<b>yes</b>" in rollouts.replace("\\u003c", "<").replace("\\u003e", ">")


def test_tensorboard_drops_the_steps_that_a_resume_repeats(job):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed_from, steps in ((0, (1, 2, 3)), (1, (2,))):
        with opened(config_of(job, "tensorboard"), resumed_from) as monitors:
            for step in steps:
                monitors.log({"critic/score/mean": step + resumed_from / 2}, step)
    events = EventAccumulator(str(job / "monitors/tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("critic/score/mean")] == [
        (1, 1.0),
        (2, 2.5),
    ]


# --- what the configuration may say ---------------------------------------------------------


def test_an_unknown_monitor_is_refused_with_the_closest_name(job):
    with pytest.raises(ConfigError, match="no monitor is called 'wanbd'") as caught:
        Monitors.open(config_of(job, "wanbd"), 0)
    assert caught.value.exit_code == 78
    assert "did you mean 'wandb'? there are mlflow, tensorboard, trackio, wandb" in caught.value.hint


def test_a_monitor_without_its_package_hints_at_what_to_install(job, monkeypatch):
    absent = EntryPoint("wandb", "trainer.monitors.no_such_package", "trainer.monitors")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [absent])
    with pytest.raises(ConfigError) as caught:
        Monitors.open(config_of(job, "wandb"), 0)
    assert caught.value.hint == install_command("wandb")


@pytest.mark.parametrize(
    ("options", "said", "hint"),
    [
        ({"tensorboard": {"dri": "/x"}}, "monitor.options.tensorboard has no 'dri'", "did you mean 'dir'?"),
        ({"tensorboard": {"dir": 7}}, "monitor.options.tensorboard.dir = 7 is not a str", None),
        ({"tensorbord": {}}, "no monitor is called 'tensorbord'", "did you mean 'tensorboard'?"),
    ],
)
def test_unknown_monitor_options_are_refused_at_the_start(job, options, said, hint):
    with pytest.raises(ConfigError, match=said) as caught:
        Monitors.open(config_of(job, "tensorboard", options=options), 0)
    assert caught.value.hint is None if hint is None else caught.value.hint.startswith(hint)


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


def until(holds):
    """Wait for what another thread does."""
    deadline = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
    ours = (
        "monitors.several",
        "monitors.tensorboard",
        "reporting.report",
        "reporting.display",
        "reporting.plot",
    )
    modules = ", ".join(f"trainer.{name}" for name in ours)
    code = f"import sys, {modules}; print(sorted({{'torch', 'matplotlib', 'tensorflow'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "[]\n"
