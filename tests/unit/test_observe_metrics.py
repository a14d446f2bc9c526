"""Prometheus: what events do to metrics, the endpoint, the textfile."""

import math
import os
import re
import sys
import urllib.request
from pathlib import Path

import pytest

from syncd.errors import ConfigError
from syncd.extras import install_command
from syncd.observe import event_names
from syncd.observe.events import Event
from syncd.observe.metrics import Metrics
from syncd.protocol.engine_state import EngineState

pytest.importorskip("prometheus_client")
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def metrics():
    made = Metrics("/ckpt/job")
    yield made
    made.close()


def tell(metrics, name, **fields):
    metrics.observe(Event(name, "info", 1.0, fields))


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(f"syncd_{name}", {"directory": "/ckpt/job", **labels})


def test_published_versions_are_counted_with_bytes_and_latency(metrics):
    tell(metrics, event_names.LEADERSHIP_ACQUIRED, term=4)
    tell(
        metrics, event_names.VERSION_PUBLISHED, generation=2, step=7, bytes=100, reason="newer", latency=0.003
    )
    tell(metrics, event_names.VERSION_PUBLISHED, generation=2, step=8, bytes=50, reason="newer")
    assert value(metrics, "versions_published_total", reason="newer") == 2
    assert value(metrics, "published_bytes_total") == 150
    assert (value(metrics, "version_generation"), value(metrics, "version_step")) == (2, 8)
    assert (value(metrics, "is_leader"), value(metrics, "term")) == (1, 4)
    assert value(metrics, "publish_latency_seconds_count") == 1
    assert value(metrics, "publish_latency_seconds_bucket", le="0.005") == 1


def test_the_figures_of_a_delta_and_of_a_shortcut_are_shown_and_are_nan_without_one(metrics):
    told = {"generation": 1, "bytes": 10, "reason": "newer"}
    changes = {"density": 0.015, "chain": 3, "changes_bytes": 10, "whole_bytes": 1000}
    tell(metrics, event_names.VERSION_PUBLISHED, step=7, kind="delta", **told, **changes)
    figures = ("density", "ratio", "chain_deltas")
    assert [value(metrics, f"version_{name}") for name in figures] == [0.015, 100, 3]
    tell(metrics, event_names.VERSION_PUBLISHED, step=8, kind="weights", **told, **{**changes, "chain": 0})
    assert [value(metrics, "saved_bytes_total", kind=kind) for kind in ("delta", "shortcut")] == [990, 990]
    tell(metrics, event_names.VERSION_PUBLISHED, step=9, kind="weights", **told)
    assert all(math.isnan(value(metrics, f"version_{name}")) for name in figures)
    assert value(metrics, "saved_bytes_total", kind="delta") == 990


def test_progress_shows_the_newest_filling_step(metrics):
    for step, present, expected in ((3, 1, 4), (5, 2, None), (5, 2, 8)):
        tell(
            metrics,
            event_names.STEP_PROGRESSED,
            step=step,
            state="filling",
            present=present,
            expected=expected,
        )
    assert (value(metrics, "filling_step"), value(metrics, "shards_ratio")) == (5, 0.25)
    tell(metrics, event_names.STEP_COMPLETED, step=5, state="complete", present=8, expected=8)
    assert (value(metrics, "filling_step"), value(metrics, "shards_present")) == (3, 1)
    tell(metrics, event_names.STEP_DAMAGED, step=3)
    assert (value(metrics, "filling_step"), value(metrics, "shards_expected")) == (-1, 0)


def test_problems_without_a_step_are_counted(metrics):
    tell(metrics, event_names.STEP_DAMAGED, detail="step 9 is published and no longer complete")
    assert value(metrics, "steps_damaged_total") == 1


def test_removals_are_counted_by_rule(metrics):
    for rule in ("superseded", "superseded", "byte_budget"):
        tell(metrics, event_names.STEP_PRUNED, step=1, rule=rule, bytes=10)
    assert value(metrics, "steps_pruned_total", rule="superseded") == 2
    assert value(metrics, "pruned_bytes_total", rule="byte_budget") == 10


