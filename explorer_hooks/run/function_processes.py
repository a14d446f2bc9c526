"""Calls a function of the user in processes that can be killed if it hangs."""

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from explorer_hooks.run.function_worker import SHOWN
from explorer_hooks.run.rewards import Score, rebuilt
from explorer_hooks.run.worker_process import WorkerProcess
from explorer_hooks.strict_json import member
from syncd.errors import ConfigError

START = 120.0  # seconds that a process may take to import a function
MOST = 16 << 20  # bytes of what it answers, as JSON

_ARGV = (sys.executable, "-P", "-m", "explorer_hooks.run.function_worker")


@dataclass(frozen=True, slots=True)
class Signature:
    names: tuple[str, ...] = ()
    required: tuple[str, ...] = ()  # those without a default
    takes_any: bool = False  # whether it takes any other, too


class FunctionProcesses:
    """Calls a function in processes that are replaced if a call hangs or kills them.

    Args:
        function: `package.module:function`.
        timeout: Seconds that one call may take.
        directories: Directories in which its module is looked for.
        environment: All variables of the processes; None for those of this one.
    """

    def __init__(
        self,
        function: str,
        timeout: float,
        workers: int,
        directories: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._free: SimpleQueue[FunctionProcess] = SimpleQueue()
        self._workers = [FunctionProcess(function, timeout, directories, environment) for _ in range(workers)]
        try:
            self._workers[0].start()
        except BaseException:
            self.close()
            raise
        self.signature = self._workers[0].signature
        for worker in self._workers:
            self._free.put(worker)

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()

    def call(self, arguments: Mapping[str, Any], count: int | None = None) -> list[Score]:
        """Return what the function says, `count` scores as a list or one if None; wait for a free process."""
        worker = self._free.get()
        try:
            return worker.scores(arguments, count)
        finally:
            self._free.put(worker)


class FunctionProcess:
    """A process that calls a function, started when it is needed, and replaced once a call has spoilt it."""

    def __init__(
        self,
        function: str,
        timeout: float,
        directories: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._function, self._timeout, self._directories = function, timeout, list(directories)
        self._environment = environment
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._stopped = False
        self.signature = Signature()

    def start(self) -> WorkerProcess:
        with self._lock:
            if self._process is not None and self._process.is_running:
                return self._process
            if self._stopped:
                raise ConfigError("the scorer is closed")
            try:
                process = self._process = WorkerProcess(_ARGV, MOST, self._environment)
            except OSError as error:
                raise ConfigError(f"cannot start {sys.executable}: {error.strerror}") from error
        try:
            process.say({"function": self._function, "directories": self._directories}, START)
            self.signature = _signature(process.first.result(START))
        except (TimeoutError, ValueError) as error:
            process.kill()
            what = "its import took too long" if isinstance(error, TimeoutError) else error
            raise ConfigError(f"the function {self._function} cannot be used: {what}") from None
        return process

    def scores(self, arguments: Mapping[str, Any], count: int | None) -> list[Score]:
        """Return what one call says; the same problem for each response if there are several."""
        try:
            process = self.start()
        except ConfigError as error:
            return _failed(error.message, count)
        try:
            answer = process.ask({"arguments": dict(arguments), "count": count}, self._timeout)
        except TimeoutError:
            return _failed(f"it took more than {self._timeout:g} s", count)
        except (TypeError, ValueError, RecursionError) as error:
            return _failed(f"it could not be called: {error}", count)
        try:
            return _scores(answer, 1 if count is None else count)
        except ValueError as error:
            process.kill()
            return _failed(str(error), count)

    def stop(self) -> None:
        with self._lock:
            self._stopped, process = True, self._process
        if process is not None:
            process.kill()


def _failed(problem: str, count: int | None) -> list[Score]:
    return [Score(None, problem=problem[:SHOWN])] * (1 if count is None else count)


def _signature(answer: Mapping[str, Any]) -> Signature:
    if problem := answer.get("problem"):
        raise ValueError(str(problem))
    names, required = (member(answer, key, list) for key in ("names", "required"))
    return Signature(tuple(map(str, names)), tuple(map(str, required)), answer.get("takes_any") is True)


def _scores(answer: Mapping[str, Any], count: int) -> list[Score]:
    if problem := answer.get("problem"):
        raise ValueError(str(problem))
    scores = member(answer, "scores", list)
    if len(scores) != count:
        raise ValueError(f"its process wrote {len(scores)} scores where {count} are expected")
    return [rebuilt(score) for score in scores]
