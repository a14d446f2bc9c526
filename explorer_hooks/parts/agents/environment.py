"""An environment of `verifiers` that plays rollouts: its own tasks, tools and rewards."""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from explorer_hooks.parts.agents.environment_process import EnvironmentProcess, EnvironmentSettings
from explorer_hooks.run.rewards import Score, rebuilt
from explorer_hooks.tasks.order import NamedSet, Tasks
from explorer_hooks.tasks.task import ReadTasks, Task
from syncd.errors import ConfigError
from syncd.protocol.digest import hasher


class EnvironmentPlayer:
    """Plays episodes, each in one of several processes; processes that have ended are replaced.

    An episode may take `timeout` seconds; once `stop` returns true, processes are not waited for.
    """

    def __init__(
        self,
        settings: EnvironmentSettings,
        timeout: float,
        processes: int,
        model: str,
        stop: Callable[[], bool],
    ) -> None:
        self._settings, self._timeout, self._model, self._stop = settings, timeout, model, stop
        self._turns = itertools.count()
        self._locks = [threading.Lock() for _ in range(processes)]
        first = EnvironmentProcess(settings, stop)
        self._processes: list[EnvironmentProcess | None] = [first, *[None] * (processes - 1)]
        self._tasks = first.tasks
        self._is_closed = False

    @property
    def tasks(self) -> Tasks:
        """The tasks of the environment; `place` of each is where it is among them."""
        digest = hasher()
        for task in self._tasks:
            digest.update(f"{task['digest']}\n".encode())
        made = (Task(task["id"], task["id"], None, {"place": at}) for at, task in enumerate(self._tasks))
        read = ReadTasks(digest.hexdigest(), tuple(made))
        return Tasks((NamedSet(self._settings.name, read, 1.0),))

    def play(self, url: str, sessions: Sequence[str], task: Mapping[str, Any]) -> list[Score]:
        try:
            process = self._running(next(self._turns) % len(self._processes))
        except ConfigError as error:
            return [Score(None, problem=error.message)] * len(sessions)
        asked = {
            "task": task["place"],
            "base_url": f"{url}/v1",
            "sessions": list(sessions),
            "model": self._model,
        }
        answer = process.play(asked, self._timeout)
        rollouts = answer.get("rollouts")
        if "problem" in answer or not isinstance(rollouts, list) or len(rollouts) != len(sessions):
            problem = str(answer.get("problem", "its process wrote what are no rewards"))
            return [Score(None, problem=problem)] * len(sessions)
        return [rebuilt(rollout) for rollout in rollouts]

    def close(self) -> None:
        self._is_closed = True
        for process in filter(None, self._processes):
            process.close()

    def _running(self, number: int) -> EnvironmentProcess:
        with self._locks[number]:
            process = self._processes[number]
            if process is not None and process.is_running:
                return process
            if self._is_closed:
                raise ConfigError("the environment is closed")
            process = EnvironmentProcess(self._settings, self._stop)
            if process.tasks != self._tasks:
                process.close()
                raise ConfigError("the environment has other tasks each time that it is loaded")
            self._processes[number] = process
            return process
