"""Weights & Biases. Without network: `mode = "offline"`, or WANDB_MODE=offline; `wandb sync` sends it later.

Options: `mode` (online, offline, disabled), `entity`, `notes`, `tags`, `dir` (JOB/monitors/wandb unless given).
A restart continues in the same run, whose id is kept in JOB/monitors/id. Curves are drawn over `step`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cached_property
from typing import Any

import wandb

from trainer.monitors.base import MonitoredRun, RolloutSample, check_options, job_identity, monitor_directory

OPTIONS = {"mode": str, "entity": str, "notes": str, "tags": list, "dir": str}

COLUMNS: list[str | int] = [each.name for each in fields(RolloutSample)]


class WandB:
    def __init__(self, run: MonitoredRun) -> None:
        check_options(run.options, OPTIONS, "wandb")
        self._run = run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._opened.log({"step": step, **metrics})

    def log_rollouts(self, rollouts: Sequence[RolloutSample], step: int) -> None:
        rows = [list(asdict(rollout).values()) for rollout in rollouts]
        self._opened.log({"step": step, "rollouts": wandb.Table(columns=COLUMNS, data=rows)})

    def close(self) -> None:
        if "_opened" in vars(self):
            self._opened.finish()
            wandb.teardown()  # only then has W&B's own process written all of the file

    @cached_property
    def _opened(self) -> wandb.Run:
        run = wandb.init(**self._arguments())
        # W&B's own step cannot go back; this axis can, and a resume that repeats steps loses none.
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run

    def _arguments(self) -> dict[str, Any]:
        options = dict(self._run.options)
        directory = options.pop("dir", None) or monitor_directory(self._run.directory, "wandb")
        os.makedirs(directory, exist_ok=True)
        return {
            "id": job_identity(self._run.directory),
            "resume": "allow",
            "project": self._run.project,
            "group": self._run.group or None,
            "name": self._run.name,
            "config": dict(self._run.config),
            "dir": directory,
            "settings": _settings(),
            **options,
        }


def _settings() -> wandb.Settings:
    """Quiet, and nothing that was not asked for: no capture of the terminal, no code, no host's figures."""
    return wandb.Settings(
        console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
    )
