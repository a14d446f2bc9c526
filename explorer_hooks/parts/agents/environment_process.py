"""A process that plays episodes of an environment of `verifiers`, several at the same time."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from explorer_hooks.parts.agents import verifiers_worker
from explorer_hooks.parts.agents.agent_variables import agent_environment
from explorer_hooks.run.worker_process import WorkerAnswer, WorkerProcess
from syncd.errors import ConfigError

if TYPE_CHECKING:
    from concurrent.futures import Future

START = 600.0  # seconds that an environment may take to load, with its data set
GRACE = 15.0  # seconds beyond its time that an episode may take to end; then its process is killed
MOST = 1 << 30  # bytes of an answer; the first one names all tasks

_LOOK = 0.2


@dataclass(frozen=True, slots=True)
class EnvironmentSettings:
    name: str  # the environment
    options: Mapping[str, Any]  # what verifiers configures it with
    select: Mapping[str, Any]  # which of its tasks are played
    python: str  # the interpreter that has verifiers; empty for this one
    directories: Sequence[str]  # directories in which its module is looked for
    # Names of variables of this process that it gets besides those of `agent_environment`.
    passed: Sequence[str] = ()


class EnvironmentProcess(WorkerProcess):
    """A process with a loaded environment, which is not waited for once `stop` returns true."""

    def __init__(self, settings: EnvironmentSettings, stop: Callable[[], bool]) -> None:
        python = settings.python or sys.executable
        paths = [*settings.directories, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**agent_environment(os.environ, settings.passed), "PYTHONPATH": os.pathsep.join(paths)}
        try:
            super().__init__([python, "-P", verifiers_worker.__file__], MOST, environment)
        except OSError as error:
            text, hint = (
                f"cannot start {python}: {error.strerror}",
                "explorer.agent.python names an interpreter",
            )
            raise ConfigError(text, hint=hint) from error
        asked = {"environment": settings.name, "options": settings.options, "select": settings.select}
        self.say(asked, START)
        answer = _loaded(self.first, stop)
        if "tasks" not in answer:
            self.kill()
            raise ConfigError(
                f"the environment {settings.name} cannot be played: {answer['problem']}",
                hint=answer.get("hint"),
            )
        self.tasks: Sequence[Mapping[str, str]] = answer["tasks"]

    def play(self, asked: Mapping[str, Any], timeout: float) -> WorkerAnswer:
        """Return the answer to a request for an episode; without one in `timeout` seconds the process is killed."""
        try:
            return self.ask({"timeout": timeout, **asked}, timeout + GRACE)
        except TimeoutError:
            return {"problem": f"it took more than {timeout:g} s, and its process was killed"}


def _loaded(loading: "Future[WorkerAnswer]", stop: Callable[[], bool]) -> WorkerAnswer:
    end = time.monotonic() + START
    while time.monotonic() < end:
        with contextlib.suppress(TimeoutError):
            return loading.result(_LOOK)
        if stop():
            return {"problem": "told to stop"}
    return {"problem": f"it was not loaded after {START:g} s"}