def test_the_lag_metric_of_an_explorer_is_removed_when_it_dies(metrics):
    for name in ("a", "b"):
        tell(metrics, event_names.EXPLORER_LAG_CHANGED, explorer=name, lag=3)
    tell(metrics, event_names.EXPLORER_DIED, explorer="a")
    tell(metrics, event_names.EXPLORER_LEFT, explorer="never-seen")
    assert value(metrics, "explorer_lag_steps", explorer="a") is None
    assert value(metrics, "explorer_lag_steps", explorer="b") == 3


ENGINE = {
    "explorer": "a",
    "ready": True,
    "failures": 2,
    "load_seconds": 1.5,
    "mean": 0.001,
    "tolerance": 0.005,
}
GAUGES = ("ready", "load_failures", "load_seconds", "proof_difference", "proof_tolerance")


def engine_gauges(metrics, explorer="a"):
    return [value(metrics, f"engine_{name}", explorer=explorer) for name in GAUGES]


def engine_states(metrics, explorer="a"):
    found = {
        state.value: value(metrics, "engine_state", explorer=explorer, state=state) for state in EngineState
    }
    return {state: shown for state, shown in found.items() if shown != 0}


def test_an_engines_state_and_its_figures_are_gauges_of_its_explorer(metrics):
    tell(metrics, event_names.ENGINE_REPORTED, state="proven", **ENGINE)
    assert engine_gauges(metrics) == [1, 2, 1.5, 0.001, 0.005]
    assert engine_states(metrics) == {"proven": 1}
    restarted = {
        **ENGINE,
        "ready": False,
        "failures": 0,
        "load_seconds": None,
        "mean": None,
        "tolerance": None,
    }
    tell(metrics, event_names.ENGINE_REPORTED, state="wrong", **restarted)
    assert engine_gauges(metrics) == [0, 0, None, None, None]
    assert engine_states(metrics) == {"wrong": 1}


@pytest.mark.parametrize(
    "gone", [event_names.EXPLORER_DIED, event_names.EXPLORER_LEFT, event_names.LEADERSHIP_LOST]
)
def test_the_gauges_of_an_engine_are_removed_with_its_explorer_or_leader(metrics, gone):
    tell(metrics, event_names.ENGINE_REPORTED, state="proven", **ENGINE)
    tell(metrics, gone, explorer="a")
    assert engine_gauges(metrics) == [None] * 5
    assert set(engine_states(metrics).values()) == {None}


def test_a_deposed_leader_resets_its_gauges(metrics):
    tell(metrics, event_names.LEADERSHIP_ACQUIRED, term=1)
    tell(metrics, event_names.STEP_FOUND, step=3, state="filling", present=1, expected=2)
    tell(metrics, event_names.EXPLORER_LAG_CHANGED, explorer="a", lag=3)
    tell(metrics, event_names.SCAN_COMPLETED, seconds=0.1, full=False, steps=5, quarantined=1)
    tell(metrics, event_names.WAVE_CHANGED, phase="stopped", stopped=1)
    tell(metrics, event_names.LEADERSHIP_LOST)
    assert value(metrics, "is_leader") == 0
    of_job = ("steps", "quarantined_steps", "rolling_stopped")
    assert all(math.isnan(value(metrics, name)) for name in of_job), "the new leader knows"
    assert value(metrics, "filling_step") == -1
    assert value(metrics, "explorer_lag_steps", explorer="a") is None


def test_scan_events_set_the_gauges_of_the_job(metrics):
    assert math.isnan(value(metrics, "free_bytes")), "unknown is not zero"
    tell(
        metrics,
        event_names.SCAN_COMPLETED,
        seconds=0.002,
        full=True,
        steps=4,
        bytes=900,
        free=5000,
        leases=2,
        explorers=3,
        quarantined=2,
    )
    tell(metrics, event_names.SCAN_COMPLETED, seconds=0.0001, full=False, steps=5)
    assert value(metrics, "quarantined_steps") == 2
    assert value(metrics, "scan_duration_seconds_count", full="true") == 1
    assert (value(metrics, "steps"), value(metrics, "job_bytes"), value(metrics, "free_bytes")) == (
        5,
        900,
        5000,
    )
    assert (value(metrics, "leases"), value(metrics, "explorers_alive")) == (2, 3)


