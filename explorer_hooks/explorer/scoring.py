"""Scores rollouts: built-in functions here, others in processes of their own that can be ended when they hang."""

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

Call = tuple[str, str, Mapping[str, Any]]
"""Prompt, response and task of one rollout."""


class Scorer(Protocol):
    """Scores rollouts."""

    def score(self, calls: Sequence[Call]) -> list[Score]:
        """Return a score for each call, in order; never raises for what a function does."""

    def close(self) -> None:
        """End what was started."""


def scorer(function: str, *, timeout: float, workers: int, places: Sequence[str] = ()) -> Scorer:
    """Return what scores with a function.

    Args:
        function: A built-in function's name, or `package.module:function`.
        timeout: Seconds that one call may take.
        workers: Processes for a function that is not built in.
        places: Directories in which its module is looked for besides those of Python.

    Raises:
        ConfigError: It cannot be imported.
    """
    if function in BUILT_IN:
        return Inside(function)
    return Outside(function, timeout, workers, places)


class Inside:
    """Scores with a built-in function, in this process.

    Args:
        function: Its name.
    """

    def __init__(self, function: str) -> None:
        self._function = BUILT_IN[function]

    def score(self, calls: Sequence[Call]) -> list[Score]:
        """Return a score for each call."""
        return [score_of(self._function(*call)) for call in calls]

    def close(self) -> None:
        """Do nothing."""


class Outside:
    """Scores with a function of one's own, in processes that are replaced when a call hangs or ends them.

    Args:
        function: `package.module:function`.
        timeout: Seconds that one call may take.
        workers: Processes.
        places: Directories in which its module is looked for.

    Raises:
        ConfigError: It cannot be imported.
    """

    def __init__(self, function: str, timeout: float, workers: int, places: Sequence[str]) -> None:
        self._free: SimpleQueue[Worker] = SimpleQueue()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._workers = [Worker(function, timeout, places) for _ in range(workers)]
        try:
            self._workers[0].start()
        except BaseException:
            self.close()
            raise
        for worker in self._workers:
            self._free.put(worker)

    def score(self, calls: Sequence[Call]) -> list[Score]:
        """Return a score for each call, in order."""
        return list(self._pool.map(self._one, calls))

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _one(self, call: Call) -> Score:
        worker = self._free.get()  # there are as many threads as workers, so one is free
        try:
            return worker.score(call)
        finally:
            self._free.put(worker)


class Worker:
    """One process that scores, started when it is needed.

    Args:
        function: `package.module:function`.
        timeout: Seconds that one call may take.
        places: Directories in which its module is looked for.
    """

    def __init__(self, function: str, timeout: float, places: Sequence[str]) -> None:
        self._function, self._timeout, self._places = function, timeout, tuple(places)
        self._lock = threading.Lock()
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._stopped = False

    def start(self) -> Connection:
        """Return the way to the process, started where it is not there.

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
            process = context.Process(target=_serve, args=(theirs, self._function, self._places), daemon=True)
            process.start()
            theirs.close()
            self._process, self._pipe = process, ours
        problem = self._answer(ours, START)
        if problem != "":
            self._end()
            what = problem if isinstance(problem, str) else "it took too long, or ended its process"
            raise ConfigError(f"the reward function {self._function} cannot be used: {what}")
        return ours

    def score(self, call: Call) -> Score:
        """Return the score of one call."""
        try:
            pipe = self.start()
            pipe.send(call)
        except (OSError, ValueError, TypeError, ConfigError) as error:
            self._end()
            return Score(None, problem=f"it could not be called: {error}"[:_SHOWN])
        answer = self._answer(pipe, self._timeout)
        if isinstance(answer, Score):
            return answer
        self._end()
        return Score(None, problem=answer or f"it took more than {self._timeout:g} s")

    def stop(self) -> None:
        """End the process for good."""
        self._stopped = True
        self._end()

    def _answer(self, pipe: Connection, timeout: float) -> Any:
        """Return what the process answers, None where it does not in time, a text where it has ended."""
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


def _serve(pipe: Connection, function: str, places: Sequence[str]) -> None:
    """Score what comes, until the other side has gone. This is the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the explorer ends it
    os.dup2(2, 1)  # what a function prints is no output of the explorer
    try:
        called = _imported(function, places)
    except Exception as error:  # noqa: BLE001 - whatever an import does is the user's to see
        pipe.send(f"{type(error).__name__}: {error}"[:_SHOWN])
        return
    pipe.send("")
    with contextlib.suppress(EOFError, OSError):
        while True:
            prompt, response, task = pipe.recv()
            pipe.send(_scored(called, prompt, response, task))


def _imported(function: str, places: Sequence[str]) -> Any:
    sys.path[:0] = [place for place in places if place not in sys.path]
    module, _, name = function.partition(":")
    return attrgetter(name)(importlib.import_module(module))


def _scored(called: Any, prompt: str, response: str, task: Mapping[str, Any]) -> Score:
    try:
        return score_of(called(prompt=prompt, response=response, task=task))
    except Exception as error:  # noqa: BLE001 - a function that raises costs its group, never the run
        return Score(None, problem=f"{type(error).__name__}: {error}"[:_SHOWN])
