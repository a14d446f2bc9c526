"""Runs with monitors, for tests of monitors."""

from contextlib import contextmanager

from syncd.jobfile.model import JobFile
from trainer.monitors.base import RolloutSample
from trainer.monitors.several import Monitors

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
