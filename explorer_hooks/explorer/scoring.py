"""Scores responses: built-in functions in this process, others in processes that can be killed if they hang."""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from operator import attrgetter
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from explorer_hooks.explorer.rewards import BUILT_IN, Score, score_of
from syncd.errors import ConfigError

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

START = 120.0
"""Seconds that a process may take to import a reward function."""

_END = 5.0
_SHOWN = 300

ScoreCall = tuple[str, str, Mapping[str, Any]]
"""Prompt, response and task."""


class Scorer(Protocol):
    """Scores responses."""

    def score(self, calls: Sequence[ScoreCall]) -> list[Score]:
        """Return a score for each call, in order; a function that fails gives a score without a reward."""

    def close(self) -> None:
        """End the processes."""


def open_scorer(function: str, *, timeout: float, workers: int, directories: Sequence[str] = ()) -> Scorer:
    """Return a scorer that calls a function.

    Args:
        function: A built-in function's name, or `package.module:function`.
        timeout: Seconds that one call may take.
        workers: Processes for a function that is not built in.
        directories: Directories in which its module is looked for besides those of Python.

    Raises:
        ConfigError: It cannot be imported.
    """
    if function in BUILT_IN:
        return BuiltInScorer(function)
    return ProcessScorer(function, timeout, workers, directories)


class BuiltInScorer:
    """Scores with a built-in function, in this process.

    Args:
        function: Its name.
    """

    def __init__(self, function: str) -> None:
        self._function = BUILT_IN[function]

    def score(self, calls: Sequence[ScoreCall]) -> list[Score]:
        """Return a score for each call."""
        return [score_of(self._function(*call)) for call in calls]

    def close(self) -> None:
        """Do nothing."""


class ProcessScorer:
    """Scores with the user's function, in processes that are replaced if a call hangs or kills them.

    Args:
        function: `package.module:function`.
        timeout: Seconds that one call may take.
        workers: Processes.
        directories: Directories in which its module is looked for.

    Raises:
        ConfigError: It cannot be imported.
    """

    def __init__(self, function: str, timeout: float, workers: int, directories: Sequence[str]) -> None:
        self._free: SimpleQueue[ScoringProcess] = SimpleQueue()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._workers = [ScoringProcess(function, timeout, directories) for _ in range(workers)]
        try:
            self._workers[0].start()
        except BaseException:
            self.close()
            raise
        for worker in self._workers:
            self._free.put(worker)

    def score(self, calls: Sequence[ScoreCall]) -> list[Score]:
        """Return a score for each call, in order."""
        names = ("prompt", "response", "task")
        return list(self._pool.map(self.call, [dict(zip(names, call, strict=True)) for call in calls]))

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def call(self, given: Mapping[str, Any]) -> Score:
        """Return the score of one call of the function, with these arguments; wait for a free process."""
        worker = self._free.get()
        try:
            return worker.score(given)
        finally:
            self._free.put(worker)


class ScoringProcess:
    """A process that scores, started when it is needed.

    Args:
        function: `package.module:function`.
        timeout: Seconds that one call may take.
        directories: Directories in which its module is looked for.
    """

    def __init__(self, function: str, timeout: float, directories: Sequence[str]) -> None:
        self._function, self._timeout, self._directories = function, timeout, tuple(directories)
        self._lock = threading.Lock()
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._stopped = False

    def start(self) -> Connection:
        """Return the pipe to the process, which is started unless it runs.

        Raises:
            ConfigError: The function cannot be imported.
        """
        with self._lock:
            if self._pipe is not None:
                return self._pipe
            if self._stopped:
                raise ConfigError("the scorer is closed")
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, self._function, self._directories), daemon=True
            )
            process.start()
            theirs.close()
            self._process, self._pipe = process, ours
        problem = self._answer(ours, START)
        if problem != "":
            self._end()
            what = problem if isinstance(problem, str) else "the import took too long, or ended its process"
            raise ConfigError(f"the reward function {self._function} cannot be used: {what}")
        return ours

    def score(self, given: Mapping[str, Any]) -> Score:
        """Return the score of one call, with these arguments."""
        try:
            pipe = self.start()
            pipe.send(given)
        except (OSError, ValueError, TypeError, ConfigError) as error:
            self._end()
            return Score(None, problem=f"it could not be called: {error}"[:_SHOWN])
        answer = self._answer(pipe, self._timeout)
        if isinstance(answer, Score):
            return answer
        self._end()
        return Score(None, problem=answer or f"it took more than {self._timeout:g} s")

    def stop(self) -> None:
        """End the process, and start no other."""
        self._stopped = True
        self._end()

    def _answer(self, pipe: Connection, timeout: float) -> Any:
        """Return the process's answer, None if it did not answer in time, a text if it has ended."""
        try:
            return pipe.recv() if pipe.poll(timeout) else None
        except (EOFError, OSError):
            return "it ended its process"

    def _end(self) -> None:
        with self._lock:
            process, self._process, pipe, self._pipe = self._process, None, self._pipe, None
        if pipe is not None:
            pipe.close()
        if process is not None:
            process.kill()
            process.join(_END)


def _serve(pipe: Connection, function: str, directories: Sequence[str]) -> None:
    """Score calls until the other side is gone. This is the process's main function."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the explorer ends this process
    os.dup2(2, 1)  # what a function prints must not mix with the explorer's output
    try:
        called = _imported(function, directories)
    except Exception as error:  # noqa: BLE001 - the user sees any error of the import
        pipe.send(f"{type(error).__name__}: {error}"[:_SHOWN])
        return
    pipe.send("")
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(_scored(called, pipe.recv()))


def _imported(function: str, directories: Sequence[str]) -> Any:
    sys.path[:0] = [directory for directory in directories if directory not in sys.path]
    module, _, name = function.partition(":")
    return attrgetter(name)(importlib.import_module(module))


def _scored(called: Any, given: Mapping[str, Any]) -> Score:
    try:
        return score_of(called(**given))
    except Exception as error:  # noqa: BLE001 - a function that raises costs its group, not the run
        return Score(None, problem=f"{type(error).__name__}: {error}"[:_SHOWN])
