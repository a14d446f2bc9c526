"""MLflow through its client alone (`mlflow-skinny`): files below the job directory, or a tracking server.

Options: `tracking_uri` (MLFLOW_TRACKING_URI, else files in JOB/monitors/mlflow), `experiment` (the project).
A restart continues in the same run, found by the tag `syncd.job`. Rollouts are artifacts, a JSON file a step.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from trainer.monitors.base import MonitoredRun, RolloutSample, check_options, job_identity, monitor_directory

JOB_TAG = "syncd.job"
GROUP_TAG = "syncd.group"

_REFUSED = re.compile(r"[^\w.\- :/]")
"""What names may not have; what users call parts of rewards and tools may."""

_LONGEST = 250  # characters of a name
_MAX_VALUE = 500
_PARAMS_AT_ONCE = 100  # what servers take: characters of a parameter, and parameters of one request


class MLflow:
    def __init__(self, run: MonitoredRun) -> None:
        check_options(run.options, {"tracking_uri": str, "experiment": str}, "mlflow")
        self._run = run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        (client, run_id), now = self._opened, time.time_ns() // 1_000_000
        rows = [Metric(_taken(name), value, now, step) for name, value in metrics.items()]
        client.log_batch(run_id, metrics=rows)

    def log_rollouts(self, rollouts: Sequence[RolloutSample], step: int) -> None:
        client, run_id = self._opened
        rows = [asdict(rollout) for rollout in rollouts]
        client.log_dict(run_id, {"step": step, "rollouts": rows}, f"rollouts/{step:08d}.json")

    def close(self) -> None:
        if "_opened" in vars(self):
            client, run_id = self._opened
            client.set_terminated(run_id)

    @cached_property
    def _opened(self) -> tuple[MlflowClient, str]:
        client = MlflowClient(tracking_uri=_uri(self._run))
        return client, _run_id(client, self._run)


def _taken(name: str) -> str:
    """Return a name that MLflow takes: it refuses all metrics of a step for one like `reward/parts/pass@1`."""
    parts = [part for part in _REFUSED.sub("_", name).split("/") if part.strip(".")]
    return "/".join(parts)[:_LONGEST]


def _uri(run: MonitoredRun) -> str:
    asked = run.options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")
    if asked:
        return str(asked)
    # MLflow needs this to write files; its databases are not safe on network mounts.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return Path(monitor_directory(run.directory, "mlflow")).as_uri()


def _run_id(client: MlflowClient, run: MonitoredRun) -> str:
    name, job = run.options.get("experiment") or run.project, job_identity(run.directory)
    existing = client.get_experiment_by_name(name)
    experiment = existing.experiment_id if existing else client.create_experiment(name)
    earlier = client.search_runs([experiment], filter_string=f"tags.`{JOB_TAG}` = '{job}'", max_results=1)
    if earlier:
        client.update_run(earlier[0].info.run_id, status="RUNNING")
        return str(earlier[0].info.run_id)
    tags = {JOB_TAG: job} | ({GROUP_TAG: run.group} if run.group else {})
    created = client.create_run(experiment, run_name=run.name, tags=tags)
    _log_config(client, created.info.run_id, run.config)
    return str(created.info.run_id)


def _log_config(client: MlflowClient, run_id: str, config: Mapping[str, Any]) -> None:
    params = (Param(name, str(value)[:_MAX_VALUE]) for name, value in _flat(config))
    while some := list(islice(params, _PARAMS_AT_ONCE)):
        client.log_batch(run_id, params=some)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