def test_errors_are_counted_by_code(metrics):
    tell(metrics, event_names.OPERATION_FAILED, code="io")
    tell(metrics, event_names.JOB_DISAPPEARED, code="job_missing")
    tell(metrics, event_names.CONFIG_REJECTED, code="config")
    assert [value(metrics, "errors_total", code=code) for code in ("io", "job_missing", "config")] == [
        1,
        1,
        1,
    ]


def test_every_event_is_accepted_without_an_error(metrics):
    for name in event_names.EVENTS - {
        event_names.EXPLORER_LAG_CHANGED,
        event_names.ENGINE_REPORTED,
        event_names.EXPLORER_DIED,
        event_names.EXPLORER_LEFT,
        event_names.SCAN_COMPLETED,
    }:
        tell(metrics, name, step=1)


def test_the_endpoint_serves_metrics_on_loopback(metrics):
    port = metrics.serve(0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    assert 'syncd_is_leader{directory="/ckpt/job"} 0.0' in text
    assert "_created" not in text


def test_a_taken_port_is_a_configuration_error(metrics):
    port = metrics.serve(0)
    with pytest.raises(ConfigError, match=f"no metrics on 127.0.0.1:{port}") as raised:
        Metrics.start(port, "127.0.0.1", "")
    assert raised.value.hint == f"ss -ltnp 'sport = :{port}'"


def test_metrics_without_the_library_are_refused_with_a_hint(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError) as raised:
        Metrics()
    assert raised.value.hint == install_command("metrics")


def test_the_directory_label_is_set_from_the_first_event(tmp_path):
    metrics = Metrics.start(0, "", str(tmp_path / "m.prom"))
    tell(metrics, event_names.DAEMON_STARTED, job="/ckpt/job")
    metrics.close()
    assert 'syncd_is_leader{directory="/ckpt/job"} 0.0' in (tmp_path / "m.prom").read_text()


def test_the_textfile_is_replaced_atomically_and_not_too_often(metrics, tmp_path):
    path = tmp_path / "job.prom"
    metrics.write_to(str(path))
    tell(metrics, event_names.LEADERSHIP_ACQUIRED, term=1)
    first = path.stat().st_ino
    for _ in range(50):
        tell(metrics, event_names.SCAN_COMPLETED, seconds=0.1, full=False)
    assert path.stat().st_ino == first
    tell(metrics, event_names.DAEMON_STOPPED)
    assert path.stat().st_ino != first
    assert 'syncd_is_leader{directory="/ckpt/job"} 0.0' in path.read_text()
    assert os.listdir(tmp_path) == ["job.prom"]


def test_a_textfile_that_cannot_be_written_is_counted(metrics, tmp_path):
    metrics.write_to(str(tmp_path / "none" / "job.prom"))
    tell(metrics, event_names.LEADERSHIP_ACQUIRED, term=1)
    assert value(metrics, "textfile_errors_total") == 1


def test_the_documented_metrics_are_exactly_the_exported_ones(metrics):
    documented = set(re.findall(r"^\| `syncd_(\w+)` ", (DOCS / "metrics.md").read_text(), re.MULTILINE))
    there = {
        f"{metric.name}_total" if metric.type == "counter" else metric.name
        for metric in metrics.registry.collect()
    }
    assert {f"syncd_{name}" for name in documented} == there


def test_a_job_whose_path_is_no_utf_8_has_metrics(tmp_path):
    for metrics in (Metrics("/j\udcff"), Metrics()):
        metrics.write_to(str(tmp_path / "job.prom"))
        tell(metrics, event_names.DAEMON_STARTED, job="/j\udcff")
        metrics.close()
        assert 'directory="/j\\\\udcff"' in (tmp_path / "job.prom").read_text()
