"""trackio: a local database below the job directory, or a Space or server. Works without network.

Options: `dir` (TRACKIO_DIR, else JOB/monitors/trackio), `space_id`, `server_url`. A restart continues in the run
of the same name. trackio reads its directory from the environment once, when it is imported: not before `__init__`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cached_property
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from syncd.errors import ConfigError
from trainer.monitors.base import MonitoredRun, RolloutSample, check_options, monitor_directory

if TYPE_CHECKING:
    from trackio.run import Run as TrackioRun

if find_spec("trackio") is None:
    raise ModuleNotFoundError("No module named 'trackio'", name="trackio")

OPTIONS = {"dir": str, "space_id": str, "server_url": str}

COLUMNS = [each.name for each in fields(RolloutSample)]


class Trackio:
    def __init__(self, run: MonitoredRun) -> None:
        check_options(run.options, OPTIONS, "trackio")
        self._run = run
        default = os.environ.get("TRACKIO_DIR") or monitor_directory(run.directory, "trackio")
        self._directory: str = run.options.get("dir") or default
        os.environ["TRACKIO_DIR"] = self._directory

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._opened.log(dict(metrics), step=step)

    def log_rollouts(self, rollouts: Sequence[RolloutSample], step: int) -> None:
        rows = [list(asdict(rollout).values()) for rollout in rollouts]
        table = self._library().Table(columns=COLUMNS, data=rows)
        self._opened.log({"rollouts": table}, step=step)

    def close(self) -> None:
        if "_opened" in vars(self):
            self._opened.finish()  # type: ignore[no-untyped-call]

    @cached_property
    def _opened(self) -> "TrackioRun":
        run: TrackioRun = self._library().init(**self._arguments())
        return run

    def _library(self) -> ModuleType:
        import trackio  # noqa: PLC0415 -- after its directory is known
        from trackio.utils import TRACKIO_DIR  # noqa: PLC0415

        if os.fspath(TRACKIO_DIR) != self._directory:
            raise ConfigError(
                "trackio was imported before the job's directory was known, and writes to another one",
                path=TRACKIO_DIR,
                hint=f"TRACKIO_DIR={self._directory} in the environment",
            )
        return trackio

    def _arguments(self) -> dict[str, Any]:
        return {
            "project": self._run.project,
            "name": self._run.name,
            "group": self._run.group or None,
            "config": dict(self._run.config),
            "resume": "allow",
            "embed": False,
            "auto_log_gpu": False,
            "auto_log_cpu": False,
            "space_id": self._run.options.get("space_id"),
            "server_url": self._run.options.get("server_url"),
        }
