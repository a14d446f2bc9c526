"""One contract for all services, on their real libraries; and what their options may be."""

import json
import math
import struct
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("pydantic", reason="the trainer needs pydantic")

from support.monitored import ROLLOUT, config_of, opened

from syncd.errors import ConfigError
from trainer.monitors.base import job_identity
from trainer.monitors.several import DROPPED, FAILURES, Monitors


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


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


KINDS = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}
OPTIONS = {"wandb": {"mode": "offline"}}
OF_USERS = {"reward/parts/pass@1 (strict)": 1.0, "tools/../seconds": 0.5, f"tools/{'a' * 300}/calls": 2.0}
"""Metrics whose names have what users call a part of a reward, or a tool."""


@pytest.fixture
def quiet_environment(monkeypatch):
    """Keep what libraries read of the environment, and what monitors set in it, within the test."""
    for name in ("TRACKIO_DIR", "MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize("kind", KINDS)
def test_each_monitor_keeps_its_records_through_a_restart(kind, job, quiet_environment):
    # Not imported before the monitor does: trackio reads its directory then.
    if find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed")
    config = config_of(job, kind, options={k: v for k, v in OPTIONS.items() if k == kind})
    with opened(config) as monitors:
        for step in (1, 2):
            monitors.log({"critic/score/mean": step / 4, "actor/pg_loss": math.nan, **OF_USERS}, step)
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


def test_an_unknown_monitor_is_refused_with_the_closest_name(job):
    with pytest.raises(ConfigError, match="no monitor is called 'wanbd'") as caught:
        Monitors.open(config_of(job, "wanbd"), 0)
    assert caught.value.exit_code == 78
    assert "did you mean 'wandb'? there are mlflow, tensorboard, trackio, wandb" in caught.value.hint


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


def test_tensorboard_needs_neither_torch_nor_tensorflow():
    pytest.importorskip("tensorboard")
    code = "import sys, trainer.parts.monitors.tensorboard; print({'torch', 'tensorflow'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "set()\n"
